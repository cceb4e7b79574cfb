"""The config keys for sizes, with their values in a tiny model, and exceptions for single architectures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

VOCABULARY = 64
HIDDEN = 32

SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "n_words", "src_vocab_size", "tgt_vocab_size", "decoder_vocab_size"), VOCABULARY),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "embedding_size", "emb_dim", "model_dim", "hidden_size_global"), HIDDEN
    ),
    **dict.fromkeys(  # one width everywhere: what one part writes is what the next one reads
        ("hidden_dim", "encoder_hidden_size", "out_hidden_size", "text_hidden_size", "vision_hidden_size",
         "audio_hidden_size", "thinker_hidden_size", "decoder_hidden_size", "projection_dim", "output_dim",
         "image_text_hidden_size", "word_embed_proj_dim", "adapter_in_dim", "adapter_out_dim", "adapter_input_size",
         "projection_hidden_size", "projection_hidden_dim", "projector_hidden_size", "projector_input_dim",
         "projector_output_dim", "vision_output_dim", "merged_hidden_size", "image_token_embed_dim",
         "patch_embed_hidden_size", "moe_hidden_size", "post_conv_out_channels", "codebook_dim",
         "vector_quantization_hidden_dimension"), HIDDEN
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "d_ff", "ffn_hidden_size", "dim_ff",
         "mlp_dim", "alignment_intermediate_size", "projection_intermediate_size", "decoder_intermediate_size",
         "dense_intermediate_size", "intermediate_size_mlp"), 48
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layers", "n_layer", "decoder_layers", "encoder_layers", "num_layers", "layers",
         "num_encoder_layers", "num_decoder_layers"), 4
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_heads", "n_head", "num_heads", "attention_heads", "decoder_attention_heads",
         "encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "dim_head"), 8),
    "max_position_embeddings": 128,
    "sliding_window": 8,
    **dict.fromkeys(
        ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts"), 4
    ),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_k"), 2),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size",
         "moe_shared_expert_intermediate_size", "shared_intermediate_size", "shared_experts_intermediate_size",
         "share_expert_dim"), 24
    ),
    "n_shared_experts": 1,
    "query_pre_attn_scalar": 8,
    "mm_tokens_per_image": 4,
    "num_codebooks": 4,
    "image_grid_pinpoints": [[16, 16]],
    "max_2d_position_embeddings": 64,
    **dict.fromkeys(("max_encoder_position_embeddings", "max_decoder_position_embeddings"), 128),
    "attention_window": 8,
    "attn_implementation": "eager",
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    "qk_head_dim": 16,
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank"), 4),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 8),
    **dict.fromkeys(("swa_num_attention_heads", "linear_num_attention_heads"), 4),
    **dict.fromkeys(("swa_num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("swa_head_dim", "global_head_dim", "index_head_dim", "attention_head_size"), 8),
    "index_n_heads": 4,
    "attention_head_dim": 16,
    "attention_hidden_size": 64,
    "rotary_dim": 4,
    **dict.fromkeys(("unpadded_vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    "hidden_size_per_layer_input": 8,
    "router_hidden_size": 16,
    "first_k_dense_replace": 1,
}  # fmt: skip
"""Key -> size in text. Set only if the architecture's config has the key, under its own or its common name."""

VISION: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    **dict.fromkeys(("image_size", "resolution", "crop_size", "window_size"), 16),
    "patch_size": 4,
    **dict.fromkeys(("num_position_embeddings", "position_embedding_size", "num_patches", "max_num_patches"), 16),
    **dict.fromkeys(("pos_emb_height", "pos_emb_width", "posemb_grid_size"), 4),
    "max_image_size": 64,
    "max_img_size": 32,
    "embed_dim": HIDDEN,
    **dict.fromkeys(("output_channels", "post_conv_in_channels", "post_conv_mid_channels"), 16),
    **dict.fromkeys(("base_channels", "latent_channels"), 32),  # normed in groups of 32
    **dict.fromkeys(("num_embeddings", "codebook_size"), 16),
    "num_res_blocks": 1,
    "channel_multiplier": [1, 1],
    "downsample_channels": [16, HIDDEN],
    "deepstack_visual_indexes": [0, 1],
    "global_attn_indexes": [1],
    "fullatt_block_indexes": [1],
}  # fmt: skip
"""Key -> size in image towers."""

AUDIO: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    **dict.fromkeys(("num_mel_bins", "n_mel_bins", "input_dim", "input_feat_size", "feature_size", "input_size"), 16),
    "max_source_positions": 16,
    "n_window": 4,
    "n_window_infer": 16,
    "downsample_hidden_size": 8,
    **dict.fromkeys(("num_filters", "num_quantizers"), 4),
    "codebook_size": 16,
    "upsample_groups": HIDDEN,
    "context_size": 8,
    **dict.fromkeys(("max_pos_emb", "num_conv_pos_embeddings"), 16),
    **dict.fromkeys(("mask_time_prob", "mask_feature_prob"), 0.0),  # in training they hide what is heard
}  # fmt: skip
"""Key -> size in audio towers."""

UNSET = frozenset(
    {
        "head_dim",
        "num_key_value_heads",
        "num_experts_per_tok",
        "num_local_experts",
        "n_routed_experts",
        "n_shared_experts",
    }
)
"""Keys that are set although their default is None."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma4": {"vision_config": {}, "audio_config": {}},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "gemma4_unified": {"vision_config": {}, "audio_config": {}},
    "nemotron_h_omni": {"audio_config": {}},
}
"""Architecture -> arguments that its config class needs in addition to its defaults."""


def _mrope(*sections: int) -> dict[str, Any]:
    """Return the numbers of rotary frequencies, in all half a head's width, for time, height and width."""
    return {"rope_parameters": {"mrope_section": list(sections)}}


def _codebook(name: Callable[[int], str]) -> dict[str, int]:
    """Return a vocabulary map: tokens 44 to 59 for the sixteen entries of an image codebook, 63 for an image."""
    return {"<image>": 63, **{name(i): 44 + i for i in range(16)}}


_FOUR_JOINED = {"intermediate_size": 4 * HIDDEN}
_IMAGE_AND_VIDEO = {"image_token_index": 63, "video_token_index": 63}
_MERGED_EARLY = {"image_token_id": 63, "insert_layer_id": 0}
_FOUR_PATCHES = {"out_hidden_size": 4 * HIDDEN}
_QUERIES = {"latent_query_num": 4}
_WINDOW = {"n_window": 50, "n_window_infer": 100}
_WITH_DECODER: dict[str, Any] = {"pad_token_id": 0, "decoder": {"is_decoder": True, "add_cross_attention": True}}

QUIRKS: dict[str, dict[str, Any]] = {
    # language models
    "bamba": {"attn_layer_indices": [2]},
    "blt": {"use_cache": False, "encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "diffusion_gemma": {"canvas_length": 12},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
    "dory": {  # counts both halves
        "num_hidden_layers": 8, "n_input_layers": 2, "n_recurrent_layers": 4, "n_output_layers": 2,
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"] * 2,
    },
    "dots3_note_text": {"head_dim": 20},
    "encoder-decoder": _WITH_DECODER,
    "ernie4_5_vl_moe_text": _mrope(1, 1, 2),
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 1, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "glm4v_moe_text": _mrope(0, 1, 1),  # turns half of each head
    "glm5_next_text": {"qk_rope_head_dim": 0, "head_dim": 0, "qk_head_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "mistral4": {"head_dim": 16},
    "mllama_text_model": {"cross_attention_layers": [1, 3]},
    "qwen4_exp_text": {
        "indexer_budget": 16, "indexer_compress_ratio": 4, "indexer_n_heads": 4, "indexer_kv_heads": 1,
        "indexer_head_dim": 8, "ngram_vocab_size_base": 64, "split_ngram_parts": 2,
    },
    "reformer": {
        "is_decoder": True, "attn_layers": ["local", "lsh"] * 2, "axial_pos_shape": [4, 3],
        "axial_pos_embds_dim": [16, 16], "local_attn_chunk_length": 6, "lsh_attn_chunk_length": 6,
    },
    "roc_bert": {"pronunciation_vocab_size": 64, "shape_vocab_size": 64},
    "step3p5": {"sliding_window": 8},
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    "xlstm": {  # its kernels round the widths of q, k and v up to 64; its cache is written in place
        "hidden_size": 128, "mode": "train", "chunk_size": 4, "use_cache": False,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
    **dict.fromkeys(
        ("cosmos3_edge_text", "glm4v_text", "glm_ocr_text", "hunyuan_vl_text", "hy_v4_vl_text", "paddleocr_vl_text",
         "qwen2_5_omni_talker", "qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_vl_text"), _mrope(2, 1, 1)
    ),
    # image towers and what joins them to the text
    "apertus1p5": {"image_token_offset": 32, "audio_token_offset": 40},
    "apertus1p5_vision_tokenizer": {"codebook_size": 8, "attn_resolutions": [], "spatial_scale_factor": 2},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "blip-2": {"image_token_index": 63},
    "chameleon": {"vocabulary_map": _codebook(lambda i: f"IMGIMG{chr(65 + i // 10)}{chr(65 + i % 10)}#")},
    "dots3_note_vision_encoder": {"num_local_experts": 4},
    "emu3": {"vocabulary_map": {"<|extra_200|>": 62, **_codebook(lambda i: f"<|visual token {i:06}|>")}},
    "florence_vision": {
        "depths": [1, 1], "patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1], "window_size": 2,
        "patch_prenorm": [False, True], "embed_dim": [16, 32], "num_heads": [2, 4], "num_groups": [2, 4],
    },
    "fuyu": {"image_size": 16, "patch_size": 4},
    "gemma4_unified_vision": {"mm_embed_dim": HIDDEN, "mm_posemb_size": 16, "output_proj_dims": HIDDEN},
    "granite4_vision": {  # a head of its Q-Former is 64 wide
        "downsample_rate": "1/2", "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1, 2, 3, 4],
        "vision_config": {"hidden_size": 64},
    },
    "granite4_vision_text": {"num_hidden_layers": 5},  # one for each of the projectors
    "granite_docling_vision": {"scale_factor": 2},
    "idefics": {  # gates open, nothing frozen
        "alpha_initializer": "ones", "freeze_text_layers": False, "freeze_vision_layers": False,
    },
    "llama4_vision_model": _FOUR_JOINED,
    "mllama_vision_model": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 3 * HIDDEN},
    "molmo2": {"image_patch_id": 50},
    "molmo2_adapter": {"vision_feature_layer": [-1, -2]},
    "nemotron_h_omni": {
        "vision_config": {"video_temporal_patch_size": 2}, "image_token_id": 63, "audio_token_id": 62,
        "audio_config": {"projection_hidden_size": HIDDEN, "projection_bias": False, "subsampling_conv_channels": 8},
    },
    "udop": {"image_size": 16, "patch_size": 4},
    "vipllava": {"vision_feature_layer": [-1, -2, 0]},
    "vision-encoder-decoder": _WITH_DECODER,
    **dict.fromkeys(("instructblip", "instructblipvideo"), _IMAGE_AND_VIDEO),
    **dict.fromkeys(("kosmos-2", "kosmos-2.5"), _QUERIES),
    **dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), _MERGED_EARLY),
    **dict.fromkeys(("muse_glimmer", "muse_spark"), _FOUR_PATCHES),
    # audio towers and what speaks
    "whisper": {"max_source_positions": 16},  # its config is that of text, sound and both
    "evolla": {
        "aligner_num_add_layers": 2, "resampler_depth": 2, "resampler_heads": 4, "resampler_dim_head": 8,
        "resampler_num_latents": 4,
    },
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "gemma4_audio": {"subsampling_conv_channels": [16, 4]},
    "gemma4_unified_audio": {"audio_embed_dim": 16},
    "kyutai_speech_to_text": {"codebook_vocab_size": 17},
    "mimi": {"upsampling_ratios": [2, 2]},
    "muse_spark_audio": {"hidden_sizes": [16, 32], "depths": [1, 1]},
    "omniasr_audio": {"conv_dim": [16] * 7},
    "phi4_multimodal_audio": {
        "nemo_conv_channels": 16, "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "input_size": 16,
        "nemo_final_size": 2, "num_blocks": 2, "audio_token_id": 62,
    },
    "qwen2_5_omni_bigvgan": {"upsample_initial_channel": 64, "mel_dim": 16},
    "qwen2_5_omni_dit": {
        "mel_dim": 16, "num_embeds": 65, "enc_emb_dim": 16, "enc_dim": 16, "enc_channels": [16, 16, 16, 16, 48],
        "enc_attention_channels": 16, "enc_se_channels": 16,
    },
    "qwen2_5_omni_thinker": {"vision_start_token_id": 48},
    "qwen3_omni_moe": {
        "talker_config": {"spatial_merge_size": 2}, "code2wav_config": {"decoder_dim": 64, "codebook_size": 16},
    },
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 24},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 48, "vision_end_token_id": 47, "audio_end_token_id": 46},
    "vibevoice_acoustic_tokenizer_encoder": {"downsampling_ratios": [2, 2], "depths": [1, 1, 1]},
    "voxtral": {"audio_token_id": 63},
    "wavtokenizer_encoder": {"codebook_size": 8, "upsampling_ratios": [2, 2]},
    **dict.fromkeys(("glmasr_encoder", "voxtral_encoder"), _FOUR_JOINED),
    **dict.fromkeys(("qwen3_asr_encoder", "qwen3_omni_moe_audio_encoder"), _WINDOW),
}  # fmt: skip
"""Architecture -> values that the size keys do not cover. A mapping is merged into the existing value."""
