"""What became of a batch, as plain values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal

from hfpatch.report import Sheet, Shown, finite


class Reason(StrEnum):
    """Why a step was skipped."""

    NO_LABELS = "no supervised token"
    """Gradients exactly 0 and a loss that is NaN (a mean over no token), or `tokens=0`. Nothing is broken."""
    ZERO = "loss and gradients exactly 0 (no supervised token, or nothing to learn)"
    """Not even momentum is followed; but such batches may be right (equal rewards, a margin that is kept), so that no
    row of them stops a run."""
    LOSS = "non-finite loss"
    GRADIENTS = "non-finite gradients"
    """NaN or Inf in a gradient, or a gradient whose float32 norm overflows (beyond 1.8e19)."""
    EXPLOSION = "gradient norm over the limit"
    SPIKE = "gradient norm far over its running median"
    OVERFLOW = "loss scale too high"
    """Ordinary under a GradScaler: gradients overflowed, the scale falls, the next batch goes on."""
    COLLAPSED = "loss scale collapsed"
    """Gradients still overflow at a scale below `min_scale`: the scale is not what is wrong."""
    PARAMETERS = "non-finite parameters"
    """A weight was found not finite: the run is stopped."""

    @property
    def code(self) -> str:
        """Return the word for scripts, a key of `hfpatch.codes.SKIPS`."""
        return self.name.lower().replace("_", "-")


ADVICE = {
    Reason.NO_LABELS: "every label is -100: look at the collator, the chat template and the truncation",
    Reason.ZERO: "nothing to do where a loss is rightly 0; else look at the labels",
    Reason.LOSS: "the forward pass is at fault: run hfpatch.inspect(model) and hfpatch.plan(model), try bfloat16",
    Reason.GRADIENTS: "the backward pass is at fault although the loss is finite: begin at the parameters named here",
    Reason.EXPLOSION: "lower the learning rate, or raise explode_at= if norms of this size are normal here",
    Reason.SPIKE: "look at the batches; raise spike_at= (or None) if such jumps are normal here",
    Reason.OVERFLOW: "nothing to do: the scale falls by itself",
    Reason.PARAMETERS: "go back to the checkpoint before",
    Reason.COLLAPSED: "float16 does not hold this model's gradients: use bfloat16, or hfpatch.apply(model)",
}
"""What to do next where a run was stopped."""


@dataclass(frozen=True)
class Facts:
    """One window of micro-batches, judged.

    Attributes:
        step: Windows seen so far, this one included; skipped ones count.
        kind: What was done.
        reason: Why it was skipped.
        loss: The loss as it was, over all ranks; NaN where it was NaN. None while accumulating.
        learned: The same without micro-batches whose loss is NaN because they are empty. NaN if all are.
        norm: Norm of the unscaled, unclipped gradients. None while accumulating.
        median: Running median of the norms of good steps; NaN before there are enough of them.
        scale: Loss scale these gradients were made with; None without a GradScaler.
        empty: Micro-batches without a supervised token, or with a loss that is rightly 0, over all ranks.
        micro_batches: Micro-batches in the window, over all ranks.
        blame: Sentences that name parameters, of a skipped step.
    """

    step: int
    kind: Literal["stepped", "accumulating", "skipped"]
    reason: Reason | None = None
    loss: float | None = None
    norm: float | None = None
    median: float = math.nan
    scale: float | None = None
    empty: int = 0
    micro_batches: int = 0
    blame: tuple[str, ...] = ()
    learned: float | None = None

    @property
    def code(self) -> str | None:
        """Return the code of the reason, a key of `hfpatch.codes.SKIPS`; None if the step was not skipped."""
        return None if self.reason is None else self.reason.code

    def __str__(self) -> str:
        return "; ".join([self.line, *self.blame])

    @property
    def line(self) -> str:
        """Return what became of it with its figures, without the parameters that are named."""
        if self.kind == "accumulating":
            return f"step {self.step}: accumulating"
        figures = f"loss {_figure(self.loss)}, gradient norm {_figure(self.norm)}"
        if not math.isnan(self.median):
            figures += f" (median {_figure(self.median)})"
        if self.scale is not None:
            figures += f", scale {self.scale:g}"
        if self.empty:
            figures += f", {self.empty} of {self.micro_batches} micro-batches empty"
        head = "stepped" if self.reason is None else f"skipped, {self.reason}"
        return f"step {self.step}: {head}: {figures}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it; tuples become lists there. `code` stands beside the reason of a skip."""
        return {**asdict(self), "code": self.code}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Facts:
        """What `to_dict` gave, through JSON or not."""
        reason: Any = saved["reason"]
        values: dict[str, Any] = dict(saved)
        values.pop("code", None)
        values.update(reason=None if reason is None else Reason(reason), blame=tuple(saved["blame"]))
        return cls(**values)


class Outcome(Shown):
    """What `Guard.step` returns. Read it or not: where the decision is on a device, reading it waits for it.

    Args:
        facts: The facts, or a function that waits for them.
    """

    __slots__ = ("_facts",)

    def __init__(self, facts: Facts | Callable[[], Facts]) -> None:
        self._facts = facts

    @property
    def facts(self) -> Facts:
        """All figures."""
        if not isinstance(self._facts, Facts):
            self._facts = self._facts()
        return self._facts

    @property
    def stepped(self) -> bool:
        """The optimizer moved."""
        return self.facts.kind == "stepped"

    @property
    def accumulating(self) -> bool:
        """More micro-batches are to come before a step."""
        return self.facts.kind == "accumulating"

    @property
    def skipped(self) -> bool:
        """The batch changed nothing."""
        return self.facts.kind == "skipped"

    @property
    def reason(self) -> Reason | None:
        """Why it was skipped; None if it was not."""
        return self.facts.reason

    @property
    def code(self) -> str | None:
        """Return the code of the reason, a key of `hfpatch.codes.SKIPS`; None if it was not skipped."""
        return self.facts.code

    def to_dict(self) -> dict[str, Any]:
        """Return the figures (`Facts.to_dict`); what is not finite is null."""
        return {k: finite(v) if isinstance(v, float) else v for k, v in self.facts.to_dict().items()}

    def sheet(self) -> Sheet:
        """Return a line for the step, and one for each sentence that names parameters."""
        return Sheet(self.facts.line, (), (), self.facts.blame)


def _figure(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"
