"""The residual stream tensor among the arguments of a module."""

from __future__ import annotations

from typing import Any

import torch


def stream_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the argument with the stream: the first, `hidden_states`, or the first floating-point keyword tensor."""
    if args or "hidden_states" in kwargs:
        return args[0] if args else kwargs["hidden_states"]
    return next((v for v in kwargs.values() if isinstance(v, torch.Tensor) and v.is_floating_point()), None)


def handing(now: Any, stream: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Return the arguments with the stream replaced wherever it is passed: CTRL passes it three times."""
    return (
        tuple(now if value is stream else value for value in args),
        {key: now if value is stream else value for key, value in kwargs.items()},
    )


def cast(value: Any, to: torch.dtype) -> Any:
    """Return a floating-point tensor in another dtype, and any other value unchanged."""
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != to:
        return value.to(to)
    return value
