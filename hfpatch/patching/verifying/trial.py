"""Builds and runs a case of a patch: the model's outputs and the reference."""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
import tempfile
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from hfpatch.compat import hooks
from hfpatch.compat.implementation import choose
from hfpatch.compat.loading import kept_wide
from hfpatch.errors import InputError
from hfpatch.lab.branch_overflow import branch_overflow
from hfpatch.lab.example import example_inputs
from hfpatch.lab.overflow import overflow
from hfpatch.lab.sizes import SIZES, VOCABULARY
from hfpatch.lab.tiny import COMPOSITES, rescale, tiny_config, tiny_model, tiny_of_class
from hfpatch.lab.towers import tower_inputs, tower_model
from hfpatch.model.evaluating.as_trained import as_trained
from hfpatch.model.evaluating.full_float32 import full_float32
from hfpatch.model.walk import Walk
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
        """Run the model; return its logits at real tokens, `[tokens, vocabulary]` in float32.

        For a tower, return what it returns, over its size in the reference, and its model's logits times 0, as one row.
        """
        return self._run(self.model, self.case.autocast)

    @cached_property
    def reference(self) -> torch.Tensor:
        """Logits of the same weights in float32, as `logits` returns them; adapters count as they do in training."""
        with as_trained(self.master), full_float32(self.master):
            return self._run(self.master, None)

    @cached_property
    def bfloat16(self) -> torch.Tensor:
        """Logits of the same weights in bfloat16, as `logits` returns them."""
        return self._run(copy.deepcopy(self.master).bfloat16(), None)

    @cached_property
    def loaded(self) -> torch.Tensor:
        """Logits of the same weights saved, and loaded with `from_pretrained(dtype=)`, as `logits` returns them."""
        model = copy.deepcopy(self.model)
        for submodel in Walk(model).outermost_built:
            with tempfile.TemporaryDirectory() as directory, _without_progress_bars():
                submodel.model.save_pretrained(directory)
                cls: Any = type(submodel.model)
                new = cls.from_pretrained(directory, dtype=getattr(torch, self.case.dtype), attn_implementation="eager")
            if not submodel.path:
                return self._run(new.eval(), self.case.autocast)
            parent, _, name = submodel.path.rpartition(".")
            setattr(model.get_submodule(parent), name, new.eval())
        return self._run(model, self.case.autocast)

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
        with torch.random.fork_rng(devices=[]), torch.no_grad(), region:
            torch.default_generator.manual_seed(0)  # diffusion draws noise in each call
            if self.case.tower:
                return self._scaled(answers(model, self.case, self.inputs(model)))
            return model(**self.inputs(model)).logits.float()[self.real]

    def _scaled(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return the parts of an answer as one row, each over its size in the reference.

        The logits only show whether they are finite: their errors are those of the language model.
        """
        logits, *found = parts
        return torch.cat(
            [logits.flatten() * 0, *(p.flatten() / size for p, size in zip(found, self._sizes, strict=True))]
        )

    @cached_property
    def _sizes(self) -> list[torch.Tensor]:
        with full_float32(self.master):
            _, *found = answers(self.master, self.case, self.inputs(self.master))
        return [part.norm().clamp_min(torch.finfo(torch.float32).tiny) for part in found]

    def inputs(self, model: nn.Module | None = None) -> dict[str, Any]:
        """Return the arguments of a model of the case; of the one to patch by default."""
        model = self.model if model is None else model
        if self.case.tower:
            return tower_inputs(model)
        mask = {"attention_mask": self.real.long()} if self.case.padded else {}
        return inputs_of(model, self.ids) | mask


@contextlib.contextmanager
def _without_progress_bars() -> Generator[None]:
    shown = transformers.logging.is_progress_bar_enabled()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.logging.enable_progress_bar()


def token_ids(case: Case) -> torch.Tensor:
    """Return the token ids of a case, `[2, tokens]`, always the same."""
    return (torch.arange(2 * case.tokens, device="cpu").reshape(2, -1) * 7 + 3) % VOCABULARY


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


def answers(model: nn.Module, case: Case, inputs: dict[str, Any]) -> list[torch.Tensor]:
    """Run a model that holds a tower; return its logits and the floating-point tensors that the tower returned."""
    found: list[torch.Tensor] = []

    def note(_module: nn.Module, _args: Any, out: Any) -> None:
        values: list[Any] = (
            list(out.values()) if isinstance(out, Mapping) else list(out) if isinstance(out, tuple) else [out]
        )
        found.extend(v.float() for v in values if isinstance(v, torch.Tensor) and v.is_floating_point())

    towers = [s.model for s in Walk(model).submodels if s.architecture == case.architecture]
    handles = [hooks.after(tower, note) for tower in towers]
    try:
        logits = model(**inputs).logits.float()
    finally:
        for handle in handles:
            handle.remove()
    return [logits, *found]


def tiny_of(case: Case) -> nn.Module:
    """Return the tiny language model of a case, or the model around its tower, with its own random weights.

    Raises:
        InputError: The case names an unknown architecture, or transformers rejects its config.
    """
    if case.tower:
        return tower_model(case.architecture, case.layers, **case.config)
    if case.layers is not None:
        with contextlib.suppress(InputError):
            return _tiny(case, case.layers, num_hidden_layers=case.layers)
    return _tiny(case, LAYERS)


def _keep_wide(model: PreTrainedModel) -> None:
    """Put back in float32 what the loader keeps so in every half-precision load: routers that compute in float32."""
    for name in kept_wide(model)[1]:
        for path, parameter in model.named_parameters():
            if re.search(rf"(^|\.){name}($|\.)", path):
                parameter.data = parameter.data.float()


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


def build(case: Case, make: Callable[[Case], nn.Module] = tiny_of) -> Trial:
    """Build a case. The reference has the weights rounded to the case's dtype, and buffers in float32.

    Args:
        case: The case.
        make: Builds the language model of the case.

    Raises:
        InputError: The case names an unknown architecture or composite, or a glob that matches nothing.
    """
    llm, model = _whole(case, make)
    master = nn.Module.to(copy.deepcopy(model), case.device).eval()
    with torch.no_grad():
        for parameter in master.parameters():
            parameter.copy_(parameter.to(getattr(torch, case.dtype)))
    return Trial(case, _as_run(case, llm, model), master)


def model_of(case: Case, make: Callable[[Case], nn.Module] = tiny_of) -> nn.Module:
    """Build the model of a case alone, as `build` does, without its reference."""
    return _as_run(case, *_whole(case, make))


def _whole(case: Case, make: Callable[[Case], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Return the language model of a case and the model that holds it, in float32."""
    llm = make(case)
    rescale(llm, case.scale, case.fill)
    if case.overflow and case.tower:
        overflow(llm, tower_inputs(llm), case.architecture)
    elif case.overflow:
        overflow(llm, inputs_of(llm, token_ids(case)))
    if case.branches:
        branch_overflow(llm, inputs_of(llm, token_ids(case)))
    if case.inside is not None and case.inside not in COMPOSITES:
        raise InputError(f"Case(inside={case.inside!r}): no such composite; there are: {', '.join(COMPOSITES)}")
    return llm, COMPOSITES[case.inside](llm) if case.inside else llm


def _as_run(case: Case, llm: nn.Module, model: nn.Module) -> nn.Module:
    """Cast a model to a case's dtype, in place, and set its attention implementation; return it."""
    nn.Module.to(model, case.device, getattr(torch, case.dtype)).eval()
    for module in llm.modules():
        if isinstance(module, PreTrainedModel):
            _keep_wide(module)
            choose(module.config, case.attention)
    return model
