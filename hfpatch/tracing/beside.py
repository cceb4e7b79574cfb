"""Functions that are watched beside the model, such as a loss that is computed outside of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from hfpatch.errors import InputError
from hfpatch.given import shown
from hfpatch.tracing import failed_forward

if TYPE_CHECKING:
    from hfpatch.tracing.watch import Watch


class Function(nn.Module):
    """A function as a module, so that its calls can be kept and run again."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)


def named(function: Callable[..., Any]) -> tuple[nn.Module, str]:
    """Return a function as a module, and the name under which it is recorded, such as `grpo_loss()`.

    Raises:
        InputError: It cannot be called.
    """
    if not callable(function):
        raise InputError(f"watch: loss_fn=: want a function or module that computes a loss; got {shown(function)}")
    module = function if isinstance(function, nn.Module) else Function(function)
    while isinstance(function, functools.partial):
        function = function.func
    name: str = getattr(function, "__name__", type(function).__name__)
    return module, f"{'loss' if name == '<lambda>' else name}()"


def run(watch: Watch, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module, and record the call as one of a block beside the model.

    Args:
        watch: The record of the step.
        path: The name under which it is recorded.
        module: The function as a module, or the module that the user watches.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    with watch.recording(path, module):
        watch.called(path, module, args, kwargs, True)
        try:
            output = module(*args, **kwargs)
        except Exception as error:
            watch.raised = failed_forward.of(error, path)
            raise
        watch.returned(path, output, True)
    watch.end_at(output)
    return output
