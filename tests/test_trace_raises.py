"""A forward that raises under a trace, and models that cannot be run twice: what is said, and that nothing is left."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import StaticCache

import hfpatch
from benchmarks.planted import Own
from hfpatch.model.kept_state import state_as_before
from hfpatch.symptoms import FINITE
from hfpatch.testing import tiny_model
from tests.fingerprint import fingerprint

IDS = torch.arange(16).view(2, 8)
NAN = float("nan")


def failed(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The finding of a model that raises."""
    with hfpatch.trace(model) as t, pytest.raises((RuntimeError, ValueError, LookupError, TypeError)):
        model(*args, **kwargs)
    assert len([f for f in t.findings if f.symptom not in FINITE]) == 1
    assert t.first_bad.phase == "forward"
    return t.first_bad


def linear(function: Any, **batch: Any) -> Any:
    return failed(Own(function, a=nn.Linear(8, 8)), x=torch.randn(2, 3, 8), **batch)


class TestException:
    def test_it_is_the_models_own(self) -> None:
        class Mine(RuntimeError):
            pass

        def fails(_: Any) -> None:
            raise error

        error = Mine("no")
        with pytest.raises(Mine) as caught, hfpatch.trace(Own(fails)) as t:
            t.model()
        assert caught.value is error
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None
        assert t.first_bad.why.startswith("it raises Mine: no at test_trace_raises.py:")
        assert "Nothing went wrong" not in str(t.report())

    def test_one_that_is_being_handled_around_a_healthy_call_is_not_the_models(self) -> None:
        model = Own(lambda m: None)  # its output is None too
        with hfpatch.trace(model) as t:
            try:
                raise KeyError("elsewhere")
            except KeyError:
                model()
        assert t.first_bad is None

    def test_one_that_the_model_handles_is_no_finding(self) -> None:
        def tries(m: Any, x: torch.Tensor) -> torch.Tensor:
            try:
                return m.a(x[..., :3])
            except RuntimeError:
                return m.a(x)

        with hfpatch.trace(Own(tries, a=nn.Linear(8, 8))) as t:
            t.model(x=torch.randn(2, 8))
        assert t.first_bad is None

    def test_the_next_step_is_traced(self) -> None:
        model: Any = tiny_model("llama")
        with hfpatch.trace(model) as t:
            with pytest.raises(IndexError):
                model(IDS + 60)
            model(IDS)
        assert [len(t.steps), len(t.findings), t.first_bad.step] == [2, 1, 0]

    def test_out_of_memory_is_not_tried_again(self) -> None:
        calls: list[int] = []

        def grows(_: Any) -> None:
            calls.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory")

        assert "OutOfMemoryError: CUDA out of memory" in failed(Own(grows)).why
        assert len(calls) == 1

    def test_a_fault_before_it_comes_first(self) -> None:
        """Sampling from probabilities that are NaN raises; NaN is the fault."""
        model = Own(lambda m, x: torch.multinomial(m.a(x).log().softmax(-1), 1), a=nn.Linear(8, 8))
        with hfpatch.trace(model) as t, pytest.raises(RuntimeError):
            model(x=torch.full((2, 8), NAN))
        assert [f.symptom for f in t.findings] == ["bad-input", "raised"]


class TestCause:
    def test_lora_in_another_dtype(self) -> None:
        from peft import LoraConfig, get_peft_model

        model: Any = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules=["q_proj"]))
        layer = model.base_model.model.model.layers[1].self_attn.q_proj
        layer.lora_B.half()
        found = failed(model, input_ids=IDS)
        assert found.module == "base_model.model.model.layers.1.self_attn.q_proj.lora_B.default"
        assert (found.symptom, found.dtype) == ("mixed-dtypes", "float32 and float16")
        assert found.operand == "float32 [2x8x2], 'weight', float16 [32x2]"

    @pytest.mark.parametrize("checkpointing", [True, False])
    def test_one_block_cast(self, checkpointing: bool) -> None:
        model: Any = tiny_model("llama").train()
        if checkpointing:
            model.activation_checkpointing_enable()
        model.model.layers[1].mlp.half()
        found = failed(model, input_ids=IDS, labels=IDS, use_cache=False)
        assert (found.module, found.operation) == ("model.layers.1.mlp.gate_proj", "linear")
        assert "cast what model.layers.1.mlp is given to float16, or load it in float32" in found.why

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @pytest.mark.parametrize("patched", [True, False])
    def test_float32_embeddings_into_float16(self, attention: str, patched: bool) -> None:
        """The patched model refuses them as the stock one does, and the trace says what to cast."""
        model: Any = tiny_model("llama")
        model.set_attn_implementation(attention)
        given = model.get_input_embeddings()(IDS).detach()
        model.half()
        if patched:
            hfpatch.apply(model, only=["fp16-residual-overflow"])
        found = failed(model, inputs_embeds=given)
        assert found.symptom == "mixed-dtypes"
        assert "float32 enters the model as 'inputs_embeds': cast it to float16" in found.why
        assert model(inputs_embeds=given.half()).logits.isfinite().all()

    @pytest.mark.parametrize(
        ("function", "operation", "symptom", "words"),
        [
            (lambda m, x: torch.cat([m.a(x), x[:, :1]], -1), "cat", "shape-mismatch", "[2x3x8] and float32 [2x1x8]"),
            (lambda m, x: m.a(x).view(7, 3), "view", "shape-mismatch", "the shape of float32 [2x3x8] does not fit"),
            (lambda m, x: F.conv1d(m.a(x), torch.ones(4, 4, 1)), "conv1d", "shape-mismatch", "[2x3x8]"),
            (lambda m, x: m.a(x) @ x.double().mT, "matmul", "mixed-dtypes", "float32 [2x3x8] and float64 [2x8x3]"),
            (lambda m, x: m.a(x)[torch.tensor([0, 9])], "getitem", "index-out-of-range", "indices go from 0 to 9"),
            (lambda m, x: m.a(x).gather(1, torch.full((2, 1, 1), 5)), "gather", "index-out-of-range", "from 5 to 5"),
            (lambda m, x: F.cross_entropy(m.a(x)[0], torch.ones(3).int()), "cross_entropy", "mixed-dtypes", ".long()"),
            (lambda m, x: F.embedding(x, m.a.weight), "embedding", "mixed-dtypes", "float32 [2x3x8] is int64"),
            (lambda m, x: m.a(x) + torch.ones(2, 3, 8, device="meta"), "add", "device-mismatch", "cpu and meta"),
            (lambda m, x: m.a(x).softmax(5), "softmax", "raised", "it is given float32 [2x3x8]"),
            (lambda m, x: {}["key"], "forward", "raised", "KeyError: 'key'"),
        ],
    )
    def test_named(self, function: Any, operation: str, symptom: str, words: str) -> None:
        found = linear(function)
        assert (found.module, found.operation, found.symptom) == ("", operation, symptom)
        assert words in found.why


class Stream(nn.Module):
    """A module with state of every kind that its forward writes; at the second call it divides by 0."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))
        self.past, self.last, self.queue = [torch.zeros(8)], None, deque([1], maxlen=3)
        self.nested = {"seen": {0}, "tensor": torch.zeros(2)}
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        self.past.append(x.detach())
        self.last = x.detach() * 1
        self.queue.append(int(self.count))
        self.nested["seen"].add(int(self.count))
        self.nested["tensor"].add_(1)
        self.nested["made"] = True
        noise = torch.rand(8, generator=self.generator) + random.random() + np.random.rand() + torch.rand(8)  # noqa: S311
        return self.linear(x + noise) / (0.0 if int(self.count) == 2 else 1.0)

    def state(self) -> Any:
        held = (self.past, self.last, self.queue, self.nested, self.mean, self.count, self.generator.get_state())
        return str([*held, random.getstate(), np.random.get_state(), torch.get_rng_state()]), fingerprint(self)


class TestTwice:
    def test_a_streaming_model_is_left_as_its_own_call_left_it(self) -> None:
        states: list[Any] = []
        for tracing in (False, True):
            torch.manual_seed(0), random.seed(0), np.random.seed(0)
            stream = Stream()
            model = nn.Sequential(nn.Linear(8, 8), stream, nn.Linear(8, 8)).train()
            x = torch.randn(2, 8)
            with hfpatch.trace(model, steps=[1] if tracing else []) as t:
                model(x)
                model(x).sum().backward()
            states.append(stream.state()[0])
        assert states[0] == states[1]
        assert t.first_bad.symptom == "unknown"
        assert "its forward changes count, generator, last, mean" in t.first_bad.why
        assert t.first_bad.why.endswith("all of it was put back")

    def test_a_generator_among_the_arguments_is_left_and_the_model_around_it_run_again(self) -> None:
        class Reads(nn.Module):
            def forward(self, parts: Iterator[torch.Tensor]) -> torch.Tensor:
                return torch.stack([part.log() for part in parts])

        model = Own(lambda m, x: m.b(part for part in m.a(x * 0) * 0), a=nn.Linear(8, 8), b=Reads())
        with hfpatch.trace(model) as t:
            model(x=torch.randn(2, 8))
        assert (t.first_bad.module, t.first_bad.operation, t.first_bad.why) == ("b", "log", "log of 0")

    def test_a_generator_that_the_model_was_given_is_said(self) -> None:
        model = Own(lambda m, parts: [m.a(part) / 0 for part in parts], a=nn.Linear(8, 8))
        with hfpatch.trace(model) as t:
            model(parts=(x for x in torch.ones(2, 8)))
        assert "its argument 'parts' is an iterator, which the first run used up" in t.first_bad.why

    def test_a_static_cache(self) -> None:
        model: Any = tiny_model("llama")
        model.model.layers[2].mlp.down_proj.register_forward_hook(lambda _m, _a, out: out * NAN)
        caches = [StaticCache(config=model.config, max_cache_len=16) for _ in range(2)]
        with torch.no_grad():
            model(IDS, past_key_values=caches[0])
            with hfpatch.trace(model) as t:
                model(IDS, past_key_values=caches[1])
        assert t.first_bad.module == "model.layers.2.mlp.down_proj"
        for a, b in zip(caches[0].layers, caches[1].layers, strict=True):
            assert torch.equal(a.keys.nan_to_num(7.0), b.keys.nan_to_num(7.0))
            assert torch.equal(torch.as_tensor(a.get_seq_length()), torch.as_tensor(b.get_seq_length()))


class TestKept:
    @pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
    def test_everything_comes_back_and_is_named(self, error: type[BaseException] | None) -> None:
        stream = Stream()
        before = stream.state()
        passed = [1, {"a": [2]}]
        changed: list[str] = []
        try:
            with state_as_before(stream.modules(), [passed]) as changed, torch.random.fork_rng():
                states = random.getstate(), np.random.get_state()
                stream(torch.randn(2, 8))
                random.setstate(states[0]), np.random.set_state(states[1])
                passed[1]["a"].append(3)  # pyright: ignore[reportIndexIssue]
                if error is not None:
                    raise error
        except (RuntimeError, KeyboardInterrupt):
            pass
        assert stream.state() == before
        assert passed == [1, {"a": [2]}]
        wanted = {"count", "mean", "past", "last", "queue", "nested", "generator", "an argument"}
        assert set(changed) == wanted

    def test_nothing_changed(self) -> None:
        model = nn.Sequential(nn.BatchNorm1d(4).eval())
        model[0].running_mean.fill_(NAN)
        with state_as_before(model.modules()) as changed:
            model(torch.ones(2, 4))
        assert changed == []
