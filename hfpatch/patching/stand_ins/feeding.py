"""Finds the added norms that feed a language model: by a run, else by structure, else they count as unknown.

A stand-in of the module that holds norm and language model runs on made-up inputs until the language model is called.
The inputs of that call are followed back through autograd's graph: a norm feeds the language model if only linear
layers and elementwise functions come after it.
"""

from __future__ import annotations

import inspect
import itertools
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hfpatch.compat import hooks
from hfpatch.model.norms import is_norm, untrained
from hfpatch.model.projector.projector import found, width
from hfpatch.model.survey import Survey
from hfpatch.model.walk import Submodel, inside, starred, without_copy
from hfpatch.model.wrapping import ON_LAYERS, unwrap
from hfpatch.patching.stand_ins.stand_in import StandIns

ATTEMPTS = 48
CONTAINERS = (nn.ModuleList, nn.ModuleDict)
LISTS = (nn.ModuleList, nn.Sequential)
ENCODERS = (
    nn.Transformer, nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
)  # fmt: skip
MIXERS = (nn.MultiheadAttention, nn.RNNBase)

PASSING = re.compile(
    r"(Addmm|Mm|Linear|T|View|UnsafeView|Reshape\w*|Transpose|Permute|Expand|Clone|Alias|Contiguous|ToCopy|Cat|Stack|"
    r"Slice|Select|Unsqueeze|Squeeze|Index|Narrow|Split\w*|Unbind|Unfold|AsStrided|Repeat|Add|Sub|Rsub|Mul|Div|Neg|Pow|"
    r"Gelu|Relu|Silu|Tanh|Sigmoid|LeakyRelu|Elu|Softplus|Hardtanh|Hardswish|Mish|NativeDropout|MaskedFill|Where|Clamp|"
    r"ConstantPadNd|Convolution|AvgPool\w*|Mean|Sum|CopySlices|CopyBackwards)(Backward\d*)?"
)
"""Autograd's names of linear layers, elementwise functions and changes of shape."""


class _Reached(Exception):  # noqa: N818 - no fault: the language model was called
    pass


@dataclass
class _Seen:
    """The results of runs, by path without PEFT's copies."""

    feeds: set[str] = field(default_factory=set[str])
    """Norms that feed the language model."""
    before: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """Norms that feed another norm in the same way, by the path of the other."""
    other: set[str] = field(default_factory=set[str])
    """Norms that were called before the language model and do not feed it."""


def left_alone(survey: Survey, backbone: Submodel) -> Mapping[str, str]:
    """Return the added norms that do not feed a language model, or may not, by path with the reason."""

    def judge() -> dict[str, str]:
        norms = [path for path, module in survey.added.items() if is_norm(module)]
        return {path: why for path in norms if (why := _why_not(survey, backbone, path))}

    return survey.once(("left alone", backbone.path), judge)


def _why_not(survey: Survey, backbone: Submodel, path: str) -> str:
    home = _home(survey, backbone, path)
    if encoder := _layer_of_encoder(survey, home, path):
        return f"part of {encoder}"
    encoder = _holds_encoder(survey, home, path)
    if survey.holder(path) is not None:
        return f"may be {encoder}'s own" if encoder else ""
    seen, name = _seen(survey, backbone, home), without_copy(path)
    if name in _closed(survey, seen):
        owner = encoder or _apart(survey, backbone, name)
        return f"may be {owner}'s own" if owner and not untrained(survey.modules[path]) else ""
    if name in seen.other:
        return "not only linear layers and elementwise functions come between it and the language model"
    if not encoder and _plain(survey, backbone, home, path):
        return ""
    return f"may be {encoder}'s own" if encoder else "it is unknown what it feeds"


def _home(survey: Survey, backbone: Submodel, path: str) -> str:
    """Return the path of the innermost module that holds a norm and the language model."""
    path = path.rpartition(".")[0]
    while path and not inside(backbone.path, path):
        path = path.rpartition(".")[0]
    return path


def _between(survey: Survey, home: str, path: str) -> Iterator[str]:
    """Yield the paths of the modules around a norm and below `home` that are not a transformers model's own."""
    stock = survey.holder(path) is not None
    path = path.rpartition(".")[0]
    while path and path != home:
        if not stock or (path in survey.added and not _is_layer(survey, path)):
            yield path
        path = path.rpartition(".")[0]


def _is_layer(survey: Survey, path: str) -> bool:
    """True for an item of a transformers model's list of layers: a layer, or a user's wrapper around one."""
    outer = path.rpartition(".")[0]
    return outer not in survey.added and isinstance(survey.modules[outer], nn.ModuleList)


def _layer_of_encoder(survey: Survey, home: str, path: str) -> str:
    """Return the path of the encoder that certainly contains a norm: one of torch's, or a list of similar blocks."""
    found = ""
    for outer in _between(survey, home, path):
        module = survey.modules[outer]
        if isinstance(module, ENCODERS) or (isinstance(module, LISTS) and _alike(module)):
            found = outer
    return found


def _alike(module: nn.Module) -> bool:
    """True if a list has several items of one class, each with a norm and something else with weights."""
    items = list(module.children())
    return len(items) > 1 and len({type(item) for item in items}) == 1 and all(_is_block(item) for item in items)


def _is_block(item: nn.Module) -> bool:
    weighty = [m for m in item.modules() if next(m.parameters(recurse=False), None) is not None]
    return any(map(is_norm, weighty)) and not all(map(is_norm, weighty))


def _holds_encoder(survey: Survey, home: str, path: str) -> str:
    """Return the path of a module around a norm that also holds attention or an encoder; empty if there is none."""
    for outer in _between(survey, home, path):
        for _, module in survey.below(outer):
            attends = isinstance(module, MIXERS) or re.search(r"att(entio)?n", type(module).__name__, re.IGNORECASE)
            if attends or isinstance(module, ENCODERS) or (isinstance(module, LISTS) and _alike(module)):
                return outer
    return ""


def _plain(survey: Survey, backbone: Submodel, home: str, path: str) -> bool:
    """True if a norm that was not run feeds the language model by structure: in a projector, or alone before it."""
    if all(isinstance(survey.modules[p], CONTAINERS) for p in (home, *_between(survey, home, path))):
        return True
    name, parent = without_copy(path), without_copy(path).rpartition(".")[0]
    projectors = survey.once(("found", backbone.path), lambda: found(survey, backbone))
    if any(p.inside is not p.layer and inside(path, p.at) for p in projectors):
        return True
    mine = _features(survey.modules[path])
    alone = {
        without_copy(p) for p, m in survey.added.items()
        if is_norm(m) and _features(m) == mine and without_copy(p).rpartition(".")[0] == parent
    } == {name}  # fmt: skip
    reads = {p.layer.in_features for p in projectors if without_copy(p.path).rpartition(".")[0] == parent}
    return (alone or untrained(survey.modules[path])) and mine in reads and mine != width(backbone)


def _features(norm: nn.Module) -> int:
    return next((int(p.shape[-1]) for p in norm.parameters(recurse=False)), 0)


def _closed(survey: Survey, seen: _Seen) -> set[str]:
    """Return the norms that feed the language model, also through a norm beside them or further inside."""
    feeds = set(seen.feeds)
    while more := {a for b in feeds for a in seen.before.get(b, ()) if inside(b, _owner(survey, a))} - feeds:
        feeds |= more
    return feeds


def _apart(survey: Survey, backbone: Submodel, name: str) -> str:
    """Return the path of a norm's owner if no projector is inside it, as for an encoder's last norm; else empty."""
    projectors = survey.once(("found", backbone.path), lambda: found(survey, backbone))
    owner = _owner(survey, name)
    return owner if projectors and not any(inside(p.path, owner) for p in projectors) else ""


def _owner(survey: Survey, name: str) -> str:
    """Return the path of the module whose forward calls a norm: the nearest that is not a plain container."""
    outer = name.rpartition(".")[0]
    while outer and isinstance(survey.modules.get(outer), (nn.Sequential, *CONTAINERS)):
        outer = outer.rpartition(".")[0]
    return outer


def _seen(survey: Survey, backbone: Submodel, home: str) -> _Seen:
    return survey.once(("feeding", backbone.path, home), lambda: _run(survey, backbone, home))


def _run(survey: Survey, backbone: Submodel, home: str) -> _Seen:
    """Run a stand-in of a module on made-up inputs of several shapes, and find the norms that feed the model."""
    seen = _Seen()
    holder, stacks = survey.modules[home], survey.stacks.get(backbone.path, ())
    if not stacks or isinstance(holder, (nn.Sequential, *CONTAINERS)):
        return seen
    if any(p.is_meta or hasattr(p, "device_mesh") for p in holder.parameters()):
        return seen
    made = StandIns()
    made.modules[id(backbone.model)] = backbone.model
    marks: dict[int, tuple[torch.Tensor, str]] = {}

    def mark(path: str) -> Any:
        def after(_module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
            if not isinstance(out, torch.Tensor):
                return None
            seen.before.setdefault(path, set()).update(_sources(args[0] if args else None, marks))
            leaf = out.detach().requires_grad_()
            marks[id(leaf)] = leaf, path
            return leaf.clone()

        return after

    def reached(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            seen.feeds.update(_sources(value, marks))
        seen.other.update(path for _, path in marks.values())
        raise _Reached

    # PEFT calls a model's forward without its hooks, so the inner model and its first layer are watched too
    ways = (backbone.model, backbone.model.base_model, unwrap(stacks[-1].layers[0][1], ON_LAYERS))
    handles = [hooks.before(module, reached, first=True, with_kwargs=True) for module in ways]
    # Exception, twice: a user's forward on inputs it was not written for may raise anything
    try:
        copied = made.of(holder)
        for old, new in [
            (survey.path(m), made.modules[id(m)]) for m in survey.modules.values() if id(m) in made.modules
        ]:
            if old in survey.added and is_norm(survey.modules[old]):
                hooks.after(new, mark(without_copy(old)))
        for tensor in {id(t): t for t in made.tensors.values()}.values():
            if tensor.is_floating_point() and not any(tensor is own for own in holder.parameters()):
                tensor.data = tensor.data.float()
        with torch.enable_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            device = next(backbone.model.parameters()).device
            for words in itertools.islice(_inputs(survey, holder), ATTEMPTS):
                marks.clear()
                try:
                    copied(**{name: value.to(device) for name, value in words.items()})
                except Exception:  # noqa: BLE001, S112
                    continue
    except Exception:  # noqa: BLE001
        return seen
    finally:
        for handle in handles:
            handle.remove()
    seen.other -= seen.feeds
    return seen


def _sources(value: Any, marks: Mapping[int, tuple[torch.Tensor, str]]) -> set[str]:
    """Return the marked norms that feed a tensor through linear layers and elementwise functions only."""
    out: set[str] = set()
    start = getattr(value, "grad_fn", None)
    stack, known = [start] if start is not None else [], set[Any]()
    while stack:
        node = stack.pop()
        if node in known:
            continue
        known.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) in marks:
            out.add(marks[id(leaf)][1])
        elif PASSING.fullmatch(node.name().removeprefix("torch::autograd::")):
            stack.extend(after for after, _ in node.next_functions if after is not None)
    return out


def _inputs(survey: Survey, holder: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield made-up arguments for a forward: ids, masks, and features of the widths that added modules read."""
    try:
        parameters = inspect.signature(holder.forward).parameters.values()
    except (TypeError, ValueError):
        return
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [p.name for p in named if p.default in (p.empty, None)]
    features = [n for n in names if not re.search(r"ids|tokens|mask|labels|return|use_|output", n)]
    widths = list(dict.fromkeys(_widths(survey)))
    must = {p.name for p in named if p.default is p.empty}
    fixed = {n: _made_up(n, 0) for n in names if n not in features and (n in must or n.endswith("ids"))}
    rounds = [features, [n for n in features if n in must], *([n] for n in features)]
    for chosen in [list(r) for r in dict.fromkeys(map(tuple, rounds))]:
        for sizes in itertools.product(widths, repeat=min(len(chosen), 2)):
            padded = [*sizes, *[sizes[-1]] * (len(chosen) - len(sizes))] if sizes else []
            yield {**fixed, **{n: _made_up(n, w) for n, w in zip(chosen, padded, strict=True)}}


def _made_up(name: str, size: int) -> torch.Tensor:
    if size:
        draw = torch.Generator().manual_seed(0)
        return torch.randn(1, 5, size, generator=draw, device="cpu", dtype=torch.float32)
    return torch.ones(1, 5, dtype=torch.long, device="cpu")


def _widths(survey: Survey) -> Iterator[int]:
    for module in survey.added.values():
        if is_norm(module):
            yield _features(module)
        elif isinstance(module, nn.Linear):
            yield module.in_features
        elif isinstance(module, nn.MultiheadAttention):
            yield module.embed_dim


def said(survey: Survey, reasons: Mapping[str, str]) -> str:
    """Return the norms that were left alone, with reasons, as text; similar ones once. Empty if there are none."""
    groups = dict.fromkeys((starred(survey.stock_path(without_copy(path))), why) for path, why in reasons.items())
    return "; ".join(f"{path} ({why})" for path, why in list(groups)[:4]) + (" ..." if len(groups) > 4 else "")
