"""Checks the arguments of plan, apply and revert: names of patches, options, dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from hfpatch.dtypes import dtype_name
from hfpatch.errors import InputError
from hfpatch.given import shown
from hfpatch.patching import registry
from hfpatch.patching.registering.installed import offers
from hfpatch.patching.registry import Entry

if TYPE_CHECKING:
    import torch

Names = str | Iterable[str] | None


def names(given: Names, takes: str = "only=, include= and exclude= take patch ids or globs") -> list[str]:
    """Return a caller's names as a list.

    Args:
        given: The names.
        takes: The beginning of the error message.

    Raises:
        InputError: The argument is neither a string nor a collection of strings.
    """
    found: Any = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(found, (list, tuple, set, frozenset)) or not all(isinstance(n, str) for n in found):
        raise InputError(f"{takes}, got {shown(given)}")
    return list(found)


def ids(given: Names, also: Iterable[str] = ()) -> set[str]:
    """Return the ids of the patches that ids and globs match.

    Args:
        given: The ids and globs.
        also: Ids that they may match too, e.g. those in the records of a model.

    Raises:
        InputError: The argument is neither a string nor a collection of strings.
        UnknownPatchError: A name matches no patch.
    """
    return {patch_id for name in names(given) for patch_id in registry.match(name, also)}


def settings(entries: Mapping[str, Entry], given: Mapping[str, Mapping[str, Any]] | None) -> dict[str, dict[str, Any]]:
    """Return the options that a caller set, by patch id.

    Raises:
        InputError: The argument is not a nested mapping, or a patch has no option of that name.
        UnknownPatchError: No patch has that id.
    """
    out: dict[str, dict[str, Any]] = {}
    if given is not None and not _is_nested(given):
        raise InputError(f"options= takes {{patch id: {{name: value}}}}, got {shown(given)}")
    for patch_id, settings in (given or {}).items():
        if patch_id not in entries:
            if patch_id in offers():
                raise InputError(f"options: {patch_id} is of an installed package: name it in only= or include= too")
            raise registry.unknown(patch_id, (*entries, *offers()))
        for name in settings:
            if name not in entries[patch_id].patch.options:
                have = ", ".join(entries[patch_id].patch.options) or "none"
                raise InputError(f"options: {patch_id} has no option {name!r}; it has: {have}")
        out[patch_id] = dict(settings)
    return out


def _is_nested(given: Any) -> bool:
    """True for a mapping of strings to mappings of strings."""
    return isinstance(given, Mapping) and all(
        isinstance(name, str) and isinstance(held, Mapping) and all(isinstance(key, str) for key in held)
        for name, held in given.items()
    )


def as_dtype(given: str | torch.dtype | None) -> torch.dtype | None:
    """Return the compute dtype for a dtype or its name.

    Raises:
        InputError: The argument is not one of float16, bfloat16, float32 and float64.
    """
    import torch

    if given is None:
        return None
    if not isinstance(given, (str, torch.dtype)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"compute dtype: want float16, bfloat16, float32 or float64, got {shown(given)}")
    short = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32"}
    name = dtype_name(given)
    dtype = getattr(torch, short.get(name, name), None)
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise InputError(f"compute dtype {given!r}: want float16, bfloat16, float32 or float64")
    return dtype
