"""What a cell of the matrix runs: a patched model through a wrapper, from apply to revert, against the model without.

`through` is the cell of an ordinary wrapper. Rows of `tests/wrapped` that need other steps use its parts.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import hfpatch
from hfpatch.compat import hooks as tables
from hfpatch.errors import HfpatchError
from hfpatch.guarding.checks import clean_name
from hfpatch.patching.record import records_of
from tests.guard_worker import whole
from tests.interrupts import Subject

Outcome = tuple[str, str]
"""`works`, `refused`, `untried` or `FAILS`, and the text that stands beside it."""
Wrap = Callable[[Any], Any]

IDS = (torch.arange(16).reshape(2, 8) * 7 + 3) % 64
ADDS = ("lora-target-expansion",)
"""Patches that add parameters."""


def call(model: nn.Module) -> torch.Tensor:
    """Logits without gradients, of features before the text where the model takes them."""
    with torch.no_grad():
        return logits(model)


def logits(model: nn.Module) -> torch.Tensor:
    return model(**inputs(model)).logits.float()


def inputs(model: nn.Module) -> dict[str, torch.Tensor]:
    """Arguments of a model, on its device."""
    inner: Any = model
    while hasattr(inner, "module") or hasattr(inner, "_orig_mod"):
        inner = inner.module if hasattr(inner, "module") else inner._orig_mod
    inner = getattr(getattr(inner, "base_model", inner), "model", inner) if hasattr(inner, "peft_config") else inner
    device = next(model.parameters()).device
    features = {"features": torch.linspace(-1, 1, 2 * 3 * 24).reshape(2, 3, 24)}
    given = {"input_ids": IDS, **(features if hasattr(inner, "speech_proj") else {})}
    return given if device.type == "meta" else {name: tensor.to(device) for name, tensor in given.items()}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients of a step, by the end of the parameter's name that no wrapper changes; those that are there."""
    model.zero_grad()
    logits(model).square().mean().backward()
    found = {clean_name(name): p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {name.removeprefix("base_model.model."): whole(grad) for name, grad in found.items()}


def through(subject: Subject, wrap: Wrap, order: str, *, rounding: float = 1e-5, merged: bool = False) -> Outcome:
    """Run a cell: apply, run, a step, save and load, revert.

    Args:
        subject: Model and patch.
        wrap: The wrapper.
        order: `before` or `after`: the wrapper comes before the patch, or after it.
        rounding: How far outputs in half precision may be from those without the wrapper, which may round otherwise.
        merged: True for a wrapper that merges the adapter which a patch may have added to.
    """
    model = subject.make().eval()
    plain = copy.deepcopy(model)
    hfpatch.apply(plain, only=subject.patch, verbose=False)
    wanted = call(plain)
    if next(model.parameters()).dtype == torch.float32:
        rounding = 1e-5
    unpatched = wrap(copy.deepcopy(model))
    names, stock = list(unpatched.state_dict()), call(unpatched)
    torch._dynamo.reset()
    if order == "before":
        wrapped = wrap(model)
        fix = hfpatch.apply(wrapped, only=subject.patch, verbose=False)
    else:
        fix = hfpatch.apply(model, only=subject.patch, verbose=False)
        wrapped = wrap(model)
    assert fix.edits, "nothing was applied"
    status = hfpatch.status(wrapped)
    assert not status.lapsed, str(status)
    if subject.patch in ADDS and merged:
        assert not status.edits, str(status)
        assert torch.allclose(call(wrapped), wanted, rtol=1e-5, atol=1e-5), "merging changed the outputs"
        return "works", "merged with the rest of its adapter, so nothing is left to revert"
    in_force(fix, wrapped)
    try:
        got = call(wrapped)
    except HfpatchError as error:  # said when it runs, and can be taken back
        hfpatch.revert(wrapped)
        ends(wrapped, stock, "")
        return "refused", f"when it runs: {error}"
    close(got, wanted, rounding)
    if subject.patch not in ADDS:
        assert list(wrapped.state_dict()) == names, "the state dict has other names"
    known = {clean_name(name) for name, _ in unpatched.named_parameters()}
    same_gradients(wrapped, plain, known, rounding)
    assert not hfpatch.status(wrapped).lapsed, "an edit is gone after a step"
    saved = {} if subject.patch in ADDS else weights(wrapped)
    outcome = taken_back(fix, wrapped, stock)
    if saved:  # after the revert, because it resets what is compiled
        reloaded(fix, saved, unpatched, (stock, wanted), rounding)
    return outcome


def taken_back(fix: hfpatch.Applied, wrapped: nn.Module, stock: torch.Tensor) -> Outcome:
    """Revert through the wrapper, and raise unless the stock model is back or it is said why not."""
    try:
        hfpatch.revert(wrapped)
        if hfpatch.status(wrapped).edits:  # an obstacle, which is said
            hfpatch.revert(fix.model)
            stays = wrapped is fix.model
            assert bool(hfpatch.status(wrapped).edits) is stays, "the revert left edits"
            said = "not put back while it is wrapped, and says so" if stays else "put back on the model it holds"
            return "works", said
    except hfpatch.errors.RevertError as error:
        assert "torch._dynamo.reset()" in str(error)
        torch._dynamo.reset()
        hfpatch.revert(wrapped)
        return ends(wrapped, stock, "revert asks for torch._dynamo.reset() first")
    return ends(wrapped, stock, "")


def in_force(fix: hfpatch.Applied, wrapped: nn.Module) -> None:
    """Raise unless status finds what was applied, with the patches that it needs."""
    status = hfpatch.status(wrapped)
    assert not status.lapsed, str(status)
    assert {d.patch for d in fix.plan.of("applied")} == set(status.patches), str(status)


def close(got: torch.Tensor, wanted: torch.Tensor, rounding: float = 1e-5) -> None:
    """Raise where outputs differ by more than rounding."""
    off = f"outputs differ by {(got - wanted).abs().max():.1e}"
    assert torch.allclose(got, wanted, rtol=rounding, atol=rounding), off


def weights(wrapped: nn.Module) -> dict[str, torch.Tensor]:
    """Return a state dict as it is loaded from a file, shards as they are; nothing where weights are fetched."""
    state = wrapped.state_dict()
    if any(t.is_meta for t in state.values()):
        return {}
    if any(isinstance(t, DTensor) for t in state.values()):
        return {name: tensor.clone() for name, tensor in state.items()}
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def reloaded(
    fix: hfpatch.Applied,
    saved: dict[str, torch.Tensor],
    unpatched: nn.Module,
    outputs: tuple[torch.Tensor, torch.Tensor],
    rounding: float,
) -> None:
    """Raise unless the saved weights give a model without the patch the outputs that the plan says.

    Args:
        fix: What was applied.
        saved: The weights of the patched model.
        unpatched: A stock model in the same wrapper, which takes the weights.
        outputs: Of the stock model and of the patched one.
        rounding: As for `through`.
    """
    torch._dynamo.reset()
    unpatched.load_state_dict(saved)
    places = {edit.change.in_checkpoint for d in fix.plan.of("applied") for edit in d.edits}
    if places == {"weights"}:
        close(call(unpatched), outputs[1], rounding)
    else:
        assert places <= {"nowhere", "loader"}, str(places)
        assert torch.equal(call(unpatched), outputs[0]), "the saved weights are not the stock model's"


def same_gradients(wrapped: nn.Module, plain: nn.Module, known: set[str], rounding: float = 1e-5) -> None:
    """Raise where a step through the wrapper gives a parameter that the patch did not add another gradient."""
    bound = max(2e-3, 4 * rounding)
    if not any(p.requires_grad for p in wrapped.parameters()) or any(p.is_meta for p in wrapped.parameters()):
        return  # weights that are fetched for each call cannot be trained
    wanted, got = gradients(plain), gradients(wrapped)
    known = {name.removeprefix("base_model.model.") for name in known}
    for name, gradient in got.items():
        if name in wanted and name in known:
            scale = float(wanted[name].abs().max())
            torch.testing.assert_close(
                gradient, wanted[name], rtol=bound, atol=bound * scale, msg=f"gradient of {name}"
            )
    assert got, "no gradient"


def ends(wrapped: nn.Module, stock: torch.Tensor, text: str) -> Outcome:
    """Raise if a revert left a record or a hook, or other outputs than the stock ones."""
    torch._dynamo.reset()
    for module in wrapped.modules():
        assert not records_of(module), "a record stayed"
        ours = [h for table in tables.tables(module) for h in table.values() if _ours(h)]
        assert not ours, f"a hook stayed: {ours}"
    assert torch.equal(call(wrapped), stock), "the stock outputs did not come back"
    return "works", text


def _ours(hook: object) -> bool:
    return type(hook).__module__.startswith("hfpatch.patching")
