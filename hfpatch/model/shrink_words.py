"""The words that configs use for sizes, with the size of a toy, and what single architectures want besides."""

from __future__ import annotations

from typing import Any

VOCABULARY = 64
HIDDEN = 32

SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "n_words"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "emb_dim", "model_dim", "hidden_size_global"), HIDDEN),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "d_ff", "ffn_hidden_size", "dim_ff"), 48
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layers", "n_layer", "decoder_layers", "encoder_layers", "num_layers",
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
         "moe_shared_expert_intermediate_size", "shared_intermediate_size"), 24
    ),
    "n_shared_experts": 1,
    "query_pre_attn_scalar": 8,
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
"""Key -> size in text. Set only where the architecture's config has the key, by its own or its common name."""

VISION: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
AUDIO: dict[str, Any] = {"num_hidden_layers": 2, "num_key_value_heads": 4}

LISTS: frozenset[str] = frozenset()
"""Lists that may be as long as there are layers and say nothing about layers."""

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
"""Keys whose default of None stands for a size."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
}
"""By architecture: what its default config lacks before its own class takes it."""

QUIRKS: dict[str, dict[str, Any]] = {
    "blt": {"use_cache": False, "encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "bamba": {"attn_layer_indices": [2]},
    "dory": {
        "num_hidden_layers": 8, "n_input_layers": 2, "n_recurrent_layers": 4, "n_output_layers": 2,  # counts both halves
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"] * 2,
    },
    "dots3_note_text": {"head_dim": 20},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 1, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "phi4_multimodal_audio": {
        "nemo_conv_channels": 16, "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "input_size": 16,
        "nemo_final_size": 2, "num_blocks": 2,
    },
    "qwen4_exp_text": {
        "indexer_budget": 16, "indexer_compress_ratio": 4, "indexer_n_heads": 4, "indexer_kv_heads": 1,
        "indexer_head_dim": 8,"ngram_vocab_size_base": 64, "split_ngram_parts": 2},
    "reformer": {
        "is_decoder": True, "attn_layers": ["local", "lsh"] * 2, "axial_pos_shape": [4, 3],
        "axial_pos_embds_dim": [16, 16], "local_attn_chunk_length": 6, "lsh_attn_chunk_length": 6,
    },
    "roc_bert": {"pronunciation_vocab_size": 64, "shape_vocab_size": 64},
    "xmod": {"default_language": "en_XX"},
    "xlstm": {"hidden_size": 128, "mode": "train", "chunk_size": 4},  # its kernels round the widths of q, k and v up to 64
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_key_value_heads": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""By architecture: what the words do not say."""
