"""A mode that notices each addition of 1 to a result of tanh, through casts and changes of shape."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

TANH = frozenset({"tanh", "tanh_"})
ADD = frozenset({"add", "__add__", "__radd__", "add_", "__iadd__"})
SHAPING = frozenset(
    {
        "to", "float", "half", "bfloat16", "double", "type", "type_as", "contiguous", "clone", "detach",
        "unsqueeze", "squeeze", "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten",
        "expand", "expand_as", "broadcast_to", "repeat", "repeat_interleave", "transpose", "permute", "movedim",
        "chunk", "split", "tensor_split", "unbind", "select", "narrow", "__getitem__",
    }
)  # fmt: skip
"""Functions that keep values: their results for a tanh are followed too."""


OVERWRITES = frozenset(n for n in dir(torch.Tensor) if n.endswith("_") and not n.endswith("__")) | {
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__",
}  # fmt: skip
"""Functions that write to their first argument. A set, because torch.compile cannot trace `str.endswith`."""


class Step(NamedTuple):
    """One call of a function in `SHAPING`; `item` is the index if it returned several results."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    item: int | None


class Tanh:
    """A call of tanh: its argument, and its result after `steps` of casts and changes of shape."""

    def __init__(self, result: torch.Tensor, argument: torch.Tensor, steps: tuple[Step, ...] = ()) -> None:
        self.result, self.argument, self.steps = result, argument, steps

    def through(self, value: torch.Tensor) -> torch.Tensor:
        """Apply the steps to a value with the shape and dtype of the argument."""
        for function, args, kwargs, item in self.steps:
            value = function(value, *args, **kwargs)
            if item is not None:
                value = value[item]  # pyright: ignore[reportIndexIssue]
        return value


class Watch(TorchFunctionMode):
    """A `TorchFunctionMode` that remembers results of tanh and calls `one_plus` when 1 is added to one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tanh] = []

    def one_plus(self, tanh: Tanh, run: Any) -> Any:
        """Return the result of adding 1 to a tanh; `run()` computes the plain sum."""
        raise NotImplementedError

    def before_change(self, tanh: Tanh) -> None:
        """Run before the argument of a tanh is overwritten."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and follow results of tanh through it."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in TANH:
            return self._tanh(func, name, args, kwargs)
        if not self.seen:
            return func(*args, **kwargs)
        if name in ADD and (added := one_and(args, kwargs)) is not None:
            for tanh in self.seen:
                if tanh.result is added:
                    return self._sum(tanh, func, name, args, kwargs)
        if name in OVERWRITES:
            self._forget(args[0] if args else None)
        elif "out" in kwargs:
            self._forget(kwargs["out"])
        out = func(*args, **kwargs)
        if name in SHAPING and args:
            for tanh in self.seen:
                if tanh.result is args[0]:
                    self._follow(tanh, func, args[1:], kwargs, out)
                    break
        return out

    def _tanh(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        argument = args[0] if args else kwargs["input"]
        if name == "tanh_" or kwargs.get("out") is argument:
            self._forget(argument)
            argument = argument.clone()
        out = func(*args, **kwargs)
        self.seen.append(Tanh(out, argument))
        return out

    def _sum(self, tanh: Tanh, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        out = self.one_plus(tanh, lambda: func(*args, **kwargs))
        into = args[0] if name in ("add_", "__iadd__") else kwargs.get("out")
        if into is None or out is into:
            return out
        self._forget(into)
        return into.copy_(out)

    def _follow(self, tanh: Tanh, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if isinstance(out, (tuple, list)):
            for i, item in enumerate(out):
                self.seen.append(Tanh(item, tanh.argument, (*tanh.steps, Step(func, args, kwargs, i))))
        else:
            self.seen.append(Tanh(out, tanh.argument, (*tanh.steps, Step(func, args, kwargs, None))))

    def _forget(self, overwritten: Any) -> None:
        for tanh in self.seen:
            if tanh.argument is overwritten and tanh.result is not overwritten:
                self.before_change(tanh)
        self.seen = [tanh for tanh in self.seen if tanh.result is not overwritten]


def one_and(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the tensor to which a sum adds the number 1; None for any other sum."""
    terms = (*args, *(kwargs[k] for k in ("input", "other") if k in kwargs))
    if len(terms) != 2 or kwargs.get("alpha", 1) != 1:
        return None
    a, b = terms
    if isinstance(a, torch.Tensor) and isinstance(b, (int, float)) and b == 1:
        return a
    if isinstance(b, torch.Tensor) and isinstance(a, (int, float)) and a == 1:
        return b
    return None
