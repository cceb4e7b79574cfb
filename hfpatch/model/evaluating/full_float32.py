"""Float32 that is float32: for a while no TF32 and no bfloat16 inside its matrix products and convolutions.

`torch.set_float32_matmul_precision("high")` and its like shorten the factors of float32 products to 11 bits on a GPU,
`"medium"` to 8 bits on some CPUs, and cuDNN's convolutions have 11 bits unless a script says otherwise. A reference in
float32 must not be shortened. Known in torch 2.11 to 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch import nn

from hfpatch.compat.modules import CONVOLUTIONS
from hfpatch.process_lock import ProcessLock

FULL = ("ieee", "none")
"""Precisions that shorten nothing."""
_CUDNN: Any = torch.backends.cudnn
_MKLDNN: Any = torch.backends.mkldnn
_ON: dict[str, dict[str, Any]] = {
    "cpu": {name: getattr(_MKLDNN, name) for name in ("matmul", "conv", "rnn")},
    "cuda": {"matmul": torch.backends.cuda.matmul, **{name: getattr(_CUDNN, name) for name in ("conv", "rnn")}},
}
"""Type of device -> kind of operation -> where torch keeps its precision."""
_MADE_OF: dict[str, tuple[type[nn.Module], ...]] = {"conv": (CONVOLUTIONS,), "rnn": (nn.RNNBase,)}
"""Kind of operation -> the modules that run it; products of matrices are in every model."""
_WORDS = {"matmul": "products of matrices", "conv": "convolutions", "rnn": "recurrent layers"}
_PLACES: tuple[Any, ...] = (
    *(torch.backends, _CUDNN, _MKLDNN),
    *(place for kinds in _ON.values() for place in kinds.values()),
)
"""All places. An outer one comes first; an operation without a setting shows that of its library, or of all."""
_lock = ProcessLock()


def shortened(model: nn.Module) -> str:
    """Return what float32 is shortened to in a model, e.g. `tf32 in products of matrices`; empty if it is not."""
    _, short = _short(model)
    return ", ".join(f"{place.fp32_precision} in {_WORDS[kind]}" for kind, place in short.items())


def not_in_full(model: nn.Module) -> list[str]:
    """Return a sentence for the notes of a table whose reference is full float32; none if its rows are, too."""
    short = shortened(model)
    return [f"torch is set to shorten float32 to {short}: every row but the reference is shortened"] if short else []


@contextlib.contextmanager
def full_float32(model: nn.Module | None = None) -> Generator[None]:
    """Compute float32 in full. Meanwhile other threads of the process do so too; one at a time is in here.

    Then the settings are as they were. Where cuDNN's convolutions or recurrent layers were shortened, one thing stays:
    they no longer follow a later `torch.backends.fp32_precision`.

    Args:
        model: What is computed; None for anything on the CPU.
    """
    with _lock.now:
        device, short = _short(model)
        if not short:
            yield
            return
        before, old = [(place, place.fp32_precision) for place in _PLACES], _old_settings()
        matmul = old[0] if old is not None and "matmul" in short else None
        cudnn = old[1] if old is not None and device == "cuda" and short.keys() != {"matmul"} else None
        try:
            # by the older functions where they agree with the newer ones: a model may ask them in its forward
            _set_old(None if matmul is None else "highest", None if cudnn is None else False)
            around: tuple[Any, ...] = (torch.backends, _MKLDNN if device == "cpu" else _CUDNN)
            for place in (*around, *short.values()):
                if place.fp32_precision not in FULL:
                    place.fp32_precision = "ieee"
            yield
        finally:
            try:
                _restore(before, matmul, cudnn)
            except BaseException:  # Ctrl-C in between: once more, and whole
                _restore(before, matmul, cudnn)
                raise


def _set_old(matmul: str | None, cudnn: bool | None) -> None:
    if matmul is not None:
        torch.set_float32_matmul_precision(matmul)
    if cudnn is not None:
        _CUDNN.allow_tf32 = cudnn


def _restore(before: list[tuple[Any, str]], matmul: str | None, cudnn: bool | None) -> None:
    _set_old(matmul, cudnn)
    for place, precision in before:  # outer first: an inner one may follow it
        if place.fp32_precision != precision:
            place.fp32_precision = precision


def _short(model: nn.Module | None) -> tuple[str, dict[str, Any]]:
    """Return a model's type of device, and the kinds of operation in it that shorten float32, with their places."""
    first = None if model is None else next(model.parameters(), None)
    device = "cpu" if first is None else first.device.type
    return device, {
        kind: place
        for kind, place in _ON.get(device, {}).items()
        if place.fp32_precision not in FULL
        and (model is None or kind == "matmul" or any(isinstance(m, _MADE_OF[kind]) for m in model.modules()))
    }


def _old_settings() -> tuple[str, bool] | None:
    """Return what the older functions tell; None where torch refuses to, because newer settings differ from them."""
    try:
        return torch.get_float32_matmul_precision(), _CUDNN.allow_tf32
    except RuntimeError:
        return None
