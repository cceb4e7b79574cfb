"""`hfpatch.list_patches` and `hfpatch.explain`: the patches in the registry. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from hfpatch.given import TEXT, optional, want
from hfpatch.patching import registry
from hfpatch.patching.language import ANY, HEADINGS, Case, NotNeeded
from hfpatch.patching.registering.installed import Offer, offers
from hfpatch.patching.registry import Entry
from hfpatch.report import Sheet, Shown

NOT_IMPORTED = "of an installed package, not imported"
MANY = 8
"""From this number on, similar cases are counted instead of listed."""


@dataclass(frozen=True, repr=False)
class Catalogue(Shown, Sequence[Entry]):
    """The patches, as a sequence that prints as a table.

    Attributes:
        entries: The patches of hfpatch itself and those that were registered by hand.
        offers: The patches that installed packages offer, as their metadata says; none of them was imported for this.
    """

    entries: tuple[Entry, ...]
    offers: tuple[Offer, ...] = ()

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Entry]: ...
    def __getitem__(self, index: int | slice) -> Entry | Sequence[Entry]:
        return self.entries[index]

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def to_dict(self) -> dict[str, Any]:
        """Return patches (`Entry.to_dict`) and installed (id, package, version, module, fault), for JSON."""
        offered = [
            {
                "id": o.id,
                "package": o.package.name,
                "version": o.package.version,
                "module": o.module,
                "fault": fault(o),
            }
            for o in self.offers
        ]
        return {"patches": [e.to_dict() for e in self.entries], "installed": offered}

    def sheet(self) -> Sheet:
        """Return a table with a row per patch."""
        rows = [
            (f"{e.id}\n{e.origin}".strip(), e.effect, f"{e.patch.title}\n({_serves(e, few=True)})")
            for e in self.entries
        ]
        rows += [(f"{o.id}\n{o.package}", "opt-in", fault(o) or NOT_IMPORTED) for o in self.offers]
        more = f", and {len(self.offers)} of installed packages" if self.offers else ""
        return Sheet(
            f"{len(self.entries)} patches{more}",
            ("patch", "effect", "what it does (architectures)"),
            tuple(rows),
            ("hfpatch explain ID imports a patch of an installed package, and shows what it does",) * bool(self.offers),
            wide=("what it does (architectures)",),
        )


@dataclass(frozen=True, repr=False)
class Explanation(Shown):
    """The documentation of a patch."""

    entry: Entry

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as plain values, for JSON."""
        return self.entry.to_dict()

    def sheet(self) -> Sheet:
        """Return the documentation as a table."""
        entry, patch = self.entry, self.entry.patch
        rows: list[tuple[str, str]] = [
            *((("from", f"{entry.origin}, {entry.file}"),) if entry.origin else ()),
            *((("runs", "only if it is named, or its package is trusted (trust=)"),) if entry.package else ()),
            *(("not used", fault(offer)) for offer in offers().get(entry.id, ()) if entry.package is None),
            ("serves", _serves(entry)),
            (
                "effect",
                entry.effect
                + (f", logits within {patch.tolerance:g} of float32's (relative L2)" if patch.tolerance else ""),
            ),
            (
                "transformers",
                patch.transformers + (f", not needed from {patch.fixed_in}" if patch.fixed_in else ""),
            ),
        ]
        but = {name: why.reason if isinstance(why, NotNeeded) else why for name, why in patch.but.items()}
        reasons = dict.fromkeys(but.values())
        rows += [("but not", f"{', '.join(n for n, r in but.items() if r == why)}: {why}") for why in reasons]
        rows += [("option", f"{name} (default {default!r})") for name, default in patch.options.items()]
        rows += [("edit", str(edit)) for edit in patch.edits]
        rows += [("repros", text) for text in _alike(patch.repros)]
        rows += [("left alone", str(case)) for case in patch.leaves_alone]
        rows += [(heading, f"{entry.sections[heading]}\n") for heading in HEADINGS if heading in entry.sections]
        return Sheet(f"{entry.id}: {patch.title}", ("", ""), tuple(rows), wide=("",))


def list_patches(architecture: str | None = None) -> Catalogue:
    """Return the patches in the registry.

    Args:
        architecture: A `config.model_type`; None for the patches of all architectures. The patches of installed
            packages are listed in any case: metadata does not say which architectures they support.
    """
    want("list_patches", architecture=(architecture, optional(TEXT)))
    mine = registry.entries().values() if architecture is None else registry.serving(architecture)
    return Catalogue(tuple(mine), tuple(offer for offered in offers().values() for offer in offered))


def explain(patch_id: str) -> Explanation:
    """Return the documentation of a patch: the fault, the fix, its numerics, limits, cases and sources.

    This imports the patch if it is one of an installed package.

    Args:
        patch_id: Id of the patch.

    Raises:
        UnknownPatchError: No patch has this id; similar names are listed.
        PatchFileError: The patch's file does not load, or several installed packages use the id.
    """
    want("explain", patch_id=(patch_id, TEXT))
    return Explanation(registry.get(patch_id))


def _alike(cases: Iterable[Case]) -> list[str]:
    """Return the cases as text; if many differ only in the architecture, these are counted instead."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(str(replace(case, architecture="")).strip(), []).append(case)
    return [
        f"{what}: {len(group)} architectures, one case each" if len(group) > MANY else ", ".join(map(str, group))
        for what, group in groups.items()
    ]


def fault(offer: Offer) -> str:
    """Return why a patch of an installed package cannot be used; empty if it can, as far as metadata says."""
    others = [str(o) for o in offers().get(offer.id, ()) if o != offer]
    taken = registry.holder(offer.id) if offer.id in registry.entries() else " and ".join(others)
    return offer.fault or (f"{offer} cannot use the id {offer.id!r}: it is that of {taken}" if taken else "")


def _serves(entry: Entry, *, few: bool = False) -> str:
    """Return what a patch supports; with `few`, many architectures are counted instead of listed."""
    names = entry.architectures
    if ANY in names:
        return "every architecture"
    listed = f"{len(names)} architectures" if few and len(names) > MANY else ", ".join(names)
    return f"{entry.patch.serves}: proved for {listed}" if entry.patch.serves else listed
