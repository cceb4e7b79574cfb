"""The contents of `bundle.json`: an event in plain values."""

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
"""Elements of each parameter in the model's fingerprint, at least (if it has as many)."""


def account(
    model: nn.Module, event: Event, found: Rerun, call: Kept | None, replayed: dict[str, Any], *, rank: int, world: int
) -> dict[str, Any]:
    """Return an event as plain values for strict JSON, without the batch.

    Args:
        model: The model, unwrapped.
        event: The event.
        found: The result of running the call again.
        call: The call; None if no call was seen.
        replayed: Index of its micro-batch, and the losses of all micro-batches.
        rank: The rank of this process.
        world: The number of ranks.
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
        *(["the weights were changed after the batch"] if event.stepped else []),
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
        says += "; the cause is outside the model, on another rank, or in something that has changed since"
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
    """Return the floating-point dtype that most of a model's weights have: adapters and norms may have another."""
    return dtype_name(weights_dtype(model) or torch.float32)


def fingerprint(model: nn.Module) -> str | None:
    """Return a digest of some elements of every parameter, by which two models' weights can be compared.

    Returns:
        The digest in hexadecimal; None if a parameter is sharded over ranks or on meta.
    """
    seen = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if is_sharded(parameter) or parameter.device.type == "meta":
            return None
        seen.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        if (
            type(parameter) is nn.Parameter and parameter.layout == torch.strided
        ):  # of quantised ones only the shape counts
            flat = parameter.detach().reshape(-1)
            some = flat[:: max(1, flat.numel() // SAMPLED)].contiguous().view(torch.uint8)
            seen.update(some.cpu().numpy().tobytes())
    return seen.hexdigest()


def software() -> dict[str, str | None]:
    """Return the versions of the installed packages, Python, CUDA and the GPU's name; None if absent."""
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
