"""Where: a value that picks modules. Counted, so that nothing matches in silence."""

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
    """The decoder layers; an encoder's too."""
    return _of_stacks("the decoder layers", lambda s: s.layers)


def first_layer() -> Selection:
    """The first decoder layer, with what a block or a user's module around it adds: where the stream begins."""
    return _of_stacks("the first decoder layer", lambda s: s.items[:1])


def layer_norms() -> Selection:
    """Norms that are children of a decoder layer: they read the stream, or write to it."""
    return _of_stacks("norms of the decoder layers", lambda s: s.layer_norms)


def branch_out_norms() -> Selection:
    """Norms of the decoder layers that a branch's output goes through before it joins the stream; may be none."""
    return _of_stacks("norms after the branches", lambda s: s.branch_out_norms, may_be_empty=True)


def torch_norms() -> Selection:
    """Norms on the stream that are torch's own: their kernels want input and weight in one dtype; may be none."""

    def norms(stack: Stack) -> Iterable[Place]:
        from hfpatch.model.norms import is_torch_norm

        on_stream = (*stack.layer_norms, *_final(stack))
        return (place for place in on_stream if is_torch_norm(place[1]))

    return _of_stacks("torch norms on the stream", norms, may_be_empty=True)


def branches() -> Selection:
    """Attention, MLP and whatever else in a decoder layer has weights and is no norm."""
    return _of_stacks("branches of the decoder layers", lambda s: s.branches)


def branch_maps(name: str) -> Selection:
    """Linear maps of this name in the branches, adapters and all; may be none."""

    def maps(stack: Stack) -> Iterable[Place]:
        for path, branch in stack.branches:
            for inner, module in branch.named_modules():
                if inner.rpartition(".")[2] == name and hasattr(module, "weight"):
                    yield f"{path}.{inner}", module

    return _of_stacks(f"linear maps {name}", maps, may_be_empty=True)


def maps_around() -> Selection:
    """Linear maps and torch norms that a user's modules around the decoder layers add; may be none."""
    return _around("maps and norms around the decoder layers", in_float32=True)


def parts_around() -> Selection:
    """What else with weights a user's modules around the decoder layers add; may be none."""
    return _around("other parts around the decoder layers", in_float32=False)


def _around(description: str, *, in_float32: bool) -> Selection:
    def parts(stack: Stack) -> Iterable[Place]:
        from hfpatch.patching.stand_ins.wrapped import computes_in_float32, wants_cast

        return (place for place in stack.around() if (computes_in_float32 if in_float32 else wants_cast)(place[1]))

    return _of_stacks(description, parts, may_be_empty=True)


def final_norm() -> Selection:
    """The norm that ends the residual stream."""
    return _of_stacks("the final norm", _final)


def _of_stacks(
    description: str, places: Callable[[Stack], Iterable[Place]], *, may_be_empty: bool = False
) -> Selection:
    def find(context: Context) -> Iterable[Target]:
        return _targets(place for stack in context.stacks for place in places(stack))

    return Selection(description, find, may_be_empty)


def _final(stack: Stack) -> tuple[Place, ...]:
    return () if stack.final_norm is None else (stack.final_norm,)


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
    """The object the caller passed; what torch.compile holds, where that is a wrapper of torch.compile."""

    def find(context: Context) -> Iterable[Target]:
        from hfpatch.model.wrapping import unwrapped

        return (Target(*unwrapped("", context.survey.root, ("torch.compile",))),)

    return Selection("the model itself", find)


def _targets(places: Iterable[tuple[str, nn.Module]]) -> Iterable[Target]:
    return (Target(path, module) for path, module in places)
