"""The linear maps that LoRA can adapt, and what each is for: told from structure, before and after injection.

All paths are those of the model as it was before any adapter: what PEFT put in a module's place is looked
through, because PEFT matches its target names against these paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from hfpatch.errors import InputError
from hfpatch.model.embed import find_embedding, resolve
from hfpatch.model.lora_linear import features, refusal
from hfpatch.model.lora_places import Place, ancestors, frame_of, places, without_adapter
from hfpatch.model.norms import is_norm
from hfpatch.model.survey import Submodel, Survey, inside

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


class Reading:
    """What a model offers to LoRA. Changes nothing.

    Args:
        given: A module, however wrapped, with adapters or without.
        submodel: Path or architecture of the language model meant, where there are several.
    """

    def __init__(self, given: object, submodel: str | None = None) -> None:
        self.frame = frame_of(given)
        self.survey = Survey(self.frame)
        self.places = places(self.frame)
        self.wanted = submodel

    @cached_property
    def language(self) -> Submodel:
        """The language model.

        Raises:
            NoEmbeddingError: There is none, or there are several and none is named.
        """
        readers = {id(find_embedding(s.model)): s for s in self.survey.submodels if _reads_tokens(s)}
        if self.wanted is None and len(readers) == 1:
            return next(iter(readers.values()))
        return resolve(self.survey, self.wanted)[0]

    @cached_property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """`(in, out)` of every linear map, by path."""
        return {path: size for path, place in self.places.items() if (size := features(place.module)) is not None}

    @cached_property
    def blocks(self) -> dict[str, tuple[str, ...]]:
        """Paths of the blocks of each submodel, by the submodel's path: the items of its lists of layers."""
        with_map = {above for path in self.sizes for above in ancestors(path)}
        with_norm = {above for path, place in self.places.items() if is_norm(place.module) for above in ancestors(path)}
        lists: dict[str, list[list[str]]] = {}
        taken: list[str] = []
        for path, place in self.places.items():
            if not isinstance(place.module, (nn.ModuleList, nn.Sequential)) or any(inside(path, t) for t in taken):
                continue
            items = [f"{path}.{name}" for name in place.module.__dict__["_modules"]]
            if items and all(item in with_map and item in with_norm for item in items):
                taken.append(path)
                lists.setdefault(self.home(path), []).append(items)
        return {home: self._layers(home, found) for home, found in lists.items()}

    def _layers(self, home: str, found: list[list[str]]) -> tuple[str, ...]:
        if not self.is_language(home):  # beside the layers of a tower, lists of single-norm items are its projectors
            norms = [sum(is_norm(self.places[p].module) for p in self.below(items[0])) for items in found]
            full = [items for items, count in zip(found, norms, strict=True) if count > 1]
            found = full or [max(found, key=len)]
        return tuple(item for items in found for item in items)

    def home(self, path: str) -> str:
        """Path of the innermost submodel a module lies in; empty outside all of them."""
        holder = self.survey.holder(path)
        return "" if holder is None else holder.path

    def is_language(self, home: str) -> bool:
        """Whether the submodel at this path reads tokens, or holds one that does."""
        return any(inside(s.path, home) and _reads_tokens(s) for s in self.survey.submodels)

    def sense(self, home: str) -> str | None:
        """What a tower perceives: vision, audio; None for a language model, or where it cannot be told."""
        model = next((s.model for s in self.survey.submodels if s.path == home), None)
        if model is None or self.is_language(home):
            return None
        said = f"{getattr(model, 'main_input_name', '')} {getattr(model, 'input_modalities', '')}"
        named = f"{home} {model.config.model_type}".lower()
        for text in (said, named):
            if re.search(r"audio|speech|input_features|input_values", text):
                return "audio"
            if re.search(r"pixel|image|video|vision|visual|vit|clip", text):
                return "vision"
        return None

    @cached_property
    def block_of(self) -> dict[str, str]:
        """Path of the block that each module lies in, by the module's path."""
        heads = {block for blocks in self.blocks.values() for block in blocks}
        return {p: b for p in self.places if (b := next((a for a in ancestors(p) if a in heads), None)) is not None}

    @cached_property
    def experts(self) -> dict[str, int]:
        """Modules that hold routed experts, with how many: stacked parameters, or a list of alike modules."""
        found: dict[str, int] = {}
        for path in self.block_of:
            module, count = self.places[path].module, self._expert_counts(self.home(path))
            stacks = [p for p in module.parameters(recurse=False) if p.dim() == 3 and min(p.shape) > 1]
            if isinstance(module, nn.ModuleList):
                if len(module) > 1 and len(module) in count and len({type(m) for m in module}) == 1:
                    found[path] = len(module)
            elif stacks and not isinstance(module, nn.modules.conv._ConvNd):  # pyright: ignore[reportPrivateUsage]
                first = int(stacks[0].shape[0])
                if first in count or "expert" in type(module).__name__.lower():
                    found[path] = first
        return found

    def _expert_counts(self, home: str) -> frozenset[int]:
        model = next((s.model for s in self.survey.submodels if s.path == home), None)
        values: dict[str, Any] = {} if model is None else vars(model.config.get_text_config())
        return frozenset(v for k, v in values.items() if "expert" in k and isinstance(v, int) and v > 1)

    @cached_property
    def routers(self) -> frozenset[str]:
        """Modules that choose experts or weigh a shared one: beside experts, with an output for each, or one in all."""
        found: set[str] = set()
        for path, count in self.experts.items():
            holder = path.rpartition(".")[0]
            for name in self.places[holder].module.__dict__["_modules"]:
                child = f"{holder}.{name}" if holder else name
                if child not in self.places:  # one module under two names
                    continue
                outs = [out for _, out in self._matrices_below(child)]
                if (
                    child != path
                    and outs
                    and (set(outs) <= {count, 1} or (name in {"gate", "router"} and len(outs) == 1))
                ):
                    found.update(self.below(child))
        return frozenset(found)

    @cached_property
    def _order(self) -> dict[str, int]:
        return {path: i for i, path in enumerate(self.places)}

    def below(self, top: str) -> Iterator[str]:
        """A path and those below it, in order."""
        listed = self._listed
        for i in range(self._order[top], len(listed)):
            if not inside(listed[i], top):
                return
            yield listed[i]

    @cached_property
    def _listed(self) -> list[str]:
        return list(self.places)

    def _matrices_below(self, top: str) -> Iterator[tuple[str, int]]:
        for path in self.below(top):
            if path in self.sizes:
                yield path, self.sizes[path][1]
            else:
                module = self.places[path].module
                yield from ((path, int(p.shape[0])) for p in module.parameters(recurse=False) if p.dim() == 2)

    def matrices(self, scope: str) -> list[Matrix]:
        """Every matrix of a scope in the model's order, chosen or not."""
        return [m for path in self.places if self._in_scope(path, scope) for m in self._at(path)]

    def matrices_of(self, homes: frozenset[str]) -> list[Matrix]:
        """Every matrix in the blocks of the submodels at these paths."""
        return [m for path in self.block_of if self.home(path) in homes for m in self._at(path)]

    @cached_property
    def _listed_experts(self) -> frozenset[str]:
        tops = [path for path in self.experts if isinstance(self.places[path].module, nn.ModuleList)]
        return frozenset(path for top in tops for path in self.below(top))

    def _at(self, path: str) -> Iterator[Matrix]:
        place, block = self.places[path], self.block_of.get(path)
        if path in self.sizes:
            kind = "routed expert" if path in self._listed_experts else "router" if path in self.routers else "map"
            size = self.sizes[path]
            yield Matrix(path, kind, size[0] * size[1], block, refusal=self._refusal(place))
            return
        if path in self.experts or path in self.routers:
            kind, rank, why = ("routed expert", 3, "") if path in self.experts else ("router", 2, "")
        elif block is None and self._projects(path) and not isinstance(place.module, nn.Embedding):
            kind, rank, why = "map", 2, "a bare parameter and no linear map; PEFT takes it as target_parameters"
        else:
            return
        for name, parameter in place.module.named_parameters(recurse=False):
            if parameter.dim() == rank and "bias" not in name:
                if not parameter.is_floating_point():
                    why = "PEFT wraps floating-point parameters only"
                yield Matrix(f"{path}.{name}", kind, parameter.numel(), block, parameter=True, refusal=why)

    def _refusal(self, place: Place) -> str:
        return refusal(self.frame, place, self.places[place.path.rpartition(".")[0]].module)

    def _in_scope(self, path: str, scope: str) -> bool:
        home = self.home(path)
        if path in self.block_of:
            if scope == "all":
                return True
            return home == self.language.path if scope == "language" else scope == self.sense(home)
        return scope in {"projector", "all"} and self._projects(path)

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
        outs = [out for _, out in self._matrices_below(top)]
        last = max((self._order[b] for b in self.blocks.get(home, ())), default=-1)
        width = getattr(self.language.model.config.get_text_config(), "hidden_size", None)
        pools = any(isinstance(self.places[p].module, nn.MultiheadAttention) for p in self.below(top))
        return bool(outs) and outs[-1] == width and self._order[top] > last and not pools

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


def _reads_tokens(submodel: Submodel) -> bool:
    """Whether a submodel has a token embedding; some vision towers hand out their patch positions as one."""
    takes = str(getattr(submodel.model, "main_input_name", ""))
    return find_embedding(submodel.model) is not None and not re.search(r"pixel|features|values", takes)


def check_scope(scope: str) -> None:
    """Raise for a scope there is not.

    Raises:
        InputError: `scope` is none of `SCOPES`.
    """
    if scope not in SCOPES:
        raise InputError(f"scope={scope!r}: want one of {', '.join(SCOPES)}")
