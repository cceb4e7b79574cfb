"""A plan as data: what each patch would do to a model, and how that is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hfpatch.codes import DECISIONS, DecisionCode
from hfpatch.patching.edits import Edit
from hfpatch.patching.kinds.states import ABSENT, show
from hfpatch.patching.language import Decided, Effect
from hfpatch.report import Sheet, Shown

ORDER: tuple[Decided, ...] = ("applied", "opt-in", "refused", "not needed")


@dataclass(frozen=True)
class Decision:
    """What one patch would do to one submodel.

    Attributes:
        patch: Its id.
        submodel: Path of the submodel it is about; None where it is about the object as a whole.
        decided: applied | not needed | opt-in | refused.
        reason: Why.
        effect: On outputs; None where nothing would be done.
        edits: What would be changed.
        hint: The line to type, or an alternative.
        already: Number of edits of this patch that the model carries from before, and that are in force.
        suggested: Opt-in because it mends something here, and not just because it can be run.
        vital: True if the patch answers a fault that a tracer finds (NaN, overflow) and the fault can happen here; None
            if the patch has nothing to do with this model.
        unasked: True if a bare apply may run the patch.
        lapsed: Of the edits it made before, those that are not in force any more, as a sentence.
        otherwise: What is applied already and would be set otherwise now, as a sentence.
        code: Why, for scripts: a key of `hfpatch.codes.DECISIONS`.
    """

    patch: str
    submodel: str | None
    decided: Decided
    reason: str
    effect: Effect | None = None
    edits: tuple[Edit, ...] = ()
    hint: str = ""
    already: int = 0
    suggested: bool = True
    vital: bool | None = False
    unasked: bool = False
    lapsed: str = ""
    otherwise: str = ""
    code: DecisionCode = field(kw_only=True)

    def __post_init__(self) -> None:
        if self.code not in DECISIONS:
            raise ValueError(f"{self.patch}: code {self.code!r}: want one of {', '.join(DECISIONS)}")

    @property
    def worst(self) -> bool:
        """True if it comes first: a fault that can happen here is not mended, or an edit is not there any more."""
        return bool(self.lapsed) or (self.decided == "refused" and bool(self.vital) and self.unasked)

    @property
    def worst_news(self) -> str:
        """Return the sentence about it."""
        if self.lapsed:
            return self.lapsed
        where = f" in {self.submodel}" if self.submodel else ""
        return f"NOT MENDED{where}: {self.patch} is refused: {self.reason}"

    @property
    def idle(self) -> bool:
        """True if there is nothing to do, nothing was done, and nothing is missing."""
        beside = self.decided == "refused" and (self.vital is None or not self.unasked)
        return not self.already and not self.worst and (self.decided == "not needed" or beside)

    @property
    def what(self) -> str:
        """The edits in short: count, example path, before -> after."""
        groups: dict[str, list[str]] = {}
        for e in self.edits:
            was = "" if e.before is ABSENT else f" {show(e.before)}"
            groups.setdefault(f"{e.slot}{was} -> {show(e.after)}", []).append(e.path)
        return "\n".join(f"{len(paths)} x {change}: {_example(paths)}" for change, paths in groups.items())

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "patch": self.patch,
            "submodel": self.submodel,
            "decision": self.decided,
            "code": self.code,
            "reason": self.reason,
            "effect": self.effect,
            "hint": self.hint,
            "suggested": self.suggested,
            "worst": self.worst,
            "lapsed": self.lapsed,
            "edits": [e.to_dict() for e in self.edits],
        }


@dataclass(frozen=True, repr=False)
class Decisions(Shown):
    """What a set of patches would do to a model, as data; `hfpatch.Plan` is the one that a caller holds."""

    model: str
    decisions: tuple[Decision, ...]
    unknown: tuple[str, ...] = ()
    """What could not be known, e.g. because the weights are not loaded."""
    named: frozenset[str] = frozenset()
    """Ids of the patches that the caller named in `only=` or `include=`."""

    @property
    def edits(self) -> tuple[Edit, ...]:
        """Everything that apply would change, in order."""
        return tuple(e for d in self.decisions if d.decided == "applied" for e in d.edits)

    def of(self, decided: Decided) -> tuple[Decision, ...]:
        """The decisions of one kind."""
        return tuple(d for d in self.decisions if d.decided == decided)

    def sheet(self) -> Sheet:
        """As a table."""
        return sheet(f"Plan for {self.model}", self)

    def to_dict(self) -> dict[str, Any]:
        """As JSON: model, decisions (patch, submodel, decision, code, reason, effect, hint, edits), unknown."""
        return {
            "model": self.model,
            "decisions": [d.to_dict() for d in self.decisions],
            "unknown": list(self.unknown),
        }


def sheet(title: str, plan: Decisions, lapsed: Sequence[str] = ()) -> Sheet:
    """A plan as a table: patch, decision, what changes where, effect.

    The worst news comes first, then what is done. What is not needed is one line, but for patches that were named.
    """
    rows: list[tuple[str, ...]] = []
    idle = [d for d in plan.decisions if d.idle and d.patch not in plan.named]
    shown = [d for d in plan.decisions if d not in idle]
    for d in sorted(shown, key=lambda d: (not d.worst, ORDER.index(d.decided), not d.suggested, not d.vital)):
        edits = d.what if d.decided in ("applied", "opt-in") else ""
        where = f"in {d.submodel}" if d.submodel else ""
        text = "\n".join(t for t in (where, d.lapsed, edits, d.reason, d.otherwise, d.hint) if t)
        rows.append((d.patch, d.decided, d.effect or "-", text))
    others = ", ".join(dict.fromkeys(d.patch for d in idle if d.patch not in {s.patch for s in shown}))
    notes = (*lapsed, *([f"nothing to do here for {others}; only= (--only) says why"] if others else []), *plan.unknown)
    return Sheet(
        title,
        ("patch", "decision", "effect", "what changes, and why"),
        tuple(rows),
        notes,
        wide=("what changes, and why",),
    )


def _example(paths: Sequence[str]) -> str:
    """Where, in short: paths that differ in list indices only are one, with a star."""
    from hfpatch.model.walk import starred

    kinds: dict[str, list[str]] = {}
    for path in paths:
        kinds.setdefault(starred(path), []).append(path)
    named = [alike[0] if len(alike) == 1 else generic for generic, alike in kinds.items()]
    named.sort(key=lambda path: (path.count("."), path))
    return ", ".join(path or "the model itself" for path in named)
