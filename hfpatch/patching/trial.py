"""A case of a patch, built and run: what the model puts out, and what it should."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from hfpatch.errors import InputError
from hfpatch.model.tiny import COMPOSITES, VOCABULARY, rescale, tiny_model
from hfpatch.patching.language import Case


@dataclass(frozen=True)
class Trial:
    """A built case. `model` may be patched; `master` holds the same weights in float32 and is not."""

    case: Case
    model: nn.Module
    master: nn.Module

    @property
    def ids(self) -> torch.Tensor:
        """Token ids `[2, 12]`, always the same."""
        return (torch.arange(24).reshape(2, 12) * 7 + 3) % VOCABULARY

    def logits(self) -> torch.Tensor:
        """Logits of the model `[2, 12, vocabulary]`, in float32."""
        return _logits(self.model, self.ids, self.case.autocast)

    @cached_property
    def reference(self) -> torch.Tensor:
        """Logits of the same weights in float32."""
        return _logits(self.master, self.ids, None)

    @cached_property
    def bfloat16(self) -> torch.Tensor:
        """Logits of the same weights in bfloat16."""
        return _logits(copy.deepcopy(self.master).bfloat16(), self.ids, None)

    def error(self, logits: torch.Tensor) -> float:
        """Relative L2 distance from the reference; NaN where the logits are."""
        return float(((logits - self.reference).norm() / self.reference.norm()).item())


def build(case: Case) -> Trial:
    """Build a case. The reference has the weights as rounded to the case's dtype.

    Raises:
        InputError: The case names no architecture or composite there is, or a glob that matches nothing.
    """
    llm = tiny_model(case.architecture, **case.config)
    rescale(llm, case.scale, case.fill)
    if case.inside is not None and case.inside not in COMPOSITES:
        raise InputError(f"Case(inside={case.inside!r}): want one of {', '.join(COMPOSITES)}")
    model: nn.Module = COMPOSITES[case.inside](llm) if case.inside else llm
    model = model.to(getattr(torch, case.dtype)).eval()
    return Trial(case, model, copy.deepcopy(model).float())


def _logits(model: nn.Module, ids: torch.Tensor, autocast: str | None) -> torch.Tensor:
    region = torch.autocast("cpu", dtype=getattr(torch, autocast)) if autocast else contextlib.nullcontext()
    with torch.no_grad(), region:
        return model(input_ids=ids).logits.float()
