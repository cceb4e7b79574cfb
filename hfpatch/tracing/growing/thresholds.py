"""Which changes of size are a fault.

Measured on real weights (Gemma 3 270M, SmolLM2 135M, Whisper base): a layer multiplies the RMS of the gradient by at
most 14 and that of the stream by at most 17. But norms change it by any factor on purpose. So a change above a limit
here is only a suspicion, and the call is run again: `growth.py` counts what its operations do, without the norms that
do their work.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

from hfpatch.tracing.growing.flow import Change

GROWS = {"forward": 100.0, "backward": 30.0}
"""Factor in one block above which the signal grows too much."""
INSIDE = 1e5
"""The same for a gradient inside a block, against the one that came into the block: a norm with an eps of 1e-6, behind
a small branch, multiplies it by up to 1,000 times its weight."""
OWN_CODE = 300.0
"""The same for operations between blocks; embeddings are scaled there, by up to 80."""
STACK, EACH = 1e4, 1.5
"""Factor over all blocks of a list, and on average in each of them."""
VANISHES = 1e-2
"""Factor in one block, or of one operation, below which the signal vanishes."""
STARTING = 1e-4
"""The same for an operation with a parameter, which may have started at 0 a few steps ago."""
SHARP = 8.0
"""Factor that at least one operation must have where the signal grows: no chain of ordinary ones is a fault."""
MANY = 8
"""Blocks of a kind from which on each is also compared with their median."""


def excess(change: Change, usual: float = 1.0) -> float:
    """Return how far a change is beyond its limit: above 1 it is suspicious.

    Args:
        change: The change.
        usual: The median factor of blocks of its kind.
    """
    if change.kind == "stack":
        each = change.factor ** (1 / change.blocks)
        return change.factor / STACK if each > EACH else 0.0
    limit = {"block": GROWS[change.direction], "inside": INSIDE, "own code": OWN_CODE}[change.kind]
    grown = max(change.factor, change.factor / usual) / limit
    vanished = VANISHES / change.factor if change.kind in ("block", "own code") else 0.0
    return max(grown, vanished)


def suspicious(changes: Sequence[Change], kinds: dict[str, str]) -> list[Change]:
    """Return the changes beyond their limits, the worst first.

    Args:
        changes: Those of one step.
        kinds: Class name of each block, by path: blocks of one list and one class are of a kind.
    """
    alike: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for change in changes:
        if change.kind == "block":
            alike[_kind(change, kinds)].append(change.factor)
    usual = {
        kind: math.exp(statistics.median(math.log(f) for f in factors))
        for kind, factors in alike.items()
        if len(factors) >= MANY
    }
    found = [(excess(c, usual.get(_kind(c, kinds), 1.0) if c.kind == "block" else 1.0), c) for c in changes]
    return [c for e, c in sorted(found, key=lambda pair: -pair[0]) if e > 1]


def _kind(change: Change, kinds: dict[str, str]) -> tuple[str, str, str]:
    return change.direction, change.path.rpartition(".")[0], kinds.get(change.path, "")
