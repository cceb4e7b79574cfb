# the store through which the ranks of a process group met has no public name
"""Values that one rank leaves for the others, without a collective."""

from __future__ import annotations

from datetime import timedelta

from torch import distributed


def store() -> distributed.Store | None:
    """Return the store of the default process group; None without one."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]


def wait_for(given: distributed.Store, key: str, seconds: float) -> str | None:
    """Return the value of a key as text; None if no rank has set it after these seconds."""
    try:
        given.wait([key], timedelta(seconds=seconds))
        return given.get(key).decode()
    except RuntimeError:  # DistStoreError is one
        return None
