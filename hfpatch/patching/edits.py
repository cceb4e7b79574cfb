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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from hfpatch.errors import RefusedError
from hfpatch.patching.context import Context, Target
from hfpatch.patching.kinds.base import Change
from hfpatch.patching.kinds.set_attribute import SetAttribute
from hfpatch.patching.kinds.states import show
from hfpatch.patching.select import Selection

if TYPE_CHECKING:
    from torch import nn

    from hfpatch.patching.kinds.dtype_rule import DtypeRule
    from hfpatch.patching.kinds.expansion import Expansion
    from hfpatch.patching.kinds.one_plus_tanh import Bounded


@dataclass(frozen=True)
class Edit:
    """One change to one module.

    Attributes:
        path: Path of the module from the object that was passed.
        change: What is done to it.
        before: Value before, for tables; `ABSENT` where there was none.
    """

    path: str
    module: nn.Module = field(repr=False, compare=False)
    change: Change
    before: Any

    @property
    def slot(self) -> str:
        """Name of what is changed, for tables and sentences: `eps`, `input dtype`, `tensor weight`, `attention`."""
        return self.change.slot

    @property
    def after(self) -> Any:
        """The value asked for; for a cast, the hook that casts; for a tensor, what draws it."""
        return self.change.after

    def to_dict(self) -> dict[str, str]:
        """As JSON."""
        return {"path": self.path, "slot": self.slot, "before": show(self.before), "after": show(self.after)}


@dataclass(frozen=True)
class Template:
    """What to do to every module that a selection finds."""

    where: Selection
    change: Callable[[Context, Target], Change]
    text: str

    def resolve(self, context: Context) -> Iterable[Edit]:
        """Return the edits for one model. Changes nothing.

        Raises:
            RefusedError: An attribute to be set is not a plain one.
        """
        for target in self.where.targets(context):
            change = self.change(context, target)
            yield Edit(target.path, target.module, change, change.now(target.module))

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

    def change(context: Context, target: Target) -> Change:
        attribute = name if isinstance(name, str) else name(context, target)
        if hasattr(inspect.getattr_static(type(target.module), attribute, None), "__set__"):
            raise RefusedError(
                f"{attribute} of {target.path or 'the model'!r} is a property of {type(target.module).__name__}"
            )
        return SetAttribute(attribute, value(context, target))

    return Template(where, change, text)


def set_tensor(where: Selection, name: str, value: Callable[[Context, Target], Any], text: str) -> Template:
    """Replace the values of a parameter of each module; the parameter stays the same object.

    Args:
        where: The modules.
        name: The parameter's name in its module.
        value: Gives a picklable, comparable function of the old values to new ones of the same shape.
        text: Says it in a few words.
    """

    def change(context: Context, target: Target) -> Change:
        from hfpatch.patching.kinds.set_tensor import SetTensor

        return SetTensor(name, value(context, target))

    return Template(where, change, text)


def choose_attention(where: Selection, name: str | Callable[[Context, Target], str], text: str) -> Template:
    """Let each submodel compute attention by another entry of transformers' `AttentionInterface`.

    Args:
        where: The submodels.
        name: The entry, or a function that picks it.
        text: Says it in a few words.
    """

    def change(context: Context, target: Target) -> Change:
        from hfpatch.patching.kinds.choose_attention import ChooseAttention

        return ChooseAttention(name if isinstance(name, str) else name(context, target))

    return Template(where, change, text)


def add_targets(where: Selection, gains: Callable[[Context, Target], Iterable[Expansion]], text: str) -> Template:
    """Give LoRA adapters the layers they miss.

    Args:
        where: The modules that hold the adapters' layers.
        gains: What each adapter gains.
        text: Says it in a few words.
    """

    def change(context: Context, target: Target) -> Change:
        from hfpatch.patching.kinds.add_targets import AddTargets

        return AddTargets(tuple(gains(context, target)))

    return Template(where, change, text)


def bound_modulation(where: Selection, bounds: Callable[[Context, Target], Bounded]) -> Template:
    """Let 1 + tanh(x) in each module's own forward be a factor between bounds that is 1 at 0.

    Args:
        where: The modules.
        bounds: Gives the bounds.
    """

    def change(context: Context, target: Target) -> Change:
        from hfpatch.patching.kinds.bound_modulation import BoundModulation

        return BoundModulation(bounds(context, target))

    return Template(where, change, "bound the factor 1 + tanh")


def cast_input(where: Selection, to: Literal["float32", "weights"]) -> Template:
    """Cast the stream tensor that goes into each module: to float32, or to the dtype of the module's weights."""

    def change(context: Context, target: Target) -> Change:
        from hfpatch.patching.kinds.cast_input import CastInput

        return CastInput(_rule(to, context, target))

    return Template(where, change, f"cast input to {_named(to)}")


def cast_output(where: Selection, to: Literal["float32", "weights"]) -> Template:
    """Cast what comes out of each module: to float32, or to the dtype of the module's weights."""

    def change(context: Context, target: Target) -> Change:
        from hfpatch.patching.kinds.cast_output import CastOutput

        return CastOutput(_rule(to, context, target))

    return Template(where, change, f"cast output to {_named(to)}")


def in_float32(where: Selection) -> Template:
    """Let each module, a torch norm or linear map, compute in float32 outside autocast, from its weights as they are.

    What comes out is float32.
    """

    def change(_context: Context, _target: Target) -> Change:
        from hfpatch.patching.kinds.compute_in_float32 import ComputeInFloat32

        return ComputeInFloat32()

    return Template(where, change, "compute in float32")


def _rule(to: Literal["float32", "weights"], context: Context, target: Target) -> DtypeRule:
    from hfpatch.patching.kinds.dtype_rule import dtype_rule

    return dtype_rule(to, target.module, context.compute_dtype, context.stream_dtype)


def _named(to: Literal["float32", "weights"]) -> str:
    return to if to == "float32" else "the dtype of its weights"
