"""Operations that a container runs itself, between the calls of its parts: found in autograd's graph.

Hooks on modules do not see them. A division by a tiny RMS that a model's own forward makes between two stages shows in
no input and no output if a factor before it makes up for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LONGEST = 64
"""Backward functions that are followed from one tensor; a longer piece of code is followed in part."""
PLAIN = (
    "View", "Reshape", "Transpose", "Permute", "Expand", "Squeeze", "Unsqueeze", "ToCopy", "Clone", "Alias",
    "TBackward",
)  # fmt: skip
"""How the names of backward functions begin that change no value."""


Made = tuple[torch.Tensor, bool]


class OwnCode:
    """Follows the graph of each tensor that a container made back to the tensors that its parts returned.

    Args:
        record: Called in the backward pass with path and number of the container's call, the name of a backward
            function, the number of the tensor that was followed, the gradients that the function made, each with True
            if it goes to another module, and the gradient that it was given.
    """

    def __init__(self, record: Callable[[str, int, str, int, list[Made], torch.Tensor], None]) -> None:
        self.record = record
        self._ends: set[Any] = set()
        self._regions = 0

    def end(self, tensor: torch.Tensor) -> None:
        """Note a tensor that a part took or returned: what made it is not the container's own code."""
        if tensor.grad_fn is not None:
            self._ends.add(tensor.grad_fn)

    def follow(self, tensor: torch.Tensor, path: str, number: int) -> None:
        """Watch the operations by which a container made a tensor."""
        self._regions += 1
        parts = frozenset(self._ends)
        pending, left = [tensor.grad_fn], LONGEST
        while pending and left:
            node: Any = pending.pop()
            if node is None or node in self._ends or not node.next_functions:
                continue  # the last adds up the gradient of a leaf
            self._ends.add(node)
            left -= 1
            pending.extend(inner for inner, _ in node.next_functions)
            if not node.name().startswith(PLAIN):
                goes = [
                    None if n is None or not n.next_functions else n in parts  # None: to a parameter
                    for n, _ in node.next_functions
                ]
                node.register_hook(self._hook(node.name(), path, number, self._regions, goes))

    def _hook(
        self, name: str, path: str, number: int, region: int, goes: list[bool | None]
    ) -> Callable[[Any, Any], None]:
        def seen(made: tuple[torch.Tensor | None, ...], given: tuple[torch.Tensor | None, ...]) -> None:
            gradients = [(g, out) for g, out in zip(made, goes, strict=True) if out is not None and g is not None]
            first = next((g for g in given if g is not None), None)
            if gradients and first is not None:
                self.record(path, number, name, region, gradients, first)

        return seen

    def forget(self) -> None:
        """Release the graph."""
        self._ends.clear()
