"""Arguments of a guard: the loss, the number of tokens, the components."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hfpatch.errors import InputError
from hfpatch.given import MAPPING, NUMBER, Kind, optional, want

if TYPE_CHECKING:
    from torch import Tensor

GLOBS = Kind("globs of parameter names", lambda v: all(isinstance(glob, str) for glob in v))
TOKENS = Kind("a number of tokens", lambda v: v.numel() == 1 if isinstance(v, torch.Tensor) else NUMBER.fits(v))


def check_loss(loss: Any, tokens: Any = None) -> None:
    """Raise unless the loss is a tensor of one number, and the tokens one number or None.

    Raises:
        InputError: The loss or the number of tokens is not one number.
    """
    want("guard", tokens=(tokens, optional(TOKENS)))
    if not isinstance(loss, torch.Tensor):
        raise InputError(f"guard: want a loss, a tensor of one number; got {type(loss).__name__}; pass output.loss")
    if loss.numel() != 1:
        raise InputError(f"guard: want a loss of one number; got shape {tuple(loss.shape)}; reduce it first")


def globs(components: Mapping[str, str | Sequence[str]] | None) -> dict[str, tuple[str, ...]]:
    """Return the globs of parameter names of each component.

    Raises:
        InputError: It is no mapping of names to globs.
    """
    want("guard", components=(components, optional(MAPPING)))
    found: dict[str, tuple[str, ...]] = {}
    for name, given in (components or {}).items():
        found[str(name)] = (given,) if isinstance(given, str) else tuple(given)
        want("guard", components=(found[str(name)], GLOBS))
    return found


def is_zero(tokens: Tensor | int, device: torch.device) -> Tensor:
    """Return whether a micro-batch has no supervised token, bool, 0-dim, on a device."""
    if isinstance(tokens, torch.Tensor):
        return tokens.to(device).reshape(()) == 0
    return torch.full((), tokens == 0, dtype=torch.bool, device=device)
