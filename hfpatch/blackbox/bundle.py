"""Reads and checks a bundle: JSON and safetensors only; no code in it is run."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from hfpatch.blackbox import folder
from hfpatch.blackbox.kept import Kept, Random
from hfpatch.blackbox.packing import DTYPES, plain, unpack
from hfpatch.blackbox.rerun import Rerun, rerun
from hfpatch.errors import InputError
from hfpatch.given import PATH, want
from hfpatch.model.walk import root_module
from hfpatch.model.wrapping import RUN_AGAIN, unwrap
from hfpatch.report import Sheet, Shown
from hfpatch.untrusted.ordinary import read_json, read_ordinary

LARGEST_BATCH = 8 * 2**30
"""Largest batch that is read, in bytes; a black box keeps 256 MiB by default."""
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, MemoryError)
"""Exceptions from reading a malformed bundle; torch raises RuntimeErrors, and nesting is one."""
IDENTITY = ("phase", "module", "operation", "symptom")
"""Keys in which two findings agree if they are the same."""


@dataclass(frozen=True, repr=False)
class Bundle(Shown):
    """A bundle that a black box wrote.

    Attributes:
        path: Its directory.
        about: The contents of `bundle.json`, whose digest was checked.
        tensors: The tensors of the batch, by name, on the CPU; empty if the batch was left out.
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
        """The event in a sentence."""
        return str(self.about["event"]["says"])

    @property
    def says(self) -> str:
        """The result of the run at training time, in a sentence."""
        return str(self.about["replay"]["says"])

    @property
    def finding(self) -> dict[str, Any] | None:
        """The finding at training time (`Finding.to_dict`); None if there was none."""
        return self.about["replay"]["finding"]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON: path, and what `bundle.json` holds."""
        return {"path": str(self.path), **plain(self.about)}

    def sheet(self) -> Sheet:
        """Return what happened, what was found, and in which model."""
        of, batch = self.model, self.about["batch"]
        rows = (
            ("event", self.event),
            ("replayed at the spot", self.says),
            ("model", ", ".join(str(of[key]) for key in ("class", "name", "dtype", "device") if of[key])),
            ("patches", ", ".join(self.patches) or "none"),
            ("batch", f"{len(self.tensors)} tensors, {batch['bytes']:,} bytes" if self.tensors else batch["left_out"]),
        )
        return Sheet(f"{self.path.name}: step {self.step}", ("", " "), rows, wide=(" ",))

    def reproduced(self, found: Rerun) -> bool:
        """True if a replay has the finding of this bundle: the same phase, module, operation and symptom."""
        if self.finding is None or found.finding is None:
            return False
        again = found.finding.to_dict()
        return all(self.finding[key] == again[key] for key in IDENTITY)

    def call(self, device: torch.device) -> Kept:
        """Return the call of the model, with its tensors on a device.

        Raises:
            InputError: The bundle holds no batch, or not all arguments, or is malformed.
        """
        call = self.about["call"]
        if call is None or "sha256" not in self.about["batch"]:
            raise InputError(f"{self.path} holds no batch, so it cannot be replayed: {self.about['batch']['left_out']}")
        try:
            args, kwargs = (unpack(self.about["arguments"][n], self.tensors, device, n) for n in ("args", "kwargs"))
            autocast = {name: DTYPES[dtype] for name, dtype in call["autocast"].items()}
            if autocast and device.type not in autocast:  # on another type of device: the same dtype there
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
        """Run the call again on a model of the same class, under a trace; the model is not changed.

        Args:
            model: The loaded model, on its device, with the patches of the bundle applied.

        Raises:
            InputError: The bundle holds no batch, or not all arguments, or is malformed.
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


def read_bundle(path: str | PathLike[str]) -> Bundle:
    """Read a bundle.

    Args:
        path: Its directory.

    Raises:
        InputError: There is no bundle, it has another format, or it was changed since it was written.
    """
    want("read_bundle", path=(path, PATH))
    place = Path(path)
    about = _about(place)
    format_ = about.get("format")
    if format_ != folder.FORMAT:
        software: Any = about.get("software")
        writer = software.get("hfpatch") if isinstance(software, dict) else None
        raise InputError(
            f"{place} has format {format_!r}, written by hfpatch {writer or 'of an unknown version'}; this version "
            f"reads format {folder.FORMAT}: replay it with the version that wrote it"
        )
    written = about.pop("sha256", None)
    if folder.digest(about) != written:
        raise InputError(f"{place / folder.ABOUT} was changed after it was written: its digest differs; use another")
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
        about: Any = read_json(file, folder.LARGEST)
    except FileNotFoundError as error:
        within = sorted(p.name for p in place.iterdir() if folder.NAME.fullmatch(p.name))
        hint = f"name a bundle in it, such as {', '.join(within[:3])}" if within else "name another directory"
        raise InputError(f"{place} is not a bundle: it holds no {folder.ABOUT}; {hint}") from error
    except InputError as error:
        raise InputError(f"{file}: {error}; it was truncated or changed, use another bundle") from error
    if not isinstance(about, dict):
        raise InputError(f"{file} is not from a black box: want a JSON object, got {type(about).__name__}")
    return about


def _check(about: dict[str, Any]) -> None:
    """Raise if a key that is read later is missing or has a value of the wrong type."""
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
            raise TypeError(f"{value!r:.60} has the wrong type")
    kept = "sha256" in about["batch"]
    if kept and about["call"] is None:
        raise TypeError("there is a batch but no call")
    if not isinstance(about["batch"]["bytes" if kept else "left_out"], int if kept else str):
        raise TypeError("batch gives neither its size nor why it was left out")


def _batch(place: Path, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    if "sha256" not in batch:
        return {}
    file = place / folder.BATCH
    try:
        data = read_ordinary(file, min(LARGEST_BATCH, max(0, batch["bytes"])))
    except FileNotFoundError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}; use another bundle") from error
    except InputError as error:
        raise InputError(f"{file}: {error}; {batch['bytes']:,} were written, use another bundle") from error
    if len(data) != batch["bytes"]:
        raise InputError(f"{file} has {len(data):,} bytes, but {batch['bytes']:,} were written; use another bundle")
    if folder.sha256(data) != batch["sha256"]:
        raise InputError(f"{file} was changed after it was written: its digest differs; use another bundle")
    try:
        return load(data)
    except (SafetensorError, *MALFORMED) as error:
        raise InputError(f"{file} is not a safetensors file: {error}; use another bundle") from error


def _malformed(place: Path, error: Exception) -> InputError:
    return InputError(f"{place} is malformed ({type(error).__name__}: {error}); use another bundle")
