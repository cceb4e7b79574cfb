"""The tokens of an example batch, and placeholders among them."""

from __future__ import annotations

from typing import Any

import torch

BATCH = 2
LENGTH = 12
BEFORE = 4
"""Number of tokens before the image or the sound."""

TOKENS: dict[str, tuple[str, ...]] = {
    "image": ("image_token_id", "image_token_index", "image_patch_id"),
    "video": ("video_token_id", "video_token_index"),
    "audio": ("audio_token_id", "audio_token_index"),
}
"""Config keys for the placeholder token of an image, a video or a sound."""

STARTS = {"image": ("vision_start_token_id", "image_start_token_id"), "audio": ("audio_start_token_id",)}
ENDS = {"image": ("vision_end_token_id", "image_end_token_id"), "audio": ("audio_end_token_id",)}


def text() -> dict[str, torch.Tensor]:
    """Return `input_ids`, `attention_mask` and `labels`, each [2, 12], without special tokens."""
    ids = (torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) * 7 + 3) % 40 + 2
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def placeholder(config: Any, kind: str) -> int | None:
    """Return the placeholder token of an image, a video or a sound; None if the config has none."""
    return _first(config, TOKENS[kind])


def placeholders(config: Any, kind: str, count: int) -> list[int]:
    """Return `count` placeholder tokens of an image or a sound, between start and end tokens if the config has them."""
    token = placeholder(config, kind)
    if token is None or not count:
        return []
    ends = [_first(config, names.get(kind, ())) for names in (STARTS, ENDS)]
    begin, end = [[token] if token is not None else [] for token in ends]
    return [*begin, *[token] * count, *end]


def insert(batch: dict[str, Any], tokens: list[int]) -> None:
    """Insert tokens with label -100 into each row of a batch, after its first `BEFORE` tokens."""
    for key, new in (("input_ids", tokens), ("attention_mask", [1] * len(tokens)), ("labels", [-100] * len(tokens))):
        if key not in batch:
            continue
        between = torch.tensor(new, dtype=torch.long).expand(BATCH, -1)
        batch[key] = torch.cat([batch[key][:, :BEFORE], between, batch[key][:, BEFORE:]], dim=1)


def wave(*shape: int) -> torch.Tensor:
    """Return fixed values between -1 and 1 in this shape, as an image or a sound."""
    return torch.linspace(-40.0, 40.0, int(torch.Size(shape).numel()), dtype=torch.float32).sin().reshape(shape)


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    return next((token for name in names if (token := getattr(config, name, None)) is not None), None)
