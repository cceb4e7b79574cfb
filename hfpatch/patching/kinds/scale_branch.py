"""A change that computes a branch with values smaller by a power of two, and gives its output in float32."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hfpatch.compat import hooks
from hfpatch.errors import RefusedError
from hfpatch.patching.kinds.hook_change import HookChange
from hfpatch.patching.kinds.states import ABSENT, State

Three = tuple[tuple[nn.Module, "Open | Shrink | Grow"], ...]
"""The modules of one branch, each with its hook: the branch, its activation, the branch again."""


@dataclass(frozen=True)
class ScaleBranch(HookChange):
    """Multiplies the output of a branch's activation by 2^-exponent, and its own output, in float32, by 2^exponent.

    Between the two, every product and sum is smaller by this factor, adapters and quantised maps included. A power of
    two changes no digit of a number, so the result is the same but for values too small for the dtype. Right only for a
    branch whose output is proportional to that of its activation.

    The hooks of a call work together: the activation is scaled only during a call of the branch. A call in which it did
    not run raises an error, and so does one after an adapter has added a bias, which would be scaled up. `before` holds
    the hooks, by module.

    Args:
        activation: Name of the activation in the branch.
        last: Name of the last map in the branch; empty for stacked experts.
        exponent: 8 for values 256 times smaller.
    """

    activation: str
    last: str
    exponent: int

    widens = True

    @property
    def slot(self) -> str:
        return "branch scale"

    def inverse(self, root: nn.Module, module: nn.Module) -> Three:
        calls = Calls()
        grow = Grow(self.activation, self.exponent, calls)
        acts = module.get_submodule(self.activation)
        return (module, Open(self.last, calls)), (acts, Shrink(self.exponent, calls)), (module, grow)

    def write(self, root: nn.Module, module: nn.Module, before: Three) -> None:
        for each, hook in before:
            if isinstance(hook, Open):
                hooks.before(each, hook, with_kwargs=True)
            else:
                hooks.after(each, hook)

    def hooks(self, module: nn.Module, before: Three) -> Iterable[tuple[nn.Module, tuple[Any, ...]]]:
        return ((each, (hook,)) for each, hook in before)

    def read(self, root: nn.Module, module: nn.Module, before: Three) -> State:
        if before is ABSENT or before[1][0] is not getattr(module, self.activation, None):
            return State("gone", f"without its activation {self.activation}, which was replaced since")
        return super().read(root, module, before)

    def __str__(self) -> str:
        return f"2^-{self.exponent}, float32 at its end"


class Calls:
    """The calls of a branch that have begun, by thread: how often the activation ran in them."""

    def __init__(self) -> None:
        self.ran: dict[int, int] = {}

    @property
    def thread(self) -> int:
        """The present thread; 0 while torch.compile traces, which cannot ask for it."""
        return 0 if torch.compiler.is_compiling() else threading.get_ident()

    def __reduce__(self) -> tuple[type[Calls], tuple[()]]:
        return Calls, ()  # a copy has begun no call


class Open:
    """A forward pre-hook of a branch: a call of it begins."""

    def __init__(self, last: str, calls: Calls) -> None:
        self.last, self.calls = last, calls

    def __call__(self, module: nn.Module, _args: Any, kwargs: dict[str, Any] | None = None) -> None:
        """Begin a call. Without `kwargs` the hook was removed during it.

        Raises:
            RefusedError: The last map adds a bias since the patch was applied.
        """
        if kwargs is None:
            return
        if self.last and (bias := added_bias(getattr(module, self.last))):
            raise RefusedError(
                f"{type(module).__name__} runs scaled by a power of two, and its {self.last} adds {bias} since, which "
                f"would be scaled too; {AGAIN}"
            )
        self.calls.ran[self.calls.thread] = 0


def added_bias(last: nn.Module) -> str:
    """Return the name of a bias that the last map of a branch adds, with its adapters; empty if it adds none."""
    for name, module in last.named_modules():
        if getattr(module, "bias", None) is not None:
            return f"{name}.bias" if name else "a bias"
    return ""


AGAIN = 'call hfpatch.revert(model, only="fp16-branch-overflow"), then apply it again'


class Shrink:
    """A forward hook of an activation: scales its output down, during a call of its branch."""

    def __init__(self, exponent: int, calls: Calls) -> None:
        self.exponent, self.calls = exponent, calls

    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Return the output times 2^-exponent, in its dtype."""
        thread = self.calls.thread
        if thread not in self.calls.ran:
            return None
        self.calls.ran[thread] += 1
        return output * 2.0**-self.exponent


class Grow:
    """A forward hook of a branch: scales its output back up, in float32."""

    def __init__(self, activation: str, exponent: int, calls: Calls) -> None:
        self.activation, self.exponent, self.calls = activation, exponent, calls

    def __call__(self, module: nn.Module, _args: Any, output: Any) -> Any:
        """Return the output, or the first item of a tuple, in float32 and times 2^exponent.

        Raises:
            RefusedError: The activation did not run in this call, or the output is no tensor.
        """
        ran = self.calls.ran.pop(self.calls.thread, None)
        if ran is None:  # the hooks were set during this call
            return None
        tensor = output[0] if type(output) is tuple and output else output
        if not ran and isinstance(tensor, torch.Tensor) and tensor.numel():
            raise RefusedError(
                f"{type(module).__name__} was to run scaled by 2^-{self.exponent}, but its {self.activation} did not "
                f"run: another forward (a fused or kernelised one) computes it; load the model without it, or {AGAIN}"
            )
        if not isinstance(tensor, torch.Tensor):
            raise RefusedError(
                f"{type(module).__name__} was to run scaled by 2^-{self.exponent}, but returns a "
                f"{type(tensor).__name__}: want a tensor, or a tuple that begins with one"
            )
        wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * 2.0**self.exponent
        return (wide, *output[1:]) if tensor is not output else wide
