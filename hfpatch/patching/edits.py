"""The edits that a patch file can declare, all of them reversible. Declaring one changes nothing.

A template holds the change for every module that a selection finds. Resolved against a model it becomes
`Edit`s: one change to one module each, with the value before. Each edited module carries its own `Record`s
in `__dict__`, so a deepcopy or an unpickled model can report its edits and be reverted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from hfpatch.errors import RefusedError
from hfpatch.given import FUNCTION, want
from hfpatch.patching.context import Context, Target
from hfpatch.patching.kinds.base import Change
from hfpatch.patching.kinds.in_float32.plain import check_plain
from hfpatch.patching.kinds.set_attribute import SetAttribute, settable
from hfpatch.patching.kinds.states import show
from hfpatch.patching.select import Selection

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hfpatch.patching.kinds.dtype_rule import DtypeRule
    from hfpatch.patching.kinds.expansion import Expansion
    from hfpatch.patching.kinds.one_plus_tanh import Bounded

_TO = {"float32": "float32", "weights": "the dtype of its weights"}


@dataclass(frozen=True)
class Edit:
    """One change to one module.

    Attributes:
        path: Path of the module in the object that was passed.
        module: The module.
        change: The change to it.
        before: The value before, for tables; `ABSENT` if there was none.
    """

    path: str
    module: nn.Module = field(repr=False, compare=False)
    change: Change
    before: Any

    @property
    def slot(self) -> str:
        """Name of the changed property, for tables: `eps`, `input dtype`, `tensor weight`, `attention`."""
        return self.change.slot

    @property
    def after(self) -> Any:
        """The new value; for a cast, the hook; for a tensor, the function that computes its values."""
        return self.change.after

    def to_dict(self) -> dict[str, str]:
        """Return path, slot, before and after as strings, for JSON."""
        return {"path": self.path, "slot": self.slot, "before": show(self.before), "after": show(self.after)}


@dataclass(frozen=True)
class Template:
    """A change to every module that a selection finds.

    Attributes:
        where: The modules.
        change: Computes the change to one of them, or several changes.
        text: A few words about it.
    """

    where: Selection
    change: Callable[[Context, Target], Change | Sequence[Change]]
    text: str

    def resolve(self, context: Context) -> Iterable[Edit]:
        """Return the edits for one model. Changes nothing.

        Raises:
            RefusedError: An attribute to set is a property or another data descriptor of the class.
        """
        for target in self.where.targets(context):
            made = self.change(context, target)
            for change in (made,) if isinstance(made, Change) else made:
                yield Edit(target.path, target.module, change, change.now(target.module))

    def __str__(self) -> str:
        return f"{self.text}: {self.where}"


def set_attribute(
    where: Selection,
    name: str | Callable[[Context, Target], str],
    value: Callable[[Context, Target], Any],
    text: str,
) -> Template:
    """Set an attribute of each module.

    Args:
        where: The modules.
        name: Name of the attribute, or a function that returns it.
        value: Computes the new value.
        text: A few words about the edit.
    """

    def change(context: Context, target: Target) -> Change:
        attribute = name if isinstance(name, str) else name(context, target)
        if not settable(target.module, attribute):
            raise RefusedError(
                f"{attribute} of {target.path or 'the model'!r} is a property of {type(target.module).__name__}, "
                "which cannot be set and restored"
            )
        return SetAttribute(attribute, value(context, target))

    return Template(where, change, text)


def set_tensor(where: Selection, name: str, value: Callable[[Context, Target], Any], text: str) -> Template:
    """Replace the values of a parameter or buffer of each module; the tensor stays the same object.

    Args:
        where: The modules.
        name: Name of the tensor in its module.
        value: Returns a picklable, comparable function from the old values to new ones of the same shape.
        text: A few words about the edit.
    """

    def change(context: Context, target: Target) -> Change:
        from hfpatch.patching.kinds.set_tensor import SetTensor

        return SetTensor(name, value(context, target))

    return Template(where, change, text)


def scale_tensor(where: Selection, name: str, exponent: Callable[[Context, Target], int], text: str) -> Template:
    """Multiply a parameter of each module by a power of two, in place, which is undone exactly by a division.

    Args:
        where: The modules.
        name: Name of the parameter in its module.
        exponent: Returns the exponent of 2.
        text: A few words about the edit.
    """

    def change(context: Context, target: Target) -> Change:
        from hfpatch.patching.kinds.in_weights.scale_tensor import ScaleTensor

        return ScaleTensor(name, exponent(context, target))

    return Template(where, change, text)


def set_buffers(
    where: Selection, values: Callable[[Context, Target], Mapping[str, torch.Tensor]], text: str
) -> Template:
    """Replace buffers of each module with tensors that may have another dtype.

    Args:
        where: The modules.
        values: Returns the new tensors, on the CPU, by the buffer's name.
        text: A few words about the edit.
    """

    def change(context: Context, target: Target) -> Sequence[Change]:
        from hfpatch.patching.kinds.in_float32.set_buffer import SetBuffer, Values

        return [SetBuffer(name, Values(tensor)) for name, tensor in values(context, target).items()]

    return Template(where, change, text)


def choose_attention(where: Selection, name: str | Callable[[Context, Target], str], text: str) -> Template:
    """Set the attention implementation of each submodel.

    Args:
        where: The submodels.
        name: An entry of transformers' `AttentionInterface`, or a function that returns one.
        text: A few words about the edit.
    """

    def change(context: Context, target: Target) -> Change:
        from hfpatch.patching.kinds.choose_attention import ChooseAttention

        return ChooseAttention(name if isinstance(name, str) else name(context, target))

    return Template(where, change, text)


def add_targets(where: Selection, gains: Callable[[Context, Target], Iterable[Expansion]], text: str) -> Template:
    """Add missing layers to LoRA adapters.

    Args:
        where: The PEFT `LoraModel`s that hold the adapters.
        gains: Returns the additions, one per adapter.
        text: A few words about the edit.
    """

    def change(context: Context, target: Target) -> Change:
        from hfpatch.patching.kinds.add_targets import AddTargets

        return AddTargets(tuple(gains(context, target)))

    return Template(where, change, text)


def bound_modulation(where: Selection, bounds: Callable[[Context, Target], Bounded]) -> Template:
    """Replace 1 + tanh(x) in each module's own forward with a bounded factor that is 1 at x = 0.

    Args:
        where: The modules.
        bounds: Returns the bounds of the factor.
    """

    def change(context: Context, target: Target) -> Change:
        from hfpatch.patching.kinds.bound_modulation import BoundModulation

        return BoundModulation(bounds(context, target))

    return Template(where, change, "bound the factor 1 + tanh")


def cast_input(where: Selection, to: Literal["float32", "weights"]) -> Template:
    """Cast the residual stream at the input of each module, to float32 or to the dtype of the module's weights."""

    def change(context: Context, target: Target) -> Change:
        from hfpatch.patching.kinds.cast_input import CastInput

        return CastInput(_rule(to, context, target))

    return Template(where, change, f"cast input to {_TO[to]}")


def cast_output(where: Selection, to: Literal["float32", "weights"]) -> Template:
    """Cast the output tensor of each module, to float32 or to the dtype of the module's weights."""

    def change(context: Context, target: Target) -> Change:
        from hfpatch.patching.kinds.cast_output import CastOutput

        return CastOutput(_rule(to, context, target))

    return Template(where, change, f"cast output to {_TO[to]}")


def map_output(where: Selection, function: Callable[[torch.Tensor], torch.Tensor], text: str) -> Template:
    """Pass the output of each module through a function: a soft cap, a scale.

    The function gets the output tensor, or the first item of a tuple, and returns a tensor of the same shape. If the
    forward of the module returns something else, it raises `RefusedError`.

    Args:
        where: The modules.
        function: A function defined at the top of a module, or a frozen dataclass with a `__call__`, whose fields are
            its constants. A lambda and a function of a notebook work too, but are lost when the model is pickled and
            loaded in another process, with a warning.
        text: A few words about the edit.

    Raises:
        InputError: `function` cannot be called with one argument, or is a module.
    """
    want("map_output", function=(function, FUNCTION))

    def change(_context: Context, _target: Target) -> Change:
        from hfpatch.patching.kinds.map_output import MapOutput

        return MapOutput(function)

    return Template(where, change, text)


def copy_output(where: Selection, text: str, *, begins: bool = False) -> Template:
    """Hand out a copy of each output, no leaf of autograd's graph; `begins` makes gradients flow from there on too."""

    def change(_context: Context, _target: Target) -> Change:
        from hfpatch.patching.kinds.in_gradients.copy_output import CopyOutput

        return CopyOutput(begins)

    return Template(where, change, text)


def keep_documents(where: Selection, masked: Callable[[Context, Target], bool]) -> Template:
    """Keep packed documents apart in calls of language models: `masked` returns True for a mask, False for no cache."""

    def change(context: Context, target: Target) -> Change:
        from hfpatch.patching.kinds.in_arguments.keep_documents import KeepDocuments

        return KeepDocuments(masked(context, target))

    return Template(where, change, "keep packed documents apart")


def in_float32(where: Selection) -> Template:
    """Run each module, a torch norm or linear layer, in float32 and outside autocast. Its weights keep their dtype.

    The output is float32. A patch is refused if a weight is quantised.
    """

    def change(_context: Context, target: Target) -> Change:
        from hfpatch.patching.kinds.compute_in_float32 import ComputeInFloat32

        check_plain(target)
        return ComputeInFloat32()

    return Template(where, change, "compute in float32")


def outside_autocast(where: Selection) -> Template:
    """If autocast is on, run each module outside it, its inputs and weights in float32. Else nothing changes."""

    def change(_context: Context, _target: Target) -> Change:
        from hfpatch.patching.kinds.in_float32.outside_autocast import OutsideAutocast

        return OutsideAutocast()

    return Template(where, change, "run outside autocast")


def keep_float32(where: Selection) -> Template:
    """Let the casts of the stream to half precision in each module's own code leave a float32 stream as it is."""

    def change(_context: Context, _target: Target) -> Change:
        from hfpatch.patching.kinds.in_float32.read_stream import KeepFloat32

        return KeepFloat32()

    return Template(where, change, "keep the stream in float32")


def read_stream(where: Selection) -> Template:
    """Let each module compute in float32 if its input is float32, and return the dtype of its weights.

    A patch is refused if a weight is quantised.
    """

    def change(_context: Context, target: Target) -> Change:
        from hfpatch.patching.kinds.in_float32.read_stream import ReadStream

        check_plain(target)
        return ReadStream()

    return Template(where, change, "read the float32 stream")


def in_float32_inside(where: Selection) -> Template:
    """Run everything in each module in float32 and outside autocast: maps, adapters, experts. Weights keep their dtype.

    The output is float32. A patch is refused if a weight is quantised.
    """

    def change(_context: Context, target: Target) -> Change:
        from hfpatch.patching.kinds.compute_inside import ComputeInside

        check_plain(target)
        return ComputeInside()

    return Template(where, change, "compute in float32 inside")


def scale_branch(where: Selection, scale: Callable[[Context, Target], tuple[str, str, int]]) -> Template:
    """Scale the output of each branch's activation by a power of two, and its own output back, in float32.

    Args:
        where: Branches whose output is proportional to the output of one activation in them.
        scale: Returns the arguments of a `ScaleBranch`: names of the activation and of the last map, the exponent.
    """

    def change(context: Context, target: Target) -> Change:
        from hfpatch.patching.kinds.scale_branch import ScaleBranch

        return ScaleBranch(*scale(context, target))

    return Template(where, change, "scale by a power of two inside, float32 at the end")


def scale_map(where: Selection, exponent: Callable[[Context, Target], int]) -> Template:
    """Scale the input of each linear map by a power of two, and its output back, in float32.

    Args:
        where: Linear maps without a bias; in an adapter, the map itself.
        exponent: Returns the exponent: 8 for values 256 times smaller.
    """

    def change(context: Context, target: Target) -> Change:
        from hfpatch.patching.kinds.in_float32.scale_map import ScaleMap

        return ScaleMap(exponent(context, target))

    return Template(where, change, "scale a map by a power of two, float32 at its end")


def _rule(to: Literal["float32", "weights"], context: Context, target: Target) -> DtypeRule:
    from hfpatch.patching.kinds.dtype_rule import dtype_rule

    return dtype_rule(to, target.module, context.compute_dtype, context.stream_dtype)
