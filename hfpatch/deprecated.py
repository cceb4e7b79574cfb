"""Old spellings that still work: each warns once in a process, and says the new one.

The warnings are `FutureWarning`s, which Python shows to whoever runs the program; a `DeprecationWarning` it shows to
authors of tests only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, wraps
from inspect import Parameter, signature
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@cache  # once in a process; the filters of `warnings` would say it once a line of the caller's
def warn(sentence: str) -> None:
    """Warn whoever calls the function that calls this."""
    warnings.warn(sentence, FutureWarning, stacklevel=3)


def renamed(call: str, why: str, **names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function take arguments by their old names too.

    Args:
        call: Name of the function, for the sentence.
        why: Why they were renamed.
        names: Old name -> new name.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            given: dict[str, Any] = dict(kwargs)
            for old, new in names.items():
                if old in given:
                    warn(f"{call}: {old}= is {new}= now: {why}; {old}= will not work in a later release")
                    if new in given:
                        raise TypeError(f"{call}: {old}= and {new}= are the same; give {new}=")
                    given[new] = given.pop(old)
            return function(*args, **given)  # pyright: ignore[reportCallIssue] - as the old names were

        return called

    return decorate


def keywords(call: str, why: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function take its keyword-only arguments by position too, in their order.

    Args:
        call: Name of the function, for the sentence.
        why: Why they are keyword-only.
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
                f"{call}: give {', '.join(f'{name}=' for name in beyond)} by name: {why}; by position they will not "
                "work in a later release"
            )
            if twice := beyond.keys() & kwargs.keys():
                raise TypeError(f"{call}: {min(twice)} is given twice, by position and by name")
            given: dict[str, Any] = {**beyond, **kwargs}
            return function(*args[:places], **given)  # pyright: ignore[reportCallIssue] - as they were by position

        return called

    return decorate
