"""Reads the structure, sizes, norms, attention and hazards of a model, from the loaded object or from its config."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hfpatch.compat.modules import parameters
from hfpatch.compat.quantising.quantised import coded
from hfpatch.dtypes import dtype_name
from hfpatch.given import FLAG, want
from hfpatch.inspecting import facts
from hfpatch.inspecting.buffers import buffers_made
from hfpatch.inspecting.eps import norm_kinds
from hfpatch.inspecting.experts import experts
from hfpatch.inspecting.fused import fused
from hfpatch.inspecting.info import ModelInfo, StackInfo, SubmodelInfo
from hfpatch.inspecting.layers import layer_lists
from hfpatch.model.roles import stream_dtype
from hfpatch.model.source import build_on_meta, declared_dtype, load_config
from hfpatch.model.survey import Survey
from hfpatch.model.walk import Submodel, elements
from hfpatch.model.wrapping import unwrap


def inspect(given: object, *, trust_remote_code: bool = False) -> ModelInfo:
    """Return the facts about a model. Nothing is changed, no forward pass is run, and no checkpoint weights are read.

    Args:
        given: A module, wrapped or not, or an object whose `.model` is one (a Trainer); or a hub name,
            a directory, the path of a config.json or a config, from which the model is built on meta.
        trust_remote_code: Run the checkpoint's own code if transformers has none for its `model_type`.

    Time from a config: one build on meta (0.2 s for 61 layers) and a second one with few layers. No weights are
    allocated.

    Raises:
        ModelNotFoundError: There is no model of that name.
        InputError: Its config cannot be used.
        NotAModelError: `given` holds no torch module.
    """
    return facts_of(*object_of(given, trust_remote_code=trust_remote_code))


def object_of(given: object, *, trust_remote_code: bool = False) -> tuple[object, torch.dtype | None]:
    """Return the object to inspect, built on meta from a name or a config, and the dtype that its config declares.

    Args and errors are those of `inspect`.
    """
    want("inspect", trust_remote_code=(trust_remote_code, FLAG))
    if isinstance(given, (str, Path)):
        given = load_config(given, trust_remote_code=trust_remote_code)
    if isinstance(given, PreTrainedConfig):
        return build_on_meta(given, trust_remote_code=trust_remote_code), declared_dtype(given)
    return given, None


def facts_of(given: object, declared: torch.dtype | None = None) -> ModelInfo:
    """Return the facts about an object from `object_of`."""
    survey = Survey(given)
    model = unwrap(survey.root)
    config: Any = model.config if isinstance(model, PreTrainedModel) else None
    if config is not None and declared is None:
        declared = declared_dtype(config)
    dtypes, packed, trainable, loaded = _count(survey.root)
    total = sum(dtypes.values()) + sum(packed.values())
    found = [
        (s, each, stream_dtype(survey, s, each)) for s in survey.submodels for each in survey.stacks.get(s.path, ())
    ]
    attention = facts.attention(survey)
    return ModelInfo(
        cls=type(model).__name__,
        architecture=str(config.model_type) if config is not None else None,
        name=str(config.name_or_path or "") if config is not None else "",
        parameters=total,
        dtypes={dtype_name(dtype): size for dtype, size in dtypes.items()} | packed,
        trainable=trainable,
        weights_loaded=loaded,
        declared_dtype=dtype_name(declared) if declared else None,
        quantization=_quantization(config) or next(iter(packed), "").partition(" ")[0] or None,
        submodels=tuple(_submodel(s, total if s.model is model is survey.root else None) for s in survey.submodels),
        embeddings=facts.embeddings(survey),
        heads=facts.heads(survey),
        layers=layer_lists(survey),
        stacks=tuple(
            StackInfo(s.path, each.path, len(each.items), dtype_name(dtype) if dtype else None)
            for s, each, dtype in found
        ),
        norms=norm_kinds(survey),
        attention=attention,
        experts=experts(survey),
        fused=fused(survey),
        buffers=buffers_made(survey),
        wrappers=facts.wrappers(survey),
        adapters=facts.adapters(survey),
        hazards=tuple(facts.hazards(survey, found, attention, dtypes)),
    )


def _count(root: nn.Module) -> tuple[dict[torch.dtype, int], dict[str, int], int, bool]:
    """Return the number of parameters by dtype, of packed ones by kind, and of trainable ones; and if any is loaded.

    Those that a quantiser packed count as many as they unpack to.
    """
    dtypes: dict[torch.dtype, int] = {}
    kinds: dict[str, int] = {}
    trainable, real, some = 0, False, False
    for parameter, size, kind in _parameters(root):
        some = True
        if kind:
            kinds[kind] = kinds.get(kind, 0) + size
        else:
            dtypes[parameter.dtype] = dtypes.get(parameter.dtype, 0) + size
        trainable += size if parameter.requires_grad else 0
        real = real or not parameter.is_meta
    return dtypes, kinds, trainable, real or not some


def _parameters(root: nn.Module) -> Iterator[tuple[nn.Parameter, int, str]]:
    """Yield each parameter once, with its number of values and how a quantiser packed it; empty for a plain one."""
    found = [(parameters(m)[c.name], c) for m in root.modules() if (c := coded(m)) is not None]
    packed = {id(parameter): c for parameter, c in found}
    for parameter in root.parameters():
        known = packed.get(id(parameter))
        yield parameter, elements(parameter) if known is None else known.size, "" if known is None else known.kind


def _submodel(submodel: Submodel, known: int | None) -> SubmodelInfo:
    size = sum(size for _, size, _ in _parameters(submodel.model)) if known is None else known
    return SubmodelInfo(submodel.path, submodel.architecture, type(submodel.model).__name__, size)


def _quantization(config: Any) -> str | None:
    wanted: Any = getattr(config, "quantization_config", None)
    if wanted is None:
        return None
    method: Any = wanted.get("quant_method") if isinstance(wanted, dict) else getattr(wanted, "quant_method", None)
    return str(getattr(method, "value", method)) if method else "unnamed"
