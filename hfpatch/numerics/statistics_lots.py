"""Tensors that wait to be measured together, where a launch costs the host more than a small tensor costs the device.

They are kept by reference, not by copy. What that can do to a result or to memory is bounded here:

- A tensor that is written to in place while it waits is measured with its new values, and its row is named in `late`.
  Where such a write is expected, `at_once` measures the tensor before it. A tensor of inference mode does not count its
  versions, so a write would not be noticed: it is measured at once.
- What waits keeps its memory, in a forward without gradients too. So a lot is measured when it reaches 1/64 of the
  device's memory: 256 MiB on 16 GiB, 2.2 GiB on 141 GiB, however deep the model is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from hfpatch.compat.autograd import version

LOT = 512
"""Most tensors in a lot."""
SHARE = 64
"""A lot is measured when its tensors take this part of the device's memory."""


class Measured(Protocol):
    """Rows of statistics that are filled by lots."""

    def extend(self, tensors: Sequence[torch.Tensor]) -> None:
        """Measure tensors, in this order. Does not wait for the device."""
        ...

    def read(self) -> torch.Tensor:
        """Return the rows, see `statistics.Rows`."""
        ...


class Lots:
    """Rows whose tensors are measured in lots.

    Args:
        measured: Where they are measured.
        most: Bytes of tensors that may wait.

    Attributes:
        late: Rows of tensors that were written to in place before they were measured.
    """

    def __init__(self, measured: Measured, most: int) -> None:
        self.late: set[int] = set()
        self._measured, self._most = measured, most
        self._count = 0
        self._bytes = 0
        self._waiting: list[torch.Tensor] = []
        self._versions: list[int] = []

    def add(self, tensor: torch.Tensor, *, at_once: bool = False) -> int:
        """See `statistics.Rows`."""
        if tensor.requires_grad or type(tensor) is not torch.Tensor:
            # a detached alias keeps no graph alive, and does not follow a parameter whose `.data` is replaced
            tensor = tensor.detach()
        self._waiting.append(tensor)
        self._versions.append(version(tensor))
        self._bytes += tensor.nbytes
        number = self._count
        self._count += 1
        if at_once or self._bytes > self._most or len(self._waiting) == LOT or tensor.is_inference():
            self.flush()
        return number

    def flush(self) -> None:
        """See `statistics.Rows`."""
        waiting, versions = self._waiting, self._versions
        first = self._count - len(waiting)
        self._waiting, self._versions, self._bytes = [], [], 0
        self.late.update(
            first + place
            for place, (tensor, then) in enumerate(zip(waiting, versions, strict=True))
            if version(tensor) != then
        )
        self._measured.extend(waiting)

    def read(self) -> torch.Tensor:
        """See `statistics.Rows`."""
        self.flush()
        return self._measured.read()


def most_waiting(device: torch.device) -> int:
    """Return the bytes that may wait on a CUDA device."""
    return torch.cuda.get_device_properties(device).total_memory // SHARE
