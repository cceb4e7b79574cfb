"""Modules that were not created by transformers' own code."""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hfpatch.compat.implementation import choose, chosen
from hfpatch.errors import InputError
from hfpatch.given import shown
from hfpatch.model.roles import stock_path
from hfpatch.model.source import REJECTIONS
from hfpatch.model.walk import ADAPTERS, TOOL_PACKAGES, Submodel, Walk, inside, stock_class, without_copy
from hfpatch.model.wrapping import plain

Shape = frozenset[tuple[str, str]]
"""(path with list indices replaced by N, class name) of each module: a model's structure without its depth."""


def added_modules(walk: Walk, homes: Mapping[str, str]) -> dict[str, nn.Module]:
    """Return every added module by path: outside all submodels, in a user's subclass, or inserted into a stock model.

    The nearest transformers class is built from the config on meta and compared; modules that the caller named are
    included. Adapters and wrappers of tool packages (peft, accelerate) are not added modules.

    Args:
        walk: Walk over the object that the caller passed.
        homes: Paths of the layers inside users' modules -> their paths in the stock model.

    Raises:
        InputError: An item of `added_modules=` is not a path or module, or is not part of the model.
    """
    added: dict[str, nn.Module] = {}
    for submodel in walk.outermost_built:
        added.update(_differing(walk, submodel, homes))
    built = [submodel.path for submodel in walk.outermost_built]
    for path, module in walk.modules.items():
        if path and not any(inside(path, outer) for outer in built) and _counts(module):
            added[path] = module
    for path in named_by_caller(walk):
        added.update(walk.below(path))
    return added


def named_by_caller(walk: Walk) -> Iterable[str]:
    """Yield the paths of the modules that `added_modules=` names.

    Raises:
        InputError: An item is not a path or module, matches no path, or is not part of the model.
    """
    wanted: Any = walk.named_by_caller
    if wanted is not None and not isinstance(wanted, (str, nn.Module, list, tuple, set)):
        raise InputError(f"added_modules: want paths or modules, got {type(wanted).__name__}")
    for item in [] if wanted is None else [wanted] if isinstance(wanted, (str, nn.Module)) else wanted:
        if isinstance(item, nn.Module):
            if id(item) not in walk.paths:
                raise InputError(f"added_modules: a {type(item).__name__} that is not part of this model")
            yield walk.path(item)
        else:
            hits = [p for p in walk.modules if p and isinstance(item, str) and fnmatch.fnmatchcase(p, item)]
            if not hits:
                raise InputError(f"added_modules: no module path matches {shown(item)}")
            yield from hits


def _counts(module: nn.Module) -> bool:
    """True if a module outside all submodels counts as added: a torch layer or a user's class, no wrapper."""
    home = type(module).__module__
    is_layer = home.startswith("torch.nn.modules.") and not isinstance(
        module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    )
    return is_layer or not f"{home}.".startswith((*TOOL_PACKAGES, "transformers."))


def _differing(walk: Walk, submodel: Submodel, homes: Mapping[str, str]) -> Iterable[tuple[str, nn.Module]]:
    cls = stock_class(submodel.model)
    if cls is None:
        return
    live = _live(walk, submodel, homes)
    kinds = {key for key, _, _ in live}
    shallow = reference(cls, submodel.model.config, shallow=True)
    if shallow is not None and kinds <= shallow:
        return
    full = reference(cls, submodel.model.config, shallow=False)
    if full is None:  # its class rejects the config: only modules that the caller names count as added
        return
    yield from ((path, module) for key, path, module in live if key not in full)


def _live(walk: Walk, submodel: Submodel, homes: Mapping[str, str]) -> list[tuple[tuple[str, str], str, nn.Module]]:
    """Return (key in a reference build, path, module) of the submodel's modules, without adapters and their contents.

    PEFT's copies in `modules_to_save` run in place of the original module, and have its key.
    """
    out: list[tuple[tuple[str, str], str, nn.Module]] = []
    start = len(submodel.path) + 1 if submodel.path else 0
    skip = "\n"  # in no path
    for path, module in walk.below(submodel.path):
        if path.startswith(skip) and not path.startswith(f"{skip}modules_to_save."):
            continue
        if type(module).__module__.startswith(ADAPTERS):
            skip = f"{path}."
            continue
        relative = stock_path(path, homes)[start:]
        if "modules_to_save" in relative:
            relative = without_copy(relative)
        out.append(((_generic(plain(relative)), _class_name(module)), path, module))
    return out


def _class_name(module: nn.Module) -> str:
    # The submodel's class may be a user's subclass, and its linear layers may be quantised.
    if isinstance(module, PreTrainedModel):
        return "PreTrainedModel"
    return "Linear" if isinstance(module, nn.Linear) else type(module).__name__.removeprefix("FSDP")


def _generic(path: str) -> str:
    return ".".join("N" if name.isdigit() else name for name in path.split("."))


def reference(cls: type[PreTrainedModel], config: PreTrainedConfig, *, shallow: bool) -> Shape | None:
    """Return the structure of a class built from a config on meta; `shallow` reduces the number of layers first.

    None if the class rejects the config.

    Memory and time: no weights; 20-200 ms for a deep model in full, a few ms if shallow. Cached.
    """
    return _built(cls, config.to_json_string(use_diff=False), _Config(config), shallow)


class _Config:
    """Carries a config past a cache keyed by its JSON."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config = config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Config)

    def __hash__(self) -> int:
        return 0


@lru_cache(maxsize=64)
def _built(cls: type[PreTrainedModel], _key: str, carried: _Config, shallow: bool) -> Shape | None:
    live = chosen(carried.config)
    for attention in dict.fromkeys((live if live in ("eager", "sdpa") else "eager", "eager")):
        config = copy.deepcopy(carried.config)
        choose(config, attention)
        try:
            if shallow:
                cut_layers(config)
            with torch.device("meta"), torch.random.fork_rng(devices=[]):  # some classes still draw on the CPU
                built = cls(config)
        except (*REJECTIONS, NotImplementedError):
            continue
        return frozenset((_generic(p), _class_name(m)) for p, m in built.named_modules())
    return None


def cut_layers(config: PreTrainedConfig) -> None:
    """Reduce the layers of a deep config and its sub-configs, in place, to the fewest with each kind of layer."""
    _cut(config)
    for key in config.sub_configs:
        if isinstance(part := getattr(config, key, None), PreTrainedConfig):
            cut_layers(part)


def _cut(config: Any) -> None:
    depth = getattr(config, "num_hidden_layers", None)
    if not isinstance(depth, int) or depth <= 8:
        return
    kinds = getattr(config, "layer_types", None)
    keep = max((list(kinds).index(k) + 1 for k in set(kinds)), default=2) if kinds else 2
    keep = max(keep, int(getattr(config, "first_k_dense_replace", 0) or 0) + 1, 2)
    config.num_hidden_layers = min(depth, keep)
    if kinds:
        config.layer_types = list(kinds)[: config.num_hidden_layers]
