# torch keeps forward hooks in private tables; a handle cannot be found again on a copy of a module
# pyright: reportPrivateUsage=false
"""Forward hooks under keys that no process hands out again.

torch numbers hooks from 0 in each process. A model that was saved and loaded in another process brings its hooks'
numbers along, and the next hook that anybody registers may take the number of one of them: it overwrites that hook,
and its removal deletes it. So every hook of hfpatch, a lasting one or one of a trace, is written into torch's tables
under a random negative key. torch itself hands out 0, 1, 2, ...
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

BEFORE = ("_forward_pre_hooks_with_kwargs", "_forward_pre_hooks")
AFTER = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_hooks")
"""Names of torch's tables: the flags first, the table of the hooks themselves last.

A hook is entered there first and taken off there last, so that one whose setting or removal was interrupted is found.
"""

EVERY = (BEFORE[-1], AFTER[-1], "_backward_hooks", "_backward_pre_hooks")
"""Names of the tables of hooks, those of the backward pass too, without their flags."""


class Handle:
    """Takes a hook off again. Calling `remove` twice is fine."""

    def __init__(self, module: nn.Module, key: int) -> None:
        self.module, self.key = module, key

    def remove(self) -> None:
        """Take the hook off."""
        drop(self.module, [self.key])


def new_key() -> int:
    """Return a random key below zero."""
    return -1 - secrets.randbits(62)


def before(
    module: nn.Module, hook: Callable[..., Any], *, first: bool = False, with_kwargs: bool = False, key: int = 0
) -> Handle:
    """Call a hook before a module's forward.

    Args:
        module: The module.
        hook: Called with module and arguments; what it returns replaces the arguments, as in torch.
        first: Call it before the hooks that are there.
        with_kwargs: Give it the keyword arguments too.
        key: A key from `new_key`, where several hooks share one; 0 draws one.
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
    """Call a hook after a module's forward.

    Args:
        module: The module.
        hook: Called with module, arguments and output; what it returns replaces the output, as in torch.
        first: Call it before the hooks that are there.
        with_kwargs: Give it the keyword arguments too.
        always: Call it where forward raised an `Exception` too; torch does not do so for a `BaseException`.
        key: A key from `new_key`, where several hooks share one; 0 draws one.
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
"""A module, what is called before its forward (with keyword arguments), and what is called after it."""


def around(modules: Iterable[Around]) -> int:
    """Set hooks on many modules, and return the one key they are under; `drop_around` takes them off.

    There is no handle for each: setting those would cost a trace more than its hooks do.
    """
    key = new_key()
    for module, called, returned in modules:
        slots = module.__dict__
        slots["_forward_pre_hooks"][key] = called
        slots["_forward_pre_hooks_with_kwargs"][key] = True
        slots["_forward_hooks"][key] = returned
    return key


def drop_around(modules: Iterable[Around], key: int) -> None:
    """Take off what `around` set."""
    for module, _, _ in modules:
        slots = module.__dict__
        slots["_forward_pre_hooks"].pop(key, None)
        slots["_forward_pre_hooks_with_kwargs"].pop(key, None)
        slots["_forward_hooks"].pop(key, None)


def tables(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return torch's tables of a module's forward hooks and their flags, the flags before the hooks."""
    return tuple(module.__dict__[name] for name in (*BEFORE, *AFTER))


def hooks_of(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the hooks called before a module's forward, and those called after it, without their flags."""
    return module.__dict__[BEFORE[-1]], module.__dict__[AFTER[-1]]


def keys(module: nn.Module, hooks: Iterable[object], *, silent: bool = False) -> list[int]:
    """Return the keys under which a module has these very hooks; with `silent`, those that are silenced too."""
    wanted = {id(hook) for hook in hooks}
    found: list[int] = []
    for table in hooks_of(module):
        for key, hook in table.items():
            if id(hook.hook if silent and isinstance(hook, Silenced) else hook) in wanted:
                found.append(key)
    return found


def is_set(module: nn.Module, hook: object) -> bool:
    """True if a module calls this hook, and with keyword arguments where it is called before forward."""
    slots = module.__dict__
    return any(key in slots[BEFORE[0]] or key in slots[AFTER[-1]] for key in keys(module, [hook]))


def orphans(module: nn.Module) -> list[int]:
    """Return the keys of hfpatch's flags whose hook somebody took off without them."""
    slots, hooked = module.__dict__, {key for table in hooks_of(module) for key in table}
    return [key for name in (*BEFORE[:-1], *AFTER[:-1]) for key in slots[name] if key < 0 and key not in hooked]


def drop(module: nn.Module, gone: Iterable[int]) -> None:
    """Take the hooks of these keys off a module; keys that are not there are passed over."""
    for key in gone:
        for table in tables(module):
            table.pop(key, None)


class Silenced:
    """A hook that does nothing and keeps the place of another one."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def __call__(self, *_: Any) -> None:
        """Change nothing."""


def silence(module: nn.Module, hooks: Iterable[object]) -> None:
    """Let a hook that does nothing stand in the place of each of these, so that the order stays."""
    for key in keys(module, hooks):
        for table in hooks_of(module):
            if key in table:
                table[key] = Silenced(table[key])


def unsilence(module: nn.Module, hooks: Iterable[object]) -> None:
    """Put back those of these hooks that are silenced."""
    wanted = {id(hook) for hook in hooks}
    for table in hooks_of(module):
        for key, hook in list(table.items()):
            if isinstance(hook, Silenced) and id(hook.hook) in wanted:
                table[key] = hook.hook
