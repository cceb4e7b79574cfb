"""S3: the positions that sparse indexers choose under autocast are those of float32."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hfpatch.patches.shared.fp32_indexer import CONFIGS
from torch import nn

import hfpatch
from hfpatch.lab.tiny import tiny_model
from hfpatch.patching.verifying.chosen import choices, indexers
from tests.fingerprint import fingerprint
from tests.sampling import first_quick

ID = "fp32-indexer"
IDS = torch.randint(0, 64, (2, 48), generator=torch.Generator().manual_seed(0))


def made(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return nn.Module.to(tiny_model(name, **CONFIGS[name]), dtype)


def chosen(model: Any, autocast: torch.dtype | None) -> list[Any]:
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        return choices(model, lambda: model(input_ids=IDS))


@pytest.mark.need(
    "the indexer's scores in float32",
    "one call",
    "`hfpatch.apply(model)` (`fp32-indexer`): the positions of float32 under autocast, in eleven architectures",
)
@pytest.mark.parametrize("weights", first_quick([torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("name", first_quick(list(CONFIGS)))
def test_the_same_positions_as_in_float32(name: str, weights: torch.dtype) -> None:
    model = made(name, weights)
    half = torch.bfloat16
    stock = chosen(model, half)
    assert {c.product for c in stock} == {"bfloat16"}  # autocast undoes q.float()
    assert max(c.error for c in stock) > 1e-3
    hfpatch.apply(model, only=ID, verbose=False)
    found = chosen(model, half)
    assert len(found) == len(stock)
    assert all(c.product == "float32" and c.equal == c.rows > 0 and c.error < 1e-6 for c in found)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_without_autocast_nothing_changes(weights: torch.dtype) -> None:
    model = made("deepseek_v32", weights)
    assert {c.product for c in chosen(model, None)} == {"float32"}  # already so
    with torch.no_grad():
        before = model(input_ids=IDS).logits
        hfpatch.apply(model, only=ID, verbose=False)
        assert torch.equal(model(input_ids=IDS).logits, before)


def test_in_float16_a_score_does_not_overflow() -> None:
    model = made("axk2")
    for module in indexers(dict(model.named_modules())).values():
        module.wq_b.weight.data.mul_(1e5)  # type: ignore[union-attr,operator]
        module.k_norm.weight.data.fill_(1e3)  # type: ignore[union-attr,operator]
    stock = chosen(model, torch.float16)
    assert not max(c.error for c in stock) < 1e-2 or sum(c.equal < c.rows for c in stock)
    hfpatch.apply(model, only=ID, verbose=False)
    assert all(c.equal == c.rows for c in chosen(model, torch.float16))


def test_generates_with_a_cache() -> None:
    model = made("deepseek_v32")
    hfpatch.apply(model, only=ID, verbose=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.generate(IDS, max_new_tokens=3, do_sample=False).shape == (2, 51)


def test_autocast_is_as_before_whatever_is_raised() -> None:
    model = made("deepseek_v32")
    hfpatch.apply(model, only=ID, verbose=False)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    model.model.layers[1].self_attn.indexer.wk.register_forward_pre_hook(stop)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(KeyboardInterrupt):
            model(input_ids=IDS)
        assert torch.is_autocast_enabled("cpu")
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for p in model.parameters())


class TestLife:
    def test_copies_revert_alone(self) -> None:
        model = made("axk2")
        before = fingerprint(model)
        fix = hfpatch.apply(model, only=ID, verbose=False)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
            forward: Any = other.model.layers[0].self_attn.indexer.forward
            assert forward.module is other.model.layers[0].self_attn.indexer
            assert all(c.equal == c.rows for c in chosen(other, torch.bfloat16))
            hfpatch.revert(other)
            assert "forward" not in other.model.layers[0].self_attn.indexer.__dict__
        fix.revert()
        assert fingerprint(model) == before

    @pytest.mark.parametrize("first", ["patch", "accelerate"])
    def test_accelerate(self, first: str) -> None:
        from accelerate.hooks import AlignDevicesHook, add_hook_to_module

        model = made("axk2", torch.bfloat16)
        want = chosen(model, torch.bfloat16)

        def wrap() -> None:
            for module in model.modules():
                add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True))

        if first == "accelerate":
            wrap()
        fix = hfpatch.apply(model, only=ID, verbose=False)
        if first == "patch":
            wrap()
        assert {e.state.word for e in hfpatch.status(model).edits} == {"here"}
        assert all(c.equal == c.rows for c in chosen(model, torch.bfloat16))
        fix.revert()
        assert not hfpatch.status(model)
        assert [c.error for c in chosen(model, torch.bfloat16)] == [c.error for c in want]

    @pytest.mark.thorough
    def test_compiled(self) -> None:
        torch._dynamo.reset()
        model: Any = tiny_model("deepseek_v32", num_hidden_layers=1, index_topk=4)
        hfpatch.apply(model, only=ID, verbose=False)
        compiled: Any = torch.compile(model, backend="eager")
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            want, out = model(input_ids=IDS).logits, compiled(input_ids=IDS).logits
        assert torch.equal(out, want)

    def test_another_model_has_none(self) -> None:
        (row,) = hfpatch.plan(tiny_model("deepseek_v3"), only=ID).decisions
        assert row.decided == "refused"
        assert "does not support deepseek_v3" in row.reason
