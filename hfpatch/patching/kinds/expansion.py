"""The layers that LoRA adapters gain, their places and what was there before; found again in a replaced block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hfpatch.compat.modules import children
from hfpatch.lora.places import frame_of
from hfpatch.patching.kinds.states import ABSENT


@dataclass(frozen=True)
class Expansion:
    """The layers that an adapter gains.

    Attributes:
        adapter: Name of the adapter.
        modules: Full paths, in the model that PEFT's tuner holds, of the linear layers to adapt.
        names: The adapter's `target_modules` afterwards.
    """

    adapter: str
    modules: tuple[str, ...]
    names: tuple[str, ...]

    def __str__(self) -> str:
        leaves = dict.fromkeys(path.rpartition(".")[2] for path in self.modules)
        return f"{len(self.modules)} more modules ({', '.join(leaves)})"


@dataclass(frozen=True)
class Place:
    """A place in the model that gets a LoRA layer.

    Attributes:
        parent: The module that holds the linear layer.
        name: Its name in the parent.
        there: The module that was there: the linear layer, or a LoRA layer of another adapter around it.
        gains: The adapters that gain a layer here.
        flags: `requires_grad` of every parameter of `there`.
        active: The active adapters of `there`; `ABSENT` for a linear layer without adapters.
        opens: True if its bias, frozen before, trains with the new layer.
    """

    parent: nn.Module
    name: str
    there: nn.Module
    gains: tuple[str, ...]
    flags: tuple[bool, ...]
    active: Any
    opens: bool = False

    @property
    def layer(self) -> Any:
        """The module that is there now; None if there is none."""
        return children(self.parent).get(self.name)

    @property
    def bare(self) -> bool:
        """True if no adapter was there."""
        return self.active is ABSENT


@dataclass(frozen=True)
class Before:
    """The data that undoing needs.

    Attributes:
        names: The `target_modules` object of each adapter.
        places: The places by path.
    """

    names: tuple[Any, ...]
    places: dict[str, Place]


def is_layer(module: Any) -> bool:
    """True for a LoRA layer around a linear layer; False if it is incomplete or was unloaded."""
    return isinstance(module, nn.Module) and "lora_A" in children(module)


def places_now(tuner: nn.Module, before: Before) -> dict[str, Place]:
    """Return the places in the present model, in which blocks may have been replaced with copies."""
    frame = frame_of(tuner)
    return {path: place_now(frame, path, place) for path, place in before.places.items()}


def place_now(frame: nn.Module, path: str, place: Place) -> Place:
    """Return a place in the present model; unchanged if its path no longer exists."""
    try:
        parent = frame.get_submodule(path.rpartition(".")[0])
    except AttributeError:
        return place
    if parent is place.parent:
        return place
    layer: Any = children(parent).get(place.name)
    there = layer.get_base_layer() if place.bare and is_layer(layer) else layer
    return place if there is None else replace(place, parent=parent, there=there)
