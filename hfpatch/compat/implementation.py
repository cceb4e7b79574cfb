# `_attn_implementation` is where transformers keeps the choice; the public setter also writes to shared configs
# pyright: reportPrivateUsage=false
"""Which attention implementation a config chooses, and which ones a class takes.

Known in transformers 5.17 to 5.24.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

KEYS = ("_attn_implementation_internal", "_attn_was_changed")
"""Keys of a config's `__dict__` that `set_attn_implementation` writes: the choice, and before 5.24 that it was made."""


def chosen(config: Any) -> Any:
    """Return the implementation that a config chooses; None where none was chosen, or it is no config."""
    return getattr(config, "_attn_implementation", None)


def choose(config: PreTrainedConfig, name: Any) -> None:
    """Choose an implementation in a config and in those inside it, as a build from the config reads it."""
    config._attn_implementation = name


def note(config: PreTrainedConfig, name: Any) -> None:
    """Write an implementation into a config, and into no other; nothing is checked."""
    config._attn_implementation_internal = name


def taken(cls: Any) -> tuple[str, ...]:
    """Return the implementations that a class, or a model of it, takes, by the flags that transformers' setter asks.

    What a machine lacks (flash-attn) is not considered. A class refuses sdpa where it caps its scores (Gemma 2),
    whatever the cap in the config.
    """
    out = ["eager"]
    if cls._supports_sdpa:
        out.append("sdpa")
    if cls._supports_flash_attn:
        out.extend(getattr(cls, "_compatible_flash_implementations", None) or ["flash_attention_2"])
    if cls._supports_flex_attn:
        out.append("flex_attention")
    return tuple(out)
