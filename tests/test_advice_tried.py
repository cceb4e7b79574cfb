"""Advice that was tried on the traced call: what it says is what following it does, and nothing is left behind."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hfpatch.patches.shared.fp32_attention_logits import FAILING
from torch import nn
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipVisionConfig,
)
from transformers.cache_utils import DynamicCache, StaticCache

import hfpatch
from hfpatch.blackbox import BlackBox
from hfpatch.guarding.guard import Guard
from hfpatch.lab.composites_lora import peft_qv
from hfpatch.lab.example import example_inputs
from hfpatch.lab.overflow import overflow
from hfpatch.lab.tiny import SpeechLLM, rescale, tiny_model
from hfpatch.lab.towers import holding
from hfpatch.model.put_back import on_trial
from hfpatch.patching import edits, registry, select
from hfpatch.patching.context import Target
from hfpatch.patching.language import Case, Needed, Patch
from hfpatch.patching.verifying.trial import inputs_of
from tests.conftest import OVERFLOWING
from tests.fingerprint import fingerprint
from tests.interrupts import AtOperation

STREAM = "fp16-residual-overflow"
CURED = f"tried on this call: finite: hfpatch.apply(model, only=['{STREAM}'])"


def traced(model: Any, **inputs: Any) -> hfpatch.Trace:
    """A trace of one call, after which the model and torch's random state must be as a plain call leaves them."""
    before, random = fingerprint(model), torch.get_rng_state()
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied(**copy.deepcopy(inputs))
    after = torch.get_rng_state()
    torch.set_rng_state(random)
    with hfpatch.trace(model) as t, torch.no_grad():
        model(**inputs)
    assert fingerprint(model) == before
    assert torch.equal(torch.get_rng_state(), after)
    return t


def overflowing(architecture: str, **config: Any) -> Any:
    model = tiny_model(architecture, num_hidden_layers=16, **config)
    overflow(model, inputs_of(model, torch.arange(24).reshape(2, 12)))
    return model.half()


def llava(vision: Any, **more: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    text = LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes)
    config = LlavaConfig(
        vision_config=vision(**sizes, image_size=28, patch_size=14), text_config=text, image_token_index=60, **more
    )
    return LlavaForConditionalGeneration(config).eval()


class TestCured:
    @pytest.mark.thorough
    @pytest.mark.parametrize(
        ("architecture", "patch"),
        [
            ("llama", STREAM),
            pytest.param("opt", STREAM, marks=pytest.mark.slow),
            pytest.param("bloom", STREAM, marks=pytest.mark.slow),  # the sum is made inside its attention
            pytest.param("gpt2", STREAM, marks=pytest.mark.slow),
            pytest.param("mbart", STREAM, marks=pytest.mark.slow),
            pytest.param("mixtral", STREAM, marks=pytest.mark.slow),
            pytest.param("cohere", STREAM, marks=pytest.mark.slow),
            pytest.param("t5", "wo-overflow", marks=pytest.mark.slow),
        ],
    )
    def test_the_advised_line_cures_the_model(self, architecture: str, patch: str) -> None:
        model = overflowing(architecture)
        inputs = inputs_of(model, torch.arange(24).reshape(2, 12))
        t = traced(model, **inputs)
        assert t.patches == (patch,)
        assert t.advice == (f"tried on this call: finite: hfpatch.apply(model, only=['{patch}'])",)
        exact = copy.deepcopy(model).float()(**inputs).logits
        hfpatch.apply(model, only=list(t.patches), verbose=False)
        logits = model(**inputs).logits.float()
        assert float((logits - exact).norm() / exact.norm()) < 2e-2

    def test_two_patches_where_neither_is_enough(self, tiny: Any, ids: torch.Tensor) -> None:
        model = tiny("gemma3_text")
        model.set_attn_implementation("eager")
        norms = {"*q_norm.weight": 900.0, "*k_norm.weight": 900.0}
        rescale(model, {}, {**OVERFLOWING, **norms})
        t = traced(model.half(), input_ids=ids)
        assert t.first_bad.symptom == "attention-logits-overflow"
        assert t.patches == (STREAM, "fp32-attention-logits")
        hfpatch.apply(model, only="fp32-attention-logits", verbose=False)
        assert not model(ids).logits.isfinite().all()
        hfpatch.apply(model, only=list(t.patches), verbose=False)
        assert model(ids).logits.isfinite().all()

    def test_under_autocast(self, tiny: Any, ids: torch.Tensor) -> None:
        model = tiny("t5")
        rescale(model, {"*.wo.weight": 1e7}, {})
        with torch.autocast("cpu", torch.float16):
            t = traced(model, **inputs_of(model, ids))
        assert t.patches == ("wo-overflow",)

    def test_in_training_with_lora_and_dropout(self, gemma: nn.Module, ids: torch.Tensor) -> None:
        model: Any = peft_qv(gemma).half().train()
        for module in model.modules():
            if hasattr(module, "lora_dropout"):
                module.lora_dropout["default"] = nn.Dropout(0.3)
        plain = copy.deepcopy(model)
        torch.manual_seed(1)
        plain(input_ids=ids, labels=ids).loss.backward()
        after = torch.rand(3)
        torch.manual_seed(1)
        with hfpatch.trace(model) as t:
            model(input_ids=ids, labels=ids).loss.backward()
            assert len(t.steps) == 1
        assert torch.equal(torch.rand(3), after)
        assert t.advice == (CURED,)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            assert a.grad is None or torch.allclose(a.grad, b.grad, rtol=0, atol=0, equal_nan=True)

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpointed(self, gemma: Any, ids: torch.Tensor, reentrant: bool) -> None:
        gemma.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
        gemma.enable_input_require_grads()
        with hfpatch.trace(gemma) as t:
            gemma(input_ids=ids, labels=ids).loss.backward()
        assert t.advice == (CURED,)
        assert gemma.is_gradient_checkpointing

    def test_inside_a_composite(self, gemma: Any, ids: torch.Tensor) -> None:
        model = SpeechLLM(gemma).half()
        t = traced(model, input_ids=ids, features=torch.ones(2, 3, 24))
        assert (t.first_bad.module, t.advice) == ("llm.model.layers.1", (CURED,))

    @pytest.mark.thorough
    @pytest.mark.parametrize(
        ("vision", "more"),
        [
            (CLIPVisionConfig, {}),
            pytest.param(
                SiglipVisionConfig, {"vision_feature_select_strategy": "full"}, marks=pytest.mark.slow, id="siglip"
            ),
        ],
    )
    def test_in_a_tower(self, vision: Any, more: Any) -> None:
        model = llava(vision, vision_feature_layer=-1, **more)
        inputs = {"input_ids": torch.tensor([[1, 60, 60, 60, 60, 5]]), "pixel_values": torch.randn(1, 3, 28, 28).half()}
        for layer in next(m for m in model.model.vision_tower.modules() if isinstance(m, nn.ModuleList)):
            nn.init.constant_(layer.mlp.fc2.bias, 2.5e4)
        model.half()(**inputs)  # its class sets hooks in its first call
        t = traced(model, **inputs)
        assert t.first_bad.module.startswith("model.vision_tower.")
        assert t.advice == (CURED,)
        hfpatch.apply(model, only=STREAM, verbose=False)
        assert model(**inputs).logits.isfinite().all()

    @pytest.mark.parametrize("wrap", [False, pytest.param(True, marks=pytest.mark.slow)])
    def test_a_branch_behind_the_stream_whose_need_is_measured(self, gemma: Any, ids: torch.Tensor, wrap: bool) -> None:
        """The need is beyond what the patch allows for without a batch; a call may be by position."""
        model: Any = peft_qv(gemma).half() if wrap else gemma
        given = {"input_ids": ids}
        mlp = gemma.model.layers[-1].mlp
        with torch.no_grad():
            for part, factor in ((mlp.gate_proj, 300), (mlp.up_proj, 300), (mlp.down_proj, 1e4)):
                part.weight.mul_(factor)
        before, random = fingerprint(model), torch.get_rng_state()
        with hfpatch.trace(model) as t, torch.no_grad():
            model(**given) if wrap else model(ids)
        assert t.first_bad.symptom == "residual-overflow"
        patches = ["fp16-branch-overflow", STREAM]
        line = f"hfpatch.apply(model, only={patches}, batch=batch)"
        assert t.advice == (f"tried on this call: finite: {line}, with batch= the arguments of this call",)
        assert t.patches == (), "they cure nothing without the batch"
        assert fingerprint(model) == before
        assert torch.equal(torch.get_rng_state(), random)
        exact = copy.deepcopy(model).float()(**given).logits
        with hfpatch.apply(model, only=patches, verbose=False):
            assert not model(**given).logits.isfinite().all()
        hfpatch.apply(model, only=patches, batch=given, verbose=False)
        assert float(((model(**given).logits - exact).norm() / exact.norm()).detach()) < 2e-2

    def test_a_need_that_cannot_be_measured_where_an_argument_has_no_name(self, gemma: Any, ids: torch.Tensor) -> None:
        model: Any = peft_qv(gemma).half()
        with torch.no_grad():
            for part, factor in (("gate_proj", 300), ("up_proj", 300), ("down_proj", 1e4)):
                getattr(gemma.model.layers[-1].mlp, part).weight.mul_(factor)
        with hfpatch.trace(model) as t, torch.no_grad():
            model(ids)
        why = "batch= takes keyword arguments, and the call gave one by position that has no name"
        assert t.advice[-1].startswith(f"not tried (running the call again failed: {why}): hfpatch.apply(model, only=[")
        assert t.patches == ()

    def test_while_it_generates(self, gemma: Any, ids: torch.Tensor) -> None:
        plain = gemma.generate(ids, max_new_tokens=3, do_sample=False)
        with hfpatch.trace(gemma) as t:
            assert torch.equal(gemma.generate(ids, max_new_tokens=3, do_sample=False), plain)
        assert len(t.steps) == 3
        assert t.advice == (CURED,)

    @pytest.mark.parametrize("kind", ["dynamic", "static"])
    def test_a_cache_of_the_caller_keeps_what_the_call_wrote(self, gemma: Any, ids: torch.Tensor, kind: str) -> None:
        exact = copy.deepcopy(gemma).float()

        def cache() -> Any:
            held = DynamicCache(config=gemma.config) if kind == "dynamic" else StaticCache(gemma.config, 32)
            with torch.no_grad():
                exact(ids[:, :4], past_key_values=held, use_cache=True)
            for layer in held.layers:
                layer.keys, layer.values = layer.keys.half(), layer.values.half()
            return held

        plain, mine = cache(), cache()
        gemma(ids[:, 4:], past_key_values=plain, use_cache=True)
        with hfpatch.trace(gemma) as t, torch.no_grad():
            gemma(ids[:, 4:], past_key_values=mine, use_cache=True)
        assert t.advice == (CURED,)
        assert mine.get_seq_length() == plain.get_seq_length() == 12
        for a, b in zip(mine.layers, plain.layers, strict=True):
            assert torch.allclose(a.keys, b.keys, rtol=0, atol=0, equal_nan=True)
            assert torch.allclose(a.values, b.values, rtol=0, atol=0, equal_nan=True)


class Boost(torch.autograd.Function):
    """Gives back its input, and multiplies the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad * ctx.factor, None


class Amplifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 1e30
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Boost.apply(x * self.weight, self.factor)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Amplifier(), Amplifier()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def amplifiers(context: Any) -> list[Target]:
    return [Target(path, m) for path, m in context.survey.modules.items() if isinstance(m, Amplifier)]


@pytest.fixture
def amplify() -> Iterator[Callable[[float], None]]:
    """`amplify(factor)` registers a patch that sets the factor of each `Amplifier`."""

    def register(factor: Any) -> None:
        found = select.Selection("the amplifiers", amplifiers)
        patch = Patch(
            title="another factor",
            architectures=("*",),
            whole=True,
            condition=lambda _: Needed("the factor is large"),
            edits=(edits.set_attribute(found, "factor", lambda _c, _t: factor, "set the factor"),),
            effect="exact",
            symptom=lambda _: None,
            repros=(Case("llama"),),
            leaves_alone=(Case("llama"),),
            answers=("overflow",),
        )
        hfpatch.register(patch, id="amplify")

    yield register
    hfpatch.unregister("amplify")


def backward(model: nn.Module) -> hfpatch.Trace:
    with hfpatch.trace(model) as t:
        model(torch.ones(2, 4)).sum().backward()
    return t


class TestBackward:
    def test_gradients_are_looked_at(self, amplify: Any) -> None:
        """A fault whose forward pass is finite, and a loss outside the model."""
        amplify(1.0)
        model = Chain()
        fired: list[int] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: fired.append(1))
        t = backward(model)
        assert t.first_bad.phase in ("backward", "gradients")
        assert t.advice == ("tried on this call: gradients finite: hfpatch.apply(model, only=['amplify'])",)
        assert len(fired) == 2, "once for each parameter, by the user's own pass"
        assert [layer.factor for layer in model.layers] == [1e30, 1e30]
        assert not model.layers[0].weight.grad.isfinite().all()
        hfpatch.apply(model, only="amplify", verbose=False)
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        assert model.layers[0].weight.grad.isfinite().all()

    def test_tried_and_failed_is_no_advice(self, amplify: Any) -> None:
        amplify(1e25)
        t = backward(Chain())
        assert t.patches == ()
        assert t.advice[0] == ("amplify, tried on this call: still gradients that are not finite, of layers.0.weight")
        assert t.advice[-1] == "No patch that is known cures it here."
        assert "hfpatch.apply" not in " ".join(t.advice)

    def test_a_patch_with_which_the_call_raises_is_no_advice(self, amplify: Any) -> None:
        amplify("large")
        t = backward(Chain())
        assert t.patches == ()
        assert t.advice[0].startswith("amplify, tried on this call: running the call again failed: ")


def test_a_registered_patch_that_raises_does_not_end_the_training(ids: torch.Tensor, amplify: Any) -> None:
    amplify(1.0)
    entry = registry.get("amplify")

    def condition(_: Any) -> Any:
        raise ZeroDivisionError("a fault of the patch")

    hfpatch.unregister("amplify")
    hfpatch.register(replace(entry.patch, condition=condition), id="amplify")
    assert backward(Chain()).advice == ("the patches could not be planned: ZeroDivisionError: a fault of the patch",)


class TestNotAdvised:
    @pytest.mark.parametrize(
        ("holder", "tower"),
        [("molmo2", "molmo2_vision"), pytest.param("gemma4", "gemma4_vision", marks=pytest.mark.slow)],
    )
    def test_for_a_tower_that_the_patch_does_not_cure(self, holder: str, tower: str) -> None:
        model = holding(holder, tower, 8)
        batch = example_inputs(model)
        overflow(model, batch, tower)
        t = traced(model.half(), **{k: v.half() if v.is_floating_point() else v for k, v in batch.items()})
        assert t.first_bad.module.startswith("model.vision_tower.")
        assert t.patches == ()
        assert "hfpatch.apply" not in " ".join(t.advice)
        assert t.advice[0].startswith(f"{STREAM} fixes this, but is refused here: it does not cure a tiny {tower}: ")

    def test_for_torchs_own_attention(self, tiny: Any, ids: torch.Tensor) -> None:
        class Encoded(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                kind = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True, dropout=0.0)
                self.encoder = nn.TransformerEncoder(kind, 4, enable_nested_tensor=False)
                self.llm = tiny("llama")
                for layer in self.encoder.layers:
                    nn.init.constant_(layer.linear2.bias, 2.5e4)

            def forward(self, input_ids: torch.Tensor, x: torch.Tensor) -> Any:
                return self.llm(inputs_embeds=self.encoder(x) + self.llm.model.embed_tokens(input_ids))

        t = traced(Encoded().half().train(), input_ids=ids, x=torch.randn(2, 12, 32).half())
        assert t.first_bad.module.startswith("encoder.layers.")
        assert "hfpatch.apply" not in " ".join(t.advice)

    def test_where_attention_overflows_behind_the_stream(self, gemma: Any, ids: torch.Tensor) -> None:
        """Values that pass 65,504 in `v_proj`, which no patch scales."""
        last = gemma.model.layers[-1]
        with torch.no_grad():
            last.input_layernorm.weight.add_(300)
            last.self_attn.v_proj.weight.mul_(1e4)
        t = traced(gemma, input_ids=ids)
        assert t.first_bad.symptom == "residual-overflow"
        assert t.patches == ()
        assert t.advice[0].startswith(f"{STREAM}, tried on this call: still Inf: matmul in model.layers.3.self_attn.")
        assert t.advice[-1] == "No patch that is known cures it here."
        assert "hfpatch.apply" not in " ".join(t.advice)
        hfpatch.apply(gemma, only=STREAM, verbose=False)
        assert not gemma(ids).logits.isfinite().all()

    def test_on_an_output_that_is_finite_by_chance(self, tiny: Any, ids: torch.Tensor) -> None:
        """sdpa on a CPU turns NaN in queries into zeros, so the output proves nothing."""
        model = tiny("llama")
        with torch.no_grad():
            model.model.layers[1].self_attn.q_proj.weight[0, 0] = torch.nan
        model.set_attn_implementation("sdpa")
        assert model(ids).logits.isfinite().all()
        assert traced(model, input_ids=ids).patches == ()


class Overflows(nn.Module):
    """A language model whose stream overflows, and something beside it."""

    def __init__(self, llm: Any) -> None:
        super().__init__()
        self.llm = llm


class Counts(Overflows):
    """Keeps state of every kind, and draws from every generator."""

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        self.calls, self.seen, self.table = 0, [], {"deep": {"list": [0]}}
        self.total = torch.zeros(3)
        self.own = Own()
        self.norm = nn.BatchNorm1d(12)

    def forward(self, input_ids: torch.Tensor) -> Any:
        self.calls += 1
        self.seen.append(self.calls)
        self.table["deep"]["list"].append(self.calls)
        self.total += 1
        self.own.count += 1
        self.own.frames.append(torch.ones(2))
        np.random.rand()
        self.last = self.norm(self.llm.model.embed_tokens(input_ids).float())
        return self.llm(input_ids)


class Own:
    def __init__(self) -> None:
        self.count, self.frames = 0, []


class Once(Overflows):
    """Cannot be run a second time."""

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        self.done: set[int] = set()

    def forward(self, input_ids: torch.Tensor, mark: Any) -> Any:
        if mark.used:
            raise StopIteration("this stream has ended")
        mark.used = True
        return self.llm(input_ids)


class Mark:
    used = False

    def __init__(self) -> None:
        self.name = "mark"


class TestNothingIsLeft:
    def test_of_a_model_that_keeps_state(self, gemma: Any, ids: torch.Tensor) -> None:
        model = Counts(gemma).train()
        model.norm.float()
        with hfpatch.trace(model) as t, torch.no_grad():
            model(ids)
        assert t.advice == (CURED,)
        assert (model.calls, model.seen, model.table) == (1, [1], {"deep": {"list": [0, 1]}})
        assert torch.equal(model.total, torch.ones(3))
        assert (model.own.count, len(model.own.frames)) == (1, 1)
        assert int(model.norm.num_batches_tracked) == 1

    def test_where_the_call_cannot_be_run_again_that_is_said(self, gemma: Any, ids: torch.Tensor) -> None:
        model, mark = Once(gemma), Mark()
        with hfpatch.trace(model) as t, torch.no_grad():
            model(ids, mark)
        (line,) = t.advice
        assert line.startswith("not tried (running the call again failed: this stream has ended): hfpatch.apply(")
        assert mark.used is True

    @pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
    def test_where_memory_does_not_allow_it_that_is_said(self, gemma: Any, ids: torch.Tensor, error: Any) -> None:
        class Large(Overflows):
            def forward(self, input_ids: torch.Tensor) -> Any:
                if on_trial():
                    raise error("out of memory")
                return self.llm(input_ids)

        with hfpatch.trace(Large(gemma)) as t, torch.no_grad():
            t.model(ids)
        (line,) = t.advice
        assert line.startswith("not tried (there is not enough memory to run the call again): hfpatch.apply(model, ")

    def test_an_iterator_is_not_used_up(self, gemma: Any, ids: torch.Tensor) -> None:
        class Draws(Overflows):
            def forward(self, batches: Any) -> Any:
                return self.llm(next(batches))

        batches = iter([ids, ids, ids])
        with hfpatch.trace(Draws(gemma)) as t, torch.no_grad():
            t.model(batches)
        assert t.advice[0].startswith("not tried (its argument '0' is an iterator, which the first run used up): ")
        assert len(list(batches)) == 2

    def test_weights_that_have_changed_since(self, gemma: Any, ids: torch.Tensor) -> None:
        with hfpatch.trace(gemma, backward=False) as t:
            gemma(ids)
            with torch.no_grad():
                gemma.model.norm.weight.add_(1)
        assert "not tried (the weights were changed after the call (model.norm.weight first))" in t.advice[0]

    def test_ids_that_were_overwritten(self, gemma: Any, ids: torch.Tensor) -> None:
        with hfpatch.trace(gemma) as t, torch.no_grad():
            gemma(ids)
            ids.zero_()
        assert t.advice[0].startswith("not tried (an argument was overwritten after the call): ")

    def test_the_backward_pass_of_a_step_that_was_asked_about_still_runs(self, gemma: Any, ids: torch.Tensor) -> None:
        model = Counts(gemma).train()
        model.norm.float()
        with hfpatch.trace(model) as t:
            loss = model(ids).logits.float().sum() + model.last.sum()
            assert t.first_bad is not None
            loss.backward()
        assert t.advice == (CURED,)

    @pytest.mark.slow
    def test_an_interruption(self, gemma: Any, ids: torch.Tensor) -> None:
        """Ctrl-C at one operation after the other, of the diagnosis and of the trials."""

        def run(mode: AtOperation) -> None:
            with hfpatch.trace(gemma) as t, torch.no_grad():
                gemma(ids)
                with mode:
                    assert t.first_bad is not None

        counter = AtOperation(0)
        run(counter)
        every = -counter.left
        before, random = fingerprint(gemma), torch.get_rng_state()
        for at in range(1, every, every // 6):
            with pytest.raises(KeyboardInterrupt):
                run(AtOperation(at))
            assert fingerprint(gemma) == before
            assert torch.equal(torch.get_rng_state(), random)
        assert hfpatch.status(gemma).patches == ()

    def test_after_ctrl_c_nothing_is_tried(self, gemma: Any, ids: torch.Tensor) -> None:
        asked: list[Any] = []
        with pytest.raises(KeyboardInterrupt), hfpatch.trace(gemma) as t, torch.no_grad():
            t.answers = lambda *given: asked.append(given)  # type: ignore[assignment]
            gemma(ids)
            raise KeyboardInterrupt
        assert t.findings
        assert not asked

    def test_a_black_box_keeps_only_calls_of_the_user(self, gemma: Any, ids: torch.Tensor, tmp_path: Any) -> None:
        model = gemma.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        guard = Guard(model, optimizer, explode_at=None, verbose=False, black_box=BlackBox(tmp_path))
        with hfpatch.trace(model) as t:
            guard.step(model(input_ids=ids, labels=ids).loss)
        assert t.advice == (CURED,)
        assert guard.recorder is None or not guard.recorder._calls


class TestWhen:
    def test_once_for_findings_of_a_sort(self, gemma: Any, ids: torch.Tensor) -> None:
        with hfpatch.trace(gemma) as t, torch.no_grad():
            answers, asked = t.answers, []
            t.answers = lambda *given: asked.append(given[0].step) or answers(*given)  # type: ignore[func-returns-value]
            for _ in range(4):
                gemma(ids)
        assert len(t.findings) == 4
        assert asked == [0]
        assert t.advice == (CURED,)

    def test_of_a_later_sort_only_what_a_patch_does(self, tiny: Any, ids: torch.Tensor) -> None:
        model = tiny("qwen2")
        model.set_attn_implementation("eager")
        rescale(model, {}, FAILING)
        model.half()
        bad = model.model.embed_tokens(ids).detach()
        bad[0, 0, 0] = torch.nan
        with hfpatch.trace(model) as t, torch.no_grad():
            model(inputs_embeds=bad)
            model(ids)
            model(inputs_embeds=bad)
        assert [f.symptom for f in t.findings] == ["bad-input", "attention-logits-overflow", "bad-input"]
        assert len(t.advice) == 2
        assert t.advice[1] == "tried on this call: finite: hfpatch.apply(model, only=['fp32-attention-logits'])"
        assert t.to_dict()["patches"] == ["fp32-attention-logits"]


class TestHeadroom:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_names_the_patch_that_serves_the_stack(self, tiny: Any, ids: torch.Tensor, dtype: torch.dtype) -> None:
        model = tiny("gemma3_text").to(dtype)
        rescale(model, {}, OVERFLOWING)
        with hfpatch.trace(model) as t, torch.no_grad():
            model(ids)
        (line,) = t.headroom("float16").advice
        assert re.fullmatch(rf"model\.layers\.1 reaches 6\d,\d\d\d of 65,504: {STREAM} serves this stack", line)
        assert line in " ".join(str(t.headroom("float16")).split())
        assert t.headroom("float16").to_dict()["advice"] == [line]
        assert t.headroom("float8_e4m3fn").advice == ()

    def test_a_branch_is_for_a_trace(self, tiny: Any, ids: torch.Tensor) -> None:
        model = tiny("llama")
        mlp = model.model.layers[1].mlp
        with torch.no_grad():
            for part, factor in ((mlp.gate_proj, 150), (mlp.up_proj, 150), (mlp.down_proj, 2e4)):
                part.weight.mul_(factor)
        with hfpatch.trace(model) as t, torch.no_grad():
            model(ids)
        first, second = t.headroom("float16").advice
        assert re.fullmatch(r"model\.layers\.1\.mlp\.down_proj reaches [\d,]+ of 65,504: (.*)", first)
        assert first.endswith(": a plan does not tell; a trace in float16 tries fp16-branch-overflow")
        assert second.startswith("model.layers.1 reaches ")

    def test_a_branch_that_no_patch_serves(self, tiny: Any, ids: torch.Tensor) -> None:
        model = tiny("llama")
        with torch.no_grad():
            model.model.layers[1].self_attn.v_proj.weight.mul_(1e7)
        with hfpatch.trace(model) as t, torch.no_grad():
            model(ids)
        first = t.headroom("float16").advice[0]
        assert re.fullmatch(r"model\.layers\.1\.self_attn\.v_proj reaches [\d,]+ of 65,504: no patch serves it", first)

    def test_a_branch_that_reads_the_raw_stream(self, tiny: Any, ids: torch.Tensor) -> None:
        model = tiny("olmo2")
        rescale(model, {}, OVERFLOWING)
        with hfpatch.trace(model) as t, torch.no_grad():
            model(ids)
        (line,) = t.headroom("float16").advice
        assert line.endswith(f"{STREAM} serves this stack")

    def test_a_stack_that_no_patch_serves(self, tiny: Any, ids: torch.Tensor) -> None:
        model = tiny("flex_olmo")
        rescale(model, {}, OVERFLOWING)
        with hfpatch.trace(model) as t, torch.no_grad():
            model(ids)
        assert "no patch serves this stack of FlexOlmoDecoderLayer (it does not cure a tiny flex_olmo: " in " ".join(
            t.headroom("float16").advice
        )

    def test_where_it_is_applied(self, gemma: Any, ids: torch.Tensor) -> None:
        hfpatch.apply(gemma, only=STREAM, verbose=False)
        with hfpatch.trace(gemma) as t, torch.no_grad():
            gemma(ids)
        assert t.headroom("float16").advice[0].endswith(f"{STREAM} is applied and serves this stack")


class TestInspect:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_what_float16_needs(self, tiny: Any, dtype: torch.dtype) -> None:
        assert hfpatch.inspect(tiny("llama").to(dtype)).float16 == (f"model.layers: {STREAM} serves this stack",)
        assert "refused" not in str(hfpatch.inspect(tiny("llama").to(dtype)))
        (olmo,) = hfpatch.inspect(tiny("flex_olmo").to(dtype)).float16
        assert olmo.startswith("model.layers: no patch serves this stack (it does not cure a tiny flex_olmo: ")

    def test_one_that_needs_none(self) -> None:
        (line,) = hfpatch.inspect(tiny_model("openai-gpt")).float16
        assert line.startswith(
            "transformer.h: this stack needs no patch (on a tiny openai-gpt, each of the 16 layers of "
        )

    @pytest.mark.slow
    def test_a_tower_is_said_first(self) -> None:
        tower, text, sound = hfpatch.inspect(tiny_model("gemma4")).float16
        why = "it does not cure a tiny gemma4_vision: "
        assert tower.startswith(f"model.vision_tower.encoder.layers: no patch serves this stack ({why}")
        assert text == f"model.language_model.layers: {STREAM} serves this stack"
        assert sound.startswith("model.audio_tower.layers: this stack needs no patch (on a tiny gemma4_audio, each of ")

    def test_a_tower_that_is_served(self) -> None:
        lines = hfpatch.inspect(llava(CLIPVisionConfig)).float16
        assert lines == tuple(
            f"model.{path}.layers: {STREAM} serves this stack" for path in ("vision_tower.encoder", "language_model")
        )

    def test_one_that_is_patched(self, gemma: Any) -> None:
        hfpatch.apply(gemma, verbose=False)
        assert hfpatch.inspect(gemma).float16 == (f"model.layers: {STREAM} is applied and serves this stack",)
