"""Tiny models and their example inputs: a sample of every kind; all of them are swept in tests/architectures."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

from hfpatch.errors import InputError
from hfpatch.lab.tiny import NOT_TINY, TASKS, tiny_config
from hfpatch.testing import example_inputs, tiny_model

KINDS: dict[str, tuple[str, str | None]] = {
    "dense": ("llama", None),
    "experts": ("mixtral", None),
    "latent attention": ("deepseek_v3", None),
    "latent attention, indexed": ("deepseek_v32", None),
    "hybrid, Mamba": ("bamba", None),
    "Mamba": ("mamba2", None),
    "linear attention": ("qwen3_next", None),
    "RWKV": ("rwkv", None),
    "xLSTM": ("xlstm", None),
    "post-norm": ("bert", None),
    "sandwich norms": ("gemma3_text", None),
    "parallel": ("gptj", None),
    "image, one": ("llava", "pixel_values"),
    "image, tiles": ("llava_next", "pixel_values"),
    "image, list of patches": ("qwen2_5_vl", "pixel_values"),
    "image, by cross-attention": ("mllama", "pixel_values"),
    "image, Q-Former": ("blip-2", "pixel_values"),
    "sound": ("qwen2_audio", "input_features"),
    "sound, frames first": ("granite_speech", "input_features"),
    "sound, samples": ("omniasr", "input_values"),
    "image and sound": ("qwen2_5_omni_thinker", "pixel_values"),
    "encoder-decoder": ("t5", None),
    "encoder-decoder, two models": ("encoder-decoder", None),
}
"""Kind -> an architecture, and what it reads besides text."""


def trained(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss: torch.Tensor = model(**batch).loss
    loss.backward()
    return loss


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_tiny_and_a_step_is_finite(kind: str) -> None:
    architecture, read = KINDS[kind]
    model = tiny_model(architecture)
    assert sum(p.nbytes for p in model.parameters()) < 4_000_000
    batch = example_inputs(model)
    if read is not None:
        batch[read].requires_grad_()

    assert trained(model.train(), batch).isfinite()

    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients
    assert all(g.isfinite().all() for g in gradients)
    if read is not None:
        assert batch[read].grad is not None


def test_placeholders_are_as_many_as_features() -> None:
    model = tiny_model("qwen2_5_vl")
    batch = example_inputs(model)
    (height, width), merged = batch["image_grid_thw"][0, 1:].tolist(), model.config.vision_config.spatial_merge_size**2
    assert (batch["input_ids"] == model.config.image_token_id).sum(-1).tolist() == [height * width // merged] * 2
    assert batch["labels"].shape == batch["attention_mask"].shape == batch["input_ids"].shape
    assert not (batch["labels"] == model.config.image_token_id).any()


def test_plain_text() -> None:
    batch = example_inputs(tiny_model("llama"))
    assert {key: tuple(value.shape) for key, value in batch.items()} == dict.fromkeys(
        ("input_ids", "attention_mask", "labels"), (2, 12)
    )
    assert batch["attention_mask"].tolist() == [[0] * 4 + [1] * 8, [1] * 12]
    assert torch.equal(batch["labels"] == -100, batch["attention_mask"] == 0)
    assert batch["input_ids"].min() > 1
    assert batch["input_ids"].max() < 42


def test_inputs_have_the_models_dtype() -> None:
    model = tiny_model("llava").bfloat16()
    batch = example_inputs(model)
    assert batch["pixel_values"].dtype == torch.bfloat16
    assert batch["input_ids"].dtype == torch.long
    assert trained(model, batch).isfinite()


def test_inputs_are_the_same_each_time() -> None:
    model = tiny_model("qwen2_5_omni_thinker")
    before = torch.get_rng_state()
    first, second = example_inputs(model), example_inputs(model)
    assert torch.equal(before, torch.get_rng_state())
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_weights_are_the_seeds() -> None:
    models = [tiny_model("llava", seed=seed).state_dict() for seed in (0, 0, 1)]
    assert all(torch.equal(models[0][key], models[1][key]) for key in models[0])
    assert not all(torch.equal(models[0][key], models[2][key]) for key in models[0])


def test_the_global_random_state_stays() -> None:
    before = torch.get_rng_state()
    tiny_model("llava", seed=3)
    assert torch.equal(before, torch.get_rng_state())


def test_it_evaluates_in_float32_eagerly() -> None:
    model = tiny_model("llava")
    assert not model.training
    assert model.dtype == torch.float32
    assert model.config.get_text_config()._attn_implementation == "eager"


def test_overrides() -> None:
    model = tiny_model("llama", num_hidden_layers=2, vocab_size=96)
    assert len(model.model.layers) == 2
    assert model.config.vocab_size == 96
    assert trained(model, example_inputs(model)).isfinite()


def test_overrides_of_a_composite_are_of_its_text() -> None:
    config = tiny_config("llava", num_hidden_layers=3)
    assert config.text_config.num_hidden_layers == 3
    assert config.vision_config.num_hidden_layers == tiny_config("llava").vision_config.num_hidden_layers


def test_a_config_keeps_every_kind_of_layer() -> None:
    kinds = set(tiny_config("qwen3_next").layer_types)
    assert kinds == {"linear_attention", "full_attention"}


def test_a_config_is_nobody_elses() -> None:
    first = tiny_config("qwen3_vl")
    first.vision_config.deepstack_visual_indexes.append(7)
    assert 7 not in tiny_config("qwen3_vl").vision_config.deepstack_visual_indexes


@pytest.mark.parametrize("task", ["multimodal", "causal"])
def test_task(task: str) -> None:
    model = tiny_model("llama4", task=task)
    assert type(model).__name__ == TASKS[task]["llama4"]
    assert type(tiny_model("llama4")) is type(tiny_model("llama4", task="multimodal"))


def test_unknown_architecture() -> None:
    with pytest.raises(InputError, match=r"'llamma': transformers .* has no such model_type"):
        tiny_model("llamma")


def test_wrong_task() -> None:
    with pytest.raises(InputError, match=r"task='seq2seq'.*transformers has it for causal"):
        tiny_model("llama", task="seq2seq")


def test_no_language_model() -> None:
    with pytest.raises(InputError, match="no language model of it for any of multimodal, seq2seq, causal"):
        tiny_model("vit")


def test_not_tiny() -> None:
    with pytest.raises(InputError) as told:
        tiny_model("gemma3n")
    assert NOT_TINY["gemma3n"] in str(told.value)
    model = tiny_model("gemma3n_text")
    assert trained(model, example_inputs(model)).isfinite()


def test_not_trained() -> None:
    with pytest.raises(InputError, match="qwen2_5_omni_thinker"):
        example_inputs(tiny_model("qwen2_5_omni"))


@pytest.mark.slow
def test_few_calls_and_200_megabytes() -> None:
    """The largest to build, in a process of its own: memory beyond what another takes, calls once it is imported."""
    code = """
import resource, sys
from hfpatch.testing import example_inputs, tiny_model

calls = 0
def count(_frame, event, _argument):
    global calls
    calls += event in ("call", "c_call")
sys.setprofile(count)

def step(architecture):
    model = tiny_model(architecture)
    model(**example_inputs(model)).loss.backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, calls

(held, _), (most, imported), (_, done) = map(step, ("llava", "granite4_vision", "granite4_vision"))
print(most - held, done - imported)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    megabytes, calls = map(float, done.stdout.split())
    assert megabytes < 200
    assert calls < 400_000


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"conv_kernel": 99_999_999}, "conv_kernel=99,999,999 is not tiny; want at most 1,048,576"),
        ({"conv_kernel": 500_000, "intermediate_size": 500_000}, "weights, more than a tiny model has"),
    ],
)
def test_a_model_that_would_not_be_tiny_is_not_built(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tiny_model("mamba", **overrides)


def test_the_base_of_a_rotary_table_is_no_size() -> None:
    assert tiny_model("llama", rope_theta=10_000_000).config.rope_parameters["rope_theta"] == 10_000_000
