"""The result of `inspect`, as data and as tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hfpatch.inspecting.buffers import Buffers
from hfpatch.inspecting.eps import NormKind
from hfpatch.inspecting.experts import Experts
from hfpatch.inspecting.facts import Adapter, Attention, Embedding, Head, Wrapper
from hfpatch.inspecting.fused import Fused
from hfpatch.inspecting.layers import LayerKind, LayerList
from hfpatch.report import Sheet, Shown


@dataclass(frozen=True)
class SubmodelInfo:
    """A transformers model inside: its path, architecture, class and number of parameters (shared ones once)."""

    path: str
    architecture: str
    cls: str
    parameters: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON: path, architecture, class, parameters."""
        return {"path": self.path, "architecture": self.architecture, "class": self.cls, "parameters": self.parameters}


@dataclass(frozen=True)
class StackInfo:
    """A residual stream: the path and length of its list of layers, and the dtype of the stream."""

    submodel: str
    path: str
    layers: int
    dtype: str | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON: submodel, path, layers, dtype."""
        return dict(vars(self))


@dataclass(frozen=True, repr=False)
class ModelInfo(Shown):
    """Facts about a model. Prints as tables; `to_dict()` gives the same as JSON.

    `parameters` counts each shared parameter once, as `model.parameters()` does; `dtypes` splits it by dtype. Those
    that a quantiser packed count as many as they unpack to, and stand there by library and format: `bitsandbytes nf4`.
    `weights_loaded` is False if every parameter is on meta.
    """

    cls: str
    architecture: str | None
    name: str
    parameters: int
    dtypes: dict[str, int]
    trainable: int
    weights_loaded: bool
    declared_dtype: str | None
    quantization: str | None
    submodels: tuple[SubmodelInfo, ...]
    embeddings: tuple[Embedding, ...]
    heads: tuple[Head, ...]
    layers: tuple[LayerList, ...]
    stacks: tuple[StackInfo, ...]
    norms: tuple[NormKind, ...]
    attention: tuple[Attention, ...]
    experts: tuple[Experts, ...]
    fused: tuple[Fused, ...]
    buffers: tuple[Buffers, ...]
    wrappers: tuple[Wrapper, ...]
    adapters: tuple[Adapter, ...]
    hazards: tuple[str, ...]
    float16: tuple[str, ...] = ()
    """For each stack of layers, what patches do about its stream in float16; empty if that was not looked up."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON, with stable keys.

        class, architecture (None for a hand-written composite), name (hub name or directory), parameters,
        dtypes {dtype: parameters}, trainable, weights_loaded, declared_dtype, quantization, submodels,
        embeddings, heads, layers, stacks, norms, attention, experts, fused, buffers (those in no checkpoint),
        wrappers, adapters, hazards, float16; lists hold the `to_dict()` of each item, the last two sentences.
        """
        values = {"class" if k == "cls" else k: v for k, v in vars(self).items()}
        values["dtypes"] = dict(self.dtypes)
        return {
            k: [i if isinstance(i, str) else i.to_dict() for i in v] if isinstance(v, tuple) else v
            for k, v in values.items()
        }

    def sheets(self) -> tuple[Sheet, ...]:
        """Return the tables: facts, submodels, layers, experts, fused projections, norms, attention, hazards."""
        return _sheets(self)

    def sheet(self) -> Sheet:
        """Return the first table: the facts with one line each."""
        return self.sheets()[0]


def _sheets(info: ModelInfo) -> tuple[Sheet, ...]:
    """Return the tables that have rows; submodels only if there are several."""
    out = [_facts(info)]
    if len(info.submodels) > 1:
        rows = tuple((s.path or "(root)", f"{s.cls}\n  {s.architecture}", f"{s.parameters:,}") for s in info.submodels)
        out.append(Sheet("Submodels", ("path", "class and architecture", "parameters"), rows, wide=("path",)))
    if info.layers:
        columns = ("path", "layers", "of", "what mixes tokens")
        out.append(Sheet("Layers", columns, tuple(map(_layers, info.layers)), wide=("path", columns[-1])))
    if info.experts:
        columns = ("path", "experts", "router", "beside")
        out.append(Sheet("Experts", columns, tuple(map(_experts, info.experts)), wide=("path", "router", "beside")))
    if info.fused:
        rows = tuple((f.path, ", ".join(f.parts), f"{f.count:,}") for f in info.fused)
        out.append(Sheet("Fused projections", ("path", "parts", "count"), rows, wide=("path", "parts")))
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
    rows.extend(("head", f"{h.path}, {_tie(h)}") for h in info.heads)
    rows.extend(("residual stream", f"in {s.dtype}, through {s.path}") for s in info.stacks if s.dtype)
    if info.float16:
        rows.append(("in float16", "\n".join(info.float16)))
    rows.extend(("not in a checkpoint", line) for line in _buffers(info.buffers))
    rows.extend(("wrapped in", f"{w.kind} at {w.path or '(root)'}") for w in info.wrappers)
    rows.extend(("adapter", _adapter(a)) for a in info.adapters)
    title = f"{info.cls} ({info.architecture})" if info.architecture else info.cls
    return Sheet(f"{title}  {info.name}".rstrip(), ("", " "), tuple(rows), wide=(" ",))


def _adapter(a: Adapter) -> str:
    state = "" if a.active else ", not active"
    if a.zero:
        changes = "changes nothing so far" if a.zero == a.layers else "changes only the others"
        state += f", a half is 0 in {a.zero} of {a.layers} layers: it {changes}"
    if a.merge is not None:
        state += f", {a.merge}"
    return f"{a.name} ({a.kind}){state}"


def _tie(head: Head) -> str:
    if head.apart:
        return f"weight of its own, no longer tied to {head.apart} (a copy of one of them trains)"
    return "tied to the embedding" if head.tied else "weight of its own"


def _embedding(e: Embedding) -> str:
    size = f", {e.vocabulary:,} x {e.width:,}" if e.vocabulary and e.width else ""
    scale = "" if e.scale is None else f", x {e.scale:g} ({e.scale_at})"
    return f"{e.path} ({e.cls}){size}{scale}"


def _buffers(buffers: tuple[Buffers, ...]) -> list[str]:
    """Return one line for rotary buffers and one for the others, which are counted by name."""
    rotary = [b.path for b in buffers if b.rotary and not b.path.endswith("original_inv_freq")]
    others: dict[str, int] = {}
    for b in buffers:
        if not b.rotary:
            others[b.path.rpartition(".")[2]] = others.get(b.path.rpartition(".")[2], 0) + b.count
    lines = [f"rotary: {', '.join(rotary)}"] if rotary else []
    if others:
        lines.append(", ".join(name if n == 1 else f"{name} ({n})" for name, n in others.items()))
    return lines


def _layers(found: LayerList) -> tuple[str, ...]:
    kinds = [_kind(k, len(found.kinds) > 1) for k in found.kinds]
    return (found.path, str(found.layers), found.modality, "\n".join(kinds))


def _kind(kind: LayerKind, several: bool) -> str:
    classes = ", ".join(dict.fromkeys(cls for _, cls in kind.mixers)) or kind.cls
    return f"{kind.kinds}: {classes}" + (f" in {spans(kind.layers)}" if several else "")


def spans(indices: tuple[int, ...]) -> str:
    """Return `0-2, 4` for 0, 1, 2, 4; of more than four runs only the first two and the last: `3, 7, ... 31`."""
    runs: list[list[int]] = []
    for i in indices:
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    told = [str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs]
    return ", ".join(told) if len(told) <= 4 else f"{told[0]}, {told[1]}, ... {told[-1]}"


def _experts(e: Experts) -> tuple[str, ...]:
    chosen = f"{e.per_token} of " if e.per_token else ""
    names = f" ({', '.join(e.parameters)})" if e.parameters else ""
    beside = e.shared or "-"
    return (f"{e.path}{names}", f"{chosen}{e.count}, {e.layers} layers", f"{e.router or '-'}", beside)


def _others(row: Attention) -> str:
    return ", ".join(name for name in row.accepts if name != row.implementation) or "-"


def _norms(kinds: tuple[NormKind, ...]) -> tuple[tuple[str, ...], ...]:
    """Return one row for the norms of a list's layers, or of one parent, that share eps and source."""
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
