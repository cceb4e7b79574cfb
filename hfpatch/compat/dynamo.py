# torch.compile tells nobody what it has compiled
# pyright: reportPrivateUsage=false
"""What torch.compile has compiled, and whether it is at work.

Known in torch 2.11 to 2.13. Functions import dynamo where they say so.
"""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any

from torch import nn

from hfpatch.compat.modules import CHILDREN
from hfpatch.compat.wrappers import COMPILED

COMPILED_CALL = "_compiled_call_impl"
"""Key in a module's `__dict__` of what `module.compile()` made."""

PACKAGE = "torch._dynamo"


def is_loaded() -> bool:
    """True if dynamo is imported: without it nothing is compiled, and importing it takes a second."""
    return PACKAGE in sys.modules


def is_compiled(module: nn.Module) -> bool:
    """True if a module was compiled by itself: `torch.compile(module)`, `module.compile()`, a compiled forward.

    `_compiled_call` is what transformers' `generate` keeps with a static cache; `_torchdynamo_orig_callable` is on a
    function that `torch.compile` returned. Where a name is gone, that way of compiling is not seen.
    """
    own = module.__dict__
    return (
        COMPILED in own[CHILDREN]
        or own.get(COMPILED_CALL) is not None
        or own.get("_compiled_call") is not None
        or hasattr(own.get("forward"), "_torchdynamo_orig_callable")
    )


def holds_code(code: CodeType) -> bool | None:
    """True if dynamo holds compiled code for this code; None where it cannot be asked. Imports dynamo.

    Reads dynamo's cache through `_debug_get_cache_entry_list`.
    """
    from torch._dynamo import eval_frame

    entries: Any = getattr(eval_frame, "_debug_get_cache_entry_list", None)
    return None if entries is None else bool(entries(code))


def compiles_next() -> bool:
    """True if dynamo would compile what this thread calls next: it goes on with the parts of what it gave up.

    Reads `torch._C._dynamo.eval_frame.get_eval_frame_callback`; False where it is missing.
    """
    from torch._C._dynamo import eval_frame

    ask: Any = getattr(eval_frame, "get_eval_frame_callback", None)
    return ask is not None and callable(ask())
