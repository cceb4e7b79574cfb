"""The result of an examination: one page in a terminal, or one HTML file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfpatch.doctoring.ways import FLOAT32, PATCHED, Run, chosen
from hfpatch.guarding.checking.hazard import Hazards
from hfpatch.inspecting.info import ModelInfo
from hfpatch.inspecting.peaks import Peak
from hfpatch.patching.decision import Decision, Decisions
from hfpatch.patching.verifying.figures import Proof, number
from hfpatch.report import Sheet, Shown
from hfpatch.report.document import document
from hfpatch.report.files import write_atomically

AUTOCAST = "with torch.autocast({device!r}, dtype=torch.{dtype}):\n    output = model(**batch)"


@dataclass(frozen=True)
class Room:
    """The room of a residual stream: path of its list of layers, and its largest value; None if it did not run."""

    path: str
    peak: Peak | None


@dataclass(frozen=True, repr=False)
class Diagnosis(Shown):
    """What `doctor` found. True if there is a problem: a hazard, a patch that is refused and needed, or no way to run.

    Attributes:
        info: The facts, as `inspect` gives them.
        hazards: As `check` gives them.
        rooms: The residual streams, with the largest value of each on the batch.
        plan: What each patch does in float16, with reasons.
        proof: The float16 copy before and after the patches, beside float32 with the same weights.
        runs: Every way to run the model here, beside the float32 checkpoint.
        lifted: Whether the patches were lifted again.
        device: Device of the model.
        shortened: What torch is set to shorten float32 to in the runs; empty if to nothing.
    """

    info: ModelInfo
    hazards: Hazards
    rooms: tuple[Room, ...]
    plan: Decisions
    proof: Proof
    runs: tuple[Run, ...]
    lifted: str
    device: str
    shortened: str = ""

    def __bool__(self) -> bool:
        return bool(self.hazards) or self.best is None or any(d.worst for d in self.plan.decisions)

    @property
    def best(self) -> Run | None:
        """The best way to run it here, other than float32; None if none is finite."""
        return chosen(self.runs)

    @property
    def advice(self) -> str:
        """Which way to run it here, and why, in a sentence."""
        best, broken = self.best, [r for r in self.runs if not r.finite]
        failed = f"; not finite: {', '.join(r.way.name for r in broken if not r.why)}" if broken else ""
        if best is None:
            return f"Run it in float32: no other way gave finite logits on this batch{failed}."
        others = [r for r in self.runs if r.finite and r.way not in (best.way, FLOAT32)]
        beside = f", {others[0].way.name} {_kl(others[0])}" if others else ""
        cost = f"{_mib(best.memory)} MiB, {best.seconds:.2g} s"
        return f"Run it in {best.way.name}: KL {_kl(best)} from float32{beside}; {cost} a forward pass{failed}."

    @property
    def paste(self) -> tuple[str, ...]:
        """The lines that run it so; `path` stands for the checkpoint."""
        best = self.best
        way = best.way if best is not None else FLOAT32
        dtype = str(way.weights).removeprefix("torch.")
        lines = [f"model = transformers.{self.info.cls}.from_pretrained(", f"    path, dtype=torch.{dtype}", ")"]
        if way == PATCHED:
            lines += ["fix = hfpatch.apply(model, batch=batch)", "print(fix.verify(batch))"]
        if way.autocast is not None:
            cast = str(way.autocast).removeprefix("torch.")
            lines += AUTOCAST.format(device=self.device.partition(":")[0], dtype=cast).splitlines()
        return tuple(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "advice": self.advice,
            "best": None if self.best is None else self.best.way.name,
            "facts": {k: v for k, v in self.info.to_dict().items() if k != "name"},
            "hazards": self.hazards.to_dict(),
            "rooms": [
                {"path": r.path, "largest": _finite(r.peak and r.peak.value), "in": r.peak.path if r.peak else None}
                for r in self.rooms
            ],
            "plan": [d.to_dict() for d in self.plan.decisions],
            "proof": self.proof.to_dict(),
            "lifted": self.lifted,
            "ways": [r.to_dict() for r in self.runs],
            "paste": list(self.paste),
        }

    def sheet(self) -> Sheet:
        """Return the advice, with every way to run the model."""
        size = ", ".join(f"{dtype} {count:,}" for dtype, count in self.info.dtypes.items())
        kinds = ", ".join(dict.fromkeys(a.implementation for a in self.info.attention)) or "no"
        title = f"{self.info.cls} ({self.info.architecture or 'your own modules'}): {size}; {kinds} attention"
        rows = tuple(
            (
                r.way.name + (" (best)" if r == self.best else ""),
                number(r.loss),
                _kl(r),
                f"{r.top1:.2%}",
                "-" if r.why else _mib(r.memory),
                "-" if r.why else f"{r.seconds:.3g}",
            )
            for r in self.runs
        )
        notes = [f"{r.way.name}: does not run here ({r.why})" for r in self.runs if r.why]
        notes.append("KL in nats a token, from the float32 checkpoint. The least error first, then memory, then time.")
        if self.shortened:
            notes.append(f"torch is set to shorten float32 to {self.shortened}: the runs do, that checkpoint did not.")
        notes.append("To train: not measured, but for the hazards of one step in the model's own dtype.")
        return Sheet(f"{title}\n{self.advice}", ("way", "loss", "KL", "top-1", "MiB", "seconds"), rows, tuple(notes))

    def sheets(self) -> tuple[Sheet, ...]:
        """Return the page: problems first."""
        plan = [d for d in self.plan.decisions if not d.idle and (d.decided != "opt-in" or d.suggested)]
        found = sorted(plan, key=lambda d: (not d.worst, d.decided != "applied"))
        hazards = Sheet(
            self.hazards.sheet().title,
            ("hazard", "why"),
            tuple((f"{h.id}\n{h.likelihood}", f"{h.reason}.\n-> {h.change}.") for h in self.hazards),
            (f"measured: {'; '.join(self.hazards.measured)}.",) if self.hazards.measured else (),
            wide=("why",),
        )
        room = Sheet(
            "Room of the streams in float16, on this batch",
            ("stream", "largest value"),
            tuple((r.path, str(r.peak) if r.peak is not None else "did not run") for r in self.rooms),
            () if self.rooms else ("no stack of layers was found",),
            wide=("largest value",),
        )
        planned = Sheet(
            "Plan, in float16",
            ("patch", "decision", "why"),
            tuple((d.patch, d.decided, _why(d)) for d in found),
            () if found else ("nothing to apply",),
            wide=("why",),
        )
        rows = (self.proof.reference, *self.proof.rows)
        proof = Sheet(
            "Proof, in float16, beside float32 with the same weights",
            ("run", "loss", "KL", "top-1"),
            tuple((r.name, number(r.loss), number(r.kl), f"{r.top1:.2%}") for r in rows),
            (f"{self.lifted}.",) if self.lifted else (),
        )
        paste = Sheet("Lines to paste", (), (), self.paste)
        ordered = [hazards, room, planned, proof]
        return (self.sheet(), *(ordered if self.hazards else [*ordered[1:], hazards]), paste)

    def to_html(self, path: str | Path) -> None:
        """Write the page as one file without external parts, paths, tokens or host names, to attach to an issue.

        Raises:
            InputError: The file cannot be written.
        """
        write_atomically(path, document(f"hfpatch doctor: {self.info.cls}", self.sheets()))


def _why(decision: Decision) -> str:
    count = len(decision.edits)
    edits = f"{count} edit{'s' if count > 1 else ''}; " if count else ""
    return f"{edits}{decision.worst_news if decision.worst else decision.reason}"


def _kl(run: Run) -> str:
    return number(run.kl) if run.finite else "not finite"


def _mib(count: int) -> str:
    size = count / 2**20
    return f"{size:,.0f}" if size >= 10 else f"{size:.2g}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
