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
_PLACES: dict[str, Any] = {
    "all": torch.backends, "cudnn": _CUDNN, "mkldnn": _MKLDNN,
    **{f"{device} {kind}": place for device, kinds in _ON.items() for kind, place in kinds.items()},
}  # fmt: skip
"""All places. An outer one comes first; an operation without a setting shows that of its library, or of all."""


def shortened(model: nn.Module) -> str:
    """Return what float32 is shortened to in a model, e.g. `tf32 in products of matrices`; empty if it is not."""
    first = next(model.parameters(), None)
    places = {} if first is None else _ON.get(first.device.type, {})
    found = {kind: place.fp32_precision for kind, place in places.items() if place.fp32_precision not in FULL}
    return ", ".join(
        f"{precision} in {_WORDS[kind]}"
        for kind, precision in found.items()
        if kind == "matmul" or any(isinstance(m, _MADE_OF[kind]) for m in model.modules())
    )


def not_in_full(model: nn.Module) -> list[str]:
    """Return a sentence for a table beside whose float32 reference other rows are shortened; none if they are not."""
    short = shortened(model)
    return [f"torch is set to shorten float32 to {short}: every row does so, but the reference"] if short else []


@contextlib.contextmanager
def full_float32() -> Generator[None]:
    """Compute float32 in full. Meanwhile other threads of the process do so too; then all is as it was."""
    before, old = _now(), _old_settings()
    with contextlib.ExitStack() as stack:
        if any(now not in FULL for now in before.values()):
            stack.callback(_restore, before, old)
            if old is not None:  # a forward may ask the older functions, which raise if only the newer ones were used
                _set_old("highest", cudnn=False)
            for at, now in _now().items():
                if now not in FULL and _PLACES[at].fp32_precision not in FULL:
                    _PLACES[at].fp32_precision = "ieee"
        yield


def _now() -> dict[str, str]:
    return {at: place.fp32_precision for at, place in _PLACES.items()}


def _old_settings() -> tuple[str, bool] | None:
    """Return what the older functions tell; None where torch refuses to, because newer settings differ from them."""
    try:
        return torch.get_float32_matmul_precision(), _CUDNN.allow_tf32
    except RuntimeError:
        return None


def _set_old(matmul: str, *, cudnn: bool) -> None:
    torch.set_float32_matmul_precision(matmul)
    _CUDNN.allow_tf32 = cudnn


def _restore(before: dict[str, str], old: tuple[str, bool] | None) -> None:
    if old is not None:
        _set_old(old[0], cudnn=old[1])
    for at, place in _PLACES.items():  # outer first: an inner one may follow it
        if place.fp32_precision != before[at]:
            place.fp32_precision = before[at]
