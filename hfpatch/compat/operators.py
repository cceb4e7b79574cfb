# torch documents dispatch modes, but in a private module, and gives its operators no list of names
# pyright: reportPrivateUsage=false
"""Operators as a dispatch mode sees them: the mode, which of them write to what they are given, private names.

Known in torch 2.11 to 2.13. An operator that torch renames is named as it is, without words, and no cause is told for
it.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _python_dispatch

DispatchMode = _python_dispatch.TorchDispatchMode
"""Sees every operation below autograd while it is entered."""

SOFTMAX = frozenset({"_softmax", "_log_softmax", "_safe_softmax"})
"""What `softmax`, `log_softmax` and the math path of attention run."""

ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention")
"""How the names of fused attention kernels begin, forward and backward."""

MATMULS = frozenset({"_grouped_mm", "_scaled_mm"})
"""Products of grouped and of scaled matrices."""

RMS_NORMS = frozenset({"_fused_rms_norm", "_fused_rms_norm_backward"})
"""What `rms_norm` runs; in older torch it is put together from elementwise operators."""

CTC = frozenset({"_ctc_loss", "_cudnn_ctc_loss"})
"""What `ctc_loss` runs; its arguments begin with log-probabilities, labels, and the lengths of both."""

RESHAPE = "_unsafe_view"
"""What `reshape` and `matmul` run where `view` would count as an alias."""

COPY = "_to_copy"
"""What `tensor.to(dtype)` runs."""

to_copy: Any = torch.ops.aten._to_copy.default
"""The operator of that name."""

COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")
"""Namespaces of operators that wait for other ranks."""


def overwrites(operator: Any) -> bool:
    """True if an operator writes to something it is given, by its schema."""
    return operator._schema.is_mutable


class _Alone(DispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COLLECTIVES:
            raise RuntimeError(f"a layer communicates with other ranks ({func})")
        return func(*args, **(kwargs or {}))


@contextmanager
def alone() -> Generator[None]:
    """Run code that other ranks may not be running: communication with them raises a RuntimeError."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        yield
        return
    with _Alone():
        yield


MOVES = frozenset(
    {
        *("_to_copy", "copy_", "clone", "empty", "empty_like", "empty_strided", "zeros", "zeros_like", "new_zeros"),
        *("new_empty", "full", "full_like", "arange", "index", "index_select", "gather", "embedding", "masked_fill"),
        *("cat", "stack", "sort", "topk", "histc", "cumsum", "bincount", "where", "index_put", "index_put_"),
    }
)  # fmt: skip
"""Operators that make, move, choose or count values, and compute none."""


def views(operator: Any) -> bool:
    """True if an operator gives views of what it is given."""
    aliased = [r.alias_info for r in operator._schema.returns]
    return bool(aliased) and all(info is not None and not info.is_write for info in aliased)


def moves_only(operator: Any) -> bool:
    """True if an operator computes no value: it is one of `MOVES`, or gives a view of what it is given."""
    return views(operator) or operator._schema.name.partition("::")[2] in MOVES
