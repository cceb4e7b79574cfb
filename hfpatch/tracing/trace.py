"""`hfpatch.trace`: watches the calls of a model, and names the first operation that goes wrong."""

from __future__ import annotations

import functools
import json
import math
import weakref
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import nn

from hfpatch.compat import hooks
from hfpatch.compat.autograd import in_transform
from hfpatch.errors import InputError
from hfpatch.given import FUNCTION, NUMBER, WHOLE, shown, want
from hfpatch.model.survey import Survey
from hfpatch.report.files import write_atomically
from hfpatch.report.heatmap import Heatmap
from hfpatch.report.sheet import Sheet, rank, say
from hfpatch.tracing import views
from hfpatch.tracing.analytic import expected
from hfpatch.tracing.diagnosis import Diagnosis
from hfpatch.tracing.events import Step
from hfpatch.tracing.finding import Finding
from hfpatch.tracing.headroom import Headroom, headroom
from hfpatch.tracing.module_hooks import Hook, Hooks
from hfpatch.tracing.watch import Watch
from hfpatch.tracing.watched import places

P = ParamSpec("P")
R = TypeVar("R")

Chosen = Collection[int] | Callable[[int], bool] | None
Level = Literal["blocks", "modules"]


class Trace:
    """A context in which the calls of a model are watched; see `hfpatch.trace`.

    Attributes:
        steps: What was traced, in order (`hfpatch.tracing.events.Step`).
        findings: The first thing that goes wrong in each traced step where something does.
        meant: What is not finite and is meant to be, in words.
    """

    def __init__(
        self,
        model: object,
        *,
        steps: Chosen = None,
        epochs: Chosen = None,
        ranks: Collection[int] | None = None,
        backward: bool = True,
        level: Level = "modules",
        answers: Callable[[Finding], tuple[str, ...]] = lambda _: (),
        passed: Callable[[str], None] | None = None,
    ) -> None:
        if level not in ("blocks", "modules"):
            raise InputError(f"level={level!r}: want 'blocks' or 'modules'")
        survey = Survey(model)
        self.model: nn.Module = survey.root
        self.places = places(self.model)
        self.level, self.backward, self.answers, self.passed = level, backward, answers, passed
        self.wanted_steps = _chosen("steps", steps)
        self.wanted_epochs = _chosen("epochs", epochs)
        self.ranks = None if ranks is None else _listed("ranks", ranks)
        self.steps: list[Step] = []
        self.findings: list[Finding] = []
        self.meant: list[str] = []
        self._by_epoch = epochs is not None
        self._compiled = survey.compiled
        self._entered = 0
        self._count = 0
        self._compared = False
        self._measured: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._known: set[tuple[str, str, str]] = set()
        self._watch: Watch | None = None
        self._hooks: Hooks | None = None
        self._handles: list[hooks.Handle] = []
        self._context = ExitStack()
        self._on = False
        self._busy = False

    # entering and leaving

    def __enter__(self) -> Trace:
        if self._on:
            raise InputError("this trace is entered already; leave it first, or make another")
        if self._by_epoch:
            self._count = 0
        epoch, self._entered = self._entered, self._entered + 1
        self._on = True
        self.places = places(self.model)  # layers may have been added since
        if self._wanted_here() and self.wanted_epochs(epoch) and not self._over():
            if self._compiled:
                say([f"hfpatch: {self._compiled[0] or 'the model'} is compiled; it runs uncompiled while it is traced"])
                self._context.enter_context(torch.compiler.set_stance("force_eager"))
            self._handles.append(hooks.before(self.model, Hook(self._called), with_kwargs=True))
            returned = Hook(self._returned)
            self._handles.append(hooks.after(self.model, returned, with_kwargs=True, always=True))
        return self

    def __exit__(self, *_: object) -> None:
        self._conclude()
        self._off()
        self._on = False

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Trace every call of a function, e.g. one that trains for an epoch."""

        @functools.wraps(function)
        def traced(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return traced

    def _wanted_here(self) -> bool:
        return self.ranks is None or rank() in self.ranks

    def _over(self) -> bool:
        last = getattr(self.wanted_steps, "last", None)
        return last is not None and self._count > last

    def _unhook(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()

    def _off(self) -> None:
        self._unhook()
        self._hooks = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._context.close()

    # the hooks of the model itself

    def _called(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._busy or in_transform():  # a call that is run again
            return
        self._conclude()
        number, self._count = self._count, self._count + 1
        if self.wanted_steps(number):
            if self._hooks is None:
                self._hooks = Hooks(self.places, inner=self.level == "modules")
            self._hooks.set()
            self._watch = self._hooks.watch = Watch(
                self.places,
                step=Step(number, self._entered - 1),
                backward=self.backward and torch.is_grad_enabled(),
                measured=self._measured,
                ended=self._conclude,
                expected=() if self._compared else expected(model),
                passed=self.passed,
            )
            self._compared = True
            self._watch.start(args, kwargs)
        elif self._over():
            self._off()
        else:
            self._unhook()

    def _returned(self, _model: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any], output: Any) -> None:
        if self._watch is not None and not self._busy and not in_transform():
            self._watch.finish(output)

    def _conclude(self) -> None:
        """The step is over: read its statistics, once, and look for what is wrong before the weights change."""
        watch, self._watch = self._watch, None
        if watch is None:
            return
        watch.close()
        if self._hooks is not None:
            self._hooks.watch = None
        step = watch.step
        self.steps.append(step)
        if not step.close({device: gathered.read() for device, gathered in watch.rows.items()}):
            watch.forget()
            return
        diagnosis = Diagnosis(watch, dict(self.model.named_modules()), self._known)
        self._busy = True
        try:
            found = diagnosis.finding()
        finally:
            self._busy = False
            watch.forget()
        if found is not None:
            self.findings.append(found)
        self.meant.extend(words for words in diagnosis.meant if words not in self.meant)

    # what it says

    @property
    def first_bad(self) -> Finding | None:
        """The first thing that goes wrong in what was traced so far; None if nothing does."""
        self._conclude()
        return self.findings[0] if self.findings else None

    def report(self) -> Sheet:
        """A row a block, the findings in words, and what to try; prints itself in a terminal and in a notebook."""
        self._conclude()
        return views.sheet(self._title(), self.steps, self.places, self.findings, self.meant, self._answers())

    def headroom(self, dtype: str | torch.dtype = "float16", *, loss_scale: float = 1.0) -> Headroom:
        """Which tensors of the traced steps would overflow or vanish in a narrower dtype, and by what factor.

        Args:
            dtype: `float16`, `bfloat16`, `float8_e4m3fn` or `float8_e5m2`.
            loss_scale: What gradients are multiplied by; a scale that the traced loss carried is taken off first.

        Raises:
            InputError: Another dtype.
        """
        want("headroom", loss_scale=(loss_scale, NUMBER))
        self._conclude()
        return headroom(self.steps, dtype, loss_scale)

    def largest_gradients(self, count: int = 10) -> list[tuple[str, float]]:
        """Names of the parameters whose gradients reached the largest magnitude in the traced steps, with it.

        A gradient with a NaN or an infinity comes first, as infinity.
        """
        want("largest_gradients", count=(count, WHOLE))
        self._conclude()
        found: dict[str, float] = {}
        for step in self.steps:
            for event in step.of("gradients"):
                name = f"{event.module}.{event.name}" if event.module else event.name
                found[name] = max(found.get(name, 0.0), math.inf if event.bad else event.stats.largest)
        return sorted(found.items(), key=lambda pair: -pair[1])[:count]

    def to_dict(self) -> dict[str, Any]:
        """Findings, and the statistics of every tensor of every traced step; plain values under stable keys."""
        self._conclude()
        return views.to_dict(self.steps, self.findings, self.meant)

    def to_json(self, path: str | Path) -> None:
        """Write `to_dict()` to a file, whole or not at all."""
        write_atomically(Path(path), json.dumps(self.to_dict(), indent=1))

    def to_html(self, path: str | Path) -> None:
        """Write a page of its own: blocks by steps, coloured by how near each is to its dtype's limit."""
        self._conclude()
        write_atomically(Path(path), self._heatmap().to_html())

    def plot(self, path: str | Path) -> None:
        """Write the same as a PNG (needs matplotlib, `pip install hfpatch[plot]`)."""
        self._conclude()
        self._heatmap().to_png(Path(path))

    def __str__(self) -> str:
        return self.report().to_text()

    def _repr_html_(self) -> str:
        return self.report().to_html()

    def _title(self) -> str:
        count = len(self.steps)
        return f"trace of {type(self.model).__name__}: {count} step{'' if count == 1 else 's'}"

    def _answers(self) -> tuple[str, ...]:
        return self.answers(self.findings[0]) if self.findings else ()

    def _heatmap(self) -> Heatmap:
        notes = [*(f.sentence for f in self.findings[:3]), *self._answers()]
        return views.heatmap(self._title(), self.steps, self.places, self.findings, notes)


def _chosen(name: str, wanted: Chosen) -> Callable[[int], bool]:
    if wanted is None:
        return lambda _: True
    if callable(wanted):
        want("trace", **{name: (wanted, FUNCTION)})
        return wanted
    return _Numbers(_listed(name, wanted))


def _listed(name: str, wanted: Any) -> Collection[int]:
    listed = isinstance(wanted, Collection) and not isinstance(wanted, (str, bytes))
    if not listed or any(type(n) is not int or n < 0 for n in wanted):
        raise InputError(f"{name}=: got {shown(wanted)}; want a list of numbers counted from 0; None for all")
    return wanted


class _Numbers:
    """Numbers that were listed; `last` is the largest."""

    def __init__(self, numbers: Collection[int]) -> None:
        self.numbers = frozenset(numbers)
        self.last = max(numbers, default=-1)

    def __call__(self, number: int) -> bool:
        return number in self.numbers
