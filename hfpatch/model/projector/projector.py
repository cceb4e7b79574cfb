"""Projectors: added linear layers that write into a language model's embedding space, found and measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from hfpatch.compat.modules import parameters
from hfpatch.errors import RefusedError
from hfpatch.model.embed import find_embedding
from hfpatch.model.named import paths as paths_named
from hfpatch.model.projector import evidence
from hfpatch.model.projector.noise import Run, rms, run_on_noise
from hfpatch.model.projector.untouched import default_init, untouched
from hfpatch.model.survey import Survey
from hfpatch.model.walk import Submodel, inside, without_copy

Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
HOLDS = frozenset({"base_layer", "original_module", "modules_to_save", "base_model", "model"})
"""Names under which PEFT's modules hold the model's own modules; everything else in them is an adapter."""

ROWS = 4096
"""Number of token ids whose embeddings are measured."""


@dataclass(frozen=True)
class Projector:
    """A projector and its last linear layer.

    Attributes:
        path: Path of the layer; of the first copy, if PEFT keeps several.
        layer: The layer that writes the embeddings.
        inside: The projector: the layer itself, or the module that runs earlier layers before it.
        copies: Every copy with its path, including the first.
        at: Path of `inside`.
        ends: Whether the projector's output is the layer's output; None if it cannot be run.
        evidence: Evidence that it is a projector (a name, or the module that may feed it); may be empty.
    """

    path: str
    layer: nn.Linear
    inside: nn.Module
    copies: tuple[tuple[str, nn.Linear], ...]
    at: str = ""
    ends: bool | None = True
    evidence: str = ""


def width(backbone: Submodel) -> int | None:
    """Return the width of the token embedding; None if the model has none."""
    table = _table(backbone)
    return None if table is None else int(table.weight.shape[1])


def embedding_rms(survey: Survey, backbone: Submodel) -> float | None:
    """Return the RMS of the token embeddings as the language model sees them: the output of its embedding module.

    Over all rows, or 4,096 drawn with a fixed seed. None if it has no embedding, or the weights are on meta or sharded.
    """
    embedding, table = find_embedding(backbone.model), _table(backbone)
    if embedding is None or table is None or table.weight.is_meta or hasattr(table.weight, "device_mesh"):
        return None

    def measure() -> float:
        rows = int(table.weight.shape[0])
        ids = torch.arange(rows, device="cpu")
        if rows > ROWS:
            ids = torch.randperm(rows, generator=torch.Generator().manual_seed(0), device="cpu")[:ROWS]
        with torch.no_grad():
            return rms(embedding(ids.to(table.weight.device)))

    return survey.once(("embedding", backbone.path), measure)


def proved(survey: Survey, projector: Projector) -> bool:
    """True if every copy that PEFT keeps of the layer provably holds torch's initial values, and one is trainable."""

    def judge() -> bool:
        layers = [layer for _, layer in projector.copies]
        return any(layer.weight.requires_grad for layer in layers) and (
            untouched(layers[0]) if len(layers) == 1 else all(default_init(layer) for layer in layers)
        )

    return survey.once(("proved", projector.path), judge)


def input_rms(survey: Survey, projector: Projector, outer: float) -> float:
    """Return the RMS of the layer's input if the projector's input has RMS `outer`.

    A copy of the projector is run on noise; if that fails, the result is `outer`.
    """
    if projector.inside is projector.layer:
        return outer
    run = survey.once(("probe", id(projector.inside), outer), lambda: run_on_noise(projector.inside, outer))
    return run.reads.get(_place(projector.inside, projector.layer)) or outer


def output_rms(survey: Survey, projector: Projector, outer: float) -> float:
    """Return the RMS of the layer's present output, without the bias, if the projector's input has RMS `outer`."""
    weight = projector.layer.weight.detach().float()
    return input_rms(survey, projector, outer) * float(weight.norm()) / math.sqrt(projector.layer.out_features)


def choose(
    survey: Survey, backbone: Submodel, modules: Iterable[str], other: Iterable[str] = ()
) -> tuple[Projector, ...]:
    """Return the one projector that feeds a language model, or the projectors at the given paths; empty if none.

    A projector with evidence is preferred; see `Projector.evidence`. Without one, a layer that resembles a projector
    and is unsuitable is a refusal; otherwise a layer without evidence is taken.

    Args:
        survey: Survey of the object.
        backbone: The language model.
        modules: Paths of the projectors; empty to search for one.
        other: Paths of modules that are not projectors.

    Raises:
        RefusedError: Several were found and none is named, or one is unsuitable.
    """
    if modules:
        named_ones = survey.once(("named", *modules), lambda: tuple(_named(survey, backbone, modules)))
        _check_writable(survey, named_ones)
        return named_ones
    fit = [p for p in _candidates(survey, backbone, other) if p.ends is not False]
    strong = [p for p in fit if p.evidence]
    misses = near_misses(survey, backbone, other)
    reasons = [text for text, has_evidence in misses if has_evidence or not fit]
    if not strong and reasons:
        raise RefusedError(reasons[0])
    chosen = tuple(strong or fit)
    if len(chosen) > 1:
        paths = [p.path for p in chosen]
        raise RefusedError(
            f"several layers may be the projector: {', '.join(paths)}; "
            f'name one or more with options={{"projection-init": {{"modules": {paths[:1]!r}}}}}'
        )
    _check_writable(survey, chosen)
    return chosen


def near_misses(survey: Survey, backbone: Submodel, other: Iterable[str] = ()) -> list[tuple[str, bool]]:
    """Return a sentence on each layer that resembles a projector and is unsuitable, and whether it has evidence."""
    out = [
        (_not_the_end(p.at, p.path), True)
        for p in _candidates(survey, backbone, other)
        if p.ends is False and p.evidence
    ]
    for path, module in unsuitable_layers(survey, backbone):
        if not _within(path, other):
            at, inside = _inside(survey, path)
            out.append(
                (_why_unsuitable(backbone, path, module), bool(_evidence(survey, backbone, path, at, inside, None)))
            )
    return out


def _candidates(survey: Survey, backbone: Submodel, other: Iterable[str]) -> list[Projector]:
    every = survey.once(("found", backbone.path), lambda: found(survey, backbone))
    return [p for p in every if not _within(p.path, other)]


def _within(path: str, others: Iterable[str]) -> bool:
    return any(inside(path, other) for other in others)


def _not_the_end(at: str, path: str) -> str:
    return (
        f"the output of {at} is not that of {path}, its last linear layer: another operation follows, so the weight "
        f"does not set the size of the outputs; to re-draw it anyway, name {path} itself in the option modules"
    )


def _check_writable(survey: Survey, chosen: Iterable[Projector]) -> None:
    for path, layer in (place for projector in chosen for place in projector.copies):
        weight = parameters(layer).get("weight")
        if weight is None:
            raise RefusedError(
                f"the weight of {path} is computed from other parameters: re-draw it before it is parametrised"
            )
        if weight.is_meta:
            raise RefusedError(
                f"the weights of {path} are on meta (not loaded, or offloaded): plan again when they are in memory"
            )
        if hasattr(weight, "device_mesh"):
            raise RefusedError(f"the weight of {path} is sharded: re-draw it before the model is sharded")
        if not weight.is_floating_point():
            raise RefusedError(f"the weight of {path} is quantised ({weight.dtype}): re-draw it before quantising")
        for other, module in survey.modules.items():
            if module is not layer and any(p is weight for p in parameters(module).values()):
                raise RefusedError(f"the weight of {path} is also that of {other}: untie them first")


def _named(survey: Survey, backbone: Submodel, modules: Iterable[str]) -> Iterator[Projector]:
    hits = [p for p in paths_named(survey, tuple(modules), "projection-init: modules") if p]
    for path in hits:
        if any(path.startswith(f"{other}.") for other in hits):
            continue
        if _is_adapter(survey, path):
            raise RefusedError(f"{path} is part of an adapter, which PEFT initialises: name another layer")
        projector = named(survey, path)
        if projector is None:
            raise RefusedError(_why_unsuitable(backbone, path, survey.modules[path]))
        if projector.layer.out_features != width(backbone):
            raise RefusedError(_why_unsuitable(backbone, projector.path, projector.layer))
        if projector.ends is False:
            raise RefusedError(_not_the_end(path, projector.path))
        yield projector


def _why_unsuitable(backbone: Submodel, path: str, module: nn.Module) -> str:
    if not isinstance(module, nn.Linear):
        return f"{path} is a {type(module).__name__} and holds no linear layer: only nn.Linear can be re-drawn"
    size = width(backbone)
    return (
        f"{path} has {module.out_features} output features, the token embeddings of {backbone.place} have {size}: "
        f"set its out_features to {size}"
    )


def found(survey: Survey, backbone: Submodel) -> tuple[Projector, ...]:
    """Return the projectors that may feed a language model, in the model's order, each with its last layer called.

    PEFT adapters and layers in a list of modules do not count. A layer whose input has the embedding's width may be
    a head on the language model's outputs, and counts only with an encoder of that width, or with evidence if it is
    part of a larger module.
    """
    size = width(backbone)
    kept: dict[str, list[tuple[str, nn.Linear, nn.Module]]] = {}
    for path, layer in _layers(survey, backbone):
        if not isinstance(layer, nn.Linear) or layer.out_features != size or _in_list(survey, path):
            continue
        at, inside = _inside(survey, path)
        beside = [getattr(s.model.config, "hidden_size", None) for s in evidence.encoders(survey, backbone)]
        may_be_head = _reads(survey, at, inside) == size and size not in beside
        if may_be_head and (inside is layer or not _evidence(survey, backbone, path, at, inside, size)):
            continue
        if path in _last(survey, at, inside):
            kept.setdefault(without_copy(path), []).append((path, layer, inside))
    return tuple(_with_evidence(survey, backbone, _projector(each)) for each in kept.values())


def _with_evidence(survey: Survey, backbone: Submodel, projector: Projector) -> Projector:
    """Return the projector with its evidence, and whether its layer's output is the module's."""
    path, inside = projector.path, projector.inside
    at = _inside(survey, path)[0]
    found_evidence = _evidence(survey, backbone, path, at, inside, width(backbone))
    ends = True if inside is projector.layer else _run(survey, at, inside).ends
    return replace(projector, at=at, ends=ends, evidence=found_evidence)


def _evidence(survey: Survey, backbone: Submodel, path: str, at: str, inside: nn.Module, size: int | None) -> str:
    whole, outer = without_copy(path).split("."), at.split(".")
    first = min(len(outer), len(whole)) - 1
    if first and isinstance(survey.modules.get(".".join(whole[:first])), (nn.ModuleList, nn.ModuleDict)):
        first -= 1
    names = [*whole[first:], evidence.class_name(inside)]
    if evidence.names_something_else(names):
        return ""
    reads = _reads(survey, at, inside)
    return evidence.by_name(names) or (evidence.by_input(survey, backbone, at, reads, size) if reads else "")


def _reads(survey: Survey, at: str, inside: nn.Module) -> int:
    """Return the input width of a projector: of the linear layer called first, or else defined first; 0 without one."""
    linears = {p: m for p, m in survey.below(at) if isinstance(m, nn.Linear) and not _is_adapter(survey, p)}
    called = [] if inside in linears.values() else [f"{at}.{name}" for name in _run(survey, at, inside).reads]
    return next((linears[p].in_features for p in (*called, *linears) if p in linears), 0)


def named(survey: Survey, path: str) -> Projector | None:
    """Return the projector that the module at a path is or holds; None if it holds no linear layer."""
    module = survey.modules[path]
    linears = [(p, m) for p, m in survey.below(path) if isinstance(m, nn.Linear) and not _is_adapter(survey, p)]
    if isinstance(module, nn.Linear):
        inside = module if _is_adapter(survey, path) else _inside(survey, path)[1]
        return Projector(path, module, inside, ((path, module),))
    if not linears:
        return None
    peft = _is_peft(module)
    last = linears[-1][0] if peft else _last(survey, path, module)[-1]
    own = [(p, m) for p, m in linears if without_copy(p) == without_copy(last)]
    ends = True if peft or isinstance(module, (nn.ModuleList, nn.ModuleDict)) else _run(survey, path, module).ends
    return replace(_projector([(p, m, m if peft else module) for p, m in own]), at=path, ends=ends)


def unsuitable_layers(survey: Survey, backbone: Submodel) -> list[tuple[str, nn.Module]]:
    """Return added layers that resemble a projector and are unsuitable, with their paths.

    These are convolutions with the embedding's width as output, and last linear layers with another output width.
    """
    size, out = width(backbone), list[tuple[str, nn.Module]]()
    for path, module in _layers(survey, backbone):
        if isinstance(module, CONVOLUTIONS):
            unsuitable = module.out_channels == size
        else:
            at, inside = _inside(survey, path)
            first = next(m for _, m in survey.below(at) if isinstance(m, nn.Linear))
            is_head = first.in_features == size
            unsuitable = module.out_features != size and not is_head and path == _last(survey, at, inside)[-1]
        if unsuitable and not _in_list(survey, path):
            out.append((path, module))
    return out


def _layers(survey: Survey, backbone: Submodel) -> Iterator[tuple[str, Layer]]:
    """Yield the added linear layers and convolutions that may feed the backbone."""
    stacks = survey.stacks.get(backbone.path, ())
    for path, module in survey.added.items():
        if not isinstance(module, (nn.Linear, *CONVOLUTIONS)) or _is_adapter(survey, path):
            continue
        if any(inside(path, stack.path) for stack in stacks):
            continue
        holder = survey.holder(path)
        if holder is None or inside(backbone.path, holder.path):
            yield path, module


def _projector(copies: Iterable[tuple[str, nn.Linear, nn.Module]]) -> Projector:
    each = list(copies)
    path, layer, inside = each[0]
    return Projector(path, layer, inside, tuple((p, m) for p, m, _ in each))


def _inside(survey: Survey, path: str) -> tuple[str, nn.Module]:
    """Return the outermost module around a layer that can be a projector: no submodel in it, and not a plain list."""
    parts, best = path.split("."), path
    for end in range(len(parts) - 1, 0, -1):
        at = ".".join(parts[:end])
        module = survey.modules[at]
        if _is_peft(module) or any(inside(s.path, at) for s in survey.submodels):
            break
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            best = at
    return best, survey.modules[best]


def _last(survey: Survey, at: str, inside: nn.Module) -> list[str]:
    """Return the path of a projector's linear layer that is called last; of all of them if it cannot be run."""
    paths = [p for p, m in survey.below(at) if isinstance(m, nn.Linear) and not _is_adapter(survey, p)]
    if len(paths) < 2:
        return paths
    called = [f"{at}.{name}" for name in _run(survey, at, inside).reads]
    return called[-1:] or paths


def _run(survey: Survey, at: str, inside: nn.Module) -> Run:
    return survey.once(("probe", id(inside), 1.0), lambda: run_on_noise(inside, 1.0))


def _place(outer: nn.Module, inner: nn.Module) -> str:
    return next((name for name, module in outer.named_modules() if module is inner), "")


def _in_list(survey: Survey, path: str) -> bool:
    """True if a layer lies in a list of blocks."""
    parts = path.split(".")
    return any(isinstance(survey.modules[".".join(parts[:end])], nn.ModuleList) for end in range(1, len(parts)))


def _is_adapter(survey: Survey, path: str) -> bool:
    parts = path.split(".")
    return any(_is_peft(survey.modules[".".join(parts[:end])]) and parts[end] not in HOLDS for end in range(len(parts)))


def _is_peft(module: nn.Module) -> bool:
    return type(module).__module__.startswith("peft.")


def _table(backbone: Submodel) -> nn.Embedding | None:
    embedding = find_embedding(backbone.model)
    tables = [] if embedding is None else [m for m in embedding.modules() if isinstance(m, nn.Embedding)]
    return tables[0] if tables and tables[0].weight.dim() == 2 else None
