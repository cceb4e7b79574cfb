"""A change that adds layers to LoRA adapters, on linear layers that they do not adapt yet.

PEFT's own injection re-activates every layer of an adapter, so it is called for each missing layer alone: existing
layers, their weights and their flags are not touched. The changed module is PEFT's `LoraModel`.
Undoing removes only the added layers. The active adapters, the flags and the layers of other adapters may have
changed since, and stay as they are.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hfpatch.compat import peft
from hfpatch.compat.modules import children
from hfpatch.lora.expand import wrapped
from hfpatch.lora.places import frame_of
from hfpatch.model.survey import Survey
from hfpatch.patching.kinds.base import Change
from hfpatch.patching.kinds.expansion import Before, Expansion, Place, is_layer, place_now, places_now
from hfpatch.patching.kinds.states import ABSENT, HERE, State
from hfpatch.patching.record import records_of

PER_ADAPTER = (
    "r", "lora_alpha", "scaling", "use_rslora", "use_dora", "lora_bias", "lora_variant", "lora_dropout", "lora_A",
    "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector",
)  # fmt: skip
"""Attributes of a LoRA layer that are dicts with the adapter's name as key."""


@dataclass(frozen=True)
class AddTargets(Change):
    """Adds layers to adapters of one PEFT model. PEFT initialises A, and B is 0, so no output changes.

    The random values come from torch's global generator, as when PEFT adapts the same modules.

    Attributes:
        parts: The layers that each adapter gains.
    """

    in_checkpoint = "adapter"

    parts: tuple[Expansion, ...]

    @property
    def slot(self) -> str:
        return f"adapter {', '.join(self._adapters)}"

    @property
    def place(self) -> Hashable:
        return AddTargets, self._adapters

    @property
    def _adapters(self) -> tuple[str, ...]:
        return tuple(part.adapter for part in self.parts)

    def __str__(self) -> str:
        if len(self.parts) == 1:
            return str(self.parts[0])
        return "; ".join(f"{part.adapter}: {part}" for part in self.parts)

    def now(self, module: nn.Module) -> Any:
        configs = _configs(module)
        return "; ".join(_shown(configs[name].target_modules) for name in self._adapters if name in configs)

    def inverse(self, root: nn.Module, module: nn.Module) -> Before:
        frame = frame_of(module)
        wanted = {part.adapter: set(part.modules) for part in self.parts}
        opening = {part.adapter for part in self.parts if _Model(module, part.adapter).opens}
        places: dict[str, Place] = {}
        for path in dict.fromkeys(path for part in self.parts for path in part.modules):
            parent_path, _, name = path.rpartition(".")
            parent = frame.get_submodule(parent_path)
            there: Any = children(parent)[name]
            gains = tuple(part.adapter for part in self.parts if path in wanted[part.adapter])
            flags = tuple(p.requires_grad for p in there.parameters())
            active = there.__dict__.get(peft.ACTIVE, ABSENT)
            bias = getattr(there, "bias", None)
            frozen = isinstance(bias, nn.Parameter) and not bias.requires_grad
            opens = active is ABSENT and frozen and not opening.isdisjoint(gains)
            places[path] = Place(parent, name, there, gains, flags, active, opens)
        return Before(tuple(_configs(module)[part.adapter].target_modules for part in self.parts), places)

    def write(self, root: nn.Module, module: nn.Module, before: Before) -> None:
        tuner: Any = module
        models = [(part, _Model(tuner, part.adapter)) for part in self.parts]
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*fan_in_fan_out is set to")
                for part, model in models:
                    for path in part.modules:
                        place = before.places[path]
                        peft.add_layer(
                            tuner,
                            model.config,
                            part.adapter,
                            place.layer,
                            parent=place.parent,
                            name=place.name,
                            path=path,
                        )
        finally:
            for place in before.places.values():
                _keep(place)
        for part, model in models:
            for path in part.modules:
                model.shape(before.places[path], part.adapter)
        _rename(module, self.parts, before)

    def restore(self, root: nn.Module, module: nn.Module, before: Before) -> None:
        others = _others(module, self.parts, before)
        bare: set[str] = set()
        for path, place in places_now(module, before).items():
            layer = place.layer
            if is_layer(layer):
                gains = [name for name in place.gains if name not in others]
                _unmerge(layer, gains)
                for adapter in gains:
                    _pop(layer, adapter)
                if place.opens:
                    layer.get_base_layer().bias.requires_grad_(False)
                if place.bare and not _carried(layer):
                    children(place.parent)[place.name] = place.there
                elif place.bare:
                    _hand_over(module, path, place)
            if place.bare and place.layer is place.there:
                bare.add(path)
        for part, names in zip(self.parts, before.names, strict=True):
            if part.adapter in _configs(module) and part.adapter not in others:
                _configs(module)[part.adapter].target_modules = names
        noted = _noted(module)
        noted[:] = [path for path in noted if path not in bare]

    def abandon(self, root: nn.Module, module: nn.Module, before: Before) -> None:
        self.restore(root, module, before)
        for place in places_now(module, before).values():
            _as_before(place)

    def read(self, root: nn.Module, module: nn.Module, before: Before) -> State:
        for part in self.parts:
            whose = f" ({part.adapter})" if len(self.parts) > 1 else ""
            config = _configs(module).get(part.adapter)
            if config is None:
                return State("gone", f"deleted{whose}")
            without = _without(module, part, before)
            if without:
                return State("gone", f"without {len(without)} of its layers, first {without[0]}{whose}")
            if not _has_names(config, part):
                return State("changed", f"at other target_modules{whose}: {_shown(config.target_modules)}")
        return HERE

    def obstacle(self, root: nn.Module, module: nn.Module, before: Before) -> str | None:
        if (outside := wrapped(Survey(root))) is not None:
            path, kind = outside
            return (
                f"inside {kind} ({path or 'the model'}), which fixed its parameters when it wrapped the model, so "
                f"removing some would break it; revert the model that {kind} holds, and wrap it again afterwards"
            )
        places = places_now(module, before)
        for part in self.parts:
            whose = f" ({part.adapter})" if len(self.parts) > 1 else ""
            for path in part.modules:
                layer = places[path].layer
                if part.adapter in getattr(layer, "merged_adapters", ()):
                    return f"merged into the base weights at {path}{whose}; call unmerge_adapter() first"
        return None

    def lost(self, root: nn.Module, module: nn.Module, before: Before) -> str | None:
        places, others = places_now(module, before), _others(module, self.parts, before)
        layers = [
            (part.adapter, layer)
            for part in self.parts
            for path in part.modules
            if part.adapter not in others and part.adapter in _adapted(layer := places[path].layer)
        ]
        trained = sum(_trained(layer, adapter) for adapter, layer in layers)
        return f"{trained} layers that were trained since are removed" if trained else None

    def suspend(self, root: nn.Module, module: nn.Module, before: Before, held: list[Any]) -> None:
        """Deactivate the added layers in place: nothing is removed that would have to be put back in order."""
        for place in places_now(module, before).values():
            layer = place.layer
            if not is_layer(layer):
                continue
            merged, weights = list(layer.merged_adapters), []
            unmerges = not set(merged).isdisjoint(place.gains)
            if unmerges:
                weights = [(p, p.detach().clone()) for p in layer.get_base_layer().parameters(recurse=False)]
            held.append((layer, layer.__dict__[peft.ACTIVE], merged, weights))
            if unmerges:
                _unmerge(layer, place.gains)
            layer.__dict__[peft.ACTIVE] = [name for name in layer.active_adapters if name not in place.gains]

    def resume(self, root: nn.Module, module: nn.Module, before: Before, held: list[Any]) -> None:
        for layer, active, merged, weights in held:
            layer.__dict__[peft.ACTIVE] = active
            layer.merged_adapters[:] = merged
            for parameter, values in weights:
                parameter.data.copy_(values)

    def added(self, root: nn.Module, module: nn.Module, before: Before) -> Iterable[nn.Parameter]:
        places = places_now(module, before)
        for part in self.parts:
            for path in part.modules:
                yield from _of_adapter(places[path].layer, part.adapter)


def _without(tuner: nn.Module, part: Expansion, before: Before) -> list[str]:
    """Return the paths at which an adapter no longer has its layer."""
    places = places_now(tuner, before)
    return [path for path in part.modules if part.adapter not in _adapted(places[path].layer)]


def _has_names(config: Any, part: Expansion) -> bool:
    return not isinstance(config.target_modules, str) and set(config.target_modules) == set(part.names)


def _others(tuner: nn.Module, parts: tuple[Expansion, ...], before: Before) -> set[str]:
    """Return the names that other adapters, with their own targets, took after ours was deleted."""
    return {
        part.adapter
        for part, names in zip(parts, before.names, strict=True)
        if (config := _configs(tuner).get(part.adapter)) is not None
        and config.target_modules is not names
        and not _has_names(config, part)
        and _without(tuner, part, before)
    }


class _Model:
    """The flags, dtype and mode of an adapter's existing layers, which the new layers get too."""

    def __init__(self, tuner: Any, adapter: str) -> None:
        layers = [m for m in tuner.model.modules() if adapter in getattr(m, "lora_A", ())]
        parameters = [p for layer in layers for p in _of_adapter(layer, adapter)]
        own = copy.copy(tuner.peft_config[adapter])
        if own.init_lora_weights != "gaussian":
            own.init_lora_weights = True
        self.config = own
        self.trains = any(p.requires_grad for p in parameters)
        self.opens = own.bias == "lora_only" and self.trains
        self.dtype = next((p.dtype for p in parameters if p.is_floating_point()), None)
        self.disabled = any(map(peft.is_off, layers))
        self.active = tuner.active_adapters

    def shape(self, place: Place, adapter: str) -> None:
        """Give a new layer the flags, dtype and mode of the others."""
        layer = place.layer
        if place.bare:
            inner = {id(m) for m in place.there.modules()}
            for part in layer.modules():
                if id(part) not in inner:
                    part.training = place.there.training
            peft.switch(layer, list(self.active), off=self.disabled)
            bias = getattr(place.there, "bias", None)
            if place.opens and isinstance(bias, nn.Parameter):
                bias.requires_grad_(True)
        else:
            layer.lora_dropout[adapter].train(layer.training)
        for parameter in _of_adapter(layer, adapter):
            if self.dtype is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(self.dtype)
            parameter.requires_grad_(self.trains)


def _keep(place: Place) -> None:
    """Restore the flags of what was there, which PEFT sets whenever it makes a layer or adds an adapter to one."""
    new = {id(p) for adapter in place.gains for p in _of_adapter(place.layer, adapter)}
    old = [p for p in place.there.parameters() if id(p) not in new or place.bare]
    for parameter, flag in zip(old, place.flags, strict=True):
        parameter.requires_grad_(flag)
    if not place.bare:
        place.there.__dict__[peft.ACTIVE] = place.active


def _as_before(place: Place) -> None:
    """Restore the flags and active adapters of what was there, after a write that did not finish."""
    for parameter, flag in zip(place.there.parameters(), place.flags, strict=True):
        parameter.requires_grad_(flag)
    if not place.bare:
        place.there.__dict__[peft.ACTIVE] = place.active


def _carried(layer: Any) -> set[str]:
    """Return the names of the adapters in a layer."""
    return set(layer.lora_A) | set(layer.lora_embedding_A)


def _adapted(layer: Any) -> Any:
    """Return the adapters with a linear layer here; empty for a layer without adapters and for None."""
    return getattr(layer, "lora_A", ())


def _trained(layer: Any, adapter: str) -> bool:
    """True if B, which was initialised to 0, holds other values."""
    return any(not p.is_meta and bool(p.detach().any()) for p in layer.lora_B[adapter].parameters())


def _unmerge(layer: Any, adapters: Iterable[str]) -> None:
    """Unmerge these adapters from the base weights; other merged adapters stay merged."""
    merged = list(layer.merged_adapters)
    rest = [name for name in merged if name not in adapters]
    if rest == merged:
        return
    layer.unmerge()
    if rest:
        layer.merge(adapter_names=rest)


def _hand_over(module: nn.Module, path: str, place: Place) -> None:
    """If a later record added the adapter that keeps this layer, let undoing that record unwrap the linear layer."""
    for before in (record.before for record in records_of(module)):
        places = before.places if isinstance(before, Before) else {}
        if path in places and place_now(frame_of(module), path, places[path]).there is place.layer:
            places[path] = replace(places[path], there=place.there, flags=place.flags, active=ABSENT)


def _rename(module: nn.Module, parts: tuple[Expansion, ...], before: Before) -> None:
    for part in parts:
        config = _configs(module)[part.adapter]
        config.target_modules = list(part.names) if isinstance(config.target_modules, list) else set(part.names)
    noted = _noted(module)
    known = set(noted)
    noted.extend(path for path in before.places if path not in known)


def _of_adapter(layer: Any, adapter: str) -> Iterable[nn.Parameter]:
    for name in PER_ADAPTER:
        table = getattr(layer, name, None)
        if isinstance(table, nn.ModuleDict) and adapter in table:
            yield from table[adapter].parameters()
        elif isinstance(table, nn.ParameterDict) and adapter in table:
            yield table[adapter]


def _pop(layer: Any, adapter: str) -> None:
    for name in PER_ADAPTER:
        table = getattr(layer, name, None)
        if table is not None and adapter in table:
            del table[adapter]


def _configs(tuner: nn.Module) -> dict[str, Any]:
    configs: Any = tuner.peft_config
    return configs


def _noted(tuner: nn.Module) -> list[str]:
    """Return PEFT's own list of the paths of adapted modules."""
    noted: Any = tuner.__dict__.get("targeted_module_names")
    return noted if isinstance(noted, list) else []


def _shown(names: Any) -> str:
    return names if isinstance(names, str) else ", ".join(names if isinstance(names, list) else sorted(names or ()))
