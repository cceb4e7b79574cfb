"""A step that ended in an error: the module that was running, and what its call held."""

from __future__ import annotations

import inspect
import linecache
import re
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from hfpatch.dtypes import dtype_name
from hfpatch.errors import InputError
from hfpatch.guarding.checks import clean_name
from hfpatch.model.wrapping import unwrap

IN_PLACE = "leaf Variable that requires grad is being used in an in-place operation"
"""What torch says of a write into a tensor that a hook made require a gradient, or into a view of one."""
LONG = 160
"""Characters of an error's text that are shown."""


@dataclass(frozen=True)
class Written:
    """A write in place that torch refuses.

    Attributes:
        tensor: Name of the tensor where it is written into; empty if it is not known.
        embedding: Path of the embedding whose output it is; empty if it is not known.
        line: The line of code.
    """

    tensor: str
    embedding: str
    line: str


@dataclass(frozen=True)
class Raised:
    """A step that ended in an error.

    Attributes:
        error: Class and text of the error.
        path: The innermost module whose code was running; empty for the model itself.
        cls: Name of its class.
        held: Dtypes and shapes of the tensors in its call, by name.
        weight: Dtype of the module's own weight; None if it has none.
        written: The write in place into a leaf that ended it; None if none did.
    """

    error: str
    path: str
    cls: str
    held: Mapping[str, str]
    weight: torch.dtype | None
    written: Written | None = None


def check_keys(error: BaseException, model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Raise if the batch, not the model, is at fault: its keys do not fit the signature of forward."""
    inner = unwrap(model)
    if not isinstance(error, TypeError):
        return
    try:
        inspect.signature(inner.forward).bind(**batch)
    except TypeError:
        raise InputError(
            f"check: {type(inner).__name__} does not take this batch ({', '.join(map(str, batch))}): {error}; pass "
            "the keys that its forward names, or leave batch= out"
        ) from error


def raised(error: BaseException, model: nn.Module, embedded: Mapping[str, torch.Tensor]) -> Raised:
    """Return the innermost module of the model that was running, from the frames of the traceback.

    Args:
        error: What was raised.
        model: The model.
        embedded: Outputs of embeddings, by the embedding's path.
    """
    paths = {id(m): clean_name(n) for n, m in model.named_modules()}
    place: nn.Module = model
    held: dict[str, str] = {}
    frames = [(f, line) for f, line in traceback.walk_tb(error.__traceback__)]
    for frame, _ in frames:
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(owner, nn.Module) and id(owner) in paths:
            place, held = owner, dict(_tensors(frame.f_locals))
    weight = dict(place.named_parameters(recurse=False)).get("weight")
    text = " ".join(str(error).split())
    short = text if len(text) <= LONG else f"{text[: LONG // 2]} ... {text[-LONG // 2 :]}"
    return Raised(
        error=f"{type(error).__name__}: {short}".rstrip(": ."),
        path=paths[id(place)],
        cls=type(place).__name__,
        held=held,
        weight=None if weight is None else weight.dtype,
        written=_written(frames, embedded) if IN_PLACE in text else None,
    )


def _written(frames: list[tuple[FrameType, int]], embedded: Mapping[str, torch.Tensor]) -> Written:
    """Return which tensor was written into: a name, in the line that ran, of what an embedding returned."""
    storages = {_storage(t): path for path, t in embedded.items()}
    for frame, number in reversed(frames):
        line = linecache.getline(frame.f_code.co_filename, number).strip()
        for name, value in frame.f_locals.items():
            if isinstance(value, torch.Tensor) and re.search(rf"\b{name}\b", line) is not None:
                path = storages.get(_storage(value))
                if path is not None:
                    return Written(name, path, line)
        if isinstance(frame.f_locals.get("self"), nn.Module):
            break  # what calls the module that writes only hands the tensor on
    return Written("", "", "")


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            yield name, f"{dtype_name(value.dtype)} {tuple(value.shape)}"
