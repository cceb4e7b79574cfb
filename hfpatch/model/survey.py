"""A walk over an object, with the facts about its parts that follow from it."""

from __future__ import annotations

from functools import cached_property

from torch import nn

from hfpatch.model import roles
from hfpatch.model.added import added_modules
from hfpatch.model.attention import Attention, attentions
from hfpatch.model.walk import Walk


class Survey(Walk):
    """The modules of an object and their roles. Changes nothing; each fact is computed when it is first read."""

    @cached_property
    def added(self) -> dict[str, nn.Module]:
        """Modules that were not created by transformers' own code, by path."""
        return added_modules(self, self.homes)

    @cached_property
    def stacks(self) -> dict[str, tuple[roles.Stack, ...]]:
        """Stacks by the path of the submodel, a decoder's last; submodels without a stack are left out."""
        return {s.path: found for s in self.submodels if (found := roles.stacks(self, s))}

    @cached_property
    def homes(self) -> dict[str, str]:
        """Paths of the layers inside a user's modules -> their paths in the stock model."""
        every = (pair for stacks in self.stacks.values() for stack in stacks for pair in stack.wrappers)
        return {layer: item for (item, _), (layer, _) in every}

    def stock_path(self, path: str) -> str:
        """Return the path that a module has in the stock model, without users' modules around layers."""
        return roles.stock_path(path, self.homes)

    @cached_property
    def attentions(self) -> dict[str, list[Attention]]:
        """Attention modules by the path of their submodel."""
        return {s.path: attentions(self, s) for s in self.submodels}
