# torch keeps forward hooks in private tables; a handle cannot be found again on a copy of a module
# pyright: reportPrivateUsage=false
"""Forward hooks under keys that torch never assigns.

torch numbers hooks from 0 in each process. A model that was saved and then loaded in another process keeps the numbers
of its hooks. A hook registered there later may get the same number: it overwrites the loaded hook, and its removal
deletes it. So every hook of hfpatch, permanent or for a trace, is entered in torch's tables under a random negative
key; torch's own keys are 0, 1, 2, ...
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

BEFORE = ("_forward_pre_hooks_with_kwargs", "_forward_pre_hooks")
AFTER = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_hooks")
"""Names of torch's tables: the flags first, the table of the hooks last.

A hook is entered in the last table first and removed from it last, so a hook is found even if setting or removing it
was interrupted.
"""

EVERY = (BEFORE[-1], AFTER[-1], "_backward_hooks", "_backward_pre_hooks")
"""Names of the tables of hooks, those of the backward pass too, without their flags."""


class Handle:
    """Removes one hook. Calling `remove` twice is fine."""

    def __init__(self, module: nn.Module, key: int) -> None:
        self.module, self.key = module, key

    def remove(self) -> None:
        """Remove the hook."""
        drop(self.module, [self.key])


def new_key() -> int:
    """Return a random negative key."""
    return -1 - secrets.randbits(62)


def before(
    module: nn.Module, hook: Callable[..., Any], *, first: bool = False, with_kwargs: bool = False, key: int = 0
) -> Handle:
    """Register a hook that runs before a module's forward.

    Args:
        module: The module.
        hook: Called with module and arguments; if it returns a value, that replaces the arguments, as in torch.
        first: Call it before the hooks that are registered already.
        with_kwargs: Pass it the keyword arguments too.
        key: A key from `new_key` that several hooks share; 0 for a new one.
    """
    return _set(module, BEFORE, hook, first, {"_forward_pre_hooks_with_kwargs": with_kwargs}, key)


def after(
    module: nn.Module,
    hook: Callable[..., Any],
    *,
    first: bool = False,
    with_kwargs: bool = False,
    always: bool = False,
    key: int = 0,
) -> Handle:
    """Register a hook that runs after a module's forward.

    Args:
        module: The module.
        hook: Called with module, arguments and output; if it returns a value, that replaces the output, as in torch.
        first: Call it before the hooks that are registered already.
        with_kwargs: Pass it the keyword arguments too.
        always: Call it also if forward raised an `Exception`; torch does not call it after other `BaseException`s.
        key: A key from `new_key` that several hooks share; 0 for a new one.
    """
    flags = {"_forward_hooks_with_kwargs": with_kwargs, "_forward_hooks_always_called": always}
    return _set(module, AFTER, hook, first, flags, key)


def _set(
    module: nn.Module, names: tuple[str, ...], hook: Callable[..., Any], first: bool, flags: dict[str, bool], key: int
) -> Handle:
    key = key or new_key()
    table = module.__dict__[names[-1]]
    table[key] = hook
    for name, wanted in flags.items():
        if wanted:
            module.__dict__[name][key] = True
    if first:
        table.move_to_end(key, last=False)
    return Handle(module, key)


Around = tuple[nn.Module, Callable[..., Any], Callable[..., Any]]
"""A module, the hook before its forward (called with keyword arguments), and the hook after it."""


def around(modules: Iterable[Around]) -> int:
    """Register hooks on many modules under one key, and return the key; `drop_around` removes them.

    Handles are not made: making one per hook would cost a trace more than its hooks do.
    """
    key = new_key()
    for module, called, returned in modules:
        slots = module.__dict__
        slots["_forward_pre_hooks"][key] = called
        slots["_forward_pre_hooks_with_kwargs"][key] = True
        slots["_forward_hooks"][key] = returned
    return key


def drop_around(modules: Iterable[Around], key: int) -> None:
    """Remove the hooks that `around` registered."""
    for module, _, _ in modules:
        slots = module.__dict__
        slots["_forward_pre_hooks"].pop(key, None)
        slots["_forward_pre_hooks_with_kwargs"].pop(key, None)
        slots["_forward_hooks"].pop(key, None)


def tables(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return torch's tables of a module's forward hooks and their flags, the flags before the hooks."""
    return tuple(module.__dict__[name] for name in (*BEFORE, *AFTER))


def hooks_of(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the hooks called before a module's forward and those called after it, without their flags."""
    return module.__dict__[BEFORE[-1]], module.__dict__[AFTER[-1]]


def keys(module: nn.Module, hooks: Iterable[object], *, silent: bool = False) -> list[int]:
    """Return a module's keys of these hooks, compared by identity; with `silent`, also of those that are silenced."""
    wanted = {id(hook) for hook in hooks}
    found: list[int] = []
    for table in hooks_of(module):
        for key, hook in table.items():
            if id(hook.hook if silent and isinstance(hook, Silenced) else hook) in wanted:
                found.append(key)
    return found


def is_set(module: nn.Module, hook: object) -> bool:
    """True if this hook is set on a module; a hook before forward counts only if it gets keyword arguments."""
    slots = module.__dict__
    return any(key in slots[BEFORE[0]] or key in slots[AFTER[-1]] for key in keys(module, [hook]))


def followed(module: nn.Module, hook: object) -> bool:
    """True if a hook of other code runs after this one when a module's forward has returned."""
    mine = False
    for key, each in hooks_of(module)[1].items():
        if mine and key >= 0:
            return True
        mine = mine or each is hook
    return False


def orphans(module: nn.Module) -> list[int]:
    """Return the keys of hfpatch's flags whose hook was removed by other code, which left the flags."""
    slots, hooked = module.__dict__, {key for table in hooks_of(module) for key in table}
    return [key for name in (*BEFORE[:-1], *AFTER[:-1]) for key in slots[name] if key < 0 and key not in hooked]


def drop(module: nn.Module, gone: Iterable[int]) -> None:
    """Remove the hooks with these keys from a module; missing keys are ignored."""
    for key in gone:
        for table in tables(module):
            table.pop(key, None)


class Silenced:
    """A hook that does nothing and holds the place of another hook."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def __call__(self, *_: Any) -> None:
        """Change nothing."""


def silence(module: nn.Module, hooks: Iterable[object]) -> None:
    """Replace each of these hooks by one that does nothing, which keeps the order of the hooks."""
    for key in keys(module, hooks):
        for table in hooks_of(module):
            if key in table:
                table[key] = Silenced(table[key])


def unsilence(module: nn.Module, hooks: Iterable[object]) -> None:
    """Put back each of these hooks that is silenced."""
    wanted = {id(hook) for hook in hooks}
    for table in hooks_of(module):
        for key, hook in list(table.items()):
            if isinstance(hook, Silenced) and id(hook.hook) in wanted:
                table[key] = hook.hook
