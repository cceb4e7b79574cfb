"""The largest gradients of a trace, by name."""

from __future__ import annotations

from typing import Any

from hfpatch.report.sheet import Sheet, Shown, finite


class LargestGradients(Shown, list[tuple[str, float]]):
    """Names of parameters with the largest magnitude of their gradients, largest first; a list that prints as a table.

    A gradient that holds a NaN or an infinity counts as infinity.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON: gradients (name, largest: null where it is not finite)."""
        return {"gradients": [{"name": name, "largest": finite(largest)} for name, largest in self]}

    def sheet(self) -> Sheet:
        """Return it as a table."""
        rows = tuple((name, f"{largest:.4g}") for name, largest in self)
        notes = () if rows else ("No gradient was seen.",)
        return Sheet("Largest gradients", ("parameter", "max |grad|"), rows, notes, wide=("parameter",))
