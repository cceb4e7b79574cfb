"""The table of needs in examples/README.md: what each row says is what a test that bears the row found.

A row stands twice: on the page, and whole at each test that holds it, as `pytest.mark.need(need, answer, how)`. The two
are compared, so that neither changes alone. Here the code of a row is run as it is typed there; what needs an example,
real weights or other processes is held by tests elsewhere.
"""

from __future__ import annotations

import ast
import copy
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import nn

import hfpatch
from hfpatch.errors import InputError
from hfpatch.lab.composites_modulation import Modulation, modulated
from hfpatch.testing import SpeechLLM, tiny_model
from tests.conftest import ROOT, load_script
from tests.test_check import Quantised
from tests.test_fp32_indexer import chosen, made
from tests.test_guard import adamw, batches, everything, loss_of, net
from tests.test_trace import qk_overflow
from tests.test_trace_growth import Cascade, X

PAGE = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (.+) \| (one call|some lines|refused) \| (.+) \| (`tests/.+`) \|$", re.MULTILINE)
CODE = re.compile(r"`((?:hfpatch|trace|guard|outcome)[.\[][^`]*)`")
"""What a row says to type."""
HALVES = ("q_proj", "k_proj", "v_proj", "o_proj")

Typed = Callable[..., list[Callable[[], Any]]]


@pytest.fixture
def typed(request: pytest.FixtureRequest) -> Typed:
    """`typed(model=model)`: each expression in code font of the test's row, to be run as it is typed there."""
    how = request.node.get_closest_marker("need").args[2]
    return lambda **names: [partial(eval, code, {"hfpatch": hfpatch, **names}) for code in CODE.findall(how)]


def bearing(tree: ast.Module, file: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """The rows that tests of a file bear, each with the test."""
    for node in ast.walk(tree):
        for decorator in getattr(node, "decorator_list", ()):
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.need":
                assert isinstance(node, ast.FunctionDef)
                yield tuple(map(ast.literal_eval, decorator.args)), f"`{file}::{node.name}`"


def edited(fix: Any, patch: str) -> set[str]:
    """The paths that a patch edited."""
    return {e.path for d in fix.plan.of("applied") if d.patch == patch for e in d.edits}


class TestThePage:
    def test_each_row_stands_at_the_tests_that_hold_it(self) -> None:
        rows = [(row.groups()[:3], test) for row in ROW.finditer(PAGE) for test in row[4].split(", ")]
        found: list[tuple[tuple[str, ...], str]] = []
        for file in sorted((ROOT / "tests").rglob("test_*.py")):
            text = file.read_text(encoding="utf-8")
            if "pytest.mark.need(" in text:
                found += bearing(ast.parse(text), file.relative_to(ROOT).as_posix())
        assert sorted(rows) == sorted(found)

    def test_nothing_of_a_table_is_passed_over(self) -> None:
        """No row of the tables of needs is of another form, and no need stands twice."""
        tables = PAGE.partition("\n## What was fixed by hand")[2]
        lines = [line for line in tables.splitlines() if line.startswith("| ") and not line.startswith("| need |")]
        assert lines == [row[0] for row in ROW.finditer(PAGE)]
        assert len({row[1] for row in ROW.finditer(PAGE)}) == len(lines)
        assert all(CODE.search(row[3]) for row in ROW.finditer(PAGE) if row[2] == "one call"), "what to type"

    def test_every_example_is_named(self) -> None:
        for script in (ROOT / "examples").glob("*.py"):
            assert f"({script.name})" in PAGE


class TestSpeech:
    """Gemma 3 in a speech LLM."""

    @pytest.mark.need(
        "the norm's eps 1e-4 -> `rms_norm_eps`",
        "one call",
        "`hfpatch.apply(model)` (`eps-alignment`): the norm that was added, not the model's own. It gives parity, not "
        "stability: a smaller eps raises the largest gain",
    )
    def test_eps(self, typed: Typed) -> None:
        model = SpeechLLM(tiny_model("gemma3_text"))
        own = model.llm.model.norm.eps
        faint = 1e-6 * torch.randn(1, 24)
        stock = model.ln_speech(faint).abs().max()
        (apply,) = typed(model=model)
        assert edited(apply(), "eps-alignment") == {"ln_speech"}
        assert model.ln_speech.eps == model.llm.config.rms_norm_eps == own == 1e-6
        assert model.ln_speech(faint).abs().max() > 9.9 * stock

    @pytest.mark.need(
        "LoRA on q, k, v, o -> plus gate, up, down",
        "one call",
        "`hfpatch.lora_config(model)`: all linear maps of the blocks, fused ones too; routed experts by "
        "`hfpatch.lora_config(model, experts=True)`",
    )
    def test_lora_targets(self, typed: Typed) -> None:
        dense, _ = typed(model=tiny_model("gemma3_text"))
        assert set(dense().target_modules) == {*HALVES, "gate_proj", "up_proj", "down_proj"}
        fused, _ = typed(model=tiny_model("phi3"))
        assert set(fused().target_modules) == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
        without, with_experts = typed(model=tiny_model("mixtral"))
        assert without().target_parameters is None
        assert set(with_experts().target_modules) == set(HALVES)
        assert set(with_experts().target_parameters) == {"experts.gate_up_proj", "experts.down_proj"}

    @pytest.mark.need(
        "a helper that finds `embed_tokens` with and without LoRA", "one call", "`hfpatch.embed_tokens(model)`"
    )
    def test_embed_tokens(self, typed: Typed) -> None:
        model = SpeechLLM(tiny_model("gemma3_text"))
        table = model.llm.model.embed_tokens
        (find,) = typed(model=model)
        assert find() is table
        model.llm = get_peft_model(model.llm, hfpatch.lora_config(model.llm, verbose=False))
        assert find() is table

    @pytest.mark.need(
        "NaN and Inf checks on `inputs_embeds`",
        "one call",
        "`hfpatch.trace(model)`: every input and output, keyword arguments too",
    )
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_inputs_embeds(self, bad: float, typed: Typed, ids: torch.Tensor) -> None:
        model = tiny_model("llama")
        embeds = hfpatch.embed_tokens(model)(ids).detach()
        embeds[0, 3, 5] = bad
        (trace,) = typed(model=model)
        with trace() as t, torch.no_grad():
            model(inputs_embeds=embeds)
        assert (t.first_bad.symptom, t.first_bad.tensor) == ("bad-input", "input 'inputs_embeds' of the model")

    @pytest.mark.need(
        "NaN and Inf checks on the loss",
        "one call",
        "`hfpatch.Guard(model, optimizer).step(loss)`, or `hfpatch.validate_loss(loss)`",
    )
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_the_loss(self, bad: float, typed: Typed, capsys: pytest.CaptureFixture[str]) -> None:
        model = net()
        optimizer, before = adamw(model), everything(model)
        step, validate = typed(model=model, optimizer=optimizer, loss=loss_of(model, batches(1)[0]) * bad)
        with pytest.raises(InputError, match=f"the loss is {'NaN' if math.isnan(bad) else '.inf'}"):
            validate()
        assert step().code == "loss"
        assert everything(model) == before
        assert "skipped, non-finite loss" in capsys.readouterr().err

    @pytest.mark.need(
        "`torch.clamp`, or a constant in place of a NaN loss",
        "refused",
        "clamp leaves NaN as NaN, and a constant reaches no parameter: both hide the failure. "
        "`hfpatch.Guard(model, optimizer).step(loss)` skips the batch and says so",
    )
    def test_a_hidden_nan(self, typed: Typed, capsys: pytest.CaptureFixture[str]) -> None:
        model = net()
        loss = loss_of(model, batches(1)[0]) * math.nan
        assert torch.clamp(loss, -1e6, 1e6).isnan()
        torch.tensor(0.0, requires_grad=True).backward()
        assert all(p.grad is None for p in model.parameters())
        (step,) = typed(model=model, optimizer=adamw(model), loss=loss)
        assert step().skipped
        assert "step 1: skipped, non-finite loss: loss nan" in capsys.readouterr().err

    @pytest.mark.need(
        "`lora_alpha // 4`",
        "one call",
        "`hfpatch.lora_config(model, r=16, scale=2)`: what matters is alpha / r, so that is what is set",
    )
    def test_the_scale(self, typed: Typed) -> None:
        model = tiny_model("gemma3_text")
        (config,) = typed(model=model)
        made = config()
        assert made.lora_alpha / made.r == 2
        layer: Any = get_peft_model(model, made).base_model.model.model.layers[0].mlp.up_proj
        assert layer.scaling["default"] == 2

    @pytest.mark.need(
        "projector init std 0.02, bias 0",
        "one call",
        "`hfpatch.apply(model)` (`projection-init`): the RMS of the model's own embeddings, and bias 0; "
        '`hfpatch.apply(model, options={"projection-init": {"std": 0.02}})` sets 0.02',
    )
    def test_the_projector(self, typed: Typed, ids: torch.Tensor) -> None:
        matched, fixed = SpeechLLM(tiny_model("gemma3_text")), SpeechLLM(tiny_model("gemma3_text"))
        typed(model=matched)[0]()
        typed(model=fixed)[1]()
        assert not matched.speech_proj.bias.any()
        assert not fixed.speech_proj.bias.any()
        heard = matched.speech_proj(matched.ln_speech(torch.randn(4, 32, 24)))
        text = hfpatch.embed_tokens(matched)(ids)
        assert (heard.square().mean() / text.square().mean()).sqrt().item() == pytest.approx(1, abs=0.1)
        assert fixed.speech_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)

    @pytest.mark.need(
        '`attn_implementation="eager"`',
        "one call",
        '`hfpatch.apply(model, include=["eager-attention"])`, which is refused in float16. Eager is not safer: in '
        'float16 it overflows where sdpa does not; `hfpatch.apply(model, include=["fp32-attention-logits"])` is what '
        "helps",
    )
    def test_eager(self, typed: Typed, ids: torch.Tensor, capsys: pytest.CaptureFixture[str]) -> None:
        model: Any = qk_overflow()
        eager, in_float32 = typed(model=model)
        with torch.no_grad():
            assert not model(ids).logits.isfinite().all()
            in_float32().revert()
            model.set_attn_implementation("sdpa")
            assert model(ids).logits.isfinite().all()
            eager()
            assert model.config._attn_implementation == "sdpa"
            assert "asked for and refused: eager-attention: eager attention overflows" in capsys.readouterr().err
            model.set_attn_implementation("eager")
            in_float32()
            assert model(ids).logits.isfinite().all()
        other: Any = tiny_model("llama")
        other.set_attn_implementation("sdpa")
        typed(model=other)[0]()
        assert other.config._attn_implementation == "eager"

    @pytest.mark.need(
        "autocast off for the loss",
        "one call",
        "transformers computes the loss from float32 logits; where the head's product itself is rounded, "
        '`hfpatch.apply(model, include=["fp32-lm-head"])`',
    )
    def test_the_head(self, typed: Typed, ids: torch.Tensor) -> None:
        model: Any = tiny_model("llama")
        (apply,) = typed(model=model)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            stock = model(ids, labels=ids)
            logits = stock.logits.float()[:, :-1].flatten(0, 1)
            with torch.autocast("cpu", enabled=False):
                assert torch.equal(stock.loss, nn.functional.cross_entropy(logits, ids[:, 1:].flatten()))
            assert stock.logits.dtype == torch.bfloat16
            apply()
            assert model(ids, labels=ids).logits.dtype == torch.float32

    @pytest.mark.need(
        "statistics of the logits in the log",
        "one call",
        '`hfpatch.trace(model)`, then `trace["lm_head"].output`',
    )
    def test_the_logits(self, typed: Typed, ids: torch.Tensor) -> None:
        model = tiny_model("llama")
        with typed(model=model)[0]() as trace, torch.no_grad():
            logits = model(ids).logits
        found = typed(trace=trace)[1]()
        assert found.size == logits.numel()
        assert (found.least, found.most) == (logits.min().item(), logits.max().item())
        assert found.mean == pytest.approx(logits.mean().item(), abs=1e-6)
        assert found.rms == pytest.approx(logits.square().mean().sqrt().item(), rel=1e-5)

    @pytest.mark.slow
    @pytest.mark.need(
        "a debug script that prints the facts",
        "one call",
        "`hfpatch.inspect(model)`, `hfpatch.doctor(model, batch=batch)`",
    )
    def test_the_facts(self, typed: Typed, gemma: Any, ids: torch.Tensor) -> None:
        facts, page = typed(model=gemma, batch={"input_ids": ids, "labels": ids})
        for words in ("rms_norm_eps", "model.embed_tokens", "float16 residual stream", "eager"):
            assert words in str(facts())
        text = str(page())
        for words in ("Run it in float16, hfpatch.apply", "loss-not-finite", "fp16-residual-overflow"):
            assert words in text

    @pytest.mark.need(
        "(not found by hand) the residual stream passes 65,504",
        "one call",
        "`hfpatch.apply(model)` (`fp16-residual-overflow`)",
    )
    def test_the_residual_stream(self, typed: Typed, gemma: Any, ids: torch.Tensor) -> None:
        (apply,) = typed(model=gemma)
        with torch.no_grad():
            assert not gemma(ids).logits.isfinite().any()
            assert "model.layers.0" in edited(apply(), "fp16-residual-overflow")
            assert gemma(ids).logits.isfinite().all()


class TestModulations:
    """Modulation adapters."""

    @pytest.mark.need(
        "1 + tanh(x), which touches 0, becomes a sigmoid",
        "one call",
        "`hfpatch.apply(model)` (`sigmoid-modulation`): between 0.5 and 1.5, exactly 1 at 0",
    )
    def test_the_factor(self, typed: Typed, ids: torch.Tensor) -> None:
        model = modulated(tiny_model("llama"))
        parts = [m for m in model.modules() if isinstance(m, Modulation)]
        h = torch.randn(1, 2, 32)
        assert not parts[0].scaled(h, -40).any(), "it touches 0"
        (apply,) = typed(model=model)
        with torch.no_grad():
            stock = model(ids).logits
            apply()
            assert torch.equal(model(ids).logits, stock), "exactly 1 at 0"
        for part in parts:
            assert torch.allclose(part.scaled(h, -40), 0.5 * h)
            assert torch.allclose(part.scaled(h, 40), 1.5 * h)

    @pytest.mark.need(
        "`0.5 * sigmoid(x) + 0.5`, as published",
        "refused",
        "it is 0.75 at 0: every layer shrinks at the start. Bounds that exclude 1 are an error: "
        "`hfpatch.nn.BoundedModulation(0.5, 1.0)`",
    )
    def test_the_published_factor(self, typed: Typed) -> None:
        assert 0.5 * torch.sigmoid(torch.tensor(0.0)) + 0.5 == 0.75
        (bounded,) = typed()
        with pytest.raises(InputError, match="1 must lie strictly between them"):
            bounded()

    @pytest.mark.need(
        "A std 0.02, B_add std 0.001 with a tenth of its output, B_mult zeros",
        "one call",
        "`hfpatch.nn.ModulationAdapter(width)`, or `hfpatch.nn.ModulationAdapter.attach(model)`",
    )
    def test_initialisation(self, typed: Typed) -> None:
        model = tiny_model("llama")
        one, attach = typed(width=32, model=model)
        attach()
        adapters = [m for m in model.modules() if isinstance(m, hfpatch.nn.ModulationAdapter)]
        assert len(adapters) == len(model.model.layers)
        h = torch.randn(1, 2, 32)
        for adapter in (one(), *adapters):
            assert adapter.a_proj.weight.std().item() == pytest.approx(0.02, rel=0.15)
            assert adapter.b_add.weight.std().item() == pytest.approx(0.001, rel=0.15)
            assert not adapter.b_mult.weight.any()
            assert torch.equal(adapter(h), h + 0.1 * adapter.b_add(adapter.a_proj(h)))

    @pytest.mark.need(
        "no float16 together with quantisation",
        "one call",
        "`hfpatch.check(model, args)` names a quantised base that computes in float16; "
        "`hfpatch.nn.ModulationAdapter(width)` computes in its own float32",
    )
    def test_a_quantised_base(self, typed: Typed) -> None:
        check, adapter = typed(model=nn.Sequential(Quantised(torch.float16)), args={}, width=8)
        assert "quantised-fp16" in check().ids
        assert not typed(model=nn.Sequential(Quantised(torch.bfloat16)), args={}, width=8)[0]()
        small, h = adapter(), torch.randn(2, 8).half()
        assert small.a_proj.weight.dtype == torch.float32
        assert torch.equal(small(h), small(h.float()).half())

    @pytest.mark.need(
        "normalised MSE between teacher and student", "one call", "`hfpatch.normalized_mse(student, teacher)`"
    )
    @pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
    def test_the_loss(self, size: float, typed: Typed) -> None:
        teacher = size * torch.randn(3, 7)
        for part in (0.0, 0.5, 1.0):
            (loss,) = typed(student=part * teacher, teacher=teacher)
            assert loss().item() == pytest.approx((1 - part) ** 2, abs=1e-5)

    @pytest.mark.need("clip at 0.5", "one call", "`hfpatch.Guard(model, optimizer, max_grad_norm=0.5)`")
    def test_clipping(self, typed: Typed) -> None:
        plain, model = net(), net()
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
        x = 10 * batches(1)[0]
        loss_of(plain, x).backward()
        assert nn.utils.clip_grad_norm_(plain.parameters(), 0.5) > 0.5
        optimizers[0].step()
        (guard,) = typed(model=model, optimizer=optimizers[1])
        assert guard().step(loss_of(model, x)).stepped
        assert everything(model) == everything(plain)

    @pytest.mark.need(
        "NaN batches are skipped", "one call", "`hfpatch.Guard(model, optimizer)`, then `guard.step(loss)`"
    )
    def test_a_nan_batch(self, typed: Typed) -> None:
        model = net()
        optimizer = adamw(model)
        guard = typed(model=model, optimizer=optimizer)[0]()
        x = batches(1)[0]
        for factor, skipped in ((1.0, False), (math.nan, True), (1.0, False)):
            before = everything(model, optimizer)
            outcome = typed(guard=guard, loss=loss_of(model, x) * factor)[1]()
            assert outcome.skipped is skipped
            assert (everything(model, optimizer) == before) is skipped

    @pytest.mark.need(
        "`safe_mode`: the additive path alone", "one call", "`hfpatch.nn.ModulationAdapter(width, safe_mode=True)`"
    )
    def test_safe_mode(self, typed: Typed) -> None:
        safe = typed(width=8)[0]()
        assert {n for n, _ in safe.named_parameters()} == {"a_proj.weight", "b_add.weight"}
        nn.init.normal_(safe.b_add.weight)
        h = torch.randn(3, 8)
        assert torch.equal(safe(h), h + 0.1 * safe.b_add(safe.a_proj(h)))

    @pytest.mark.need("a script that says where NaN starts", "one call", "`hfpatch.trace(model)`")
    def test_where_nan_starts(self, typed: Typed, gemma: Any, ids: torch.Tensor) -> None:
        with typed(model=gemma)[0]() as trace, torch.no_grad():
            gemma(ids)
        assert trace.first_bad.sentence.startswith("step 0, forward: residual add in model.layers.1: ")

    @pytest.mark.need(
        "layers inside wrapper modules", "one call", "`hfpatch.apply(model)` finds and patches them as they are"
    )
    def test_wrapped_layers(self, typed: Typed) -> None:
        example = load_script("examples/modulated_smollm.py")
        model = example.student(tiny_model("llama"), "published", every=0)
        assert {type(layer) for layer in model.model.layers} == {example.Wrapped}
        fix = typed(model=model)[0]()
        assert edited(fix, "sigmoid-modulation") == {f"model.layers.{i}.modulation" for i in range(4)}


class TestLogits:
    """Attention logits in float32."""

    @pytest.mark.need(
        "the product of queries and keys in float32",
        "one call",
        '`hfpatch.apply(model, include=["fp32-attention-logits"])`; for eager float16 `hfpatch.apply(model)` is '
        "enough. The product, not its result, with autocast off",
    )
    @pytest.mark.parametrize("call", [0, 1])
    @pytest.mark.parametrize("autocast", [False, True])
    def test_the_product(self, call: int, autocast: bool, typed: Typed, ids: torch.Tensor) -> None:
        """The product passes 65,504: a result that is converted afterwards is infinite."""
        model = qk_overflow()
        with torch.autocast("cpu", torch.float16, enabled=autocast), torch.no_grad():
            assert not model(ids).logits.isfinite().all()
            typed(model=model)[call]()
            assert model(ids).logits.isfinite().all()

    @pytest.mark.need(
        "the indexer's scores in float32",
        "one call",
        "`hfpatch.apply(model)` (`fp32-indexer`): the positions of float32 under autocast, in eleven architectures",
    )
    def test_the_indexer(self, typed: Typed) -> None:
        model = made("deepseek_v32")
        assert {c.product for c in chosen(model, torch.bfloat16)} == {"bfloat16"}
        typed(model=model)[0]()
        assert all(c.product == "float32" and c.equal == c.rows for c in chosen(model, torch.bfloat16))

    @pytest.mark.need(
        "NaN in step 1 is seen before the run", "one call", "`hfpatch.check(model, args, batch=batch)` rehearses a step"
    )
    def test_step_one(self, typed: Typed, gemma: Any, ids: torch.Tensor) -> None:
        (check,) = typed(model=gemma, args={}, batch={"input_ids": ids, "labels": ids})
        before = everything(gemma)
        assert "loss-not-finite" in check().ids
        assert everything(gemma) == before


class TestStages:
    """A staged multimodal trainer."""

    @pytest.mark.need(
        "forward raises on logits that are not finite",
        "some lines",
        "`with hfpatch.trace(model) as t:`, and raise on `t.first_bad`; without it the guard skips the batch, because "
        "the loss is not finite",
    )
    def test_forward_raises(self, gemma: Any, ids: torch.Tensor) -> None:
        def forward() -> Any:
            with hfpatch.trace(gemma) as t:
                out = gemma(ids, labels=ids)
            if t.first_bad:
                raise FloatingPointError(t.first_bad.sentence)
            return out

        with pytest.raises(FloatingPointError, match=r"residual add in model\.layers\.1"):
            forward()
        guard = hfpatch.Guard(gemma, torch.optim.SGD(gemma.parameters(), lr=0.1), verbose=False)
        assert guard.step(gemma(ids, labels=ids).loss).code == "loss"
        hfpatch.apply(gemma, verbose=False)
        assert forward().loss.isfinite()

    @pytest.mark.need("`validate_loss(loss, -1e6, 1e6)`", "one call", "`hfpatch.validate_loss(loss)` has these limits")
    def test_limits(self, typed: Typed) -> None:
        for good in (-1e6, 0.0, 1e6):
            assert typed(loss=torch.tensor(good))[0]() == good
        for bad in (-1.1e6, 1.1e6, math.nan, math.inf, -math.inf):
            with pytest.raises(InputError):
                typed(loss=torch.tensor(bad))[0]()

    @pytest.mark.need(
        "explosion is judged after `scaler.unscale_`",
        "one call",
        "`hfpatch.Guard(model, optimizer, scaler=scaler, explode_at=1e4)`",
    )
    def test_explosion(self, typed: Typed) -> None:
        model = net()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
        guard = typed(model=model, optimizer=adamw(model), scaler=scaler)[0]()
        x = batches(1)[0]
        norm = torch.cat([g.flatten() for g in torch.autograd.grad(loss_of(model, x), list(model.parameters()))]).norm()
        assert norm * 2**20 > 1e4 > norm
        outcome = guard.step(loss_of(model, x))
        assert outcome.stepped
        assert outcome.facts.norm == pytest.approx(norm.item(), rel=1e-5)
        before = everything(model)
        assert guard.step(1e7 * loss_of(model, x)).code == "explosion"
        assert everything(model) == before

    @pytest.mark.need(
        "a bad batch is skipped, gradients zeroed, `scaler.update()` still called",
        "one call",
        "`guard.step(loss)`, of `hfpatch.Guard(model, optimizer, scaler=scaler)`",
    )
    def test_a_bad_batch(self, typed: Typed) -> None:
        model = net()
        optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
        guard = typed(model=model, optimizer=optimizer, scaler=scaler)[1]()
        x = batches(1)[0]
        before = everything(model, optimizer)
        for factor, skipped, scale in ((math.nan, True, 512.0), (1.0, False, 512.0)):
            outcome = typed(guard=guard, loss=loss_of(model, x) * factor)[0]()
            assert outcome.skipped is skipped
            assert (everything(model, optimizer) == before) is skipped
            assert all(p.grad is None for p in model.parameters())
            assert scaler.get_scale() == scale, "without update() the next unscale_ raises, and no scale changes"

    @pytest.mark.need(
        "clip after unscaling",
        "one call",
        "`guard.step(loss)`, of `hfpatch.Guard(model, optimizer, scaler=scaler, max_grad_norm=0.5)`",
    )
    def test_clip_after_unscaling(self, typed: Typed) -> None:
        plain, model = net(), net()
        left, right = adamw(plain), adamw(model)
        by_hand, scaler = (torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2))
        guard = typed(model=model, optimizer=right, scaler=scaler)[1]()
        for x in batches(4):
            by_hand.scale(loss_of(plain, 10 * x)).backward()
            by_hand.unscale_(left)
            assert nn.utils.clip_grad_norm_(plain.parameters(), 0.5) > 0.5
            by_hand.step(left)
            by_hand.update()
            left.zero_grad()
            assert typed(guard=guard, loss=loss_of(model, 10 * x))[0]().stepped
        assert everything(plain, left) == everything(model, right)

    @pytest.mark.need(
        "accumulation divides the loss", "one call", "`hfpatch.Guard(model, optimizer, accumulation_steps=2)`"
    )
    def test_accumulation(self, typed: Typed) -> None:
        whole, model = net(), net()
        x = torch.cat(batches(2))
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (whole, model)]
        hfpatch.Guard(whole, optimizers[0]).step(loss_of(whole, x))
        guard = typed(model=model, optimizer=optimizers[1])[0]()
        assert [guard.step(loss_of(model, part)).stepped for part in (x[:4], x[4:])] == [False, True]
        for a, b in zip(whole.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a, b)

    @pytest.mark.need(
        "warm-up and cosine",
        "some lines",
        "torch's schedule, given to `hfpatch.Guard(model, optimizer, schedule)`, which steps it only where a step is "
        "taken",
    )
    def test_the_schedule(self, typed: Typed) -> None:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=3)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [3])
        guard = typed(model=model, optimizer=optimizer, schedule=schedule)[0]()
        rates = []
        for factor in (1.0, 1.0, math.nan, 1.0, 1.0):
            guard.step(loss_of(model, batches(1)[0]) * factor)
            rates.append(optimizer.param_groups[0]["lr"])
        assert rates == pytest.approx([0.5, 0.75, 0.75, 1.0, (1 + math.cos(math.pi / 4)) / 2])

    @pytest.mark.need(
        "norms of each component",
        "one call",
        '`hfpatch.Guard(model, optimizer, components={"in": "0.*", "out": ["2.weight", "2.bias"]})`, then '
        "`outcome.norms`",
    )
    def test_components(self, typed: Typed) -> None:
        model = net()
        guard = typed(model=model, optimizer=adamw(model))[0]()
        x = batches(1)[0]
        wanted = {
            name: torch.cat(
                [g.flatten() for g in torch.autograd.grad(loss_of(model, x), list(part.parameters()))]
            ).norm()
            for name, part in (("in", model[0]), ("out", model[2]))
        }
        norms = typed(outcome=guard.step(loss_of(model, x)))[1]()
        assert norms == {name: pytest.approx(norm.item(), rel=1e-5) for name, norm in wanted.items()}


class TestCascade:
    """A cascade with a gradient of 1e17."""

    @pytest.mark.need(
        "`check_tensor_health` at every layer: NaN, Inf, min, max, mean, std",
        "one call",
        "`hfpatch.trace(model)`: of every input and output; the RMS in place of std",
    )
    def test_health(self, typed: Typed) -> None:
        model = Cascade(faint=False)
        seen: dict[str, list[torch.Tensor]] = {}
        for path, module in model.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(
                    lambda _m, args, out, path=path: seen.setdefault(path, [args[0].detach(), out.detach()]) and None
                )
        with typed(model=model)[0]() as trace, torch.no_grad():
            model(torch.cat([X, torch.full_like(X[:1], math.inf)]))
        assert len(seen) == 8
        for path, tensors in seen.items():
            for found, tensor in zip((trace[path].input, trace[path].output), tensors, strict=True):
                finite = tensor[tensor.isfinite()]
                assert found.nan == tensor.isnan().sum()
                assert (found.posinf, found.neginf) == ((tensor == math.inf).sum(), (tensor == -math.inf).sum())
                assert (found.least, found.most) == (finite.min(), finite.max())
                assert found.mean == pytest.approx(finite.mean().item(), abs=1e-6)
                assert found.rms == pytest.approx(finite.square().mean().sqrt().item(), rel=1e-5)

    @pytest.mark.need(
        "on chosen epochs, their first batch, rank 0, off by itself",
        "one call",
        "`hfpatch.trace(model, epochs=[0, 8], steps=[0], ranks=[0])`",
    )
    def test_epochs(self, typed: Typed) -> None:
        model = Cascade(faint=False)
        tracer = typed(model=model)[0]()

        def hooked() -> bool:
            return any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())

        for _ in range(10):
            with tracer:
                for _ in range(2):
                    model(X).backward()
            assert not hooked()
        assert [(s.epoch, s.number) for s in tracer.steps] == [(0, 0), (8, 0)]

    @pytest.mark.need(
        "the parameter with the largest gradient",
        "one call",
        "`trace.largest_gradients()`, of `hfpatch.trace(model)`",
    )
    def test_largest_gradients(self, typed: Typed) -> None:
        model = Cascade()
        with typed(model=model)[1]() as trace:
            model(X).backward()
        (name, value), *_ = typed(trace=trace)[0]()
        truth = {n: float(p.grad.abs().max()) for n, p in model.named_parameters() if p.grad is not None}
        assert name == max(truth, key=truth.__getitem__)
        assert value == pytest.approx(truth[name])

    @pytest.mark.need(
        "a clamp on the RMS scale, weights on the residual",
        "refused",
        "they change the function: `hfpatch.apply(model)` does neither; a patch of your own can, by name "
        "(docs/authoring.md)",
    )
    def test_no_clamp(self, typed: Typed) -> None:
        model = Cascade()
        stock = copy.deepcopy(model)
        assert typed(model=model)[0]().edits == ()
        assert torch.equal(model(X), stock(X))
