"""Parameters of which `make quick` tries some, and `make test` all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A parameter that `make quick` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def first_quick(values: Iterable[Any], every: int = 0) -> list[Any]:
    """The values, slow but for the first and, with `every`, each that many after it."""
    return [v if i == 0 or (every and i % every == 0) else slow(v) for i, v in enumerate(values)]


def some_quick(values: Iterable[tuple[Any, ...]], every: int) -> list[Any]:
    """Tuples as single parameters, of which each that many is quick."""
    return [pytest.param(v, marks=[pytest.mark.slow] if i % every else []) for i, v in enumerate(values)]
