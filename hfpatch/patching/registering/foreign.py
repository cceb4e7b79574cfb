"""Patches of installed packages in a plan: imported only if asked for, never applied unasked, refused if they fail."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from hfpatch.errors import PatchFileError
from hfpatch.patching import registry
from hfpatch.patching.decision import Decision
from hfpatch.patching.registering.installed import Offer, offers
from hfpatch.patching.registering.patch_file import blamed
from hfpatch.patching.registry import Entry


def loaded(
    entries: Mapping[str, Entry], wanted: Collection[str], trusted: Collection[str]
) -> tuple[dict[str, Entry], list[Decision]]:
    """Import the patches of installed packages that are asked for.

    Args:
        entries: The patches of hfpatch itself and those that were registered by hand.
        wanted: Ids of patches that are asked for, of any origin.
        trusted: Ids of the patches that trusted packages offer.

    Returns:
        All patches to plan, by id; and a refusal for each that cannot be imported or whose id is taken.
    """
    found, refused = dict(entries), list[Decision]()
    for patch_id in sorted(set(wanted) & offers().keys()):
        offered = offers()[patch_id]
        origin = _packages(offered)
        if patch_id in entries:
            if patch_id in trusted:
                why = f"{' and '.join(map(str, offered))} cannot use the id {patch_id!r}: it is that of "
                refused.append(_refusal(patch_id, origin, f"{why}{registry.holder(patch_id)}, which is used"))
            continue
        try:
            found[patch_id] = registry.get(patch_id)
        except PatchFileError as error:
            refused.append(_refusal(patch_id, origin, str(error)))
    return dict(sorted(found.items())), refused


def guarded(entry: Entry, decide: Callable[[], list[Decision]]) -> list[Decision]:
    """Return the decisions about a patch with its origin. One of an installed package is opt-in, whatever its effect.

    If the code of an installed package's patch raises an error or `SystemExit`, the patch is refused.
    """
    if entry.package is None:
        return [replace(d, origin=entry.origin) for d in decide()]
    try:
        with blamed(entry.id, entry.file, f"{entry.id} of {entry.package}: "):
            decided = decide()
    except PatchFileError as error:
        return [_refusal(entry.id, entry.origin, str(error))]
    return [_opt_in(replace(d, origin=entry.origin, unasked=False)) for d in decided]


def left_out(entries: Collection[str]) -> tuple[str, ...]:
    """Return a sentence about the patches of installed packages that are not among these; empty if there are none."""
    absent = {patch_id: offered for patch_id, offered in offers().items() if patch_id not in entries}
    titles = [f"{patch_id} ({_packages(offered)})" for patch_id, offered in absent.items()]
    if not titles:
        return ()
    return (f"not imported and not planned, unless named in include= (--include): {', '.join(titles)}",)


def _packages(offered: Iterable[Offer]) -> str:
    return " and ".join(str(offer.package) for offer in offered)


def _opt_in(decision: Decision) -> Decision:
    return replace(decision, decided="opt-in", code="another-package") if decision.decided == "applied" else decision


def _refusal(patch_id: str, origin: str, why: str) -> Decision:
    return Decision(patch_id, None, "refused", why, vital=None, origin=origin, code="patch-raised")
