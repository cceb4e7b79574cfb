"""A symptom that patches share: a model in half precision whose logits are wrong. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hfpatch.patching.verifying.trial import Trial


def wrong_logits(trial: Trial) -> str | None:
    """Return a sentence if logits are not finite, or farther from float32 than bfloat16's; else None."""
    logits = trial.logits()
    if bad := int((~logits.isfinite()).sum()):
        return f"{bad} of {logits.numel()} logits are not finite"
    error, bfloat16 = trial.error(logits), trial.error(trial.bfloat16)
    return None if error < bfloat16 else f"relative error {error:.1e}, bfloat16 has {bfloat16:.1e}"
