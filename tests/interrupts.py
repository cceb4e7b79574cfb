"""Ctrl-C at an operation, and at every line of apply and of revert: what stays, and whether the next revert cleans it.

`python -m tests.interrupts` tries every line of every kind of edit and prints the counts.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import hfpatch
from hfpatch.compat.operators import DispatchMode
from hfpatch.lab.tiny import COMPOSITES, SpeechLLM, rescale, tiny_model
from hfpatch.patching import undo
from hfpatch.patching.apply import carry_out
from hfpatch.patching.record import records_of
from tests.fingerprint import fingerprint

OURS = Path(hfpatch.__file__).parent
TRACED = (str(OURS / "patching"), str(OURS / "compat"))
ENDS = (KeyboardInterrupt, SystemExit)


def speech() -> nn.Module:
    return SpeechLLM(tiny_model("gemma3_text", num_hidden_layers=2))


def overflowing() -> nn.Module:
    model = tiny_model("gpt2", num_hidden_layers=1)
    rescale(model, {}, {"*c_proj.weight": 1.0})
    return model.half()


def rounded() -> nn.Module:
    return tiny_model("llama", num_hidden_layers=1).bfloat16()


def indexed() -> nn.Module:
    return tiny_model("deepseek_v32", num_hidden_layers=1, index_topk=4)


def two_adapters() -> nn.Module:
    from peft import LoraConfig

    model: Any = COMPOSITES["lora-qv"](tiny_model("llama", num_hidden_layers=1))
    model.add_adapter("b", LoraConfig(r=4, target_modules=["k_proj", "q_proj"]))
    return model


@dataclass(frozen=True)
class Subject:
    """A model and the patch whose edits are tried on it."""

    make: Callable[[], nn.Module]
    patch: str


SUBJECTS: dict[str, Subject] = {
    "attribute": Subject(speech, "eps-alignment"),
    "attribute that was not there": Subject(speech, "embed-token-resolver"),
    "hook": Subject(overflowing, "fp16-residual-overflow"),
    "tensor": Subject(speech, "projection-init"),
    "buffer": Subject(rounded, "fp32-buffers"),
    "forward": Subject(indexed, "fp32-indexer"),
    "scaled branch": Subject(lambda: tiny_model("llama", num_hidden_layers=1).half(), "fp16-branch-overflow"),
    "float32 inside": Subject(overflowing, "fp16-branch-overflow"),
    "attention": Subject(overflowing, "fp32-attention-logits"),
    "adapter": Subject(two_adapters, "lora-target-expansion"),
    "one-plus-tanh": Subject(
        lambda: COMPOSITES["modulated"](tiny_model("llama", num_hidden_layers=1)), "sigmoid-modulation"
    ),
}


class AtOperation(DispatchMode):
    """Ctrl-C at the n-th operation of torch that runs in this mode; at none for 0, and `left` is minus their number."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


class Interrupt:
    """Raises at the n-th line that runs in the engine."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        self.left, self.error, self.raised = at, error, ""

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(TRACED):
            return None
        return self.line

    def line(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.raised = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise self.error
        return self.line


def interrupted(action: Callable[[], object], at: int, error: type[BaseException]) -> str:
    """Run with an interruption at a line. Returns which one it was; empty where it ended before that."""
    interrupt = Interrupt(at, error)
    was = sys.gettrace()
    sys.settrace(interrupt)
    try:
        action()
    except error:
        pass
    finally:
        sys.settrace(was)
        released()
    return interrupt.raised


def released() -> None:
    """Release the lock of the engine if the interruption kept it.

    A trace function raises where a signal cannot: between the body of a `with` and its exit. CPython handles signals
    at the end of a call, so in the body or after the exit.
    """
    with contextlib.suppress(RuntimeError):  # it is not held
        while True:
            undo._lock.now.release()


def state(model: Any) -> Any:
    noted = list(model.base_model.targeted_module_names) if hasattr(model, "peft_config") else None
    names = {k: (id(c), id(c.target_modules)) for k, c in getattr(model, "peft_config", {}).items()} if noted else None
    return fingerprint(model), noted, names


def trials(name: str, every: int = 1, first: int = 1) -> Iterator[tuple[str, str]]:
    """Interrupt apply, then revert, at each line, or at every n-th from the first.

    Yields for each what was interrupted and where, and what was left after the next revert: empty for nothing.
    """
    subject = SUBJECTS[name]
    model = subject.make()
    before = state(model)
    made = hfpatch.plan(model, only=subject.patch)
    assert made.edits, made
    for what in ("apply", "revert"):
        for at in itertools.count(first, every):
            error = ENDS[at % 2]
            if what == "apply":
                where = interrupted(partial(carry_out, model, made), at, error)
            else:
                carry_out(model, made)
                where = interrupted(partial(hfpatch.revert, model), at, error)
            hfpatch.revert(model)
            left = "" if state(model) == before else "the model is not what it was"
            if hfpatch.status(model).edits or any(records_of(m) for m in model.modules()):
                left += " records"
            if not torch.is_grad_enabled():
                torch.set_grad_enabled(True)
                left += " gradients are off"
            if left:
                yield f"{what} at {where}", left
                model = subject.make()
                before, made = state(model), hfpatch.plan(model, only=subject.patch)
            elif where:
                yield f"{what} at {where}", ""
            if not where:
                break


if __name__ == "__main__":
    for kind in SUBJECTS:
        results = list(trials(kind))
        left = [r for r in results if r[1]]
        print(f"{kind}: {len(results)} interruptions, {len(left)} left something: {left[:5]}", flush=True)
