# RWKV has no public switch for the division of its weights
"""The weights that RWKV scales by itself. Imports no torch.

Its forward divides some of its weights by powers of 2 in evaluation, in place, and multiplies them in training. A
LoRA layer around such a weight is divided in its base part only. Known in transformers 5.17 to 5.24.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

RESCALE = "_rescale_layers"
"""Name of the method that scales the weights; a function of that name on an instance takes its place."""

RESCALED = "layers_are_rescaled"
"""Name of the attribute that says whether the weights are divided now."""


def scales_weights(module: nn.Module) -> bool:
    """True if a module's forward multiplies its own weights when the mode changes."""
    return hasattr(type(module), RESCALE)


def is_divided(module: nn.Module) -> bool:
    """True if a module's weights are divided now."""
    return bool(vars(module).get(RESCALED))


def divided_in_evaluation(module: nn.Module) -> dict[str, int]:
    """Return the linear maps whose weights a module divides in evaluation: path in it -> exponent of 2.

    Empty if it divides none, or if a function on the instance took the place of its method.
    """
    if not scales_weights(module) or RESCALE in vars(module):
        return {}
    return exponents(module)


def exponents(module: nn.Module) -> dict[str, int]:
    """Return the linear maps whose weights a module's class divides by a power of 2 above 1: path -> exponent."""
    config: Any = module.config
    every, blocks = int(config.rescale_every), dict(module.get_submodule("blocks").named_children())
    names = ("attention.output", "feed_forward.value")
    return {f"blocks.{i}.{n}": int(i) // every for i in blocks for n in names if 0 < every <= int(i)}


def in_place_of_scaling() -> None:
    """Do nothing, on an instance in place of the method: the weights stay as they are."""
