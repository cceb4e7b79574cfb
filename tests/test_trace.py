"""`hfpatch.trace`: what is found, where, and what is passed over; that nothing of the model changes."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, MixtralConfig, MixtralForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import ModelOutput

import hfpatch
from hfpatch.errors import InputError, NotAModelError
from hfpatch.lab.tiny import rescale, tiny_model
from hfpatch.tracing.showing import picture
from tests.fingerprint import fingerprint

NAN = float("nan")
LEVELS = ("blocks", "modules")


@dataclass
class Out(ModelOutput):
    h: torch.Tensor | None = None


class Block(nn.Module):
    """Case 07's block: NaN in its output, in one of several containers."""

    def __init__(self, kind: str, bad: bool = True) -> None:
        super().__init__()
        self.l, self.kind, self.bad = nn.Linear(4, 4), kind, bad

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        y = torch.full_like(x, NAN) if self.bad else x
        nested = {"deep": [(y, {"h": y})]}
        return {"dict": {"h": y}, "output": Out(h=y), "list": [y], "tensor": y, "tuple": (y,), "nested": nested}[
            self.kind
        ]


class Chain(nn.Module):
    """Modules one after the other, each called by a forward of our own."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        for index, module in enumerate(modules):
            self.add_module(f"m{index}", module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.children():
            x = module(x)
        return x


class Do(nn.Module):
    """A module that runs a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def traced(model: nn.Module, *args: Any, level: Any = "modules", **kwargs: Any) -> Any:
    with hfpatch.trace(model, level=level) as t, torch.no_grad():
        model(*args, **kwargs)
    return t


def trained(model: nn.Module, *args: Any, scale: float = 1.0, level: Any = "modules", **kwargs: Any) -> Any:
    with hfpatch.trace(model, level=level) as t:
        out = model(*args, **kwargs)
        loss = out if isinstance(out, torch.Tensor) else out["loss"]
        (loss.sum() * scale).backward()
    return t


def qk_overflow() -> nn.Module:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = Qwen2ForCausalLM._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("q_proj.bias", "k_proj.bias")):
                p.copy_(torch.randn_like(p) * 200)
    return model.half()


def mixtral(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
        )
    ).half()


class TestWhatDebugUnderflowOverflowMisses:
    @pytest.mark.parametrize("kind", ["tensor", "tuple", "list", "dict", "output", "nested"])
    def test_every_container(self, kind: str) -> None:
        found = traced(Block(kind), torch.ones(2, 4)).first_bad
        assert (found.phase, found.step, found.module, found.operation) == ("forward", 0, "", "full_like")
        assert found.holds == "8 NaN of 8 elements"

    @pytest.mark.parametrize("kind", ["dict", "output", "nested"])
    def test_in_a_module_inside(self, kind: str) -> None:
        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.inner = nn.Linear(4, 4), Block(kind)

            def forward(self, x: torch.Tensor) -> int:
                self.inner(self.a(x))
                return 0

        found = traced(Outer(), torch.ones(2, 4)).first_bad
        assert (found.module, found.operation) == ("inner", "full_like")

    def test_keyword_argument(self) -> None:
        found = traced(Block("tensor", bad=False), torch.ones(2, 4), mask=torch.tensor([NAN])).first_bad
        assert (found.symptom, found.tensor) == ("bad-input", "input 'mask' of the model")

    def test_bool_mask_empty_batch_and_additive_mask_are_healthy(self) -> None:
        block = Block("tensor", bad=False)
        assert traced(block, torch.ones(2, 4), torch.ones(2, dtype=torch.bool)).first_bad is None
        assert traced(block, torch.ones(0, 4)).first_bad is None
        t = traced(block, torch.ones(2, 4), torch.tensor([0.0, float("-inf")]))
        assert t.first_bad is None
        assert t.intentional == ["1 -Inf of 2 elements in input '1' of the model: an additive mask"]

    def test_padded_bert_is_healthy(self) -> None:
        ids = torch.arange(1, 13).reshape(2, 6)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        config = BertConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
        )
        assert traced(BertModel(config).eval(), input_ids=ids, attention_mask=mask).first_bad is None

    @pytest.mark.need(
        "cause: an overflow before a softmax",
        "one call",
        "`hfpatch.trace(model)` names it: `matmul of queries and keys`",
    )
    @pytest.mark.parametrize("level", LEVELS)
    def test_the_product_of_queries_and_keys_and_not_o_proj(self, level: str, ids: torch.Tensor) -> None:
        found = traced(qk_overflow(), ids, level=level).first_bad
        assert found.operation == "matmul of queries and keys"
        assert found.module == "model.layers.0.self_attn"
        assert found.symptom == "attention-logits-overflow"
        assert "exceeds float16's 65,504" in found.why


class TestOperation:
    @pytest.mark.parametrize("level", LEVELS)
    def test_residual_add(self, gemma: nn.Module, ids: torch.Tensor, level: str) -> None:
        """Case 04: every leaf is finite, the layer's own sum is not."""
        found = traced(gemma, ids, level=level).first_bad
        assert (found.operation, found.module, found.symptom) == ("residual add", "model.layers.1", "residual-overflow")
        left, _, right = found.why.partition(" exceeds ")[0].partition(" + ")
        assert abs(float(left) + float(right)) > 65504 > max(abs(float(left)), abs(float(right)))
        assert found.sentence.startswith("step 0, forward: residual add in model.layers.1: ")

    @pytest.mark.parametrize("level", LEVELS)
    def test_backward_overflow_of_a_finite_loss(self, ids: torch.Tensor, level: str) -> None:
        """Case 19: the forward pass peaks far below the limit and the loss is finite."""
        t = trained(mixtral(1), input_ids=ids, labels=ids, scale=2.0**20, level=level)
        found = t.first_bad
        assert (found.phase, found.symptom, found.ordinary) == ("backward", "scale-too-high", True)
        assert found.operation.startswith("cast to float16")
        assert t.steps[0].scale == 2.0**20
        assert "under the loss scale 1,048,576; without the scale it fits" in found.why

    def test_two_additive_masks_that_are_summed_are_meant(self) -> None:
        """Of order and of padding: the lowest float32 twice is -Inf, which the softmax turns into 0."""
        lowest = torch.finfo(torch.float32).min
        order = torch.full((4, 4), lowest).triu(1)
        padding = torch.tensor([0.0, 0.0, lowest, lowest])
        model = Chain(nn.Linear(4, 4), Do(lambda x: x + (order + padding)), nn.Softmax(-1), nn.Linear(4, 4))
        t = trained(model, torch.randn(4, 4))
        assert t.first_bad is None
        saturated = Chain(nn.Linear(4, 4), Do(lambda x: (x * 0 + lowest) + (x * 0 + lowest) * 0.5), nn.Linear(4, 4))
        assert trained(saturated, torch.randn(4, 4)).first_bad is not None

    def test_without_the_scale_nothing_is_wrong(self, ids: torch.Tensor) -> None:
        model = mixtral(1)
        hfpatch.apply(model, only="fp32-buffers", verbose=False)
        assert trained(model, input_ids=ids, labels=ids).first_bad is None

    @pytest.mark.parametrize("level", LEVELS)
    def test_backward_of_a_root(self, level: str) -> None:
        model = Chain(nn.Linear(8, 8), Do(lambda x: (x * 0).abs().sqrt()), nn.Linear(8, 8))
        found = trained(model, torch.randn(2, 8), level=level).first_bad
        assert (found.phase, found.module, found.symptom) == ("backward", "m1", "division-by-zero")
        assert "SqrtBackward0" in found.operation
        assert found.tensor == "gradient of output of m0"

    def test_gradient_of_a_weight_alone(self) -> None:
        """The gradients of activations are finite; the sum over 64 rows is not."""
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half()
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
            model[0].bias.fill_(40.0)
        with hfpatch.trace(model) as t:
            model(torch.ones(64, 4).half()).backward(torch.full((64, 4), 100.0).half())
        found = t.first_bad
        assert (found.phase, found.module, found.tensor) == ("gradients", "1", "gradient of parameter 'weight' of 1")
        assert found.operation.startswith("matmul")

    def test_expert(self) -> None:
        model = mixtral(1)
        rescale(model, {"*experts.gate_up_proj": 200.0, "*experts.down_proj": 3000.0}, {})
        found = traced(model, torch.arange(6)[None]).first_bad
        assert (found.operation, found.module) == ("matmul", "model.layers.0.mlp.experts")

    def test_linear_under_autocast(self, ids: torch.Tensor) -> None:
        model = tiny_model("llama")
        rescale(model, {"*layers.0.mlp.down_proj.weight": 1e6}, {})
        with hfpatch.trace(model) as t, torch.autocast("cpu", torch.float16):
            model(ids, labels=ids).loss.backward()
        found = t.first_bad
        assert (found.operation, found.module) == ("cast to float16", "model.layers.0.mlp.down_proj")
        assert "of 'weight'" in found.why

    def test_masked_row(self, ids: torch.Tensor) -> None:
        model = tiny_model("llama")
        mask = torch.full((2, 1, 12, 12), float("-inf")).triu(1)
        mask[0, :, :, :4] = float("-inf")
        found = traced(model, ids, attention_mask=mask).first_bad
        assert (found.operation, found.symptom) == ("softmax", "masked-row")
        assert found.module == "model.layers.0.self_attn"

    def test_rows_of_padding_only_are_meant(self, ids: torch.Tensor) -> None:
        """One layer: NaN at padded rows cannot reach a real token."""
        model = tiny_model("llama", num_hidden_layers=1)
        mask = torch.full((2, 1, 12, 12), float("-inf")).triu(1)
        mask[0, :, :, :4] = float("-inf")
        with torch.no_grad():
            logits = model(ids, attention_mask=mask).logits
        assert logits[0, :4].isnan().all()
        assert logits[0, 4:].isfinite().all()
        t = traced(model, ids, attention_mask=mask)
        assert t.first_bad is None
        assert any("rows of padding only" in words for words in t.intentional)

    def test_no_supervised_token(self, ids: torch.Tensor) -> None:
        """Case 14: NaN loss, gradients exactly 0."""
        found = trained(tiny_model("llama"), ids, labels=torch.full_like(ids, -100)).first_bad
        assert (found.operation, found.symptom, found.module) == ("cross entropy", "no-labels", "")

    def test_square_of_a_hand_written_norm_ends_in_zeros(self) -> None:
        """Case 18: 300 in float16 gives 0.0, and no NaN anywhere."""
        norm = Do(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        model = Chain(nn.Identity(), norm)
        x = torch.full((2, 8), 300.0).half()
        assert bool((model(x) == 0).all())
        found = traced(model, x).first_bad
        assert (found.symptom, found.module, found.operation) == ("silent-zero", "m1", "power")
        assert found.holds == "only zeros"

    def test_zeros_that_are_meant(self, ids: torch.Tensor) -> None:
        zeros = nn.Linear(4, 4)
        nn.init.zeros_(zeros.weight)
        nn.init.zeros_(zeros.bias)
        assert traced(Chain(nn.Linear(4, 4), zeros).half(), torch.ones(2, 4).half()).first_bad is None

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-12),
            lambda x: torch.nn.functional.normalize(x, dim=-1),
        ],
        ids=["rms", "normalize"],
    )
    def test_eps_that_is_zero_in_this_dtype(self, function: Any) -> None:
        found = traced(Chain(nn.Identity(), Do(function)), torch.zeros(2, 8).half()).first_bad
        assert (found.symptom, found.module) == ("eps-underflow", "m1")
        assert "eps 1e-12 is 0 in float16" in found.why

    def test_near_constant_row(self) -> None:
        model = Chain(nn.Linear(8, 8), nn.LayerNorm(8, eps=1e-12), nn.Linear(8, 8)).half()
        with torch.no_grad():
            model.m0.weight.zero_()
            model.m0.bias.fill_(3.0)
        found = trained(model, torch.ones(2, 8).half(), scale=2.0**12).first_bad
        assert (found.phase, found.symptom, found.module) == ("backward", "near-constant-row", "m1")

    def test_log_of_zero(self) -> None:
        entropy = Do(lambda x: (x.softmax(-1).log() * x.softmax(-1)).sum())
        found = traced(Chain(nn.Identity(), entropy), torch.tensor([[0.0, 1000.0]])).first_bad
        assert (found.operation, found.symptom) == ("log", "out-of-domain")

    def test_minus_infinity_written_on_purpose(self) -> None:
        top = Do(lambda x: x.masked_fill(x < x.max(-1, keepdim=True).values, float("-inf")))
        t = traced(Chain(nn.Linear(4, 4), top, nn.Softmax(-1)), torch.randn(3, 4))
        assert t.first_bad is None
        assert t.intentional == ["9 -Inf of 12 elements in output of m1: written on purpose"]

    def test_minus_infinity_by_overflow(self) -> None:
        found = traced(Chain(nn.Identity(), Do(lambda x: x * -3)), torch.full((2, 2), 3e4).half()).first_bad
        assert (found.operation, found.holds) == ("multiplication", "4 -Inf of 4 elements")

    def test_a_tensor_that_is_no_argument(self) -> None:
        bad = torch.tensor([NAN])
        found = traced(Chain(nn.Identity(), Do(lambda x: x + bad)), torch.ones(2)).first_bad
        assert (found.operation, found.symptom) == ("add", "bad-input")


class TestWeights:
    def test_parameter(self, ids: torch.Tensor) -> None:
        model = tiny_model("llama")
        model.set_attn_implementation("sdpa")
        with torch.no_grad():
            model.model.layers[1].self_attn.q_proj.weight[0, 0] = NAN
        found = traced(model, ids, level="blocks").first_bad
        assert (found.phase, found.symptom) == ("weights", "bad-weight")
        assert found.tensor == "parameter 'weight' of model.layers.1.self_attn.q_proj"

    def test_swallowed_query(self, ids: torch.Tensor) -> None:
        """The weights are finite, the query is not, the logits are: only the modules inside show it."""
        model = tiny_model("llama")
        rescale(model, {"*layers.0.self_attn.q_proj.weight": 4e5}, {})
        model = model.half()
        model.set_attn_implementation("sdpa")
        found = traced(model, ids).first_bad
        assert (found.operation, found.module) == ("matmul", "model.layers.0.self_attn.q_proj")

    def test_buffer(self, ids: torch.Tensor) -> None:
        model = tiny_model("llama")
        model.model.rotary_emb.inv_freq[0] = NAN
        found = traced(model, ids, level="blocks").first_bad
        assert (found.symptom, found.tensor) == ("bad-buffer", "buffer 'inv_freq' of model.rotary_emb")

    def test_uninitialised_buffer(self, ids: torch.Tensor) -> None:
        model = tiny_model("llama")
        model.model.rotary_emb.inv_freq.zero_()
        found = traced(model, ids, level="blocks").first_bad
        assert (found.phase, found.symptom) == ("weights", "uninitialised-buffer")
        assert "LlamaRotaryEmbedding computes" in found.why

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_a_rounded_buffer_is_said_last(self, ids: torch.Tensor, dtype: torch.dtype) -> None:
        model = tiny_model("llama").to(dtype).float()
        found = traced(model, ids).first_bad
        assert (found.symptom, found.module) == ("cast-buffer", "model.rotary_emb")
        assert "from_pretrained(dtype=) leaves exact" in found.why
        with torch.no_grad():
            model.model.norm.weight[0] = torch.inf
        t = traced(model, ids)
        assert t.first_bad.symptom != "cast-buffer"


class TestTraining:
    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpointing_forward(self, gemma: nn.Module, ids: torch.Tensor, reentrant: bool) -> None:
        gemma.train()
        gemma.gradient_checkpointing_enable({"use_reentrant": reentrant})
        gemma.enable_input_require_grads()
        assert trained(gemma, ids, labels=ids).first_bad.operation == "residual add"

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpointing_backward(self, ids: torch.Tensor, reentrant: bool) -> None:
        """The root lies inside a checkpointed layer: a layer's own output is 0 / 0 in the backward pass."""
        model = tiny_model("llama").train()
        model.model.layers[1].mlp.act_fn = Do(lambda x: (x * 0).abs().sqrt())
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        found = trained(model, ids, labels=ids).first_bad
        assert (found.phase, found.module) == ("backward", "model.layers.1.mlp.act_fn")
        assert "SqrtBackward0" in found.operation

    def test_dict_outputs_in_place_and_frozen(self) -> None:
        """Module backward hooks do not fire on dicts or frozen modules, and raise on in-place operations."""

        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.l = nn.Linear(8, 8)

            def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
                y = self.l(x)
                y += x
                return {"h": y.relu_()}

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(Layer() for _ in range(3))

            def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
                for layer in self.layers:
                    x = layer(x)["h"]
                return {"loss": x.mean()}

        model = Net()
        model.layers.requires_grad_(False)
        t = trained(model, torch.randn(2, 8, requires_grad=True))
        assert t.first_bad is None
        seen = {e.module for e in t.steps[0].of("backward") if e.role == "output"}
        assert {"layers.0", "layers.1", "layers.2"} <= seen

    def test_gradients_equal_those_without_a_trace(self, ids: torch.Tensor) -> None:
        model = tiny_model("gemma3_text").train()
        plain = copy.deepcopy(model)
        plain(ids, labels=ids).loss.backward()
        trained(model, ids, labels=ids)
        for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad), name

    def test_a_finding_changes_neither_gradients_nor_random_numbers(self, ids: torch.Tensor) -> None:
        model = mixtral(1).train()
        plain = copy.deepcopy(model)
        torch.manual_seed(1)
        (plain(input_ids=ids, labels=ids).loss * 2**20).backward()
        after = torch.rand(3)
        torch.manual_seed(1)
        assert trained(model, input_ids=ids, labels=ids, scale=2.0**20).first_bad is not None
        assert torch.equal(torch.rand(3), after)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(
                a.grad,
                b.grad,
            ) or bool((a.grad.isnan() == b.grad.isnan()).all())

    def test_largest_gradients(self, ids: torch.Tensor) -> None:
        model = tiny_model("llama")
        t = trained(model, ids, labels=ids)
        truth = {n: float(p.grad.abs().max()) for n, p in model.named_parameters()}
        largest = t.largest_gradients(3)
        assert [n for n, _ in largest] == sorted(truth, key=truth.__getitem__, reverse=True)[:3]
        assert largest[0][1] == pytest.approx(max(truth.values()))

    def test_frozen_model_has_no_backward_pass(self, ids: torch.Tensor) -> None:
        model = tiny_model("llama").requires_grad_(False)
        with hfpatch.trace(model) as t:
            model(ids)
        assert t.first_bad is None
        assert not t.steps[0].of("backward")

    def test_backward_false(self, ids: torch.Tensor) -> None:
        model = tiny_model("llama")
        with hfpatch.trace(model, backward=False) as t:
            model(ids, labels=ids).loss.backward()
        assert {e.phase for e in t.steps[0].events} == {"weights", "forward"}


class TestWhenAndWhere:
    def test_generation_with_a_cache(self, gemma: nn.Module, ids: torch.Tensor) -> None:
        with hfpatch.trace(gemma) as t:
            gemma.generate(ids, max_new_tokens=3, do_sample=False)
        assert len(t.steps) == 3
        assert t.first_bad.operation == "residual add"

    def test_a_bad_value_in_a_cache_that_was_given(self, ids: torch.Tensor) -> None:
        model = tiny_model("llama")
        with torch.no_grad():
            cache = model(ids, use_cache=True).past_key_values
        cache.layers[2].keys[0, 0, 0, 0] = NAN
        found = traced(model, ids[:, :1], past_key_values=cache).first_bad
        assert (found.symptom, found.tensor) == ("bad-input", "input 'past_key_values.layers.2.keys' of the model")

    def test_chosen_steps_and_off_by_itself(self, ids: torch.Tensor) -> None:
        model = tiny_model("llama")
        hooks: list[tuple[int, int]] = []
        with hfpatch.trace(model, steps=[0, 2]) as t:
            for _ in range(5):
                model(ids)
                hooks.append((len(model._forward_pre_hooks), len(model.lm_head._forward_hooks)))
        assert [s.number for s in t.steps] == [0, 2]
        assert hooks == [(1, 1), (1, 0), (1, 1), (0, 0), (0, 0)]

    def test_steps_by_a_function(self, ids: torch.Tensor) -> None:
        model = tiny_model("llama")
        with hfpatch.trace(model, steps=lambda step: step % 2 == 1) as t:
            for _ in range(4):
                model(ids)
        assert [s.number for s in t.steps] == [1, 3]

    def test_epochs(self, ids: torch.Tensor) -> None:
        model = tiny_model("llama")
        t = hfpatch.trace(model, epochs=[1, 3], steps=[0])

        @t
        def epoch() -> str:
            """Two batches."""
            model(ids)
            model(ids)
            return "done"

        assert [epoch() for _ in range(5)] == ["done"] * 5
        assert epoch.__doc__ == "Two batches."
        assert [(s.epoch, s.number) for s in t.steps] == [(1, 0), (3, 0)]

    def test_other_ranks_are_left_alone(self, ids: torch.Tensor) -> None:
        model = tiny_model("llama")
        with hfpatch.trace(model, ranks=[1]) as t:
            assert not model._forward_pre_hooks
            model(ids)
        assert t.steps == []
        assert "was not called" in str(t)

    def test_nothing_stays(self, gemma: nn.Module, ids: torch.Tensor) -> None:
        before = fingerprint(gemma)
        traced(gemma, ids)
        assert fingerprint(gemma) == before

    def test_nothing_stays_after_an_exception(self, ids: torch.Tensor) -> None:
        model = tiny_model("llama")
        before = fingerprint(model)
        with pytest.raises(IndexError), hfpatch.trace(model):
            model(ids + 1000)
        assert fingerprint(model) == before

    @pytest.mark.parametrize("how", ["wrapper", "in place"])
    def test_compiled(self, gemma: nn.Module, ids: torch.Tensor, how: str, capsys: pytest.CaptureFixture[str]) -> None:
        torch._dynamo.reset()
        model: Any = torch.compile(gemma, backend="eager") if how == "wrapper" else gemma
        if how == "in place":
            gemma.compile(backend="eager")
        with torch.no_grad():
            model(ids)
        found = traced(model, ids).first_bad
        assert found.operation == "residual add"
        assert "it runs uncompiled while it is traced" in capsys.readouterr().err
        torch._dynamo.reset()

    def test_peft(self, gemma: nn.Module, ids: torch.Tensor) -> None:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(gemma, LoraConfig(target_modules=["q_proj"]))
        found = trained(model, input_ids=ids, labels=ids).first_bad
        assert (found.operation, found.module) == ("residual add", "base_model.model.model.layers.1")

    def test_patched_model_is_healthy(self, gemma: nn.Module, ids: torch.Tensor) -> None:
        hfpatch.apply(gemma)
        assert trained(gemma, ids, labels=ids).first_bad is None

    def test_trainer_like_object(self, ids: torch.Tensor) -> None:
        @dataclass
        class Holder:
            model: nn.Module

        model = tiny_model("llama")
        with hfpatch.trace(Holder(model)) as t:
            model(ids)
        assert len(t.steps) == 1


class TestFoundByBreakingIt:
    """Each was wrong once."""

    def test_encoder_decoder_caches(self) -> None:
        from transformers import T5Config, T5ForConditionalGeneration

        torch.manual_seed(0)
        config = T5Config(
            vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
        model = T5ForConditionalGeneration(config).eval()
        ids = torch.arange(2, 10)[None]
        assert trained(model, input_ids=ids, labels=ids).first_bad is None
        with hfpatch.trace(model) as t:
            model.generate(ids, max_new_tokens=3, do_sample=False)
        assert t.first_bad is None
        assert len(t.steps) == 3

    def test_infinite_constants_in_buffers(self) -> None:
        class Masked(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return (x @ x.T + self.mask).softmax(-1) @ x

        t = traced(Chain(nn.Linear(4, 4), Masked()), torch.randn(4, 4))
        assert t.first_bad is None
        assert any("a constant" in words for words in t.intentional)

    def test_a_backward_pass_that_came_too_late_is_told(self, ids: torch.Tensor) -> None:
        model = tiny_model("llama")
        with hfpatch.trace(model) as t:
            first = model(ids, labels=ids).loss
            model(ids)
            first.backward()
        assert t.steps[0].unseen
        assert "was not traced" in " ".join(str(t).split())

    def test_a_row_of_logits_that_overflowed_is_no_masked_row(self) -> None:
        scores = Do(lambda x: (x @ x.T * -1).softmax(-1))
        found = traced(Chain(nn.Identity(), scores), torch.full((3, 4), 200.0).half()).first_bad
        assert found.symptom == "overflow"
        assert found.operation == "matmul"

    def test_a_gradient_that_was_bad_when_the_model_got_it(self) -> None:
        model = nn.Sequential(nn.Linear(4, 2))
        with hfpatch.trace(model) as t:
            model(torch.ones(1, 4)).backward(torch.tensor([[NAN, 1.0]]))
        assert t.first_bad.symptom == "outside-the-model"
        assert "the loss passed to it holds 1 NaN of 2 elements" in t.first_bad.why

    @pytest.mark.parametrize("how", ["deepcopy", "pickle"])
    def test_copies_carry_nothing(self, ids: torch.Tensor, how: str) -> None:
        import pickle

        model = tiny_model("llama")
        with hfpatch.trace(model) as t:
            model(ids)
            twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))  # noqa: S301
            twin(ids)
        assert len(t.steps) == 1

    def test_transformations_are_left_alone(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        parameters = dict(model.named_parameters())
        with hfpatch.trace(model):
            out = torch.func.vmap(lambda x: torch.func.functional_call(model, parameters, (x,)))(torch.ones(3, 4))
        assert out.shape == (3, 4)

    def test_the_loss_scale_is_no_overflow(self, ids: torch.Tensor) -> None:
        room = trained(tiny_model("llama"), ids, labels=ids).headroom("float16", loss_scale=2.0**16)
        assert not any(r.tensor == "gradient of output 'loss'" for r in room.tensors)

    def test_a_weight_that_was_written_behind_our_back(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4))
        with hfpatch.trace(model) as t, torch.no_grad():
            model(torch.ones(1, 4))
            model[0].weight.data = torch.full((4, 4), NAN)
            model(torch.ones(1, 4))
        assert t.first_bad.symptom == "bad-weight"

    def test_a_number_is_a_factor(self) -> None:
        found = traced(Chain(nn.Identity(), Do(lambda x: x * 3)), torch.full((2, 2), 3e4).half()).first_bad
        assert found.why == "3e+04 x 3 exceeds float16's 65,504"

    def test_it_prints_itself(self, ids: torch.Tensor) -> None:
        report = traced(tiny_model("llama"), ids).report()
        assert str(report).startswith("trace of LlamaForCausalLM: 1 step")
        assert report._repr_html_().startswith("<div>")


class TestBadInput:
    @pytest.mark.parametrize("words", [{"steps": 5}, {"epochs": 3}, {"steps": [-1]}, {"ranks": 0}, {"ranks": "0"}])
    def test_no_lists(self, words: Any) -> None:
        with pytest.raises(InputError, match="want a list of integers from 0 up"):
            hfpatch.trace(nn.Linear(2, 2), **words)

    def test_no_model(self) -> None:
        with pytest.raises(NotAModelError):
            hfpatch.trace(3)

    @pytest.mark.parametrize("steps", ["0", [0.5], [True]])
    def test_steps(self, steps: Any) -> None:
        with pytest.raises(InputError, match="integers from 0 up"):
            hfpatch.trace(nn.Linear(2, 2), steps=steps)

    def test_level(self) -> None:
        with pytest.raises(InputError, match="want 'blocks' or 'modules'"):
            hfpatch.trace(nn.Linear(2, 2), level="leaves")  # type: ignore[arg-type]

    def test_entered_twice(self) -> None:
        t = hfpatch.trace(nn.Linear(2, 2))
        with t, pytest.raises(InputError, match="already entered"), t:
            pass

    def test_headroom_in_an_unknown_dtype(self) -> None:
        with pytest.raises(InputError, match="float16, bfloat16"):
            hfpatch.trace(nn.Linear(2, 2)).headroom("int8")


class TestHeadroom:
    def test_overflow_is_predicted_where_it_happens(self, tiny: Any, ids: torch.Tensor) -> None:
        """From a pass in float32, the layer in which the float16 run goes wrong."""
        model = tiny("gemma3_text")
        rescale(model, {}, {"*post_feedforward_layernorm.weight": 24000.0})
        room = traced(model, ids).headroom("float16")
        assert (room.overflows[0].module, room.overflows[0].tensor) == ("model.layers.1", "output")
        assert traced(model.half(), ids).first_bad.module == "model.layers.1"
        assert traced(model.float(), ids).headroom("bfloat16").overflows == ()

    def test_gradients_under_a_scale(self, ids: torch.Tensor) -> None:
        model = tiny_model("mixtral")
        t = trained(model, input_ids=ids, labels=ids)
        assert t.headroom("float16").overflows == ()
        scaled = t.headroom("float16", loss_scale=2.0**24)
        assert scaled.overflows
        assert {r.phase for r in scaled.overflows} <= {"backward", "gradients"}
        again = trained(model, input_ids=ids, labels=ids, scale=2.0**10).headroom("float16", loss_scale=2.0**24)
        assert [r.tensor for r in again.overflows] != []
        first, second = scaled.overflows[0], again.overflows[0]
        assert (first.module, first.tensor) == (second.module, second.tensor)
        assert first.overflow == pytest.approx(second.overflow, rel=0.01) or model.lm_head.weight.grad is not None

    def test_what_vanishes(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4, bias=False))
        with torch.no_grad():
            model[0].weight.fill_(1e-9)
        room = traced(model, torch.ones(2, 4)).headroom("float16")
        assert {r.tensor for r in room.flushes} == {"parameter 'weight'", "output"}
        assert traced(model, torch.ones(2, 4)).headroom("bfloat16").flushes == ()

    def test_masks_do_not_count(self, ids: torch.Tensor) -> None:
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        assert traced(tiny_model("llama"), ids, attention_mask=mask).headroom("float16").overflows == ()

    def test_fp8(self, ids: torch.Tensor) -> None:
        model = tiny_model("llama")
        rescale(model, {"model.embed_tokens.weight": 1e4}, {})
        t = traced(model, ids)
        assert t.headroom("float8_e4m3fn").overflows
        assert t.headroom("float8_e5m2").overflows == ()


class TestViews:
    def test_report_at_80_columns(self, gemma: nn.Module, ids: torch.Tensor) -> None:
        text = traced(gemma, ids).report().to_text(80)
        assert max(map(len, text.splitlines())) <= 80
        assert "starts here" in text
        flat = " ".join(text.split())
        assert "residual add in model.layers.1" in flat
        assert "hfpatch.apply(model, only=['fp16-residual-overflow'])" in flat

    def test_json(self, gemma: nn.Module, ids: torch.Tensor, tmp_path: Path) -> None:
        t = trained(gemma, ids, labels=ids)
        t.to_json(tmp_path / "trace.json")
        read = json.loads((tmp_path / "trace.json").read_text(), parse_constant=pytest.fail)
        assert read["findings"][0]["module"] == "model.layers.1"
        (step,) = read["steps"]
        layer = next(x for x in step["tensors"] if (x["module"], x["role"]) == ("model.layers.0", "output"))
        assert {"nan", "posinf", "neginf", "min", "max", "mean", "rms", "zeros", "under", "dtype", "shape"} <= set(
            layer
        )
        assert layer["shape"] == [2, 12, 32]

    def test_statistics_are_right(self) -> None:
        x = torch.tensor([[1.0, -2.0, 0.0, float("inf")], [NAN, 4.0, 0.0, 1e-9]])
        t = traced(Chain(nn.Identity()), x)
        stats = t.steps[0].events[0].stats
        assert (stats.nan, stats.posinf, stats.neginf, stats.size) == (1, 1, 0, 8)
        assert (stats.least, stats.most, stats.largest) == (-2.0, 4.0, 4.0)
        assert stats.mean == pytest.approx(3 / 6)
        assert stats.rms == pytest.approx((21 / 6) ** 0.5)
        assert stats.zeros == pytest.approx(2 / 6)
        assert stats.under["float16"] == pytest.approx(1 / 6)

    def test_heat_map_marks_the_first_bad_cell(self, gemma: nn.Module, ids: torch.Tensor, tmp_path: Path) -> None:
        t = trained(gemma, ids, labels=ids)
        drawn = picture.heatmap("", t.steps, t.places, t.findings, [])
        assert drawn.rows[drawn.first_bad[0]] == "model.layers.1"
        assert drawn.columns == ("step 0", "step 0 backward")
        assert drawn.cells[drawn.first_bad].bad
        t.to_html(tmp_path / "t.html")
        assert "model.layers.1" in (tmp_path / "t.html").read_text()
        t.plot(tmp_path / "t.png")
        assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
