"""New parameters of adapters in an optimizer that exists already: each joins the group of its siblings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from hfpatch.compat.modules import children
from hfpatch.compat.optimizers import parameters_by_id
from hfpatch.errors import InputError

FIXED = (torch.optim.LBFGS, torch.optim.Adagrad)
"""Optimizers that fix their state, or its size, when they are created or at their first step."""

Kind = tuple[str, str, str]
"""Of an adapter's parameter: its table (`lora_A`), the adapter, and `weight` or `bias`."""

BASE_BIAS: Kind = ("base_layer", "", "bias")

Row = tuple[nn.Parameter, str]


@dataclass(frozen=True)
class Joining:
    """A parameter that joins a group.

    Attributes:
        name: Its name in the model.
        parameter: The parameter.
        half: Its table, such as `lora_A`.
        group: Index of the group.
    """

    name: str
    parameter: nn.Parameter
    half: str
    group: int


def joining(model: nn.Module, optimizer: torch.optim.Optimizer, new: Iterable[nn.Parameter]) -> list[Joining]:
    """Return the group in which each new parameter belongs, in the order of the model.

    It is the group of the parameters of the same adapter and half (`lora_A`, `lora_B`, weight or bias); if these are in
    several, that of the nearest by path. Biases under the new parameters that train with them (`bias="lora_only"`) come
    too. Parameters that the optimizer holds already are left out, and so are frozen ones without a sibling in it.

    Args:
        model: The model that holds them, as it is trained.
        optimizer: Its optimizer.
        new: The new parameters.

    Raises:
        InputError: The optimizer holds none of the model's parameters, no sibling of one that trains, or the nearest
            siblings in several groups; or it is of a class that takes no new parameters.
    """
    held = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    names = {id(p): name for name, p in model.named_parameters()}
    cls = type(optimizer).__name__
    if held.keys().isdisjoint(names):
        raise InputError(
            f"add_to: {cls} holds {len(held)} parameters, none of them of this {type(model).__name__}; pass the "
            "optimizer that trains this model, or create it from model.parameters()"
        )
    wanted = {id(p) for p in new} & names.keys() - held.keys()
    if wanted and isinstance(optimizer, FIXED):
        raise InputError(
            f"add_to: {cls} fixes its state when it is created or first stepped, and takes no parameters later; create "
            "it anew from model.parameters()"
        )
    kinds = _kinds(model)
    siblings: dict[Kind, list[tuple[list[str], int]]] = {}
    for key, (layer, kind) in kinds.items():
        if key in held:
            siblings.setdefault(kind, []).append((layer, held[key]))
    gaining = [kinds[key][0] for key in wanted]
    found: list[Joining] = []
    for name, parameter in model.named_parameters():
        key = id(parameter)
        layer, kind = kinds.get(key, ([], BASE_BIAS))
        opened = parameter.requires_grad and kind == BASE_BIAS and kind in siblings and layer in gaining
        if key in held or (key not in wanted and not opened):
            continue
        groups = _nearest(layer, siblings.get(kind, ()))
        if len(groups) == 1:
            found.append(Joining(name, parameter, kind[0], groups[0]))
        elif groups or parameter.requires_grad:
            where = f"groups {', '.join(map(str, groups))}" if groups else "none of its groups"
            raise InputError(
                f"add_to: {cls} has the nearest parameters like {name} ({kind[0]}, {kind[2]}, of adapter {kind[1]!r}) "
                f"in {where}, so the settings of the new one are not known; create the optimizer anew, or add "
                "fix.new_parameters by optimizer.add_param_group"
            )
    return found


def _kinds(model: nn.Module) -> dict[int, tuple[list[str], Kind]]:
    """Return the layer (its path in parts) and the kind of each parameter in an adapted layer, by id."""
    found: dict[int, tuple[list[str], Kind]] = {}
    for path, layer in model.named_modules():
        if "lora_A" in children(layer):  # a layer inside another one comes later, and is the nearer one
            for name, parameter in layer.named_parameters():
                table, *rest = name.split(".")
                adapter = rest[0] if rest and table != "base_layer" else ""
                kind = table.replace("embedding_", ""), adapter, "bias" if rest[-1:] == ["bias"] else "weight"
                found[id(parameter)] = path.split("."), kind
    return found


def _nearest(layer: list[str], siblings: Iterable[tuple[list[str], int]]) -> list[int]:
    """Return the groups of the siblings whose paths have the longest beginning in common with a layer's."""
    shared = [
        (sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(layer, other, strict=False))), group)
        for other, group in siblings
    ]
    most = max((length for length, _ in shared), default=0)
    return sorted({group for length, group in shared if length == most})


def join(model: nn.Module, optimizer: torch.optim.Optimizer, found: Sequence[Joining]) -> None:
    """Add parameters to their groups, all or none.

    In a group that follows the order of the model they get the place at which an optimizer that is made anew has them,
    so that a saved state of the one fits the other; else they come last.
    """
    order = {id(p): number for number, p in enumerate(model.parameters())}
    before = [list(_rows(group)) for group in optimizer.param_groups]
    try:
        for number, group in enumerate(optimizer.param_groups):
            as_named = _naming(model, before[number])
            rows = [*before[number], *((j.parameter, as_named(j.name)) for j in found if j.group == number)]
            places = [order.get(id(p), -1) for p, _ in before[number]]
            if -1 not in places and places == sorted(places):
                rows.sort(key=lambda row: order[id(row[0])])
            _write(group, rows)
    except BaseException:
        for group, rows in zip(optimizer.param_groups, before, strict=True):
            _write(group, rows)
        raise


def leave(model: nn.Module, optimizer: torch.optim.Optimizer, added: Iterable[nn.Parameter]) -> int:
    """Take parameters that the model no longer has or trains out of an optimizer, with their state, and count them."""
    there = {id(p) for p in model.parameters() if p.requires_grad}
    gone = {id(p) for p in added} - there & parameters_by_id(optimizer).keys()
    for group in optimizer.param_groups:
        _write(group, [row for row in _rows(group) if id(row[0]) not in gone])
    for parameter in [p for p in optimizer.state if id(p) in gone]:
        del optimizer.state[parameter]
    return len(gone)


def described(optimizer: torch.optim.Optimizer, found: Sequence[Joining]) -> str:
    """Return the number of parameters of each half that each group gains, with its settings."""
    lines: list[str] = []
    for number in sorted({j.group for j in found}):
        group = optimizer.param_groups[number]
        settings = [f"{name} {group[name]:g}" for name in ("lr", "weight_decay") if name in group]
        halves = Counter(j.half for j in found if j.group == number)
        gained = ", ".join(f"{count} {half}" for half, count in halves.items())
        lines.append(f"{gained} to group {number} ({', '.join(settings)})")
    return "; ".join(lines)


def _rows(group: dict[str, Any]) -> Iterable[Row]:
    """Return the parameters of a group, each with its name; an empty one if the optimizer was made without names."""
    return zip(group["params"], group.get("param_names", [""] * len(group["params"])), strict=True)


def _write(group: dict[str, Any], rows: Sequence[Row]) -> None:
    group["params"][:] = [parameter for parameter, _ in rows]
    if "param_names" in group:
        group["param_names"][:] = [name for _, name in rows]


def _naming(model: nn.Module, rows: Sequence[Row]) -> Callable[[str], str]:
    """Return how names of the model become those of a group, which may count from a module inside or around it."""
    names = {id(p): name for name, p in model.named_parameters()}
    own, theirs = next(((names[id(p)], name) for p, name in rows if id(p) in names), ("", ""))
    if own.endswith(theirs):
        return lambda name: name.removeprefix(own.removesuffix(theirs))
    return lambda name: theirs.removesuffix(own) + name
