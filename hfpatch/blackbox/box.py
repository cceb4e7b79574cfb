"""BlackBox: records which batch of a guarded training run went wrong, and in which operation."""

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

from hfpatch.blackbox import folder
from hfpatch.blackbox.account import account
from hfpatch.blackbox.kept import Kept, keep
from hfpatch.blackbox.packing import pack, without_values
from hfpatch.blackbox.rerun import MicroBatch, Rerun, blamed, rerun, wrong
from hfpatch.compat import hooks
from hfpatch.errors import HfpatchError, InputError
from hfpatch.given import FLAG, PATH, shown, want
from hfpatch.guarding.outcome import Reason
from hfpatch.guarding.recorder import Event
from hfpatch.model.put_back import on_trial
from hfpatch.model.wrapping import RUN_AGAIN, unwrap
from hfpatch.report import say
from hfpatch.tracing.rerun_block import FAILURES

CALLS = 1024
"""Maximum number of calls kept in a window; without it, a loop that never steps would keep all."""


@dataclass(frozen=True)
class BlackBox:
    """Where a guard writes bundles of skipped batches, and how many.

        box = hfpatch.BlackBox("runs/box")
        guard = hfpatch.Guard(model, optimizer, black_box=box)      # or GuardCallback(black_box=box)

    When a batch is skipped or the run is stopped, the batch is run again at once under `hfpatch.trace`, and a bundle is
    written: the batch, the random state, the finding, the last losses and norms, the state of the scaler, versions and
    patches. `hfpatch replay BUNDLE --model DIR` reproduces the finding. If the directory cannot be written to, one line
    on stderr says so and training continues.

    Args:
        directory: Directory of the bundles; made if it is missing.
        keep_batch: Write the batch into the bundle. With False, for private data, only names, types, dtypes and shapes
            are written.
        max_bundles: Number of bundles that stay, per rank: the first of this run and the newest. Also the number of
            bundles written in a run for each reason of a skip; a stop is always written.
        max_bytes: Size of all bundles together, per rank; a batch that does not fit is left out.

    Raises:
        InputError: An argument is not of its kind, or a limit is not a positive integer.
    """

    directory: str | Path
    keep_batch: bool = True
    max_bundles: int = 5
    max_bytes: int = 256 * 2**20

    def __post_init__(self) -> None:
        want("black box", directory=(self.directory, PATH), keep_batch=(self.keep_batch, FLAG))
        for name, value in (("max_bundles", self.max_bundles), ("max_bytes", self.max_bytes)):
            if type(value) is not int or value < 1:
                raise InputError(f"black box: want a positive integer as {name}=, got {shown(value)}")

    def attach(self, model: nn.Module) -> Recording:
        """Follow the calls of a model; a guard calls this."""
        return Recording(self, model)


class Recording:
    """Follows the calls of one guarded model (`hfpatch.guarding.recorder.Recorder`).

    Args:
        box: The settings.
        model: The model as it is trained, with its wrappers.
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
        # DDP calls its inner module on every path; of a compiled model only the wrapper runs hooks uncompiled
        watched = unwrap(model, ("DDP",))
        self._handle = hooks.before(watched, _Capture(self), with_kwargs=True)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._warn(error)

    def detach(self) -> None:
        """Remove the hook, and release the kept calls."""
        self._handle.remove()
        self._calls.clear()
        self._window.clear()

    def called(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep a call that is about to be made."""
        capturing = bool(self._gpus) and torch.cuda.is_current_stream_capturing()
        if not (self._busy or capturing or on_trial()) and torch.is_grad_enabled():
            self._calls.append(keep(model, args, kwargs, self._gpus))

    def end_micro_batch(self, loss: torch.Tensor) -> None:
        """End a micro-batch with this loss; its calls are those since the last one."""
        self._window.append(MicroBatch(tuple(self._calls), loss.detach()))
        self._calls.clear()

    def end_window(self) -> tuple[MicroBatch, ...]:
        """End the window, and return its micro-batches."""
        kept = tuple(self._window)
        self._window.clear()
        return kept

    def record(self, window: tuple[MicroBatch, ...], event: Event) -> tuple[str, ...]:
        """Find what went wrong, write a bundle, and return the lines to report."""
        try:
            return self._recorded(window, event)
        except (*FAILURES, HfpatchError, SafetensorError) as error:  # unusual tensors must not stop the training
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
        return tuple(_told(about, found, place, stopped=event.stop is not None))

    def _again(
        self, window: Sequence[MicroBatch], losses: list[float], event: Event
    ) -> tuple[int | None, Kept | None, Rerun]:
        """Return index and call of the micro-batch at fault, and the result of running the call again."""
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
        """Return the tensors of a call as safetensors; their description, or why they are left out, goes to `about`."""
        if call is None or call.overwritten:
            about["batch"] = {"left_out": "no call was seen" if call is None else "it was overwritten in place"}
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
            why = f"cannot be written to ({error.strerror}); training continues without bundles"
            say([f"black box: {self.directory} {why}"])


class _Capture:
    """The hook. It holds its recording by a weak reference, and its copy on a copied model does nothing."""

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


def _told(about: dict[str, Any], found: Rerun, place: Path | None, *, stopped: bool) -> list[str]:
    lines = [f"black box: {about['replay']['says']}"]
    lines += found.advice
    if place is None:
        return [*lines, "next: free disk space, or name another directory: the bundle could not be written"]
    again = f"hfpatch replay {place} --model DIR"
    return [*lines, f"next: {again}"] if stopped else [f"{lines[0]}; {again}", *(f"black box: {a}" for a in lines[1:])]


def _ranks() -> tuple[int, int]:
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return int(dist.get_rank()), int(dist.get_world_size())
