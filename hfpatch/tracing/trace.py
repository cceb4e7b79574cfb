"""`hfpatch.trace`: traces the calls of a model, and names the first operation that goes wrong."""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import nn

from hfpatch.compat import hooks
from hfpatch.compat.autograd import in_transform, version
from hfpatch.compat.modules import parameters
from hfpatch.errors import InputError
from hfpatch.given import FUNCTION, NUMBER, WHOLE, shown, want
from hfpatch.model.survey import Survey
from hfpatch.report.files import write_atomically
from hfpatch.report.heatmap import Heatmap
from hfpatch.report.sheet import Sheet, Shown, rank, say
from hfpatch.symptoms import FINITE
from hfpatch.tracing import beside, failed_forward, views
from hfpatch.tracing.calls import Kept
from hfpatch.tracing.computed_buffers import expected
from hfpatch.tracing.diagnosis import Diagnosis
from hfpatch.tracing.events import Step
from hfpatch.tracing.finding import Answer, Finding
from hfpatch.tracing.gradients import LargestGradients, largest
from hfpatch.tracing.headroom import Headroom, headroom
from hfpatch.tracing.module_hooks import Hook, Hooks
from hfpatch.tracing.tensors import every
from hfpatch.tracing.watch import Watch
from hfpatch.tracing.watched import places

P = ParamSpec("P")
R = TypeVar("R")

Chosen = Collection[int] | Callable[[int], bool] | None
Answers = Callable[[Finding, Kept], Answer]
"""Called for the first finding of each sort, at the end of its step; may run the kept calls again."""
Foretold = Callable[[Headroom], tuple[str, ...]]
"""Called for what would overflow in a narrower dtype; returns what patches do about it, a sentence each."""
ANSWERED = 3
"""Number of sorts of findings that are answered."""
Level = Literal["blocks", "modules"]


class Trace(Shown):
    """A context that traces the calls of a model; see `hfpatch.trace`.

    Attributes:
        steps: The traced steps, in order (`hfpatch.tracing.events.Step`).
        findings: The first fault of each traced step that has one, and after it the exception, if forward raised one.
        intentional: Descriptions of tensors that are not finite on purpose.
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
        answers: Answers = lambda _finding, _kept: Answer(()),
        foretold: Foretold = lambda _: (),
        progress: Callable[[str], None] | None = None,
    ) -> None:
        if level not in ("blocks", "modules"):
            raise InputError(f"trace: level={level!r}: want 'blocks' or 'modules'")
        survey = Survey(model)
        self.model: nn.Module = survey.root
        self.places = places(self.model)
        self.level, self.backward, self.progress = level, backward, progress
        self.answers, self.foretold = answers, foretold
        self.wanted_steps = _chosen("steps", steps)
        self.wanted_epochs = _chosen("epochs", epochs)
        self.ranks = None if ranks is None else _listed("ranks", ranks)
        self.steps: list[Step] = []
        self.findings: list[Finding] = []
        self.intentional: list[str] = []
        self._by_epoch = epochs is not None
        self._compiled = survey.compiled
        self._entered = 0
        self._count = 0
        self._compared = False
        self._measured: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._known: set[tuple[str, str, str]] = set()
        self._answered: dict[tuple[str, ...], Answer] = {}
        self._given: list[tuple[torch.Tensor, int]] = []
        self._watch: Watch | None = None
        self._hooks: Hooks | None = None
        self._handles: list[hooks.Handle] = []
        self._context = ExitStack()
        self._on = False
        self._busy = False

    # entering and leaving

    def __enter__(self) -> Trace:
        if self._on:
            raise InputError("trace: this trace is already entered; leave it first, or make another one")
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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._conclude(answered=kind is None or issubclass(kind, Exception))  # after Ctrl-C nobody waits for a trial
        self._off()
        self._on = False

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Trace every call of a function, for example one that trains for an epoch."""

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
        if self._busy or in_transform():  # busy: the diagnosis runs this call again
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
                progress=self.progress,
            )
            self._compared = True
            self._given = [(tensor, version(tensor)) for tensor in every((args, kwargs))]
            self._watch.start(args, kwargs)
        elif self._over():
            self._off()
        else:
            self._unhook()

    def _returned(self, _model: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any], output: Any) -> None:
        if self._watch is not None and not self._busy and not in_transform():
            self._watch.raised = failed_forward.of_model(self.model) if output is None else None
            self._watch.finish(output)

    def _conclude(self, *, answered: bool = True) -> None:
        """End the step: read its statistics in one transfer, and diagnose it before the weights change.

        The patches for the first finding of its sort are tried then too, unless `answered` is False.
        """
        watch, self._watch = self._watch, None
        if watch is None:
            return
        watch.close()
        if self._hooks is not None:
            self._hooks.watch = None
        step = watch.step
        self.steps.append(step)
        odd = step.close({device: gathered.read() for device, gathered in watch.rows.items()})
        if not odd and watch.raised is None:
            watch.forget()
            return
        modules = {**dict(self.model.named_modules()), **watch.beside}
        diagnosis = Diagnosis(watch, modules, self._known)
        self._busy = True
        try:
            found = diagnosis.finding() if odd else None
            raised = None
            if watch.raised is not None:
                raised = failed_forward.finding(watch.raised, step, watch.calls, watch.places, modules)
            if found is not None and answered and found.sort not in self._answered and len(self._answered) < ANSWERED:
                for key in [k for k in watch.calls if k[0] not in self.places.containers]:
                    del watch.calls[key]  # what blocks were given is not needed any more, and may be large
                answer = self.answers(found, Kept(watch.calls, self._changed()))
                first = not self._answered  # of later sorts, which may follow from it, only what a patch does is told
                self._answered[found.sort] = answer if first or answer.patches else Answer(())
        finally:
            self._busy = False
            watch.forget()
            self._given.clear()
        self.findings.extend(f for f in (found, raised) if f is not None)
        self.findings.sort(key=lambda finding: finding.symptom in FINITE)
        self.intentional.extend(words for words in diagnosis.intentional if words not in self.intentional)

    def _changed(self) -> str:
        """Return what was changed since the step was run; empty if nothing was."""
        if any(version(tensor) != then for tensor, then in self._given):
            return "an argument was overwritten after the call"
        for path, module in self.places.owners:
            for name, parameter in parameters(module).items():
                known = None if parameter is None else self._measured.get(id(parameter))
                if parameter is not None and known is not None and known[1] != version(parameter):
                    return f"the weights were changed after the call ({path}.{name} first)"
        return ""

    def watch(self, loss_fn: Callable[..., R]) -> Callable[..., R]:
        """Return a loss to call in place of this one, which records its calls beside the model's.

            loss_fn = t.watch(loss_fn)
            loss_fn(model(**batch).logits, labels).backward()

        A fault in it is then named like one in the model, under its name: `0 x -inf is NaN in grpo_loss()`.

        Args:
            loss_fn: A function or module that computes a loss outside of the model.

        Raises:
            InputError: It cannot be called.
        """
        if not callable(loss_fn):
            raise InputError(f"watch: loss_fn=: want a function or module that computes a loss; got {shown(loss_fn)}")
        module = loss_fn if isinstance(loss_fn, nn.Module) else beside.Function(loss_fn)
        path = beside.path_of(loss_fn)

        def watched(*args: Any, **kwargs: Any) -> R:
            if self._watch is None or self._busy or in_transform():
                return loss_fn(*args, **kwargs)
            return beside.run(self._watch, path, module, args, kwargs)

        return watched

    # results

    def _asked(self) -> None:
        """End the step, unless the model is running: a debugger that shows the trace must not end one."""
        if self._watch is None or not self._watch.running:
            self._conclude()

    @property
    def first_bad(self) -> Finding | None:
        """The first fault in the steps traced so far; None if there is none."""
        self._asked()
        return self.findings[0] if self.findings else None

    @property
    def advice(self) -> tuple[str, ...]:
        """What to do about the findings, a sentence each; patches were tried on the traced call where it says so."""
        self._asked()
        return tuple(dict.fromkeys(words for answer in self._answered.values() for words in answer.sentences))

    @property
    def patches(self) -> tuple[str, ...]:
        """Ids of the patches that the advice says to apply."""
        self._asked()
        return tuple(dict.fromkeys(patch for answer in self._answered.values() for patch in answer.patches))

    def report(self) -> Sheet:
        """Return one row per block, the findings, and what to try; it prints itself in a terminal and a notebook."""
        return self.sheet()

    def sheet(self) -> Sheet:
        """See `report`."""
        self._asked()
        return views.sheet(self._title(), self.steps, self.places, self.findings, self.intentional, self.advice)

    def headroom(self, dtype: str | torch.dtype = "float16", *, loss_scale: float = 1.0) -> Headroom:
        """Return which tensors of the traced steps would overflow or underflow in a narrower dtype, and by what factor.

        Args:
            dtype: `float16`, `bfloat16`, `float8_e4m3fn` or `float8_e5m2`.
            loss_scale: Factor on the gradients; the scale of the traced loss, if it had one, is divided out first.

        Raises:
            InputError: Another dtype.
        """
        want("headroom", loss_scale=(loss_scale, NUMBER))
        self._asked()
        found = headroom(self.steps, dtype, loss_scale)
        return replace(found, advice=self.foretold(found))

    def largest_gradients(self, count: int = 10) -> LargestGradients:
        """Return the parameters with the largest gradients in the traced steps: name and largest magnitude.

        Gradients that hold a NaN or an infinity count as infinity; of these, those that backward reached first come
        first. If the gradient became large on its way back (1,000 times the one it started with, or not finite), the
        parameters of the module where it did so come before all others, and `.began` says where.

        Args:
            count: Number of parameters to return.
        """
        want("largest_gradients", count=(count, WHOLE))
        self._asked()
        return largest(self.steps, count)

    def to_dict(self) -> dict[str, Any]:
        """Return findings, advice, patches, and the statistics of every tensor of every step, as plain values."""
        self._asked()
        found = views.to_dict(self.steps, self.findings, self.intentional)
        return {**found, "advice": list(self.advice), "patches": list(self.patches)}

    def to_json(self, path: str | Path) -> None:
        """Write `to_dict()` to a JSON file, atomically."""
        write_atomically(Path(path), json.dumps(self.to_dict(), indent=1))

    def to_html(self, path: str | Path) -> None:
        """Write a self-contained HTML page: blocks by steps, coloured by how near each is to its dtype's limit."""
        self._asked()
        write_atomically(Path(path), self._heatmap().to_html())

    def plot(self, path: str | Path) -> None:
        """Write the heat map of `to_html` as a PNG (needs matplotlib, `pip install hfpatch[plot]`)."""
        self._asked()
        self._heatmap().to_png(Path(path))

    def _title(self) -> str:
        count = len(self.steps)
        return f"trace of {type(self.model).__name__}: {count} step{'' if count == 1 else 's'}"

    def _heatmap(self) -> Heatmap:
        notes = [*(f.sentence for f in self.findings[:3]), *self.advice]
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
        raise InputError(f"trace: {name}=: want a list of integers from 0 up, or None for all; got {shown(wanted)}")
    return wanted


class _Numbers:
    """The listed numbers; `last` is the largest."""

    def __init__(self, numbers: Collection[int]) -> None:
        self.numbers = frozenset(numbers)
        self.last = max(numbers, default=-1)

    def __call__(self, number: int) -> bool:
        return number in self.numbers
