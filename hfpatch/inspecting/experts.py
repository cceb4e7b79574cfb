"""Routed experts, what chooses among them, and the experts every token goes through: told from structure.

transformers 5 stacks the experts of a layer in three-dimensional parameters; older classes keep a list of modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hfpatch.compat.modules import CONVOLUTIONS, parameters
from hfpatch.model.survey import Survey
from hfpatch.model.walk import dims, starred

STACKED, LISTED = "stacked parameters", "list of modules"

_COUNT = re.compile(r"experts(_for_\w+)?$|^moe_num_experts$")
_CHOSEN = re.compile(r"^(num_)?(experts_)?top_?k(_experts)?$|experts_per_tok|num_selected_experts|^moe_(k|top_?k)$")
_ROUTER = re.compile(r"gate|router|classifier|switch")
_SHARED = re.compile(r"shared")


@dataclass(frozen=True)
class Experts:
    """The routed experts at one place in every layer that has them.

    `path` has indices of layers replaced by `*`. `count` is the experts of one layer, `per_token` how many of them a
    token goes through (None where neither module nor config says), `layers` how many layers have them. `form` is
    `stacked parameters`, whose names `parameters` gives, or `list of modules`. `router` is the path of the module
    that chooses (None where it was not found), `shared` of the experts that every token goes through.
    """

    path: str
    cls: str
    form: str
    count: int
    per_token: int | None
    parameters: tuple[str, ...]
    router: str | None
    router_cls: str | None
    shared: str | None
    layers: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON: path, class, form, count, per_token, parameters, router, router_class, shared, layers."""
        names = {"cls": "class", "router_cls": "router_class"}
        return {names.get(k, k): list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}


def experts(survey: Survey) -> tuple[Experts, ...]:
    """Routed experts of an object, in module order. Reads only."""
    found: dict[Experts, int] = {}
    counts: dict[str, frozenset[int]] = {}
    taken = "\n"  # in no path
    for path, module in survey.modules.items():
        if path.startswith(taken):
            continue
        if _SHARED.search(path.rpartition(".")[2]):
            continue
        stacks = {n: p for n, p in parameters(module).items() if p is not None and dims(p) >= 2}
        listed = isinstance(module, (nn.ModuleList, nn.ModuleDict)) and len(module) > 1
        if not listed and not stacks:
            continue
        home = survey.holder(path)
        if home is None:
            continue
        if home.path not in counts:
            counts[home.path] = frozenset(_counts(home.model.config))
        count = _listed(module, counts[home.path]) if listed else _stacked(module, stacks, counts[home.path])
        if count is None:
            continue
        taken = f"{path}."
        outputs = {count, *(count + n for n in counts[home.path]), *(int(p.shape[0]) for p in stacks.values())}
        router, shared = _around(survey, path, frozenset(outputs))
        names = () if listed else tuple(stacks)
        one = Experts(
            path=starred(path),
            cls=type(next(iter(module.children())) if listed else module).__name__,
            form=LISTED if listed else STACKED,
            count=count,
            per_token=_chosen(survey, path, router, home.model.config),
            parameters=names,
            router=None if router is None else starred(router),
            router_cls=None if router is None else type(survey.modules[router]).__name__,
            shared=None if shared is None else starred(shared),
            layers=1,
        )
        found[one] = found.get(one, 0) + 1
    return tuple(replace(one, layers=layers) for one, layers in found.items())


def _counts(config: Any) -> Iterator[int]:
    """Numbers of experts that a config, or a part of it, gives."""
    for key, value in vars(config).items():
        if hasattr(value, "model_type"):
            yield from _counts(value)
        elif _COUNT.search(key) and "per_tok" not in key:
            numbers = value if isinstance(value, (list, tuple)) else [value]
            yield from (n for n in numbers if isinstance(n, int) and n > 1)


def _listed(module: nn.Module, counts: frozenset[int]) -> int | None:
    """How many experts a list holds; None where it holds something else."""
    children = [c for c in module.children() if next(c.parameters(), None) is not None]
    if len(children) < 2:
        return None
    alike = len({type(child) for child in children}) == 1
    expert = "expert" in type(module).__name__.lower() or "expert" in type(children[0]).__name__.lower()
    maps = any(dims(p) > 1 for p in children[0].parameters())
    return len(children) if alike and maps and (expert or len(children) in counts) and not _is_stack(children) else None


def _is_stack(children: list[nn.Module]) -> bool:
    """Whether modules are layers rather than experts: an expert holds no norm and no list of its own."""
    return any("Norm" in type(m).__name__ or isinstance(m, nn.ModuleList) for m in children[0].modules())


def _stacked(module: nn.Module, stacks: dict[str, nn.Parameter], counts: frozenset[int]) -> int | None:
    """How many experts are stacked in a module's own parameters; None where there are none."""
    if isinstance(module, (CONVOLUTIONS, nn.Linear, nn.Embedding)):
        return None
    named = "expert" in type(module).__name__.lower()
    deep = [int(p.shape[0]) for p in stacks.values() if dims(p) == 3 and min(p.shape) > 1]
    if found := [n for n in deep if n in counts] or [n for n in deep if named]:
        return min(found)  # some stack experts that pass a token through with those that compute
    if named and not any(True for _ in module.children()):  # dbrx: rows of all experts in one matrix
        return next((c for c in counts if all(p.shape[0] % c == 0 for p in stacks.values())), None)
    return None


def _around(survey: Survey, path: str, outputs: frozenset[int]) -> tuple[str | None, str | None]:
    """Paths of the router and of the shared experts beside routed ones, or beside the module that holds these."""
    router = shared = None
    place = path
    for _ in range(2):
        inner, place = place, place.rpartition(".")[0]
        holder = survey.modules[place]
        if isinstance(holder, (nn.ModuleList, nn.ModuleDict)):
            break
        beside = {n: m for n, m in holder.named_children() if f"{place}.{n}" != inner}
        if router is None:
            own = {n: m for n, m in beside.items() if not _SHARED.search(n)}
            found = [n for n, m in own.items() if _routes(m, outputs)]
            found.sort(key=lambda n: _ROUTER.search(f"{n} {type(own[n]).__name__}".lower()) is None)
            found += [n for n, m in own.items() if "Router" in type(m).__name__]  # one that may choose no expert
            router = f"{place}.{found[0]}" if found else None
        if shared is None:
            hits = (n for n, m in beside.items() if _SHARED.search(n) and "gate" not in n and _maps(m))
            shared = next((f"{place}.{n}" for n in hits), None)
    return router, shared


def _routes(module: nn.Module, outputs: frozenset[int]) -> bool:
    """Whether a module ends in a map to one number for each expert."""
    maps = [p for p in module.parameters() if dims(p) == 2]
    return (
        bool(maps) and bool(outputs.intersection(maps[-1].shape)) and not _SHARED.search(type(module).__name__.lower())
    )


def _maps(module: nn.Module) -> bool:
    return any(dims(p) > 1 for p in module.parameters())


def _chosen(survey: Survey, path: str, router: str | None, config: Any) -> int | None:
    """Experts a token goes through, as the router, the module around both, the experts or the config say."""
    near = [survey.modules[p] for p in (router, path.rpartition(".")[0], path) if p is not None]
    for holder in (*near, *_parts(config)):
        for key, value in vars(holder).items():
            if _CHOSEN.search(key) and isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if hasattr(value, "model_type"):
            yield from _parts(value)
