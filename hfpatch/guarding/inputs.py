"""Arguments of a guard: the loss, the number of tokens, the components."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from hfpatch.dtypes import dtype_name
from hfpatch.errors import InputError
from hfpatch.given import MAPPING, NUMBER, Kind, optional, want

if TYPE_CHECKING:
    from torch import Tensor

GLOBS = Kind(
    "globs of parameter names", lambda v: isinstance(v, (list, tuple)) and all(isinstance(glob, str) for glob in v)
)
TOKENS = Kind(
    "a number of tokens", lambda v: v.numel() == 1 if isinstance(v, torch.Tensor) else NUMBER.fits(v) and v >= 0
)
SAVED = ("steps", "skips", "in_row", "empty", "history", "good_steps", "norms")
"""Keys of a guard's state that every release writes."""


def check_loss(loss: Any, tokens: Any = None) -> None:
    """Raise unless the loss is a tensor of one number, and the tokens one number or None.

    Raises:
        InputError: The loss or the number of tokens is not one number, or the loss is complex.
    """
    want("guard", tokens=(tokens, optional(TOKENS)))
    if not isinstance(loss, torch.Tensor):
        raise InputError(f"guard: want a loss, a tensor of one number; got {type(loss).__name__}; pass output.loss")
    if loss.numel() != 1:
        raise InputError(f"guard: want a loss of one number; got shape {tuple(loss.shape)}; reduce it first")
    if loss.is_complex():
        raise InputError(f"guard: want a real loss; got {dtype_name(loss.dtype)}; take its absolute value or real part")


def globs(components: Mapping[str, str | Sequence[str]] | None) -> dict[str, tuple[str, ...]]:
    """Return the globs of parameter names of each component.

    Raises:
        InputError: It is no mapping of names to globs.
    """
    want("guard", components=(components, optional(MAPPING)))
    found: dict[str, tuple[str, ...]] = {}
    for name, given in (components or {}).items():
        listed: Any = (given,) if isinstance(given, str) else given
        want("guard", components=((name, *listed) if isinstance(listed, (list, tuple)) else given, GLOBS))
        found[name] = tuple(listed)
    return found


def matching(components: dict[str, tuple[str, ...]], names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the components.

    Raises:
        InputError: A glob matches none of the names.
    """
    for glob in (glob for listed in components.values() for glob in listed):
        if not any(fnmatchcase(name, glob) for name in names):
            raise InputError(
                f"guard: components: {glob!r} matches none of {len(names)} parameters (the first is {names[0]})"
            )
    return components


def check_state(saved: Any) -> None:
    """Raise unless this is the state of a guard, of this release or an earlier one.

    Raises:
        InputError: It is no mapping, or keys are missing.
    """
    if not isinstance(saved, Mapping):
        raise InputError(f"guard: load_state_dict: want what state_dict() returned, a dict; got {type(saved).__name__}")
    if lacking := [key for key in SAVED if key not in saved]:
        raise InputError(f"guard: load_state_dict: want what state_dict() returned; it lacks {', '.join(lacking)}")


def is_zero(tokens: Tensor | int, device: torch.device) -> Tensor:
    """Return whether a micro-batch has no supervised token, bool, 0-dim, on a device."""
    if isinstance(tokens, torch.Tensor):
        return tokens.to(device).reshape(()) == 0
    return torch.full((), tokens == 0, dtype=torch.bool, device=device)
