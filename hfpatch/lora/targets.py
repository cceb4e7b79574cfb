"""Which modules LoRA should adapt in this model, as the shortest spec that PEFT turns into exactly these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hfpatch.errors import InputError
from hfpatch.given import FLAG, TEXT, optional, want
from hfpatch.lora.matrices import Matrix, Reading, check_scope
from hfpatch.lora.names import Namer
from hfpatch.model.walk import starred
from hfpatch.report import Sheet


@dataclass(frozen=True)
class Coverage:
    """How much of the blocks the adapted matrices are.

    Attributes:
        weights: Weights of the adapted matrices in blocks.
        of_weights: Weights of all matrices in the blocks of the scope: linear maps, routers, routed experts.
        layers: Blocks with at least one adapted matrix.
        of_layers: Blocks.
        of_experts: Weights of the routed experts among `of_weights`.
    """

    weights: int
    of_weights: int
    layers: int
    of_layers: int
    of_experts: int = 0

    @property
    def percent(self) -> float:
        """Share of the blocks' weights, in percent; 0 where there are no blocks."""
        return 100 * self.weights / self.of_weights if self.of_weights else 0.0

    def __str__(self) -> str:
        if not self.of_layers:
            return "outside all blocks"
        text = f"{_percent(self.percent)} of block weights, {self.layers} of {self.of_layers} layers"
        if self.of_experts and self.of_weights - self.of_experts < self.of_weights:
            text += f" (routed experts are {_percent(100 * self.of_experts / self.of_weights)})"
        return text


def _percent(value: float) -> str:
    shown = f"{value:.0f}" if value in (0, 100) else f"{min(value, 99.9):.1f}"
    return f"{shown}%"


@dataclass(frozen=True)
class LeftOut:
    """Matrices of the scope that are not adapted, with the reason."""

    path: str
    count: int
    reason: str


@dataclass(frozen=True)
class LoraTargets:
    """What to tell PEFT, and what it comes to. Printing it shows a table.

    Attributes:
        model: Class of the model.
        scope: What was asked for.
        target_modules: For `LoraConfig`: names, or one regular expression.
        target_parameters: For `LoraConfig`: parameters that are adapted (experts; maps that no name reaches).
        exclude_modules: For `LoraConfig`: a regular expression; None where nothing has to be excluded.
        modules: Whole paths of the linear maps meant, those reached through a parameter included.
        parameters: Whole paths of the parameters meant.
        through_parameters: Linear maps that PEFT reaches only by their weight parameter, which takes no dropout.
        coverage: Share of the blocks' weights and layers.
        left_out: What is not adapted, and why.
        fan_in_fan_out: Whether the maps are GPT-2's Conv1D.
    """

    model: str
    scope: str
    target_modules: tuple[str, ...] | str
    target_parameters: tuple[str, ...]
    exclude_modules: str | None
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    through_parameters: tuple[str, ...]
    coverage: Coverage
    left_out: tuple[LeftOut, ...]
    fan_in_fan_out: bool

    def kwargs(self) -> dict[str, Any]:
        """Arguments for `peft.LoraConfig`."""
        names = self.target_modules
        words: dict[str, Any] = {"target_modules": names if isinstance(names, str) else list(names)}
        if self.target_parameters:
            words["target_parameters"] = list(self.target_parameters)
        if self.exclude_modules is not None:
            words["exclude_modules"] = self.exclude_modules
        if self.fan_in_fan_out:
            words["fan_in_fan_out"] = True
        return words

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "model": self.model,
            "scope": self.scope,
            **self.kwargs(),
            "modules": list(self.modules),
            "parameters": list(self.parameters),
            "coverage": {"percent": self.coverage.percent, **vars(self.coverage)},
            "left_out": [vars(out) for out in self.left_out],
        }

    def sheet(self) -> Sheet:
        """As a table."""
        counts: dict[str, int] = {}
        for path in (*self.modules, *self.parameters):
            counts[starred(path)] = counts.get(starred(path), 0) + 1
        rows = [("adapted", path, str(count), "") for path, count in counts.items()]
        rows += [("left out", out.path, str(out.count), out.reason) for out in self.left_out]
        notes = [f"{name}={value!r}" for name, value in self.kwargs().items()]
        if self.through_parameters:
            notes.append(THROUGH)
        title = f"LoRA targets of {self.model}, scope {self.scope}: {self.coverage}"
        return Sheet(title, ("", "where", "count", "why"), tuple(rows), tuple(notes), wide=("where", "why"))

    def __str__(self) -> str:
        return self.sheet().to_text()

    def _repr_html_(self) -> str:
        return self.sheet().to_html()


THROUGH = (
    "PEFT reads names such as gate_proj as the routed experts in this architecture, so linear maps of that name "
    "are adapted through their weight parameter, which takes no lora_dropout"
)


def lora_targets(
    model: object,
    scope: str = "language",
    *,
    experts: bool = False,
    router: bool = False,
    submodel: str | None = None,
) -> LoraTargets:
    """The modules LoRA should adapt, told from the model's structure.

    By default every linear map of the language model's blocks: attention, MLP, shared experts, linear
    attention; no routed experts, router, head, embedding, tower or projector. Maps that PEFT refuses or that
    the model's code passes by are left out, with the reason. Changes nothing.

    Args:
        model: A module, however wrapped or quantised, with adapters or without; or a Trainer.
        scope: language | vision | audio | projector | all.
        experts: Also the routed experts (in transformers 5 stacked parameters, so `target_parameters`).
        router: Also what chooses the experts.
        submodel: Path or architecture of the language model meant, where there are several.

    Returns:
        The spec for `LoraConfig`, the whole paths it stands for, and the coverage. Prints as a table.

    Raises:
        InputError: No such scope, no language model, or nothing of that scope in this model.
    """
    want("lora_targets", scope=(scope, TEXT), experts=(experts, FLAG), router=(router, FLAG))
    want("lora_targets", submodel=(submodel, optional(TEXT)))
    check_scope(scope)
    return targets_of(Reading(model, submodel), scope, experts=experts, router=router)


def targets_of(reading: Reading, scope: str, *, experts: bool = False, router: bool = False) -> LoraTargets:
    """The targets of a model that was read already; see `lora_targets`."""
    matrices = reading.matrices(scope)
    wanted = {"map": True, "routed expert": experts, "router": router}
    chosen = [m for m in matrices if wanted[m.kind] and not m.refusal]
    name = type(reading.frame).__name__
    if not chosen:
        have = ", ".join(s.place for s in reading.survey.submodels) or "no transformers model"
        raise InputError(
            f"scope={scope!r}: {name} has no linear map there that PEFT can adapt (found {have}); "
            "try another scope, or name the language model with submodel="
        )
    modules = tuple(m.path for m in chosen if not m.parameter)
    parameters = tuple(m.path for m in chosen if m.parameter)
    spec = Namer(reading).spec(modules, parameters)
    kinds = {type(reading.places[path].module).__name__ for path in modules}
    return LoraTargets(
        model=name,
        scope=scope,
        target_modules=spec.target_modules,
        target_parameters=spec.target_parameters,
        exclude_modules=spec.exclude_modules,
        modules=modules,
        parameters=parameters,
        through_parameters=spec.through_parameters,
        coverage=coverage_of(reading, matrices, {m.path for m in chosen}),
        left_out=_left_out(matrices, wanted),
        fan_in_fan_out=kinds == {"Conv1D"},
    )


def coverage_of(reading: Reading, matrices: list[Matrix], adapted: set[str]) -> Coverage:
    """Coverage of the blocks that these matrices lie in, by the adapted paths among them."""
    inside = [m for m in matrices if m.block is not None]
    homes = {reading.home(m.block) for m in inside if m.block is not None}
    blocks = {reading.layer(block) for home in homes for block in reading.blocks[home]}
    hit = [m for m in inside if m.path in adapted]
    return Coverage(
        weights=sum(m.weights for m in hit),
        of_weights=sum(m.weights for m in inside),
        layers=len({reading.layer(m.block) for m in hit if m.block is not None}),
        of_layers=len(blocks),
        of_experts=sum(m.weights for m in inside if m.kind == "routed expert"),
    )


def _left_out(matrices: list[Matrix], wanted: dict[str, bool]) -> tuple[LeftOut, ...]:
    unasked = {"routed expert": "routed experts; experts=True adds them", "router": "a router; router=True adds it"}
    counts: dict[tuple[str, str], int] = {}
    for m in matrices:
        reason = unasked[m.kind] if not wanted[m.kind] else m.refusal
        if reason:
            counts[starred(m.path), reason] = counts.get((starred(m.path), reason), 0) + 1
    return tuple(LeftOut(path, count, reason) for (path, reason), count in counts.items())
