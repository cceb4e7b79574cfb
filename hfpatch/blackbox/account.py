"""What `bundle.json` holds: an event told in plain values."""

from __future__ import annotations

import hashlib
import math
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from hfpatch.blackbox.folder import FORMAT
from hfpatch.blackbox.kept import Kept
from hfpatch.blackbox.packing import plain
from hfpatch.blackbox.rerun import Rerun
from hfpatch.compat.implementation import chosen
from hfpatch.dtypes import dtype_name
from hfpatch.guarding.outcome import Facts, Reason
from hfpatch.guarding.recorder import Event
from hfpatch.model.roles import weights_dtype
from hfpatch.model.survey import Survey
from hfpatch.patching.status import status
from hfpatch.tracing.tensors import is_sharded

PACKAGES = ("hfpatch", "torch", "transformers", "peft", "accelerate", "safetensors", "bitsandbytes")
SAMPLED = 64
"""Elements of each parameter that its model's fingerprint is made from."""


def account(
    model: nn.Module, event: Event, found: Rerun, call: Kept | None, replayed: dict[str, Any], *, rank: int, world: int
) -> dict[str, Any]:
    """An event in plain values, strict JSON; without the batch.

    Args:
        model: Unwrapped.
        event: What happened.
        found: What the call did when it was made again.
        call: The call; None if none was seen.
        replayed: Which micro-batch it is of, and the losses of all.
        rank: Of this process.
        world: Ranks there are.
    """
    facts = event.facts
    return plain(
        {
            "format": FORMAT,
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "step": facts.step,
            "rank": rank,
            "world": world,
            "event": {**facts.to_dict(), "says": str(facts), "stop": event.stop},
            "replay": {**replayed, **_replay(event, found, Survey(model).compiled)},
            "call": None if call is None else _call(model, call, found),
            "model": _model(model),
            "patches": list(status(model).patches),
            "recent": [_figures(f) for f in event.recent],
            "counts": event.counts,
            "scaler": event.scaler,
            "software": software(),
        }
    )


def _replay(event: Event, found: Rerun, compiled: tuple[str, ...]) -> dict[str, Any]:
    doubts = [
        *(["the weights were changed after the batch"] if event.moved else []),
        *(["the model is compiled, and was run uncompiled"] if compiled else []),
    ]
    return {
        "done": found.obstacle is None,
        "exact": found.obstacle is None and not doubts,
        "doubts": doubts,
        "says": _says(event.facts, found),
        "finding": found.finding.to_dict() if found.finding is not None else None,
        "loss": found.loss,
        "factor": found.factor,
        "norm": found.norm,
    }


def _says(facts: Facts, found: Rerun) -> str:
    says = found.says(facts.step, facts.scale or 1.0)
    broke = facts.reason in (Reason.LOSS, Reason.GRADIENTS, Reason.COLLAPSED)
    if broke and not found.bad and found.obstacle is None and found.loss is not None:
        says += "; what broke lies outside the model, on another rank, or in something that changed since"
    return says


def _call(model: nn.Module, call: Kept, found: Rerun) -> dict[str, Any]:
    autocast = found.autocast if found.autocast is not None else call.autocast
    return {
        "training": call.training,
        "otherwise": [path for path, module in model.named_modules() if module.training != model.training],
        "autocast": {device: dtype_name(dtype) for device, dtype in autocast.items()},
        "random": call.random.to_dict(),
    }


def _model(model: nn.Module) -> dict[str, Any]:
    config: Any = getattr(model, "config", None)
    first = next(model.parameters(), None)
    return {
        "class": type(model).__name__,
        "architecture": getattr(config, "model_type", None),
        "name": getattr(config, "name_or_path", None),
        "attention": chosen(config),
        "dtype": None if first is None else dtype(model),
        "device": None if first is None else str(first.device),
        "fingerprint": fingerprint(model),
    }


def dtype(model: nn.Module) -> str:
    """The floating dtype that most of a model's weights have: adapters and norms may have another."""
    return dtype_name(weights_dtype(model) or torch.float32)


def fingerprint(model: nn.Module) -> str | None:
    """A digest of some elements of every parameter, bit for bit: it tells whether two models hold the same weights.

    Returns:
        None if the parameters are sharded over ranks.
    """
    seen = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if is_sharded(parameter) or parameter.device.type == "meta":
            return None
        seen.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        if type(parameter) is nn.Parameter and parameter.layout == torch.strided:  # quantised kinds are told by shape
            flat = parameter.detach().reshape(-1)
            some = flat[:: max(1, flat.numel() // SAMPLED)].contiguous().view(torch.uint8)
            seen.update(some.cpu().numpy().tobytes())
    return seen.hexdigest()


def software() -> dict[str, str | None]:
    """Versions of what is installed, by name."""
    found: dict[str, str | None] = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["cuda"] = torch.version.cuda
    found["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return found


def _figures(facts: Facts) -> dict[str, Any]:
    median = None if math.isnan(facts.median) else facts.median
    return {
        "step": facts.step,
        "kind": facts.kind,
        "reason": facts.reason,
        "loss": facts.loss,
        "norm": facts.norm,
        "median": median,
        "scale": facts.scale,
    }
