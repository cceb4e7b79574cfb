"""How far B is from A at one place, and how far rounding explains: both run again in float64 on the same values.

If both compute one function, their distance is at most the sum of their distances from it without rounding (the
triangle inequality). So the bound is measured, and no factor is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hfpatch.comparing.exactly import InFloat64, again, arguments_of
from hfpatch.comparing.lined_up import Pair, Side
from hfpatch.comparing.nested import MASK, cast, is_mask, tensors_in, with_tensors
from hfpatch.comparing.runs import Key, Record, Unequal, called, followed
from hfpatch.model.rebuilt import main_dtype
from hfpatch.model.source import REJECTIONS

VISIBLE = 1e-3
"""Share of the rounding from which a difference in float64 counts: float64 has 5e8 times the digits of float32."""
LEAST = 1e-12
"""Relative difference in float64 below which two functions count as one."""

Tensors = dict[str, torch.Tensor]
Lent = Mapping[int, torch.Tensor]
"""Tensors that are read in the place of others, by the id of those."""


@dataclass(frozen=True)
class Distance:
    """Relative L2 distances at one place, each divided by the size of A's result.

    Attributes:
        difference: Between the results of A and B; infinite if only one of them is finite somewhere.
        rounding: What rounding explains: the distances of A and of B from their own float64 runs, and what rounding the
            wider weights and inputs to the narrower dtype changes. None if a float64 run failed.
        exact: Between A and B in float64, with the same rounded weights and inputs. None as above.
        rounding_a, rounding_b: The distances of A and of B from their own float64 runs.
        narrow: Operators that ran in float32 in the float64 runs, because they have no float64 version.
        why: Why a float64 run failed.
        padding: As `difference`, with the positions of padding, which the others leave out.
    """

    difference: float
    rounding: float | None = None
    exact: float | None = None
    rounding_a: float | None = None
    rounding_b: float | None = None
    narrow: tuple[str, ...] = ()
    why: str = ""
    padding: float = 0.0

    @property
    def verdict(self) -> str:
        """`parts`, `below rounding` (another function, hidden by rounding), `rounding`, or `not measured`."""
        if not math.isfinite(self.difference):
            return "parts"
        if self.rounding is None or self.exact is None:
            return "not measured"
        other = self.exact > max(LEAST, VISIBLE * self.rounding)
        if self.difference > self.rounding * (1 + 1e-6) + LEAST:
            return "parts"
        return "below rounding" if other else "rounding"


class Exactly:
    """Runs blocks and containers of both models in float64, on the values of A.

    Args:
        pair: The models.
        a: A's run.
        b: B's run on A's values.
    """

    def __init__(self, pair: Pair, a: Record, b: Record) -> None:
        self.pair, self.a, self.b = pair, a, b
        self.narrow: set[str] = set()
        widths = {s.name: main_dtype(s.root) for s in (pair.a, pair.b)}
        self.dtypes = widths
        self.rounded = min(widths.values(), key=lambda d: (d.itemsize, torch.finfo(d).bits))
        self._skimmed: dict[str, dict[Key, Tensors]] = {}

    @property
    def mixed(self) -> bool:
        """True if the weights of A and B have different dtypes."""
        return self.dtypes["A"] != self.dtypes["B"]

    def weights(self, side: Side, module: nn.Module) -> Lent:
        """Return the weights of a module of the wider model, rounded to the dtype of the other's; empty if equal."""
        if not self.mixed or self.dtypes[side.name] == self.rounded:
            return {}
        wide = self.dtypes[side.name].itemsize
        return {
            id(p): p.detach().to(self.rounded)
            for p in module.parameters()
            if p.is_floating_point() and p.dtype.itemsize == wide and not p.is_meta
        }

    def narrower(self, key: Key) -> dict[str, torch.dtype]:
        """Return the dtypes of those tensors that B's block is passed in a narrower dtype than A's, by name."""
        a, b = self.a.calls[key].call, self.b.calls[key].call
        if a is None or b is None:
            return {}
        mine, theirs = arguments_of(a), arguments_of(b)
        return {
            n: theirs[n].dtype
            for n, t in mine.items()
            if n in theirs
            and (t.is_floating_point() and theirs[n].is_floating_point())
            and theirs[n].dtype.itemsize < t.dtype.itemsize
        }

    def block(self, side: Side, key: Key, *, rounded: bool = True, lent: Lent | None = None, step: Any = None) -> Any:
        """Return the output of a block in float64, on A's input.

        Args:
            side: The model.
            key: The block's call.
            rounded: Round inputs and weights to the narrower dtype of the two models first.
            lent: Tensors to read in the place of others.
            step: Shown each operator.
        """
        seen = (self.a if side is self.pair.a else self.b).calls[key]
        call = seen.call if seen.call is not None else self.a.calls[key].call
        assert call is not None  # noqa: S101 - blocks are kept
        own = self.weights(side, call.module) if rounded else {}
        mode = InFloat64({**own, **(lent or {})}, step)
        try:
            return again(call, mode, rounded=self.narrower(key) if rounded and side is self.pair.a else None)
        finally:
            self.narrow |= mode.narrow

    def containers(
        self, side: Side, *, rounded: bool = True, lent: Lent | None = None, step: Any = None
    ) -> dict[Key, Tensors]:
        """Return what the code between the blocks gives in float64, while blocks return what A's returned.

        Returns:
            The tensors that each block is passed, and those that each container returns, by call.
        """
        narrow = self.rounded if rounded and self.mixed else None
        mine = self.a if side is self.pair.a else self.b
        out: dict[Key, Tensors] = {}

        def wide(_name: str, tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point():
                return tensor
            return (
                tensor if narrow is None or tensor.dtype.itemsize <= narrow.itemsize else cast(tensor, narrow)
            ).double()

        def lend(key: Key) -> Any:
            values = dict(tensors_in(self.a.calls[key].output)) if key in self.a.calls else {}
            own = mine.calls[key].output if mine.calls[key].output is not None else self.a.calls[key].output
            return with_tensors(own, lambda n, t: wide(n, values[n].to(t.device) if n in values else t))

        def enter(key: Key, module: nn.Module, args: Any, kwargs: Any, block: bool) -> None:
            if block:
                out[key] = dict(tensors_in({**{str(i): v for i, v in enumerate(args)}, **kwargs}))
                module.__dict__["forward"] = lambda *_args, **_kwargs: lend(key)  # pyright: ignore[reportUnknownLambdaType]

        def leave(key: Key, output: Any, block: bool) -> Any:
            if block:
                return lend(key)
            out[key] = dict(tensors_in(output))
            return None

        held = {module: module.__dict__.get("forward") for module in side.blocks().values()}
        inputs = {k: with_tensors(v, wide) for k, v in side.batch.inputs.items()}
        mode = InFloat64({**(self.weights(side, side.root) if rounded else {}), **(lent or {})}, step)
        try:
            with followed(side, enter, leave):
                called(side, mode, inputs)
        finally:
            for module, forward in held.items():
                module.__dict__.pop("forward", None)
                if forward is not None:
                    module.__dict__["forward"] = forward
            self.narrow |= mode.narrow
        return out

    def skimmed(self, side: Side, *, rounded: bool) -> dict[Key, Tensors]:
        """Return `containers`, run once."""
        name = f"{side.name} {rounded}"
        if name not in self._skimmed:
            self._skimmed[name] = self.containers(side, rounded=rounded)
        return self._skimmed[name]

    def results(self, side: Side, found: Unequal, **how: Any) -> Tensors:
        """Return the tensors of a place in float64; the arguments are those of `block`."""
        if found.role == "output":
            return dict(tensors_in(self.block(side, found.key, **how)))
        every = self.skimmed(side, **how) if set(how) == {"rounded"} else self.containers(side, **how)
        return every.get(found.key, {})

    def real(self, key: Key) -> torch.Tensor | None:
        """Return `[batch, tokens]`, False at padding, for a place that has a row for each token; None if unknown."""
        mask = self.pair.a.batch.inputs.get("attention_mask")
        config: Any = getattr(self.pair.a.root, "config", None)
        if getattr(config, "is_encoder_decoder", False) and "decoder" in key[0]:
            mask = self.pair.a.batch.inputs.get("decoder_attention_mask")
        return mask.bool() if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None

    def distance(self, found: Unequal) -> Distance:
        """Return how far B is from A at a place."""
        a, b, real = *self._actual(found), self.real(found.key)
        gap = apart(a, b, real)
        self.narrow = set()
        try:
            ref_a, ref_b = (self.results(s, found, rounded=True) for s in (self.pair.a, self.pair.b))
            own_a, own_b = ref_a, ref_b
            narrowed = self.mixed or (found.role == "output" and bool(self.narrower(found.key)))
            if narrowed:
                own_a = self.results(self.pair.a, found, rounded=False)
            if narrowed and self.dtypes["B"] != self.rounded:
                own_b = self.results(self.pair.b, found, rounded=False)
        except REJECTIONS as error:
            return Distance(gap, why=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}")
        ref_a, ref_b, own_a, own_b = (_only(t, found.names) for t in (ref_a, ref_b, own_a, own_b))
        of_a, of_b = apart(ref_a, a, real), apart(ref_b, b, real)
        rounded = apart(own_a, ref_a, real) + apart(own_b, ref_b, real) if narrowed else 0.0
        exact = apart(ref_a, ref_b, real)
        if found.role == "input" and not math.isfinite(exact):  # a mask of another form, or none
            effect = self._effect(found, real)
            gap, exact, of_a, of_b = (effect, effect, 0.0, 0.0) if effect is not None else (gap, exact, of_a, of_b)
        padding = apart(a, b, None) if real is not None else gap
        return Distance(gap, of_a + of_b + rounded, exact, of_a, of_b, tuple(sorted(self.narrow)), padding=padding)

    def _effect(self, found: Unequal, real: torch.Tensor | None) -> float | None:
        """Return how far B's block, in float64, is from itself where it gets its own inputs of these names.

        None if it does not run on them.
        """
        call = self.b.calls[found.key].call
        if call is None:
            return None
        own = {n: self.b.calls[found.key].given.get(n) for n in found.names}
        args = tuple(own.get(str(i), value) for i, value in enumerate(call.args))
        kwargs = {name: own.get(name, value) for name, value in call.kwargs.items()}
        mode = InFloat64(self.weights(self.pair.b, call.module))
        try:
            mine = again(replace(call, args=args, kwargs=kwargs), mode)
        except REJECTIONS:
            return None
        theirs = self.block(self.pair.b, found.key)
        return apart(dict(tensors_in(theirs)), dict(tensors_in(mine)), real)

    def _actual(self, found: Unequal) -> tuple[Tensors, Tensors]:
        a, b = self.a.calls[found.key], self.b.calls[found.key]
        if found.role == "input":
            return _only(a.given, found.names), _only(b.given, found.names)
        mine, theirs = dict(tensors_in(a.output)), dict(tensors_in(b.output))
        return _only(mine, found.names), _only(theirs, found.names)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return ||a - b|| / ||a||, without masks; infinite if only one is finite somewhere."""
    return apart({"": a}, {"": b}, None)


def _only(tensors: Mapping[str, torch.Tensor], names: tuple[str, ...]) -> Tensors:
    return {n: t for n, t in tensors.items() if n in names}


def apart(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor], real: torch.Tensor | None) -> float:
    """Return the largest relative L2 distance of tensors with these names; infinite for one that only one side has.

    Args:
        a: Tensors of A.
        b: Tensors of B.
        real: bool `[batch, tokens]`, False at padding, which is left out of tensors that begin with this shape.
    """
    if set(a) != set(b):
        return math.inf
    return max((_gap(one, b[name].to(one.device), real) for name, one in a.items()), default=0.0)


def _gap(one: torch.Tensor, other: torch.Tensor, real: torch.Tensor | None) -> float:
    if one.shape != other.shape:
        return math.inf
    one, other = one.detach(), other.detach()
    if real is not None and one.dim() > 2 and one.shape[:2] == real.shape:
        one, other = one[real.to(one.device)], other[real.to(one.device)]
    if not (one.is_floating_point() and other.is_floating_point()):
        return 0.0 if torch.equal(one, other) else math.inf
    plain, usual = _plain(one), _plain(other)
    if not (plain and usual):
        masks = is_mask(one)
        if not torch.equal(masks, is_mask(other)):
            return math.inf
        one, other = one[~masks], other[~masks]
        finite = one.isfinite()
        if not torch.equal(finite, other.isfinite()):
            return math.inf
        one, other = one[finite], other[finite]
    one, other = one.double(), other.double()
    size, gap = float(one.norm()), float(torch.dist(one, other))
    return gap / size if size else (0.0 if gap == 0 else math.inf)


def _plain(tensor: torch.Tensor) -> bool:
    """True if a tensor holds neither a mask nor a value that is not finite."""
    if not tensor.numel():
        return True
    low, high = (float(v) for v in torch.aminmax(tensor.float() if tensor.dtype.itemsize == 1 else tensor))
    return low > max(-MASK, torch.finfo(tensor.dtype).min) and high < MASK and math.isfinite(high)
