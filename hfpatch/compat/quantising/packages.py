# which quantisers' tensor classes there are, by the packages that they stand in
"""The package of a quantiser whose tensor class a weight has. Nothing is imported: patches are listed without torch.

Known in torchao 0.18 and optimum-quanto 0.2.7; bitsandbytes, hqq and GGUF keep their weights in torch's own classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def by_package(weight: torch.Tensor) -> str:
    """Return the package of a quantiser whose tensor class a weight has; empty for others."""
    package = type(weight).__module__.partition(".")[0]
    return {"torchao": "torchao", "optimum": "quanto"}.get(package, "")
