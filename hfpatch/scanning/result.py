"""The result of a scan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hfpatch.deprecated import warn
from hfpatch.report.sheet import Sheet, Shown
from hfpatch.untrusted.ordinary import brief

FINDINGS_SHOWN = 20
NOTES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Found:
    """One finding or note.

    Attributes:
        kind: Of a finding `NaN`, `Inf`, `broken file`, `broken index`, `missing index`, `missing shard`,
            `unknown shard`, `missing tensor`, `unknown tensor`, `duplicate tensor` or `wrong size`; with `model=`
            `keys do not land`, `parameters not filled`, `wrong shape`, `renaming` or `adapter does not fit`; of a note
            `quantised`, `beyond float16`, `small for float16`, `outlier`, `all zero`, `beside shards`, `no tensor`,
            `not scanned` or `adapter`.
        file: The file, relative to the scanned path.
        tensor: Name of the tensor; empty for a finding about a file.
        text: The facts as text.
        figures: The facts as numbers, by kind: NaN `count`; Inf `positive`, `negative`; beyond float16 `count`,
            `largest`; quantised `count`; small for float16 `share`; outlier `largest`, `rms`, `ratio`; all zero
            `count`.
    """

    kind: str
    file: str
    tensor: str
    text: str
    figures: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class Census:
    """Number of the tensors of one dtype, of their elements, and of their bytes."""

    tensors: int
    parameters: int
    bytes: int


@dataclass(frozen=True, repr=False)
class ScanReport(Shown):
    """The result of `hfpatch.scan`; true if there are findings. It prints itself as a table.

    Attributes:
        path: The scanned path.
        files: Number of weight files.
        findings: The faults; empty if there are none.
        notes: Facts worth knowing that are no fault, by kind, largest first.
        census: Tensors by dtype (names as in safetensors), most bytes first; without files whose header is broken.
    """

    path: str
    files: int
    findings: tuple[Found, ...]
    notes: tuple[Found, ...]
    census: Mapping[str, Census]

    def __bool__(self) -> bool:
        return bool(self.findings)

    @property
    def quantised(self) -> bool:
        """True if a config beside the files says that integers in them are codes: then a value is no parameter."""
        return any(f.kind == "quantised" for f in self.notes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values under stable keys: path, files, findings, notes, census."""
        return {
            "path": self.path,
            "files": self.files,
            "findings": [asdict(f) for f in self.findings],
            "notes": [asdict(f) for f in self.notes],
            "census": {dtype: asdict(count) for dtype, count in self.census.items()},
        }

    def sheet(self) -> Sheet:
        """Return a table: findings first, then the first notes of each kind, and the census below."""
        rows = [_row("failed", f) for f in self.findings[:FINDINGS_SHOWN]]
        if len(self.findings) > FINDINGS_SHOWN:
            rows.append(("", "", f"and {_number(len(self.findings) - FINDINGS_SHOWN, 'more finding')}; --json has all"))
        for kind in dict.fromkeys(f.kind for f in self.notes):
            notes = [f for f in self.notes if f.kind == kind]
            rows += [_row("note", f) for f in notes[:NOTES_SHOWN]]
            if len(notes) > NOTES_SHOWN:
                rows.append(("", kind, f"and {len(notes) - NOTES_SHOWN:,} more; --json has all"))
        found = _number(len(self.findings), "finding") if self.findings else "nothing wrong"
        unit = "value" if self.quantised else "parameter"
        census = [
            f"{dtype}: {_number(c.tensors, 'tensor')}, {_number(c.parameters, unit)}, {_size(c.bytes)}"
            for dtype, c in self.census.items()
        ]
        title = f"{self.path}: {found} in {_number(self.files, 'file')}"
        return Sheet(title, ("", "", "where, and what"), tuple(rows), tuple(census), wide=("where, and what",))

    def to_sheet(self) -> Sheet:
        """See `sheet`; the old name."""
        warn("ScanReport.to_sheet() is sheet() now, as everything has it; the old name will go in a later release")
        return self.sheet()


def _row(mark: str, found: Found) -> tuple[str, str, str]:
    where = f"{brief(found.tensor)}, {brief(found.file)}" if found.tensor else brief(found.file)
    return (mark, found.kind, f"{where}: {found.text}")


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return _number(count, "byte")
