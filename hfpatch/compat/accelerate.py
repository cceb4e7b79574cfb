# accelerate tells its scheduler and the Trainer of a skipped step through one attribute, and marks its hooks by two
# pyright: reportPrivateUsage=false
"""What accelerate writes on an optimizer and on a module, and methods of the Trainer that it has no callback for.

Known in accelerate 1.10 to 1.15 and transformers 5.17 to 5.24.
"""

from __future__ import annotations

from typing import Any

EPOCH = "_run_epoch"
"""Method of the Trainer that runs one epoch of training."""

SAVE = "_save_checkpoint"
"""Method of the Trainer that writes a checkpoint."""

HOOK = "_hf_hook"
"""Key in the `__dict__` of a module whose forward accelerate replaced (offload, several devices)."""

FORWARD = "_old_forward"
"""Key beside it: the forward that was there."""


def says_skipped(optimizer: Any, skipped: bool) -> None:
    """Let a prepared optimizer say that its last step was skipped, or was not.

    `step_was_skipped` reads `_is_overflow`, and so do the prepared scheduler and the Trainer. Where it is
    gone, the schedule goes on over a skipped step.
    """
    optimizer._is_overflow = skipped
