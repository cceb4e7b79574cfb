"""The linear maps that LoRA can adapt, and what each is for: told from structure, before and after injection.

All paths are those of the model as it was before any adapter: what PEFT put in a module's place is looked
through, because PEFT matches its target names against these paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from hfpatch.compat.modules import CONVOLUTIONS
from hfpatch.errors import InputError
from hfpatch.lora.blocks import Layout
from hfpatch.lora.linear import multiplies, refusal
from hfpatch.lora.moe import experts_of, is_shared, only_picks, routers_of
from hfpatch.lora.places import Place, own_parameters, without_adapter
from hfpatch.model.norms import is_norm
from hfpatch.model.walk import dims

SCOPES = ("language", "vision", "audio", "projector", "all")


@dataclass(frozen=True)
class Matrix:
    """A weight matrix, or a stack of them: a linear map's, an expert's or a router's.

    Attributes:
        path: Of the linear map, or of the parameter where `parameter` holds.
        kind: map | routed expert | router.
        weights: How many numbers it has, unpacked where it is quantised.
        block: Path of the block it lies in; None outside blocks.
        refusal: Why PEFT or its module passes an adapter by; empty where nothing does.
    """

    path: str
    kind: str
    weights: int
    block: str | None
    parameter: bool = False
    refusal: str = ""


class Reading(Layout):
    """What the blocks of a model, and what lies between them, offer to LoRA. Changes nothing."""

    @cached_property
    def experts(self) -> dict[str, int]:
        """Modules that hold routed experts, with how many."""
        return experts_of(self)

    @cached_property
    def routers(self) -> frozenset[str]:
        """Modules that choose experts or weigh a shared one."""
        return routers_of(self, self.experts)

    def matrices(self, scope: str) -> list[Matrix]:
        """Every matrix of a scope in the model's order, chosen or not."""
        paths = self.block_of if scope in {"language", "vision", "audio"} else self.places
        return [m for path in paths if self._in_scope(path, scope) for m in self._at(path)]

    def matrices_of(self, homes: frozenset[str]) -> list[Matrix]:
        """Every matrix in the blocks of the submodels at these paths."""
        return [m for path in self.block_of if self.home(path) in homes for m in self._at(path)]

    @cached_property
    def _listed_experts(self) -> frozenset[str]:
        tops = [p for p in self.experts if isinstance(self.places[p].module, (nn.ModuleList, nn.ModuleDict))]
        return frozenset(path for top in tops for path in self.below(top))

    def _at(self, path: str) -> Iterator[Matrix]:
        place, block = self.places[path], self.block_of.get(path)
        if path in self.sizes:
            kind = "routed expert" if path in self._listed_experts else "router" if path in self.routers else "map"
            size = self.sizes[path]
            yield Matrix(path, kind, size[0] * size[1], block, refusal=self._refusal(place))
            return
        own = {name: p for name, p in own_parameters(place.module).items() if dims(p) > 1 and "bias" not in name}
        if not own or is_norm(place.module) or isinstance(place.module, (nn.Embedding, CONVOLUTIONS)):
            return
        for name, parameter in own.items():
            kind, why = self._bare(path, name, parameter)
            if kind:
                yield Matrix(f"{path}.{name}", kind, parameter.numel(), block, parameter=True, refusal=why)

    def _bare(self, path: str, name: str, parameter: nn.Parameter) -> tuple[str, str]:
        """Kind of a parameter in no linear map, and why it stays without an adapter; no kind where it is no matrix."""
        module, rank = self.places[path].module, parameter.dim()
        kind = "routed expert" if path in self.experts else "router" if path in self.routers else "map"
        shared = path in self.block_of and rank == 3 and is_shared(self, path)
        if (kind, rank) not in {("routed expert", 2), ("routed expert", 3), ("router", 2)} and not shared:
            inside_block = path in self.block_of
            if not (multiplies(type(module), name) if inside_block else rank == 2):
                return "", ""
            if rank > 2:
                return "map", "a bare parameter, which PEFT would take for a stack of experts"
            return "map", "a bare parameter and no linear map; PEFT takes it as target_parameters"
        return kind, "" if parameter.is_floating_point() else "PEFT wraps floating-point parameters only"

    def _refusal(self, place: Place) -> str:
        holder = place.path.rpartition(".")[0]
        if (picks := self._picks(holder)) is not None:
            return f"{picks} only picks positions: no gradient comes back to it"
        return refusal(self._kind, place, self.places[holder].module)

    @cached_property
    def _kind(self) -> str:
        return str(getattr(getattr(self.frame, "config", None), "model_type", ""))

    def _picks(self, path: str) -> str | None:
        """Class of the indexer that a module of a block is, or lies in."""
        if path not in self._pickers:
            name = type(self.places[path].module).__name__ if only_picks(type(self.places[path].module)) else None
            if name is None and path in self.block_of:
                name = self._picks(path.rpartition(".")[0])
            self._pickers[path] = name
        return self._pickers[path]

    @cached_property
    def _pickers(self) -> dict[str, str | None]:
        return {}

    def _in_scope(self, path: str, scope: str) -> bool:
        block = self.block_of.get(path)
        if block is not None:
            if scope == "all":
                return True
            home = self.home_of_block[block]
            return home in self.language_homes if scope == "language" else scope == self._senses[home]
        return scope in {"projector", "all"} and self._projects(path)

    @cached_property
    def _senses(self) -> dict[str, str | None]:
        return {home: self.sense(home) for home in self.blocks}

    def _projects(self, path: str) -> bool:
        """Whether a module outside all blocks carries a tower's output towards the language model.

        It lies outside the language model and the towers, or in a tower, after its blocks, in a branch that
        ends in the language model's width.
        """
        home, language = self.home(path), self.language.path
        if path == home:
            return False
        if home == language:
            return home == "" and path in self._outside_root
        if self.sense(home) is None:
            return path not in self._outputs and not re.search(r"(^|[._])heads?(\.|$)", path[len(home) :])
        rest = path[len(home) :].strip(".").split(".")
        top = f"{home}.{rest[0]}" if home else rest[0]
        outs = [out for _, out in self.matrices_below(top)]
        last = max((self.order[b] for b in self.blocks.get(home, ())), default=-1)
        width = getattr(self.language.model.config.get_text_config(), "hidden_size", None)
        pools = "pool" in rest[0] or any(
            isinstance(self.places[p].module, nn.MultiheadAttention) for p in self.below(top)
        )
        return bool(outs) and outs[-1] == width and self.order[top] > last and not pools

    @cached_property
    def _outside_root(self) -> frozenset[str]:
        """Modules added to a language model that is the whole object: none of its own blocks, head or embedding."""
        return frozenset(p for p in self.survey.added if p in self.places)

    @cached_property
    def _outputs(self) -> frozenset[str]:
        """Paths of heads: what a model's own `get_output_embeddings` gives."""
        heads: set[int] = set()
        for submodel in self.survey.submodels:
            try:
                head = submodel.model.get_output_embeddings()
            except (NotImplementedError, AttributeError):
                continue
            if isinstance(head, nn.Module):
                heads.add(id(without_adapter(head)))
        return frozenset(path for path, place in self.places.items() if id(place.module) in heads)


def check_scope(scope: str) -> None:
    """Raise for a scope there is not.

    Raises:
        InputError: `scope` is none of `SCOPES`.
    """
    if scope not in SCOPES:
        raise InputError(f"scope={scope!r}: want one of {', '.join(SCOPES)}")
