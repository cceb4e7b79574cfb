"""The result of a diagnosis, as data: where a fault started, which operation made it, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hfpatch.model.walk import starred
from hfpatch.report.sheet import Sheet, Shown

if TYPE_CHECKING:
    from hfpatch.tracing.events import Phase


@dataclass(frozen=True)
class Answer:
    """What is known of the patches for a finding.

    Attributes:
        sentences: What came of them, or why there is none, worst news first.
        patches: Ids of the patches to apply: they were tried on the traced call, or could not be tried.
        tried: True if they were tried, and the call was finite with them.
    """

    sentences: tuple[str, ...]
    patches: tuple[str, ...] = ()
    tried: bool = False


@dataclass(frozen=True, repr=False)
class Finding(Shown):
    """The first fault of a step.

    Attributes:
        phase: `weights` (before the forward pass), `forward`, `backward` or `gradients` (of parameters).
        epoch, step: Index of the entry of the trace and of the call of the model, from 0.
        module: Path of the module whose code made the bad value; empty for the model itself.
        kind: Class name of that module.
        tensor: The tensor in which it was seen: `output of model.layers.7`.
        operation: The operation (`residual add`, `matmul of queries and keys`); None if it is not known.
        operand: The operation's operands, with dtype, shape and largest magnitude; empty if it is not known.
        holds: The bad values of the tensor: `12 NaN of 4,096 elements`.
        symptom: Key of `hfpatch.symptoms.SYMPTOMS`, by which patches that fix it are found.
        why: The cause, in a sentence.
        dtype: Name of the tensor's dtype.
        raised: True if it is an exception of the forward; `tensor` and `holds` then tell of that.
        ordinary: True for a gradient overflow that a GradScaler handles by lowering its scale; a fault only if it
            persists at a low scale.
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
    raised: bool = False

    @property
    def sentence(self) -> str:
        """`step 0, forward: residual add in model.layers.7: 5.47e+04 + 1.6e+04 exceeds float16's 65,504`."""
        return f"step {self.step}, {self.phase}: {self.fault}"

    @property
    def fault(self) -> str:
        """The sentence without the step: `residual add in model.layers.7: 5.47e+04 + 1.6e+04 exceeds ...`."""
        what = self.operation or self.tensor
        where = (
            f" in {self.module}" if self.module and self.operation else " in the model itself" if self.operation else ""
        )
        return f"{what}{where}: {self.why}"

    @property
    def sort(self) -> tuple[str, ...]:
        """Phase, symptom, dtype and place, list indices left out: what findings of one kind have in common."""
        return (self.phase, self.symptom, self.dtype, starred(self.module))

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def sheet(self) -> Sheet:
        """Return the sentence, and what was seen."""
        rows = (
            ("seen in", ", ".join(part for part in (self.tensor, self.dtype) if part)),
            ("holds", self.holds),
            ("given", self.operand),
            ("symptom", self.symptom),
        )
        told = tuple(row for row in rows if row[1])
        return Sheet(self.sentence, ("", " "), told, wide=(" ",), folded=frozenset(range(len(told))))
