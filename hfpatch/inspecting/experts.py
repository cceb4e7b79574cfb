"""Routed experts, their routers and the shared experts, from the model's structure.

transformers 5 stacks the experts of a layer in three-dimensional parameters; older classes have a list of modules.
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
_PER_TOKEN = re.compile(r"^(num_)?(experts_)?top_?k(_experts)?$|experts_per_tok|num_selected_experts|^moe_(k|top_?k)$")
_ROUTER = re.compile(r"gate|router|classifier|switch")
_SHARED = re.compile(r"shared")


@dataclass(frozen=True)
class Experts:
    """The routed experts at one place in every layer that has them.

    `path` has indices of layers replaced by `*`. `count` is the number of experts in one layer, `per_token` the number
    that process each token (None if neither module nor config has it), `layers` the number of layers with experts.
    `form` is `stacked parameters`, with their names in `parameters`, or `list of modules`. `router` is the path of the
    router (None if it was not found), `shared` that of the shared experts (None if there are none).
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
    """Return the routed experts of an object, in module order. Changes nothing."""
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
        router, shared = _router_and_shared(survey, path, frozenset(outputs))
        names = () if listed else tuple(stacks)
        one = Experts(
            path=starred(path),
            cls=type(next(iter(module.children())) if listed else module).__name__,
            form=LISTED if listed else STACKED,
            count=count,
            per_token=_experts_per_token(survey, path, router, home.model.config),
            parameters=names,
            router=None if router is None else starred(router),
            router_cls=None if router is None else type(survey.modules[router]).__name__,
            shared=None if shared is None else starred(shared),
            layers=1,
        )
        found[one] = found.get(one, 0) + 1
    return tuple(replace(one, layers=layers) for one, layers in found.items())


def _counts(config: Any) -> Iterator[int]:
    """Yield the numbers of experts in a config and its sub-configs."""
    for key, value in vars(config).items():
        if hasattr(value, "model_type"):
            yield from _counts(value)
        elif _COUNT.search(key) and "per_tok" not in key:
            numbers = value if isinstance(value, (list, tuple)) else [value]
            yield from (n for n in numbers if isinstance(n, int) and n > 1)


def _listed(module: nn.Module, counts: frozenset[int]) -> int | None:
    """Return the number of experts in a list; None if its items are not experts."""
    children = [c for c in module.children() if next(c.parameters(), None) is not None]
    if len(children) < 2:
        return None
    alike = len({type(child) for child in children}) == 1
    expert = "expert" in type(module).__name__.lower() or "expert" in type(children[0]).__name__.lower()
    maps = any(dims(p) > 1 for p in children[0].parameters())
    return len(children) if alike and maps and (expert or len(children) in counts) and not _is_stack(children) else None


def _is_stack(children: list[nn.Module]) -> bool:
    """True if modules are layers, not experts: the first holds a norm or a list."""
    return any("Norm" in type(m).__name__ or isinstance(m, nn.ModuleList) for m in children[0].modules())


def _stacked(module: nn.Module, stacks: dict[str, nn.Parameter], counts: frozenset[int]) -> int | None:
    """Return the number of experts stacked in a module's own parameters; None if it has none."""
    if isinstance(module, (CONVOLUTIONS, nn.Linear, nn.Embedding)):
        return None
    named = "expert" in type(module).__name__.lower()
    deep = [int(p.shape[0]) for p in stacks.values() if dims(p) == 3 and min(p.shape) > 1]
    if found := [n for n in deep if n in counts] or [n for n in deep if named]:
        return min(found)  # some stack identity experts together with the computing ones
    if named and not any(True for _ in module.children()):  # dbrx: one matrix with the rows of all experts
        return next((c for c in counts if all(p.shape[0] % c == 0 for p in stacks.values())), None)
    return None


def _router_and_shared(survey: Survey, path: str, outputs: frozenset[int]) -> tuple[str | None, str | None]:
    """Return the paths of the router and of the shared experts beside the routed ones, or one level above."""
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
            found = [n for n, m in own.items() if _is_router(m, outputs)]
            found.sort(key=lambda n: _ROUTER.search(f"{n} {type(own[n]).__name__}".lower()) is None)
            found += [n for n, m in own.items() if "Router" in type(m).__name__]  # its output may have another size
            router = f"{place}.{found[0]}" if found else None
        if shared is None:
            hits = (n for n, m in beside.items() if _SHARED.search(n) and "gate" not in n and _has_matrix(m))
            shared = next((f"{place}.{n}" for n in hits), None)
    return router, shared


def _is_router(module: nn.Module, outputs: frozenset[int]) -> bool:
    """True if a module's last matrix has one row or column for each expert."""
    maps = [p for p in module.parameters() if dims(p) == 2]
    return (
        bool(maps) and bool(outputs.intersection(maps[-1].shape)) and not _SHARED.search(type(module).__name__.lower())
    )


def _has_matrix(module: nn.Module) -> bool:
    return any(dims(p) > 1 for p in module.parameters())


def _experts_per_token(survey: Survey, path: str, router: str | None, config: Any) -> int | None:
    """Return the number of experts per token, from the router, the modules around it or the config; None if unknown."""
    near = [survey.modules[p] for p in (router, path.rpartition(".")[0], path) if p is not None]
    for holder in (*near, *_parts(config)):
        for key, value in vars(holder).items():
            if _PER_TOKEN.search(key) and isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if hasattr(value, "model_type"):
            yield from _parts(value)
