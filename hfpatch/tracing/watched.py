"""Which modules of a model are watched, and for which of them calls are kept to be run again.

A *block* is an item of a list of layers, or a part beside such lists (an embedding, the final norm, the head). A module
that holds blocks is a *container*: the model itself, a text model in it, PEFT's wrappers, nested stages.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hfpatch.compat.modules import buffers, parameters
from hfpatch.model.roles import is_block

_BARE = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Module lists and dicts, which are never called."""
PACKAGES = ("torch", "transformers", "peft", "accelerate", "hfpatch")


@dataclass(frozen=True)
class Places:
    """Modules by path, in the order of `named_modules`.

    Attributes:
        containers: The model and the modules that hold blocks.
        blocks: Modules that are run again as a whole when something in them goes wrong.
        inner: Modules inside blocks.
        owners: Modules that hold parameters or buffers of their own.
        all: All modules of the model, lists too.
        written: Paths of modules whose class comes from none of the packages in `PACKAGES`: the user's own code.
    """

    containers: dict[str, nn.Module]
    blocks: dict[str, nn.Module]
    inner: dict[str, nn.Module]
    owners: tuple[tuple[str, nn.Module], ...]
    all: dict[str, nn.Module]
    written: frozenset[str]

    def enclosing(self, path: str) -> str | None:
        """Return the innermost container or block at or above a path; None if there is none."""
        while path not in self.blocks and path not in self.containers:
            if not path:
                return None
            path = path.rpartition(".")[0]
        return path

    def above(self, path: str) -> str | None:
        """Return the innermost container or block above a path, not the path itself; None for the model."""
        return self.enclosing(path.rpartition(".")[0]) if path else None


def places(model: nn.Module) -> Places:
    """Return the places of a model, from its structure."""
    every = dict(model.named_modules())
    owners = tuple((p, m) for p, m in every.items() if parameters(m) or buffers(m))
    written = (p for p, m in every.items() if type(m).__module__.partition(".")[0] not in PACKAGES)
    found = Places({}, {}, {}, owners, every, frozenset(written))
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
            found.containers[path] = module
        for name, child in module.named_children():
            visit(f"{path}.{name}" if path else name, child, False)

    visit("", model, True)
    return found


def _holds_blocks(module: nn.Module) -> bool:
    """True if a module holds a list of layers: of blocks by `hfpatch.model.roles.is_block`, or of other stages.

    A block that holds a list of parts that are no blocks, such as experts, is run as a whole.
    """
    lists = [m for m in module.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) > 0]
    if any(all(is_block(item) for item in inner) for inner in lists):
        return True
    stages = [inner for inner in lists if isinstance(inner, nn.ModuleList) and _are_stages(inner)]
    return bool(stages) and (not is_block(module) or any(is_block(m) for inner in stages for m in inner.modules()))


def _are_stages(items: nn.ModuleList) -> bool:
    """True for two or more modules, each with parts and weights: layers in wrappers, or hand-written stages."""
    whole = (any(True for _ in item.children()) and any(True for _ in item.parameters()) for item in items)
    return len(items) > 1 and all(whole)
