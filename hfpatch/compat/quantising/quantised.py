# what a quantiser packed is found by the names that its library and PEFT's and transformers' own code read
"""Weights that a quantiser packed: of what kind and size they are, their values, and what a run changes of them.

Known in bitsandbytes 0.50, torchao 0.18, optimum-quanto 0.2.7, hqq 0.2.8 and, for GGUF, transformers 5.24. None of
these packages is imported.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hfpatch.compat.functions import unpacked_codes
from hfpatch.compat.modules import parameters
from hfpatch.compat.quantising.packages import by_package

ROWS = 1024
"""Rows of the identity that a weight is multiplied by at once."""


@dataclass(frozen=True)
class Coded:
    """The weight of a module, as a quantiser packed it.

    Attributes:
        name: Of the parameter that holds it.
        kind: Library and format, such as `bitsandbytes nf4`.
        shape: Of the weight: unpacked.
        values: Gives the weight, `[out, in]`, in float32 or in the dtype that the library unpacks it to.
        follows: True if the module computes in the dtype of its input: then a float32 run of it is one in float32.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    values: Callable[[], torch.Tensor]
    follows: bool = False

    @property
    def size(self) -> int:
        """Number of its values."""
        return torch.Size(self.shape).numel()


def coded(module: nn.Module) -> Coded | None:
    """Return the packed weight of a module; None if it has none of a kind that is known."""
    held = parameters(module)
    if held.get("W_q") is not None and isinstance(meta := getattr(module, "meta", None), dict):
        unpack: Any = module.dequantize
        return Coded("W_q", f"hqq int{meta.get('nbits', '?')}", tuple(meta["shape"]), unpack)
    weight: Any = held.get("weight")
    if weight is None or weight.is_meta:
        return None
    package = by_package(weight)
    if package == "torchao":
        found = getattr(weight, "target_dtype", None)
        what = type(weight).__name__ if found is None else str(found).removeprefix("torch.")
        return Coded("weight", f"torchao {what}", tuple(weight.shape), lambda: _torchao(weight), what == "Int8Tensor")
    if package == "quanto":
        return Coded("weight", f"quanto {weight.qtype.name}", tuple(weight.shape), weight.dequantize)
    if type(weight).__module__.startswith("bitsandbytes."):
        return _bitsandbytes(module, weight)
    if type(module).__module__ == "transformers.integrations.gguf.utils":
        return _gguf(module, weight)
    return None


def _torchao(weight: Any) -> torch.Tensor:
    """Return the values of a weight: unpacked, or, of a format that can only multiply (int4 for GPUs), by a product."""
    try:
        return weight.dequantize()
    except NotImplementedError:
        found: list[torch.Tensor] = []
        for start in range(0, weight.shape[1], ROWS):
            count = min(ROWS, weight.shape[1] - start)
            part = torch.zeros(count, weight.shape[1], dtype=weight.dtype, device=weight.device)
            part.diagonal(start).fill_(1)
            found.append(nn.functional.linear(part, weight))
        return torch.cat(found).T


def _bitsandbytes(module: Any, weight: Any) -> Coded | None:
    state = getattr(weight, "quant_state", None)
    if state is not None:
        kind = f"bitsandbytes {state.quant_type}"
        return Coded("weight", kind, tuple(state.shape), lambda: _four_bits(module))
    scales = getattr(weight, "SCB", None)
    if scales is None:
        scales = getattr(getattr(module, "state", None), "SCB", None)
    if scales is None or weight.dtype != torch.int8:
        return None  # not quantised yet
    return Coded(
        "weight", "bitsandbytes int8", tuple(weight.shape), lambda: weight.detach().float() * scales[:, None] / 127
    )


def _four_bits(module: Any) -> torch.Tensor:
    """Return the values of a `Linear4bit`.

    On a CPU with AVX512-BF16 its forward in evaluation packs codes and scales in another way, which `dequantize_4bit`
    does not know. The function that unpacks the codes leaves the scales as they are.
    """
    tools: Any = sys.modules["bitsandbytes.functional"]
    data, state = module.weight.data, module.weight.quant_state
    if packed_by_a_run(module):
        state = copy.copy(state)
        scales, state.original_nested = state.absmax.T.reshape(-1).float(), False
        data, state = unpacked_codes(tools, data, state)
        state.absmax = scales
    return tools.dequantize_4bit(data, state)


def _gguf(module: Any, weight: torch.Tensor) -> Coded | None:
    code = getattr(module, "ggml_type", None)
    shape = (
        (module.num_embeddings, module.embedding_dim)
        if hasattr(module, "num_embeddings")
        else (getattr(module, "out_features", 0), getattr(module, "in_features", 0))
    )
    if code is None or not all(shape):
        return None
    blocks: Any = sys.modules["transformers.integrations.gguf.kernels"].dequantize_blocks

    def values() -> torch.Tensor:
        return blocks(weight, code, *shape, torch.float32)

    return Coded("weight", f"GGUF type {code}", shape, values, follows=True)


def packed_by_a_run(module: nn.Module) -> bool:
    """True if a run in evaluation packed a 4-bit weight for the CPU: its gradients are wrong from then on."""
    state = getattr(parameters(module).get("weight"), "quant_state", None)
    return bool(getattr(state, "packing_format_for_cpu", False))


def changed_by_a_run(modules: Iterable[nn.Module]) -> list[tuple[nn.Parameter, torch.Tensor, list[Any]]]:
    """Return the parameters of bitsandbytes, each with its data and the tables of itself and its quantiser's state.

    The first run of an int8 layer moves codes and scales from the parameter to the layer's `state`; on a CPU with
    AVX512-BF16 a run in evaluation packs the codes of a 4-bit layer anew.
    """
    found: list[tuple[nn.Parameter, torch.Tensor, list[Any]]] = []
    for module in modules:
        weight: Any = parameters(module).get("weight")
        if weight is None or not type(weight).__module__.startswith("bitsandbytes."):
            continue
        held = [weight, getattr(weight, "quant_state", None), getattr(module, "state", None)]
        tables = [(vars(one), dict(vars(one))) for one in held if one is not None and hasattr(one, "__dict__")]
        found.append((weight, weight.data, tables))
    return found


def put_back(kept: Iterable[tuple[nn.Parameter, torch.Tensor, list[Any]]]) -> None:
    """Put back what `changed_by_a_run` returned."""
    for parameter, data, tables in kept:
        if parameter.data_ptr() != data.data_ptr() or parameter.shape != data.shape:
            parameter.data = data
        for table, before in tables:
            table.clear()
            table.update(before)


def saved_names(model: nn.Module) -> list[str]:
    """Return the keys of a model's state dict.

    `state_dict` of bitsandbytes unpacks what a run in evaluation packed on a CPU, with its scales in the wrong order:
    the model stays as it was.
    """
    kept = changed_by_a_run(model.modules())
    try:
        return list(model.state_dict())
    finally:
        put_back(kept)
