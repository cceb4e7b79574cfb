"""A plan as data and as a table: the decision about each patch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hfpatch.codes import DECISIONS, DecisionCode
from hfpatch.patching.edits import Edit
from hfpatch.patching.kinds.base import PLACES, InCheckpoint
from hfpatch.patching.kinds.states import ABSENT, show
from hfpatch.patching.language import Decided, Effect
from hfpatch.report import Sheet, Shown

if TYPE_CHECKING:
    from hfpatch.inspecting.peaks import Peaks

ORDER: tuple[Decided, ...] = ("applied", "opt-in", "refused", "not needed")


@dataclass(frozen=True)
class Decision:
    """The decision about one patch for one submodel.

    Attributes:
        patch: Id of the patch.
        submodel: Path of the submodel; None for the object as a whole.
        decided: `applied`, `not needed`, `opt-in` or `refused`.
        reason: Why, as a sentence.
        effect: Effect on the outputs; None if there is nothing to do.
        edits: The edits that would be made.
        hint: The line to type, or an alternative.
        already: Number of edits of this patch that are in force from before.
        suggested: False for an opt-in patch that would fix nothing here.
        vital: True if the patch fixes a fault that a tracer finds (NaN, overflow) and the fault can occur here; None
            if the patch does not concern this model.
        unasked: True if `apply(model)` may run the patch without being asked for it by name.
        lapsed: A sentence about earlier edits that are no longer in force; empty if there are none.
        otherwise: A sentence about an edit in force that would get another value now; empty if there is none.
        origin: Package and version that the patch comes from, or `registered by hand`; empty for hfpatch's own.
        code: The reason for scripts: a key of `hfpatch.codes.DECISIONS`.
        options: The options of the patch that the caller set.
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
    origin: str = ""
    code: DecisionCode = field(kw_only=True)
    options: Mapping[str, Any] = field(default_factory=dict[str, Any], kw_only=True, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.code not in DECISIONS:
            raise ValueError(f"{self.patch}: code {self.code!r}: want one of {', '.join(DECISIONS)}")

    @property
    def title(self) -> str:
        """Id and origin of the patch."""
        return f"{self.patch} ({self.origin})" if self.origin else self.patch

    @property
    def worst(self) -> bool:
        """True for a problem, which is shown first: a fault that can occur is not fixed, an edit is gone, or the code
        of a patch raised an error.
        """
        raised = self.code == "patch-raised"
        return raised or bool(self.lapsed) or (self.decided == "refused" and bool(self.vital) and self.unasked)

    @property
    def worst_news(self) -> str:
        """A sentence about the problem."""
        if self.lapsed:
            return self.lapsed
        if self.code == "patch-raised":
            return f"refused: {self.reason}"
        where = f" in {self.submodel}" if self.submodel else ""
        return f"NOT FIXED{where}: {self.patch} is refused: {self.reason}"

    @property
    def idle(self) -> bool:
        """True if there is nothing to do, nothing was done before, and no problem."""
        beside = self.decided == "refused" and (self.vital is None or not self.unasked)
        return not self.already and not self.worst and (self.decided == "not needed" or beside)

    @property
    def what(self) -> str:
        """The edits in short: count, slot, before -> after, and paths."""
        groups: dict[str, list[str]] = {}
        for e in self.edits:
            was = "" if e.before is ABSENT else f" {show(e.before)}"
            groups.setdefault(f"{e.slot}{was} -> {show(e.after)}", []).append(e.path)
        return "\n".join(f"{len(paths)} x {change}: {_example(paths)}" for change, paths in groups.items())

    def to_dict(self) -> dict[str, Any]:
        """Return the decision as plain values, for JSON."""
        return {
            "patch": self.patch,
            "origin": self.origin,
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
    """The decisions about a set of patches for a model, as data. `hfpatch.Plan` adds `apply()`."""

    model: str
    decisions: tuple[Decision, ...]
    unknown: tuple[str, ...] = ()
    """Sentences about facts that are unknown, e.g. because the weights are not loaded."""
    named: frozenset[str] = frozenset()
    """Ids of the patches that the caller named in `only=` or `include=`."""
    measured: Peaks | None = field(default=None, compare=False)
    """The largest values on the caller's batch; None without a batch."""

    @property
    def edits(self) -> tuple[Edit, ...]:
        """The edits that apply would make, in order."""
        return tuple(e for d in self.decisions if d.decided == "applied" for e in d.edits)

    def of(self, decided: Decided) -> tuple[Decision, ...]:
        """Return the decisions of one kind."""
        return tuple(d for d in self.decisions if d.decided == decided)

    def sheet(self) -> Sheet:
        """Return the plan as a table."""
        return sheet(f"Plan for {self.model}", self)

    def to_dict(self) -> dict[str, Any]:
        """Return model, decisions (`Decision.to_dict`) and unknown, for JSON."""
        return {
            "model": self.model,
            "decisions": [d.to_dict() for d in self.decisions],
            "unknown": list(self.unknown),
        }


def sheet(title: str, plan: Decisions, lapsed: Sequence[str] = ()) -> Sheet:
    """Return a plan as a table: patch, decision, effect, and what changes and why.

    Problems come first, then the patches that are applied. Patches that are not needed share a line, unless named.
    """
    rows: list[tuple[str, ...]] = []
    folded: set[int] = set()
    idle = [d for d in plan.decisions if d.idle and d.patch not in plan.named]
    shown = [d for d in plan.decisions if d not in idle]
    for d in sorted(shown, key=lambda d: (not d.worst, ORDER.index(d.decided), not d.suggested, not d.vital)):
        if not d.worst and d.decided != "applied":
            folded.add(len(rows))
        edits = d.what if d.decided in ("applied", "opt-in") else ""
        where = f"in {d.submodel}" if d.submodel else ""
        text = "\n".join(t for t in (where, d.lapsed, edits, d.reason, d.otherwise, d.hint) if t)
        rows.append((f"{d.patch}\n{d.origin}".strip(), d.decided, d.effect or "-", text))
    others = ", ".join(dict.fromkeys(d.patch for d in idle if d.patch not in {s.patch for s in shown}))
    nothing = [f"nothing to do here for {others}; only= (--only) shows why"] if others else []
    notes = (*lapsed, *nothing, *plan.unknown, *_in_checkpoint(plan))
    return Sheet(
        title,
        ("patch", "decision", "effect", "what changes, and why"),
        tuple(rows),
        notes,
        wide=("what changes, and why",),
        folded=frozenset(folded),
    )


def _in_checkpoint(plan: Decisions) -> list[str]:
    """Return sentences on what a checkpoint of the patched model lacks, and what it has."""
    places: dict[InCheckpoint, dict[str, None]] = {}
    for decision in plan.of("applied"):
        for edit in decision.edits:
            places.setdefault(edit.change.in_checkpoint, {})[decision.patch] = None
    lines = [f"{', '.join(patches)}: {PLACES[place]}" for place, patches in places.items()]
    if "nowhere" in places:
        lines.append("applied.save(dir) writes a manifest beside the checkpoint, and hfpatch.load(dir) applies it")
    return lines


def _example(paths: Sequence[str]) -> str:
    """Return paths in short: those that differ only in list indices become one, with a star."""
    from hfpatch.model.walk import starred

    kinds: dict[str, list[str]] = {}
    for path in paths:
        kinds.setdefault(starred(path), []).append(path)
    named = [alike[0] if len(alike) == 1 else generic for generic, alike in kinds.items()]
    named.sort(key=lambda path: (path.count("."), path))
    return ", ".join(path or "the model itself" for path in named)
