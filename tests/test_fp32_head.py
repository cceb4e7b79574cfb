"""Case 21: logits as a float32 product of the head's input and weight, autocast off, the weight converted in parts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import hfpatch
from hfpatch.errors import RefusedError
from hfpatch.lab.tiny import SpeechLLM, tiny_model
from hfpatch.numerics import linear_in_parts
from hfpatch.numerics.linear_in_parts import linear_in_float32
from tests.fingerprint import fingerprint
from tests.sampling import first_quick

ID = "fp32-lm-head"
IDS = (torch.arange(24).reshape(2, 12) * 7 + 3) % 64


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_in_parts, "CHUNK", 100)


def seen(model: Any, head: nn.Module, **words: Any) -> tuple[torch.Tensor, Any]:
    """The exact product of what the head is given, in float64, and the model's output."""
    given: list[torch.Tensor] = []
    handle = head.register_forward_pre_hook(lambda _m, args: given.append(args[0].detach().double()))
    out = model(**words)
    handle.remove()
    return given[0] @ head.weight.detach().double().T, out  # type: ignore[operator]


def close(value: torch.Tensor, exact: torch.Tensor, to: float) -> bool:
    exact = exact.detach().double()
    return float((value.detach().double() - exact).norm()) <= to * float(exact.norm())


class TestLinear:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("autocast", [False, True])
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.usefixtures("in_parts")
    def test_values_and_gradients(self, dtype: torch.dtype, autocast: bool, bias: bool) -> None:
        torch.manual_seed(0)
        x, w = torch.randn(2, 7, 48).to(dtype), (torch.randn(301, 48) / 7).to(dtype)
        parts = [t.requires_grad_() for t in (x, w, *([torch.randn(301).to(dtype)] if bias else []))]
        gradient = torch.randn(2, 7, 301)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = linear_in_float32(*parts)
        found = torch.autograd.grad(out, parts, gradient)
        wide = [t.detach().double().requires_grad_() for t in parts]
        exact = functional.linear(*wide)
        assert out.dtype == torch.float32
        assert close(out, exact, 1e-6)
        for mine, theirs, part in zip(found, torch.autograd.grad(exact, wide, gradient.double()), parts, strict=True):
            assert mine.dtype == part.dtype
            assert close(mine, theirs, max(torch.finfo(dtype).eps, 1e-6))

    @pytest.mark.usefixtures("in_parts")
    def test_only_what_is_asked_for(self) -> None:
        x, w = torch.randn(5, 8).bfloat16().requires_grad_(), torch.randn(60, 8).bfloat16()
        linear_in_float32(x, w).sum().backward()
        assert (x.grad is not None, w.grad) == (True, None)
        assert linear_in_float32(torch.empty(0, 8).bfloat16(), w).shape == (0, 60)

    def test_memory(self) -> None:
        """No float32 copy of the weight: one part of it at a time."""
        sizes: list[int] = []
        real = torch.Tensor.float
        x = torch.randn(4, 64).bfloat16().requires_grad_()
        w = torch.randn(3 * linear_in_parts.CHUNK // 64, 64).bfloat16().requires_grad_()

        class Watch(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func is real:
                    sizes.append(args[0].numel())
                return func(*args, **(kwargs or {}))

        with Watch():
            out = linear_in_float32(x, w)
        assert max(sizes) <= max(linear_in_parts.CHUNK, out.numel())
        assert len([s for s in sizes if s == linear_in_parts.CHUNK]) == 3


@pytest.mark.usefixtures("in_parts")
class TestModel:
    @pytest.mark.parametrize("dtype", first_quick([torch.bfloat16, torch.float16]))
    @pytest.mark.parametrize("autocast", [False, True])
    @pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "t5"])
    def test_logits_loss_and_gradients(self, name: str, dtype: torch.dtype, autocast: bool) -> None:
        model: Any = nn.Module.to(tiny_model(name), dtype)
        head, before = model.get_output_embeddings(), fingerprint(model)
        fix = hfpatch.apply(model, only=ID, verbose=False)
        words = {"input_ids": IDS, "labels": IDS}
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            exact, out = seen(model, head, **words)
            cap = getattr(model.config, "final_logit_softcapping", None)
            want = exact if cap is None else cap * (exact / cap).tanh()
            assert out.logits.dtype == torch.float32
            assert close(out.logits, want, 1e-6)
            targets = IDS.flatten() if name == "t5" else IDS[:, 1:].flatten()
            rows = want.flatten(0, 1) if name == "t5" else want[:, :-1].flatten(0, 1)
            assert float(out.loss) == pytest.approx(float(functional.cross_entropy(rows, targets)), abs=1e-6)
        (gradient,) = torch.autograd.grad(out.loss, head.weight)
        assert gradient.dtype == dtype
        assert (head.weight is model.get_input_embeddings().weight) == model.config.tie_word_embeddings
        fix.revert()
        assert fingerprint(model) == before

    def test_the_gradient_of_an_untied_head(self) -> None:
        model: Any = tiny_model("llama").bfloat16()
        head = model.get_output_embeddings()
        states: list[torch.Tensor] = []
        head.register_forward_pre_hook(lambda _m, args: states.append(args[0].detach()))
        hfpatch.apply(model, only=ID, verbose=False)
        model(input_ids=IDS, labels=IDS).loss.backward()
        w = head.weight.detach().double().requires_grad_()
        loss = functional.cross_entropy((states[0].double() @ w.T)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
        assert close(head.weight.grad, torch.autograd.grad(loss, w)[0], 4e-3)

    def test_float32_weights_under_autocast(self) -> None:
        model: Any = tiny_model("qwen2")
        head = model.get_output_embeddings()
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            exact, stock = seen(model, head, input_ids=IDS)
            hfpatch.apply(model, only=ID, verbose=False)
            _, out = seen(model, head, input_ids=IDS)
        assert not close(stock.logits, exact, 1e-3)
        assert close(out.logits, exact, 1e-6)

    def test_the_last_logits_alone_and_generate(self) -> None:
        model: Any = tiny_model("llama").bfloat16()
        hfpatch.apply(model, only=ID, verbose=False)
        with torch.no_grad():
            every, last = model(input_ids=IDS).logits, model(input_ids=IDS, logits_to_keep=1).logits
        torch.testing.assert_close(every[:, -1:], last)  # one row is another kernel than many
        ids = model.generate(IDS, max_new_tokens=3, do_sample=False)
        with torch.no_grad():
            again = model(input_ids=ids[:, :-1]).logits[:, -1].argmax(-1)
        assert ids.shape == (2, 15)
        assert torch.equal(ids[:, -1], again)

    @pytest.mark.parametrize("order", ["before", "after"])
    def test_an_adapter_on_the_head(self, order: str) -> None:
        """Set before the patch, all of it is float32; set after, the base weight's part is."""
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
        model: Any = tiny_model("llama").bfloat16()
        if order == "before":
            model = get_peft_model(model, config)
        fix = hfpatch.apply(model, only=ID, verbose=False)
        assert len(fix.edits) == (3 if order == "before" else 1)
        if order == "after":
            model = get_peft_model(model, config)
        head = model.base_model.model.lm_head
        states: list[torch.Tensor] = []
        head.register_forward_pre_hook(lambda _m, args: states.append(args[0].detach().double()))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(input_ids=IDS, labels=IDS)
        a, b = (m["default"].weight.detach().double() for m in (head.lora_A, head.lora_B))
        exact = states[0] @ (head.base_layer.weight.detach().double() + head.scaling["default"] * b @ a).T
        assert close(out.logits, exact, 1e-6 if order == "before" else 2e-2)
        out.loss.backward()
        assert all(p.grad is not None for n, p in model.named_parameters() if "lora_" in n)

    def test_inside_a_composite(self) -> None:
        model: Any = SpeechLLM(tiny_model("llama")).bfloat16()
        hfpatch.apply(model, only=ID, verbose=False)
        exact, out = seen(model, model.llm.lm_head, input_ids=IDS)
        assert close(out.logits, exact, 1e-6)

    def test_compiled(self) -> None:
        torch._dynamo.reset()
        model: Any = tiny_model("llama", num_hidden_layers=1).bfloat16()
        hfpatch.apply(model, only=ID, verbose=False)
        want = model(input_ids=IDS, labels=IDS)
        want.loss.backward()
        gradient, model.lm_head.weight.grad = model.lm_head.weight.grad, None
        out: Any = torch.compile(model, backend="eager", fullgraph=True)(input_ids=IDS, labels=IDS)
        out.loss.backward()
        assert torch.equal(out.logits, want.logits)
        assert close(model.lm_head.weight.grad, gradient, 1e-2)


class TestPlan:
    @pytest.mark.parametrize(("dtype", "words"), [(torch.bfloat16, "8 bits"), (torch.float16, "11 bits")])
    def test_opt_in_with_the_reason(self, dtype: torch.dtype, words: str) -> None:
        rows = [d for d in hfpatch.plan(nn.Module.to(tiny_model("llama"), dtype)).decisions if d.patch == ID]
        assert [(d.decided, d.suggested) for d in rows] == [("opt-in", False)]
        assert words in rows[0].reason

    def test_no_head(self) -> None:
        from transformers import LlamaModel

        model = LlamaModel(tiny_model("llama").config)
        assert hfpatch.plan(model, only=ID).decisions[0].reason == "it has no output layer over a vocabulary"

    def test_a_quantised_head_is_refused(self) -> None:
        class Coded(nn.Linear):
            def __init__(self) -> None:
                super().__init__(32, 64, bias=False)
                self.weight = nn.Parameter(torch.zeros(64, 32, dtype=torch.int8), requires_grad=False)

        model: Any = tiny_model("llama").bfloat16()
        model.lm_head = Coded()
        with pytest.raises(RefusedError, match="lm_head is a Coded of int8, not torch's linear layer"):
            hfpatch.apply(model, only=ID, verbose=False)

    def test_a_copy_and_another_model(self) -> None:
        model = tiny_model("llama").bfloat16()
        other, before = copy.deepcopy(model), model(input_ids=IDS).logits
        hfpatch.apply(other, only=ID, verbose=False)
        assert torch.equal(model(input_ids=IDS).logits, before)
        assert hfpatch.status(copy.deepcopy(other)).patches == (ID,)
