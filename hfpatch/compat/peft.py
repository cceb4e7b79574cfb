# PEFT offers no public way to add one layer without touching all the others, nor to ask what it would make of a module
# pyright: reportPrivateUsage=false
"""What PEFT's layers note of their adapters, and the steps of its injection that hfpatch calls one by one.

Known in PEFT 0.18 to 0.21. PEFT is imported when a function is called.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from types import SimpleNamespace
from typing import Any

from torch import nn

_LOWER = re.compile(r"(?<![^.])lora_(embedding_)?A(?![^.])")

ACTIVE = "_active_adapter"
"""Key in the `__dict__` of an adapted layer: the names of the adapters that are active in it."""


def halves(names: Collection[str]) -> list[tuple[str, str]]:
    """Return the names of `lora_A` and `lora_B` of each adapter of each layer, among the names of parameters."""
    pairs = ((name, _LOWER.sub(r"lora_\1B", name)) for name in names)
    return [(low, high) for low, high in pairs if low != high and high in names]


def is_off(layer: Any) -> bool:
    """True if an adapted layer's adapters are all switched off."""
    return layer._disable_adapters


def switch(layer: Any, active: list[str], *, off: bool) -> None:
    """Set which adapters are active in an adapted layer, and whether all are off; what trains stays as it is."""
    layer._active_adapter = active
    layer._disable_adapters = off


def add_layer(
    tuner: Any, config: Any, adapter: str, module: nn.Module, *, parent: nn.Module, name: str, path: str
) -> None:
    """Give one module an adapter's layer, as `inject_adapter` does for each module that it finds.

    Args:
        tuner: The `LoraModel`.
        config: To make the layer by.
        adapter: Its name.
        module: To be adapted; an adapted layer gains one more.
        parent: Holds the module.
        name: Of the module in its parent.
        path: Of the module in the model.
    """
    tuner._create_and_replace(config, adapter, module, name, parent, current_key=path)


def layer_for(module: nn.Module) -> Any:
    """Return the LoRA layer that PEFT would put around a module; the module stays as it is.

    Raises:
        ValueError: It has none; other errors where the module's class is not what its layer wants.
    """
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel
    from transformers.pytorch_utils import Conv1D

    make: Any = LoraModel._create_new_module
    words = {"r": 1, "lora_alpha": 1, "device_map": {}, "loaded_in_8bit": False, "loaded_in_4bit": False}
    words["fan_in_fan_out"] = isinstance(module, Conv1D)  # PEFT 0.18 wants to be told
    return make(LoraConfig(r=1), "probe", module, target_name="probe", **words)


@cache
def refuses(name: str, model_type: str) -> bool:
    """True if PEFT takes no module of this name in models of this type (the Mamba family); False without its check."""
    from peft import LoraConfig
    from peft.tuners import tuners_utils

    check: Any = getattr(tuners_utils, "_check_lora_target_modules_mamba", None)
    if check is None:
        return False
    try:
        check(LoraConfig(), SimpleNamespace(config=SimpleNamespace(model_type=model_type)), name)
    except ValueError:
        return True
    return False


def all_linear(config: Any, model: nn.Module) -> Any:
    """Return a config with the names that `target_modules="all-linear"` stands for in a model; others as they are."""
    from peft.tuners import tuners_utils

    return tuners_utils._maybe_include_all_linear_layers(config, model)


def has_own_adapters(model: nn.Module) -> bool:
    """True if a transformers model carries adapters by its own `add_adapter`; False without its note of that."""
    return bool(vars(model).get("_hf_peft_config_loaded"))
