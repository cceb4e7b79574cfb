"""A bundle, read and checked: JSON and safetensors only, nothing of it is run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from hfpatch.blackbox import folder
from hfpatch.blackbox.kept import Kept, Random
from hfpatch.blackbox.packing import DTYPES, unpack
from hfpatch.blackbox.rerun import RUN_AGAIN, Rerun, rerun
from hfpatch.errors import InputError
from hfpatch.model.walk import root_module
from hfpatch.model.wrapping import unwrap

LARGEST = 64 * 2**20
"""Bytes of a bundle.json that are read; ours have some ten thousand."""
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What a description that is none raises."""
IDENTITY = ("phase", "module", "operation", "symptom")
"""What makes two findings the same."""


@dataclass(frozen=True)
class Bundle:
    """What a black box wrote down.

    Attributes:
        path: Where it is.
        about: `bundle.json`, whose digest was checked.
        tensors: Of the batch, by name, on the CPU; empty where none was kept.
    """

    path: Path
    about: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @property
    def step(self) -> int:
        """The guard's number of the step."""
        return int(self.about["step"])

    @property
    def patches(self) -> tuple[str, ...]:
        """Ids of the patches that were applied."""
        return tuple(self.about["patches"])

    @property
    def model(self) -> dict[str, Any]:
        """`class`, `architecture`, `name`, `attention`, `dtype`, `device` and `fingerprint` of the model."""
        return self.about["model"]

    @property
    def event(self) -> str:
        """What happened, in words."""
        return str(self.about["event"]["says"])

    @property
    def says(self) -> str:
        """What came of the replay at the spot, in words."""
        return str(self.about["replay"]["says"])

    @property
    def finding(self) -> dict[str, Any] | None:
        """What the tracer found at the spot (`Finding.to_dict`); None if nothing."""
        return self.about["replay"]["finding"]

    def reproduced(self, found: Rerun) -> bool:
        """Whether a replay came to the finding of this bundle: phase, module, operation and symptom."""
        if self.finding is None or found.finding is None:
            return False
        again = found.finding.to_dict()
        return all(self.finding[key] == again[key] for key in IDENTITY)

    def call(self, device: torch.device) -> Kept:
        """The call of the model, its tensors on a device.

        Raises:
            InputError: The bundle holds no batch, or not all of it.
        """
        call = self.about["call"]
        if call is None or "sha256" not in self.about["batch"]:
            raise InputError(f"{self.path} holds no batch to run: {self.about['batch']['left_out']}")
        try:
            args, kwargs = (unpack(self.about["arguments"][n], self.tensors, device, n) for n in ("args", "kwargs"))
            autocast = {name: DTYPES[dtype] for name, dtype in call["autocast"].items()}
            if autocast and device.type not in autocast:  # replayed on another kind of device: the same dtype there
                autocast = {device.type: next(iter(autocast.values()))}
            return Kept(
                args,
                kwargs,
                Random.from_dict(call["random"]),
                autocast,
                bool(call["training"]),
                versions=(),
                otherwise=frozenset(call["otherwise"]),
            )
        except InputError as error:
            raise InputError(f"{self.path}: {error}") from error
        except MALFORMED as error:
            raise _malformed(self.path, error) from error

    def replay(self, model: object) -> Rerun:
        """Make the call again with a model of the same kind, under a trace; the model stays as it is.

        Args:
            model: Loaded, on its device, with the patches it had.

        Raises:
            InputError: The bundle holds no batch, or not all of it.
            NotAModelError: `model` holds no torch module.
        """
        root = unwrap(root_module(model), RUN_AGAIN)
        device = next((p.device for p in root.parameters()), torch.device("cpu"))
        call = self.call(device)
        replay, event = self.about["replay"], self.about["event"]
        try:
            factor = None if replay["factor"] is None else float(replay["factor"])
            noted = float(replay["losses"][replay["micro_batch"]])
            scale = float(event["scale"] or 1.0)
        except MALFORMED as error:
            raise _malformed(self.path, error) from error
        return rerun(root, call, step=self.step, noted=noted, scale=scale, factor=factor)


def read(path: str | Path) -> Bundle:
    """Read a bundle.

    Args:
        path: Its directory.

    Raises:
        InputError: There is none, it is of another format, or it is not as it was written.
    """
    place = Path(path)
    about = _about(place)
    format_ = about.get("format")
    if format_ != folder.FORMAT:
        software: Any = about.get("software")
        writer = software.get("hfpatch") if isinstance(software, dict) else None
        raise InputError(
            f"{place} has format {format_!r}, written by hfpatch {writer or 'of an unknown version'}; this one reads "
            f"format {folder.FORMAT}: replay it with the version that wrote it"
        )
    written = about.pop("sha256", None)
    if folder.digest(about) != written:
        raise InputError(f"{place / folder.ABOUT} is not as it was written: its digest differs; take another bundle")
    try:
        _check(about)
    except MALFORMED as error:
        raise _malformed(place, error) from error
    return Bundle(place, about, _batch(place, about["batch"]))


def _about(place: Path) -> dict[str, Any]:
    file = place / folder.ABOUT
    if not place.is_dir():
        raise InputError(f"{place}: no such directory; name a bundle, such as runs/box/step-00001234-rank0")
    try:
        if file.stat().st_size > LARGEST:
            raise InputError(f"{file} has {file.stat().st_size:,} bytes, which no black box writes")
        about: Any = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        within = sorted(p.name for p in place.iterdir() if folder.NAME.fullmatch(p.name))
        hint = f"; it holds bundles, name one: {', '.join(within[:3])}" if within else ""
        raise InputError(f"{place} is no bundle: it holds no {folder.ABOUT}{hint}") from error
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is no JSON ({error}): it was truncated or changed; take another bundle") from error
    if not isinstance(about, dict):
        raise InputError(f"{file} is not what a black box writes: a {type(about).__name__}, want an object")
    return about


def _check(about: dict[str, Any]) -> None:
    """Touch what is read without care elsewhere."""
    replay, event, model = about["replay"], about["event"], about["model"]
    finding = replay["finding"]
    wanted = (
        (about["step"], int),
        (about["patches"], list),
        (about["batch"], dict),
        (about["call"], (dict, type(None))),
        (replay["says"], str),
        (replay["exact"], bool),
        (replay["doubts"], list),
        (event["says"], str),
        (finding, (dict, type(None))),
        *(
            (model[key], (str, type(None)))
            for key in ("class", "architecture", "name", "attention", "dtype", "device", "fingerprint")
        ),
        *((finding[key], (str, type(None))) for key in IDENTITY if finding is not None),
        *((patch, str) for patch in about["patches"]),
    )
    for value, kind in wanted:
        if not isinstance(value, kind):
            raise TypeError(f"{value!r:.60} has an odd type")
    kept = "sha256" in about["batch"]
    if kept and about["call"] is None:
        raise TypeError("a batch of no call")
    if not isinstance(about["batch"]["bytes" if kept else "left_out"], int if kept else str):
        raise TypeError("batch says neither what it is nor why it was left out")


def _batch(place: Path, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    if "sha256" not in batch:
        return {}
    file = place / folder.BATCH
    try:
        held = file.stat().st_size
        if held != batch["bytes"]:
            raise InputError(f"{file} has {held:,} bytes, {batch['bytes']:,} were written; take another bundle")
        data = file.read_bytes()
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}; take another bundle") from error
    if folder.sha256(data) != batch["sha256"]:
        raise InputError(f"{file} is not as it was written: its digest differs; take another bundle")
    try:
        return load(data)
    except SafetensorError as error:
        raise InputError(f"{file} is no safetensors file: {error}") from error


def _malformed(place: Path, error: Exception) -> InputError:
    return InputError(f"{place} is not what a black box writes: {type(error).__name__}: {error}")
