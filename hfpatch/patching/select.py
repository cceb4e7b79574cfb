"""Where: a value that picks modules. Counted, so that nothing matches in silence."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hfpatch.patching.context import Context, Target

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Selection:
    """Modules of a context, by a rule that has a name.

    Args:
        description: Names the rule in plans and in errors.
        find: The rule.
        may_be_empty: A model without such modules is not refused.
    """

    description: str
    find: Callable[[Context], Iterable[Target]]
    may_be_empty: bool = False

    def targets(self, context: Context) -> tuple[Target, ...]:
        """The modules picked, in the model's own order, none twice."""
        return tuple({t.path: t for t in self.find(context)}.values())

    def count(self, context: Context) -> int:
        """How many modules are picked."""
        return len(self.targets(context))

    def where(self, keep: Callable[[Context, Target], bool], description: str) -> Selection:
        """Only those for which `keep` holds."""

        def find(context: Context) -> Iterable[Target]:
            return (t for t in self.find(context) if keep(context, t))

        return replace(self, description=f"{self.description} {description}", find=find)

    def __str__(self) -> str:
        return self.description


def layers() -> Selection:
    """The decoder layers."""
    return Selection("the decoder layers", lambda c: _targets(c.stack.layers if c.stack else ()))


def first_layer() -> Selection:
    """The first decoder layer: where the residual stream begins."""
    return Selection("the first decoder layer", lambda c: _targets(c.stack.layers[:1] if c.stack else ()))


def layer_norms() -> Selection:
    """Norms that are children of a decoder layer: they read the stream, or write to it."""
    return Selection("norms of the decoder layers", lambda c: _targets(c.stack.layer_norms if c.stack else ()))


def branch_out_norms() -> Selection:
    """Norms of the decoder layers that a branch's output goes through before it joins the stream; may be none."""
    return Selection(
        "norms after the branches", lambda c: _targets(c.stack.branch_out_norms if c.stack else ()), may_be_empty=True
    )


def branches() -> Selection:
    """Attention, MLP and whatever else in a decoder layer has weights and is no norm."""
    return Selection("branches of the decoder layers", lambda c: _targets(c.stack.branches if c.stack else ()))


def final_norm() -> Selection:
    """The norm that ends the residual stream."""
    return Selection(
        "the final norm", lambda c: _targets((c.stack.final_norm,) if c.stack and c.stack.final_norm else ())
    )


def added_norms() -> Selection:
    """Norms that transformers' own code did not make and that feed the submodel in question."""

    def find(context: Context) -> Iterable[Target]:
        from hfpatch.model.norms import is_norm

        home = context.submodel.path if context.submodel else ""
        for path, module in context.added.items():
            holder = context.survey.holder(path) if is_norm(module) else None
            if is_norm(module) and home == (context.feeds if holder is None else holder.path):
                yield Target(path, module)

    return Selection("added norms", find)


def loose_norms() -> Selection:
    """Added norms that lie in no submodel."""

    def find(context: Context) -> Iterable[Target]:
        from hfpatch.model.norms import is_norm

        loose = ((p, m) for p, m in context.added.items() if is_norm(m) and context.survey.holder(p) is None)
        return _targets(loose)

    return Selection("added norms outside all submodels", find)


def submodel() -> Selection:
    """The submodel itself."""
    return Selection("the submodel", lambda c: _targets(((c.submodel.path, c.submodel.model),) if c.submodel else ()))


def root() -> Selection:
    """The object the caller passed."""
    return Selection("the model itself", lambda c: (Target("", c.survey.root),))


def _targets(places: Iterable[tuple[str, nn.Module]]) -> Iterable[Target]:
    return (Target(path, module) for path, module in places)
