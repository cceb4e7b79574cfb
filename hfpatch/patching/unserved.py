"""Stacks of layers with a float16 residual stream that no patch supports."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hfpatch.inspecting.layers import LISTS, LayerList, layer_lists
from hfpatch.model.roles import stream_dtype, weights_dtype
from hfpatch.model.survey import Survey
from hfpatch.model.walk import Submodel, inside, starred
from hfpatch.model.wrapping import ON_LAYERS, unwrap
from hfpatch.patching import registry
from hfpatch.patching.context import Context
from hfpatch.patching.deciding import considered
from hfpatch.patching.language import NotNeeded, Refused
from hfpatch.patching.proofs.lookup import proof_verdict
from hfpatch.patching.registry import Entry

STREAM = "fp16-residual-overflow"
"""The patch of the residual stream."""


@dataclass(frozen=True)
class Unserved:
    """A stack of layers whose residual stream is float16 and stays so.

    Attributes:
        path: Path of the list of layers; indices of outer lists are `*`.
        cls: Name of the layers' class.
        architecture: Of the transformers model around it; empty outside all transformers models.
        dtype: Dtype of its stream: `float16`.
        refused: True if the patch refuses the architecture or this model.
        reason: Why the patch does not support it.
    """

    path: str
    cls: str
    architecture: str
    dtype: str
    refused: bool
    reason: str

    def __str__(self) -> str:
        where = f"{self.path}, {self.cls} of {self.architecture or 'your own modules'}"
        return f"{where}, runs in {self.dtype} and is {'refused' if self.refused else 'not supported'}: {self.reason}"

    @property
    def sentence(self) -> str:
        """Why its stream may overflow, for a plan that shows the path beside it."""
        of = f" of {self.architecture}" if self.architecture else ""
        return f"the stream of its {self.cls}{of} is {self.dtype}, whose maximum is 65,504, and {self.reason}"

    def to_dict(self) -> dict[str, Any]:
        """Return path, class, architecture, dtype, refused and reason, for JSON."""
        return {("class" if key == "cls" else key): value for key, value in vars(self).items()}


def unserved(survey: Survey, compute_dtype: torch.dtype | None = None) -> list[Unserved]:
    """Return the stacks whose stream is float16 and that `fp16-residual-overflow` does not support, in module order.

    Args:
        survey: Of the whole object.
        compute_dtype: The dtype the model will run in, if its weights have another one now.
    """
    entry = registry.get(STREAM)
    found = (_row(survey, entry, each, compute_dtype) for each in layer_lists(survey))
    return [row for row in found if row is not None]


def all_within(survey: Survey, stacks: Collection[str]) -> bool:
    """True if every list of modules is one of these stacks or inside one, so that there is no other stack."""
    lists = (path for path, m in survey.modules.items() if isinstance(m, LISTS) and len(m) > 1)
    return bool(stacks) and all(any(inside(path, stack) for stack in stacks) for path in lists)


def _row(survey: Survey, entry: Entry, layers: LayerList, compute_dtype: torch.dtype | None) -> Unserved | None:
    path, items = next(_lists(survey, layers.path))
    submodel = survey.holder(f"{path}.{next(iter(items))[0]}")
    if (compute_dtype or _dtype(survey, submodel, path, items)) is not torch.float16:
        return None
    row = Unserved(layers.path, layers.kinds[0].cls, "", "float16", False, "it lies outside all transformers models")
    if submodel is None:
        return row
    row = replace(row, architecture=submodel.architecture)
    context = Context(survey, submodel, compute_dtype, entry.patch.options)
    known = submodel.architecture in entry.patch.but or considered(entry, context)
    verdict = entry.patch.condition(context) if known else None
    if isinstance(verdict, NotNeeded):
        return None
    if reason := entry.patch.but.get(submodel.architecture):
        return None if isinstance(reason, NotNeeded) else replace(row, refused=True, reason=reason)
    if verdict is None:
        return replace(row, reason="no case proves the patch for this architecture")
    if isinstance(verdict, Refused):
        return replace(row, refused=True, reason=verdict.reason)
    if entry.patch.serves and (why_not := entry.patch.serves.why_not(context)):
        verdict = proof_verdict(entry, context)
        return None if isinstance(verdict, NotNeeded) else replace(row, refused=True, reason=why_not)
    verdict = proof_verdict(entry, context)
    if isinstance(verdict, NotNeeded):
        return None
    if isinstance(verdict, Refused):
        return replace(row, refused=True, reason=verdict.reason)
    if any(inside(path, s.path) or inside(s.path, path) for s in survey.stacks.get(submodel.path, ())):
        return None
    return replace(row, reason="the patch changes another stack of this model, not this one")


def _lists(survey: Survey, path: str) -> Iterator[tuple[str, list[tuple[str, nn.Module]]]]:
    for place, module in survey.modules.items():
        if starred(place) == path:
            yield place, list(module.named_children())


def _dtype(
    survey: Survey, submodel: Submodel | None, path: str, items: list[tuple[str, nn.Module]]
) -> torch.dtype | None:
    """Return the dtype of a stack's stream, by its embeddings and branches if known, else that of its first layer."""
    stacks = () if submodel is None else survey.stacks.get(submodel.path, ())
    for stack in stacks:
        if submodel is not None and stack.path == path:
            return stream_dtype(survey, submodel, stack)
    return weights_dtype(unwrap(items[0][1], ON_LAYERS))
