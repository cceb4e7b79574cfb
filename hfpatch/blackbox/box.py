"""BlackBox: keeps what a guarded training needs to say, afterwards, which batch went wrong and in which operation."""

from __future__ import annotations

import sys
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import nn

from hfpatch.advice import advice
from hfpatch.blackbox import folder
from hfpatch.blackbox.account import account
from hfpatch.blackbox.kept import Kept, keep
from hfpatch.blackbox.packing import pack, without_values
from hfpatch.blackbox.rerun import RUN_AGAIN, MicroBatch, Rerun, blamed, rerun, wrong
from hfpatch.compat import hooks
from hfpatch.errors import HfpatchError, InputError
from hfpatch.given import FLAG, PATH, shown, want
from hfpatch.guarding.outcome import Reason
from hfpatch.guarding.recorder import Event
from hfpatch.model.wrapping import unwrap
from hfpatch.report import say
from hfpatch.tracing.drill import FAILURES

CALLS = 1024
"""Calls of a window that are kept at most; a loop that never steps would keep them for ever."""


@dataclass(frozen=True)
class BlackBox:
    """Where a guard writes what it skipped, and how much of it.

        box = hfpatch.BlackBox("runs/box")
        guard = hfpatch.Guard(model, optimizer, black_box=box)      # or GuardCallback(black_box=box)

    On a skipped batch, and when a run is stopped, the batch is run again at the spot under `hfpatch.trace`, and a
    bundle is written: the batch, the states of the random numbers, what the tracer found, the last losses and norms,
    the scaler, versions and patches. `hfpatch replay BUNDLE --model DIR` reproduces the finding. A directory that
    cannot be written to costs one line on stderr, never the training.

    Args:
        directory: Of the bundles; made when it is needed.
        keep_batch: Write the batch into the bundle. False for private data: names, dtypes and shapes stay.
        max_bundles: Bundles that stay, per rank: the first of this run and the newest. Each reason is written down so
            often in a run, and when the run stops.
        max_bytes: How large they may be together, per rank; a batch that does not fit is left out.

    Raises:
        InputError: A bound that is no bound.
    """

    directory: str | Path
    keep_batch: bool = True
    max_bundles: int = 5
    max_bytes: int = 256 * 2**20

    def __post_init__(self) -> None:
        want("black box", directory=(self.directory, PATH), keep_batch=(self.keep_batch, FLAG))
        for name, value in (("max_bundles", self.max_bundles), ("max_bytes", self.max_bytes)):
            if type(value) is not int or value < 1:
                raise InputError(f"black box: {name}={shown(value)}; want a whole number above 0")

    def attach(self, model: nn.Module) -> Recording:
        """Follow the calls of a model; guards do this."""
        return Recording(self, model)


class Recording:
    """Follows the calls of one guarded model (`hfpatch.guarding.recorder.Recorder`).

    Args:
        box: The settings.
        model: As it is trained, wrapped.
    """

    def __init__(self, box: BlackBox, model: nn.Module) -> None:
        self.box = box
        self.directory = Path(box.directory)
        self.model = unwrap(model, RUN_AGAIN)
        self.rank, self.world = _ranks()
        self._gpus = tuple(sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}))
        self._calls: deque[Kept] = deque(maxlen=CALLS)
        self._window: deque[MicroBatch] = deque(maxlen=CALLS)
        self._busy = False
        self._counts: Counter[Reason | None] = Counter()
        self._first: Path | None = None
        self._warned = False
        # what DDP calls is called on every path; of a compiled model only the wrapper runs hooks uncompiled
        watched = unwrap(model, ("DDP",))
        self._handle = hooks.before(watched, _Capture(self), with_kwargs=True)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._warn(error)

    def detach(self) -> None:
        """Take the hook off, and let go of what was kept."""
        self._handle.remove()
        self._calls.clear()
        self._window.clear()

    def called(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is about to be called."""
        capturing = bool(self._gpus) and torch.cuda.is_current_stream_capturing()
        if not self._busy and not capturing and torch.is_grad_enabled():
            self._calls.append(keep(model, args, kwargs, self._gpus))

    def noted(self, loss: torch.Tensor) -> None:
        """A micro-batch ended."""
        self._window.append(MicroBatch(tuple(self._calls), loss.detach()))
        self._calls.clear()

    def window(self) -> tuple[MicroBatch, ...]:
        """What was kept of the window that ends here."""
        kept = tuple(self._window)
        self._window.clear()
        return kept

    def record(self, window: tuple[MicroBatch, ...], event: Event) -> tuple[str, ...]:
        """Look for what went wrong and write it down."""
        try:
            return self._recorded(window, event)
        except (*FAILURES, HfpatchError, SafetensorError) as error:  # odd tensors: no reason to stop a training
            return (f"black box: step {event.facts.step} was not recorded: {type(error).__name__}: {error}",)

    def _recorded(self, window: tuple[MicroBatch, ...], event: Event) -> tuple[str, ...]:
        reason = event.facts.reason
        if event.stop is None and self._counts[reason] >= self.box.max_bundles:
            return ()
        self._counts[reason] += 1
        self._busy = True
        try:
            losses = [float(batch.loss) for batch in window]
            elsewhere = self.world > 1 and reason is Reason.LOSS and wrong(losses) is None
            if elsewhere:
                index, call = None, None
                found = Rerun(obstacle=f"every loss of rank {self.rank} is finite; another rank's is not")
            else:
                index, call, found = self._again(window, losses, event)
        finally:
            self._busy = False
        healthy = not found.bad and found.obstacle is None and wrong(losses) is None
        if self.rank != 0 and (elsewhere or healthy):
            told = f"nothing is wrong on rank {self.rank}; see the other ranks' bundles in {self.directory}"
            return (f"black box: {told}",)
        replayed = {"micro_batch": index, "micro_batches": len(window), "losses": losses}
        about = account(self.model, event, found, call, replayed, rank=self.rank, world=self.world)
        place = self._write(about, call, event.facts.step)
        if elsewhere and place is not None:
            others = f"{self.directory / folder.stem(event.facts.step)}*"
            return (f"black box: {about['replay']['says']}: see that rank's bundle, among {others}",)
        return tuple(_told(self.model, about, found, place, stopped=event.stop is not None))

    def _again(
        self, window: Sequence[MicroBatch], losses: list[float], event: Event
    ) -> tuple[int | None, Kept | None, Rerun]:
        """The micro-batch and the call to blame, and what it did when it was made again."""
        if not any(batch.calls for batch in window):
            return None, None, Rerun(obstacle="no call of the model was seen with gradients on (compiled in place?)")
        facts = event.facts
        scale = facts.scale or 1.0
        index = blamed(self.model, window, losses, facts.reason, scale)
        call, found = None, Rerun(obstacle="no call of the model was seen in this micro-batch")
        for call in window[index].calls:
            found = rerun(self.model, call, step=facts.step, noted=losses[index], scale=scale)
            if found.finding is not None:
                break
        return index, call, found

    def _write(self, about: dict[str, Any], call: Kept | None, step: int) -> Path | None:
        try:
            batch = self._pack(about, call)
            place = folder.write(self.directory, f"{folder.stem(step)}{self.rank}", about, batch)
            self._first = self._first or place
            folder.bound(self.directory, self.rank, self._first, self.box.max_bundles, self.box.max_bytes)
        except OSError as error:
            self._warn(error)
            return None
        return place if place.exists() else self._first

    def _pack(self, about: dict[str, Any], call: Kept | None) -> bytes | None:
        """The tensors of a call as safetensors; what of it is described, or why it is not, goes into `about`."""
        if call is None or call.overwritten:
            about["batch"] = {"left_out": "no call was seen" if call is None else "it was overwritten in place since"}
            return None
        tensors: dict[str, torch.Tensor] = {}
        described = {"args": pack(call.args, "args", tensors), "kwargs": pack(call.kwargs, "kwargs", tensors)}
        if not self.box.keep_batch:
            about["arguments"] = {name: without_values(part) for name, part in described.items()}
            about["batch"] = {"left_out": "keep_batch=False"}
            return None
        about["arguments"] = described
        bytes_ = sum(t.numel() * t.element_size() for t in tensors.values())
        room = self.box.max_bytes - (folder.size(self._first) if self._first else 0)
        if bytes_ > room:
            about["batch"] = {"left_out": f"its {bytes_:,} bytes are more than the {room:,} left of max_bytes"}
            return None
        data = save({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()})
        about["batch"] = {"sha256": folder.sha256(data), "bytes": len(data)}
        return data

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            why = f"cannot be written to ({error.strerror}); training goes on without bundles"
            say([f"black box: {self.directory} {why}"])


class _Capture:
    """The hook. It holds its recording weakly, and copies of the model are not followed."""

    def __init__(self, recording: Recording | None) -> None:
        self.recording = weakref.ref(recording) if recording is not None else None

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.recording is None or torch.compiler.is_compiling():
            return
        recording = self.recording()
        if recording is not None:
            recording.called(model, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Capture, (None,))


def _told(model: nn.Module, about: dict[str, Any], found: Rerun, place: Path | None, *, stopped: bool) -> list[str]:
    lines = [f"black box: {about['replay']['says']}"]
    if found.finding is not None:
        lines += advice(found.finding, model)
    if place is None:
        return [*lines, "next: make room, or name another directory, for the bundles that could not be written"]
    again = f"hfpatch replay {place} --model DIR"
    return [*lines, f"next: {again}"] if stopped else [f"{lines[0]}; {again}", *(f"black box: {a}" for a in lines[1:])]


def _ranks() -> tuple[int, int]:
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return int(dist.get_rank()), int(dist.get_world_size())
