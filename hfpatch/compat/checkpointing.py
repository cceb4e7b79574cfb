"""How a layer of transformers runs its gradient checkpointing."""

from __future__ import annotations

import functools
from typing import Any


def is_reentrant(layer: Any) -> bool:
    """True if a layer with gradient checkpointing on does it by torch's reentrant way.

    `gradient_checkpointing_enable` sets `_gradient_checkpointing_func` on each layer, a partial of torch's function
    with the caller's words. Known in transformers 5.17 to 5.24; False without it. Where nothing is said, torch's
    default is the reentrant one.
    """
    function: Any = getattr(layer, "_gradient_checkpointing_func", None)
    return isinstance(function, functools.partial) and function.keywords.get("use_reentrant", True) is not False


def turn_on(model: Any, *, reentrant: bool) -> None:
    """Turn activation checkpointing on, by the name that this release of transformers has: it warns of the older one.

    In a model that reads text, transformers then makes the input embeddings require gradients.

    Raises:
        ValueError: The model does not support it.
    """
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})


def turn_off(model: Any) -> None:
    """Turn activation checkpointing off again."""
    (getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable)()
