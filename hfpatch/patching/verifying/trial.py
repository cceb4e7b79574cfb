"""Builds and runs a case of a patch: the model's outputs and the reference."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from hfpatch.compat.implementation import choose
from hfpatch.errors import InputError
from hfpatch.lab.branch_overflow import branch_overflow
from hfpatch.lab.example import example_inputs
from hfpatch.lab.overflow import overflow
from hfpatch.lab.sizes import SIZES, VOCABULARY
from hfpatch.lab.tiny import COMPOSITES, rescale, tiny_config, tiny_model, tiny_of_class
from hfpatch.patching.verifying.case import Case

LAYERS: int = SIZES["num_hidden_layers"]
"""The number of layers of a tiny language model."""


@dataclass(frozen=True)
class Trial:
    """A built case.

    Attributes:
        case: Its description.
        model: The model to patch, in the case's dtype.
        master: The same weights in float32, with eager attention and never patched. Its buffers are not rounded.
    """

    case: Case
    model: nn.Module
    master: nn.Module

    @property
    def ids(self) -> torch.Tensor:
        """Token ids `[2, tokens]`, always the same."""
        return token_ids(self.case).to(self.case.device)

    @property
    def real(self) -> torch.Tensor:
        """Boolean `[2, tokens]`, False at padding."""
        real = torch.ones_like(self.ids, dtype=torch.bool)
        real[0, : self.case.padded] = False
        return real

    def logits(self) -> torch.Tensor:
        """Run the model; return its logits at real tokens, `[tokens, vocabulary]` in float32."""
        return self._run(self.model, self.case.autocast)

    @cached_property
    def reference(self) -> torch.Tensor:
        """Logits of the same weights in float32, as `logits` returns them."""
        return self._run(self.master, None)

    @cached_property
    def bfloat16(self) -> torch.Tensor:
        """Logits of the same weights in bfloat16, as `logits` returns them."""
        return self._run(copy.deepcopy(self.master).bfloat16(), None)

    def bad_gradients(self) -> list[str]:
        """Run a backward pass of the mean squared logit; return the names of parameters with non-finite gradients."""
        self.model(**self.inputs(self.model)).logits.float().square().mean().backward()
        bad = [n for n, p in self.model.named_parameters() if p.grad is not None and not bool(p.grad.isfinite().all())]
        self.model.zero_grad(set_to_none=True)
        return bad

    def error(self, logits: torch.Tensor) -> float:
        """Return the relative L2 distance of logits from the reference; NaN if the logits hold NaN."""
        return float(((logits - self.reference).norm() / self.reference.norm()).item())

    def _run(self, model: nn.Module, autocast: str | None) -> torch.Tensor:
        region = (
            torch.autocast(self.case.device, dtype=getattr(torch, autocast)) if autocast else contextlib.nullcontext()
        )
        with torch.no_grad(), region:
            return model(**self.inputs(model)).logits.float()[self.real]

    def inputs(self, model: nn.Module | None = None) -> dict[str, Any]:
        """Return the arguments of a model of the case; of the one to patch by default."""
        model = self.model if model is None else model
        mask = {"attention_mask": self.real.long()} if self.case.padded else {}
        return inputs_of(model, self.ids) | mask


def token_ids(case: Case) -> torch.Tensor:
    """Return the token ids of a case, `[2, tokens]`, always the same."""
    return (torch.arange(2 * case.tokens).reshape(2, -1) * 7 + 3) % VOCABULARY


def inputs_of(model: nn.Module, ids: torch.Tensor) -> dict[str, Any]:
    """Return a model's inputs for token ids; a decoder beside a text encoder gets the same ids.

    An encoder of another modality, e.g. sound, gets an example input, and its decoder the ids.
    """
    config = getattr(model, "config", None)
    if not getattr(config, "is_encoder_decoder", False):
        return {"input_ids": ids}
    if getattr(model, "main_input_name", "input_ids") == "input_ids":
        return {"input_ids": ids, "decoder_input_ids": ids}
    given = {key: value for key, value in example_inputs(model).items() if key not in ("labels", "attention_mask")}
    reads_ids = "decoder_input_ids" in inspect.signature(model.forward).parameters
    return given if "input_ids" in given or not reads_ids else {"decoder_input_ids": ids, **given}


def tiny_of(case: Case) -> PreTrainedModel:
    """Return the tiny language model of a case, with its own random weights.

    Raises:
        InputError: The case names an unknown architecture, or transformers rejects its config.
    """
    if case.layers is not None:
        with contextlib.suppress(InputError):
            return _tiny(case, case.layers, num_hidden_layers=case.layers)
    return _tiny(case, LAYERS)


def _tiny(case: Case, depth: int, **more: Any) -> PreTrainedModel:
    overrides = {key: _repeated(value, depth) for key, value in case.config.items()} | more
    if case.cls is not None:
        return tiny_of_class(getattr(transformers, case.cls), tiny_config(case.architecture, **overrides))
    return tiny_model(case.architecture, **overrides)


def _repeated(value: Any, count: int) -> Any:
    """Return a list of strings repeated to this length, any other value as it is."""
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        return value
    return [value[i % len(value)] for i in range(count)]


def build(case: Case, make: Callable[[Case], PreTrainedModel] = tiny_of) -> Trial:
    """Build a case. The reference has the weights rounded to the case's dtype, and buffers in float32.

    Args:
        case: The case.
        make: Builds the language model of the case.

    Raises:
        InputError: The case names an unknown architecture or composite, or a glob that matches nothing.
    """
    llm = make(case)
    rescale(llm, case.scale, case.fill)
    if case.overflow:
        overflow(llm, inputs_of(llm, token_ids(case)))
    if case.branches:
        branch_overflow(llm, inputs_of(llm, token_ids(case)))
    if case.inside is not None and case.inside not in COMPOSITES:
        raise InputError(f"Case(inside={case.inside!r}): no such composite; there are: {', '.join(COMPOSITES)}")
    model: nn.Module = COMPOSITES[case.inside](llm) if case.inside else llm
    dtype: torch.dtype = getattr(torch, case.dtype)
    master = nn.Module.to(copy.deepcopy(model), case.device).eval()
    with torch.no_grad():
        for parameter in master.parameters():
            parameter.copy_(parameter.to(dtype))
    nn.Module.to(model, case.device, dtype).eval()  # in place
    for module in llm.modules():
        if isinstance(module, PreTrainedModel):
            choose(module.config, case.attention)
    return Trial(case, model, master)
