"""Planted faults (`benchmarks/planted.py`): the module, the operation and the cause that a trace names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfpatch
from benchmarks.planted import FAULTS, Bad, Do, Fault, Own, entropy, root_at_zero, stack
from hfpatch.errors import InputError
from hfpatch.testing import tiny_model

NAN, INF = float("nan"), float("inf")
QUICK = {
    "own Function before the last child, llama",
    "own Function in a LoRA layer, llama",
    "checkpoint by hand in a block, reentrant",
    "a skip connection in the model's own code",
    "after a NaN that backward itself masks",
    "where() hides exp, llama",
    "masked_fill() hides a log",
    "std of a constant row",
    "mean over a row of padding",
    "CTC outside, a module, watched",
    "a speech model with a float16 LLM",
    "a token id past the table, llama",
}


CASES = [pytest.param(f, id=f.name, marks=() if f.name in QUICK else pytest.mark.slow) for f in FAULTS]


@pytest.mark.parametrize("fault", CASES)
def test_planted(fault: Fault) -> None:
    torch.manual_seed(0)
    model, run = fault.make()
    raised: Exception | None = None
    with hfpatch.trace(model) as t:
        try:
            run(t.watch)
        except (RuntimeError, IndexError) as error:
            raised = error
    assert (raised is not None) == (fault.phase == "raises")
    found = t.first_bad
    assert found.module == fault.module
    assert found.phase == ("backward" if fault.phase == "backward" else "forward")
    assert found.symptom == (fault.symptom or found.symptom)
    said = f"{found.operation} {found.tensor} {found.why}".lower()
    assert all(any(word.lower() in said for word in words.split("|")) for words in fault.words), said
    assert found.sentence in " ".join(str(t.report()).split())


def trained(model: nn.Module, *args: Any) -> Any:
    with hfpatch.trace(model) as t:
        model(*args).sum().backward()
    return t.first_bad


class TestOwner:
    def test_functions_that_backward_runs_forward_again(self) -> None:
        """A custom Function that recomputes, as memory-saving kernels do."""

        class Again(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(x)
                return x.clone()

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                (x,) = ctx.saved_tensors
                with torch.enable_grad():
                    leaf = x.detach().requires_grad_()
                    out = (leaf * 0).sqrt()
                return torch.autograd.grad(out, leaf, gradient)[0]

        found = trained(stack(Do(Again.apply, ends=True))[0], torch.randn(2, 3, 8))
        assert (found.module, found.operation) == ("1", "division (SqrtBackward0)")

    def test_arguments_in_a_model_output(self) -> None:
        """The gradient of a tensor in a ModelOutput among the arguments of a block is replayed too."""
        from transformers.modeling_outputs import BaseModelOutput

        class Reads(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(8, 8)

            def forward(self, encoded: BaseModelOutput) -> torch.Tensor:
                return self.linear(root_at_zero(encoded.last_hidden_state))

        torch.manual_seed(0)
        model = Own(lambda m, x: m.b(BaseModelOutput(last_hidden_state=m.a(x))), a=nn.Linear(8, 8), b=Reads())
        with hfpatch.trace(model) as t:
            model(x=torch.randn(2, 8)).sum().backward()
        assert (t.first_bad.module, t.first_bad.operation) == ("b", "division (SqrtBackward0)")

    def test_a_loss_inside_the_model_is_not_outside(self) -> None:
        model: Any = tiny_model("llama")
        model.loss_function = lambda logits, labels, **_: entropy(logits, hidden=True)
        ids = torch.ones(2, 8, dtype=torch.int64)
        with hfpatch.trace(model) as t:
            model(input_ids=ids, labels=ids).loss.backward()
        assert (t.first_bad.module, t.first_bad.symptom) == ("", "hidden-in-forward")
        assert "0 x -inf is NaN; masked_fill() drops its value" in t.first_bad.why

    def test_gradients_are_not_touched_by_the_run_under_a_reentrant_checkpoint(self) -> None:
        fault = next(f for f in FAULTS if f.name == "checkpoint by hand in a block, reentrant")
        model, run = fault.make()
        run(lambda f: f)
        without = {n: p.grad.clone() for n, p in model.named_parameters()}
        model.zero_grad()
        fired: list[str] = []
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
        with hfpatch.trace(model) as t:
            run(t.watch)
        assert t.first_bad.module == "1"
        assert sorted(fired) == sorted(without)  # once each, by the step itself
        assert all(torch.equal(p.grad, without[n]) or p.grad.isnan().any() for n, p in model.named_parameters())

    def test_norms_of_zero_and_constant_rows_are_healthy(self) -> None:
        """Backward makes NaN of these and masks it."""
        model = stack(Do(lambda x: x + (x * 0).norm(dim=-1, keepdim=True) + (x * 0 + 1).std(-1, keepdim=True)))[0]
        assert trained(model, torch.randn(2, 3, 8)) is None


class TestOutside:
    def test_it_returns_what_the_loss_returns_and_records_in_the_trace_alone(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4))
        with hfpatch.trace(model, steps=[0]) as t:
            loss_fn = t.watch(F.mse_loss)
            x, y = torch.ones(2, 4), torch.zeros(2, 4)
            losses = [loss_fn(model(x), y, reduction=how) for how in ("sum", "mean")]
        assert torch.equal(losses[0], F.mse_loss(model(x), y, reduction="sum"))
        assert torch.equal(loss_fn(model(x), y), losses[1])
        assert [e.module for e in t.steps[0].events if e.module.endswith("()")] == ["mse_loss()"] * 2
        assert len(t.steps) == 1
        assert t.first_bad is None

    def test_all_labels_ignored(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4))
        with hfpatch.trace(model) as t:
            loss_fn = t.watch(nn.CrossEntropyLoss())
            loss_fn(model(torch.ones(2, 4)), torch.full((2,), -100)).backward()
        assert (t.first_bad.module, t.first_bad.kind) == ("CrossEntropyLoss()", "CrossEntropyLoss")
        assert t.first_bad.symptom == "no-labels"

    def test_between_the_model_and_the_watched_loss(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4))
        with hfpatch.trace(model) as t:
            t.watch(F.mse_loss)(Bad.apply(model(torch.ones(2, 4))), torch.zeros(2, 4)).backward()
        assert t.first_bad.symptom == "outside-the-model"
        assert "8 NaN of 8 elements; between the model and mse_loss()" in t.first_bad.why

    def test_a_loss_that_raises(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4))
        with pytest.raises(RuntimeError), hfpatch.trace(model) as t:
            t.watch(lambda out, labels: out @ labels)(model(torch.ones(2, 4)), torch.ones(3, 4))
        assert (t.first_bad.module, t.first_bad.operation) == ("loss()", "matmul")
        assert t.first_bad.symptom == "shape-mismatch"

    def test_no_function(self) -> None:
        with pytest.raises(InputError, match="want a function or module that computes a loss; got 3"):
            hfpatch.trace(nn.Linear(1, 1)).watch(3)  # pyright: ignore[reportArgumentType]


class TestBatch:
    def test_minus_infinity_in_the_features(self) -> None:
        """It is written by log(0), and looks like a mask until an operation makes NaN of it."""
        model = Own(lambda m, input_features: m.a(input_features), a=nn.Conv1d(4, 4, 1))
        features = torch.randn(2, 4, 5)
        features[1, 2] = -INF
        with hfpatch.trace(model) as t:
            model(input_features=features)
        assert (t.first_bad.symptom, t.first_bad.module, t.first_bad.operation) == ("bad-input", "a", "convolution")
        assert t.first_bad.why.endswith("the caller passed -Inf to the model as 'input_features'")

    @pytest.mark.parametrize("where", ["keyword", "nested", "encoding"])
    def test_by_key(self, where: str) -> None:
        from transformers import BatchEncoding

        bad = torch.full((2, 8), NAN)
        batch: Any = {"keyword": bad, "nested": {"audio": [bad]}, "encoding": BatchEncoding({"audio": bad})}[where]
        read = {"keyword": lambda b: b, "nested": lambda b: b["audio"][0], "encoding": lambda b: b["audio"]}[where]
        model = Own(lambda m, batch: m.a(read(batch)), a=nn.Linear(8, 8))
        with hfpatch.trace(model) as t:
            model(batch=batch)
        key = {"keyword": "batch", "nested": "batch.audio.0", "encoding": "batch.audio"}[where]
        assert (t.first_bad.symptom, t.first_bad.tensor) == ("bad-input", f"input {key!r} of the model")
