"""The closed set of invertible edits. A patch file names them; only the engine carries them out.

    set_attribute      a module's attribute takes another value
    set_tensor         a parameter's values are replaced in place
    cast_input         what goes into a module is cast
    cast_output        what comes out of a module is cast
    in_float32         a torch norm or linear map computes in float32, its weights as they are
    choose_attention   a submodel's attention implementation
    add_targets        a LoRA adapter gains layers
    bound_modulation   1 + tanh(x) in a module's own forward becomes a bounded factor

A template says what to change for whatever a selection finds. Resolved against a model it becomes an
`Edit`: one change to one module, with the value before. Each edited module carries its own `Record`s,
in `__dict__`, so that a deepcopy or an unpickled model can be asked and reverted on its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from hfpatch.errors import RefusedError
from hfpatch.patching.context import Context, Target
from hfpatch.patching.kinds.base import Kind
from hfpatch.patching.records import UNFINISHED, Record, State, add, advance, forget, record_at, show
from hfpatch.patching.select import Selection

if TYPE_CHECKING:
    from torch import nn

FP32_LOGITS = "hfpatch_fp32_logits"
FP32_LOGITS_MASKED = "hfpatch_fp32_logits_masked"
"""With eager attention's masks: for submodels that are not all causal, or whose code wants masks to add."""
WITHOUT_CUDNN = "hfpatch_sdpa_without_cudnn"
IN_FLOAT32 = "input compute dtype"
"""The slot of a module that computes in float32."""


@dataclass(frozen=True)
class Edit:
    """One change to one module.

    Attributes:
        path: Path of the module from the object that was passed.
        kind: Name of the kind of edit.
        slot: What is changed: `eps`, `input dtype`, `tensor weight`, `attention`.
        before: Value before; `ABSENT` where there was none.
        after: Value after; for a cast, the hook that casts; for a tensor, what draws it.
    """

    path: str
    module: nn.Module = field(repr=False, compare=False)
    kind: str
    slot: str
    before: Any
    after: Any

    def to_dict(self) -> dict[str, str]:
        """As JSON."""
        return {"path": self.path, "slot": self.slot, "before": show(self.before), "after": show(self.after)}


@dataclass(frozen=True)
class Template:
    """What to do to every module that a selection finds."""

    where: Selection
    kind: str
    value: Callable[[Context, Target], Any]
    slot: Callable[[Context, Target], str]
    text: str

    def resolve(self, context: Context) -> Iterable[Edit]:
        """The edits for one model. Changes nothing.

        Raises:
            RefusedError: An attribute to be set is not a plain one.
        """
        for target in self.where.targets(context):
            slot = self.slot(context, target)
            if hasattr(inspect.getattr_static(type(target.module), slot, None), "__set__"):
                raise RefusedError(
                    f"{slot} of {target.path or 'the model'!r} is a property of {type(target.module).__name__}"
                )
            before = kind_of(self.kind).now(target.module, slot)
            yield Edit(target.path, target.module, self.kind, slot, before, self.value(context, target))

    def __str__(self) -> str:
        return f"{self.text}: {self.where}"


def set_attribute(
    where: Selection,
    name: str | Callable[[Context, Target], str],
    value: Callable[[Context, Target], Any],
    text: str,
) -> Template:
    """Give an attribute of each module another value.

    Args:
        where: The modules.
        name: The attribute, or a function that finds it.
        value: Computes the new value.
        text: Says it in a few words.
    """
    return Template(where, "attribute", value, name if callable(name) else lambda _c, _t: name, text)


def set_tensor(where: Selection, name: str, value: Callable[[Context, Target], Any], text: str) -> Template:
    """Replace the values of a parameter of each module; the parameter stays the same object.

    Args:
        where: The modules.
        name: The parameter's name in its module.
        value: Gives a picklable, comparable function of the old values to new ones of the same shape.
        text: Says it in a few words.
    """
    return Template(where, "tensor", value, lambda _c, _t: f"tensor {name}", text)


def choose_attention(where: Selection, name: str | Callable[[Context, Target], str], text: str) -> Template:
    """Let each submodel compute attention by another entry of transformers' `AttentionInterface`.

    Args:
        where: The submodels.
        name: The entry, or a function that picks it.
        text: Says it in a few words.
    """
    return Template(
        where, "attention", name if callable(name) else lambda _c, _t: name, lambda _c, _t: "attention", text
    )


def add_targets(
    where: Selection, value: Callable[[Context, Target], Any], slot: Callable[[Context, Target], str], text: str
) -> Template:
    """Give LoRA adapters the layers they miss.

    Args:
        where: The modules that hold the adapters' layers.
        value: What each adapter gains.
        slot: Names it.
        text: Says it in a few words.
    """
    return Template(where, "adapter", value, slot, text)


def bound_modulation(where: Selection, bounds: Callable[[Context, Target], Any]) -> Template:
    """Let 1 + tanh(x) in each module's own forward be a factor between bounds that is 1 at 0.

    Args:
        where: The modules.
        bounds: Gives a `functions.Bounded`.
    """
    return Template(where, "one-plus-tanh", bounds, lambda _c, _t: "1 + tanh", "bound the factor 1 + tanh")


def cast_input(where: Selection, to: Literal["float32", "weights"]) -> Template:
    """Cast the stream tensor that goes into each module: to float32, or to the dtype of the module's weights."""
    return _cast("input", where, to)


def cast_output(where: Selection, to: Literal["float32", "weights"]) -> Template:
    """Cast what comes out of each module: to float32, or to the dtype of the module's weights."""
    return _cast("output", where, to)


def in_float32(where: Selection) -> Template:
    """Let each module, a torch norm or linear map, compute in float32 outside autocast, from its weights as they are.

    What comes out is float32.
    """

    def hook(_context: Context, _target: Target) -> Any:
        from hfpatch.patching.kinds.casts import InFloat32

        return InFloat32()

    return Template(where, "hook", hook, lambda _c, _t: IN_FLOAT32, "compute in float32")


def _cast(side: Literal["input", "output"], where: Selection, to: Literal["float32", "weights"]) -> Template:
    def hook(context: Context, target: Target) -> Any:
        from hfpatch.patching.kinds.casts import CastInput, CastOutput, dtype_rule

        rule = dtype_rule(to, target.module, context.compute_dtype, context.stream_dtype)
        return CastInput(rule) if side == "input" else CastOutput(rule)

    named = to if to == "float32" else "the dtype of its weights"
    return Template(where, "hook", hook, lambda _c, _t: f"{side} dtype", f"cast {side} to {named}")


def kind_of(name: str) -> Kind:
    """The kind of edit of a name. Imports torch, which the listing of patches does without."""
    from hfpatch.patching.kinds.table import KINDS

    return KINDS[name]


def do(root: nn.Module, edit: Edit, application: str, patch: str) -> None:
    """Carry out one edit, the record first. An older record of the same place, no longer true, is undone before."""
    kind = kind_of(edit.kind)
    older = record_at(edit.module, edit.slot)
    if older is not None:
        undo(root, edit.module, older)
    before = kind.inverse(root, edit.module, edit.slot, edit.after)
    record = Record(application, patch, edit.kind, edit.slot, before, edit.after, "writing")
    add(edit.module, record)
    try:
        kind.write(root, edit.module, record)
    except BaseException:
        undo(root, edit.module, record)  # it may have been written before it raised
        raise
    advance(edit.module, record, "written")


def undo(root: nn.Module, module: nn.Module, record: Record) -> None:
    """Put back what was there before a record, and forget the record."""
    record = record_at(module, record.slot) or record  # the undo of another may have changed what it goes back to
    if record.phase == "written":
        record = advance(module, record, "undoing")
    kind_of(record.kind).restore(root, module, record)
    forget(module, record)


def state_of(root: nn.Module, module: nn.Module, record: Record, *, compare: bool = False) -> State:
    """Return what has become of an edit, by a look at the model; with `compare`, at the values of tensors too."""
    if record.phase != "written":
        return UNFINISHED
    kind = kind_of(record.kind)
    return kind.compare(root, module, record) if compare else kind.read(root, module, record)


@contextmanager
def lifted(root: nn.Module, log: Sequence[tuple[nn.Module, Record]]) -> Generator[None]:
    """The modules as they were before these records, those of them that are in force; afterwards as they are."""
    log = [(module, record) for module, record in log if state_of(root, module, record).in_force]
    begun: list[tuple[nn.Module, Record, list[Any]]] = []
    try:
        for module, record in reversed(log):
            held: list[Any] = []
            begun.append((module, record, held))
            kind_of(record.kind).lift(root, module, record, held)
        yield
    finally:
        for module, record, held in reversed(begun):
            kind_of(record.kind).lower(root, module, record, held)
