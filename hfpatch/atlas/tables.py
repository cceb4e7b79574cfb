"""The atlas as tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hfpatch.report import Sheet

COLUMNS = ("architecture", "parameters", "embedding", "head", "layers", "experts", "eps of norms", "attention")


def sheets(atlas: Mapping[str, Any]) -> tuple[Sheet, ...]:
    """How many there are of each kind; one row for each that builds; those that do not, with the reason.

    Args:
        atlas: As `Atlas.to_dict()` gives it.
    """
    rows = atlas["architectures"]
    built = {name: row for name, row in rows.items() if "reason" not in row}
    title = f"{len(built)} of {len(rows)} architectures, transformers {atlas['versions']['transformers']}"
    out = [
        Sheet(title, ("what", "architectures"), tuple(kinds(rows)), wide=("what",)),
        Sheet("Facts", COLUMNS[:5], tuple((n, *cells(r)[:4]) for n, r in built.items()), wide=COLUMNS[2:5]),
    ]
    if failed := tuple((name, row["reason"]) for name, row in rows.items() if "reason" in row):
        out.append(Sheet("Not built from their default config", ("architecture", "why"), failed, wide=("why",)))
    return tuple(out)


def cells(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """One architecture: everything in `COLUMNS` but its name."""
    return (
        f"{facts['parameters']:,}",
        _lines(f"{e['path']}{_scale(e)}" for e in facts["embeddings"]),
        _lines(f"{h['path']}{', tied' if h['tied'] else ''}" for h in facts["heads"]),
        _lines(_layers(found) for found in facts["layers"]),
        _lines(dict.fromkeys(_experts(e) for e in facts["experts"])),
        _lines(sorted({f"{_number(n['eps'])} {n['source']}" for n in facts["norms"]})),
        ", ".join(dict.fromkeys(name for a in facts["attention"] for name in a["accepts"])),
    )


def kinds(rows: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """How many architectures there are of each kind."""
    built = [row for row in rows.values() if "reason" not in row]

    def count(holds: Callable[[Mapping[str, Any]], bool]) -> str:
        return str(sum(holds(row) for row in built))

    def mixing(kind: str) -> str:
        return count(lambda r: any(m["kind"] == kind for x in r["layers"] for k in x["kinds"] for m in k["mixers"]))

    mixers = ("attention", "linear attention", "mamba", "rwkv", "recurrent", "convolution")
    return [
        *((f"in the {m} mapping", str(sum(m in r["mappings"] for r in rows.values()))) for m in _MAPPINGS),
        ("built from the default config", str(len(built))),
        *(
            (f"with layers that see {m}", count(lambda r, m=m: any(x["modality"] == m for x in r["layers"])))
            for m in _SEEN
        ),
        *((f"with {kind} layers", mixing(kind)) for kind in mixers),
        ("with routed experts", count(lambda r: bool(r["experts"]))),
        ("with fused projections", count(lambda r: bool(r["fused"]))),
        ("with a scale on the embedding", count(lambda r: any(e["scale"] not in (None, 1.0) for e in r["embeddings"]))),
        ("with a tied head", count(lambda r: any(h["tied"] for h in r["heads"]))),
        ("with buffers in no checkpoint", count(lambda r: bool(r["buffers"]))),
    ]


_MAPPINGS = ("causal", "multimodal", "seq2seq")
_SEEN = ("text", "vision", "audio")


def _lines(texts: Any) -> str:
    return "\n".join(texts) or "-"


def _scale(embedding: Mapping[str, Any]) -> str:
    return f" x {embedding['scale']:g}" if embedding["scale"] not in (None, 1.0) else ""


def _number(eps: float | None) -> str:
    return "-" if eps is None else f"{eps:g}"


def _layers(found: Mapping[str, Any]) -> str:
    mixed: dict[str, int] = {}
    for kind in found["kinds"]:
        name = " + ".join(dict.fromkeys(m["kind"] for m in kind["mixers"])) or "feed-forward"
        mixed[name] = mixed.get(name, 0) + len(kind["layers"])
    told = "" if list(mixed) == ["attention"] else f": {', '.join(f'{n} {name}' for name, n in mixed.items())}"
    return f"{found['layers']} {found['modality']} in {found['path']}{told}"


def _experts(e: Mapping[str, Any]) -> str:
    return f"{e['per_token'] or '?'} of {e['count']} by {(e['router'] or '?').rpartition('.')[2]}"
