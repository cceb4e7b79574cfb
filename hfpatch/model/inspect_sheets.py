"""A `ModelInfo` as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpatch.report import Sheet

if TYPE_CHECKING:
    from hfpatch.model.eps import NormKind
    from hfpatch.model.facts import Attention, Embedding
    from hfpatch.model.inspect import ModelInfo


def sheets(info: ModelInfo) -> tuple[Sheet, ...]:
    """Facts, submodels where there are several, norms, attention; hazards as notes below."""
    out = [_facts(info)]
    if len(info.submodels) > 1:
        rows = tuple((s.path or "(root)", f"{s.cls}\n  {s.architecture}", f"{s.parameters:,}") for s in info.submodels)
        out.append(Sheet("Submodels", ("path", "class and architecture", "parameters"), rows, wide=("path",)))
    if info.norms:
        out.append(Sheet("Norms", ("path", "eps", "from", "count"), _norms(info.norms), wide=("path", "from")))
    if info.attention:
        rows = tuple((a.path or "(root)", a.implementation, _others(a), a.note) for a in info.attention)
        noted = any(a.note for a in info.attention)
        columns = ("path", "attention", "accepts too", "note") if noted else ("path", "attention", "accepts too")
        out.append(Sheet("Attention", columns, tuple(r[: len(columns)] for r in rows), wide=("path", *columns[2:])))
    if info.hazards:
        out.append(Sheet("Hazards", (), (), tuple(f"- {h}" for h in info.hazards)))
    return tuple(out)


def _facts(info: ModelInfo) -> Sheet:
    dtypes = ", ".join(f"{name} {size:,}" for name, size in info.dtypes.items())
    rows = [("parameters", f"{info.parameters:,} ({_short(info.parameters)}): {dtypes}")]
    rows.append(("trainable", "all" if info.trainable == info.parameters else f"{info.trainable:,}"))
    rows.append(("weights", "loaded" if info.weights_loaded else "not loaded"))
    rows.append(("declared dtype", info.declared_dtype or "none"))
    if info.quantization:
        rows.append(("quantization", info.quantization))
    rows.extend(("embedding", _embedding(e)) for e in info.embeddings)
    rows.extend(("head", f"{h.path}, {'tied to the embedding' if h.tied else 'weight of its own'}") for h in info.heads)
    rows.extend(
        ("layers", f"{s.layers} in {s.path}" + (f", stream in {s.dtype}" if s.dtype else "")) for s in info.stacks
    )
    rows.extend(("wrapped in", f"{w.kind} at {w.path or '(root)'}") for w in info.wrappers)
    rows.extend(("adapter", f"{a.name} ({a.kind}){'' if a.active else ', not active'}") for a in info.adapters)
    title = f"{info.cls} ({info.architecture})" if info.architecture else info.cls
    return Sheet(f"{title}  {info.name}".rstrip(), ("", " "), tuple(rows), wide=(" ",))


def _embedding(e: Embedding) -> str:
    size = f", {e.vocabulary:,} x {e.width:,}" if e.vocabulary and e.width else ""
    scale = "" if e.scale is None else f", x {e.scale:g} ({e.scale_at})"
    return f"{e.path} ({e.cls}){size}{scale}"


def _others(row: Attention) -> str:
    return ", ".join(name for name in row.accepts if name != row.implementation) or "-"


def _norms(kinds: tuple[NormKind, ...]) -> tuple[tuple[str, ...], ...]:
    """One row for the norms of a stack's layers, or of one parent, that share eps and source."""
    rows: dict[tuple[str, str, str], list[NormKind]] = {}
    for kind in kinds:
        eps = "-" if kind.eps is None else f"{kind.eps:g}"
        source = f"{kind.source}, changed from {kind.as_built:g}" if kind.changed else kind.source
        rows.setdefault((_parent(kind.path), eps, source), []).append(kind)
    return tuple(
        (
            "\n  ".join([parent or "(root)", *(k.path[len(parent) :].lstrip(".") for k in group)]),
            eps,
            source,
            f"{sum(k.count for k in group):,}",
        )
        for (parent, eps, source), group in rows.items()
    )


def _parent(path: str) -> str:
    layer, star, _ = path.rpartition(".*.")
    return f"{layer}.*" if star else path.rpartition(".")[0]


def _short(count: int) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return str(count)
