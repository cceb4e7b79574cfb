"""Arguments of a call <-> tensors by name, and a description of the rest that JSON can hold.

Each value becomes `{"is": kind, "of": what}`:

    tensor      its name among the tensors; beside it `dtype`, `shape`, `grad`
    value       null, true, 3, "text"; a float as its exact hexadecimal (`float`), a torch.dtype by its name (`dtype`)
    list, tuple, dict    of such
    absent      the type of what a bundle does not hold: objects, sparse and quantised tensors, deep nesting
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from hfpatch.dtypes import dtype_name
from hfpatch.errors import InputError
from hfpatch.tracing.tensors import DEPTH

Described = dict[str, Any]

DTYPES: dict[str, torch.dtype] = {
    dtype_name(dtype): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int64,
        torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
    )
}  # fmt: skip


def pack(value: Any, name: str, tensors: dict[str, torch.Tensor], depth: int = DEPTH) -> Described:
    """Describe a value; its tensors are added to `tensors`, as they are."""
    if isinstance(value, torch.Tensor):
        return _tensor(value, name, tensors)
    if value is None or type(value) in (bool, int, str):
        return {"is": "value", "of": value}
    if type(value) is float:
        return {"is": "float", "of": value.hex()}
    if isinstance(value, torch.dtype) and dtype_name(value) in DTYPES:
        return {"is": "dtype", "of": dtype_name(value)}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple) and depth:
        kind = type(value).__name__
        return {"is": kind, "of": [pack(part, f"{name}.{i}", tensors, depth - 1) for i, part in enumerate(value)]}
    if isinstance(value, Mapping) and depth and all(type(key) is str for key in value):
        parts = {key: pack(part, f"{name}.{key}", tensors, depth - 1) for key, part in value.items()}
        return {"is": "dict", "of": parts}
    return {"is": "absent", "of": type(value).__name__}


def unpack(described: Any, tensors: Mapping[str, torch.Tensor], device: torch.device, name: str) -> Any:
    """The value that was described, its tensors on a device.

    Raises:
        InputError: It held something that a bundle does not hold.
        LookupError, TypeError, ValueError: The description is not one.
    """
    kind, held = described["is"], described["of"]
    if kind == "tensor":
        tensor = tensors[held].to(device)
        return tensor.requires_grad_() if described["grad"] else tensor
    if kind == "value":
        return held
    if kind == "float":
        return float.fromhex(held)
    if kind == "dtype":
        return DTYPES[held]
    if kind in ("list", "tuple"):
        parts = [unpack(part, tensors, device, f"{name}.{i}") for i, part in enumerate(held)]
        return parts if kind == "list" else tuple(parts)
    if kind == "dict":
        return {str(key): unpack(part, tensors, device, f"{name}.{key}") for key, part in held.items()}
    if kind == "absent":
        raise InputError(f"the call was given {name}, a {held}, which a bundle does not hold, so it cannot be replayed")
    raise ValueError(f"{name} is described as {kind!r}")


def without_values(described: Described) -> Described:
    """A description without what was in it: names, types, dtypes and shapes stay."""
    kind, held = described["is"], described["of"]
    if kind in ("list", "tuple"):
        return {**described, "of": [without_values(part) for part in held]}
    if kind == "dict":
        return {**described, "of": {key: without_values(part) for key, part in held.items()}}
    return {"is": "absent", "of": type(held).__name__} if kind in ("value", "float") else described


def plain(value: Any) -> Any:
    """Figures as strict JSON can hold them: what is not finite becomes its name."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return value


def _tensor(tensor: torch.Tensor, name: str, tensors: dict[str, torch.Tensor]) -> Described:
    held = type(tensor) in (torch.Tensor, torch.nn.Parameter) and dtype_name(tensor.dtype) in DTYPES
    if not held or tensor.layout != torch.strided or tensor.device.type == "meta":
        return {"is": "absent", "of": f"{type(tensor).__name__} of {dtype_name(tensor.dtype)}"}
    if name in tensors:  # a key with a dot in it
        name = f"{name} ({len(tensors)})"
    tensors[name] = tensor
    return {
        "is": "tensor",
        "of": name,
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "grad": tensor.requires_grad,
    }
