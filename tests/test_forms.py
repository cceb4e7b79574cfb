"""Case 54: export, fake tensors, meta and torch.func do with the patched model what they do with the stock one."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import hfpatch
from hfpatch.lab.tiny import tiny_model
from hfpatch.numerics.float32 import Float32ComputeProxy
from hfpatch.patching.kinds.compute_in_float32 import ComputeInFloat32
from tests.sampling import first_quick, slow

Batch = dict[str, Any]
TORCH_NORMS = ("gpt2", "gpt_neox", "opt", "t5", "pegasus")


def forward(model: Any, batch: Batch) -> torch.Tensor:
    return model(**batch, use_cache=False).logits


def fake(model: Any, batch: Batch) -> torch.Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return forward(model, {k: torch.zeros(v.shape, dtype=v.dtype) for k, v in batch.items()})


def meta(model: Any, batch: Batch) -> torch.Tensor:
    return copy.deepcopy(model).to("meta")(**{k: v.to("meta") for k, v in batch.items()}).logits


def exported(strict: bool) -> Callable[[Any, Batch], torch.Tensor]:
    def run(model: Any, batch: Batch) -> torch.Tensor:
        words = {**batch, "use_cache": False}
        return torch.export.export(model, (), words, strict=strict).module()(**words).logits

    return run


def graph(model: Any, batch: Batch) -> torch.Tensor:
    return make_fx(lambda ids: forward(model, {"input_ids": ids}))(batch["input_ids"])(batch["input_ids"])


def scripted(model: Any, batch: Batch) -> torch.Tensor:
    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return forward(self.model, {"input_ids": ids})

    return torch.jit.trace(Logits(), (batch["input_ids"],), check_trace=False)(batch["input_ids"])


def functional(model: Any, batch: Batch) -> torch.Tensor:
    return functional_call(model, dict(model.named_parameters()), (), {**batch, "use_cache": False}).logits


def mapped(model: Any, batch: Batch) -> torch.Tensor:
    rows = {k: torch.stack([v, v]) for k, v in batch.items()}
    return vmap(lambda row: forward(model, row))(rows)[0]


def gradient(model: Any, batch: Batch) -> torch.Tensor:
    given = {k: v.detach() for k, v in model.named_parameters()}
    found = grad(lambda p: functional_call(model, p, (), {**batch, "use_cache": False}).logits.float().sum())(given)
    return torch.cat([g.float().flatten() for g in found.values()])


def tangent(model: Any, batch: Batch) -> torch.Tensor:
    given = {k: v.detach() for k, v in model.named_parameters()}
    along = {k: torch.full_like(v, 1e-3) for k, v in given.items()}
    return jvp(lambda p: functional_call(model, p, (), {**batch, "use_cache": False}).logits, (given,), (along,))[0]


def pair(architecture: str) -> tuple[Any, Any, Batch]:
    stock = tiny_model(architecture)
    stock = stock if architecture == "t5" else stock.half()
    patched = copy.deepcopy(stock)
    only = "wo-overflow" if architecture == "t5" else "fp16-residual-overflow"
    assert hfpatch.apply(patched, only=only, verbose=False).edits
    ids = torch.arange(1, 9)[None]
    batch = {"input_ids": ids}
    return stock, patched, {**batch, "decoder_input_ids": ids} if stock.config.is_encoder_decoder else batch


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", first_quick(TORCH_NORMS))
@pytest.mark.parametrize("form", [fake, meta])
def test_forms_without_values(form: Any, architecture: str) -> None:
    stock, patched, batch = pair(architecture)
    with torch.no_grad():
        want, got = form(stock, batch), form(patched, batch)
    assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device)


@pytest.mark.parametrize(
    ("architecture", "form"),
    [
        *((name, form) for name in TORCH_NORMS[:1] for form in (functional, mapped, tangent)),
        *(slow(name, form) for name in TORCH_NORMS[1:] for form in (functional, mapped, tangent)),
        *(slow(name, exported(strict=False)) for name in TORCH_NORMS),
        slow("opt", graph),
        slow("opt", scripted),
        ("gpt2", scripted),
        slow("gpt2", exported(strict=True)),
        pytest.param("t5", exported(strict=True), marks=pytest.mark.thorough),
    ],
)
def test_forms_with_values(form: Any, architecture: str) -> None:
    stock, patched, batch = pair(architecture)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        form(stock, batch)
        got, eager = form(patched, batch), forward(patched, batch)
    assert torch.equal(got, eager) if form is not mapped else torch.allclose(got, eager, atol=2e-3)


@pytest.mark.parametrize("architecture", ["gpt2", "t5"])
def test_gradients_of_torch_func(architecture: str) -> None:
    stock, patched, batch = pair(architecture)
    assert gradient(stock, batch).isfinite().all()
    got = gradient(patched, batch)
    forward(patched, batch).float().sum().backward()
    mine = [torch.zeros_like(p) if p.grad is None else p.grad for p in patched.parameters()]
    assert torch.equal(got, torch.cat([g.float().flatten() for g in mine]))


def test_what_stands_for_a_tensor_of_another_class() -> None:
    """Functions that do not compute in float32, methods and operators give what the tensor itself gives."""

    class Own(torch.Tensor):
        pass

    norm = torch.nn.LayerNorm(4).half()
    values = torch.arange(8.0).reshape(2, 4).half()
    ((handed, *_), _) = ComputeInFloat32()(norm, (values.as_subclass(Own),), {})  # pyright: ignore
    assert type(handed) is Float32ComputeProxy
    assert handed.dtype is torch.float16
    assert torch.equal(torch.cat([handed, values]), torch.cat([values, values]))
    assert torch.equal(handed * 2 + handed[0], values * 2 + values[0])
    assert torch.equal(norm(handed), torch.nn.functional.layer_norm(values.float(), (4,)))
    assert norm(handed).dtype is torch.float32
