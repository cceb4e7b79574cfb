"""What is wrong, as data: where it started, which operation made it, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hfpatch.report.sheet import Sheet, Shown

if TYPE_CHECKING:
    from hfpatch.tracing.events import Phase


@dataclass(frozen=True, repr=False)
class Finding(Shown):
    """The first thing that goes wrong in a step.

    Attributes:
        phase: `weights` (before the forward pass), `forward`, `backward` or `gradients` (of parameters).
        epoch, step: Entries of the trace, and calls of the model, before it.
        module: Path of the module whose code made it; empty for the model's own.
        kind: Class of that module.
        tensor: In which tensor it was seen, in words: `output of model.layers.7`.
        operation: The operation in words (`residual add`, `matmul of queries and keys`); None if it has none.
        operand: What the operation was given, in words; empty if it has none.
        holds: What the tensor holds: `12 NaN of 4,096 elements`.
        symptom: Key of `hfpatch.symptoms.SYMPTOMS`; patches answer these.
        why: The cause, in a sentence.
        dtype: Of the tensor.
        ordinary: A gradient overflow that a GradScaler answers by itself; not a fault while the scale still falls.
    """

    phase: Phase
    epoch: int
    step: int
    module: str
    kind: str
    tensor: str
    operation: str | None
    operand: str
    holds: str
    symptom: str
    why: str
    dtype: str
    ordinary: bool = False

    @property
    def sentence(self) -> str:
        """`step 0, forward: residual add in model.layers.7: 5.47e+04 + 1.6e+04 exceeds float16's 65,504`."""
        what = self.operation or self.tensor
        where = (
            f" in {self.module}" if self.module and self.operation else " in the model itself" if self.operation else ""
        )
        return f"step {self.step}, {self.phase}: {what}{where}: {self.why}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def sheet(self) -> Sheet:
        """Return the sentence, and what was seen."""
        rows = (
            ("seen in", f"{self.tensor}, {self.dtype}"),
            ("holds", self.holds),
            ("given", self.operand),
            ("symptom", self.symptom),
        )
        return Sheet(self.sentence, ("", " "), tuple(row for row in rows if row[1]), wide=(" ",))
