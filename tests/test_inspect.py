"""What inspect says of a model against what is known of it: eps sources, embeddings, counts, hazards."""

from __future__ import annotations

import copy
import json
import tracemalloc
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import PreTrainedConfig

import hfpatch
from hfpatch.errors import InputError, ModelNotFoundError, NotAModelError
from hfpatch.inspecting.info import ModelInfo
from hfpatch.lab.tiny import SpeechLLM, tiny_model
from hfpatch.model.source import model_class
from tests.counting import calls
from tests.fingerprint import fingerprint

E, EV = 3e-4, 7e-4  # eps of the text part and of the vision part: no default of any class
T: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
B = {k: v for k, v in T.items() if k != "num_key_value_heads"}
V = {**{k: B[k] for k in list(B)[1:]}, "image_size": 16, "patch_size": 4}
MLA = dict(
    **{**T, "num_key_value_heads": 4}, rms_norm_eps=E, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4,
    qk_nope_head_dim=4, v_head_dim=8, n_routed_experts=4, n_group=1, topk_group=1, moe_intermediate_size=8,
    num_experts_per_tok=2,
)  # fmt: skip
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
AUDIO = {
    "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "max_source_positions": 8, "num_mel_bins": 8,
}  # fmt: skip

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**T, "rms_norm_eps": E}),
    "gemma2": ("gemma2", {**T, "head_dim": 8, "rms_norm_eps": E}),
    "gpt2": ("gpt2", {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4, "layer_norm_epsilon": E}),
    "opt": (
        "opt",
        {"vocab_size": 64, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
         "word_embed_proj_dim": 32},
    ),
    "olmo": ("olmo", T),
    "deepseek_v3": ("deepseek_v3", MLA),
    "glm_moe_dsa": ("glm_moe_dsa", MLA),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {"text_config": {**T, "rms_norm_eps": E, "rope_parameters": ROPE},
         "vision_config": {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4,
                           "out_hidden_size": 32, "patch_size": 4}},
    ),
    "gemma3": (
        "gemma3",
        {"text_config": {**T, "head_dim": 8, "rms_norm_eps": E}, "vision_config": {**V, "layer_norm_eps": EV},
         "mm_tokens_per_image": 4},
    ),
    "mllama": (
        "mllama",
        {"text_config": {**T, "num_hidden_layers": 2, "rms_norm_eps": E, "cross_attention_layers": [1],
                         "pad_token_id": 0},
         "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_global_layers": 1,
                           "attention_heads": 4, "vision_output_dim": 64, "image_size": 16, "patch_size": 4,
                           "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]], "norm_eps": EV}},
    ),
    "t5": ("t5", {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}),
    "bert": ("bert", B),
    "gpt_neox": ("gpt_neox", B),
    "bloom": ("bloom", {"vocab_size": 64, "hidden_size": 32, "n_layer": 1, "n_head": 4}),
    "gemma3_text": ("gemma3_text", {**T, "head_dim": 8}),
    "llava": (
        "llava",
        {"text_config": {**B, "model_type": "llama"},
         "vision_config": {**V, "patch_size": 8, "model_type": "clip_vision_model"}},
    ),
    "qwen2_audio": ("qwen2_audio", {"text_config": {**B, "model_type": "qwen2"}, "audio_config": AUDIO}),
    "siglip_vision": ("siglip_vision_model", V),
    "clip": ("clip", {"text_config": B, "vision_config": V}),
    "granite": ("granite", {**T, "embedding_multiplier": 12.0}),
    "afmoe, scaled": ("afmoe", {**T, "mup_enabled": True, "layer_types": ["full_attention"], "head_dim": 8}),
    "afmoe": ("afmoe", {**T, "mup_enabled": False, "layer_types": ["full_attention"], "head_dim": 8}),
    "pegasus, scaled": (
        "pegasus",
        {"vocab_size": 64, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "scale_embedding": True},
    ),
    "whisper, scaled": (
        "whisper",
        {"vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "scale_embedding": True,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    ),
}  # fmt: skip


def config_of(case: str) -> PreTrainedConfig:
    model_type, values = CONFIGS[case]
    return transformers.CONFIG_MAPPING[model_type](**copy.deepcopy(values))


def live(case: str) -> Any:
    config = config_of(case)
    return model_class(config)(config).eval()


TEXT, VISION = "config: text_config.rms_norm_eps", "config: vision_config.layer_norm_eps"
EPS: dict[str, dict[str, tuple[str, float | None]]] = {
    "llama": {"model.*": ("config: rms_norm_eps", E)},
    "gemma2": {"model.*": ("config: rms_norm_eps", E)},
    "gpt2": {"transformer.*": ("config: layer_norm_epsilon", E)},
    "opt": {"model.decoder.*": ("class default", 1e-5)},
    "olmo": {"model.*": ("none (no eps)", None)},
    "deepseek_v3": {
        "model.layers.*.self_attn.q_a_layernorm": ("class default", 1e-6),
        "model.layers.*.self_attn.kv_a_layernorm": ("class default", 1e-6),
        "model.layers.*.*put_layernorm": ("config: rms_norm_eps", E),
        "model.layers.*.post_attention_layernorm": ("config: rms_norm_eps", E),
        "model.norm": ("config: rms_norm_eps", E),
    },
    "glm_moe_dsa": {
        "model.layers.*.self_attn.*q_a_layernorm": ("class default", 1e-6),
        "model.layers.*.self_attn.*kv_a_layernorm": ("class default", 1e-6),
        "model.layers.*.self_attn.indexer.k_norm": ("hard-coded", 1e-6),
        "model.layers.*.input_layernorm": ("config: rms_norm_eps", E),
        "model.layers.*.post_attention_layernorm": ("config: rms_norm_eps", E),
        "model.norm": ("config: rms_norm_eps", E),
    },
    "qwen2_5_vl": {"model.visual.*": ("class default", 1e-6), "model.language_model.*": (TEXT, E)},
    "gemma3": {
        "model.vision_tower.*": (VISION, EV),
        "model.multi_modal_projector.mm_soft_emb_norm": (VISION, EV),
        "model.language_model.*": (TEXT, E),
    },
    "mllama": {
        "model.vision_model.layernorm_pre": ("class default", 1e-5),
        "model.vision_model.layernorm_post": ("class default", 1e-5),
        "model.vision_model.*transformer.layers.*": ("config: vision_config.norm_eps", EV),
        "model.language_model.*": (TEXT, E),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("from_config", [False, True], ids=["live", "config"])
@pytest.mark.parametrize("case", EPS)
def test_eps_sources_of_case_13(case: str, from_config: bool) -> None:
    norms = hfpatch.inspect(config_of(case) if from_config else live(case)).norms
    used: set[str] = set()
    for norm in norms:
        pattern = next(p for p in EPS[case] if fnmatchcase(norm.path, p))
        assert (norm.source, norm.eps) == EPS[case][pattern], norm.path
        assert norm.as_built == norm.eps
        assert not norm.changed
        used.add(pattern)
    assert used == set(EPS[case])


@pytest.mark.slow
def test_every_norm_is_counted() -> None:
    for case in EPS:
        info = hfpatch.inspect(config_of(case))
        modules = [m for m in live(case).modules() if "norm" in type(m).__name__.lower() and not list(m.children())]
        assert sum(n.count for n in info.norms) == len(modules)


def test_source_is_proved_and_not_read_off_equal_values() -> None:
    config = config_of("deepseek_v3")
    config.rms_norm_eps = 1e-6  # as the hard-coded ones
    by_path = {n.path: n.source for n in hfpatch.inspect(config).norms}
    assert by_path["model.layers.*.self_attn.q_a_layernorm"] == "class default"
    assert by_path["model.norm"] == "config: rms_norm_eps"


def test_norms_that_only_late_layers_have() -> None:
    config = config_of("mllama")
    config.text_config.num_hidden_layers = 20  # a shortened model has no cross attention
    config.text_config.cross_attention_layers = [13]
    norm = next(n for n in hfpatch.inspect(config).norms if n.path.endswith("cross_attn.q_norm"))
    assert (norm.source, norm.count) == (TEXT, 1)


def test_changed_norm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    model = tiny_model("llama")
    model.model.norm.variance_epsilon = 1e-3
    norm = next(n for n in hfpatch.inspect(model).norms if n.path == "model.norm")
    assert (norm.eps, norm.as_built, norm.source, norm.changed) == (1e-3, 1e-6, "config: rms_norm_eps", True)
    assert "changed from 1e-06" in " ".join(str(hfpatch.inspect(model)).split())


def test_class_that_cannot_be_rebuilt() -> None:
    model = tiny_model("llama")
    model.config.hidden_act = "no such activation"
    assert {n.source for n in hfpatch.inspect(model).norms} == {"unknown"}


EMBEDDINGS: dict[str, tuple[str, str, float | None, str]] = {
    "llama": ("model.embed_tokens", "Embedding", None, "none"),
    "gpt2": ("transformer.wte", "Embedding", None, "none"),
    "opt": ("model.decoder.embed_tokens", "Embedding", None, "none"),
    "t5": ("shared", "Embedding", None, "none"),
    "bert": ("bert.embeddings.word_embeddings", "Embedding", None, "none"),
    "gpt_neox": ("gpt_neox.embed_in", "Embedding", None, "none"),
    "bloom": ("transformer.word_embeddings", "Embedding", None, "none"),
    "gemma3_text": ("model.embed_tokens", "Gemma3TextScaledWordEmbedding", 32**0.5, "module: embed_scale"),
    "gemma3": ("model.language_model.embed_tokens", "Gemma3TextScaledWordEmbedding", 32**0.5, "module: embed_scale"),
    "llava": ("model.language_model.embed_tokens", "Embedding", None, "none"),
    "qwen2_audio": ("model.language_model.embed_tokens", "Embedding", None, "none"),
    "clip": ("text_model.embeddings.token_embedding", "Embedding", None, "none"),
    "granite": ("model.embed_tokens", "Embedding", 12.0, "model: embedding_multiplier"),
    "afmoe, scaled": ("model.embed_tokens", "Embedding", 32**0.5, "model: hidden_size**0.5"),
    "afmoe": ("model.embed_tokens", "Embedding", None, "none"),
    "pegasus, scaled": ("model.shared", "Embedding", 8.0, "model: embed_scale"),
    "whisper, scaled": ("model.decoder.embed_tokens", "Embedding", None, "none"),  # its decoder does not use it
}


@pytest.mark.slow
@pytest.mark.parametrize("from_config", [False, True], ids=["live", "config"])
@pytest.mark.parametrize("case", EMBEDDINGS)
def test_embeddings_of_case_12(case: str, from_config: bool) -> None:
    path, cls, scale, where = EMBEDDINGS[case]
    (found,) = hfpatch.inspect(config_of(case) if from_config else live(case)).embeddings
    assert (found.path, found.cls, found.scale_at) == (path, cls, where)
    assert found.scale == pytest.approx(scale)
    assert found.vocabulary is not None and found.vocabulary >= 64


def test_embedding_scale_is_what_the_model_uses(ids: torch.Tensor) -> None:
    for case in ("gemma3_text", "granite", "afmoe, scaled", "whisper, scaled"):
        model: Any = live(case)
        (found,) = hfpatch.inspect(model).embeddings
        module, seen = model.get_submodule(found.path), []
        stack = {"whisper, scaled": "model.decoder.layers.0"}.get(case, "model.layers.0")
        hook = model.get_submodule(stack).register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        with torch.no_grad():
            if "whisper" in case:
                model.model.decoder.embed_positions.weight.zero_()
                model(input_features=torch.zeros(2, 80, 3000), decoder_input_ids=ids)
            else:
                model(ids)
        hook.remove()
        factor = (found.scale or 1.0) if found.scale_at.startswith("model:") else 1.0
        torch.testing.assert_close(seen[0], module(ids) * factor)


def test_no_embedding_in_a_vision_tower() -> None:
    info = hfpatch.inspect(config_of("siglip_vision"))
    assert info.embeddings == ()
    assert info.heads == ()


@pytest.mark.parametrize("case", ["llama", "gpt2", "gemma3", "deepseek_v3", "mllama", "t5", "qwen2_audio", "bert"])
def test_counts_are_real_ones(case: str) -> None:
    model = live(case)
    real = sum(p.numel() for p in model.parameters())
    loaded, unloaded = hfpatch.inspect(model), hfpatch.inspect(config_of(case))
    assert loaded.parameters == unloaded.parameters == real == sum(loaded.dtypes.values())
    assert loaded.trainable == unloaded.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert (loaded.weights_loaded, unloaded.weights_loaded) == (True, False)
    assert [(s.path, s.parameters) for s in loaded.submodels] == [(s.path, s.parameters) for s in unloaded.submodels]
    assert loaded.submodels[0].parameters == real
    a, b = loaded.to_dict(), unloaded.to_dict()
    for key in ("weights_loaded", "declared_dtype"):
        a.pop(key), b.pop(key)
    assert a == b


def test_counts_by_dtype_and_training() -> None:
    model: Any = tiny_model("llama").half()
    model.lm_head.float().requires_grad_(False)
    info = hfpatch.inspect(model)
    head = model.lm_head.weight.numel()
    assert info.dtypes == {"float16": info.parameters - head, "float32": head}
    assert info.trainable == info.parameters - head


@pytest.mark.parametrize(("tied", "case"), [(True, "gpt2"), (False, "llama"), (True, "gemma3"), (True, "t5")])
def test_heads(tied: bool, case: str) -> None:
    for given in (config_of(case), live(case)):
        (head,) = hfpatch.inspect(given).heads
        assert (head.path, head.tied) == ("lm_head", tied)
    config = config_of(case)
    config.get_text_config().tie_word_embeddings = config.tie_word_embeddings = not tied
    assert hfpatch.inspect(config).heads[0].tied is not tied


def test_stacks() -> None:
    info = hfpatch.inspect(config_of("gemma3"))
    assert {(s.path, s.layers) for s in info.stacks} == {
        ("model.vision_tower.encoder.layers", 1),
        ("model.language_model.layers", 1),
    }
    (stack,) = hfpatch.inspect(tiny_model("llama").half()).stacks
    assert (stack.path, stack.layers, stack.dtype) == ("model.layers", 4, "float16")


def test_attention_of_each_config() -> None:
    config = config_of("gemma3")
    config._attn_implementation = {"text_config": "eager"}
    rows = {a.config: a for a in hfpatch.inspect(config).attention}
    assert set(rows) == {"", "text_config", "vision_config"}
    assert rows["text_config"].implementation == "eager"
    assert rows["vision_config"].implementation == "sdpa"
    assert "sdpa" in rows["text_config"].accepts
    assert rows["text_config"].note == ""


@pytest.mark.parametrize("cap", [50.0, None])
def test_gemma2_refuses_sdpa_by_its_class(cap: float | None) -> None:
    config = config_of("gemma2")
    config.attn_logit_softcapping = cap
    (row,) = hfpatch.inspect(config).attention
    assert row.implementation == "eager"  # what transformers falls back to
    assert row.accepts == ("eager", "flash_attention_2", "flex_attention")
    assert row.note == ("sdpa refused: scores are soft-capped at 50" if cap else "sdpa refused by the class")
    model: Any = tiny_model("gemma2")
    for name in ("eager", "sdpa", "flex_attention"):
        try:
            model.get_correct_attn_implementation(name)
            taken = True
        except ValueError:
            taken = False
        assert taken == (name in row.accepts)


def test_forced_sdpa_on_gemma2_is_a_hazard() -> None:
    model = tiny_model("gemma2")
    model.config._attn_implementation = "sdpa"
    info = hfpatch.inspect(model)
    assert any("attention is set to 'sdpa', which Gemma2ForCausalLM refuses" in h for h in info.hazards)
    assert {n.source for n in info.norms} == {"config: rms_norm_eps"}  # still rebuilt


def test_hazards_of_float16() -> None:
    assert hfpatch.inspect(tiny_model("gemma3_text")).hazards == ()
    (cast,) = hfpatch.inspect(tiny_model("gemma3_text").bfloat16()).hazards
    hazards = hfpatch.inspect(tiny_model("gemma3_text").half()).hazards
    assert len(hazards) == 3
    assert cast.startswith("a cast rounded 4 buffers: model.rotary_emb.full_attention_inv_freq (off by 0.00012 of its")
    assert hazards[2].startswith("a cast rounded 4 buffers: ")
    assert hazards[0].startswith("float16 residual stream in model.layers: it can exceed 65,504")
    assert hazards[1].startswith("eager attention in float16 in Gemma3ForCausalLM: the QK product can overflow")
    config = config_of("gemma3_text")
    config.dtype = torch.float16
    (hazard,) = hfpatch.inspect(config).hazards  # with sdpa
    assert hazard.startswith("float16 residual stream")
    mixed: Any = tiny_model("gemma3_text").half()
    mixed.model.embed_tokens.bfloat16()  # promotes the stream to float32
    assert not any("residual" in h for h in hfpatch.inspect(mixed).hazards)


@pytest.mark.slow
def test_hazard_of_modules_kept_in_float32() -> None:
    model: Any = live("t5").half()
    kept = "although T5ForConditionalGeneration keeps them in float32 (such as encoder.block.0."
    wanted = f"{2 * 3} weights are float16, {kept}"
    assert any(h.startswith(wanted) for h in hfpatch.inspect(model).hazards)
    config = config_of("t5")
    config.dtype = torch.float16  # loaded from a checkpoint they are float32
    info = hfpatch.inspect(config)
    assert set(info.dtypes) == {"float16", "float32"}
    assert not any("keeps them in float32" in h for h in info.hazards)
    experts = config_of("deepseek_v3")
    experts.first_k_dense_replace = 0
    deepseek = transformers.DeepseekV3ForCausalLM(experts).bfloat16()
    assert any("bfloat16, although DeepseekV3ForCausalLM keeps" in h for h in hfpatch.inspect(deepseek).hazards)


def test_peft() -> None:
    wrapped: Any = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj", "embed_tokens"]))
    wrapped.add_adapter("second", LoraConfig(target_modules=["v_proj"]))
    info = hfpatch.inspect(wrapped)
    assert (info.cls, info.architecture) == ("LlamaForCausalLM", "llama")
    assert [(w.kind, w.path) for w in info.wrappers] == [("PEFT", "")]
    assert [(a.name, a.kind, a.active) for a in info.adapters] == [("default", "LORA", True), ("second", "LORA", False)]
    assert info.parameters == sum(p.numel() for p in wrapped.parameters())
    assert info.trainable == sum(p.numel() for p in wrapped.parameters() if p.requires_grad) < info.parameters
    assert info.embeddings[0].path == "base_model.model.model.embed_tokens"
    assert (info.embeddings[0].vocabulary, info.embeddings[0].width) == (64, 32)
    assert {n.source for n in info.norms} == {"config: rms_norm_eps"}
    assert info.norms[0].path == "base_model.model.model.layers.*.input_layernorm"


def test_peft_that_saves_norms_and_scaled_embeddings() -> None:
    keeps = LoraConfig(target_modules=["q_proj"], modules_to_save=["input_layernorm", "embed_tokens"])
    info = hfpatch.inspect(get_peft_model(tiny_model("gemma3_text"), keeps))
    assert info.embeddings[0].cls == "ModulesToSaveWrapper"
    assert info.embeddings[0].scale == pytest.approx(32**0.5)
    assert {n.source for n in info.norms} == {"config: rms_norm_eps"}
    assert any(n.path.endswith("modules_to_save.default") for n in info.norms)


def test_peft_without_adapter_layers() -> None:
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    info = hfpatch.inspect(get_peft_model(tiny_model("llama"), prompt))
    assert (info.cls, info.adapters[0].kind) == ("LlamaForCausalLM", "PROMPT_TUNING")


def test_wrappers() -> None:
    both = hfpatch.inspect(nn.DataParallel(torch.compile(tiny_model("llama"), backend="eager")))
    assert [(w.kind, w.path) for w in both.wrappers] == [("DataParallel", ""), ("torch.compile", "module")]
    assert both.architecture == "llama"
    inplace = tiny_model("llama")
    inplace.compile(backend="eager")
    assert [w.kind for w in hfpatch.inspect(inplace).wrappers] == ["torch.compile"]
    assert hfpatch.inspect(tiny_model("llama")).wrappers == ()


def test_composite() -> None:
    model = SpeechLLM(get_peft_model(tiny_model("gemma2"), LoraConfig(target_modules=["q_proj"])))
    info = hfpatch.inspect(model)
    assert (info.cls, info.architecture, info.name) == ("SpeechLLM", None, "")
    assert [(s.path, s.architecture) for s in info.submodels] == [("llm.base_model.model", "gemma2")]
    assert [(w.kind, w.path) for w in info.wrappers] == [("PEFT", "llm")]
    own, *others = info.norms
    assert (own.path, own.source, own.eps, own.as_built) == ("ln_speech", "added module", 1e-4, None)
    assert {n.source for n in others} == {"config: rms_norm_eps"}


def test_norm_put_into_a_stock_model() -> None:
    model: Any = tiny_model("llama")
    model.model.layers[1].mlp.extra_norm = nn.LayerNorm(32)
    found = {n.path: n.source for n in hfpatch.inspect(model).norms}
    assert found["model.layers.*.mlp.extra_norm"] == "added module"
    assert found["model.norm"] == "config: rms_norm_eps"


def test_plain_module() -> None:
    info = hfpatch.inspect(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)))
    assert (info.cls, info.architecture, info.parameters, info.weights_loaded) == ("Sequential", None, 15, True)
    assert [(n.path, n.source) for n in info.norms] == [("*", "added module")]
    assert str(info)


def test_trainer_and_directory(tmp_path: Path) -> None:
    class Trainer:
        model = tiny_model("llama")

    assert hfpatch.inspect(Trainer()).architecture == "llama"
    Trainer.model.save_pretrained(tmp_path)
    info = hfpatch.inspect(str(tmp_path))
    assert (info.cls, info.name, info.declared_dtype) == ("LlamaForCausalLM", str(tmp_path), "float32")
    assert info.parameters == sum(p.numel() for p in Trainer.model.parameters())
    with pytest.raises(NotAModelError):
        hfpatch.inspect(3)
    with pytest.raises(ModelNotFoundError):
        hfpatch.inspect(tmp_path / "no-such")
    with pytest.raises(InputError, match="trust_remote_code"):
        (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "a.B"}}')
        hfpatch.inspect(tmp_path)


def test_quantization_is_named() -> None:
    config = config_of("llama")
    config.quantization_config = {"quant_method": "fp8"}
    assert hfpatch.inspect(config).quantization == "fp8"
    assert hfpatch.inspect(config_of("llama")).quantization is None


def state(value: Any) -> Any:
    return {k: state(v) for k, v in vars(value).items()} if isinstance(value, PreTrainedConfig) else value


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama", "gemma3", "deepseek_v3"])
def test_nothing_is_changed(case: str) -> None:
    config = config_of(case)
    before = copy.deepcopy(state(config))
    hfpatch.inspect(config)
    assert state(config) == before

    model = live(case)
    wrapped = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"]))
    for given in (model, wrapped):
        seen, random = fingerprint(given), torch.get_rng_state()
        str(hfpatch.inspect(given))
        assert fingerprint(given) == seen
        assert torch.equal(torch.get_rng_state(), random)


KEYS = [
    "class", "architecture", "name", "parameters", "dtypes", "trainable", "weights_loaded", "declared_dtype",
    "quantization", "submodels", "embeddings", "heads", "layers", "stacks", "norms", "attention", "experts", "fused",
    "buffers", "wrappers", "adapters", "hazards", "float16",
]  # fmt: skip
ITEMS = {
    "submodels": {"path", "architecture", "class", "parameters"},
    "embeddings": {"submodel", "path", "class", "vocabulary", "width", "scale", "scale_at"},
    "heads": {"submodel", "path", "class", "tied", "apart"},
    "layers": {"path", "submodel", "modality", "layers", "kinds"},
    "stacks": {"submodel", "path", "layers", "dtype"},
    "buffers": {"path", "class", "shape", "dtype", "rotary", "count"},
    "norms": {"path", "class", "eps_name", "eps", "source", "as_built", "count", "expected"},
    "attention": {"path", "config", "class", "implementation", "accepts", "note"},
    "wrappers": {"kind", "path"},
    "adapters": {"name", "kind", "active", "layers", "zero", "merge"},
}


def everything() -> ModelInfo:
    model = get_peft_model(tiny_model("gemma3"), LoraConfig(target_modules=["q_proj"]))
    return hfpatch.inspect(nn.DataParallel(model.half()))


def test_to_dict_has_stable_keys_and_is_json() -> None:
    found = everything().to_dict()
    assert json.loads(json.dumps(found)) == found
    assert list(found) == KEYS
    for key, wanted in ITEMS.items():
        assert found[key], key
        assert all(set(item) == wanted for item in found[key])
    assert all(isinstance(h, str) for h in found["hazards"])


@pytest.mark.slow
def test_prints_within_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for info in (everything(), hfpatch.inspect(config_of("mllama")), hfpatch.inspect(nn.Linear(1, 1))):
        text = str(info)
        assert max(len(line) for line in text.splitlines()) <= 80
    text = str(everything())
    for wanted in ("Gemma3ForConditionalGeneration (gemma3)", "adapter", "Submodels", "Norms", "Attention", "Hazards"):
        assert wanted in text
    assert "…" not in text


def test_html_escapes() -> None:
    class Odd(nn.Module):
        pass

    Odd.__name__ = "<script>"
    page = hfpatch.inspect(Odd())._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.slow
def test_deepseek_v3_costs_a_few_bare_builds(tmp_path: Path) -> None:
    transformers.DeepseekV3Config().save_pretrained(tmp_path)

    def bare() -> None:
        with torch.device("meta"):
            transformers.DeepseekV3ForCausalLM(transformers.AutoConfig.from_pretrained(tmp_path))

    for once in (bare, lambda: hfpatch.inspect(tmp_path)):  # imports, and what is read once of each class
        once()
    assert calls(lambda: hfpatch.inspect(tmp_path)) < 6 * calls(bare)
    tracemalloc.start()
    try:
        assert hfpatch.inspect(tmp_path).parameters == 671_026_404_352
        assert tracemalloc.get_traced_memory()[1] < 60 * 2**20
    finally:
        tracemalloc.stop()
