"""What LoRA adapters are to gain, where, and what was there; found again where somebody replaced a block since."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hfpatch.compat.modules import children
from hfpatch.lora.places import frame_of
from hfpatch.patching.kinds.states import ABSENT


@dataclass(frozen=True)
class Expansion:
    """What an adapter is to gain.

    Attributes:
        adapter: Its name.
        modules: Whole paths, in the tuner's model, of the linear maps that get a layer.
        names: Its target names afterwards.
    """

    adapter: str
    modules: tuple[str, ...]
    names: tuple[str, ...]

    def __str__(self) -> str:
        leaves = dict.fromkeys(path.rpartition(".")[2] for path in self.modules)
        return f"{len(self.modules)} more modules ({', '.join(leaves)})"


@dataclass(frozen=True)
class Place:
    """Where a layer goes.

    Attributes:
        parent: The module that holds the map.
        name: Under which name.
        there: What was there: the map, or a layer of another adapter around it.
        flags: `requires_grad` of every parameter in it.
        gains: The adapters that gain a layer here.
        active: The layer's own note of the active adapters; `ABSENT` for a bare map.
        opens: Whether its bias, frozen before, trains with the layer.
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
        """What is there now."""
        return children(self.parent).get(self.name)

    @property
    def bare(self) -> bool:
        """True if no adapter was there."""
        return self.active is ABSENT


@dataclass(frozen=True)
class Before:
    """The inverse: each adapter's object of target names, and every place once."""

    names: tuple[Any, ...]
    places: dict[str, Place]


def is_layer(module: Any) -> bool:
    """True for a LoRA layer around a map; what was left half-made, or unloaded since, is none."""
    return isinstance(module, nn.Module) and "lora_A" in children(module)


def places_now(tuner: nn.Module, before: Before) -> dict[str, Place]:
    """Return the places as they are in the model now: somebody may have put a copy of a block there."""
    frame = frame_of(tuner)
    return {path: place_now(frame, path, place) for path, place in before.places.items()}


def place_now(frame: nn.Module, path: str, place: Place) -> Place:
    """Return a place as it is in the model now; as it was where its path leads nowhere any more."""
    try:
        parent = frame.get_submodule(path.rpartition(".")[0])
    except AttributeError:
        return place
    if parent is place.parent:
        return place
    layer: Any = children(parent).get(place.name)
    there = layer.get_base_layer() if place.bare and is_layer(layer) else layer
    return place if there is None else replace(place, parent=parent, there=there)
