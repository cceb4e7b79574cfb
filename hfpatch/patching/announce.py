"""The lines that `apply` prints: problems first, then the patches that were applied, then the opt-in ones."""

from __future__ import annotations

from collections.abc import Iterable

from hfpatch.patching.decision import Decision, Decisions


def announcement(made: Decisions) -> list[str]:
    """Return two to four lines: problems, patches that were applied (where, with which effect), and patches that were
    asked for and refused, or opt-in ones.
    """
    decisions = made.decisions
    lines = [f"hfpatch: {text}" for text in _worst([d for d in decisions if d.worst])]
    by_patch: dict[str, list[Decision]] = {}
    for d in sorted(made.of("applied"), key=lambda d: not d.vital):
        by_patch.setdefault(d.title, []).append(d)
    by_id = {d.patch for ds in by_patch.values() for d in ds}
    done = [
        f"hfpatch: {patch} applied ({', '.join(sorted({str(d.effect) for d in ds}))}): "
        f"{_counted(sum(len(d.edits) for d in ds))} in {_places(ds)}; {ds[0].reason}"
        for patch, ds in by_patch.items()
    ]
    room = 3 - len(lines)
    if len(done) > room:
        shown = room - 1
        done = [*done[:shown], f"hfpatch: {'and ' if shown else ''}{_more(list(by_patch)[shown:], shown)}"]
    lines += done
    if not done:
        before = [d.title for d in decisions if d.already]
        lines.append(f"hfpatch: nothing to apply{f'; already applied: {_listed(before)}' if before else ''}")
    if otherwise := [f"{d.patch}: {d.otherwise}" for d in decisions if d.otherwise]:
        lines[-1:] = [f"{lines[-1]}; {otherwise[0]}"]
    opt_in = [d for d in made.of("opt-in") if d.suggested and not d.worst]
    refused = [d for d in made.of("refused") if d.vital is not None and d.unasked and not d.worst]
    asked = {d.title: d.reason for d in made.of("refused") if d.patch in made.named - by_id and not d.worst}
    if asked:
        title, reason = next(iter(asked.items()))
        more = f" (and {len(asked) - 1} more: print(handle))" if len(asked) > 1 else ""
        lines.append(f"hfpatch: asked for and refused: {title}: {reason}{more}")
    elif opt_in:
        lines.append(f"hfpatch: opt-in, not applied: {_listed(d.title for d in opt_in)} ({opt_in[0].hint})")
    elif refused and not done:
        lines.append(f"hfpatch: refused: {refused[0].title}: {refused[0].reason}")
    if len(lines) < 2:
        lines.append("hfpatch: print(handle) shows the plan; .verify(batch) proves it; .revert() undoes it")
    return lines


def _counted(edits: int) -> str:
    return f"{edits} edit" if edits == 1 else f"{edits} edits"


def _places(decisions: Iterable[Decision]) -> str:
    return ", ".join(dict.fromkeys(d.submodel or "the model" for d in decisions))


def _worst(decisions: list[Decision]) -> list[str]:
    """Return at most two lines about faults that can occur and are not fixed, and edits that are gone."""
    lines = list(dict.fromkeys(d.worst_news for d in decisions))
    return lines if len(lines) <= 2 else [lines[0], f"{lines[1]} (and {len(lines) - 2} more such: print(handle))"]


def _more(patches: list[str], shown: int) -> str:
    return f"{len(patches)}{' more' if shown else ''} applied: {', '.join(patches)}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))
