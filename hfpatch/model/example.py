"""A training batch for a tiny model of any architecture: text, and the images or sounds that it reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

BATCH = 2
LENGTH = 12


def example_inputs(model: nn.Module) -> dict[str, Any]:
    """A small batch for a model of `tiny_model`, with labels; the first four tokens of the first row are padding.

    Returns:
        Arguments for the model: `input_ids`, `attention_mask` and `labels`, each [2, 12], and what else it reads.
    """
    return text()


def text() -> dict[str, torch.Tensor]:
    """Tokens that stay clear of the special ones at both ends of the vocabulary."""
    ids = (torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) * 7 + 3) % 40 + 2
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
