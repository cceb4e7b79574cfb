"""Runs a module on noise: the RMS of its linear layers' inputs, and whether its output is that of the last layer."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hfpatch.compat import hooks


@dataclass(frozen=True)
class Run:
    """A run of a module on noise.

    Attributes:
        reads: RMS of each linear layer's input, by name in the order of the calls; empty if it could not be run.
        ends: Whether the module's output is that of the linear layer called last; None if it could not be run.
    """

    reads: Mapping[str, float]
    ends: bool | None


def rms(values: torch.Tensor) -> float:
    """Return the root mean square, computed in float64."""
    return math.sqrt(float(values.detach().double().square().mean()))


def run_on_noise(module: nn.Module, outer: float) -> Run:
    """Run a float32 copy of a module in evaluation mode on noise of RMS `outer`; the random state is restored."""
    reads: dict[str, float] = {}
    wrote: dict[str, torch.Tensor] = {}
    if any(p.is_meta or hasattr(p, "device_mesh") for p in module.parameters()):
        return Run(reads, None)

    def watch(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], out: torch.Tensor) -> None:
            reads.pop(name, None)  # of several calls, the last
            reads[name], wrote[name] = rms(args[0]), out

        return hook

    widths = dict.fromkeys(m.in_features for m in module.modules() if isinstance(m, nn.Linear))
    with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
        for size in widths:  # the layer that reads the features may not be defined first
            reads.clear()
            try:
                tried = copy.deepcopy(module).cpu().float().eval()
                for name, layer in tried.named_modules():
                    if isinstance(layer, nn.Linear):
                        hooks.after(layer, watch(name))
                draw = torch.Generator().manual_seed(0)
                out = tried(torch.randn(1, 256, size, generator=draw, dtype=torch.float32) * outer)
            except Exception:  # noqa: BLE001, S112 - a foreign forward may raise anything
                continue
            if not reads:
                return Run(reads, None)
            return Run(reads, _same(out, wrote[next(reversed(reads))]))
    return Run({}, None)


def _same(out: Any, wrote: torch.Tensor) -> bool:
    """True if a module's output, or its first item, has the values of a layer's output, in any shape."""
    first = out[0] if isinstance(out, (tuple, list)) and out else out
    if not isinstance(first, torch.Tensor) or first.numel() != wrote.numel():
        return False
    if first.untyped_storage().data_ptr() == wrote.untyped_storage().data_ptr():
        return True
    return torch.equal(first.reshape(-1).float(), wrote.reshape(-1).float())
