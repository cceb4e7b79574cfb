"""Two models on one batch: what is planted is named, what is healthy is not, and nothing is left behind."""

from __future__ import annotations

import copy
import random
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hfpatch
from hfpatch.comparing.exactly import InFloat64
from hfpatch.errors import InputError, NotAModelError
from hfpatch.lab.tiny import COMPOSITES, SpeechLLM
from hfpatch.testing import example_inputs
from tests.conftest import Ran
from tests.fingerprint import fingerprint
from tests.test_trace_cli import save

Tiny = Callable[[str], nn.Module]


@pytest.fixture
def llama(tiny: Tiny) -> Any:
    return tiny("llama")


@pytest.fixture
def batch(llama: Any) -> dict[str, Any]:
    return example_inputs(llama)


def sharing(model: nn.Module) -> Any:
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def causes(found: hfpatch.Comparison) -> list[str]:
    assert found.first is not None
    return [f"{f.kind} {f.place}".strip() for f in found.first.cause]


def test_a_copy_is_equal_bit_for_bit(llama: Any, batch: dict[str, Any]) -> None:
    found = hfpatch.compare(llama, copy.deepcopy(llama), batch)
    assert found.equal
    assert not found
    assert (found.places, found.facts, found.end) == ((), (), None)
    assert found.weights_line == "weights: 39 of 39 equal; buffers: 2 of 2 equal"
    assert "bit for bit, in all 8 calls of blocks" in found.sentence


def test_a_weight(llama: Any, batch: dict[str, Any]) -> None:
    other = copy.deepcopy(llama)
    other.model.layers[2].mlp.down_proj.weight.data.mul_(1.001)
    found = hfpatch.compare(llama, other, batch)
    assert causes(found) == ["weight model.layers.2.mlp.down_proj.weight"]
    assert found.first is not None
    assert found.first.path == "model.layers.2"
    assert found.first.operation is not None
    assert (found.first.operation.path, found.first.operation.b.name) == ("model.layers.2.mlp.down_proj", "mm")  # type: ignore[union-attr]
    assert len(found.parted) == 1, "blocks after it get A's values"
    assert found.facts[0].distance == pytest.approx(1e-3, rel=1e-3)
    assert "38 of 39 equal; 1 differs (model.layers.2.mlp.down_proj.weight)" in found.weights_line


def test_a_weight_that_was_0_is_apart_by_all_of_it(llama: Any, batch: dict[str, Any]) -> None:
    """As a bias is that started at 0: its distance is finite, and one that is not finite is told as that."""
    with torch.no_grad():
        llama.model.norm.weight.zero_()
    trained = copy.deepcopy(llama)
    for value, distance, said in (
        (0.5, 1.0, "1.0e+00"),
        (torch.nan, None, "not finite"),
        (torch.inf, None, "not finite"),
    ):
        with torch.no_grad():
            trained.model.norm.weight.fill_(value)
        found = hfpatch.compare(llama, trained, batch)
        (fact,) = (f for f in found.to_dict()["facts"] if f["kind"] == "weight")
        assert fact["distance"] == distance
        assert said in str(found)


def test_an_eps_and_both_values(llama: Any, batch: dict[str, Any]) -> None:
    other = copy.deepcopy(llama)
    other.model.layers[1].input_layernorm.variance_epsilon = 1e-5
    found = hfpatch.compare(llama, other, batch)
    assert causes(found) == ["eps model.layers.1.input_layernorm.variance_epsilon"]
    assert found.first is not None
    assert found.first.operation is not None
    assert "add in model.layers.1.input_layernorm with 1e-06 in A and 1e-05 in B" in found.first.operation.sentence


def test_a_rounded_buffer(llama: Any, batch: dict[str, Any]) -> None:
    other = copy.deepcopy(llama)
    rotary = other.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.bfloat16()
    assert causes(hfpatch.compare(llama, other, batch)) == ["buffer model.rotary_emb.inv_freq"]


def test_dropout_left_on(tiny: Tiny) -> None:
    model = tiny("gpt2")
    batch = example_inputs(model)
    found = hfpatch.compare(model, sharing(model).train(), batch)
    assert causes(found) == ["dropout transformer.drop.p"]
    assert found.first is not None
    assert found.first.operation is not None
    assert found.first.operation.sentence == "B runs dropout in transformer.drop, A does not"
    assert hfpatch.compare(model.train(), sharing(model), batch).equal, "the same random numbers"


def test_another_body(llama: Any, batch: dict[str, Any]) -> None:
    other = copy.deepcopy(llama)
    part = other.model.layers[1].mlp

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))

    part.forward = types.MethodType(forward, part)
    assert causes(hfpatch.compare(llama, other, batch)) == ["class model.layers.1.mlp.forward"]
    assert "forward" in part.__dict__

    class Other(type(part)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 1.01

    again = copy.deepcopy(llama)
    again.model.layers[1].mlp.__class__ = Other
    found = hfpatch.compare(llama, again, batch)
    assert causes(found) == ["class model.layers.1.mlp.forward"]
    assert type(again.model.layers[1].mlp) is Other


def test_code_between_the_blocks(tiny: Tiny) -> None:
    model: Any = tiny("gemma3_text")
    batch = example_inputs(model)
    other = copy.deepcopy(model)
    other.config.final_logit_softcapping = 20.0
    found = hfpatch.compare(model, other, batch)
    assert causes(found) == ["config final_logit_softcapping"]
    assert other.config.final_logit_softcapping == 20.0


def test_a_mask(llama: Any, batch: dict[str, Any]) -> None:
    other = copy.deepcopy(llama)
    other.model.config.sliding_window = 4
    other.model.__class__ = type("Sliding", (type(llama.model),), {"forward": _mistral_forward()})
    found = hfpatch.compare(llama, other, batch)
    assert found.first is not None
    assert found.first.title == "attention_mask passed to model.layers.0"
    assert "class model.forward" in causes(found)


def _mistral_forward() -> Any:
    from transformers.models.mistral.modeling_mistral import MistralModel

    return MistralModel.forward


def test_two_dtypes_part_by_rounding_alone(tiny: Tiny, tmp_path: Any) -> None:
    model: Any = tiny("qwen3")
    model.save_pretrained(tmp_path)
    half = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")
    found = hfpatch.compare(model, half, example_inputs(model))
    assert not found
    assert {p.verdict for p in found.places} == {"rounding"}
    assert found.sentence.startswith("B differs from A by no more than rounding explains")
    assert "after rounding to the narrower dtype" in found.weights_line
    assert found.end is not None
    assert 0 < found.end.kl < 1e-2


def test_in_half_precision_a_difference_below_rounding_is_told_by_facts(llama: Any, batch: dict[str, Any]) -> None:
    half = llama.bfloat16()
    other = copy.deepcopy(half)
    other.model.norm.variance_epsilon = 2e-6
    with torch.no_grad():
        half.model.embed_tokens.weight.mul_(50)  # unit input, where eps matters least
        other.model.embed_tokens.weight.copy_(half.model.embed_tokens.weight)
    found = hfpatch.compare(half, other, batch)
    assert not found
    (fact,) = found.facts
    assert fact.place == "model.norm.variance_epsilon"
    assert (
        fact.effect in ("no difference on this batch", "no more than rounding") or "hidden by rounding" in fact.effect
    )


def test_attention_implementations_agree_up_to_rounding(llama: Any, batch: dict[str, Any]) -> None:
    other = sharing(llama)
    other.set_attn_implementation("sdpa")
    found = hfpatch.compare(llama, other, batch)
    assert not found
    assert not hfpatch.compare(other, llama, batch), "a mask that A does not have is B's own"
    assert {(f.kind, f.effect) for f in found.facts} == {("attention", "no more than rounding")}
    assert any(n.startswith("padding is left out") for n in found.notes)


def test_adapters_on_and_off(llama: Any, batch: dict[str, Any]) -> None:
    model: Any = COMPOSITES["lora-qv"](copy.deepcopy(llama))
    weights = [p for n, p in model.named_parameters() if "lora_B" in n]
    with torch.no_grad():
        for weight in weights:
            weight.zero_()
    assert not hfpatch.compare(llama, model, batch)
    with torch.no_grad():
        for weight in weights:
            weight.fill_(0.02)
    found = hfpatch.compare(llama, model, batch)
    assert {f.kind for f in found.first.cause} == {"adapter"}  # type: ignore[union-attr]
    assert "39 of 39 equal; 16 only in B" in found.weights_line
    twin = sharing(model)
    with twin.disable_adapter():
        assert {f.kind for f in hfpatch.compare(model, twin, batch).first.cause} == {"adapter"}  # type: ignore[union-attr]
        assert not hfpatch.compare(llama, twin, batch)


def test_patched_and_unpatched(gemma: Any) -> None:
    batch = example_inputs(gemma)
    fixed = copy.deepcopy(gemma)
    hfpatch.apply(fixed)
    found = hfpatch.compare(fixed, gemma, batch)
    assert found.first is not None
    assert found.first.path == "model.layers.1"
    assert "only one of them is finite" in found.sentence
    assert any(f.kind == "patch" and f.name == "fp16-residual-overflow" for f in found.facts)


def test_did_stage_b_load_stage_a(llama: Any) -> None:
    a = SpeechLLM(llama)
    b = copy.deepcopy(a)
    with torch.no_grad():
        b.speech_proj.weight.normal_()
        b.speech_proj.bias.normal_()
    batch = {"input_ids": torch.arange(2, 12)[None], "features": torch.randn(1, 3, 24)}
    found = hfpatch.compare(a, b, batch)
    assert "41 of 43 equal; 2 differ, all in speech_proj" in found.weights_line
    assert {f.place for f in found.first.cause} == {"speech_proj.weight", "speech_proj.bias"}  # type: ignore[union-attr]


def test_through_wrappers_and_composites(llama: Any, batch: dict[str, Any]) -> None:
    for other in (nn.DataParallel(copy.deepcopy(llama)), SpeechLLM(copy.deepcopy(llama))):
        assert hfpatch.compare(llama, other, batch).equal


def test_what_cannot_be_compared_is_said(llama: Any, batch: dict[str, Any]) -> None:
    shallow = copy.deepcopy(llama)
    shallow.model.layers = shallow.model.layers[:3]
    found = hfpatch.compare(llama, shallow, batch)
    assert not found
    assert "not compared, only in A: model.layers.3" in found.notes
    wide = copy.deepcopy(llama)
    wide.resize_token_embeddings(80)
    found = hfpatch.compare(llama, wide, batch)
    assert not found
    assert [p.path for p in found.unlike] == ["lm_head", ""]
    assert "lm_head, its shape is [2, 12, 64] in A and [2, 12, 80] in B" in str(found)
    with pytest.raises(InputError, match=r"token 70 .* has no row in A, whose embedding has 64 rows .*80"):
        hfpatch.compare(llama, wide, {"input_ids": torch.tensor([[1, 70]])})


def test_another_width_compares_what_is_there(llama: Any, batch: dict[str, Any]) -> None:
    found = hfpatch.compare(llama, hfpatch.testing.tiny_model("llama", hidden_size=64), batch)
    assert not found.equal
    assert "could be compared" in found.sentence or "can be compared" in found.sentence
    assert "39 have another shape" in found.weights_line


@pytest.mark.parametrize(
    ("a", "b", "given", "said"),
    [
        ("llama", "same", None, "one object"),
        ("llama", "gpt2", None, "no block of A"),
        ("llama", "copy", {"input_ids": torch.zeros(1, 4, 4)}, "does not run on this batch"),
        ("llama", "copy", [1], "want a dict"),
        ("llama", 3, None, "want a torch module"),
        ("llama", "meta", None, "on meta"),
    ],
)
def test_bad_input(tiny: Tiny, a: str, b: Any, given: Any, said: str, batch: dict[str, Any]) -> None:
    model = tiny(a)
    before = fingerprint(model)
    others = {"same": model, "gpt2": tiny("gpt2"), "copy": copy.deepcopy(model), "meta": tiny(a).to("meta")}
    with pytest.raises((InputError, NotAModelError), match=said):
        hfpatch.compare(model, others.get(b, b), batch if given is None else given)
    assert fingerprint(model) == before


def _states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_nothing_is_left_behind(tiny: Tiny) -> None:
    model = tiny("gpt2")
    batch = example_inputs(model)
    other = copy.deepcopy(model).train()
    with torch.no_grad():
        other.transformer.h[1].mlp.c_fc.weight.add_(0.1)  # type: ignore[union-attr, index]
    before = fingerprint(model), fingerprint(other), _states()
    assert hfpatch.compare(model, other, batch)
    assert (fingerprint(model), fingerprint(other), _states()) == before


@pytest.mark.parametrize("at", [3, 40, 200, 700])
def test_an_interruption_leaves_nothing_behind(llama: Any, batch: dict[str, Any], at: int) -> None:
    other = copy.deepcopy(llama)
    other.model.layers[1].input_layernorm.variance_epsilon = 1e-5
    other.config.rms_norm_eps = 1e-5
    before = fingerprint(llama), fingerprint(other), _states()
    left = at

    class Stop(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            return func(*args, **(kwargs or {}))

    with pytest.raises(KeyboardInterrupt), Stop():
        hfpatch.compare(llama, other, batch)
    assert (fingerprint(llama), fingerprint(other), _states()) == before


def test_the_reference_is_float64_throughout(llama: Any, ids: torch.Tensor) -> None:
    batch = {"input_ids": ids}
    double = copy.deepcopy(llama).double()
    with torch.no_grad(), InFloat64() as mode:
        logits = llama(**batch).logits
    assert logits.dtype == torch.float64
    assert not mode.narrow
    with torch.no_grad():
        rounded = double(**batch).logits  # its norms and rotary tables are float32 in any dtype
    assert 0 < float((logits - rounded).norm() / logits.norm()) < 1e-6


def test_json_and_the_table(llama: Any, batch: dict[str, Any]) -> None:
    other = copy.deepcopy(llama)
    other.model.layers[0].mlp.up_proj.weight.data.mul_(1.5)
    found = hfpatch.compare(llama, other, batch)
    figures = found.to_dict()
    assert figures["parts"]
    assert figures["places"][0]["cause"][0]["name"] == "weight"
    assert figures["places"][0]["operation"]["b"]["module"] == "model.layers.0.mlp.up_proj"
    text = "\n\n".join(s.to_text(80) for s in found.sheets())
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("A: LlamaForCausalLM, float32")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of one model; in the second, a weight was scaled by 1.01."""
    folder = tmp_path_factory.mktemp("two")
    model = hfpatch.testing.tiny_model("gemma3_text", pad_token_id=None)
    a = save(model, folder / "a")
    model.model.layers[3].mlp.up_proj.weight.data.mul_(1.01)  # type: ignore[union-attr, index]
    return a, save(model, folder / "b", tokenizer=False)


class TestCommand:
    def test_two_checkpoints(self, two: tuple[Path, Path], here: Callable[..., Ran]) -> None:
        ran = here("compare", *two, code=1)
        assert "weight model.layers.3.mlp.up_proj.weight (apart by 1.0e-02 of its size)" in ran.text
        assert max(map(len, ran.stdout.splitlines())) <= 80
        figures = here("compare", two[0], two[0], "--json").figures
        assert (figures["equal"], figures["parts"], figures["weights"]["equal"]) == (True, False, 60)

    def test_one_checkpoint_in_two_dtypes(self, two: tuple[Path, Path], here: Callable[..., Ran]) -> None:
        ran = here("compare", two[0], "--dtype", "float32", "--dtype", "bfloat16", "--tokens", 16)
        assert "no more than rounding explains" in ran.text

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ([], "name a second model"),
            (["--tokens", 1], "a loss needs two"),
            (["--dtype", "float8", "--dtype", "float32"], "float8"),
            (["missing"], "missing"),
            (["--dtype", "float32", "--dtype", "float16", "--dtype", "float32"], "3 times"),
        ],
    )
    def test_bad_input(self, two: tuple[Path, Path], here: Callable[..., Ran], words: list[Any], said: str) -> None:
        assert said in here("compare", two[0], *words, code=2).sentence
