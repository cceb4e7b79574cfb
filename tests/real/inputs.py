"""What the real models are given: one pinned text, vowels, and a vocabulary that is cut to what a text needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

TEXT = (
    "The harbour was quiet when the first boats came back in the early morning. Two men carried the nets "
    "to the wall and spread them out to dry, while a boy counted the fish and wrote the numbers in a small "
    "book. By noon the market was full of people, and most of the catch had been sold. In the afternoon the "
    "wind turned to the north and the water grew rough, so the men who had meant to go out again stayed at "
    "home and mended their sails. An old woman who had lived by the sea all her life said that it would snow "
    "before the end of the week, and nobody laughed, because she had been right the year before."
)

RATE = 16_000
"""Samples of sound in a second."""


def speech(seconds: float = 3.0) -> Any:
    """Vowels, by three formants over a falling voice, with pauses: float32 samples."""
    rng = np.random.default_rng(0)
    time = np.arange(int(RATE * seconds)) / RATE
    phase = 2 * np.pi * np.cumsum(120 - 8 * time) / RATE
    out = np.zeros_like(time)
    for at, formants in enumerate(((730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480))):
        inside = np.clip(1 - np.abs((time - 0.4 - 0.7 * at) / 0.25), 0, None)
        for harmonic in range(1, 30):
            loud = sum(np.exp(-(((120 * harmonic - f) / 120) ** 2)) for f in formants)
            out += inside * loud * np.sin(harmonic * phase)
    return (out / np.abs(out).max() + 1e-3 * rng.standard_normal(len(out))).astype(np.float32)


def keep_rows(model: Any, ids: torch.Tensor, rows: int) -> torch.Tensor:
    """Cut a vocabulary, in place, to `rows` rows, those of a text among them; the text in their numbering."""
    used = ids.unique()
    rest = torch.arange(1000, 1000 + 2 * rows, device=ids.device)
    kept = torch.cat([used, rest[~torch.isin(rest, used)]])[:rows]
    table, head = (part().weight[kept].clone() for part in (model.get_input_embeddings, model.get_output_embeddings))
    model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(table)
        model.get_output_embeddings().weight.copy_(head)  # the same rows again, if it is tied
    return torch.searchsorted(used, ids)
