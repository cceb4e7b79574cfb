"""Changes as JSON and back. What is no data, a function of a patch, is made again by the patch and compared."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

import torch
from torch import nn

from hfpatch.given import shown
from hfpatch.model.code import bytecode_digest
from hfpatch.patching.kinds.add_targets import AddTargets
from hfpatch.patching.kinds.base import Change
from hfpatch.patching.kinds.bound_modulation import BoundModulation
from hfpatch.patching.kinds.cast_input import CastInput
from hfpatch.patching.kinds.cast_output import CastOutput
from hfpatch.patching.kinds.choose_attention import ChooseAttention
from hfpatch.patching.kinds.compute_in_float32 import ComputeInFloat32
from hfpatch.patching.kinds.compute_inside import ComputeInside
from hfpatch.patching.kinds.in_arguments.keep_documents import KeepDocuments
from hfpatch.patching.kinds.in_float32.outside_autocast import OutsideAutocast
from hfpatch.patching.kinds.in_float32.read_stream import KeepFloat32, ReadStream
from hfpatch.patching.kinds.in_float32.scale_map import ScaleMap
from hfpatch.patching.kinds.in_float32.set_buffer import SetBuffer, Values
from hfpatch.patching.kinds.in_gradients.copy_output import CopyOutput
from hfpatch.patching.kinds.in_weights.scale_tensor import ScaleTensor
from hfpatch.patching.kinds.map_output import MapOutput
from hfpatch.patching.kinds.scale_branch import ScaleBranch
from hfpatch.patching.kinds.set_attribute import SetAttribute
from hfpatch.patching.kinds.set_tensor import SetTensor
from hfpatch.patching.manifest.typed import plain, typed

KINDS: dict[str, type[Change]] = {
    cls.__name__: cls
    for cls in (
        AddTargets, BoundModulation, CastInput, CastOutput, ChooseAttention, ComputeInFloat32, ComputeInside,
        CopyOutput, KeepDocuments, KeepFloat32, OutsideAutocast, ReadStream, ScaleBranch, ScaleMap, ScaleTensor,
        SetAttribute,
    )
}  # fmt: skip
"""The kinds whose fields are data."""
WITH_TENSORS: dict[str, Callable[[str, torch.Tensor], Change]] = {
    "SetTensor": lambda name, values: SetTensor(name, Stored(Values(values))),
    "SetBuffer": lambda name, values: SetBuffer(name, Values(values)),
}
"""The kinds whose values are in the file of tensors."""
PUBLIC = re.compile(r"[^\W_]\w*")


@dataclass(frozen=True)
class Stored:
    """Returns these values, whatever was there: a tensor from the file of tensors."""

    values: Values

    def __call__(self, old: torch.Tensor) -> torch.Tensor:
        """Return the values, on the device of those that were there."""
        return self.values.tensor.to(old.device)

    def __str__(self) -> str:
        return "as saved"


def encoded(change: Change) -> dict[str, Any] | None:
    """Return a change as JSON, without its tensors; None if the patch has to make it again."""
    name = type(change).__name__
    if isinstance(change, (SetTensor, SetBuffer)):
        return {"kind": name, "name": change.name}
    if name not in KINDS or (isinstance(change, SetAttribute) and not _is_plain(change.value)):
        return None
    return {"kind": name, **plain(change)}


def decoded(values: Any, tensor: torch.Tensor | None) -> Change:
    """Return the change that `encoded` made JSON.

    Args:
        values: The JSON.
        tensor: The tensor that it sets; None if it sets none.

    Raises:
        TypeError: It is no such change.
    """
    if not isinstance(values, dict):
        raise TypeError("a change is no object")
    held = dict(cast("dict[str, Any]", values))
    kind = str(held.pop("kind", None))
    if kind in WITH_TENSORS and tensor is not None and held.keys() == {"name"}:
        return WITH_TENSORS[kind](typed(held["name"], str, "name"), tensor)
    if kind not in KINDS:
        raise TypeError(f"there is no kind of change {shown(kind)} here")
    change: Change = typed(held, KINDS[kind], kind)
    if isinstance(change, SetAttribute) and not (_is_plain(change.value) and PUBLIC.fullmatch(change.name)):
        raise TypeError("it sets no public attribute to a plain value")
    return change


def identity(change: Change) -> str:
    """Return a few words that identify a change which is no data: names, constants, and digits of its code.

    Raises:
        ValueError: Its function cannot be told from others.
    """
    if isinstance(change, SetAttribute):
        return f"{change.name} = {' '.join(_words(change.value))}"
    if isinstance(change, MapOutput):
        return f"output by {' '.join(_words(change.function))}"
    raise ValueError(f"it is a {type(change).__name__}")


def _words(value: Any) -> Iterable[str]:
    if isinstance(value, FunctionType):
        return value.__qualname__, bytecode_digest(value)
    cls = type(value)
    fields = _fields(value)
    if not all(_is_plain(each) or isinstance(each, nn.Module) for each in fields.values()):
        raise ValueError(f"it is a {cls.__name__}, whose fields are no plain values")
    constants = (f"{name}={each!r}" for name, each in fields.items() if not isinstance(each, nn.Module))
    function = inspect.getattr_static(cls, "__call__", None)
    ours = cls.__module__.partition(".")[0] == "hfpatch"
    code = () if ours or not isinstance(function, FunctionType) else (bytecode_digest(function),)
    return cls.__qualname__, *constants, *code


def _fields(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    return dict(getattr(value, "__dict__", {}))


def _is_plain(value: Any) -> bool:
    """True for None and for finite numbers, bools and strings."""
    return value is None or type(value) in (bool, int, str) or (type(value) is float and abs(value) < float("inf"))
