"""Finds modules that multiply by 1 + tanh: a stand-in for each candidate runs alone, on made-up inputs.

The model, its parameters, buffers and hooks, and the random state stay as they are. One run shows whether there is a
1 + tanh. More runs (in training mode, with other lengths, with and without each optional argument) show whether it is
the only one, and whether the argument of tanh is always 0 because of parameters that are all zero.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hfpatch.model.survey import Survey
from hfpatch.model.walk import is_stock
from hfpatch.patching.stand_ins.stand_in import StandIns
from hfpatch.patching.tanh.in_code import calls_functional_tanh, may_add_one, mention
from hfpatch.patching.tanh.recording import OnePlusTanh, OnePlusTanhRecorder, ZeroParameters

ATTEMPTS = 96
LENGTHS = (1, 5, 17)
MOST_OPTIONAL = 8
"""Modules with more optional arguments are never reported as untrained."""

Shapes = dict[str, Any]
"""Shape by argument; "*0" is a positional argument, and a bool is the value itself."""

TOOLS = ("peft.", "accelerate.", "torch.")


@dataclass(frozen=True)
class Found:
    """The result of a probe of one module.

    Attributes:
        path: Path of the module.
        module: The module.
        count: Number of products with 1 + tanh in one run; 0 if there was none, or if it could not be run.
        sums: Number of additions of 1 to a tanh in one run, whether multiplied or not.
        untrained: True if the argument of every such tanh was 0 in every run because of parameters that are all zero.
        given: True if the module returns 1 + tanh and no product with it was seen.
        failure: Why it could not be run; empty if it could.
        spoiled: Why a 1 + tanh in it is not a modulation; empty if all are.
        obstacle: Why its 1 + tanh cannot be replaced; empty if it can.
    """

    path: str
    module: nn.Module
    count: int = 0
    sums: int = 0
    untrained: bool = False
    given: bool = False
    failure: str = ""
    spoiled: str = ""
    obstacle: str = ""

    @property
    def functional(self) -> bool:
        """True if the module calls `torch.nn.functional.tanh`."""
        return calls_functional_tanh(self.module)


@dataclass
class Runs:
    """The runs of one stand-in.

    Attributes:
        found: The 1 + tanh of each run.
        complete: True if everything that can differ between calls was tried.
        failure: Why it could not be run; empty if it could.
        shapes: Shapes of inputs with which it ran.
    """

    found: list[list[OnePlusTanh]] = field(default_factory=list[list[OnePlusTanh]])
    complete: bool = False
    failure: str = ""
    shapes: Shapes | None = None


def modulations(survey: Survey, named: tuple[str, ...] = ()) -> Mapping[str, Found]:
    """Return probe results by path: of the user's modules whose code may add 1 to a tanh, and of those named."""

    def find() -> dict[str, Found]:
        own = {p: m for p, m in survey.modules.items() if p in survey.added or _users(m)}
        # PEFT's `original_module` runs only with adapters disabled, and must stay stock then
        places = {p: m for p, m in own.items() if "original_module" not in p.split(".") and may_add_one(m)}
        places.update({path: survey.modules[path] for path in named})
        return {
            found.path: found
            for found in probe(places.items())
            # a module around the model may fail to run for many reasons: report it only if its own code has a tanh
            if not found.failure or found.path in named or found.path in survey.added or mention(found.module).tanh
        }

    return survey.once(("modulations", named), find)


def _users(module: nn.Module) -> bool:
    """True if a module's class is neither transformers' nor a tool's: a user's class, or a subclass of a model."""
    return not is_stock(type(module)) and not f"{type(module).__module__}.".startswith(TOOLS)


def probe(places: Iterable[tuple[str, nn.Module]]) -> list[Found]:
    """Run each module alone and return the results. A module that runs inside another one counts as run.

    If a module cannot be run, others of the same class and shapes are not tried.

    Args:
        places: Modules with their paths.
    """
    wanted = dict(places)
    own: dict[str, Runs] = {}
    by_module: dict[int, list[list[OnePlusTanh]]] = {id(m): [] for m in wanted.values()}
    alike: dict[Any, Runs] = {}
    for path, module in wanted.items():
        key = type(module), tuple((n, tuple(p.shape)) for n, p in module.named_parameters())
        before = alike.get(key)
        if before is not None and before.failure:
            own[path] = before
            continue
        made = StandIns()
        own[path] = alike[key] = _watch(made, module, before.shapes if before else None)
        back = {id(new): old for old, new in made.modules.items()}
        for run in own[path].found:
            by_owner: dict[int, list[OnePlusTanh]] = {}
            for seen in run:
                by_owner.setdefault(back.get(seen.owner, 0), []).append(seen)
            for owner, mine in by_owner.items():
                by_module.get(owner, []).append(mine)
    return [_found(path, module, own[path], by_module[id(module)]) for path, module in wanted.items()]


def _found(path: str, module: nn.Module, own: Runs, runs: list[list[OnePlusTanh]]) -> Found:
    if not runs:
        return Found(path, module, failure=own.failure)
    every = [seen for run in runs for seen in run]
    count = max(sum(s.multiplied for s in run) for run in runs)
    spoiled = next((s.spoiled for s in every if s.spoiled), "")
    if not spoiled and any(0 < sum(s.multiplied for s in run) < len(run) for run in runs):
        spoiled = "another 1 + tanh there is no factor of a product"
    return Found(
        path,
        module,
        count,
        sums=max(len(run) for run in runs),
        untrained=own.complete and all(s.zero for s in every),
        given=not count and any(s.given for s in every),
        spoiled=spoiled,
        obstacle=next((s.obstacle for s in every if s.obstacle), ""),
    )


class _Runner:
    """Runs the stand-in of one module on made-up inputs."""

    def __init__(self, made: StandIns, module: nn.Module) -> None:
        first = next((p for p in module.parameters() if p.is_floating_point()), None)
        self.dtype = torch.get_default_dtype() if first is None else first.dtype
        self.device = torch.device("cpu") if first is None else first.device
        sizes = [n for m in module.modules() if isinstance(n := m.__dict__.get("num_embeddings"), int)]
        self.ids = min(sizes, default=2)
        self.copy = made.of(module)
        self.zeros = ZeroParameters()
        self.seed = 0

    def run(self, shapes: Shapes) -> list[OnePlusTanh]:
        """Return the 1 + tanh of one run. Raises the errors of the forward."""
        self.seed += 1
        inputs = {name: self._made_up(name, shape) for name, shape in shapes.items()}
        recorder = OnePlusTanhRecorder(self.zeros)
        with recorder:
            by_position = [v for k, v in inputs.items() if k.startswith("*")]
            out = self.copy(*by_position, **{k: v for k, v in inputs.items() if not k.startswith("*")})
        recorder.given(out)
        return recorder.noted

    def _made_up(self, name: str, shape: Any) -> Any:
        if isinstance(shape, bool):
            return shape
        generator = torch.Generator().manual_seed(self.seed)
        if name.endswith("ids"):
            return torch.randint(max(self.ids, 1), shape[:2], generator=generator, device="cpu").to(self.device)
        return torch.randn(shape, generator=generator, device="cpu").to(dtype=self.dtype, device=self.device)


def _watch(made: StandIns, module: nn.Module, like: Shapes | None) -> Runs:
    """Run a stand-in with other inputs until a run has a 1 + tanh, and then the variants of that run.

    Args:
        made: Makes the stand-in.
        module: The module.
        like: Shapes to try first.
    """
    runs = Runs(failure="its forward takes arguments that cannot be made up")
    ran = False
    devices = {p.device for p in module.parameters()}
    forked = [d for d in devices if d.type == "cuda"]
    kind = next(iter(devices), torch.device("cpu")).type
    no_autocast = contextlib.nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)
    # Exception, here and below: a user's forward on inputs it was not written for may raise anything
    with torch.random.fork_rng(devices=forked), torch.no_grad(), no_autocast, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            runner = _Runner(made, module)
        except Exception as error:  # noqa: BLE001
            return Runs(failure=_said(error))
        tries = itertools.chain([like] if like else [], _inputs(runner.copy, module))
        for shapes in itertools.islice(tries, ATTEMPTS):
            try:
                noted = runner.run(shapes)
            except Exception as error:  # noqa: BLE001
                runs.failure = "" if ran else _said(error)
                continue
            ran, runs.failure = True, ""
            if noted:
                runs.found.append(noted)
                runs.shapes = shapes
                _vary(runner, module, runs, shapes)
                break
    return runs


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _vary(runner: _Runner, module: nn.Module, runs: Runs, base: Shapes) -> None:
    """Run a stand-in in training mode and, as long as it looks untrained, with all other variants of a call."""

    def more(shapes: Shapes) -> bool:
        try:
            runs.found.append(runner.run(shapes))
        except Exception:  # noqa: BLE001
            return False
        return True

    runner.copy.train()
    with torch.enable_grad():
        trained_alike = more(base)
    runner.copy.eval()
    runs.found = [run for run in runs.found if run]
    complete = trained_alike
    parameters = inspect.signature(runner.copy.forward).parameters
    _, optional = _arguments(inspect.signature(runner.copy.forward))
    flags = [n for n, p in parameters.items() if isinstance(p.default, bool)]
    if len(optional) + len(flags) > MOST_OPTIONAL:
        return
    last = next((s for s in reversed(base.values()) if not isinstance(s, bool)), (1, 2, 8))
    others = [last, *(s for w in _widths(module) for s in ((1, 2, w), (2, w)))]
    rounds: list[list[Shapes]] = [[{**base, name: shape} for shape in dict.fromkeys(others)] for name in optional]
    rounds += [[{k: v for k, v in base.items() if k != name}] for name in optional if name in base]
    rounds += [[{**base, name: not parameters[name].default}] for name in flags]
    rounds += [[{k: _longer(v, length) for k, v in base.items()}] for length in LENGTHS]
    needed = len(rounds) - len(LENGTHS)  # a module may be made for one length
    for i, choices in enumerate(rounds):
        if not all(seen.zero for run in runs.found for seen in run):
            return
        ran = any(more(shapes) for shapes in choices)
        complete = complete and (ran or i >= needed)
    runs.found = [run for run in runs.found if run]
    runs.complete = complete


def _longer(shape: Any, length: int) -> Any:
    if isinstance(shape, bool) or len(shape) < 2:
        return shape
    return (shape[0], length, *shape[2:]) if len(shape) > 2 else (length, shape[1])


def _inputs(copy: nn.Module, module: nn.Module) -> Iterator[Shapes]:
    """Yield shapes by argument, likely ones first; optional arguments are added in later rounds."""
    try:
        signature = inspect.signature(copy.forward)
    except (TypeError, ValueError):
        return
    required, optional = _arguments(signature)
    widths = list(dict.fromkeys([*_widths(module), 8]))
    shapes = [s for w in widths for s in ((1, 2, w), (2, w))]
    if any(isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for m in module.modules()):
        shapes += [(1, w, 8, 8) for w in widths] + [(1, w, 8) for w in widths]
    rounds = [required] if not optional else [required, [*required, optional[0]], [*required, *optional]]
    for names in {tuple(names): names for names in rounds}.values():
        if not names:
            yield {}
            continue
        yield from (dict.fromkeys(names, shape) for shape in shapes)
        if len(names) > 1:
            mixed = itertools.product(shapes, repeat=min(len(names), 3))
            yield from (
                dict(zip(names, [*combo, *[combo[-1]] * (len(names) - len(combo))], strict=True))
                for combo in mixed
                if len(set(combo)) > 1
            )


def _arguments(signature: inspect.Signature) -> tuple[list[str], list[str]]:
    """Return the names of required arguments, and of those that may be tensors: default None."""
    kinds = inspect.Parameter
    required: list[str] = []
    optional: list[str] = []
    for name, parameter in signature.parameters.items():
        if parameter.kind == kinds.VAR_POSITIONAL and not required:
            required.append("*0")
        elif parameter.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY):
            if parameter.default is kinds.empty:
                required.append(name)
            elif parameter.default is None:
                optional.append(name)
    return required, optional


def _widths(module: nn.Module) -> Iterator[int]:
    for part in module.modules():
        for name in ("in_features", "normalized_shape", "num_features", "in_channels", "embedding_dim"):
            size = part.__dict__.get(name)
            size = size[-1] if isinstance(size, tuple) and size else size
            if isinstance(size, int):
                yield size
    for parameter in module.parameters():
        if parameter.ndim:
            yield parameter.shape[-1]
