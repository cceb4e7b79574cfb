"""A change that passes the output of a module through a function."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hfpatch.compat import hooks
from hfpatch.errors import RefusedError
from hfpatch.patching.kinds.hook_change import HookChange
from hfpatch.patching.kinds.states import State


@dataclass(frozen=True)
class Lost:
    """A function that a pickled model names and this process does not find.

    Attributes:
        name: Its name.
        pickled: Its pickle, so that the model can be saved again and loaded where the function is found; empty for a
            function that could not be pickled.
    """

    name: str
    pickled: bytes = b""


@dataclass(frozen=True)
class MapOutput(HookChange):
    """A forward hook that replaces a module's output tensor, or the first item of an output tuple, by a function of it.

    Two changes are equal if their functions are. A deepcopy shares the function. A pickle holds the function as pickle
    does, by its name; a process that does not find it loads the model without the effect of this edit, warns, and
    reports the edit as *gone*.
    """

    function: Callable[[torch.Tensor], torch.Tensor] | Lost

    @property
    def slot(self) -> str:
        return "output"

    def write(self, root: nn.Module, module: nn.Module, before: Any) -> None:
        hooks.after(module, self)

    def read(self, root: nn.Module, module: nn.Module, before: Any) -> State:
        if isinstance(self.function, Lost):
            return State("gone", f"without its function {self.function.name}, which is not found here")
        return super().read(root, module, before)

    def __call__(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        """Return the output with its tensor replaced; None, which changes nothing, if the function is lost.

        Raises:
            RefusedError: The output has no such tensor, or the function returns something else than a tensor.
        """
        if isinstance(self.function, Lost):
            return None
        tensor = output[0] if type(output) is tuple and output else output
        now = self.function(tensor) if isinstance(tensor, torch.Tensor) else None
        if not isinstance(now, torch.Tensor):
            what, found = ("returns", now) if isinstance(tensor, torch.Tensor) else ("cannot be applied to", output)
            raise RefusedError(
                f"{self} {what} a {type(found).__name__} at {type(module).__name__}: want a function from a tensor to "
                "a tensor, for a module whose output is a tensor or a tuple that begins with one"
            )
        return (now, *output[1:]) if tensor is not output else now

    def __deepcopy__(self, memo: dict[int, Any]) -> MapOutput:
        return self

    def __reduce__(self) -> tuple[Callable[..., MapOutput], tuple[str, bytes]]:
        if isinstance(self.function, Lost):
            return restored, (self.function.name, self.function.pickled)
        try:
            pickled = pickle.dumps(self.function)
        except (pickle.PicklingError, AttributeError, TypeError):
            pickled = b""
        owner = self.function if hasattr(self.function, "__qualname__") else type(self.function)
        if not pickled or owner.__module__ == "__main__":
            warnings.warn(
                f"{self} is not in a module that another process can import: a process that loads this model runs it "
                "without this edit; define the function in a module to save it",
                stacklevel=2,
            )
        return restored, (str(self), pickled)

    def __str__(self) -> str:
        if isinstance(self.function, Lost):
            return self.function.name
        return getattr(self.function, "__qualname__", None) or repr(self.function)


def restored(name: str, pickled: bytes) -> MapOutput:
    """Return a change from its pickle. A function that is not found here is `Lost`, with a warning."""
    try:
        if pickled:
            return MapOutput(pickle.loads(pickled))  # noqa: S301 - as the pickle that this is part of
    except (ImportError, AttributeError):
        pass
    warnings.warn(
        f"an edit of this model passes an output through {name}, which is not found here: the edit has no effect; "
        "hfpatch.status(model) names the module, hfpatch.revert(model) removes the edit",
        stacklevel=2,
    )
    return MapOutput(Lost(name, pickled))
