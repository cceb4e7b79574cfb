"""Routed experts, what chooses them, and what only picks positions: parts of a block that LoRA leaves alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import nn

from hfpatch.compat.modules import CONVOLUTIONS, children
from hfpatch.lora.blocks import Layout
from hfpatch.lora.linear import source
from hfpatch.lora.places import ancestors, own_parameters
from hfpatch.model.walk import dims


def experts_of(layout: Layout) -> dict[str, int]:
    """Modules that hold routed experts, with how many: stacked parameters, or a list of alike modules."""
    found: dict[str, int] = {}
    for path in layout.block_of:
        module = layout.places[path].module
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            items = [type(m) for m in module.children() if next(m.parameters(), None) is not None]
            if len(items) > 1 and len(set(items)) == 1 and len(items) in _counts(layout, path):
                found[path] = len(items)
            continue
        if path in layout.sizes or isinstance(module, (CONVOLUTIONS, nn.Embedding)):
            continue
        shapes = [tuple(p.shape) for p in own_parameters(module).values() if dims(p) > 1]
        if not shapes or is_shared(layout, path):
            continue
        named = "expert" in type(module).__name__.lower()
        first = next((shape[0] for shape in shapes if len(shape) == 3 and min(shape[1:]) > 1), 0)
        if first > 1 and (named or first in _counts(layout, path)):
            found[path] = first
        elif named:  # all experts' rows in one matrix
            rows = {shape[0] for shape in shapes if len(shape) == 2}
            fits = [count for count in _counts(layout, path) if rows and all(row % count == 0 for row in rows)]
            if fits:
                found[path] = fits[0]
    return found


def is_shared(layout: Layout, path: str) -> bool:
    """Whether a module holds stacked experts that every token goes through."""
    name = path.rpartition(".")[2]
    if "shared" not in name or "expert" not in name:
        return False
    return any(dims(p) == 3 for p in own_parameters(layout.places[path].module).values())


def _counts(layout: Layout, path: str) -> frozenset[int]:
    """Numbers of experts that the config of a module's home names."""
    home = layout.home(path)
    model = layout.models.get(home)
    if model is None:
        return frozenset()
    known = layout.expert_counts
    if home not in known:
        known[home] = frozenset(_expert_values(vars(model.config.get_text_config())))
    return known[home]


def _expert_values(values: dict[str, Any]) -> Iterator[int]:
    for key, value in values.items():
        if "expert" in key and isinstance(value, int) and value > 1:
            yield value
        elif key.endswith("_config") and hasattr(value, "__dict__"):
            yield from _expert_values(vars(value))


def routers_of(layout: Layout, experts: dict[str, int]) -> frozenset[str]:
    """Modules that choose experts or weigh a shared one, and all in them.

    Those called routers, by their class or their place; and those beside experts, with an output for each, or one
    in all.
    """
    found: set[str] = set()
    for path in layout.block_of:
        said = f"{path.rpartition('.')[2]} {type(layout.places[path].module).__name__}".lower()
        if "router" not in said or any(above in experts for above in ancestors(path)):
            continue
        if not any(below in experts for below in layout.below(path)):
            found.update(layout.below(path))
    for path, count in experts.items():
        holder = path.rpartition(".")[0]
        for name in children(layout.places[holder].module):
            child = f"{holder}.{name}" if holder else name
            if child == path or child not in layout.places:  # not there: one module under two names
                continue
            outs = [out for _, out in layout.matrices_below(child)]
            if outs and (set(outs) <= {count, 1} or (name == "gate" and len(outs) == 1)):
                found.update(layout.below(child))
    return frozenset(found)


@cache
def only_picks(cls: type) -> bool:
    """Whether a class is the indexer of a sparse attention: it picks positions, so no gradient comes back to it."""
    return "Indexer" in cls.__name__ and ".topk(" in source(cls)
