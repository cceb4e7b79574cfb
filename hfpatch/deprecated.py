"""Old names that still work: each warns once per process and gives the new name.

The warnings are `FutureWarning`s, which Python shows by default; it hides most `DeprecationWarning`s.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, wraps
from inspect import Parameter, signature
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@cache  # once per process; the filters of `warnings` would repeat it for each calling line
def warn(sentence: str) -> None:
    """Issue a warning at the line that called the caller of this function."""
    warnings.warn(sentence, FutureWarning, stacklevel=3)


def renamed(call: str, why: str, **names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that lets a function also take arguments by their old names.

    Args:
        call: Name of the function, for the message.
        why: Why they were renamed, for the message.
        names: Old name -> new name.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            given: dict[str, Any] = dict(kwargs)
            for old, new in names.items():
                if old in given:
                    warn(f"{call}: {old}= is now {new}=: {why}; {old}= will not work in a later release")
                    if new in given:
                        raise TypeError(f"{call}: {old}= and {new}= are the same; give {new}=")
                    given[new] = given.pop(old)
            return function(*args, **given)  # pyright: ignore[reportCallIssue] - checked under the old names

        return called

    return decorate


def keywords(call: str, why: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that lets a function also take its keyword-only arguments by position, in their order.

    Args:
        call: Name of the function, for the message.
        why: Why they are keyword-only, for the message.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = signature(function).parameters.values()
        named = [p.name for p in parameters if p.kind is Parameter.KEYWORD_ONLY]
        places = sum(p.kind is Parameter.POSITIONAL_OR_KEYWORD for p in parameters)

        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            beyond = dict(zip(named, args[places:], strict=False))
            if not beyond or len(args) > places + len(named):
                return function(*args, **kwargs)
            warn(
                f"{call}: give {', '.join(f'{name}=' for name in beyond)} by name: {why}; by position this will not "
                "work in a later release"
            )
            if twice := beyond.keys() & kwargs.keys():
                raise TypeError(f"{call}: {min(twice)} is given twice, by position and by name")
            given: dict[str, Any] = {**beyond, **kwargs}
            return function(*args[:places], **given)  # pyright: ignore[reportCallIssue] - checked by position

        return called

    return decorate
