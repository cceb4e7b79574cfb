"""The positions that sparse indexers choose, compared with those that they choose in float32 for the same input."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import Cache

from hfpatch.compat.hooks import Handle, after, before
from hfpatch.dtypes import dtype_name
from hfpatch.model.walk import is_stock
from hfpatch.patching.kinds.in_float32.outside_autocast import FORWARD

PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
CHOICES = (torch.topk, torch.Tensor.topk)


@dataclass(frozen=True)
class Choice:
    """One call of an indexer.

    Attributes:
        path: Path of the indexer.
        product: Dtype of the product of queries and keys; None if it was not seen.
        error: Largest difference of the scores from float32's, relative to the largest score.
        rows: Number of rows of scores.
        equal: Number of rows in which the same positions are chosen as in float32.
    """

    path: str
    product: str | None
    error: float
    rows: int
    equal: int


def indexers(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the sparse indexers among modules, by path: transformers' modules whose class is named so."""
    return {p: m for p, m in modules.items() if is_stock(type(m)) and type(m).__name__.endswith("Indexer")}


def choices(model: nn.Module, run: Callable[[], object]) -> list[Choice]:
    """Run a model, and return what its indexers chose beside what they choose in float32 and without autocast.

    The float32 run has copies of the indexers with their weights in float32, on the inputs that they had.
    """
    found: list[Choice] = []
    seen: list[_Scores] = []
    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    handles: list[Handle] = []

    def begin(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given.append((args, kwargs))
        seen.append(_Scores())
        seen[-1].__enter__()

    def end(path: str, module: nn.Module, *_: Any) -> None:
        mine, (args, kwargs) = seen.pop(), given.pop()
        mine.__exit__(None, None, None)
        other = _in_float32(module, args, kwargs)
        found.append(_compared(path, mine, other))

    try:
        for path, module in indexers(dict(model.named_modules())).items():
            handles.append(before(module, begin, first=True, with_kwargs=True))
            handles.append(after(module, partial(end, path)))
        with torch.no_grad():
            run()
    finally:
        while seen:
            seen.pop().__exit__(None, None, None)
        for handle in handles:
            handle.remove()
    return found


class _Scores(TorchFunctionMode):
    """Keeps the scores of which the largest are chosen, and the dtype of the first product of two activations."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[torch.Tensor] = []
        self.chosen: list[torch.Tensor] = []
        self.product: torch.dtype | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in PRODUCTS and self.product is None:
            self.product = out.dtype
        if func in CHOICES:
            self.scores.append(args[0])
            self.chosen.append(out[1])
        return out


def _in_float32(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Scores:
    exact = copy.deepcopy(module).float()
    exact.__dict__.pop(FORWARD, None)
    device = next(v.device.type for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
    with torch.autocast(device, enabled=False), _Scores() as scores:
        type(exact).forward(exact, *map(_wide, args), **{k: _wide(v) for k, v in kwargs.items()})
    return scores


def _wide(value: Any) -> Any:
    """Return a value in float32, and no cache: it already holds the keys."""
    if isinstance(value, Cache):
        return None
    if type(value) is tuple:
        return tuple(map(_wide, value))
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _compared(path: str, mine: _Scores, exact: _Scores) -> Choice:
    rows = equal = 0
    error = 0.0
    for ours, theirs, index, other in zip(mine.scores, exact.scores, mine.chosen, exact.chosen, strict=True):
        real = theirs.isfinite() & (theirs > torch.finfo(torch.float16).min / 2)  # the others are masked
        size = float(theirs[real].abs().max()) if bool(real.any()) else 0.0
        away = (ours.float() - theirs)[real].abs()
        error = max(error, float(away.max()) / size if size else 0.0)
        # of rows with fewer visible positions than are chosen, only the visible ones count
        sets = [torch.zeros_like(theirs, dtype=torch.bool).scatter(-1, i.long(), True) & real for i in (index, other)]
        same = (sets[0] == sets[1]).all(-1)
        rows, equal = rows + same.numel(), equal + int(same.sum())
    return Choice(path, None if mine.product is None else dtype_name(mine.product), error, rows, equal)
