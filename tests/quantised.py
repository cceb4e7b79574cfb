"""Tiny models quantised by each library, through its public door."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, QuantoConfig, TorchAoConfig

from hfpatch.lab.tiny import tiny_model

BATCH = {"input_ids": (torch.arange(24).reshape(2, 12) * 7 + 3) % 64}


def saved(model: Any) -> Path:
    """The folder of a checkpoint, for `from_pretrained`."""
    folder = Path(tempfile.mkdtemp(dir=tempfile.gettempdir()))
    model.save_pretrained(folder)
    return folder


def loaded(config: Callable[[], Any]) -> Callable[[Any], Any]:
    """A quantiser that `from_pretrained(quantization_config=)` runs."""

    def load(model: Any) -> Any:
        words = {"dtype": model.dtype, "attn_implementation": model.config._attn_implementation}
        return type(model).from_pretrained(saved(model), quantization_config=config(), **words).eval()

    return load


def torchao(config: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: TorchAoConfig(config(importlib.import_module("torchao.quantization")))


def int4(ao: Any) -> Any:
    """The int4 of torchao that runs on a CPU: `Int4WeightOnlyConfig` packs for GPUs."""
    groups = importlib.import_module("torchao.quantization.granularity").PerGroup(16)
    return ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=groups)


def hqq(model: Any) -> Any:
    """transformers 5.24 refuses `HqqConfig`: its quantiser is not there yet, so hqq's own door."""
    with torch.random.fork_rng(devices=[]):
        config = importlib.import_module("hqq.core.quantize").BaseQuantizeConfig(nbits=4, group_size=16)
        door = importlib.import_module("hqq.models.hf.base").AutoHQQHFModel
        door.quantize_model(model, quant_config=config, compute_dtype=model.dtype, device="cpu")
    return model


class Kernel:
    """In the place of `ggml-org/ggml-quantization`, which is on the hub and has nothing for a CPU.

    It multiplies by the blocks as transformers' own `dequantize` unpacks them.
    """

    gemv_types = frozenset({8})

    def supports(self, ggml_type: int) -> bool:
        return ggml_type in self.gemv_types

    def mul_mat_vec(self, weight: torch.Tensor, x: torch.Tensor, ggml_type: int, rows: int) -> torch.Tensor:
        dequantize = importlib.import_module("transformers.integrations.gguf.dequant").dequantize
        return x.float() @ dequantize(weight, ggml_type, torch.float32).reshape(rows, -1).T


def packed(model: Any) -> Any:
    """The modules in which transformers 5.24 keeps the blocks of a GGUF packed, Q8_0, in the place of linear layers.

    Its loader puts them there for qwen35, qwen35moe and lfm2 alone, and only if the kernel can be had.
    """
    import gguf
    from transformers.integrations.gguf import kernels, utils

    kernels._gguf_kernel = Kernel()
    linear = {f"{path}.weight": m for path, m in model.named_modules() if type(m) is nn.Linear and "lm_head" not in path}
    fits = {name: m.weight for name, m in linear.items() if m.in_features % 32 == 0 and m.out_features > 1}
    q8 = gguf.GGMLQuantizationType.Q8_0
    for name, module in utils.replace_with_gguf_modules(model, dict.fromkeys(fits, int(q8)), Kernel()).items():
        module.weight.data = torch.from_numpy(gguf.quants.quantize(fits[name].detach().float().numpy(), q8))
    return model


QUANTISED: dict[str, Callable[[Any], Any]] = {
    "torchao int8": loaded(torchao(lambda ao: ao.Int8WeightOnlyConfig(version=2))),
    "torchao int4": loaded(torchao(int4)),
    "bitsandbytes int8": loaded(lambda: BitsAndBytesConfig(load_in_8bit=True)),
    "bitsandbytes nf4": loaded(lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16)),
    "quanto int8": loaded(lambda: QuantoConfig(weights="int8")),
    "quanto int4": loaded(lambda: QuantoConfig(weights="int4")),
    "hqq int4": hqq,
    "GGUF packed": packed,
}


def llama(dtype: torch.dtype = torch.float16) -> Any:
    """A tiny Llama as `from_pretrained(dtype=)` leaves it, large enough for every quantiser's blocks."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    model = tiny_model("llama", num_attention_heads=4, num_key_value_heads=2, **sizes)
    return type(model).from_pretrained(saved(model), dtype=dtype, attn_implementation="eager").eval()


def dequantised(model: Any) -> Any:
    """A stock float32 Llama with the values that each library itself unpacks."""
    twin = llama(torch.float32)
    twin.config._attn_implementation = model.config._attn_implementation
    state = {name: p.detach().float() for name, p in model.named_parameters() if type(p) is nn.Parameter}
    for path, module in model.named_modules():
        value = unpacked(module)
        if value is not None:
            state[f"{path}.weight"] = value.detach().float()
    twin.load_state_dict({name: value for name, value in state.items() if not name.endswith("W_q")})
    return twin


def unpacked(module: Any) -> torch.Tensor | None:
    """The weight of a layer, by the function of its own library; None where it is not quantised."""
    kind = type(module).__name__
    if kind == "HQQLinear":
        return module.dequantize()
    if kind in ("Linear4bit", "Linear8bitLt"):
        tools = importlib.import_module("bitsandbytes.functional")
        if kind == "Linear8bitLt":
            return tools.int8_vectorwise_dequant(module.weight.data, module.weight.SCB if module.state.SCB is None else module.state.SCB)
        return tools.dequantize_4bit(module.weight.data, module.weight.quant_state)
    if kind == "GgufLinear":
        dequantize = importlib.import_module("transformers.integrations.gguf.dequant").dequantize
        return dequantize(module.weight, module.ggml_type, torch.float32).reshape(module.out_features, -1)
    weight = getattr(module, "weight", None)
    if weight is None or type(weight) is nn.Parameter:
        return None
    exact = type(weight).__name__ == "Int8Tensor"  # its layer multiplies by the codes, then by the scale
    return weight.dequantize(torch.float32) if exact else weight.dequantize()
