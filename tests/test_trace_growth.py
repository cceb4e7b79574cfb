"""A signal that grows or vanishes while all is finite: found, its operation named; silence where all is well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import hfpatch
from hfpatch.advice import answer
from hfpatch.testing import example_inputs, tiny_model
from hfpatch.tracing.growing.flow import factor
from tests.fingerprint import fingerprint


def normalised(x: torch.Tensor, scale: float = 1e-9, eps: float = 1e-8) -> torch.Tensor:
    small = x * scale
    return small / (small.pow(2).mean(-1, keepdim=True).sqrt() + eps)


class Stage(nn.Module):
    """A hand-written stage; a faint one divides by the tiny RMS of what it computes."""

    def __init__(self, faint: bool) -> None:
        super().__init__()
        self.input_proj, self.output_proj, self.faint = nn.Linear(16, 16), nn.Linear(16, 16), faint

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.output_proj(torch.tanh(self.input_proj(x)))
        return x + (normalised(out) if self.faint else out)


class Cascade(nn.Module):
    """Stages in a list, inside a module of its own; the fault is in stage 1."""

    def __init__(self, faint: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(16, 16)
        self.cascade_stages = nn.ModuleList(Stage(faint and i == 1) for i in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        for stage in self.cascade_stages:
            x = stage(x)
        return self.head(x).square().mean()


class Between(nn.Module):
    """Plain layers; the model's own code normalises between them."""

    def __init__(self, own: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages, self.own = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, stage in enumerate(self.stages):
            x = stage(x)
            x = self.own(x) if i == 1 else x
        return x


class Heavy(nn.Module):
    """A stack of layers, each with a residual branch of a factor."""

    def __init__(self, factors: list[float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.factors = nn.ModuleList(nn.Linear(16, 16) for _ in factors), factors

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, by in zip(self.layers, self.factors, strict=True):
            x = by * torch.tanh(layer(x)) + by * x
        return x.sum()


def step(model: nn.Module, *args: Any, scale: float = 1.0, **kwargs: Any) -> Any:
    with hfpatch.trace(model) as t:
        out = model(*args, **kwargs)
        loss = out if isinstance(out, torch.Tensor) else out.loss
        (loss.sum() * scale).backward()
    return t


X = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))


class TestNamed:
    @pytest.mark.need(
        "cause: `target / (rms + 1e-8)`",
        "one call",
        "`hfpatch.trace(model)` names it: `division by rms ... + 1e-08`",
    )
    def test_a_stage_of_a_cascade(self) -> None:
        found = step(Cascade(), X).first_bad
        assert (found.symptom, found.phase, found.module) == ("growth", "backward", "cascade_stages.1")
        assert found.operation.startswith("division by rms ")
        assert found.operation.endswith(" + 1e-08")
        assert "in cascade_stages.1" in found.why
        assert "elsewhere" in found.why

    @pytest.mark.parametrize("scale", [1e3, 1.0, 2.0**-20])
    def test_own_code_between_stages(self, scale: float) -> None:
        """The factor before the division makes up for it, so that no input or output of a module shows it."""
        t = step(Between(normalised), X, scale=scale)
        assert t.first_bad.module == ""
        assert t.first_bad.operation.startswith("division by rms ")
        assert "division by rms" in str(t.report())

    @pytest.mark.need(
        "cause: the norm of a row of near-zero variance",
        "one call",
        "`hfpatch.trace(model)` names it: `layer norm of rows that ...`",
    )
    @pytest.mark.parametrize(
        ("own", "says"),
        [
            (lambda x: x + 1e4 * x, "multiplication by 1e+04"),
            (lambda x: (x - x.detach() + 1e-7).log(), "log of 1e-07"),
            (lambda x: (x - x.detach() + 1e-12).sqrt(), "sqrt of 1e-12"),
            (lambda x: x * torch.softmax((x - x.detach()) * 1e6, -1), "multiplication by 1e+06, before a softmax"),
            (lambda x: nn.functional.normalize(x - x.detach() + 1e-8, dim=-1), "normalisation of rows of RMS 1e-08"),
            (lambda x: nn.functional.layer_norm(3 + 1e-5 * x, (16,), eps=1e-12), "layer norm of rows that"),
        ],
    )
    def test_other_operations(self, own: Callable[[torch.Tensor], torch.Tensor], says: str) -> None:
        found = step(Between(own), X).first_bad
        assert found is not None
        assert says in found.operation

    def test_vanishing(self) -> None:
        found = step(Between(lambda x: x * 1e-6), X).first_bad
        assert (found.symptom, found.operation) == ("vanishing", "multiplication by 1e-06")

    @pytest.mark.need(
        "cause: residual amplification",
        "one call",
        "`hfpatch.trace(model)` names the stack: growth `over the 16 blocks of layers`",
    )
    def test_a_whole_stack(self) -> None:
        """No layer is out of the ordinary, but together they are."""
        found = step(Heavy([2.0] * 16), X).first_bad
        assert found.symptom == "growth"
        assert "over the 16 blocks of layers" in found.why
        assert step(Heavy([1.05] * 16), X).first_bad is None


MODELS = ("llama", "gpt2", "gemma3_text")


class TestSettings:
    """The factor does not depend on them."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_dtypes(self, dtype: torch.dtype) -> None:
        model = Between(lambda x: x + 1000 * (x - x.detach())).to(dtype)
        found = step(model, X.to(dtype)).first_bad
        assert found is not None
        assert found.operation == "multiplication by 1000"
        assert found.dtype == str(dtype).removeprefix("torch.")

    @pytest.mark.parametrize("scale", [1.0, 65536.0])
    def test_a_loss_scale(self, scale: float) -> None:
        assert "division by rms" in step(Cascade(), X, scale=scale).first_bad.operation
        assert step(Cascade(False), X, scale=scale).first_bad is None

    def test_frozen(self) -> None:
        model = Cascade().requires_grad_(False)
        model.encoder.requires_grad_(True)
        assert step(model, X).first_bad.module == "cascade_stages.1"
        model = Cascade().requires_grad_(False)
        model.head.requires_grad_(True)
        assert step(model, X).first_bad is None, "no gradient passes the stage"

    @pytest.mark.parametrize("reentrant", [True, False])
    @pytest.mark.parametrize(
        ("name", "path"), [("llama", "model.layers.1.mlp.down_proj"), ("gpt2", "transformer.h.1.mlp.c_proj")]
    )
    def test_checkpointing(self, name: str, path: str, reentrant: bool) -> None:
        model = tiny_model(name).train()
        batch = example_inputs(model)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        assert step(model, **batch).first_bad is None
        with torch.no_grad():
            model.get_submodule(path).weight.mul_(1e6)
        found = step(model, **batch).first_bad
        assert (found.symptom, found.module) == ("growth", path)

    def test_lora(self) -> None:
        """In the first step B is 0, and with it every gradient of an A."""
        for healthy in (True, False):
            base = tiny_model("llama").train()
            if not healthy:
                with torch.no_grad():
                    base.model.layers[2].mlp.down_proj.weight.mul_(1e6)
            model = get_peft_model(base, LoraConfig(target_modules=["q_proj", "down_proj"], r=4))
            found = step(model, **example_inputs(base)).first_bad
            assert (found is None) == healthy
            if found is not None:
                assert found.module == "base_model.model.model.layers.2.mlp.down_proj.base_layer"

    def test_padding(self) -> None:
        """Rows that hold only padding change nothing."""
        model = tiny_model("llama").train()
        ids = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids)
        mask[0, :8] = 0
        labels = ids.masked_fill(mask == 0, -100)
        assert step(model, input_ids=ids, attention_mask=mask, labels=labels).first_bad is None

    def test_inference(self) -> None:
        """Without a backward pass, the forward one is looked at."""
        model = tiny_model("llama")
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight.mul_(1e7)
        with hfpatch.trace(model) as t, torch.inference_mode():
            model(**example_inputs(model))
        assert (t.first_bad.phase, t.first_bad.module) == ("forward", "model.layers.1.mlp.down_proj")

    def test_blocks_only(self) -> None:
        model = Cascade()
        with hfpatch.trace(model, level="blocks") as t:
            model(X).backward()
        assert t.first_bad.module == "cascade_stages.1"


class TestNothingElse:
    def test_the_model_stays_as_it_is(self) -> None:
        model, plain = Cascade(), Cascade()
        plain(X).backward()
        before, random = fingerprint(model), torch.get_rng_state()
        assert step(model, X).first_bad is not None
        assert torch.equal(torch.get_rng_state(), random)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
            a.grad = None
        assert fingerprint(model) == before

    def test_one_finding_for_each_place_and_non_finite_ones_first(self) -> None:
        model = Cascade()
        with hfpatch.trace(model) as t:
            for _ in range(3):
                model(X).backward()
            model(X * float("nan"))
        assert [f.symptom for f in t.findings] == ["bad-input", "growth"]
        assert t.first_bad.symptom == "bad-input"

    def test_advice(self) -> None:
        model = Cascade()
        (line,) = answer(step(model, X).first_bad, model).sentences
        assert line.startswith("No patch is known for this; bound what it divides")

    @pytest.mark.parametrize("name", MODELS)
    def test_healthy_models(self, name: str) -> None:
        model = tiny_model(name).train()
        assert step(model, **example_inputs(model)).findings == []


class TestTrend:
    def test_when_it_began_and_how_fast_it_doubles(self) -> None:
        model = Heavy([1.0] * 4)
        with hfpatch.trace(model) as t:
            for at in range(10):
                model.factors[2] = 2.0**at
                model(X).backward()
        course = t.trend().courses[0]
        assert (course.direction, course.path) == ("backward", "layers.2") or course.kind == "own code"
        assert course.doubling == pytest.approx(1.0, abs=0.15)
        assert course.first is not None
        assert "doubles in" in str(t.report())
        assert t.trend().to_dict()["courses"][0]["first"] == course.first

    def test_a_single_step(self) -> None:
        t = step(Cascade(), X)
        assert all(c.doubling is None for c in t.trend().courses)
        assert "trend:" not in str(t.report())


@pytest.mark.parametrize(
    ("after", "before", "more", "want"),
    [(2.0, 1.0, 1.0, 2.0), (0.01, 1.0, 100.0, 1.0), (100.0, 1.0, 0.01, 1.0), (1e-4, 1.0, 100.0, 0.01),
     (1e4, 1.0, 0.01, 100.0), (10.0, 1.0, 100.0, 10.0)],
)  # fmt: skip
def test_what_the_number_of_elements_explains_is_left_out(
    after: float, before: float, more: float, want: float
) -> None:
    assert factor(after, before, more) == pytest.approx(want)
