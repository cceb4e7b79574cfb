"""Names of dtypes, without torch."""

from __future__ import annotations


def dtype_name(dtype: object) -> str:
    """Return `float16` for `torch.float16`, and for its name."""
    return str(dtype).removeprefix("torch.")
