"""Which modules of a model are watched, and which calls are kept so that they can be run again.

A *block* is an item of a list of layers, or a part that stands beside such lists (an embedding, the final norm, the
head). What holds blocks is *opened*: the model itself, a text model in it, PEFT's wrappers, stages of stages.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hfpatch.compat.modules import buffers, parameters
from hfpatch.model.roles import is_block

_BARE = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Containers that nobody calls."""


@dataclass(frozen=True)
class Places:
    """Modules by path, in the order of `named_modules`.

    Attributes:
        opened: The model and what holds blocks.
        blocks: What is run again as a whole when something in it goes wrong.
        inner: What lies in blocks.
        owners: Modules that hold parameters or buffers of their own.
    """

    opened: dict[str, nn.Module]
    blocks: dict[str, nn.Module]
    inner: dict[str, nn.Module]
    owners: tuple[tuple[str, nn.Module], ...]

    def kept(self, path: str) -> str | None:
        """The innermost opened module or block that a path is or lies in."""
        while path not in self.blocks and path not in self.opened:
            if not path:
                return None
            path = path.rpartition(".")[0]
        return path

    def outer(self, path: str) -> str | None:
        """The same for what a path lies in, itself left out; None for the model."""
        return self.kept(path.rpartition(".")[0]) if path else None


def places(model: nn.Module) -> Places:
    """The places of a model, from its structure."""
    owners = tuple((p, m) for p, m in model.named_modules() if parameters(m) or buffers(m))
    found = Places({}, {}, {}, owners)
    seen: set[nn.Module] = set()

    def visit(path: str, module: nn.Module, outermost: bool) -> None:
        if module in seen:
            return
        seen.add(module)
        bare = isinstance(module, _BARE)
        if not (bare or outermost or isinstance(module, nn.Sequential) or _holds_blocks(module)):
            found.blocks[path] = module
            for name, inner in module.named_modules(prefix=path):
                if inner is not module and not isinstance(inner, _BARE) and inner not in seen:
                    seen.add(inner)
                    found.inner[name] = inner
            return
        if not bare:
            found.opened[path] = module
        for name, child in module.named_children():
            visit(f"{path}.{name}" if path else name, child, False)

    visit("", model, True)
    return found


def _holds_blocks(module: nn.Module) -> bool:
    """Whether a list of layers lies in a module: what has a norm and a branch each, as roles are told."""
    return any(
        isinstance(inner, (nn.ModuleList, nn.Sequential)) and len(inner) > 0 and all(is_block(item) for item in inner)
        for inner in module.modules()
    )
