"""Case 12: where the token embedding lives, per architecture, wrapper and composite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    SiglipVisionConfig,
    SiglipVisionModel,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import hfpatch
from hfpatch.errors import NoEmbeddingError, RefusedError
from hfpatch.lab.tiny import SpeechLLM, tiny_config, tiny_model, tiny_of_class

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 16,
}
WHISPER = WhisperConfig(
    vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=8, max_target_positions=16,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
)  # fmt: skip

AUDIO = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "num_mel_bins": 8}
TEXT = {"model_type": "llama", **SMALL}
CLIP = {"model_type": "clip_vision_model", "patch_size": 8, **VISION}
QWEN = Qwen2AudioConfig(text_config={"model_type": "qwen2", **SMALL}, audio_config={**AUDIO, "max_source_positions": 8})

MODELS: dict[str, tuple[Any, str]] = {
    "llama": (lambda: tiny_model("llama"), "model.embed_tokens"),
    "gpt2": (lambda: tiny_model("gpt2"), "transformer.wte"),
    "gpt_neox": (lambda: tiny_model("gpt_neox"), "gpt_neox.embed_in"),
    "opt": (lambda: tiny_model("opt", word_embed_proj_dim=32, ffn_dim=48), "model.decoder.embed_tokens"),
    "bloom": (lambda: tiny_model("bloom"), "transformer.word_embeddings"),
    "gemma3": (lambda: tiny_model("gemma3"), "model.language_model.embed_tokens"),
    "t5": (
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
        ),
        "encoder.embed_tokens",  # its own getter returns `shared`, of the same weight, which it never calls
    ),
    "llava": (
        lambda: LlavaForConditionalGeneration(LlavaConfig(text_config=TEXT, vision_config=CLIP)),
        "model.language_model.embed_tokens",
    ),
    "qwen2_audio": (lambda: Qwen2AudioForConditionalGeneration(QWEN), "embed_tokens"),
    "clip": (
        lambda: CLIPModel(CLIPConfig(text_config=SMALL, vision_config={**VISION, "patch_size": 4})),
        "token_embedding",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_bare(name: str, ids: torch.Tensor) -> None:
    build, path = MODELS[name]
    model = build()
    found = hfpatch.embed_tokens(model)
    assert [p for p, m in model.named_modules() if m is found and p.endswith(path)], name
    assert found(ids).shape == (2, 12, 32)


def test_the_module_scales_by_itself(tiny: Any, ids: torch.Tensor) -> None:
    model = tiny("gemma3_text")
    with torch.no_grad():
        assert torch.equal(model(inputs_embeds=hfpatch.embed_tokens(model)(ids)).logits, model(input_ids=ids).logits)


@pytest.fixture
def gloo() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


PEFT: dict[str, Any] = {
    "LoRA": {"target_modules": ["q_proj"]},
    "LoRA on the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "trainable tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [1]},
}
OUTSIDE: dict[str, Any] = {
    "bare": lambda m: m,
    "DDP": nn.parallel.DistributedDataParallel,
    "DataParallel": nn.DataParallel,
    "compile": lambda m: torch.compile(m, backend="eager"),
    "DDP(compile)": lambda m: nn.parallel.DistributedDataParallel(torch.compile(m, backend="eager")),
}


@pytest.mark.need(
    "a helper that finds `embed_tokens` with and without LoRA",
    "one call",
    "`hfpatch.embed_tokens(model)`",
)
@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("adapter", [None, *PEFT])
def test_through_every_wrapper(outside: str, adapter: str | None, tiny: Any, ids: torch.Tensor, gloo: None) -> None:
    """What the resolver gives is what the model uses: through inputs_embeds the logits are bit-identical."""
    model = tiny("llama")
    if adapter:
        model = get_peft_model(model, LoraConfig(**PEFT[adapter], init_lora_weights=False))
    wrapped = OUTSIDE[outside](model.eval())
    with torch.no_grad():
        embeds = hfpatch.embed_tokens(wrapped)(ids)
        assert torch.equal(model(inputs_embeds=embeds).logits, model(input_ids=ids).logits)
    fix = hfpatch.apply(wrapped, only="embed-token-resolver", verbose=False)
    assert wrapped.get_input_embeddings() is hfpatch.embed_tokens(wrapped)
    fix.revert()


def test_composites(tiny: Any, ids: torch.Tensor) -> None:
    model = SpeechLLM(tiny("gemma3_text"))
    assert hfpatch.embed_tokens(model) is model.llm.model.embed_tokens
    hfpatch.apply(model, verbose=False)
    assert model.get_input_embeddings() is model.llm.model.embed_tokens
    model.llm = get_peft_model(model.llm, LoraConfig(target_modules=["q_proj", "embed_tokens"]))
    assert model.get_input_embeddings() is hfpatch.embed_tokens(model.llm)
    assert type(model.get_input_embeddings()).__module__.startswith("peft.")


def test_a_speech_encoder_decoder_beside_the_llm_is_not_the_llm(tiny: Any) -> None:
    both = nn.ModuleDict({"speech": WhisperForConditionalGeneration(WHISPER), "llm": tiny("llama")})
    assert hfpatch.embed_tokens(both) is both["llm"].model.embed_tokens
    assert hfpatch.embed_tokens(both, submodel="speech") is both["speech"].model.decoder.embed_tokens
    assert hfpatch.embed_tokens(both, submodel="whisper") is both["speech"].model.decoder.embed_tokens


def test_two_language_models_must_be_named(tiny: Any) -> None:
    both = nn.ModuleDict({"a": tiny("llama"), "b": tiny("gpt2")})
    with pytest.raises(
        NoEmbeddingError, match=r"several token embeddings: a \(llama\), b \(gpt2\); name one with submodel="
    ):
        hfpatch.embed_tokens(both)
    with pytest.raises(NoEmbeddingError, match=r"submodel='c': want the path or architecture of one of: a \(llama\)"):
        hfpatch.embed_tokens(both, submodel="c")
    assert hfpatch.embed_tokens(both, submodel="gpt2") is both["b"].transformer.wte
    with pytest.raises(RefusedError, match="several token embeddings"):
        hfpatch.apply(both, only="embed-token-resolver")


@pytest.mark.parametrize(
    ("config", "cls"),
    [(SmolVLMConfig, SmolVLMForConditionalGeneration), (Idefics3Config, Idefics3ForConditionalGeneration)],
)
def test_a_tower_that_embeds_positions_reads_no_tokens(config: Any, cls: Any) -> None:
    """Its `get_input_embeddings` gives a module with patches and positions, and its main input is input_ids."""
    model = cls(config(text_config=TEXT, vision_config={**VISION, "patch_size": 4}, image_token_id=5, scale_factor=2))
    assert hfpatch.embed_tokens(model) is model.model.text_model.embed_tokens
    with pytest.raises(NoEmbeddingError, match="no token embedding here"):
        hfpatch.embed_tokens(model.model.vision_model)
    paths = hfpatch.lora_targets(model).modules
    assert len(paths) == 7
    assert all(path.startswith("model.text_model.layers.") for path in paths)


def test_no_token_embedding() -> None:
    tower = SiglipVisionModel(SiglipVisionConfig(**VISION, patch_size=4))
    for model in (tower, nn.Linear(2, 2)):
        with pytest.raises(NoEmbeddingError, match="no token embedding here"):
            hfpatch.embed_tokens(model)


CALLED = {
    "instructblip": ("multimodal", "language_model.model.decoder.embed_tokens"),
    "evolla": ("multimodal", "model.embed_tokens"),
    "florence2": ("multimodal", "model.language_model.shared"),
    "t5gemma": ("seq2seq", "model.encoder.embed_tokens"),
    "t5gemma2": ("multimodal", "model.encoder.text_model.embed_tokens"),
    "encoder-decoder": ("seq2seq", "encoder.embeddings.word_embeddings"),
    "blt": ("causal", "model.local_encoder.embed_tokens"),
    "bart": ("seq2seq", "model.encoder.embed_tokens"),
}
"""Every other pair of task and architecture: tests/architectures/test_embed_sweep.py."""


@pytest.mark.parametrize("architecture", CALLED)
@pytest.mark.parametrize("held", [False, True])
def test_the_module_that_is_called_with_the_ids(architecture: str, held: bool) -> None:
    task, path = CALLED[architecture]
    model = tiny_model(architecture, task=task)
    outside = nn.Module()
    outside.llm = model
    assert hfpatch.embed_tokens(outside if held else model) is model.get_submodule(path)


def test_of_an_encoder_of_sounds_the_decoder() -> None:
    model: Any = tiny_of_class(WhisperForConditionalGeneration, tiny_config("whisper"))
    assert hfpatch.embed_tokens(model) is model.model.decoder.embed_tokens


def test_of_an_encoder_decoder_an_adapter_on_the_table_counts() -> None:
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(tiny_model("bart", task="seq2seq"), LoraConfig(r=2, target_modules=["embed_tokens"]))
    found = hfpatch.embed_tokens(model)
    assert found is model.base_model.model.model.encoder.embed_tokens
    assert hasattr(found, "lora_embedding_A")


@pytest.mark.parametrize("architecture", ["musicgen", "musicgen_melody"])
def test_several_codebooks_get_a_sentence(architecture: str) -> None:
    with pytest.raises(NoEmbeddingError, match="reads 4 codebooks at once, each with an embedding of its own"):
        hfpatch.embed_tokens(tiny_model(architecture, task="causal"))
