"""Private names that hfpatch relies on, each held against what the public way does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hfpatch.compat import hooks, initial, sharding
from hfpatch.testing import tiny_model
from tests import lifecycle


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("with_kwargs", [False, True])
def test_a_hook_is_called_as_torch_would_call_it(first: bool, with_kwargs: bool) -> None:
    def trail(public: bool) -> list[Any]:
        called: list[Any] = []
        layer = nn.Linear(2, 2)

        def note(name: str) -> Any:
            return lambda _module, *given: called.append((name, len(given)))

        layer.register_forward_pre_hook(note("there before"))
        layer.register_forward_hook(note("there after"))
        if public:
            layer.register_forward_pre_hook(note("before"), prepend=first, with_kwargs=with_kwargs)
            layer.register_forward_hook(note("after"), prepend=first, with_kwargs=with_kwargs)
        else:
            hooks.before(layer, note("before"), first=first, with_kwargs=with_kwargs)
            hooks.after(layer, note("after"), first=first, with_kwargs=with_kwargs)
        layer(torch.ones(1, 2))
        return called

    assert trail(public=False) == trail(public=True)


def test_a_hook_that_is_always_called_hears_of_an_exception() -> None:
    called: list[str] = []

    class Raises(nn.Module):
        def forward(self) -> None:
            raise ValueError("no")

    module = Raises()
    hooks.after(module, lambda *_: called.append("always"), always=True)
    hooks.after(module, lambda *_: called.append("usual"))
    with pytest.raises(ValueError, match="no"):
        module()
    assert called == ["always"]


def test_removal_leaves_the_tables_as_they_were() -> None:
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: None)
    was = [dict(table) for table in hooks.tables(layer)]
    handles = [hooks.before(layer, print, with_kwargs=True), hooks.after(layer, print, always=True, with_kwargs=True)]
    assert [dict(table) for table in hooks.tables(layer)] != was
    for handle in handles:
        handle.remove()
        handle.remove()
    assert [dict(table) for table in hooks.tables(layer)] == was


def test_torch_never_hands_out_a_key_of_ours() -> None:
    """Also where a loaded model has the number that torch comes to next."""
    layer = nn.Linear(2, 2)
    ours = hooks.before(layer, lambda *_: None)
    assert ours.key < 0
    for _ in range(3):
        assert layer.register_forward_pre_hook(lambda *_: None).id >= 0
    assert ours.key in layer._forward_pre_hooks


def test_hooks_are_found_again_on_a_copy() -> None:
    class Hook:
        def __call__(self, *_: Any) -> None: ...

    layer, hook = nn.Linear(2, 2), Hook()
    hooks.after(layer, hook)
    copied = copy.deepcopy(layer)
    assert hooks.keys(copied, [hook]) == []
    assert hooks.keys(copied, copied._forward_hooks.values()) == hooks.keys(layer, [hook])
    hooks.drop(copied, hooks.keys(layer, [hook]))
    assert not copied._forward_hooks
    assert layer._forward_hooks


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "m2m_100", "falcon_h1"])
def test_a_model_on_meta_is_filled_as_transformers_fills_it(name: str) -> None:
    """Dtypes of a build on meta are those of a build on the CPU; what is filled has the values of that build."""
    model = tiny_model(name)
    for dtype in (torch.float32, torch.bfloat16):
        made = type(model)._from_config(copy.deepcopy(model.config), dtype=dtype)
        hollow = initial.without_weights(type(model), model.config, dtype)
        assert {n: b.dtype for n, b in hollow.named_buffers()} == {n: b.dtype for n, b in made.named_buffers()}
        assert all(p.is_meta for p in hollow.parameters())
    was = torch.get_rng_state()
    tables = {
        "llama": "model.rotary_emb",
        "gemma3_text": "model.embed_tokens",
        "m2m_100": "model.encoder.embed_positions",
    }
    if name in tables:
        module = hollow.get_submodule(tables[name])
        for buffer in dict(module.named_buffers()):
            there = module.get_buffer(buffer)
            setattr(module, buffer, torch.full(there.shape, torch.nan, dtype=there.dtype, device="cpu"))
        initial.fill(hollow, module)
        for buffer, value in module.named_buffers():
            assert torch.equal(value, made.get_submodule(tables[name]).get_buffer(buffer))
    assert torch.equal(torch.get_rng_state(), was)


def test_the_default_dtype_comes_back() -> None:
    with pytest.raises(KeyboardInterrupt), initial.default_dtype(torch.float64):
        assert torch.ones(1).dtype == torch.float64
        raise KeyboardInterrupt
    assert torch.ones(1).dtype == torch.float32


@pytest.mark.parametrize(
    ("words", "casts", "said"),
    [
        ({"param_dtype": torch.float16}, True, "cast_forward_inputs=False"),
        ({"param_dtype": torch.bfloat16}, True, "cast_forward_inputs=False"),
        ({"param_dtype": torch.float16, "cast_forward_inputs": False}, False, ""),
        ({"param_dtype": torch.float32}, False, ""),
        ({"output_dtype": torch.float16}, True, "output_dtype=None"),
        ({}, False, ""),
    ],
)
def test_a_policy_of_fsdp_is_read_as_fsdp_does_it(words: dict[str, Any], casts: bool, said: str) -> None:
    lifecycle.gloo()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    seen: list[torch.dtype] = []

    class Passes(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.dtype)
            return x * 1

    layer = Passes(2, 2)
    assert sharding.narrows_stream(layer) == ""
    fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(**words))
    out = layer(torch.ones(1, 2))
    assert ({*seen, out.dtype} != {torch.float32}) is casts
    found = sharding.narrows_stream(layer)
    assert said in found
    assert bool(found) is casts


def test_hooks_around_many_modules_are_called_as_torch_would_call_them_and_leave_no_trace() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].register_forward_pre_hook(lambda *_: None)
    was = [[dict(table) for table in hooks.tables(m)] for m in model.modules()]
    called: list[tuple[str, int]] = []
    around = [
        (
            layer,
            lambda *given: called.append(("before", len(given))),
            lambda *given: called.append(("after", len(given))),
        )
        for layer in model
    ]
    key = hooks.around(around)
    model(torch.ones(1, 2))
    assert called == 2 * [("before", 3), ("after", 3)]
    hooks.drop_around(around, key)
    hooks.drop_around(around, key)
    assert [[dict(table) for table in hooks.tables(m)] for m in model.modules()] == was
