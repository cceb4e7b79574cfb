"""Causes tried: a block of B is run again with A's value in the place of B's, and must then agree with A's block."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from hfpatch.comparing.differing import Fact
from hfpatch.comparing.distance import LEAST, VISIBLE, Distance, Exactly, apart
from hfpatch.comparing.exactly import Watched, again
from hfpatch.comparing.lined_up import Pair, common
from hfpatch.comparing.nested import tensors_in
from hfpatch.comparing.runs import Record, Unequal
from hfpatch.comparing.weights import tensors, values
from hfpatch.compat import peft
from hfpatch.compat.implementation import note
from hfpatch.compat.modules import children
from hfpatch.compat.quantising.quantised import Coded
from hfpatch.model.source import REJECTIONS
from hfpatch.model.walk import inside
from hfpatch.patching.record import logged
from hfpatch.patching.writing import suspended


def here(facts: Iterable[Fact], found: Unequal, pair: Pair) -> list[Fact]:
    """Return the facts that lie at a place: inside a block, or of a container and its configs."""
    path = found.key[0]
    if found.role == "output":
        held = [f for f in facts if f.kind not in ("config", "dtype") and inside(f.path, path) and f.path]
        around = [f for f in facts if f.kind == "mode" and inside(path, f.path)]
        return [*held, *around, *(f for f in facts if f.kind == "config")]
    blocks = pair.blocks
    return [f for f in facts if f.kind != "dtype" and not any(inside(f.path, b) for b in blocks)]


def tried(exactly: Exactly, found: Unequal, distance: Distance, facts: Sequence[Fact], alone: int) -> list[Fact]:
    """Return the fewest facts with which a place agrees: those of one kind and name alone, or all; none if none do.

    Args:
        exactly: Runs the place in float64.
        found: The place where A and B part.
        distance: How far.
        facts: Those that lie there, the likeliest first.
        alone: Number of groups that are tried alone.
    """
    groups: dict[tuple[str, ...], list[Fact]] = {}
    for fact in facts:
        key = (fact.kind,) if fact.kind in ("dropout", "mode", "adapter", "attention") else (fact.kind, fact.name)
        key = (fact.kind, fact.place) if fact.kind in ("weight", "class", "buffer") else key
        groups.setdefault(key, []).append(fact)
    wanted = list(groups.values())
    for group in wanted[:alone]:
        if _agrees(exactly, found, distance, group):
            return group
    for kind in dict.fromkeys(f.kind for f in facts):
        of_kind = [f for f in facts if f.kind == kind]
        if len(of_kind) > 1 and _agrees(exactly, found, distance, of_kind):
            return of_kind
    return list(facts) if len(wanted) > 1 and _agrees(exactly, found, distance, facts) else []


def _agrees(exactly: Exactly, found: Unequal, distance: Distance, facts: Sequence[Fact]) -> bool:
    """True if a place of B agrees with A's once these facts are as in A.

    Where float64 shows no difference, the block is run as it is. A patch that only A has is then taken from A, which
    must agree with B.
    """
    pair = exactly.pair
    rounding = distance.rounding if distance.rounding is not None and math.isfinite(distance.rounding) else 0.0
    limit = max(LEAST, VISIBLE * rounding)
    from_a = all(f.kind == "patch" and f.b == "not applied" for f in facts)
    try:
        with as_in_a(pair, facts) as lent:
            if distance.exact is not None and distance.exact > limit:
                a, b = (exactly.results(s, found, rounded=True, lent=t) for s, t in ((pair.a, {}), (pair.b, lent)))
            elif found.role != "output":
                return False
            else:
                side = exactly.a if from_a else exactly.b
                mine = _output(side, found) if side.calls[found.key].call is None else _again(side, found, lent)
                a, b, limit = mine, _output(exactly.b if from_a else exactly.a, found), rounding
    except REJECTIONS:
        return False
    one, other = ({n: t for n, t in side.items() if n in found.names} for side in (a, b))
    return apart(one, other, exactly.real(found.key)) <= max(limit, LEAST)


def _output(record: Record, found: Unequal) -> dict[str, torch.Tensor]:
    return dict(tensors_in(record.calls[found.key].output))


def _again(record: Record, found: Unequal, lent: dict[int, torch.Tensor]) -> dict[str, torch.Tensor]:
    call = record.calls[found.key].call
    return {} if call is None else dict(tensors_in(again(call, Watched(lent))))


@contextmanager
def as_in_a(pair: Pair, facts: Iterable[Fact]) -> Generator[dict[int, torch.Tensor]]:
    """Let these facts be in B as they are in A, inside the context.

    Returns:
        Tensors of A to read in the place of B's, by the id of those.

    Raises:
        ValueError: A fact cannot be tried.
    """
    mine, theirs = pair.a.modules(), pair.b.modules()
    of_a, of_b = tensors(pair.a), tensors(pair.b)
    lent: dict[int, torch.Tensor] = {}
    undo: list[Callable[[], None]] = []
    patches = {(f.path, f.name): pair.a if f.b == "not applied" else pair.b for f in facts if f.kind == "patch"}
    try:
        with ExitStack() as stack:
            for side in (pair.a, pair.b):
                mine_too = [(m, r) for p, m, r in logged(side.root) if patches.get((common(p), r.patch)) is side]
                stack.enter_context(suspended(side.root, mine_too))
            for fact in facts:
                key = (fact.path, fact.name, fact.kind == "buffer")
                if fact.kind in ("weight", "buffer"):
                    if key not in of_a or key not in of_b or of_a[key].shape != of_b[key].shape:
                        raise ValueError(fact.place)
                    there = of_b[key]
                    if isinstance(there, Coded):  # its forward reads codes
                        raise ValueError(fact.place)
                    lent[id(there)] = values(of_a[key]).detach().to(there.device)
                elif fact.kind in ("eps", "attribute"):
                    undo.append(_set(theirs[fact.path].__dict__, fact.name, fact.values[0]))
                elif fact.kind == "dropout":  # of the module, and of the one that may drop with its rate
                    undo += [
                        _set(theirs[p].__dict__, "training", mine[p].training)
                        for p in (fact.path, fact.path.rpartition(".")[0])
                    ]
                elif fact.kind == "mode":
                    undo += [
                        _set(m.__dict__, "training", mine[p].training)
                        for p, m in theirs.items()
                        if p in mine and inside(p, fact.path)
                    ]
                elif fact.kind == "class":
                    undo.append(_body(pair, fact))
                elif fact.kind == "adapter":
                    undo.append(_adapters(pair, fact.path))
                elif fact.kind == "attention":
                    undo.append(_attention(theirs[fact.path], fact.a, fact.b))
                elif fact.kind == "config":
                    undo.append(_config(theirs[fact.path], fact))
                elif fact.kind != "patch":
                    raise ValueError(fact.place)
            yield lent
    finally:
        for back in reversed(undo):
            back()


def _set(table: Any, name: str, value: Any) -> Callable[[], None]:
    """Set a value in a table, and return what puts the present one back."""
    there, was = name in table, table.get(name)

    def back() -> None:
        if there:
            table[name] = was
        else:
            table.pop(name, None)

    if isinstance(value, str) and value == "not there":
        table.pop(name, None)
    else:
        table[name] = value
    return back


def _body(pair: Pair, fact: Fact) -> Callable[[], None]:
    body, own = fact.values
    module = pair.b.modules()[fact.path]
    if isinstance(body, type) and not any(True for _ in module.parameters()):
        outer, _, name = fact.path.rpartition(".")
        return _set(children(pair.b.modules()[outer]), name, pair.a.modules()[fact.path])
    if isinstance(body, type):
        was = type(module)
        module.__class__ = body

        def back() -> None:
            module.__class__ = was

        return back
    table = module.__dict__
    if body is None:
        there = table[fact.name]
        del table[fact.name]

        def put() -> None:
            table[fact.name] = there

        return put
    del own
    return _set(table, fact.name, body.__get__(module))


def _adapters(pair: Pair, path: str) -> Callable[[], None]:
    """Switch the adapters of one layer of B on or off as in A, where they are off if it has none."""
    one, other = (
        next(
            (m for p, m in s.survey.modules.items() if common(p) == path and hasattr(type(m), "adapter_layer_names")),
            None,
        )
        for s in (pair.a, pair.b)
    )
    layer: Any = other
    twin: Any = one
    if layer is None or layer.merged_adapters or (twin is not None and twin.merged_adapters):
        raise ValueError(path)
    active, off = list(layer.active_adapters), peft.is_off(layer)
    if twin is None:
        peft.switch(layer, active, off=True)
    else:
        peft.switch(layer, list(twin.active_adapters), off=peft.is_off(twin))
    return lambda: peft.switch(layer, active, off=off)


def _attention(module: nn.Module, wanted: str, now: str) -> Callable[[], None]:
    config: Any = module.config
    note(config, wanted)
    return lambda: note(config, now)


def _config(module: Any, fact: Fact) -> Callable[[], None]:
    holder: Any = module.config
    *outer, name = fact.name.split(".")
    for part in outer:
        holder = holder[part] if isinstance(holder, dict) else getattr(holder, part)
    return _set(holder if isinstance(holder, dict) else vars(holder), name, fact.values[0])
