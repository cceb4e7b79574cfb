"""Methods of `transformers.Trainer` that it has no callback for; known in transformers 5.17 to 5.24."""

from __future__ import annotations

EPOCH = "_run_epoch"
"""Runs one epoch of training."""

SAVE = "_save_checkpoint"
"""Writes a checkpoint."""
