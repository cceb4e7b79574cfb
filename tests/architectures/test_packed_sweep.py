"""Packed documents in every causal architecture: the patch keeps them apart, or is refused, or they are apart."""

from __future__ import annotations

from collections import Counter

import pytest

import hfpatch
from hfpatch.errors import InputError
from hfpatch.lab.like import FAILED
from hfpatch.lab.tiny import TASKS, tiny_model
from tests.test_packed_attention import ID, alone, away, documents, packed

pytestmark = pytest.mark.architectures

LEAST = 115
"""Of the 196 architectures, those that the patch must keep apart."""


def test_kept_apart_refused_or_apart() -> None:
    wrong: list[str] = []
    decided: Counter[str] = Counter()
    for name in sorted(TASKS["causal"]):
        try:
            model = tiny_model(name, task="causal")
            parts = documents()
            batch, want = {k: v for k, v in packed(parts).items() if k != "labels"}, alone(model, parts)
        except (InputError, *FAILED):
            continue
        word = hfpatch.plan(model, only=ID).decisions[0].decided
        decided[word] += 1
        if word == "refused":
            continue
        if word == "applied":
            hfpatch.apply(model, only=ID, verbose=False)
        if (rest := away(model, batch, want)) > 1e-4:
            wrong.append(f"{name}, {word}: {rest:.1e}")
    assert not wrong, "\n".join(wrong)
    assert decided["applied"] >= LEAST, decided
    print(dict(decided))
