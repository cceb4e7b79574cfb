"""The memory that an examination needs, from shapes alone, and the memory that is there."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from hfpatch.errors import InputError
from hfpatch.model.walk import elements

SHARE = 1.5
"""Copies of the float32 weights that are held: the checkpoint, and one in half precision."""
MEMINFO = Path("/proc/meminfo")


def check_memory(name: str, model: nn.Module, device: torch.device) -> None:
    """Raise if a device has no memory for the float32 weights and a copy in half precision. Nothing is loaded.

    Args:
        name: The model, as the caller named it.
        model: Built on meta.
        device: Where it is to run.

    Raises:
        InputError: There is too little memory; the message has both sizes.
    """
    parameters = {id(p): elements(p) for p in model.parameters()}
    needed = int(SHARE * 4 * sum(parameters.values()))
    free = available(device)
    if free is not None and needed > free:
        raise InputError(
            f"{name}: doctor needs {needed / 2**30:,.1f} GiB for its weights in float32 and a copy in half precision, "
            f"and {device.type} has {free / 2**30:,.1f} GiB free; nothing was loaded. Name another --device, or use "
            "hfpatch plan and hfpatch check, which need no weights"
        )


def available(device: torch.device) -> int | None:
    """Return the bytes that are free on a device; None if that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if not MEMINFO.exists():
        return None
    lines = (line.split() for line in MEMINFO.read_text().splitlines())
    return next((int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"), None)
