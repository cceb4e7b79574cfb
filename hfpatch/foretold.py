"""What patches would do in another dtype, decided from a plan: about overflows that a healthy pass foretells, and
about every stack of layers in float16.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace

import torch

from hfpatch.errors import ConflictError
from hfpatch.inspecting.info import ModelInfo
from hfpatch.inspecting.inspect import facts_of, object_of
from hfpatch.model.roles import Stack
from hfpatch.model.survey import Survey
from hfpatch.model.walk import inside, starred
from hfpatch.patching import registry
from hfpatch.patching.apply import plan
from hfpatch.patching.decision import Decision
from hfpatch.patching.kinds.compute_in_float32 import ComputeInFloat32
from hfpatch.patching.unserved import Unserved, unserved
from hfpatch.tracing.headroom import Headroom, TensorHeadroom

SYMPTOM = "residual-overflow"
SERVED = "serves this stack"
UNNEEDED = "this stack needs no patch"
PLANNED = ("float16", "bfloat16")
"""Dtypes that a plan can be made for."""


def inspect(given: object, *, trust_remote_code: bool = False) -> ModelInfo:
    """Return the facts about a model. Nothing is changed, and no checkpoint weights are read.

    Whatever the dtype, they say what float16 would need: which stacks of layers a patch serves and which none does.
    That is decided from a plan for float16, as `hfpatch.plan(model, compute_dtype="float16")` decides it; whether a
    stream passes 65,504 is not measured.

    Args:
        given: A module, wrapped or not, or an object whose `.model` is one (a Trainer); or a hub name,
            a directory, the path of a config.json or a config, from which the model is built on meta.
        trust_remote_code: Run the checkpoint's own code if transformers has none for its `model_type`.

    Time from a config: one build on meta (0.2 s for 61 layers), a second one with few layers, and the plan. No weights
    are allocated. For a config without a shipped proof the plan runs a tiny model, once on a machine.

    Raises:
        ModelNotFoundError: There is no model of that name.
        InputError: Its config cannot be used.
        NotAModelError: `given` holds no torch module.
    """
    found, declared = object_of(given, trust_remote_code=trust_remote_code)
    info = facts_of(found, declared)
    return replace(info, float16=_needs(found, [stack.path for stack in info.stacks]))


def _needs(model: object, stacks: Sequence[str]) -> tuple[str, ...]:
    """Return what patches do about each stack of layers in float16, a sentence each, those that none serves first."""
    try:
        decisions = stream_decisions(model, "float16")
    except ConflictError as error:  # the model carries edits for another dtype
        return (f"not planned: {error}",)
    beside = any(d.code == "not-served" and d.submodel is not None for d in decisions)
    rows = {row.path: row for row in unserved(Survey(model), torch.float16)} if beside else {}
    every = {starred(path): path for path in stacks} | {path: path for path in rows}
    lines = [f"{path}: {_served(path, decisions, rows.get(place))}" for place, path in every.items()]
    return tuple(sorted(lines, key=lambda line: line.endswith(SERVED) + (f": {UNNEEDED} (" in line)))


def foretold(found: Headroom, model: object) -> tuple[str, ...]:
    """Return what patches do about the forward tensors that would overflow, a sentence for each stack.

    A stack of layers is served if the plan for that dtype edits it. The stream is what lies in its layers and not in
    their branches, and what a branch reads of it whose maps a patch computes in float32. Of a branch whose own output
    is too large it is said which patch a trace would try.

    Args:
        found: The headroom of a traced pass.
        model: The traced model.
    """
    over = [t for t in found.overflows if t.phase == "forward"]
    if not over or found.dtype not in PLANNED:
        return ()
    survey = Survey(model)
    try:
        decisions = stream_decisions(model, found.dtype)
        inner = _inner_decisions(model, found.dtype)
    except ConflictError as error:  # the model carries edits for another dtype
        return (f"not planned: {error}",)
    edited = {e.path: d.patch for d in decisions for e in d.edits}
    wide = {e.path for d in decisions for e in d.edits if isinstance(e.change, ComputeInFloat32)}
    stacks = [stack for each in survey.stacks.values() for stack in each]
    rows = {row.path: row for row in unserved(survey, getattr(torch, found.dtype))}
    limit = float(torch.finfo(getattr(torch, found.dtype)).max)
    served: list[str] = []

    def in_float32(tensor: TensorHeadroom) -> bool:
        reads = tensor.tensor.startswith("input")
        return tensor.module in wide or (reads and any(inside(path, tensor.module) for path in wide))

    left = [t for t in over if not in_float32(t)]
    for stack in stacks:
        stream = [t for t in over if _in_stream(t.module, stack) or (in_float32(t) and inside(t.module, stack.path))]
        if stream:
            layer = next((p for p, _ in stack.layers if inside(stream[0].module, p)), stream[0].module)
            words = _served(stack.path, decisions, rows.get(starred(stack.path)))
            served.append(f"{layer} reaches {stream[0].largest:,.0f} of {limit:,.0f}: {words}")
        left = [t for t in left if not _in_stream(t.module, stack)]
    said: list[str] = []
    kinds: dict[str, list[TensorHeadroom]] = {}
    for tensor in left:
        kinds.setdefault(starred(tensor.module), []).append(tensor)
    for same in list(kinds.values())[:3]:
        more = f" (and {len(same) - 1} more of its kind)" if len(same) > 1 else ""
        patch = edited.get(same[0].module) or _editing(same[0].module, inner)  # Bloom's attention makes the layer's sum
        words = f"a plan does not tell; a trace in {found.dtype} tries {patch}" if patch else "no patch serves it"
        said.append(f"{_reaches(same[0], limit)}{more}: {words}")
    if len(kinds) > 3:
        said.append(f"nor {sum(map(len, list(kinds.values())[3:]))} other tensors")
    return (*said, *served)


def stream_decisions(model: object, dtype: str) -> list[Decision]:
    """Return the decisions on the patches for the residual stream, as planned for a dtype."""
    return _planned(model, dtype, {n for n, entry in registry.entries().items() if SYMPTOM in entry.patch.answers})


def _inner_decisions(model: object, dtype: str) -> list[Decision]:
    """Return the decisions on the patches for values inside a branch, as planned for a dtype."""
    entries = registry.entries().items()
    return _planned(model, dtype, {n for n, entry in entries if "overflow" in entry.patch.answers_where_it_edits})


def _planned(model: object, dtype: str, patches: Set[str]) -> list[Decision]:
    return list(plan(model, exclude=registry.entries().keys() - patches, compute_dtype=dtype).decisions)


def _editing(module: str, decisions: Iterable[Decision]) -> str:
    """Return the id of the first patch that would widen a module or a part around it; empty if none would."""
    runs = (d for d in decisions if d.decided in ("applied", "opt-in"))
    return next((d.patch for d in runs if any(e.change.widens and inside(module, e.path) for e in d.edits)), "")


def serving(stack: str, decisions: Iterable[Decision]) -> Sequence[str]:
    """Return the ids of the patches whose planned edits lie in a stack of layers.

    Args:
        stack: Path of its list of layers.
        decisions: From `stream_decisions`.
    """
    runs = (d for d in decisions if d.decided in ("applied", "opt-in"))
    return sorted({d.patch for d in runs if any(inside(e.path, stack) for e in d.edits)})


def _served(stack: str, decisions: Sequence[Decision], row: Unserved | None) -> str:
    """Return what patches do about the stream of a stack of layers, in words that follow its path."""
    if patches := serving(stack, decisions):
        return f"{' and '.join(patches)} {SERVED}"
    about = [d for d in decisions if d.submodel is not None and inside(starred(stack), starred(d.submodel))]
    if done := next((d for d in about if d.already), None):
        return f"{done.patch} is applied and {SERVED}"
    if row is not None:
        return f"no patch serves this stack of {row.cls} ({row.reason})"
    refused = next((d.reason for d in about if d.decided == "refused"), "")
    if not refused and (harmless := next((d.reason for d in about if d.code == "harmless"), "")):
        return f"{UNNEEDED} ({harmless})"
    why = refused or next((d.reason for d in about if d.decided == "not needed"), "")
    return f"no patch serves this stack{f' ({why})' if why else ''}"


def _in_stream(module: str, stack: Stack) -> bool:
    layer = any(inside(module, path) for path, _ in stack.layers)
    return layer and not any(inside(module, path) for path, _ in stack.branches)


def _reaches(tensor: TensorHeadroom, limit: float) -> str:
    what = "" if tensor.tensor.startswith("output") else f"{tensor.tensor} of "
    return f"{what}{tensor.module or 'the model'} reaches {tensor.largest:,.0f} of {limit:,.0f}"
