"""What transformers' loader and its auto classes go by. Known in transformers 5.17 to 5.24."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto


def classes_of(auto: str) -> Mapping[Any, Any]:
    """Return the model class, or classes, of each config class in an auto class's mapping; empty where it has none.

    `_model_mapping` is what `from_config` of an auto class looks in.
    """
    return getattr(getattr(modeling_auto, auto, None), "_model_mapping", {})


def names_of(auto: str) -> Mapping[str, Any]:
    """Return the same as names: those of model classes by `config.model_type`."""
    return getattr(classes_of(auto), "_model_mapping", {})


def kept_wide(model: PreTrainedModel) -> tuple[set[str], set[str]]:
    """Return patterns of the modules that the loader keeps in float32: in a load in float16 alone, in any half one.

    A class says so in `_keep_in_fp32_modules` and `_keep_in_fp32_modules_strict`;
    empty where it says nothing.
    """
    loose: Any = getattr(model, "_keep_in_fp32_modules", None)
    strict: Any = getattr(model, "_keep_in_fp32_modules_strict", None)
    return set(loose or ()), set(strict or ())
