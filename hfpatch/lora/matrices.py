"""The matrices that LoRA can adapt, with their scope and kind, from the model's structure before or after injection.

All paths are those of the model before any adapter, because PEFT matches its target names against these paths.
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
from hfpatch.lora.moe import experts_of, is_indexer, is_shared, routers_of
from hfpatch.lora.places import Place, own_parameters, without_adapter
from hfpatch.lora.unused import unused
from hfpatch.model.evaluating.divided import scaled_maps
from hfpatch.model.evaluating.fast_path import fast_layers
from hfpatch.model.norms import is_norm
from hfpatch.model.walk import dims

PASSED_OVER = (
    "torch's TransformerEncoderLayer runs one kernel in its place in evaluation, which would ignore an adapter; "
    'hfpatch.apply(model, include=["encoder-fast-path"]) makes it run'
)
DIVIDED = (
    "evaluation divides its weight by {}, and would not divide an adapter; "
    'hfpatch.apply(model, include=["rwkv-rescale"]) makes it the same in both'
)

SCOPES = ("language", "vision", "audio", "projector", "all")


@dataclass(frozen=True)
class Matrix:
    """A weight matrix, or a stack of them: a linear map's, an expert's or a router's.

    Attributes:
        path: Path of the linear map, or of the parameter if `parameter` is True.
        kind: map | routed expert | router.
        weights: Number of elements, unpacked if quantised.
        block: Path of the block it lies in; None outside blocks.
        parameter: Whether it is a bare parameter and not a linear map's weight.
        refusal: Why an adapter on it would be refused or bypassed; empty if it would work.
        unused: True if the loss never sees its output.
    """

    path: str
    kind: str
    weights: int
    block: str | None
    parameter: bool = False
    refusal: str = ""
    unused: bool = False


class Reading(Layout):
    """The matrices of a model, in blocks and outside. Changes nothing."""

    @cached_property
    def experts(self) -> dict[str, int]:
        """Modules that hold routed experts: path -> number of experts."""
        return experts_of(self)

    @cached_property
    def routers(self) -> frozenset[str]:
        """Paths of routers and of the gates of shared experts, with everything below them."""
        return routers_of(self, self.experts)

    def matrices(self, scope: str) -> list[Matrix]:
        """Return every matrix of a scope, adaptable or not, in the model's order; last, those beside the blocks."""
        paths = self.block_of if scope in {"language", "vision", "audio"} else self.places
        found = [m for path in paths if self._in_scope(path, scope) for m in self._at(path)]
        return [*found, *self._beside(scope)]

    def _beside(self, scope: str) -> Iterator[Matrix]:
        """Yield the linear maps that no scope adapts: beside the blocks of the language model; with `all`, every."""
        for path, (inputs, outputs) in self.sizes.items() if scope in {"language", "all"} else ():
            if path in self.block_of or self._in_scope(path, "all"):
                continue
            home = self.home(path)
            head = path in self._outputs or (self.part_kind(home) is None and self._is_head(path, home))
            if scope == "all" or (home in self.language_homes and not head):
                kind = "an output head" if head else f"beside the blocks of {self._told(home)}"
                why = f"{kind}; a scope adapts blocks and projectors: name it in target_modules to adapt it"
                yield Matrix(path, "map", inputs * outputs, None, refusal=why)

    def _told(self, home: str) -> str:
        """Return what a home is, in words."""
        kind = self.part_kind(home)
        if kind is None:
            return "the language model" if home in self.language_homes else "another part"
        return "a projector" if kind == "projector" else f"the {kind} tower"

    def _is_head(self, path: str, home: str) -> bool:
        """True if a path outside blocks says that it leads to a head."""
        return re.search(r"(^|[._])heads?(\.|$)", path[len(home) :]) is not None

    def matrices_of(self, homes: frozenset[str]) -> list[Matrix]:
        """Return every matrix in the blocks of these homes."""
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
            yield Matrix(
                path, kind, size[0] * size[1], block, refusal=self._refusal(place), unused=path in self._unused
            )
            return
        own = {name: p for name, p in own_parameters(place.module).items() if dims(p) > 1 and "bias" not in name}
        if not own or is_norm(place.module) or isinstance(place.module, (nn.Embedding, CONVOLUTIONS)):
            return
        for name, parameter in own.items():
            kind, why = self._bare(path, name, parameter)
            if kind:
                yield Matrix(f"{path}.{name}", kind, parameter.numel(), block, parameter=True, refusal=why)

    def _bare(self, path: str, name: str, parameter: nn.Parameter) -> tuple[str, str]:
        """Return the kind of a bare parameter and why it cannot be adapted; ("", "") if it is not a matrix."""
        module, rank = self.places[path].module, parameter.dim()
        kind = "routed expert" if path in self.experts else "router" if path in self.routers else "map"
        shared = path in self.block_of and rank == 3 and is_shared(self, path)
        if (kind, rank) not in {("routed expert", 2), ("routed expert", 3), ("router", 2)} and not shared:
            inside_block = path in self.block_of
            if not (multiplies(type(module), name) if inside_block else rank == 2):
                return "", ""
            if rank > 2:
                return "map", "a bare parameter, which PEFT would take for a stack of experts"
            return "map", "a bare parameter, not a linear map; PEFT accepts it in target_parameters"
        return kind, "" if parameter.is_floating_point() else "PEFT wraps floating-point parameters only"

    def _refusal(self, place: Place) -> str:
        holder = place.path.rpartition(".")[0]
        if (indexer := self._indexer_class(holder)) is not None:
            return f"{indexer} only selects positions, so it gets no gradient"
        if place.path in self._uncounted:
            return self._uncounted[place.path]
        return refusal(self._kind, place, self.places[holder].module)

    @cached_property
    def _uncounted(self) -> dict[str, str]:
        """Linear maps on which an adapter would not learn, or evaluation not count it: path -> reason."""
        modules = [(path, place.module) for path, place in self.places.items()]
        found = {
            below: PASSED_OVER
            for path in fast_layers(modules)
            for below in self.below(path)
            if not isinstance(self.places[below.rpartition(".")[0]].module, nn.MultiheadAttention)
        }
        divided = {path: DIVIDED.format(2**exponent) for path, exponent in scaled_maps(modules).items()}
        return found | divided | self._unused

    @cached_property
    def _unused(self) -> dict[str, str]:
        return unused(self)

    @cached_property
    def _kind(self) -> str:
        return str(getattr(getattr(self.frame, "config", None), "model_type", ""))

    def _indexer_class(self, path: str) -> str | None:
        """Return the class of the indexer that a module of a block is or lies in; None if it lies in none."""
        if path not in self._indexer_classes:
            name = type(self.places[path].module).__name__ if is_indexer(type(self.places[path].module)) else None
            if name is None and path in self.block_of:
                name = self._indexer_class(path.rpartition(".")[0])
            self._indexer_classes[path] = name
        return self._indexer_classes[path]

    @cached_property
    def _indexer_classes(self) -> dict[str, str | None]:
        return {}

    def _in_scope(self, path: str, scope: str) -> bool:
        block = self.block_of.get(path)
        if block is not None:
            if scope == "all":
                return True
            home = self.home_of_block[block]
            return home in self.language_homes if scope == "language" else scope == self._part_kinds[home]
        return scope in {"projector", "all"} and self._projects(path)

    @cached_property
    def _part_kinds(self) -> dict[str, str | None]:
        return {home: self.part_kind(home) for home in self.blocks}

    def _projects(self, path: str) -> bool:
        """True if a module outside all blocks carries a tower's output towards the language model.

        It lies outside the language model and the towers, or in a tower after its blocks, in a part whose last
        matrix has the language model's width as output.
        """
        home, language = self.home(path), self.language.path
        if path == home:
            return False
        if home == language:
            return home == "" and path in self._outside_root
        if self.part_kind(home) is None:
            return path not in self._outputs and not self._is_head(path, home)
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
        """Paths of modules added to a language model that is the whole object."""
        return frozenset(p for p in self.survey.added if p in self.places)

    @cached_property
    def _outputs(self) -> frozenset[str]:
        """Paths of output heads, from each submodel's `get_output_embeddings`."""
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
    """Raise for an unknown scope.

    Raises:
        InputError: `scope` is none of `SCOPES`.
    """
    if scope not in SCOPES:
        raise InputError(f"scope={scope!r}: want one of {', '.join(SCOPES)}")
