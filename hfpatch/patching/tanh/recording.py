"""Records each 1 + tanh in a probe run: the factors that multiply it, and the origin of tanh's argument."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hfpatch.compat.autograd import version
from hfpatch.compat.frames import frame_at, module_of
from hfpatch.patching.kinds.one_plus_tanh import CHECKPOINT
from hfpatch.patching.tanh.one_plus import OVERWRITES, SHAPING, Tanh, Watch

GELU = 0.7978845608, 0.044715
PRODUCTS = frozenset({"mul", "rmul", "multiply"})
QUOTIENTS = frozenset({"div", "truediv", "divide"})
OTHER_PRODUCTS = frozenset({"addcmul", "addcmul_", "einsum", "matmul", "__matmul__", "__rmatmul__", "bmm", "mm"})
KEEPS_ZERO = SHAPING | {"neg", "dropout"}


@dataclass
class OnePlusTanh:
    """One addition of 1 to a tanh.

    Attributes:
        owner: Id of the module whose own call added it.
        argument: A copy of the argument of tanh.
        sums: The sum, and the results of casts and changes of shape of it.
        zero: True if the argument was 0 because it was computed from parameters that are all 0.
        multiplied: True if the sum was a factor of a product.
        given: True if the module that was run returned the sum.
        spoiled: Why it is not a modulation; empty if it is one.
        obstacle: Why it cannot be replaced; empty if it can.
    """

    owner: int
    argument: torch.Tensor
    sums: list[torch.Tensor]
    zero: bool
    multiplied: bool = False
    given: bool = False
    spoiled: str = ""
    obstacle: str = ""


@dataclass
class ZeroParameters:
    """Caches which parameters are all zero, until they are written to."""

    known: dict[int, tuple[torch.Tensor, int, bool]] = field(default_factory=dict[int, tuple[torch.Tensor, int, bool]])

    def has(self, value: Any) -> bool:
        """True for a loaded parameter that is all zero."""
        if not isinstance(value, nn.Parameter) or value.is_meta:
            return False
        there = self.known.get(id(value))
        if there is None or there[1] != version(value):
            there = value, version(value), not bool(value.any())
            self.known[id(value)] = there
        return there[2]


class OnePlusTanhRecorder(Watch):
    """A mode that records each 1 + tanh of one run.

    Args:
        zeros: The cache that the runs of one stand-in share.
    """

    def __init__(self, zeros: ZeroParameters) -> None:
        super().__init__()
        self.noted: list[OnePlusTanh] = []
        self.zeros = zeros
        self.made_zero: list[torch.Tensor] = []

    def one_plus(self, tanh: Tanh, run: Any) -> Any:
        """Record the sum, and return it unchanged."""
        out = run()
        owner, inside_checkpoint = _caller()
        zero = self._is_zero(tanh.argument) and not tanh.argument.is_meta and not bool(tanh.argument.any())
        seen = OnePlusTanh(owner, tanh.argument.detach().clone(), [out], zero)
        if inside_checkpoint:
            seen.obstacle = (
                "it checkpoints the part of itself that has 1 + tanh, which would be recomputed without the patch; "
                "checkpoint the whole module from outside, or put that part into a module of its own"
            )
        self.noted.append(seen)
        return out

    def given(self, output: Any) -> None:
        """Mark the sums that the module returned."""
        for value in _tensors(output):
            for seen in self.noted:
                seen.given = seen.given or any(s is value for s in seen.sums)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and follow zeros and sums through it."""
        kwargs = kwargs or {}
        out = super().__torch_function__(func, types, args, kwargs)
        name = getattr(func, "__name__", "")
        if name in OVERWRITES and args:
            self.made_zero = [t for t in self.made_zero if t is not args[0]]
        elif self._gives_zero(name, args, kwargs):
            self.made_zero += _tensors(out)
        if self.noted:
            self._follow_sums(name, args, kwargs, out)
        return out

    def _tanh(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        zero = self._is_zero(args[0] if args else kwargs["input"])
        out = super()._tanh(func, name, args, kwargs)
        if zero:
            self.made_zero.append(self.seen[-1].argument)  # a copy of the argument if tanh writes to it
        return out

    def _is_zero(self, value: Any) -> bool:
        return any(value is t for t in self.made_zero) or self.zeros.has(value)

    def _gives_zero(self, name: str, args: Any, kwargs: Any) -> bool:
        """True if the result is zero because of zero arguments, whatever the other arguments are."""
        given = [*args, *kwargs.values()]
        if name == "linear":
            bias = kwargs.get("bias", args[2] if len(args) > 2 else None)
            return (bias is None or self._is_zero(bias)) and any(self._is_zero(v) for v in given if v is not bias)
        if name in ("matmul", "__matmul__", "mm", "bmm", "embedding") or name.strip("_") in PRODUCTS:
            return any(self._is_zero(v) for v in given)
        if name in ("add", "__add__", "sub", "__sub__"):
            return len(given) > 1 and all(self._is_zero(v) for v in given)
        return name in KEEPS_ZERO and bool(args) and self._is_zero(args[0])

    def _follow_sums(self, name: str, args: Any, kwargs: Any, out: Any) -> None:
        plain = name.strip("_").removeprefix("i")
        for seen in self.noted:

            def has(value: Any, seen: OnePlusTanh = seen) -> bool:
                return any(value is s for s in seen.sums)

            if name in SHAPING and args and has(args[0]):
                seen.sums += _tensors(out)
            elif name in OTHER_PRODUCTS:
                seen.multiplied = seen.multiplied or any(map(has, _tensors([*args, *kwargs.values()])))
            elif plain in PRODUCTS | QUOTIENTS and len(args) == 2:
                for factor in (b for a, b in (args, args[::-1]) if has(a)):
                    why = _spoiled(seen.argument, factor)
                    seen.spoiled = seen.spoiled or why
                    seen.multiplied = seen.multiplied or (
                        plain in PRODUCTS and not why and isinstance(factor, torch.Tensor)
                    )


def _spoiled(argument: torch.Tensor, factor: Any) -> str:
    constant = isinstance(factor, torch.Tensor) and factor.ndim == 0 and type(factor) is torch.Tensor
    if isinstance(factor, (int, float)) or (constant and not factor.is_meta):
        return "" if float(factor) == 1 else f"1 + tanh is scaled by {float(factor):g} there, so it is not 1 at 0"
    if isinstance(factor, torch.Tensor) and factor.shape == argument.shape and not factor.is_meta:
        for u in (factor, 2 * factor):
            gelu = GELU[0] * (u + GELU[1] * u**3)
            if argument.any() and torch.allclose(gelu.float(), argument.float(), rtol=0.05, atol=1e-3):
                return "it is a GELU"
    return ""


def _tensors(value: Any) -> list[torch.Tensor]:
    return list(_flat(value))


def _flat(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))


def _caller() -> tuple[int, bool]:
    """Return the id of the innermost module whose call is running, and True if it is inside a checkpoint there."""
    frame, inside = frame_at(0), False
    while frame is not None:
        inside = inside or frame.f_code.co_filename == CHECKPOINT
        if (module := module_of(frame)) is not None:
            return id(module), inside
        frame = frame.f_back
    return 0, inside
