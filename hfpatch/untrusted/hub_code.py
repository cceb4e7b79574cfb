"""Values in the config of a checkpoint that make transformers or PEFT load code or other models: none is obeyed.

What is known here is how a value is named, not which architectures read it, so new ones are covered.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hfpatch.errors import InputError
from hfpatch.given import shown
from hfpatch.untrusted.ordinary import brief

IMPLEMENTATION = "implementation"
EXPERTS = ("deepgemm", "sonicmoe")
"""Ways to run experts that transformers loads from the hub when they first run."""
KERNELS = ("eetq", "fbgemm_fp8", "fp8", "metal", "mxfp4", "nvfp4")
"""Methods of quantisation whose layers transformers loads from the hub."""
DEEPEST = 32

ADAPTER_TEXTS = frozenset({
    "peft_type", "task_type", "peft_version", "base_model_name_or_path", "revision", "auto_mapping", "bias",
    "target_modules", "exclude_modules", "modules_to_save", "feedforward_modules", "target_parameters",
    "layers_pattern", "init_lora_weights", "init_weights", "act_fn", "variant", "wavelet_family", "psoft_svd",
    "ab_svd_init", "config_A_B", "config_C", "config_D_E", "decomposition_method", "prompt_tuning_init",
})  # fmt: skip
"""Keys in the config of an adapter whose texts PEFT compares with names. It may load what another text names."""
LARGEST_SIZE = 2**17
"""Largest rank, and number of tokens or layers, of an adapter."""

_FLASH = re.compile(r"(?:paged\|)?(flash_attention_\d+)")
_TIMM_PLACE = re.compile(r"(hf[-_]hub|local[-_]dir):")
_CHOICE = re.compile(r"_(method|mode|type)$")
_NO_SIZE = re.compile(r"alpha|seed|key|warmup|interval|step|tinit|tfinal|indices|tokens?_ids|^u$")


def code_of_model(values: Mapping[str, Any]) -> str:
    """Return the beginning of a sentence on a value in a config that makes transformers load code; empty if none does.

    Raises:
        InputError: The config is nested too deep; the message is without its name.
    """
    for key, value in texts(values):
        if IMPLEMENTATION in key:
            if "/" in value:
                return f"{brief(key)} names code on the hub ({brief(value)}), which was not run"
            if (flash := _FLASH.fullmatch(value)) is not None and _is_fetched(flash[1]):
                return f"{brief(key)} is {value!r}, which is not installed, so transformers would load it from the hub"
            if "experts" in key and value in EXPERTS:
                return f"{brief(key)} is {value!r}, which transformers loads from the hub"
        elif _TIMM_PLACE.match(value):
            return f"{brief(key)} names a model of timm that is elsewhere ({brief(value)}), which was not loaded"
    for part in _parts(values):
        backbone, kind = part.get("backbone"), part.get("model_type")
        if isinstance(backbone, str) and part.get("backbone_config") is None:
            if kind == "timm_backbone":
                if part.get("use_pretrained_backbone"):
                    return (
                        f"use_pretrained_backbone asks for the weights of {brief(backbone)}, which were not downloaded"
                    )
            elif "/" in backbone or not _names_timm_models(kind):
                return f"backbone names a part on the hub ({brief(backbone)}), which was not downloaded"
    return ""


def texts(value: Any, key: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield every text in a config, its sub-configs and lists with its key.

    A text inside a value of `..._implementation` has that key.

    Raises:
        InputError: The config is nested too deep.
    """
    if depth > DEEPEST:
        raise InputError("it is nested too deep to be a config")
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from texts(item, key, depth + 1)
    elif isinstance(value, Mapping) or hasattr(value, "model_type"):
        for name, item in list((value if isinstance(value, Mapping) else vars(value)).items()):
            yield from texts(item, key if IMPLEMENTATION in key else str(name), depth + 1)


def code_of_adapter(values: Mapping[str, Any]) -> str:
    """Return the beginning of a sentence on a value in the config of an adapter that makes PEFT load something else.

    PEFT imports modules, reads files and loads models and tokenizers that such a config names. Empty if none does.

    Raises:
        InputError: The config is nested too deep; the message is without its name.
    """
    for top, value in values.items():
        if top not in ADAPTER_TEXTS and not top.endswith("_pattern"):
            for key, text in texts(value, top):
                if text and (top, text) != ("megatron_core", "megatron.core") and not _CHOICE.search(key):
                    return f"{brief(top)} names {brief(text)}, which PEFT may load or import and which was not"
    return ""


def too_large(values: Mapping[str, Any]) -> str:
    """Return the path and value of a size in the config of an adapter that none has; empty if there is none."""
    for top, value in values.items():
        if not _NO_SIZE.search(top):
            inner: Any = value.items() if isinstance(value, Mapping) else [("", value)]
            for key, size in inner:
                if isinstance(size, (int, float)) and not -LARGEST_SIZE <= size <= LARGEST_SIZE:
                    return f"{brief(f'{top}.{key}'.rstrip('.'))} is {shown(size)}"
    return ""


def kernels_of_weights(values: Mapping[str, Any]) -> str:
    """Return the method of quantisation in a config if its layers would be loaded from the hub here; else empty."""
    from transformers.utils import is_kernels_available

    asked = values.get("quantization_config")
    method = asked.get("quant_method") if isinstance(asked, Mapping) else getattr(asked, "quant_method", None)
    name = str(getattr(method, "value", method))
    return name if name in KERNELS and is_kernels_available() else ""


def _parts(value: Any, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """Yield a config and every mapping in it."""
    if depth <= DEEPEST and (isinstance(value, Mapping) or hasattr(value, "model_type")):
        held: Mapping[str, Any] = value if isinstance(value, Mapping) else vars(value)
        yield held
        for item in list(held.values()):
            yield from _parts(item, depth + 1)
    elif depth <= DEEPEST and isinstance(value, (list, tuple)):
        for item in value:
            yield from _parts(item, depth + 1)


def _names_timm_models(model_type: Any) -> bool:
    """True if the config class of an architecture takes a `backbone` without a slash for a name of timm itself.

    Others ask the hub whether it has a model of that name.
    """
    from transformers import CONFIG_MAPPING

    cls: Any = CONFIG_MAPPING[model_type] if isinstance(model_type, str) and model_type in CONFIG_MAPPING else object
    made = (getattr(cls, name, None) for name in ("__init__", "__post_init__"))
    return any("timm" in repr(code.co_consts) for m in made if (code := getattr(m, "__code__", None)) is not None)


def _is_fetched(flash: str) -> bool:
    """True if transformers would ask the hub for `flash_attention_2`, or a later one, here: its package is missing."""
    from transformers import utils

    here: Any = getattr(utils, f"is_flash_attn_{flash.removeprefix('flash_attention_')}_available", None)
    return utils.is_kernels_available() and not (here is not None and here())
