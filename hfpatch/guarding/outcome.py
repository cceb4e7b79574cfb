"""The result of a training step, as plain values."""

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
    """Every micro-batch is empty, and one has a NaN loss (a mean over no token) or `tokens=0`. Not a fault."""
    ZERO = "loss and gradients exactly 0 (no supervised token, or nothing to learn)"
    """The step is skipped, so momentum does not move the weights either. Such batches can be correct (equal rewards, a
    margin that is kept), so any number of them in a row does not stop a run."""
    LOSS = "non-finite loss"
    GRADIENTS = "non-finite gradients"
    """NaN or Inf in a gradient, or a gradient whose norm overflows in float32 (beyond 1.8e19)."""
    EXPLOSION = "gradient norm over the limit"
    SPIKE = "gradient norm far over its running median"
    OVERFLOW = "loss scale too high"
    """Ordinary under a GradScaler: gradients overflowed, the scale is lowered, training continues."""
    COLLAPSED = "loss scale collapsed"
    """Gradients still overflow at a scale below `min_scale`, so the scale is not the cause."""
    PARAMETERS = "non-finite parameters"
    """A weight is not finite; the run is stopped."""

    @property
    def code(self) -> str:
        """Return the word for scripts, a key of `hfpatch.codes.SKIPS`."""
        return self.name.lower().replace("_", "-")


ADVICE = {
    Reason.NO_LABELS: "every label is -100: check the collator, the chat template and the truncation",
    Reason.ZERO: "nothing to do if a loss of 0 is correct; else check the labels",
    Reason.LOSS: "the forward pass is at fault: run hfpatch.inspect(model) and hfpatch.plan(model), try bfloat16",
    Reason.GRADIENTS: "the loss is finite, so the backward pass is at fault: start at the parameters named here",
    Reason.EXPLOSION: "lower the learning rate, or raise explode_at= if norms of this size are normal here",
    Reason.SPIKE: "check the batches; raise spike_at= (or pass None) if such jumps are normal here",
    Reason.OVERFLOW: "nothing to do: the scale is lowered automatically",
    Reason.PARAMETERS: "go back to an earlier checkpoint",
    Reason.COLLAPSED: "float16 cannot hold this model's gradients: use bfloat16, or hfpatch.apply(model)",
}
"""What to do next after a run was stopped."""


@dataclass(frozen=True)
class Facts:
    """One window of micro-batches, judged.

    Attributes:
        step: Number of the window, from 1; skipped windows are counted.
        kind: The result.
        reason: Why the step was skipped; None if it was not.
        loss: Loss of the window: the sum of its micro-batches' shares, averaged over all ranks; NaN if one was NaN.
            None while accumulating.
        norm: Norm of the unscaled, unclipped gradients. None while accumulating.
        median: Running median of the norms of good steps; NaN before there are enough of them.
        scale: Loss scale of the backward pass; None without a GradScaler.
        empty: Number of micro-batches that are empty (no supervised token, or zero loss and gradients), over all ranks.
        micro_batches: Number of micro-batches in the window, over all ranks.
        clipped: True if its norm stood out and its gradients were clipped to the median norm.
        blame: Sentences that name the parameters at fault, for a skipped step.
        learned: As `loss`, from the micro-batches whose loss is not NaN, scaled to the whole window. NaN if all are.
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
    clipped: bool = False

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
        stepped = "stepped, clipped to the median norm" if self.clipped else "stepped"
        head = stepped if self.reason is None else f"skipped, {self.reason}"
        return f"step {self.step}: {head}: {figures}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, where tuples become lists. `code` stands beside the reason of a skip."""
        reason = None if self.reason is None else self.reason.value  # a plain text: torch.load takes no enum
        return {**asdict(self), "reason": reason, "code": self.code}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Facts:
        """Return the facts of a dict that `to_dict` made, also one that went through JSON."""
        reason: Any = saved["reason"]
        values: dict[str, Any] = dict(saved)
        values.pop("code", None)
        values.update(reason=None if reason is None else Reason(reason), blame=tuple(saved["blame"]))
        return cls(**values)


class Outcome(Shown):
    """The result of `Guard.step`. If the decision is still on a device, reading an attribute waits for it.

    Args:
        facts: The facts, or a function that waits for them and returns them.
        norms: Returns the gradient norm of each component.
    """

    __slots__ = ("_facts", "_norms")

    def __init__(
        self, facts: Facts | Callable[[], Facts], norms: Callable[[], dict[str, float]] = dict[str, float]
    ) -> None:
        self._facts = facts
        self._norms = norms

    @property
    def norms(self) -> dict[str, float]:
        """Gradient norm of each of the guard's `components`, unscaled and before clipping; read from the device."""
        return self._norms()

    @property
    def facts(self) -> Facts:
        """All figures of the step."""
        if not isinstance(self._facts, Facts):
            self._facts = self._facts()
        return self._facts

    @property
    def stepped(self) -> bool:
        """True if the optimizer stepped."""
        return self.facts.kind == "stepped"

    @property
    def accumulating(self) -> bool:
        """True if the window is not complete, so there was no decision yet."""
        return self.facts.kind == "accumulating"

    @property
    def skipped(self) -> bool:
        """True if the step was skipped."""
        return self.facts.kind == "skipped"

    @property
    def reason(self) -> Reason | None:
        """Why the step was skipped; None if it was not."""
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
