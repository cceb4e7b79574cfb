"""A training batch for a tiny model of any architecture: text, and images or audio if it reads them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hfpatch.errors import InputError
from hfpatch.given import want
from hfpatch.lab.example_audio import sounds
from hfpatch.lab.example_images import images
from hfpatch.lab.example_special import PROMPTED, SPECIAL
from hfpatch.lab.example_text import BATCH, insert, placeholder, placeholders, text
from hfpatch.model.walk import MODEL

COUNTS: dict[str, int] = {"granite4_vision": 10, "musicflamingo": 8, "qwen2_audio": 8}
"""Architecture -> features per image or sound, if the model cannot be called to count them."""

NOT_TRAINED: dict[str, str] = {
    "llama4": "its forward reads `image_outputs` from an output that has none (transformers 5.24)",
    "qwen2_5_omni": "it has no forward: what is trained is its thinker, the architecture qwen2_5_omni_thinker",
    "qwen3_omni_moe": "it has no forward: what is trained is its thinker, the architecture qwen3_omni_moe_thinker",
}
"""Architectures whose models can be built but not trained on a batch, with the reason."""


def example_inputs(model: nn.Module) -> dict[str, Any]:
    """Return a small batch with labels for a model from `tiny_model`; the first row begins with four padding tokens.

    If the model reads images or audio, each row has one, with a placeholder token for each of its features, counted
    by the model's `get_image_features` or `get_audio_features`.

    Args:
        model: A tiny model. It is run without gradients to count features; nothing is changed.

    Returns:
        Arguments for the model, on its device and in its dtype: `input_ids`, `attention_mask` and `labels`, in most
        architectures [2, 12 + placeholders], and other inputs (`pixel_values`, `image_grid_thw`, `input_features`,
        ...). Only arguments that its forward takes are included, also `labels`.

    Raises:
        InputError: `model` is not a transformers model, or its architecture cannot be trained (`NOT_TRAINED`).
    """
    want("example_inputs", model=(model, MODEL))
    config: Any = model.config
    if reason := NOT_TRAINED.get(config.model_type):
        raise InputError(f"example_inputs, a model of architecture {config.model_type!r}: {reason}")
    with torch.device("cpu"):
        return _on_device_of(model, _example(model, frozenset(inspect.signature(model.forward).parameters)))


def _example(model: Any, reads: frozenset[str]) -> dict[str, Any]:
    config, batch = model.config, text()
    for kind, made in (("image", images(config, reads)), ("audio", sounds(config, reads))):
        batch |= made
        if made and placeholder(config, kind) is not None:
            insert(batch, placeholders(config, kind, _features(model, kind, _on_device_of(model, made)) // BATCH))
    if "pixel_values" in batch and (token := placeholder(config, "image")) is not None:
        batch |= dict.fromkeys(("mm_token_type_ids", "token_type_ids"), (batch["input_ids"] == token).long())
    batch = {key: value for key, value in batch.items() if key in reads}
    if special := SPECIAL.get(config.model_type):
        special(model, batch)
    return batch


def _on_device_of(model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch with tensors on the model's device, floating-point ones in its dtype."""
    return {
        key: value.to(model.device, model.dtype if value.is_floating_point() else value.dtype)
        if isinstance(value, torch.Tensor)
        else value
        for key, value in batch.items()
    }


def _features(model: Any, kind: str, made: Mapping[str, Any]) -> int:
    """Return the number of features of all images or sounds in the batch; 0 if the model has no method for it."""
    if (count := COUNTS.get(model.config.model_type)) is not None:
        return count * BATCH
    name = f"get_{kind}_features"
    owner = next((owner for owner in (model.base_model, model) if hasattr(owner, name)), None)
    if owner is None or model.config.model_type in PROMPTED:
        return 0
    takes = inspect.signature(getattr(owner, name)).parameters
    with torch.no_grad():
        found = getattr(owner, name)(**{key: value for key, value in made.items() if key in takes})
    outputs = [getattr(found, output, None) for output in ("pooler_output", "last_hidden_state")]
    features = next((output for output in outputs if output is not None), found)
    parts: list[torch.Tensor] = [features] if isinstance(features, torch.Tensor) else list(features)
    return sum(part.shape[:-1].numel() for part in parts)
