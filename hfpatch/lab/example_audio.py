"""A sound for each row of a batch, in the format that an architecture reads."""

from __future__ import annotations

from typing import Any

import torch

from hfpatch.lab.example_text import BATCH, wave

FRAMES = 32
OTHER_FRAMES: dict[str, int] = {**dict.fromkeys(("qwen3_asr", "qwen3_omni_moe_thinker"), 100), "voxtral_realtime": 96}
"""Architecture -> frames per sound, if not 32."""

HOP = 160
"""Samples per frame."""

SAMPLES = 672
"""Samples per sound, for models that read samples: a multiple of all strides."""

BANDS = ("num_mel_bins", "input_dim", "feature_size", "input_feat_size", "feature_projection_input_dim")
"""Config keys for the number of frequency bands."""

FRAMES_FIRST = frozenset({
    "fun_asr_nano", "gemma4", "gemma4_unified", "granite_speech", "granite_speech_plus", "nemo_speechlm",
    "nemotron_h_omni", "parakeet_encoder", "wav2vec2-bert",
})  # fmt: skip
"""Architectures that read [batch, frames, bands], not [batch, bands, frames]."""

NO_CHANNEL = frozenset({"apertus1p5", "muse_spark"})
"""Architectures that read samples as [batch, samples], not [batch, 1, samples]."""


def sounds(config: Any, reads: frozenset[str]) -> dict[str, Any]:
    """Return the audio inputs, one sound per row, among the arguments `reads` of a forward; empty if it has none."""
    made: dict[str, Any] = {}
    if "input_features" in reads:
        audio = getattr(config, "audio_config", None) or getattr(config, "encoder_config", None) or config
        bands = next((int(value) for name in BANDS if (value := getattr(audio, name, None))), 16)
        bands *= getattr(audio, "num_stacked_frames", 1)
        frames = OTHER_FRAMES.get(config.model_type, FRAMES)
        first = config.model_type in FRAMES_FIRST
        made["input_features"] = wave(BATCH, frames, bands) if first else wave(BATCH, bands, frames)
        made |= dict.fromkeys(("input_features_mask", "feature_attention_mask"), torch.ones(BATCH, frames).bool())
        made["padding_mask"] = torch.ones(BATCH, frames * HOP, dtype=torch.long)
        made["chunk_sample_lengths"] = torch.full((BATCH,), frames * HOP)
    elif "input_values" in reads:
        made["input_values"] = wave(BATCH, SAMPLES) if config.model_type in NO_CHANNEL else wave(BATCH, 1, SAMPLES)
        made |= dict.fromkeys(("input_values_mask", "padding_mask"), torch.ones(BATCH, SAMPLES, dtype=torch.long))
    elif "audio_input_ids" in reads:  # [batch, frames, bands], each band one of sixteen levels
        made["audio_input_ids"] = torch.arange(BATCH * 4 * 16).reshape(BATCH, 4, 16) % 16
        made["audio_input_ids_mask"] = torch.ones(BATCH, 4, dtype=torch.long)
    return {key: value for key, value in made.items() if key in reads}
