"""A walk over an object, with the facts about its parts that follow from it."""

from __future__ import annotations

from functools import cached_property

from torch import nn

from hfpatch.model import roles
from hfpatch.model.added import added_modules
from hfpatch.model.attention import Attention, attentions
from hfpatch.model.walk import Walk


class Survey(Walk):
    """What an object holds and what its parts are for. Reads only; each fact is read when it is first asked for."""

    @cached_property
    def added(self) -> dict[str, nn.Module]:
        """Modules that transformers' own code did not make, by path."""
        return added_modules(self, self.homes)

    @cached_property
    def stacks(self) -> dict[str, tuple[roles.Stack, ...]]:
        """The stacks of each submodel, a decoder's last, by the submodel's path; submodels without one are left out."""
        return {s.path: found for s in self.submodels if (found := roles.stacks(self, s))}

    @cached_property
    def homes(self) -> dict[str, str]:
        """Paths of layers that a user's modules hold, each with the path that the layer has in the stock model."""
        every = (pair for stacks in self.stacks.values() for stack in stacks for pair in stack.wrappers)
        return {layer: item for (item, _), (layer, _) in every}

    def stock_path(self, path: str) -> str:
        """A path as it is without the users' modules around layers."""
        return roles.stock_path(path, self.homes)

    @cached_property
    def attentions(self) -> dict[str, list[Attention]]:
        """Attention modules of each submodel's own, by the submodel's path."""
        return {s.path: attentions(self, s) for s in self.submodels}
