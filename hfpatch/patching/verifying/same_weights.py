"""Tells the weights of one checkpoint from those of another: names, shapes, and some values of every parameter."""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hfpatch.dtypes import dtype_name
from hfpatch.given import shown
from hfpatch.patching.verifying.answer import SHARDED

SAMPLES = 16_384
"""Values that are looked at in all parameters together; of each at least one, and at most `OF_EACH`."""
OF_EACH = 64
STRIDE = 7919
"""A prime: samples that lie as far apart as a row, or as a block of a packed weight is long, would be of one column."""
BLOCKS, BLOCK = 64, 256
"""Places in a file of weights that are looked at, and bytes at each."""
FILES = 1024
"""Largest number of files of weights that are looked at."""


def weights_seen(model: nn.Module) -> list[list[Any]]:
    """Return what tells the weights of a model from others: for each parameter its name, shape, dtype and samples.

    The samples are float32 values in base64; those of a parameter that is not in memory (on meta) are empty. A tensor
    class that is made of plain tensors, as quantisers have them, has no samples, and its parts follow.

    Raises:
        ValueError: A parameter is sharded, or of a tensor class of whose parts nothing is known.
    """
    return tensors_seen(list(model.named_parameters()))


def tensors_seen(named: Sequence[tuple[str, torch.Tensor]]) -> list[list[Any]]:
    """Return the same of named tensors.

    Raises:
        ValueError: As `weights_seen`.
    """
    rows = [row for name, tensor in named for row in _with_parts(name, tensor.detach())]
    each = max(1, min(OF_EACH, SAMPLES // max(1, len(rows))))
    taken: dict[str, torch.Tensor] = {}
    for name, values in rows:
        if type(values) is torch.Tensor and not values.is_meta and values.numel():
            flat, count = values.reshape(-1), min(each, values.numel())
            step, order = values.numel() // count, torch.arange(count, device=values.device)
            at = order * values.numel() // count + order * STRIDE % step
            taken[name] = _picked(flat, at)
    flat = iter(torch.cat([t.to("cpu") for t in taken.values()]).tolist() if taken else [])
    out: list[list[Any]] = []
    for name, values in rows:
        count = len(taken.get(name, ()))
        packed = base64.b64encode(struct.pack(f"<{count}f", *islice(flat, count))).decode()
        out.append([name, list(values.shape), dtype_name(values.dtype), packed])
    return out


def _picked(flat: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    try:
        return flat[at].to(torch.float32)
    except NotImplementedError:  # torch cannot index dtypes of less than a byte: the bytes that hold them
        return flat.view(torch.uint8)[at].to(torch.float32)


def _with_parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a tensor and the plain tensors that it is made of, by names.

    Raises:
        ValueError: As `weights_seen`.
    """
    yield name, tensor
    if type(tensor) is torch.Tensor:
        return
    if type(tensor).__name__ in SHARDED:
        raise ValueError(f"{name} is sharded (a {type(tensor).__name__}): do this before the model is sharded")
    if not hasattr(tensor, "__tensor_flatten__"):
        raise ValueError(f"{name} is a {type(tensor).__name__}, whose values cannot be looked at")
    parts: Any = tensor
    for part in parts.__tensor_flatten__()[0]:
        yield from _with_parts(f"{name}.{part}", getattr(parts, part))


def difference(kept: list[list[Any]], model: nn.Module) -> str:
    """Return how the weights of a model differ from those that `weights_seen` described; empty if they do not.

    A parameter of another dtype is the same if its values are those of the other, rounded.

    Raises:
        ValueError: As `weights_seen`, or `kept` does not describe parameters.
    """
    now = weights_seen(model)
    if len(kept) != len(now):
        return f"it has {len(now):,} parameters, and {len(kept):,} were measured"
    for (name, shape, dtype, packed), mine in zip(kept, now, strict=True):
        if (name, shape) != (mine[0], mine[1]):
            return f"its {mine[0]} of shape {mine[1]} was {shown(name)} of shape {shown(shape)}"
        if mine[3] and not _same(_values(packed), _dtype(dtype), _values(mine[3]), _dtype(mine[2])):
            return f"{name} has other values"
    return ""


def _values(packed: Any) -> torch.Tensor:
    raw = base64.b64decode(packed, validate=True)
    return torch.tensor(struct.unpack(f"<{len(raw) // 4}f", raw), dtype=torch.float32, device="cpu")


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{shown(name)} is no dtype")
    return found


def _same(a: torch.Tensor, of_a: torch.dtype, b: torch.Tensor, of_b: torch.dtype) -> bool:
    """True if two samples are those of one checkpoint loaded in two dtypes: one is the other, rounded.

    Float16 and bfloat16 may be two roundings of a third.
    """
    if a.shape != b.shape:
        return False
    if of_a == of_b or not (of_a.is_floating_point and of_b.is_floating_point):
        return of_a == of_b and torch.equal(a.nan_to_num(), b.nan_to_num())
    a_as_b, b_as_a = a.to(of_b).float(), b.to(of_a).float()
    near = torch.zeros_like(a, dtype=torch.bool)
    if {of_a, of_b} == {torch.float16, torch.bfloat16}:
        near = (a - b).abs() <= b.abs() * 2.0**-8 + 2.0**-24
    return bool(((a_as_b == b) | (b_as_a == a) | near).all())


def files_seen(folder: Path) -> str:
    """Return a digest of the files of weights in a folder, from their names, sizes and some of their bytes.

    At most 16 KiB of each file are read; links to files count, and nothing that is not an ordinary file is opened.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors"))[:FILES]:
        if not file.is_file():
            continue
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as data:
            for start in dict.fromkeys(size * at // BLOCKS for at in range(BLOCKS)):
                data.seek(start)
                digest.update(data.read(BLOCK))
    return digest.hexdigest()[:32]
