"""Facts about a model: embeddings, heads, attention, wrappers, adapters and hazards."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hfpatch.compat import dynamo, hooks, implementation
from hfpatch.compat.modules import children
from hfpatch.compat.peft import halves, has_own_adapters
from hfpatch.dtypes import dtype_name
from hfpatch.lora.merging import Merge, merge_of
from hfpatch.model.cast_buffers import cast_buffers, described
from hfpatch.model.embed import find_embedding
from hfpatch.model.roles import Stack, weights_dtype
from hfpatch.model.source import kept_in_float32
from hfpatch.model.survey import Survey
from hfpatch.model.walk import Submodel
from hfpatch.model.wrapping import kind_of

_SCALES = ("embedding_multiplier", "embedding_scale", "scale_emb", "embed_scale", "normalizer")
_SWITCHES = ("mup_enabled", "rescale_embeddings")


@dataclass(frozen=True)
class Embedding:
    """A token embedding, and the factor by which its rows are scaled.

    `scale_at` is `module: <attribute>` (calling the module gives scaled embeddings), `model: <attribute
    or formula>` (the model scales the module's output), or `none`.
    """

    submodel: str
    path: str
    cls: str
    vocabulary: int | None
    width: int | None
    scale: float | None
    scale_at: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON: submodel, path, class, vocabulary, width, scale, scale_at."""
        return _renamed(vars(self))


@dataclass(frozen=True)
class Head:
    """An output layer.

    `tied` is True if it computes with the weight of an embedding, the encoder's or the decoder's; `apart` is the path
    of the embedding that it was tied to before one of the two became a copy that trains, else empty.
    """

    submodel: str
    path: str
    cls: str
    tied: bool
    apart: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON: submodel, path, class, tied, apart."""
        return _renamed(vars(self))


@dataclass(frozen=True)
class Attention:
    """The attention implementation of one config.

    `path` and `cls` belong to the first model with this config. `config` is its key in the submodel's config ("" for
    the submodel's config itself), `implementation` the one in use, `accepts` those that the class accepts, `note` why
    it refuses sdpa.
    """

    path: str
    config: str
    cls: str
    implementation: str
    accepts: tuple[str, ...]
    note: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON: path, config, class, implementation, accepts, note."""
        return {**_renamed(vars(self)), "accepts": list(self.accepts)}


@dataclass(frozen=True)
class Wrapper:
    """A wrapper around the model or a part of it: PEFT, DDP, DataParallel, torch.compile, FSDP, FSDP2."""

    kind: str
    path: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON: kind, path."""
        return dict(vars(self))


@dataclass(frozen=True)
class Adapter:
    """A PEFT adapter: its name, its type (LORA, ...) and whether it is active.

    `layers` is the number of layers in which it has two halves, and `zero` the number of those in which one is 0, so
    that it changes nothing there; weights on meta count as not 0. If the base weights are in half precision, `merge` is
    what merging in their dtype would keep of its update; else None.
    """

    name: str
    kind: str
    active: bool
    layers: int = 0
    zero: int = 0
    merge: Merge | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON: name, kind, active, layers, zero, merge: null or dtype, kept, in_float32."""
        return {**vars(self), "merge": None if self.merge is None else self.merge.to_dict()}


def _renamed(values: dict[str, Any]) -> dict[str, Any]:
    return {"class" if k == "cls" else k: v for k, v in values.items()}


def embeddings(survey: Survey) -> tuple[Embedding, ...]:
    """Return each distinct token embedding, with the outermost submodel that has it."""
    found: dict[int, Embedding] = {}
    for submodel in survey.submodels:
        module = find_embedding(submodel.model)
        if module is None or id(module) in found or id(module) not in survey.paths:
            continue
        path = survey.path(module)
        scale, where = _scale(survey, module, submodel)
        weight = getattr(module, "weight", None)
        shape: tuple[Any, ...] = tuple(weight.shape) if isinstance(weight, torch.Tensor) else ()
        rows, width = shape if len(shape) == 2 else (None, None)
        found[id(module)] = Embedding(submodel.path, path, type(module).__name__, rows, width, scale, where)
    return tuple(found.values())


def _scale(survey: Survey, embedding: nn.Module, submodel: Submodel) -> tuple[float | None, str]:
    for module in embedding.modules():
        # On meta the buffer has no value, but the class keeps the number in another attribute.
        for name in ("scalar_embed_scale", "embed_scale"):
            if (value := _number(getattr(module, name, None))) is not None:
                return value, "module: embed_scale"
    weight = getattr(embedding, "weight", None)
    for owner in survey.modules.values():  # encoder and decoder may share it, as a module or as a weight
        if any(c is embedding or (isinstance(c, nn.Embedding) and c.weight is weight) for c in owner.children()):
            width = weight.shape[-1] if isinstance(weight, torch.Tensor) else None
            value, name = _scale_in_forward(owner, submodel, width)
            if value is not None:
                return value, f"model: {name}"
    return None, "none"


def _scale_in_forward(owner: nn.Module, submodel: Submodel, width: int | None) -> tuple[float | None, str]:
    """Return the factor that a module's forward applies to its embeddings, and its name, from the names in its code."""
    config: Any = getattr(owner, "config", submodel.model.config)
    used = _names(type(owner))
    for switch in used.intersection(_SWITCHES):
        if not getattr(owner, switch, getattr(config, switch, True)):
            return None, ""
    for name in _SCALES:
        if name in used:
            value = _number(getattr(owner, name, getattr(config, name, None)))
            if value is None and name == "normalizer" and width:
                value = float(width) ** 0.5
            if value is not None:
                return value, name
    for name in _square_roots(type(owner)):
        if width is not None and _number(getattr(owner, name, getattr(config, name, None))) == width:
            return float(width) ** 0.5, f"{name}**0.5"
    return None, ""


@cache
def _names(cls: type[nn.Module]) -> frozenset[str]:
    """Return the names used in a class's forward, and in the methods of the class that it calls."""
    names: set[str] = set()
    waiting: list[Any] = [cls.forward]
    while waiting:
        code = getattr(inspect.unwrap(waiting.pop()), "__code__", None)
        for name in () if code is None else code.co_names:
            if name not in names and inspect.isfunction(method := vars(cls).get(name)):
                waiting.append(method)
            names.add(name)
    return frozenset(names)


@cache
def _square_roots(cls: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of the attributes of which a class's forward takes the square root."""
    try:
        source = inspect.getsource(inspect.unwrap(cls.forward))
    except (OSError, TypeError):
        return ()
    return tuple(a or b for a, b in re.findall(r"sqrt\((?:\w+\.)+(\w+)\)|\.(\w+) *\*\* *0?\.5", source))


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return None if value.is_meta or value.numel() != 1 else float(value)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def heads(survey: Survey) -> tuple[Head, ...]:
    """Return each distinct output layer over the vocabulary."""
    found: dict[int, Head] = {}
    for submodel in survey.submodels:
        getter: Any = type(submodel.model).get_output_embeddings
        try:
            head = getter(submodel.model)
        except (NotImplementedError, AttributeError, TypeError):
            continue
        if isinstance(head, nn.Module) and id(head) not in found and id(head) in survey.paths:
            aside = set_aside(survey)
            every = [m for m in survey.modules.values() if isinstance(m, nn.Embedding)]
            tied = any(_same_weight(head, m) for m in every if id(m) not in aside)
            original = children(head).get("original_module") or head
            broken = not tied and any(_same_weight(original, m) for m in every)
            embedding = find_embedding(submodel.model) if broken else None
            place = survey.path(embedding) if embedding is not None and id(embedding) in survey.paths else ""
            found[id(head)] = Head(submodel.path, survey.path(head), type(head).__name__, tied, place)
    return tuple(found.values())


def set_aside(survey: Survey) -> set[int]:
    """Return the ids of modules in place of which PEFT calls a copy that trains (`modules_to_save`)."""
    found: set[int] = set()
    for module in survey.modules.values():
        given: Any = module
        copies = children(module).get("modules_to_save")
        if copies is None or (original := children(module).get("original_module")) is None:
            continue
        if not given.disable_adapters and any(name in children(copies) for name in given.active_adapters):
            found.update(map(id, original.modules()))
    return found


def _without_tokens(module: nn.Module) -> nn.Module:
    """Return what is inside PEFT's layer for single trained tokens; the module itself without one."""
    held = children(module).get("token_adapter")
    inside = None if held is None else children(held).get("base_layer")
    return module if inside is None else inside


def _same_weight(head: nn.Module, embedding: nn.Module) -> bool:
    mine, other = (getattr(_without_tokens(module), "weight", None) for module in (head, embedding))
    if not isinstance(mine, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    if mine is other:
        return True
    loaded = not mine.is_meta and not other.is_meta and mine.data_ptr() != 0
    return loaded and mine.data_ptr() == other.data_ptr() and mine.shape == other.shape


def attention(survey: Survey) -> tuple[Attention, ...]:
    """Return the attention implementation of each config in the model, in module order."""
    found: dict[int, Attention] = {}
    for path, model in survey.modules.items():
        if not isinstance(model, PreTrainedModel) or id(model.config) in found:
            continue
        home = next((s for s in survey.submodels if s.path in ("", path) or path.startswith(f"{s.path}.")), None)
        key = _key(home.model.config, model.config) if home is not None else None
        current = str(implementation.chosen(model.config) or "eager")
        accepted = implementation.taken(model)
        note = ""
        if "sdpa" not in accepted:
            cap = getattr(model.config, "attn_logit_softcapping", None)
            note = f"sdpa refused: scores are soft-capped at {cap:g}" if cap else "sdpa refused by the class"
        found[id(model.config)] = Attention(path, key or "", type(model).__name__, current, accepted, note)
    return tuple(found.values())


def _key(root: PreTrainedConfig, wanted: PreTrainedConfig) -> str | None:
    """Return the dotted key of a sub-config; empty for the config itself, None if it is not part of it."""
    if root is wanted:
        return ""
    for name, part in vars(root).items():
        if isinstance(part, PreTrainedConfig) and (inner := _key(part, wanted)) is not None:
            return f"{name}.{inner}" if inner else name
    return None


def wrappers(survey: Survey) -> tuple[Wrapper, ...]:
    """Return the wrappers, outermost first; FSDP on every layer is listed once, at its outermost place."""
    found: list[Wrapper] = []
    for path, module in survey.modules.items():
        kind = kind_of(type(module))
        if kind is not None and not (kind.startswith("FSDP") and any(w.kind == kind for w in found)):
            found.append(Wrapper(kind, path))
    if dynamo.is_loaded():
        known = {w.path for w in found if w.kind == "torch.compile"}
        found.extend(Wrapper("torch.compile", path) for path in survey.compiled if path not in known)
    return tuple(found)


def adapters(survey: Survey) -> tuple[Adapter, ...]:
    """Return the PEFT adapters in the model, from `get_peft_model` or `model.add_adapter`."""
    found: dict[str, Adapter] = {}
    named = dict(survey.root.named_parameters())
    pairs = halves(named)
    for module in survey.modules.values():
        given: Any = module
        is_peft = kind_of(type(module)) == "PEFT"
        if not is_peft and not (isinstance(module, PreTrainedModel) and has_own_adapters(module)):
            continue
        active: Any = given.active_adapters if is_peft else given.active_adapters()
        for name, config in given.peft_config.items():
            kind: Any = getattr(config, "peft_type", "")
            if name not in found:
                own = [(a, b) for a, b in pairs if name in a.split(".")]
                zero = sum(_is_zero(named[a]) or _is_zero(named[b]) for a, b in own)
                merge = survey.once(("merge", id(module), name), partial(merge_of, module.modules(), name))
                found[name] = Adapter(name, str(getattr(kind, "value", kind)), name in active, len(own), zero, merge)
    return tuple(found.values())


def _is_zero(half: torch.Tensor) -> bool:
    return not half.is_meta and not bool(half.detach().any())


def hazards(
    survey: Survey,
    stacks: Iterable[tuple[Submodel, Stack, torch.dtype | None]],
    attentions: Iterable[Attention],
    dtypes: Iterable[torch.dtype],
) -> Iterator[str]:
    """Yield the numerical hazards of this model in its present state, one sentence each.

    Args:
        survey: Survey of the object.
        stacks: Submodels and their stacks, with the dtype of the residual stream.
        attentions: Result of `attention`.
        dtypes: Dtypes of the parameters.
    """
    for submodel, stack, stream in stacks:
        there, _ = hooks.hooks_of(stack.layers[0][1])
        patched = any(
            type(hook).__name__ == "CastInput" for hook in there.values()
        )  # the hook itself, not a record of it
        if stream == torch.float16 and not patched and find_embedding(submodel.model) is not None:
            yield f"float16 residual stream in {stack.path}: it can exceed 65,504, the largest float16"
    for row in attentions:
        where = row.path or row.cls
        if row.implementation not in row.accepts and row.implementation in ("sdpa", "flex_attention"):
            yield f"{where}: attention is set to {row.implementation!r}, which {row.cls} refuses"
        if row.implementation == "eager" and weights_dtype(survey.modules[row.path]) == torch.float16:
            yield (
                f"eager attention in float16 in {where}: the QK product can overflow, "
                "and left padding can give NaN at real tokens"
            )
    if cast := cast_buffers(survey).cast:
        yield (
            f"a cast rounded {described(cast)}; from_pretrained(dtype=) leaves more, "
            'and hfpatch.apply(model, only="fp32-buffers") restores it'
        )
    for submodel in survey.outermost_built:
        for dtype in dtypes:
            kept = list(kept_in_float32(submodel.model, dtype))
            if kept:
                cls = type(submodel.model).__name__
                yield (
                    f"{len(kept)} weights are {dtype_name(dtype)}, although {cls} keeps them in float32 "
                    f"(such as {kept[0]}): load with dtype= instead of casting"
                )
