"""Checks of the names of modules that a config trains in full, leaves out or adapts, by what PEFT makes of them."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hfpatch.errors import InputError
from hfpatch.lora.matrices import Reading
from hfpatch.lora.names import TargetNames
from hfpatch.model.walk import starred

if TYPE_CHECKING:
    from peft import LoraConfig

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
SHOWN = 4
"""Number of candidates that a message names."""

RULE = "PEFT matches modules_to_save by the end of a path"


def saved(reading: Reading, config: LoraConfig, adapted: Iterable[str]) -> tuple[str, ...]:
    """Return the paths of the modules that a config's `modules_to_save` trains in full.

    PEFT itself is asked, on modules without weights that have the names of the model's.

    Args:
        reading: Of the model.
        config: The config.
        adapted: Paths of the modules and parameters that it adapts.

    Raises:
        InputError: A name fits no module, several kinds of modules, a module with a longer name, or one that PEFT
            cannot train in full: a container, or a part of PEFT's own.
    """
    names: Any = config.modules_to_save
    if not names:
        return ()
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
        raise InputError(f"modules_to_save={names!r}: want a list of names of modules")
    adapted = list(adapted)
    return tuple(path for name in names for path in _one(reading, name, adapted))


def _one(reading: Reading, name: str, adapted: Sequence[str]) -> list[str]:
    asked = f"modules_to_save=[{name!r}]"
    named = [path for path in reading.places if path and f".{path}".endswith(f".{name}")]
    found = _wrapped(reading, name, adapted)
    if isinstance(found, str):
        raise InputError(f"{asked}: {RULE}, and refuses what it finds: {found}{_instead(reading, named, adapted)}")
    if not found:
        near = difflib.get_close_matches(name, dict.fromkeys(p.rpartition(".")[2] for p in reading.places), SHOWN, 0.5)
        raise InputError(f"{asked}: no module has this name; {_candidates('near it', near)}")
    beside = [path for path in found if path not in named]
    if beside or len({starred(path) for path in found}) > 1:
        every = list(dict.fromkeys(starred(path) for path in (*named, *beside)))
        raise InputError(
            f"{asked}: {RULE}, so {len(found)} modules would be trained in full: {_listed(every)}"
            f"{_instead(reading, named, adapted)}"
        )
    return found


def _instead(reading: Reading, named: Sequence[str], adapted: Sequence[str]) -> str:
    """Return longer names that PEFT takes for one module each, as a clause; PEFT's own paths begin with `model.`."""
    longer = ((f"{start}{path}", path) for path in named[: 2 * SHOWN] for start in ("", "model."))
    good = [name for name, path in longer if _wrapped(reading, name, adapted) == [path]]
    if good:
        return f"; name one by more of its path: {_listed(good)}"
    return "; no longer name fits one of them alone: rename the module" if named else ""


def _wrapped(reading: Reading, name: str, adapted: Sequence[str]) -> list[str] | str:
    """Return the paths of the modules that PEFT would train in full for a name; its error if it raises."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    outer = {path for path in adapted if path in reading.places}
    outer |= {holder for path in adapted if path not in outer and (holder := path.rpartition(".")[0])}
    root = _skeleton(reading, outer)
    outside = sorted(outer) or None
    config = LoraConfig(r=1, target_modules=outside, modules_to_save=[name])
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model: Any = get_peft_model(root, config)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, AttributeError) as error:
        return str(error).partition(". ")[0]
    found: list[str] = []
    for path, module in model.base_model.model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            if any(isinstance(inner, BaseTunerLayer) for inner in module.modules()):
                return f"{path} has adapters inside"
            found.append(path)
    return [path for path in found if not any(path.startswith(f"{other}.") for other in found)]


def _skeleton(reading: Reading, maps: set[str]) -> nn.Module:
    """Return modules with the names of the model's, and linear maps of size 1 at some paths."""
    root = nn.Module()
    made: dict[str, nn.Module] = {"": root}
    for path, place in reading.places.items():
        if path:
            parent, _, name = path.rpartition(".")
            container = next((cls for cls in CONTAINERS if isinstance(place.module, cls)), nn.Module)
            with torch.random.fork_rng(devices=[]):
                made[path] = nn.Linear(1, 1) if path in maps else container()
            made[parent].add_module(name, made[path])
    return root


def unknown(reading: Reading, base: LoraConfig) -> list[str]:
    """Return the names in a config's `target_modules` that fit no module: names of other architectures are common.

    Raises:
        InputError: A name in `exclude_modules`, or the expression there, fits no module.
    """
    names = TargetNames(reading)
    excluded, targets = base.exclude_modules, base.target_modules
    for name in [excluded] if isinstance(excluded, str) else sorted(excluded or ()):
        if name and not _fits(names, name, pattern=isinstance(excluded, str)):
            leaves = dict.fromkeys(key.rpartition(".")[2] for key in names.keys)
            near = difflib.get_close_matches(name.rpartition(".")[2], leaves, SHOWN, 0.5)
            raise InputError(
                f"base=: exclude_modules={excluded!r} would leave {name!r} out, which fits no module; "
                f"{_candidates('there are', near or list(leaves))}"
            )
    return [] if isinstance(targets, str) else [n for n in sorted(targets or ()) if not _fits(names, n, pattern=False)]


def _fits(names: TargetNames, name: str, *, pattern: bool) -> bool:
    from peft import LoraConfig

    if not pattern and (names.is_rewritten(name) or names.matched([name])):
        return True
    return bool(names.matched_by(LoraConfig(target_modules=name if pattern else [name])))


def _candidates(what: str, found: Sequence[str]) -> str:
    return f"{what}: {_listed(found)}" if found else "no name is near it"


def _listed(found: Sequence[str]) -> str:
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"{', '.join(found[:SHOWN])}{more}"
