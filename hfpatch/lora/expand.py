"""The linear maps that a LoRA adapter misses in its blocks, and target names that match them. Changes nothing."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hfpatch.compat.modules import children
from hfpatch.errors import InputError
from hfpatch.lora.matrices import Matrix, Reading
from hfpatch.lora.names import TargetNames
from hfpatch.lora.targets import Coverage, coverage_of
from hfpatch.model.survey import Survey
from hfpatch.model.walk import inside, starred
from hfpatch.model.wrapping import is_tuner

KEEPS_BASE = frozenset({"gaussian", "eva", "orthogonal"})
"""Initialisations, apart from the default, that never change the base weights."""

UNPROVED = (
    "kasa_config", "arrow_config", "use_bdlora", "layer_replication", "use_qalora", "monteclora_config",
    "velora_config", "megatron_config", "alora_invocation_tokens",
)  # fmt: skip
"""Fields of a `LoraConfig` for adapters other than LoRA and DoRA."""


@dataclass(frozen=True)
class Gap:
    """The linear maps that one adapter misses.

    Attributes:
        adapter: Name of the adapter.
        missing: Full paths (in the tuner's model) of the linear maps it could adapt and does not.
        names: Its target names and those of the missing maps; empty if none is missing.
        before: Coverage of its blocks now; None if it cannot be expanded.
        after: Coverage with the missing maps.
        left_out: Linear maps that cannot be adapted: path and reason.
        problem: Why the adapter cannot be expanded, as a sentence; empty if it can.
    """

    adapter: str
    missing: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    before: Coverage | None = None
    after: Coverage | None = None
    left_out: tuple[tuple[str, str], ...] = ()
    problem: str = ""

    @property
    def left_out_phrase(self) -> str:
        """The first kind of map in `left_out`, for the end of a sentence; empty if there is none."""
        if not self.left_out:
            return ""
        path, reason = self.left_out[0]
        more = f" and {len(self.left_out) - 1} more kinds" if len(self.left_out) > 1 else ""
        return f"; without {path} ({reason}){more}"


def tuners(survey: Survey) -> dict[str, nn.Module]:
    """Return PEFT's tuners in an object, by path."""
    return {path: module for path, module in survey.modules.items() if is_tuner(type(module))}


def gap(tuner: Any, adapter: str, reading: Reading) -> Gap:
    """Return the linear maps that an adapter of a PEFT model misses.

    Args:
        tuner: The `LoraModel`.
        adapter: Name of the adapter.
        reading: Reading of the tuner's model.
    """
    config = tuner.peft_config[adapter]
    problem = _why_not_expandable(config) or _merged(reading)
    if problem:
        return Gap(adapter, problem=f"adapter {adapter!r} {problem}")
    if isinstance(config.target_modules, str):
        return Gap(
            adapter,
            problem=f"adapter {adapter!r} has the regular expression target_modules={config.target_modules!r}, to "
            "which no names can be added after injection; expand the config before injection with "
            "hfpatch.lora_config(model, base=config)",
        )
    adapted = adapted_by(reading, adapter)
    reached = adapted | _parameters_of(reading, adapter)
    missing, left_out = missing_of(reading, config, reached)
    matrices = reading.matrices_of(homes_of(reading, reached))
    before = coverage_of(reading, matrices, reached)
    if not missing:
        return Gap(adapter, before=before, after=before, left_out=left_out)
    names = joined(TargetNames(reading), config, {p for p in adapted if p}, missing)
    if names is None:
        return Gap(
            adapter,
            problem=f"adapter {adapter!r}: no list of names matches exactly its {len(adapted)} modules and the "
            f"{len(missing)} missing ones (the first is {missing[0]}); expand the config before injection with "
            "hfpatch.lora_config(model, base=config)",
        )
    after = coverage_of(reading, matrices, reached | set(missing))
    return Gap(adapter, missing, names, before, after, left_out)


def _why_not_expandable(config: Any) -> str:
    """Return why a config cannot be expanded; empty if it can."""
    kind = getattr(config.peft_type, "value", str(config.peft_type))
    if kind != "LORA":
        return f"is of type {kind}; only LoRA adapters are expanded"
    init = config.init_lora_weights
    if isinstance(init, str) and init not in KEEPS_BASE:
        return (
            f"has init_lora_weights={init!r}, which changes the base weights when the adapter is created and again "
            "when it is loaded, so modules added later would change them too: make a new adapter with "
            "hfpatch.lora_config instead"
        )
    odd = [name for name in UNPROVED if getattr(config, name, None)]
    return f"uses {', '.join(odd)}, for which an expansion is not proved" if odd else ""


def _merged(reading: Reading) -> str:
    at = next((p for p, place in reading.places.items() if getattr(place.wrapper, "merged", False)), None)
    return "" if at is None else f"is merged into the base weights (at {at}): call unmerge_adapter() first"


def adapted_by(reading: Reading, adapter: str) -> set[str]:
    """Return the paths of the modules that an adapter adapts by a layer, not through a parameter."""
    found: set[str] = set()
    for path, place in reading.places.items():
        layer: Any = place.wrapper
        if layer is None or type(layer).__name__ == "ParamWrapper":
            continue
        if any(adapter in getattr(layer, name, ()) for name in ("lora_A", "lora_embedding_A")):
            found.add(path)
    return found


def _parameters_of(reading: Reading, adapter: str) -> set[str]:
    """Return the full paths of the parameters that an adapter adapts; of a linear map's weight, the map's path."""
    found: set[str] = set()
    for path, place in reading.places.items():
        layer: Any = place.wrapper
        while layer is not None and type(layer).__name__ == "ParamWrapper":
            if adapter in layer.lora_A:
                found.add(path if path in reading.sizes else f"{path}.{layer.parameter_name}")
            layer = layer.base_layer
    return found


def as_counted(reading: Reading, parameters: Iterable[str]) -> set[str]:
    """Return paths as coverage counts them: the weight of a linear map counts as the map."""
    return {holder if (holder := path.rpartition(".")[0]) in reading.sizes else path for path in parameters}


def _block(reading: Reading, path: str) -> str | None:
    """Return the block that contains a module or parameter; None outside blocks."""
    return reading.block_of.get(path) or reading.block_of.get(path.rpartition(".")[0])


def homes_of(reading: Reading, adapted: Iterable[str]) -> frozenset[str]:
    """Return the homes of the blocks that contain these modules and parameters."""
    return frozenset(reading.home(block) for path in adapted if (block := _block(reading, path)) is not None)


def missing_of(reading: Reading, config: Any, adapted: set[str]) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Return the linear maps that an adapter misses and could have, and those it cannot have, with the reason.

    Its blocks are all blocks of each submodel it adapts, or only those that its config selects by index.

    Args:
        reading: Reading of the model.
        config: The adapter's config.
        adapted: Full paths of the linear maps and parameters that it adapts.
    """
    target_names = TargetNames(reading)
    matrices = [m for m in reading.matrices_of(homes_of(reading, adapted)) if m.kind == "map" and not m.parameter]
    through = {path for path, place in reading.places.items() if type(place.wrapper).__name__ == "ParamWrapper"}
    names = config.target_modules
    reached = {block for path in adapted if (block := _block(reading, path)) is not None}
    if isinstance(names, str):
        by_index = _picks_layers(reading, adapted, reached)
    else:
        named = [*(names or ()), *(config.target_parameters or ())]
        by_index = config.layers_to_transform in (None, []) and any(map(_indexed, named))
    missing: list[str] = []
    left: dict[tuple[str, str], None] = {}
    for matrix in matrices:
        if matrix.path in adapted or matrix.path in through:
            continue
        if (by_index and matrix.block not in reached) or not _allowed(config, matrix.path):
            continue
        reason = matrix.refusal or _unnameable(target_names, matrix)
        if reason:
            left[starred(matrix.path), reason] = None
        else:
            missing.append(matrix.path)
    return tuple(missing), tuple(left)


def _unnameable(target_names: TargetNames, matrix: Matrix) -> str:
    leaf = matrix.path.rpartition(".")[2]
    if not target_names.is_rewritten(leaf):
        return ""
    return f"PEFT would take the name {leaf} for the routed experts when the adapter is loaded"


def _indexed(name: str) -> bool:
    return re.search(r"(^|\.)\d+(\.|$)", name) is not None


def _picks_layers(reading: Reading, adapted: set[str], reached: set[str]) -> bool:
    """True if an expression matches a map in some blocks, but not the same map in other blocks of the submodel."""
    tails = {path.removeprefix(f"{block}.") for path in adapted if (block := reading.block_of.get(path)) is not None}
    homes = {reading.home(block) for block in reached}
    others = {block for home in homes for block in reading.blocks.get(home, ())} - reached
    return any(f"{block}.{tail}" in reading.sizes for block in others for tail in tails)


def _allowed(config: Any, path: str) -> bool:
    """True if the config's exclusions and layer indices permit a module."""
    from peft.tuners.tuners_utils import check_target_module_exists

    asked = copy.copy(config)
    asked.target_modules = {path.rpartition(".")[2]}
    return bool(check_target_module_exists(asked, path))


def joined(target_names: TargetNames, config: Any, adapted: set[str], missing: Sequence[str]) -> tuple[str, ...] | None:
    """Return target names that match exactly the adapted and the missing maps; None if no list of names does."""
    old = list(config.target_modules or ())
    old = old if isinstance(config.target_modules, list) else sorted(old)
    leaves = list(dict.fromkeys(path.rpartition(".")[2] for path in missing))
    wanted = adapted | set(missing)
    for attempt in ("leaves", "ends", "paths"):
        new = leaves if attempt == "leaves" else list(target_names.suffixes(missing) if attempt == "ends" else missing)
        if attempt == "ends" and not config.layers_to_transform and any(map(_indexed, new)):
            continue  # full paths are clearer than suffixes that begin with a layer's index
        names = tuple(dict.fromkeys([*old, *new]))
        asked = copy.copy(config)
        asked.target_modules = set(names)
        if target_names.matched_by(asked) == wanted:
            return names
    return None


def expanded(reading: Reading, base: Any) -> tuple[Any, tuple[str, ...]]:
    """Return a copy of a config, before injection, that covers the missing maps, and the full paths of these.

    Raises:
        ValueError: The config cannot be expanded; the message says why.
    """
    problem = _why_not_expandable(base)
    if problem:
        raise ValueError(f"base {problem}")
    target_names = TargetNames(reading)
    config = copy.deepcopy(base)
    if config.target_modules is None and not config.target_parameters:
        from peft.tuners.lora import LoraModel

        kind = str(getattr(getattr(reading.frame, "config", None), "model_type", ""))
        default: Any = LoraModel.target_module_mapping.get(kind)
        config.target_modules = set() if default is None else default if isinstance(default, str) else set(default)
    adapted = target_names.matched_by(config)
    if adapted is None:
        raise ValueError(f"PEFT rejects target_modules={base.target_modules!r} for this model")
    seeds = adapted | as_counted(reading, target_names.parameters_matched_by(config))
    if not homes_of(reading, seeds):
        seeds = set(reading.blocks.get(reading.language.path, ()))
    missing, _ = missing_of(reading, config, seeds)
    if not missing:
        return config, ()
    if isinstance(config.target_modules, str):
        wanted = sorted(adapted | set(missing), key=target_names.keys.index)
        names, exclude = target_names.names(wanted)
        config.target_modules = names if isinstance(names, str) else set(names)
        config.exclude_modules = exclude if exclude is not None else config.exclude_modules
        if target_names.matched_by(config) != set(wanted):
            raise ValueError(f"no names match exactly the {len(wanted)} modules wanted")
        return config, missing
    names = joined(target_names, config, adapted, missing)
    if names is None:
        raise ValueError(
            f"no list of names matches exactly its {len(adapted)} modules and the {len(missing)} missing ones"
        )
    config.target_modules = set(names)
    return config, missing


def gaps(survey: Survey, tuner: nn.Module, adapters: str | Sequence[str] = ()) -> tuple[Gap, ...]:
    """Return the linear maps that the adapters of a PEFT model miss, one `Gap` for each adapter.

    Args:
        survey: Survey of the object that holds the tuner.
        tuner: The `LoraModel`.
        adapters: A name, a list of names, or `"all"`; the active ones if empty.

    Raises:
        InputError: `adapters` is none of these, or names an unknown adapter.
    """
    if not isinstance(adapters, str) and not (
        isinstance(adapters, (list, tuple, set)) and all(isinstance(name, str) for name in adapters)  # pyright: ignore[reportUnnecessaryIsInstance]
    ):
        raise InputError(f"adapters={adapters!r}: want the name of an adapter, a list of names, or 'all'")
    there: Any = tuner
    have = list(there.peft_config)
    asked = have if adapters == "all" else [adapters] if isinstance(adapters, str) else list(adapters)
    for name in asked:
        if name not in have:
            raise InputError(f"adapters: there is no adapter {name!r}; want one of {', '.join(have)}")
    names = tuple(asked or there.active_adapters)

    def read() -> tuple[Gap, ...]:
        reading = Reading(tuner)
        return tuple(gap(tuner, name, reading) for name in names)

    return survey.once(("gaps", id(tuner), names), read)


PARALLEL = {
    "DistributedDataParallel": "DDP",
    "FullyShardedDataParallel": "FSDP",
    "FSDPModule": "FSDP",
    "DeepSpeedEngine": "DeepSpeed",
}


def wrapped(survey: Survey) -> tuple[str, str] | None:
    """Return the path and kind of a wrapper that has registered the parameters of its module; None without one."""
    for path, module in survey.modules.items():
        for cls in type(module).__mro__:
            if cls.__name__ in PARALLEL:
                return path, PARALLEL[cls.__name__]
    return None


def why_no_new_parameters(survey: Survey) -> str | None:
    """Return why no parameters can be added to an object now; None if they can."""
    found = wrapped(survey)
    if found is None:
        return None
    path, kind = found
    return (
        f"{path or 'the model'} is wrapped in {kind}, which registered its parameters when it wrapped them, so new "
        f"ones would not be synchronised: expand the adapter first and wrap in {kind} afterwards"
    )


def has_unmanaged_layers(survey: Survey) -> bool:
    """True if an object has LoRA layers outside any PEFT tuner, as transformers' `add_adapter` makes them."""
    managed = list(tuners(survey))
    return any(
        "lora_A" in children(module) and not any(inside(path, top) for top in managed)
        for path, module in survey.modules.items()
    )
