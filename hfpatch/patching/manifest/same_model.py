"""The model that a manifest is about: its weights, the code that its modules run, and how it attends."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Collection, Iterator, Mapping
from importlib import metadata
from types import FunctionType
from typing import Any

import torch
from torch import nn

from hfpatch.compat import accelerate, implementation
from hfpatch.given import shown
from hfpatch.model.code import bytecode_digest
from hfpatch.model.roles import own_class
from hfpatch.model.survey import Survey
from hfpatch.patching.kinds.choose_attention import ChooseAttention
from hfpatch.patching.kinds.in_float32.outside_autocast import FORWARD, Forward
from hfpatch.patching.proofs.bodies import digest, release
from hfpatch.patching.proofs.proof import is_unsaved
from hfpatch.patching.record import record_at
from hfpatch.patching.verifying.same_weights import tensors_seen

MOST = 2**20
"""Largest number of values of a buffer that is compared though no checkpoint holds it."""
PACKAGES = ("hfpatch", "torch", "transformers", "peft")


def releases() -> dict[str, str]:
    """Return the releases that run here."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = release(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def weights_of(model: nn.Module, saved: Collection[str], changed: Collection[str] = ()) -> list[list[Any]]:
    """Return name, shape, dtype and samples of each tensor that a checkpoint holds; no samples of the changed ones.

    Args:
        model: The model.
        saved: The keys of its state dict.
        changed: Names of tensors.

    Raises:
        ValueError: A tensor is sharded, or of a tensor class of whose parts nothing is known.
    """
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in saved]
    seen = tensors_seen([*model.named_parameters(), *buffers])
    return [[name, shape, dtype, "" if name in changed else packed] for name, shape, dtype, packed in seen]


def other_weights(
    kept: Collection[tuple[str, tuple[int, ...], str, str]], model: nn.Module, saved: Collection[str]
) -> str:
    """Return the first difference between a model's tensors and those that `weights_of` described; empty if none.

    Raises:
        ValueError: As `weights_of`.
    """
    now = {name: (tuple(shape), dtype, packed) for name, shape, dtype, packed in weights_of(model, saved)}
    before = {name: (shape, dtype, packed) for name, shape, dtype, packed in kept}
    for name in [*before, *now]:
        if name not in now:
            return f"it has no {shown(name)}"
        if name not in before:
            return f"it has {name}, which was not there"
        (shape, dtype, _), mine = before[name], now[name]
        if (shape, dtype) != mine[:2]:
            return f"{name} is {mine[1]} {list(mine[0])}, and was {dtype} {list(shape)}"
    other = (name for name, (_, _, packed) in before.items() if packed and now[name][2] not in ("", packed))
    return next((f"{name} has other values" for name in other), "")


def bodies_of(model: nn.Module) -> dict[str, str]:
    """Return digits that identify the body of each forward that the model's modules run, by its name."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        cls = own_class(module)
        owner = next(c for c in cls.__mro__ if "forward" in c.__dict__)
        if owner is not nn.Module:  # containers have none
            found[f"{owner.__module__}.{owner.__qualname__}.forward"] = _body(owner.__dict__["forward"])
        here = None if accelerate.HOOK in module.__dict__ else module.__dict__.get(FORWARD)
        here = here.inner if isinstance(here, Forward) else here  # ours, an edit
        if here is not None:
            found[f"{path or 'the model'}.forward, set on this module"] = _body(here)
    return found


def other_bodies(kept: Mapping[str, str], model: nn.Module) -> str:
    """Return the first difference between the forwards of a model and those that `bodies_of` described."""
    now = bodies_of(model)
    for name in [*kept, *now]:
        if name not in now:
            return f"it has no {shown(name)}"
        if name not in kept:
            return f"it has {name}, which was not there"
        if kept[name] != now[name]:
            return f"{name} has another body than when it was saved"
    return ""


def computed_of(model: nn.Module, saved: Collection[str], edited: Collection[str] = ()) -> dict[str, str]:
    """Return digests of the buffers that no checkpoint holds, by name; not of edited ones, nor of large ones."""
    rest = ((n, buffer) for n, buffer in model.named_buffers() if n not in saved and n not in edited)
    return {n: tensor_digest(b) for n, b in rest if not b.is_meta and type(b) is torch.Tensor and b.numel() <= MOST}


def other_computed(kept: Mapping[str, str], model: nn.Module, saved: Collection[str]) -> Iterator[str]:
    """Yield a sentence about the first buffer that no checkpoint holds and that is other than when it was saved."""
    now = computed_of(model, saved)
    for name, word in kept.items():
        if now.get(name, word) != word:
            yield f"{name}, which no checkpoint holds, is other than when it was saved: outputs may differ by that"
            return


def attention_of(model: nn.Module) -> dict[str, str]:
    """Return the attention implementation of each submodel by its path, but for those that a patch set."""
    found = {s.path: s.model for s in Survey(model).submodels if record_at(s.model, ChooseAttention) is None}
    chosen = {path: implementation.chosen(part.config) for path, part in found.items()}
    return {path: name for path, name in chosen.items() if isinstance(name, str)}


def other_attention(kept: Mapping[str, str], model: nn.Module) -> Iterator[str]:
    """Yield a sentence about each submodel that attends otherwise than when it was saved."""
    now = attention_of(model)
    for path, name in kept.items():
        if now.get(path, name) != name:
            where = path or "the model"
            yield f"{where} attends by {now[path]}, and did by {shown(name)} when it was saved: other rounding"


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's dtype, shape and bytes."""
    values = tensor.detach().to("cpu").contiguous()
    whole = hashlib.sha256(f"{values.dtype} {tuple(values.shape)} ".encode())
    whole.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()


def _body(function: Any) -> str:
    word = digest(function)
    plain = getattr(function, "__func__", function)
    if is_unsaved(word) and isinstance(plain, FunctionType):
        try:
            return f"bytecode {bytecode_digest(plain)}"
        except ValueError:
            return word
    return word
