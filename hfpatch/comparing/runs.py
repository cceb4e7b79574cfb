"""Runs of the two models: A is recorded, block by block; B is run on the values of A, and what differs is kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Generator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from transformers.utils import ModelOutput

from hfpatch.comparing.exactly import Watched
from hfpatch.comparing.lined_up import Pair, Side
from hfpatch.comparing.nested import cast, is_mask, tensors_in, with_tensors
from hfpatch.compat.autograd import version
from hfpatch.compat.hooks import after, before, drop, new_key
from hfpatch.errors import InputError
from hfpatch.model.source import REJECTIONS
from hfpatch.tracing.calls import Call, snapshot

Key = tuple[str, int]
"""Common path of a module, and number of its calls before this one."""


@dataclass
class Seen:
    """A call of a block, or of a container.

    Attributes:
        call: The call, with copies of its arguments; None for a container.
        output: A copy of what it returned.
        given: Copies of the tensors that it was passed, by name; in B, before those of A took their place.
    """

    call: Call | None
    output: Any = None
    given: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])


@dataclass
class Record:
    """A run.

    Attributes:
        calls: Calls of blocks and containers, in the order in which they began.
        ended: Their keys, in the order in which they ended.
        output: What the model returned.
    """

    calls: dict[Key, Seen] = field(default_factory=dict[Key, Seen])
    ended: list[Key] = field(default_factory=list[Key])
    output: Any = None


@dataclass(frozen=True)
class Unequal:
    """A place where B differed, bit for bit, from A on the values of A.

    Attributes:
        key: The block or container.
        role: `output` of a block; `input` that a container passed to a block, or `result` of a container.
        names: Names of the tensors that differ.
        obstacle: Why no more can be said of it, such as shapes that differ; empty if there is none.
    """

    key: Key
    role: str
    names: tuple[str, ...]
    obstacle: str = ""


def record(side: Side, *, containers: bool = True) -> Record:
    """Run a model and return its calls. The caller keeps the state of the model.

    Raises:
        InputError: The model does not run on the batch.
    """
    found, clones = Record(), _Clones()

    def enter(key: Key, module: nn.Module, args: Any, kwargs: Any, block: bool) -> None:
        found.calls[key] = seen = Seen(None)
        if block:
            seen.call = kept(module, key, clones.of(args), clones.of(kwargs))
            seen.given = dict(tensors_in({**{str(i): a for i, a in enumerate(seen.call.args)}, **seen.call.kwargs}))

    def leave(key: Key, output: Any, block: bool) -> None:
        found.calls[key].output = clones.of(output)
        found.ended.append(key)

    with followed(side, enter, leave, containers=containers):
        found.output = called(side)
    return found


def kept(module: nn.Module, key: Key, args: Any, kwargs: Any) -> Call:
    """Return a call that can be run again, with the caches as they are now."""
    caches: dict[int, tuple[Any, Any]] = {}
    snapshot((*args, *kwargs.values()), caches)
    floats = [t for _, t in tensors_in((args, kwargs)) if t.is_floating_point()]
    return Call(key[0], module, key[1], args, kwargs, caches, [(t, version(t)) for t in floats])


def on_values_of(a: Record, pair: Pair, formed: Callable[[str], bool]) -> tuple[Record, list[Unequal]]:
    """Run B on the values of A. Return its calls, those that differ with outputs, and where it differs.

    The caller keeps the state of the model.

    Args:
        a: The run of A.
        pair: The models.
        formed: True for the path of a block that keeps masks of its own form, because its attention is another one.

    Raises:
        InputError: B does not run.
    """
    found, differ, clones = Record(), list[Unequal](), _Clones()
    order = [k for k, seen in a.calls.items() if seen.call is not None]
    met: list[Key] = []
    unlike: list[Key] = []

    def enter(key: Key, module: nn.Module, args: Any, kwargs: Any, block: bool) -> Any:
        found.calls[key] = seen = Seen(None)
        if not block:
            return None
        met.append(key)
        if key not in a.calls or (twin := a.calls[key].call) is None:
            return None
        mine = dict(tensors_in(_named(args, kwargs)))
        theirs = a.calls[key].given
        own = {n for n in {**theirs, **mine} if formed(key[0]) and _other_form(theirs.get(n), mine.get(n))}
        names = tuple(n for n in {**theirs, **mine} if n not in own and not _same_cast(theirs.get(n), mine.get(n)))
        shapes = [n for n in names if n in mine and n in theirs and mine[n].shape != theirs[n].shape]
        on_the_way = met == order[: len(met)]
        if names and on_the_way:
            why = f"its shape is {_shapes(theirs, mine, shapes[0])}" if shapes else ""
            differ.append(Unequal(key, "input", names, why))
        seen.given = {n: clones.of(t) for n, t in mine.items() if n in names}
        if twin.random is not None and module.training:
            twin.random.restore()
        if any(mine[n].is_floating_point() for n in shapes):
            unlike.append(key)
            return None
        new_args = tuple(_as_a(args, twin.args, own))
        kept_own = {n.replace(k, str(i), 1) for i, k in enumerate(kwargs) for n in own if n.split(".")[0] == k}
        new_kwargs = dict(
            zip(kwargs, _as_a(list(kwargs.values()), [twin.kwargs.get(k) for k in kwargs], kept_own), strict=True)
        )
        seen.call = kept(module, key, clones.of(new_args), clones.of(new_kwargs))
        return new_args, new_kwargs

    def leave(key: Key, output: Any, block: bool) -> Any:
        seen = found.calls[key]
        found.ended.append(key)
        if key not in a.calls or (block and seen.call is None):
            return None
        theirs, mine = dict(tensors_in(a.calls[key].output)), dict(tensors_in(output))
        names = tuple(n for n in {**theirs, **mine} if not same(theirs.get(n), mine.get(n)))
        if not names:
            return None
        shapes = [n for n in names if n in mine and n in theirs and mine[n].shape != theirs[n].shape]
        why = f"its shape is {_shapes(theirs, mine, shapes[0])}" if shapes else ""
        seen.output = clones.of(output)
        if block or (set(order) == set(met) and not unlike):
            differ.append(Unequal(key, "output" if block else "result", names, why))
        return _as_a([output], [a.calls[key].output])[0]

    with followed(pair.b, enter, leave):
        found.output = called(pair.b)
    return found, differ


@contextmanager
def followed(
    side: Side, enter: Callable[..., Any], leave: Callable[..., Any], *, containers: bool = True
) -> Generator[None]:
    """Call functions at the beginning and end of each call of a block or container.

    Args:
        side: The model.
        enter: Called with key, module, arguments, keyword arguments, and True for a block; it may return others.
        leave: Called with key, output, and True for a block; it may return another output.
        containers: False for blocks alone.
    """
    key = new_key()
    counts: dict[str, int] = {}
    running: list[Key] = []
    hooked: list[nn.Module] = []

    def follow(path: str, module: nn.Module, block: bool) -> None:
        def begin(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            counts[path] = counts.get(path, -1) + 1
            running.append((path, counts[path]))
            return enter(running[-1], module, args, kwargs, block)

        def end(_module: nn.Module, _args: Any, output: Any) -> Any:
            return leave(running.pop(), output, block)

        hooked.append(module)
        before(module, begin, first=True, with_kwargs=True, key=key)
        after(module, end, key=key)

    try:
        for path, module in side.containers().items() if containers else ():
            follow(path, module, False)
        for path, module in side.blocks().items():
            follow(path, module, True)
        yield
    finally:
        for module in hooked:
            drop(module, [key])


def called(side: Side, mode: Watched | None = None, inputs: Mapping[str, Any] | None = None) -> Any:
    """Return what a model returns for its batch.

    Raises:
        InputError: The model does not run on the batch.
    """
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if mode is not None:
                stack.enter_context(mode)
            return side.model(**(inputs or side.batch.inputs))
    except REJECTIONS as error:
        raise InputError(
            f"compare: {side.name} ({type(side.model).__name__}) does not run on this batch: "
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no reason given'}"
        ) from error


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """True if two tensors have one dtype and the same values; NaN equals NaN."""
    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return one is other
    other = other.to(one.device)
    if torch.equal(one, other):
        return True
    return one.is_floating_point() and bool(((one == other) | (one.isnan() & other.isnan())).all())


def _other_form(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """True if only one of two masks is there, or only one is of floating point."""
    return a is None or b is None or a.is_floating_point() != b.is_floating_point()


def _same_cast(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """True if two tensors are the same, or B's is A's cast to its dtype."""
    if a is not None and b is not None and a.is_floating_point() and b.is_floating_point() and a.dtype != b.dtype:
        return (
            a.shape == b.shape
            and bool((is_mask(a) == is_mask(b).to(a.device)).all())
            and same(cast(a, b.dtype).masked_fill(is_mask(a), 0), b.masked_fill(is_mask(b), 0))
        )
    return same(a, b)


def _as_a(mine: Any, theirs: Any, own: Collection[str] = ()) -> Any:
    """Return B's values with A's tensors in the place of its own, in B's dtypes and on its devices.

    Args:
        mine: B's values, in a list or tuple.
        theirs: A's values, in the same order.
        own: Names of tensors that stay B's.
    """
    lent = dict(tensors_in(theirs))

    def made(path: str, tensor: torch.Tensor) -> Any:
        if path in own:
            return tensor
        if path not in lent:
            return None if _is_none(theirs, path) else tensor
        value = lent[path]
        if value.shape != tensor.shape and value.is_floating_point():
            return tensor
        dtype = tensor.dtype if tensor.is_floating_point() and value.is_floating_point() else value.dtype
        return cast(value, dtype).to(tensor.device)

    out = with_tensors(mine, made)
    if isinstance(mine, (list, tuple)) and isinstance(out, (list, tuple)):
        parts = [_same_table(m, new, t) for m, new, t in zip_longest(mine, out, theirs[: len(mine)])]
        out = parts if isinstance(out, list) else tuple(parts) if type(out) is tuple else out
    if isinstance(out, (list, tuple)) and isinstance(theirs, (list, tuple)):  # a mask that only A has
        pairs = enumerate(zip(out, theirs, strict=False))
        filled = [t if m is None and isinstance(t, torch.Tensor) and str(i) not in own else m for i, (m, t) in pairs]
        filled += list(out[len(filled) :])
        return type(out)(filled) if type(out) in (list, tuple) else out
    return out


def _same_table(mine: Any, new: Any, theirs: Any) -> Any:
    """Return B's own dict with A's tensors, where layers hand tensors on in one; other values as they are."""
    table = isinstance(mine, MutableMapping) and not isinstance(mine, ModelOutput)
    if not table or not isinstance(new, Mapping) or not isinstance(theirs, Mapping):
        return new
    own: MutableMapping[Any, Any] = mine
    values: Mapping[Any, Any] = new
    others: Mapping[Any, Any] = theirs
    for key, value in others.items():
        own[key] = values[key] if key in values else with_tensors(value, lambda _, t: t.clone())
    return own


def _is_none(value: Any, path: str) -> bool:
    """True if a value of this name is None."""
    for part in path.split("."):
        if isinstance(value, Mapping):
            value = value.get(part, value)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        elif isinstance(value, (list, tuple)) and part.isdigit() and int(part) < len(value):  # pyright: ignore[reportUnknownArgumentType]
            value = value[int(part)]  # pyright: ignore[reportUnknownVariableType]
        else:
            return False
    return value is None


def _named(args: Any, kwargs: Any) -> dict[str, Any]:
    return {**{str(i): a for i, a in enumerate(args)}, **kwargs}


def _shapes(theirs: Mapping[str, torch.Tensor], mine: Mapping[str, torch.Tensor], name: str) -> str:
    return f"{list(theirs[name].shape)} in A and {list(mine[name].shape)} in B"


def _copied(value: Any) -> Any:
    table = isinstance(value, MutableMapping) and not isinstance(value, ModelOutput)
    return dict(value) if table and not value else value  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


class _Clones:
    """Copies of tensors, one for each version of a tensor: what one block returns is what the next is passed."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}

    def of(self, value: Any) -> Any:
        """Return a value with copies of its tensors, and of a dict in it that is empty now and may be filled later."""
        made = with_tensors(value, self._one)
        if type(made) is dict:
            return {k: _copied(v) for k, v in made.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        return tuple(map(_copied, made)) if type(made) is tuple else made  # pyright: ignore[reportUnknownArgumentType]

    def _one(self, _name: str, tensor: torch.Tensor) -> torch.Tensor:
        known = self._made.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1] != version(tensor):
            self._made[id(tensor)] = known = (weakref.ref(tensor), version(tensor), tensor.detach().clone())
        return known[2]
