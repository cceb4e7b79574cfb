"""The modules that LoRA should adapt in a model, as the shortest target names that PEFT expands to exactly these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hfpatch.errors import InputError
from hfpatch.given import FLAG, TEXT, optional, want
from hfpatch.lora.matrices import Matrix, Reading, check_scope
from hfpatch.lora.names import TargetNames
from hfpatch.model.walk import starred
from hfpatch.report import Sheet, Shown


@dataclass(frozen=True)
class Coverage:
    """The share of the blocks' weights and layers that is adapted.

    Attributes:
        weights: Number of weights in the adapted matrices in blocks.
        of_weights: Number of weights in all matrices of these blocks: linear maps, routers, routed experts.
        layers: Number of layers with at least one adapted matrix.
        of_layers: Number of layers.
        of_experts: Number of the routed experts' weights, included in `of_weights`.
        unused: Number of matrices in these blocks whose output the loss never sees. Neither they nor layers of nothing
            else are counted above.
    """

    weights: int
    of_weights: int
    layers: int
    of_layers: int
    of_experts: int = 0
    unused: int = 0

    @property
    def percent(self) -> float:
        """Adapted share of the blocks' weights, in percent; 0 without blocks."""
        return 100 * self.weights / self.of_weights if self.of_weights else 0.0

    def __str__(self) -> str:
        if not self.of_layers:
            return "outside all blocks"
        text = f"{_percent(self.percent)} of block weights, {self.layers} of {self.of_layers} layers"
        if self.of_experts and self.of_weights - self.of_experts < self.of_weights:
            text += f" (routed experts are {_percent(100 * self.of_experts / self.of_weights)})"
        if self.unused:
            text += f" (not counted: {self.unused} matrices that the loss never sees)"
        return text


def _percent(value: float) -> str:
    shown = f"{value:.0f}" if value in (0, 100) else f"{min(value, 99.9):.1f}"
    return f"{shown}%"


@dataclass(frozen=True)
class LeftOut:
    """Matrices of the scope that are not adapted: path with list indices replaced by `*`, number and reason."""

    path: str
    count: int
    reason: str


@dataclass(frozen=True, repr=False)
class LoraTargets(Shown):
    """Targets for a `LoraConfig`, and the modules they match. Printing it shows a table.

    Attributes:
        model: Class of the model.
        scope: The scope that was requested.
        target_modules: For `LoraConfig`: names, or one regular expression.
        target_parameters: For `LoraConfig`: names of parameters (experts; maps that PEFT cannot match by name).
        exclude_modules: For `LoraConfig`: a regular expression; None if not needed.
        modules: Full paths of the linear maps to adapt, including those in `through_parameters`.
        parameters: Full paths of the other parameters to adapt.
        through_parameters: Linear maps that PEFT can adapt only by their weight parameter, without dropout.
        coverage: Adapted share of the blocks' weights and layers.
        left_out: Matrices of the scope that are not adapted, with the reason.
        fan_in_fan_out: Whether all the linear maps are GPT-2's Conv1D.
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
        """Return the arguments for `peft.LoraConfig`."""
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
        """Return plain values for JSON."""
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
        """Return the targets as a table."""
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


THROUGH = (
    "PEFT takes names such as gate_proj for the routed experts in this architecture, so linear maps of that name "
    "are adapted through their weight parameter, without lora_dropout"
)


def lora_targets(
    model: object,
    scope: str = "language",
    *,
    experts: bool = False,
    router: bool = False,
    submodel: str | None = None,
) -> LoraTargets:
    """Return the modules that LoRA should adapt, from the model's structure.

    By default these are the linear maps of the language model's blocks: attention, MLP, shared experts, linear
    attention; not routed experts, routers, heads, embeddings, towers or projectors. Maps on which PEFT refuses an
    adapter, or where the model's code would bypass one, are left out, with the reason. Changes nothing.

    Args:
        model: A module, also wrapped or quantised, with or without adapters; or a Trainer.
        scope: language | vision | audio | projector | all.
        experts: Also adapt the routed experts (stacked parameters in transformers 5, so `target_parameters`).
        router: Also adapt the routers.
        submodel: Path or architecture of the language model, needed if there are several.

    Returns:
        The arguments for `LoraConfig`, the full paths they match, and the coverage. Prints as a table.

    Raises:
        InputError: The scope is unknown, or the model has no linear map of it that PEFT can adapt.
        NoEmbeddingError: The model has no language model, or several and none is named.
        NotAModelError: `model` holds no torch module.
    """
    want("lora_targets", scope=(scope, TEXT), experts=(experts, FLAG), router=(router, FLAG))
    want("lora_targets", submodel=(submodel, optional(TEXT)))
    check_scope(scope)
    return targets_of(Reading(model, submodel), scope, experts=experts, router=router)


def targets_of(reading: Reading, scope: str, *, experts: bool = False, router: bool = False) -> LoraTargets:
    """Return the targets from a `Reading` of a model; see `lora_targets`."""
    matrices = reading.matrices(scope)
    wanted = {"map": True, "routed expert": experts, "router": router}
    chosen = [m for m in matrices if wanted[m.kind] and not m.refusal]
    name = type(reading.frame).__name__
    if not chosen:
        have = ", ".join(s.place for s in reading.survey.submodels) or "no transformers model"
        refused = next((m for m in matrices if wanted[m.kind]), None)
        why = "" if refused is None else f": {refused.path}: {refused.refusal}"
        raise InputError(
            f"scope={scope!r}: {name} has no linear map of that scope that PEFT can adapt (found {have}){why}; "
            "try another scope, or name the language model with submodel="
        )
    modules = tuple(m.path for m in chosen if not m.parameter)
    parameters = tuple(m.path for m in chosen if m.parameter)
    spec = TargetNames(reading).spec(modules, parameters)
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
    """Return the coverage of the blocks that contain these matrices, given the adapted paths."""
    unused = [m for m in matrices if m.block is not None and m.unused]
    inside = [m for m in matrices if m.block is not None and not m.unused]
    homes = {reading.home(m.block) for m in inside if m.block is not None}
    used = {reading.layer(m.block) for m in inside if m.block is not None}
    blocks = {reading.layer(block) for home in homes for block in reading.blocks[home]}
    blocks -= {reading.layer(m.block) for m in unused if m.block is not None} - used
    hit = [m for m in inside if m.path in adapted]
    return Coverage(
        weights=sum(m.weights for m in hit),
        of_weights=sum(m.weights for m in inside),
        layers=len({reading.layer(m.block) for m in hit if m.block is not None}),
        of_layers=len(blocks),
        of_experts=sum(m.weights for m in inside if m.kind == "routed expert"),
        unused=len(unused),
    )


def _left_out(matrices: list[Matrix], wanted: dict[str, bool]) -> tuple[LeftOut, ...]:
    unasked = {
        "routed expert": "routed experts; add them with experts=True",
        "router": "a router; add it with router=True",
    }
    counts: dict[tuple[str, str], int] = {}
    for m in matrices:
        reason = unasked[m.kind] if not wanted[m.kind] else m.refusal
        if reason:
            counts[starred(m.path), reason] = counts.get((starred(m.path), reason), 0) + 1
    return tuple(LeftOut(path, count, reason) for (path, reason), count in counts.items())
