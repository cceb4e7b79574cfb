"""Liger before and after a patch: `apply_liger_kernel_to_...(model=)` sets other forwards on the model's modules.

Its kernels run on a GPU: `python -m tests.wrapped.liger` runs the row there and prints it, and `tests/test_matrix.py`
runs it where there is one. On a CPU the kernels are replaced by the same formulas in torch, so what is tried there is
that Liger takes the forward of modules, and not the kernels.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

from hfpatch.errors import HfpatchError
from hfpatch.lab.tiny import tiny_model
from tests.cells import Outcome, through
from tests.interrupts import SUBJECTS, Subject

Make = Callable[[], nn.Module]


def half(architecture: str) -> Make:
    return lambda: tiny_model(architecture, num_hidden_layers=1).half()


INSTEAD = {
    "hook": Subject(half("llama"), "fp16-residual-overflow"),
    "float32 inside": Subject(half("gemma3_text"), "fp16-branch-overflow"),
    "attention": Subject(half("qwen2"), "fp32-attention-logits"),
}
"""Subjects of an architecture that Liger has kernels for, in place of GPT-2."""


class Norm:
    """Liger's RMSNorm in torch."""

    @staticmethod
    def apply(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, mode: str, *_: Any) -> torch.Tensor:
        scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        if mode == "llama":
            return scaled.to(x.dtype) * (weight + offset)
        return (scaled * (weight.float() + offset)).to(x.dtype)


class Swish:
    """Liger's SiLU with a product in torch."""

    @staticmethod
    def apply(gate: torch.Tensor, up: torch.Tensor, *_: Any) -> torch.Tensor:
        return functional.silu(gate.float()).to(gate.dtype) * up


class Gelu:
    """Liger's GELU with a product in torch."""

    @staticmethod
    def apply(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return functional.gelu(gate.float(), approximate="tanh").to(gate.dtype) * up


@contextlib.contextmanager
def kernels() -> Generator[None]:
    """Replace Liger's kernels where there is no GPU, and put back what it sets in transformers' own modules."""
    from liger_kernel.transformers import geglu, rms_norm, swiglu

    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(mock.patch.object(rms_norm, "LigerRMSNormFunction", Norm))
            stack.enter_context(mock.patch.object(swiglu, "LigerSiLUMulFunction", Swish))
            stack.enter_context(mock.patch.object(geglu, "LigerGELUMulFunction", Gelu))
        theirs = [vars(m) for n, m in sys.modules.items() if n.startswith("transformers.models.") and ".modeling_" in n]
        were = [dict(values) for values in theirs]
        try:
            yield
        finally:
            for values, before in zip(theirs, were, strict=True):
                values.update(before)


def wrap(model: Any, **words: bool) -> Any:
    """With Liger's kernels, but for the rotary embedding, which is set for every model of the process."""
    from liger_kernel.transformers import monkey_patch

    inner = getattr(model, "llm", model)
    inner = inner.get_base_model() if hasattr(inner, "peft_config") else inner
    getattr(monkey_patch, f"apply_liger_kernel_to_{inner.config.model_type}")(model=inner, rope=False, **words)
    return model


def row(kind: str, order: str) -> Outcome:
    if kind == "forward":
        return "untried", "Liger has no kernels for deepseek_v32"
    subject = INSTEAD.get(kind, SUBJECTS[kind])
    subject.make()  # its code is imported now, so that what Liger sets in it can be put back
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with kernels():
        return through(Subject(lambda: subject.make().to(device), subject.patch), wrap, order, rounding=5e-3)


def main() -> int:
    """Run the row and print it. Returns 1 if a cell is not as docs/state.md has it."""
    from tests.matrix import ORDERS, documented

    torch.set_num_threads(1)
    wanted, off = documented(), 0
    where = f"on {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "as formulas: there is no GPU here"
    print(f"Liger's kernels {where}")
    for kind in SUBJECTS:
        for order in ORDERS:
            try:
                outcome, text = row(kind, order)
            except HfpatchError as error:
                outcome, text = "refused", str(error)
            off += outcome != wanted[kind, "Liger", order]
            print(f"{kind} | {order} | {outcome} | {text}", flush=True)
    print(f"{off} cells are not as docs/state.md has them")
    return int(off > 0)


if __name__ == "__main__":
    sys.exit(main())
