"""A change that runs a module's forward in float32 under autocast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from hfpatch.compat import accelerate
from hfpatch.patching.kinds.base import Change
from hfpatch.patching.kinds.states import ABSENT, HERE, State
from hfpatch.patching.kinds.stream import cast

FORWARD = "forward"


class Forward:
    """A module's forward, which under autocast runs outside it, in float32.

    Args:
        module: The module.
        inner: The forward that was set on it; None for that of its class.
    """

    def __init__(self, module: nn.Module, inner: Callable[..., Any] | None) -> None:
        self.module, self.inner = module, inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it, under autocast with its arguments and weights in float32. Without autocast nothing is changed."""
        device = next(v.device.type for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
        run = _Bare(self.module, self.inner)
        if not torch.is_autocast_enabled(device):
            return run(*args, **kwargs)
        wide = {n: p.float() for n, p in run.named_parameters() if p.is_floating_point() and p.dtype != torch.float32}
        args, kwargs = tuple(map(_float32, args)), {k: _float32(v) for k, v in kwargs.items()}
        with torch.autocast(device, enabled=False):
            return functional_call(run, wide, args, kwargs) if wide else run(*args, **kwargs)


class _Bare(nn.Module):
    """Calls a module's forward without its hooks."""

    def __init__(self, module: nn.Module, inner: Callable[..., Any] | None) -> None:
        super().__init__()
        self.module, self.inner = module, inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module's forward returns."""
        inner = self.inner
        return type(self.module).forward(self.module, *args, **kwargs) if inner is None else inner(*args, **kwargs)


def _float32(value: Any) -> Any:
    """Return a floating-point tensor, or those in a tuple, in float32."""
    if type(value) is tuple:
        return tuple(map(_float32, value))
    return cast(value, torch.float32)


@dataclass(frozen=True)
class OutsideAutocast(Change):
    """Sets a `Forward` on a module: an attribute of the instance, so no hook can be missed whatever is raised."""

    unseen = "torch.compile would keep running the forward that it has compiled"

    @property
    def slot(self) -> str:
        return "autocast"

    def __str__(self) -> str:
        return "off, float32"

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
