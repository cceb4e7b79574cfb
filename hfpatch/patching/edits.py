# hooks are found and taken off by identity, which torch's handles cannot do on a deepcopy
# pyright: reportPrivateUsage=false
"""The closed set of invertible edits. A patch file names them; only the engine carries them out.

    set_attribute   a module's attribute takes another value
    cast_input      what goes into a module is cast
    cast_output     what comes out of a module is cast

A template says what to change for whatever a selection finds. Resolved against a model it becomes an
`Edit`: one change to one module, with the value before. Each edited module carries its own `Record`s,
in `__dict__`, so that a deepcopy or an unpickled model can be asked and reverted on its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from hfpatch.errors import RefusedError
from hfpatch.patching.context import Context, Target
from hfpatch.patching.select import Selection

if TYPE_CHECKING:
    from torch import nn

RECORDS = "_hfpatch"
"""Key in a module's `__dict__` under which its records are kept while it is edited."""


class Missing(Enum):
    """Stands for "there was nothing"; an enum member stays itself through copies and pickles."""

    ABSENT = "absent"


ABSENT = Missing.ABSENT


@dataclass(frozen=True)
class Edit:
    """One change to one module.

    Attributes:
        path: Path of the module from the object that was passed.
        slot: What is changed: `eps`, `input dtype`, `output dtype`.
        before: Value before; `ABSENT` where there was none.
        after: Value after; for a cast, the hook that casts.
    """

    path: str
    module: nn.Module = field(repr=False, compare=False)
    slot: str
    before: Any
    after: Any

    def to_dict(self) -> dict[str, str]:
        """As JSON."""
        return {"path": self.path, "slot": self.slot, "before": show(self.before), "after": show(self.after)}


@dataclass(frozen=True)
class Record:
    """An undo-log entry: which patches of which application made an edit, and what was there before."""

    application: str
    patch: str
    slot: str
    before: Any
    after: Any


def show(value: object) -> str:
    """A value of an edit, in a table cell."""
    if value is ABSENT:
        return "-"
    if isinstance(value, (int, float, str, bool)):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return str(value) if type(value).__str__ is not object.__str__ else type(value).__name__


@dataclass(frozen=True)
class Template:
    """What to do to every module that a selection finds."""

    where: Selection
    value: Callable[[Context, Target], Any]
    name: Callable[[Context, Target], str]
    text: str

    def resolve(self, context: Context) -> Iterable[Edit]:
        """The edits for one model. Changes nothing.

        Raises:
            RefusedError: An attribute to be set is not a plain one.
        """
        for target in self.where.targets(context):
            name = self.name(context, target)
            if hasattr(inspect.getattr_static(type(target.module), name, None), "__set__"):
                raise RefusedError(
                    f"{name} of {target.path or 'the model'!r} is a property of {type(target.module).__name__}"
                )
            before = target.module.__dict__.get(name, ABSENT)  # a cast's slot is no attribute: absent
            yield Edit(target.path, target.module, name, before, self.value(context, target))

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
    return Template(where, value, name if callable(name) else lambda _c, _t: name, text)


def cast_input(where: Selection, to: Literal["float32", "weights"]) -> Template:
    """Cast the stream tensor that goes into each module: to float32, or to the dtype of the module's weights."""
    return _cast("input", where, to)


def cast_output(where: Selection, to: Literal["float32", "weights"]) -> Template:
    """Cast what comes out of each module: to float32, or to the dtype of the module's weights."""
    return _cast("output", where, to)


def _cast(side: Literal["input", "output"], where: Selection, to: Literal["float32", "weights"]) -> Template:
    def hook(context: Context, target: Target) -> Any:
        from hfpatch.patching.hooks import CastInput, CastOutput, dtype_rule

        rule = dtype_rule(to, target.module, context.compute_dtype, context.stream_dtype)
        return CastInput(rule) if side == "input" else CastOutput(rule)

    named = to if to == "float32" else "the dtype of its weights"
    return Template(where, hook, lambda _c, _t: f"{side} dtype", f"cast {side} to {named}")


def do(edit: Edit, application: str, patch: str) -> None:
    """Carry out one edit, the record first."""
    record = Record(application, patch, edit.slot, edit.before, edit.after)
    records = [*records_of(edit.module), record]
    edit.module.__dict__[RECORDS] = records
    try:
        _write(edit.module, edit.slot, edit.after)
    except BaseException:
        undo(edit.module, record)  # it may have been written before it raised
        raise


def undo(module: nn.Module, record: Record) -> None:
    """Put back what was there before a record, and forget the record."""
    _restore(module, record)
    _drop(module, record)


@contextmanager
def lifted(log: Sequence[tuple[nn.Module, Record]]) -> Generator[None]:
    """The modules as they were before these records; afterwards as they are, hooks in the order they had."""
    hooks = [(kind, dict(kind)) for module, _ in log for kind in _hook_tables(module)]
    for module, record in reversed(log):
        _restore(module, record)
    try:
        yield
    finally:
        for kind, held in hooks:
            kind.clear()
            kind.update(held)
        for module, record in log:
            if not record.slot.endswith(" dtype"):
                setattr(module, record.slot, record.after)


def _hook_tables(module: nn.Module) -> tuple[dict[int, Any], ...]:
    return (
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    )


def records_of(module: nn.Module) -> list[Record]:
    """The records a module carries, oldest first."""
    return module.__dict__.get(RECORDS, [])


def _drop(module: nn.Module, record: Record) -> None:
    rest = [r for r in records_of(module) if r is not record]
    if rest:
        module.__dict__[RECORDS] = rest
    else:
        module.__dict__.pop(RECORDS, None)


def _write(module: nn.Module, slot: str, value: Any) -> None:
    if slot == "input dtype":
        module.register_forward_pre_hook(value, with_kwargs=True)
    elif slot == "output dtype":
        module.register_forward_hook(value)
    else:
        setattr(module, slot, value)


def _restore(module: nn.Module, record: Record) -> None:
    if record.slot == "input dtype":
        _unhook(record.after, module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)
    elif record.slot == "output dtype":
        _unhook(
            record.after,
            module._forward_hooks,
            module._forward_hooks_with_kwargs,
            module._forward_hooks_always_called,
        )
    elif record.before is ABSENT:
        module.__dict__.pop(record.slot, None)
    else:
        module.__dict__[record.slot] = record.before  # past any setter: this was its value


def _unhook(hook: object, hooks: dict[int, Any], *flags: dict[int, Any]) -> None:
    for key in [k for k, h in hooks.items() if h is hook]:
        del hooks[key]
        for flag in flags:
            flag.pop(key, None)
