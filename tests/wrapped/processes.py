"""A patched model in another process: a copy of this one (fork), or a new one that it is sent to (spawn)."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import nn

import hfpatch
from tests.cells import Outcome, call, close, ends, gradients, in_force
from tests.fingerprint import fingerprint
from tests.interrupts import SUBJECTS

Run = Callable[[Callable[[], Any]], Any]
"""Runs a function in another process and returns its result."""
SECONDS = 300


def forked(kind: str, order: str) -> Outcome:
    return _row(kind, order, _in_fork)


def spawned(kind: str, order: str) -> Outcome:
    """The model is sent, and torch shares the memory of what it sends."""
    return _row(kind, order, lambda task: _new_process().submit(task).result(SECONDS))


def _in_fork(task: Callable[[], Any]) -> Any:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=lambda: there.send(task()))
    child.start()
    there.close()
    found = here.recv() if here.poll(SECONDS) else None
    child.join()
    return found


@cache
def _new_process() -> ProcessPoolExecutor:
    """One process for all cells, because it takes seconds to import transformers."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


@dataclass(frozen=True)
class Life:
    """What came of a model in the other process; arrays, because tensors would be sent as shared memory."""

    patches: set[str]
    lapsed: int
    outputs: np.ndarray
    learns: bool
    reverted: np.ndarray
    left: int
    said: str


def life(model: nn.Module, patch: str, order: str) -> Life:
    """What the other process does: apply if that was not done, status, a run, a step, revert."""
    torch.set_num_threads(1)
    if order == "before":
        hfpatch.apply(model, only=patch, verbose=False)
    status = hfpatch.status(model, compare=True)
    got = call(model).numpy()
    learns = not any(p.requires_grad for p in model.parameters()) or bool(gradients(model))
    with contextlib.redirect_stderr(io.StringIO()) as said:
        hfpatch.revert(model)
    left = len(hfpatch.status(model).edits)
    return Life(set(status.patches), len(status.lapsed), got, learns, call(model).numpy(), left, said.getvalue())


def _row(kind: str, order: str, run: Run) -> Outcome:
    subject = SUBJECTS[kind]
    model = subject.make().eval()
    stock = call(model)
    fix = hfpatch.apply(model, only=subject.patch, verbose=False)
    wanted = call(model)
    if order == "before":
        hfpatch.revert(model)
    was = fingerprint(model)
    there: Life = run(partial(life, model, subject.patch, order))
    assert there.patches == {d.patch for d in fix.plan.of("applied")}
    assert (there.lapsed, there.learns, there.left) == (0, True, 0), str(there)
    close(torch.from_numpy(there.outputs), wanted)
    assert np.array_equal(there.reverted, stock.numpy()), "the stock outputs did not come back there"
    if fingerprint(model) != was:  # in the memory that both hold
        gone = hfpatch.status(model, compare=True).lapsed
        assert order == "after", "the model here was changed"
        assert "is shared" in there.said, there.said
        assert {e.state.word for e in gone} == {"gone"}, str(gone)
        hfpatch.revert(model)
        return ends(model, stock, SHARED)
    if order == "after":
        in_force(fix, model)
        hfpatch.revert(model)
    return ends(model, stock, "")


SHARED = (
    "torch shares the memory of a model that it sends to a process: the revert there is one of the values here too, "
    "says so, and status(compare=True) here finds them gone"
)
