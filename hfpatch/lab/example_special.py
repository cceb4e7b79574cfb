"""Inputs that only single architectures read, apart from text, images and audio in the usual formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hfpatch.lab.example_images import places
from hfpatch.lab.example_text import BATCH, BEFORE, LENGTH, insert, text, wave


def _codes(model: Any, batch: dict[str, Any]) -> None:
    """A text token and the audio codes at each step."""
    codes = torch.arange(BATCH * LENGTH * model.config.num_codebooks).reshape(BATCH, LENGTH, -1) % 16
    batch["input_ids"] = torch.cat([batch["input_ids"][..., None], codes], dim=-1)


def _parallel_codes(model: Any, batch: dict[str, Any]) -> None:
    """Audio codes: a row of input for each codebook; the labels have all codes of a step together."""
    books = model.config.num_codebooks
    batch["input_ids"] = batch["input_ids"].repeat_interleave(books, dim=0)
    batch["labels"] = batch["labels"][..., None].repeat(1, 1, books)


def _drafted_states(model: Any, batch: dict[str, Any]) -> None:
    """Hidden states, and keys and values by layer type, of the model for which this one drafts."""
    config = model.config.get_text_config()
    batch.pop("input_ids", None)
    batch["inputs_embeds"] = wave(BATCH, LENGTH, model.pre_projection.in_features)
    kv = {}
    for i, layer in enumerate(config.layer_types):
        own = config.per_layer_config[i]
        kv[layer] = (wave(BATCH, own.num_key_value_heads, LENGTH, own.head_dim),) * 2
    batch["shared_kv_states"] = kv
    batch["output_hidden_states"] = True  # else it keeps only the last token, and slices an embedding that it lacks


def _protein(_model: Any, batch: dict[str, Any]) -> None:
    """A protein of twelve residues."""
    batch["protein_input_ids"] = text()["input_ids"]
    batch["protein_attention_mask"] = text()["attention_mask"]


def _questions(model: Any, batch: dict[str, Any]) -> None:
    """The Q-Former's prompt, and a placeholder for each of its queries."""
    batch["qformer_input_ids"] = text()["input_ids"]
    insert(batch, [model.config.image_token_index] * model.config.num_query_tokens)


def _frames_asked(model: Any, batch: dict[str, Any]) -> None:
    """A video of two frames with the same prompt."""
    batch["pixel_values"] = batch["pixel_values"][:, None].repeat(1, 2, 1, 1, 1)
    batch["qformer_input_ids"] = text()["input_ids"]
    insert(batch, [model.config.video_token_index] * model.config.num_query_tokens * 2)


def _image_positions(model: Any, batch: dict[str, Any]) -> None:
    """Placeholders for the image, and the mask of their positions."""
    count = model.config.latent_query_num
    insert(batch, [2] * count)
    mask = torch.zeros_like(batch["input_ids"])
    mask[:, BEFORE : BEFORE + count] = 1
    batch["image_embeds_position_mask"] = mask


def _flat_image_positions(model: Any, batch: dict[str, Any]) -> None:
    _image_positions(model, batch)
    batch["flattened_patches"] = _flattened(model.config.vision_config.patch_embed_hidden_size)


def _flat_image(model: Any, batch: dict[str, Any]) -> None:
    batch["flattened_patches"] = _flattened(model.config.vision_config.patch_embed_hidden_size)
    batch["attention_mask"] = torch.ones(BATCH, 16, dtype=torch.long)


def _flattened(width: int) -> torch.Tensor:
    """Return the row, the column and the values of each patch, [2, 16, 2 + width]."""
    return torch.cat([places(4).float(), wave(BATCH, 16, width)], dim=-1)


def _seen_everywhere(_model: Any, batch: dict[str, Any]) -> None:
    """Every token sees the one image."""
    batch["image_attention_mask"] = torch.ones(*batch["input_ids"].shape, 1, dtype=torch.long)


def _tiles(_model: Any, batch: dict[str, Any]) -> None:
    """One image a row, of four tiles that every token sees."""
    batch["pixel_values"] = batch["pixel_values"][:, None]
    batch["aspect_ratio_ids"] = torch.full((BATCH, 1), 4)
    batch["aspect_ratio_mask"] = torch.ones(BATCH, 1, 4, dtype=torch.long)
    batch["cross_attention_mask"] = torch.ones(*batch["input_ids"].shape, 1, 4, dtype=torch.long)


def _boxes(_model: Any, batch: dict[str, Any]) -> None:
    """The position of each token on the page."""
    left = torch.linspace(0.1, 0.6, batch["input_ids"].shape[1], dtype=torch.float32)
    box = torch.stack([left, left / 2, left + 0.2, left / 2 + 0.2], dim=-1)
    batch["bbox"] = box.expand(BATCH, -1, -1)


def _actions(model: Any, batch: dict[str, Any]) -> None:
    """A robot's state, and the actions to be predicted from noise."""
    config = model.config
    insert(batch, [config.vlm_config.image_token_index] * 16)
    batch.pop("labels", None)
    batch["state"] = wave(BATCH, config.max_state_dim)
    batch["actions"] = wave(BATCH, config.chunk_size, config.max_action_dim)
    batch["noise"] = wave(BATCH, config.chunk_size, config.max_action_dim).flip(1)
    batch["timestep"] = torch.full((BATCH,), 0.5, dtype=torch.float32)


def _patches(model: Any, batch: dict[str, Any]) -> None:
    """An image, which is not a named argument of the forward: patches that are pooled to one feature."""
    side = model.config.vision_config.patch_size
    pool = model.config.vision_config.pooling_kernel_size
    batch["pixel_values"] = wave(BATCH, pool * pool, 3 * side * side)
    batch["image_position_ids"] = places(pool)
    insert(batch, [model.config.image_token_id])


def _two_senses(model: Any, batch: dict[str, Any]) -> None:
    """An image, with one tile of it, and a sound."""
    vision, audio = model.config.vision_config, model.config.audio_config
    batch["image_pixel_values"] = wave(BATCH, 2, 3, 16, 16)
    batch["image_sizes"] = torch.tensor([[16, 16]] * BATCH)
    batch["image_attention_mask"] = torch.ones(BATCH, 2, 4, 4, dtype=torch.float32)
    batch["audio_input_features"] = wave(BATCH, 32, audio.input_size)
    batch["audio_embed_sizes"] = torch.tensor([4] * BATCH)
    insert(batch, [vision.image_token_id] * 13)
    insert(batch, [audio.audio_token_id] * 4)


def _video(model: Any, batch: dict[str, Any]) -> None:
    """A video of eight frames, in addition to the image."""
    batch["pixel_values_videos"] = batch["pixel_values"][:, None].repeat(1, 8, 1, 1, 1)
    with torch.no_grad():
        frames = model.base_model.get_video_features(batch["pixel_values_videos"]).pooler_output
    insert(batch, [model.config.video_token_index] * (frames.shape[:-1].numel() // BATCH))


def _no_mask(_model: Any, batch: dict[str, Any]) -> None:
    """No mask: it would select features, not frames."""
    del batch["input_features_mask"]


PROMPTED = frozenset({"instructblip", "instructblipvideo"})
"""Architectures whose features depend on a prompt as well as on the image."""

SPECIAL: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "diffusion_gemma": _patches,
    "evolla": _protein,
    "gemma4_assistant": _drafted_states,
    "gemma4_unified_assistant": _drafted_states,
    "granite_speech": _no_mask,
    "granite_speech_plus": _no_mask,
    "idefics": _seen_everywhere,
    "instructblip": _questions,
    "instructblipvideo": _frames_asked,
    "kosmos-2": _image_positions,
    "kosmos-2.5": _flat_image_positions,
    "kyutai_speech_to_text": _codes,
    "mllama": _tiles,
    "musicgen_decoder": _parallel_codes,
    "musicgen_melody_decoder": _parallel_codes,
    "phi4_multimodal": _two_senses,
    "pi0": _actions,
    "pix2struct": _flat_image,
    "udop": _boxes,
    "video_llava": _video,
}
"""Architecture -> function that adapts the batch in place."""
