"""A change that casts the input of a module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from hfpatch.compat import hooks
from hfpatch.compat.sharding import narrows_stream
from hfpatch.errors import RefusedError
from hfpatch.patching.kinds.compute_in_float32 import computes_in_float32
from hfpatch.patching.kinds.dtype_rule import DtypeRule
from hfpatch.patching.kinds.hook_change import HookChange
from hfpatch.patching.kinds.stream import cast, handing, stream_of


@dataclass(frozen=True)
class CastInput(HookChange):
    """A forward pre-hook that casts the stream: the first argument, or `hidden_states`, wherever it is passed.

    Masks, position embeddings and caches keep their dtype: a cast to float16 would turn the lowest value of a
    float32 mask into -inf.

    Nothing is cast to the dtype of the weights of a module that computes in float32.
    """

    rule: DtypeRule

    @property
    def slot(self) -> str:
        return "input dtype"

    def write(self, root: nn.Module, module: nn.Module, before: Any) -> None:
        hooks.before(module, self, with_kwargs=True)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[Any, Any] | None:
        """Cast the stream tensor, if its dtype differs. Without `kwargs` the hook was removed during this call.

        Raises:
            RefusedError: FSDP would cast the float32 stream back at this module.
        """
        if kwargs is None:
            return None
        if self.rule.weight is None and (why := narrows_stream(module)):
            raise RefusedError(f"the stream was set to run in float32, but {type(module).__name__} undoes it: {why}")
        if self.rule.weight is not None and computes_in_float32(module):
            return None
        stream = stream_of(args, kwargs)
        now = cast(stream, self.rule.of(module))
        return None if now is stream else handing(now, stream, args, kwargs)

    def __str__(self) -> str:
        return str(self.rule)
