"""Whether the weights of a module can be computed with in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpatch.compat.quantising.packages import by_package
from hfpatch.errors import RefusedError

if TYPE_CHECKING:
    from hfpatch.patching.context import Target


def check_plain(target: Target) -> None:
    """Raise an error if a module holds a quantised weight, by its dtype or by its tensor class.

    Raises:
        RefusedError: It does; its weight cannot be computed with in float32.
    """
    for name, parameter in target.module.named_parameters():
        cls = type(parameter.data)
        other = not f"{cls.__module__}.".startswith("torch.")
        if other or not parameter.dtype.is_floating_point or parameter.element_size() < 2:
            path = f"{target.path}.{name}" if target.path else name
            package = by_package(parameter.data) or cls.__module__.partition(".")[0]
            what = f"{package}'s {cls.__name__}" if other else str(parameter.dtype)
            raise RefusedError(f"{path} is quantised ({what}) and cannot be computed with in float32")
