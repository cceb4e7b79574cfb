"""What a LoRA adapter misses of the blocks it lives in, and the names that would reach it. Reads only."""

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
from hfpatch.lora.names import Namer
from hfpatch.lora.targets import Coverage, coverage_of
from hfpatch.model.survey import Survey
from hfpatch.model.walk import inside, starred
from hfpatch.model.wrapping import is_tuner

KEEPS_BASE = frozenset({"gaussian", "eva", "orthogonal"})
"""Initialisations by name, beside the default, that leave the base weights alone when made and when loaded."""

UNPROVED = (
    "kasa_config", "arrow_config", "use_bdlora", "layer_replication", "use_qalora", "monteclora_config",
    "velora_config", "megatron_config", "alora_invocation_tokens",
)  # fmt: skip
"""Fields of a `LoraConfig` that make another adapter than LoRA or DoRA."""


@dataclass(frozen=True)
class Gap:
    """What one adapter misses.

    Attributes:
        adapter: Its name.
        missing: Whole paths (in the tuner's model) of the linear maps it could adapt and does not.
        names: Its target names with those of the missing maps; a set where it had a set.
        before: What it covers of the blocks it lives in.
        after: What it would cover.
        left_out: Linear maps that stay without: path and reason.
        problem: Why it cannot be expanded, in a sentence; empty where it can.
    """

    adapter: str
    missing: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    before: Coverage | None = None
    after: Coverage | None = None
    left_out: tuple[tuple[str, str], ...] = ()
    problem: str = ""

    @property
    def stays(self) -> str:
        """The first kind of map that stays without, for the end of a sentence; empty where none does."""
        if not self.left_out:
            return ""
        path, reason = self.left_out[0]
        more = f" and {len(self.left_out) - 1} more kinds" if len(self.left_out) > 1 else ""
        return f"; without {path} ({reason}){more}"


def tuners(survey: Survey) -> dict[str, nn.Module]:
    """PEFT's managers of adapters in an object, by path."""
    return {path: module for path, module in survey.modules.items() if is_tuner(type(module))}


def gap(tuner: Any, adapter: str, reading: Reading) -> Gap:
    """What an adapter of a PEFT model misses.

    Args:
        tuner: The `LoraModel`.
        adapter: Name of the adapter.
        reading: Of the tuner's model.
    """
    config = tuner.peft_config[adapter]
    problem = _unfit(config) or _merged(reading)
    if problem:
        return Gap(adapter, problem=f"adapter {adapter!r} {problem}")
    if isinstance(config.target_modules, str):
        return Gap(
            adapter,
            problem=f"adapter {adapter!r} has the expression target_modules={config.target_modules!r}, which cannot "
            "be joined with names once weights were trained under it; expand the config before injection with "
            "hfpatch.lora_config(model, base=config)",
        )
    adapted = adapted_by(reading, adapter)
    reached = adapted | _parameters_of(reading, adapter)
    missing, left_out = missing_of(reading, config, reached)
    matrices = reading.matrices_of(homes_of(reading, reached))
    before = coverage_of(reading, matrices, reached)
    if not missing:
        return Gap(adapter, before=before, after=before, left_out=left_out)
    names = joined(Namer(reading), config, {p for p in adapted if p}, missing)
    if names is None:
        return Gap(
            adapter,
            problem=f"adapter {adapter!r}: no list of names matches its {len(adapted)} modules and the "
            f"{len(missing)} missing ones exactly (first missing: {missing[0]})",
        )
    after = coverage_of(reading, matrices, reached | set(missing))
    return Gap(adapter, missing, names, before, after, left_out)


def _unfit(config: Any) -> str:
    """Why a config is none that can be expanded; empty where it is."""
    kind = getattr(config.peft_type, "value", str(config.peft_type))
    if kind != "LORA":
        return f"is of type {kind}; only LoRA adapters are expanded"
    init = config.init_lora_weights
    if isinstance(init, str) and init not in KEEPS_BASE:
        return (
            f"has init_lora_weights={init!r}, which takes the adapter out of the base weights when it is made and "
            "again when it is loaded, so modules added later would change the base: make a new adapter with "
            "hfpatch.lora_config instead"
        )
    odd = [name for name in UNPROVED if getattr(config, name, None)]
    return f"uses {', '.join(odd)}, with which an expansion was never proved" if odd else ""


def _merged(reading: Reading) -> str:
    at = next((p for p, place in reading.places.items() if getattr(place.wrapper, "merged", False)), None)
    return "" if at is None else f"is merged into the base weights (at {at}): call unmerge_adapter() first"


def adapted_by(reading: Reading, adapter: str) -> set[str]:
    """Modules that carry an adapter as a layer of their own (not through a parameter)."""
    found: set[str] = set()
    for path, place in reading.places.items():
        layer: Any = place.wrapper
        if layer is None or type(layer).__name__ == "ParamWrapper":
            continue
        if any(adapter in getattr(layer, name, ()) for name in ("lora_A", "lora_embedding_A")):
            found.add(path)
    return found


def _parameters_of(reading: Reading, adapter: str) -> set[str]:
    """Whole paths of the parameters an adapter adapts through PEFT's (nested) wrappers; of linear maps the map's."""
    found: set[str] = set()
    for path, place in reading.places.items():
        layer: Any = place.wrapper
        while layer is not None and type(layer).__name__ == "ParamWrapper":
            if adapter in layer.lora_A:
                found.add(path if path in reading.sizes else f"{path}.{layer.parameter_name}")
            layer = layer.base_layer
    return found


def adapted_through(reading: Reading, parameters: Iterable[str]) -> set[str]:
    """Parameters as coverage counts them: the weight of a linear map is the map."""
    return {holder if (holder := path.rpartition(".")[0]) in reading.sizes else path for path in parameters}


def _block(reading: Reading, path: str) -> str | None:
    """The block a module, or a parameter of one, lies in."""
    return reading.block_of.get(path) or reading.block_of.get(path.rpartition(".")[0])


def homes_of(reading: Reading, adapted: Iterable[str]) -> frozenset[str]:
    """Paths of the submodels in whose blocks these modules and parameters lie."""
    return frozenset(reading.home(block) for path in adapted if (block := _block(reading, path)) is not None)


def missing_of(reading: Reading, config: Any, adapted: set[str]) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Linear maps that an adapter could have in the blocks it lives in, and those it cannot, with the reason.

    Its blocks are all of each submodel it reaches; only those its config names by index, where it does.

    Args:
        reading: Of the model.
        config: The adapter's.
        adapted: Whole paths of the linear maps and parameters it has.
    """
    namer = Namer(reading)
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
        reason = matrix.refusal or _unnameable(namer, matrix)
        if reason:
            left[starred(matrix.path), reason] = None
        else:
            missing.append(matrix.path)
    return tuple(missing), tuple(left)


def _unnameable(namer: Namer, matrix: Matrix) -> str:
    leaf = matrix.path.rpartition(".")[2]
    if not namer.taken(leaf):
        return ""
    return f"PEFT would read the name {leaf} as the routed experts when the adapter is loaded"


def _indexed(name: str) -> bool:
    return re.search(r"(^|\.)\d+(\.|$)", name) is not None


def _picks_layers(reading: Reading, adapted: set[str], reached: set[str]) -> bool:
    """Whether an expression matched a map in some blocks and passed by the same map in other blocks of the submodel."""
    tails = {path.removeprefix(f"{block}.") for path in adapted if (block := reading.block_of.get(path)) is not None}
    homes = {reading.home(block) for block in reached}
    others = {block for home in homes for block in reading.blocks.get(home, ())} - reached
    return any(f"{block}.{tail}" in reading.sizes for block in others for tail in tails)


def _allowed(config: Any, path: str) -> bool:
    """Whether the config's own exclusions and layer indices leave a module to it."""
    from peft.tuners.tuners_utils import check_target_module_exists

    asked = copy.copy(config)
    asked.target_modules = {path.rpartition(".")[2]}
    return bool(check_target_module_exists(asked, path))


def joined(namer: Namer, config: Any, adapted: set[str], missing: Sequence[str]) -> tuple[str, ...] | None:
    """The config's names with those of the missing maps, matching both and nothing else; None where no list does."""
    old = list(config.target_modules or ())
    old = old if isinstance(config.target_modules, list) else sorted(old)
    leaves = list(dict.fromkeys(path.rpartition(".")[2] for path in missing))
    wanted = adapted | set(missing)
    for attempt in ("leaves", "ends", "paths"):
        new = leaves if attempt == "leaves" else list(namer.suffixes(missing) if attempt == "ends" else missing)
        if attempt == "ends" and not config.layers_to_transform and any(map(_indexed, new)):
            continue  # whole paths are clearer than ends that begin with a layer's index
        names = tuple(dict.fromkeys([*old, *new]))
        asked = copy.copy(config)
        asked.target_modules = set(names)
        if namer.matched_by(asked) == wanted:
            return names
    return None


def expanded(reading: Reading, base: Any) -> tuple[Any, tuple[str, ...]]:
    """A copy of a config, before injection, that reaches what it misses; and the whole paths of what was added.

    Raises:
        ValueError: In a sentence: it cannot be expanded.
    """
    problem = _unfit(base)
    if problem:
        raise ValueError(f"base {problem}")
    namer = Namer(reading)
    config = copy.deepcopy(base)
    if config.target_modules is None and not config.target_parameters:
        from peft.tuners.lora import LoraModel

        kind = str(getattr(getattr(reading.frame, "config", None), "model_type", ""))
        default: Any = LoraModel.target_module_mapping.get(kind)
        config.target_modules = set() if default is None else default if isinstance(default, str) else set(default)
    adapted = namer.matched_by(config)
    if adapted is None:
        raise ValueError(f"PEFT itself refuses target_modules={base.target_modules!r} for this model")
    seeds = adapted | adapted_through(reading, namer.parameters_by(config))
    if not homes_of(reading, seeds):
        seeds = set(reading.blocks.get(reading.language.path, ()))
    missing, _ = missing_of(reading, config, seeds)
    if not missing:
        return config, ()
    if isinstance(config.target_modules, str):
        wanted = sorted(adapted | set(missing), key=namer.keys.index)
        names, exclude = namer.names(wanted)
        config.target_modules = names if isinstance(names, str) else set(names)
        config.exclude_modules = exclude if exclude is not None else config.exclude_modules
        if namer.matched_by(config) != set(wanted):
            raise ValueError(f"no names match the {len(wanted)} modules wanted exactly")
        return config, missing
    names = joined(namer, config, adapted, missing)
    if names is None:
        raise ValueError(
            f"no list of names matches its {len(adapted)} modules and the {len(missing)} missing ones exactly"
        )
    config.target_modules = set(names)
    return config, missing


def gaps(survey: Survey, tuner: nn.Module, adapters: str | Sequence[str] = ()) -> tuple[Gap, ...]:
    """What the adapters of a PEFT model miss.

    Args:
        survey: Of the object that holds it.
        tuner: The `LoraModel`.
        adapters: Names, or `"all"`; the active ones if none is given.

    Raises:
        InputError: No adapter of that name.
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
            raise InputError(f"adapters: no adapter {name!r}; the model has {', '.join(have)}")
    names = tuple(asked or there.active_adapters)

    def read() -> tuple[Gap, ...]:
        reading = Reading(tuner)
        return tuple(gap(tuner, name, reading) for name in names)

    return survey.once(("gaps", id(tuner), names), read)


SHARDED = {
    "DistributedDataParallel": "DDP",
    "FullyShardedDataParallel": "FSDP",
    "FSDPModule": "FSDP",
    "DeepSpeedEngine": "DeepSpeed",
}


def wrapped(survey: Survey) -> tuple[str, str] | None:
    """Path and kind of a wrapper that noted the parameters of what it holds; None where there is none."""
    for path, module in survey.modules.items():
        for cls in type(module).__mro__:
            if cls.__name__ in SHARDED:
                return path, SHARDED[cls.__name__]
    return None


def cannot_grow(survey: Survey) -> str | None:
    """Why an object takes no new parameters now; None where it does."""
    found = wrapped(survey)
    if found is None:
        return None
    path, kind = found
    return (
        f"{path or 'the model'} is wrapped in {kind}, which fixed its parameters then, so new ones would "
        f"not be synchronised: expand the adapter first and wrap in {kind} afterwards"
    )


def unmanaged(survey: Survey) -> bool:
    """Whether there are LoRA layers that no `LoraModel` manages: those of transformers' `add_adapter`."""
    managed = list(tuners(survey))
    return any(
        "lora_A" in children(module) and not any(inside(path, top) for top in managed)
        for path, module in survey.modules.items()
    )
