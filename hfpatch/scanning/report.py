"""What a scan found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hfpatch.report.sheet import Sheet

SHOWN = 20


@dataclass(frozen=True)
class Found:
    """One thing that was found.

    Attributes:
        kind: `NaN`, `Inf`, `broken file`, `missing shard`, `missing tensor`, `unknown tensor`, `duplicate tensor`,
            `wrong size`; among the notes `beyond float16`, `all zero`, `outlier`.
        file, tensor: Where; the tensor is empty for what is about a file.
        text: The facts.
    """

    kind: str
    file: str
    tensor: str
    text: str


@dataclass(frozen=True)
class Census:
    """Tensors of one dtype: how many, and their parameters and bytes together."""

    tensors: int
    parameters: int
    bytes: int


@dataclass(frozen=True)
class ScanReport:
    """The result of `hfpatch.scan`; true if it holds findings.

    Attributes:
        path: What was scanned.
        files: Weight files that were read.
        findings: What is wrong: values that are not finite, broken files, an index that does not fit.
        notes: What is worth knowing: values that float16 cannot hold, tensors of nothing but zeros (a fresh LoRA B is
            one), outliers against the tensor's own RMS.
        census: By dtype, as the format names it.
    """

    path: str
    files: int
    findings: tuple[Found, ...]
    notes: tuple[Found, ...]
    census: Mapping[str, Census]

    def __bool__(self) -> bool:
        return bool(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain values under stable keys."""
        return {
            "path": self.path,
            "files": self.files,
            "findings": [asdict(f) for f in self.findings],
            "notes": [asdict(f) for f in self.notes],
            "census": {dtype: asdict(count) for dtype, count in self.census.items()},
        }

    def to_sheet(self) -> Sheet:
        """Findings first, then the largest notes of each kind, and the census below."""
        rows = [_row(f, "failed") for f in self.findings[:SHOWN]]
        if len(self.findings) > SHOWN:
            rows.append(("", "", f"and {len(self.findings) - SHOWN:,} more findings (--json has all)"))
        for kind in dict.fromkeys(f.kind for f in self.notes):
            mine = [f for f in self.notes if f.kind == kind]
            rows += [_row(f, "") for f in mine[:5]]
            if len(mine) > 5:
                rows.append(("", kind, f"and {len(mine) - 5:,} more"))
        count = f"{len(self.findings):,} finding{'' if len(self.findings) == 1 else 's'}"
        census = [
            f"{dtype}: {c.tensors:,} tensors, {c.parameters:,} parameters, {c.bytes / 2**20:,.1f} MiB"
            for dtype, c in self.census.items()
        ]
        files = f"{self.files} file{'' if self.files == 1 else 's'}"
        title = f"{self.path}: {count if self.findings else 'nothing wrong'} in {files}"
        return Sheet(title, ("", "", "where, and what"), tuple(rows), tuple(census), wide=("where, and what",))

    def __str__(self) -> str:
        return self.to_sheet().to_text()

    def _repr_html_(self) -> str:
        return self.to_sheet().to_html()


def _row(found: Found, style: str) -> tuple[str, str, str]:
    where = f"{found.tensor} in {found.file}" if found.tensor else found.file
    return (style, found.kind, f"{where}: {found.text}")
