"""A change that runs a module's forward outside autocast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hfpatch.compat import accelerate
from hfpatch.model.roles import weights_dtype
from hfpatch.patching.kinds.base import Change
from hfpatch.patching.kinds.states import ABSENT, HERE, State
from hfpatch.patching.kinds.stream import cast

FORWARD = "forward"


class Forward:
    """A module's forward, run outside autocast, its floating-point tensor arguments in the dtype of its weights.

    Args:
        module: The module.
        inner: The forward that was set on it; None for that of its class.
    """

    def __init__(self, module: nn.Module, inner: Callable[..., Any] | None) -> None:
        self.module, self.inner = module, inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it. Without autocast nothing is changed."""
        bare = type(self.module).forward
        run = (lambda *a, **k: bare(self.module, *a, **k)) if self.inner is None else self.inner
        device = _device(args, kwargs)
        if not torch.is_autocast_enabled(device):
            return run(*args, **kwargs)
        dtype = weights_dtype(self.module) or torch.float32
        with torch.autocast(device, enabled=False):
            return run(*(_in(a, dtype) for a in args), **{k: _in(v, dtype) for k, v in kwargs.items()})


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return next(v.device.type for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))


def _in(value: Any, dtype: torch.dtype) -> Any:
    """Return a floating-point tensor, or those in a tuple, in this dtype."""
    if type(value) is tuple:
        return tuple(_in(v, dtype) for v in value)
    return cast(value, dtype)


@dataclass(frozen=True)
class OutsideAutocast(Change):
    """Sets a `Forward` on a module: an attribute of the instance, so no hook can be missed whatever is raised."""

    unseen = "torch.compile would keep running the forward that it has compiled"

    @property
    def slot(self) -> str:
        return "autocast"

    def __str__(self) -> str:
        return "off"

    def inverse(self, root: nn.Module, module: nn.Module) -> Any:
        return module.__dict__.get(FORWARD, ABSENT)

    def write(self, root: nn.Module, module: nn.Module, before: Any) -> None:
        module.__dict__[FORWARD] = Forward(module, None if before is ABSENT else before)

    def read(self, root: nn.Module, module: nn.Module, before: Any) -> State:
        return HERE if _key(module) else State("gone", "on again: its forward was replaced")

    def restore(self, root: nn.Module, module: nn.Module, before: Any) -> None:
        key = _key(module)
        if key == accelerate.FORWARD and before is ABSENT:  # accelerate wrapped the module since
            module.__dict__[key] = type(module).forward.__get__(module)
        elif key and before is ABSENT:
            del module.__dict__[key]
        elif key:
            module.__dict__[key] = before


def _key(module: nn.Module) -> str | None:
    """Return the key of the `Forward` in a module's `__dict__`: accelerate keeps the forward that it replaces."""
    return next((k for k in (FORWARD, accelerate.FORWARD) if isinstance(module.__dict__.get(k), Forward)), None)
