"""Selections: named rules that pick modules of a model by role."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hfpatch.patching.context import Context, Target

if TYPE_CHECKING:
    from torch import nn

    from hfpatch.model.roles import Place, Stack


@dataclass(frozen=True)
class Selection:
    """A named rule that picks modules.

    Args:
        description: Name of the rule, in plans and errors.
        find: The rule.
        may_be_empty: If False, the patch is refused for a model without such modules.
    """

    description: str
    find: Callable[[Context], Iterable[Target]]
    may_be_empty: bool = False

    def targets(self, context: Context) -> tuple[Target, ...]:
        """Return the modules, without duplicates, in the order in which the rule finds them."""
        return tuple({t.path: t for t in self.find(context)}.values())

    def count(self, context: Context) -> int:
        """Return the number of modules."""
        return len(self.targets(context))

    def where(self, keep: Callable[[Context, Target], bool], description: str) -> Selection:
        """Return a selection of those modules for which `keep` returns True.

        Args:
            keep: The condition.
            description: Added to the name of the rule.
        """

        def find(context: Context) -> Iterable[Target]:
            return (t for t in self.find(context) if keep(context, t))

        return replace(self, description=f"{self.description} {description}", find=find)

    def __str__(self) -> str:
        return self.description


def layers() -> Selection:
    """Select the decoder layers, and the layers of an encoder beside the decoder."""
    return _of_stacks("the decoder layers", lambda s: s.layers)


def first_layer() -> Selection:
    """Select the first item of the list of layers, where the stream begins: a layer, or a wrapper around it."""
    return _of_stacks("the first decoder layer", lambda s: s.items[:1])


def layer_norms() -> Selection:
    """Select the norms that are children of a decoder layer: they read the stream or write to it."""
    return _of_stacks("norms of the decoder layers", lambda s: s.layer_norms)


def branch_out_norms() -> Selection:
    """Select the norms between the output of a branch and the stream. May be empty."""
    return _of_stacks("norms after the branches", lambda s: s.branch_out_norms, may_be_empty=True)


def torch_norms() -> Selection:
    """Select torch's own norms on the stream: their kernels require input and weight in one dtype. May be empty."""

    def norms(stack: Stack) -> Iterable[Place]:
        from hfpatch.model.norms import is_torch_norm

        on_stream = (*stack.layer_norms, *_final(stack))
        return (place for place in on_stream if is_torch_norm(place[1]))

    return _of_stacks("torch norms on the stream", norms, may_be_empty=True)


def branches() -> Selection:
    """Select attention, MLP and every other part of a decoder layer that has weights and is not a norm."""
    return _of_stacks("branches of the decoder layers", lambda s: s.branches)


def readers() -> Selection:
    """Select the branches that read the output of a norm, and the parts of those that begin with a norm."""
    return _of_stacks("branches of the decoder layers", lambda s: s.readers, may_be_empty=True)


def casting_layers() -> Selection:
    """Select the layers whose own code casts the stream, as Mamba's do to the dtype of their norm. May be empty."""

    def layers(stack: Stack) -> Iterable[Place]:
        from hfpatch.model.reads import reading_of

        return (place for place in stack.layers if reading_of(place[1]).casts)

    return _of_stacks("layers that cast the stream", layers, may_be_empty=True)


def raw_maps() -> Selection:
    """Select the maps, convolutions and torch norms in the branches that read the stream itself. May be empty."""

    def maps(stack: Stack) -> Iterable[Place]:
        from hfpatch.model.edges import leaves

        return (place for raw in stack.raw_readers for place in leaves(*raw))

    return _of_stacks("maps that read the raw stream", maps, may_be_empty=True)


def stream_ends() -> Selection:
    """Select the maps and norms beyond a stack that no norm ends, where its stream may be read. May be empty."""

    def find(context: Context) -> Iterable[Target]:
        from hfpatch.model.edges import edges

        return _targets(edges(context.survey, context.submodel)) if context.submodel else ()

    return Selection("maps and norms where the stream leaves", find, may_be_empty=True)


def branch_maps(name: str) -> Selection:
    """Select the linear layers with this name in the branches, with adapters around them. May be empty."""

    def maps(stack: Stack) -> Iterable[Place]:
        for path, branch in stack.branches:
            for inner, module in branch.named_modules():
                if inner.rpartition(".")[2] == name and hasattr(module, "weight"):
                    yield f"{path}.{inner}", module

    return _of_stacks(f"linear maps {name}", maps, may_be_empty=True)


def maps_around() -> Selection:
    """Select linear layers and torch norms in a user's wrappers around the decoder layers. May be empty."""
    return _around("maps and norms around the decoder layers", in_float32=True)


def parts_around() -> Selection:
    """Select the other parts with weights in a user's wrappers around the decoder layers. May be empty."""
    return _around("other parts around the decoder layers", in_float32=False)


def _around(description: str, *, in_float32: bool) -> Selection:
    def parts(stack: Stack) -> Iterable[Place]:
        from hfpatch.patching.stand_ins.wrapped import computes_in_float32, wants_cast

        return (place for place in stack.around() if (computes_in_float32 if in_float32 else wants_cast)(place[1]))

    return _of_stacks(description, parts, may_be_empty=True)


def final_norm() -> Selection:
    """Select the norm at the end of the residual stream. A tower may have none."""
    return _of_stacks("the final norm", _final, may_be_empty=True)


def _of_stacks(
    description: str, places: Callable[[Stack], Iterable[Place]], *, may_be_empty: bool = False
) -> Selection:
    def find(context: Context) -> Iterable[Target]:
        return _targets(place for stack in context.stacks for place in places(stack))

    return Selection(description, find, may_be_empty)


def _final(stack: Stack) -> tuple[Place, ...]:
    return () if stack.final_norm is None else (stack.final_norm,)


def added_norms() -> Selection:
    """Select norms that transformers' own code did not make and that feed the submodel of the context."""

    def find(context: Context) -> Iterable[Target]:
        from hfpatch.model.norms import is_norm

        home = context.submodel.path if context.submodel else ""
        for path, module in context.added.items():
            holder = context.survey.holder(path) if is_norm(module) else None
            if is_norm(module) and home == (context.feeds if holder is None else holder.path):
                yield Target(path, module)

    return Selection("added norms", find)


def loose_norms() -> Selection:
    """Select added norms outside all submodels."""

    def find(context: Context) -> Iterable[Target]:
        from hfpatch.model.norms import is_norm

        loose = ((p, m) for p, m in context.added.items() if is_norm(m) and context.survey.holder(p) is None)
        return _targets(loose)

    return Selection("added norms outside all submodels", find)


def submodel() -> Selection:
    """Select the submodel itself."""
    return Selection("the submodel", lambda c: _targets(((c.submodel.path, c.submodel.model),) if c.submodel else ()))


def root() -> Selection:
    """Select the object that the caller passed, without a wrapper of torch.compile around it."""

    def find(context: Context) -> Iterable[Target]:
        from hfpatch.model.wrapping import unwrapped

        return (Target(*unwrapped("", context.survey.root, ("torch.compile",))),)

    return Selection("the model itself", find)


def _targets(places: Iterable[tuple[str, nn.Module]]) -> Iterable[Target]:
    return (Target(path, module) for path, module in places)
