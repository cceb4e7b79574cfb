"""Case 61: decoder layers that a user's own modules hold are found, and what those add goes with a float32 stream."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import hfpatch
from hfpatch.inspecting.eps import ADDED, norm_kinds
from hfpatch.lab.overflow import overflow
from hfpatch.lab.tiny import tiny_model
from hfpatch.model.survey import Survey
from tests.lifecycle import gloo
from tests.sampling import first_quick


class Around(nn.Module):
    """Holds a layer under a name of its own, and answers for it."""

    held = "base"

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.side = nn.Linear(width, width)
        setattr(self, self.held, layer)

    def __getattr__(self, key: str) -> Any:
        try:
            return super().__getattr__(key)
        except AttributeError:
            return getattr(super().__getattr__(self.held), key)

    def layer(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, self.held)(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        h = self.layer(*args, **kwargs)
        return h + 0.5 * self.side(h)


class Beside(Around):
    """Reads what goes into the layer; the layer has another name."""

    held = "frozen_block"

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.layer(hidden_states, *args, **kwargs) + 0.1 * self.side(hidden_states)


class Normed(Around):
    """With a norm of its own, so that it looks like a layer itself."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__(layer, width)
        self.norm, self.gate = nn.LayerNorm(width), nn.Parameter(torch.tensor(0.5))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        h = self.layer(*args, **kwargs)
        return h + self.gate * self.side(self.norm(h))


class Convolved(Around):
    """With a part that torch's kernels want in the dtype of its weights."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__(layer, width)
        self.norm, self.side = nn.LayerNorm(width), nn.Conv1d(width, width, 1)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        h = self.layer(*args, **kwargs)
        return h + self.side(self.norm(h).transpose(1, 2)).transpose(1, 2)


class Tuples(Around):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.layer(*args, **kwargs)
        h = out[0] if isinstance(out, tuple) else out
        h = h + 0.1 * self.side(h)
        return (h, *out[1:]) if isinstance(out, tuple) else h


def nested(layer: nn.Module, width: int) -> nn.Module:
    return Normed(Around(layer, width), width)


class CastsByHand(Around):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        h = self.layer(*args, **kwargs)
        return h + 0 * self.side(h.to(self.side.weight.dtype)).to(h.dtype)


class Multiplies(Around):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        h = self.layer(*args, **kwargs)
        return h + h @ self.side.weight


class HandsOnHalf(Around):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **kwargs).half()


class Several(Around):
    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__(layer, width)
        self.other = copy.deepcopy(layer)


class Derived(LlamaDecoderLayer):
    """A subclass of the layer it holds, with none of a layer's parts."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        nn.Module.__init__(self)
        self.inner, self.side = layer, nn.Linear(width, width)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = self.inner(hidden_states, *args, **kwargs)
        return out + 0.1 * self.side(out)


class Foreign(nn.Module):
    def __init__(self, layer: nn.Module, _width: int) -> None:
        super().__init__()
        self.hidden = [layer]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.hidden[0](*args, **kwargs)


def wrapped(architecture: str, make: Any, ids: torch.Tensor, only: int | None = None) -> Any:
    model = tiny_model(architecture)
    overflow(model, {"input_ids": ids})
    layers = model.transformer.h if architecture == "gpt2" else model.model.layers
    torch.manual_seed(0)
    for i, layer in enumerate(list(layers)):
        if only in (None, i):
            layers[i] = make(layer, model.config.hidden_size)
    return model.half().eval()


def decided(model: nn.Module, patch: str) -> Any:
    return next(d for d in hfpatch.plan(model).decisions if d.patch == patch)


@pytest.mark.parametrize("architecture", first_quick(["gemma3_text", "llama", "gpt2"]))
@pytest.mark.parametrize("make", [Around, Beside, Normed, Convolved, Tuples, nested], ids=lambda m: m.__name__)
def test_a_layer_is_found_in_what_holds_it(make: Any, architecture: str, ids: torch.Tensor) -> None:
    model = wrapped(architecture, make, ids)
    exact = copy.deepcopy(model).float()(input_ids=ids).logits.detach()
    with torch.no_grad():
        assert not model(input_ids=ids).logits.isfinite().all()
        fix = hfpatch.apply(model, verbose=False, only="fp16-residual-overflow")
        mine = model(input_ids=ids).logits
        assert ((mine.float() - exact).norm() / exact.norm()).item() < 4e-3
        fix.revert()
        assert not model(input_ids=ids).logits.isfinite().all()


def test_a_wrapper_that_is_a_subclass_of_the_layer(ids: torch.Tensor) -> None:
    model = wrapped("llama", Derived, ids)
    exact = copy.deepcopy(model).float()(input_ids=ids).logits.detach()
    hfpatch.apply(model, verbose=False, only="fp16-residual-overflow")
    with torch.no_grad():
        assert ((model(input_ids=ids).logits.float() - exact).norm() / exact.norm()).item() < 4e-3


def test_a_wrapper_around_one_layer_only(ids: torch.Tensor) -> None:
    model = wrapped("gemma3_text", Around, ids, only=1)
    exact = copy.deepcopy(model).float()(input_ids=ids).logits.detach()
    hfpatch.apply(model, verbose=False, only="fp16-residual-overflow")
    with torch.no_grad():
        mine = model(input_ids=ids).logits
    assert ((mine.float() - exact).norm() / exact.norm()).item() < 4e-3


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (CastsByHand, "model.layers.0 is a CastsByHand around the decoder layer: a part of it reads the stream in fl"),
        (Multiplies, "model.layers.0 is a Multiplies around the decoder layer: with a float32 stream and weights in "),
        (HandsOnHalf, "model.layers.0 is a HandsOnHalf around the decoder layer: it passes the stream on in float16"),
        (Several, "model.layers.0 is a Several, which holds 2 decoder layers, and which of them it runs is unknown"),
    ],
)
def test_what_cannot_be_looked_through_says_why(make: Any, why: str, ids: torch.Tensor) -> None:
    model = wrapped("llama", make, ids)
    said = decided(model, "fp16-residual-overflow")
    assert said.decided == "refused"
    assert said.reason.startswith(why)


@pytest.mark.parametrize("make", [Several, Foreign])
def test_a_final_norm_that_was_not_found_is_not_said_to_have_no_eps(make: Any, ids: torch.Tensor) -> None:
    model = wrapped("llama", make, ids)
    model.model.layers[0].norm = nn.LayerNorm(32, eps=1e-4)
    said = decided(model, "eps-alignment")
    assert said.decided == "refused"
    assert said.reason.startswith("the backbone's final norm was not found: ")


def test_a_norm_of_a_wrapper_is_aligned(ids: torch.Tensor) -> None:
    edits = hfpatch.plan(wrapped("llama", nested, ids), include="suggested").edits
    assert [e.path for e in edits if e.slot == "eps"] == [f"model.layers.{i}.norm" for i in range(4)]


def test_norms_in_a_held_layer_are_the_models_own(ids: torch.Tensor) -> None:
    model = wrapped("llama", Normed, ids)
    survey = Survey(model)
    added = {p for p in survey.added if p.startswith("model.layers.0")}
    assert added == {"model.layers.0", "model.layers.0.side", "model.layers.0.norm"}
    kinds = {kind.path: kind.source for kind in norm_kinds(survey)}
    assert kinds["model.layers.*.norm"] == ADDED
    assert kinds["model.layers.*.base.input_layernorm"] == "config: rms_norm_eps"


def test_a_planned_dtype_and_weights_that_are_not_loaded(ids: torch.Tensor) -> None:
    model = wrapped("llama", Around, ids).float()
    said = hfpatch.plan(model, compute_dtype="float16", only="fp16-residual-overflow").decisions[0]
    assert said.decided == "applied"
    said = next(d for d in hfpatch.plan(model.half().to("meta")).decisions if d.patch == "fp16-residual-overflow")
    assert (said.decided, "its weights are not loaded" in said.reason) == ("refused", True)


def test_wrappers_that_fsdp_shards(ids: torch.Tensor) -> None:
    """After the patch they run as before; a wrapper that is sharded already cannot be measured."""
    gloo()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    model, sharded = wrapped("llama", Around, ids), wrapped("llama", Around, ids)
    hfpatch.apply(model, verbose=False, only="fp16-residual-overflow")
    with torch.no_grad():
        want = model(input_ids=ids).logits
        for each in (model, sharded):
            for layer in each.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(each, mesh=mesh)
        assert torch.equal(model(input_ids=ids).logits, want)
    said = decided(sharded, "fp16-residual-overflow")
    assert said.decided == "refused"
    assert said.reason.startswith("model.layers.0 is a Around around the decoder layer: its weights are sharded")
