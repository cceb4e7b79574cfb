"""Embeddings and heads that were tied, and that train apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hfpatch.guarding.checking.hazard import Hazard
from hfpatch.guarding.checking.subject import Subject
from hfpatch.inspecting import facts


def ties(subject: Subject) -> Iterator[Hazard]:
    """An embedding that trains as a copy, beside the head that was tied to it."""
    if not subject.loaded:
        return
    for head in facts.heads(subject.survey):
        if not head.apart:
            continue
        embedding, output = (subject.survey.modules[path] for path in (head.apart, head.path))
        trains = [m for m in (embedding, output) if any(p.requires_grad for p in m.parameters())]
        if trains:
            both = len(trains) == 2
            yield Hazard(
                "tied-no-more",
                certain=True,
                reason=f"{head.path} was tied to {head.apart}, and a copy of one of them is used (modules_to_save)"
                + (
                    ", which train apart"
                    if both
                    else f", of which only that of {subject.survey.path(trains[0])} trains"
                )
                + ": the first step makes them differ, and a merged checkpoint with tie_word_embeddings=True keeps one",
                change=("" if _asked(subject) else "ensure_weight_tying=True in the LoraConfig, and check again; or ")
                + "tie_word_embeddings=False in the config if they are meant to differ",
            )


def _asked(subject: Subject) -> bool:
    """True if an adapter's config asks for tied weights already, which PEFT could not give."""
    configs: Any = getattr(subject.called, "peft_config", None) or {}
    return any(getattr(config, "ensure_weight_tying", False) for config in configs.values())
