"""Autocast as a run of hfpatch has it, whatever region the caller is in."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch


@contextlib.contextmanager
def autocast_as(device: str, dtype: torch.dtype | None) -> Generator[None]:
    """Run with autocast to a dtype, or without it.

    torch keeps the cast weights until the outermost region ends, also in a region of another dtype: they are forgotten.

    Args:
        device: Type of the device.
        dtype: The dtype; None for no autocast.
    """
    torch.clear_autocast_cache()
    with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
        try:
            yield
        finally:
            torch.clear_autocast_cache()
