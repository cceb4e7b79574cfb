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
from hfpatch.errors import InputError
from hfpatch.given import NUMBER, TEXT, WHOLE, want
from hfpatch.model.survey import Survey
from hfpatch.report.curve import Curve
from hfpatch.report.files import write_atomically
from hfpatch.report.heatmap import Heatmap
from hfpatch.report.sheet import Sheet, Shown, rank, say
from hfpatch.symptoms import FINITE
from hfpatch.tracing import beside, failed_forward
from hfpatch.tracing.calls import Kept, changed
from hfpatch.tracing.computed_buffers import expected
from hfpatch.tracing.diagnosis import Diagnosis
from hfpatch.tracing.events import Step
from hfpatch.tracing.finding import Answer, Finding
from hfpatch.tracing.gradients import LargestGradients, largest
from hfpatch.tracing.growing.growth import Growth
from hfpatch.tracing.growing.trend import Trend, trend
from hfpatch.tracing.headroom import Headroom, headroom
from hfpatch.tracing.module_hooks import Hook, Hooks
from hfpatch.tracing.showing import picture, table
from hfpatch.tracing.showing.by_path import Figures, figures
from hfpatch.tracing.tensors import every
from hfpatch.tracing.watch import Watch
from hfpatch.tracing.watched import places
from hfpatch.tracing.which_steps import Chosen, chosen, last_of, listed

P = ParamSpec("P")
R = TypeVar("R")

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
        findings: The first fault of each traced step that has one, and the exception, if forward raised one; then those
            whose values are all finite (`growth`, `vanishing`, one for each place; last `cast-buffer`).
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
        self.wanted_steps = chosen("steps", steps)
        self.wanted_epochs = chosen("epochs", epochs)
        self.ranks = None if ranks is None else listed("ranks", ranks)
        self.steps: list[Step] = []
        self.findings: list[Finding] = []
        self.intentional: list[str] = []
        self._by_epoch = epochs is not None
        self._compiled = survey.compiled
        self._entered = self._count = 0
        self._on = self._busy = self._compared = False
        self._growth = Growth()
        self._measured: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._overwritten: set[tuple[str, str, str]] = set()
        self._known: set[tuple[str, str, str]] = set()
        self._answered: dict[tuple[str, ...], Answer] = {}
        self._given: list[tuple[torch.Tensor, int]] = []
        self._watch: Watch | None = None
        self._hooks: Hooks | None = None
        self._handles: list[hooks.Handle] = []
        self._context = ExitStack()

    def __enter__(self) -> Trace:
        if self._on:
            raise InputError("trace: this trace is already entered; leave it first, or make another one")
        if self._by_epoch:
            self._count = 0
        epoch, self._entered = self._entered, self._entered + 1
        self._on = True
        self.places = places(self.model)  # layers may have been added since
        here = self.ranks is None or rank() in self.ranks
        if here and self.wanted_epochs(epoch) and not self._over():
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

    def _over(self) -> bool:
        last = last_of(self.wanted_steps)
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
                step=Step(number, self._entered - 1, frozenset(self.places.blocks)),
                backward=self.backward and torch.is_grad_enabled(),
                measured=self._measured,
                overwritten=self._overwritten,
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
        odd = step.close(watch.rows)
        self._overwritten |= step.overwritten()
        modules = {**self.places.all, **watch.beside}
        diagnosis = Diagnosis(watch, modules, self._known)
        self._busy = True
        try:
            found = diagnosis.finding() if odd else None
            raised = grown = None
            if watch.raised is not None:
                raised = failed_forward.finding(watch.raised, step, watch.calls, watch.places, modules)
            elif found is None or found.symptom in FINITE:
                grown = self._growth.finding(step, watch.calls, modules)
            first = found or grown
            if first is not None and answered and (raised is None or first.symptom not in FINITE):
                self._answer(first, watch)
        finally:
            self._busy = False
            watch.forget()
            self._given.clear()
        self.findings.extend(f for f in (found, raised, grown) if f is not None)
        self.findings.sort(key=lambda f: (f.symptom in FINITE, f.symptom == "cast-buffer"))
        self.intentional.extend(words for words in diagnosis.intentional if words not in self.intentional)

    def _answer(self, found: Finding, watch: Watch) -> None:
        """Try the patches for a finding, if it is the first of its sort."""
        if found.sort in self._answered or len(self._answered) >= ANSWERED:
            return
        for key in [k for k in watch.calls if k[0] not in self.places.containers]:
            del watch.calls[key]  # what blocks were given is not needed any more, and may be large
        answer = self.answers(found, Kept(watch.calls, changed(self._given, self.places.owners, self._measured)))
        first = not self._answered  # of later sorts, which may follow from it, only what a patch does is told
        self._answered[found.sort] = answer if first or answer.patches else Answer(())

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
        module, path = beside.named(loss_fn)

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
        """The first fault in the steps traced so far; None if there is none.

        One with values that are not finite comes before one in which the signal only grows or vanishes.
        """
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
        more = [*self._trends(), *self.advice]
        return table.sheet(self._title(), self.steps, self.places, self.findings, self.intentional, more)

    def __getitem__(self, path: str) -> Figures:
        """Return the figures of one module over the traced steps: `trace["model.layers.7"].output`.

        Args:
            path: Path of the module; empty for the model.

        Raises:
            InputError: The model has no such module, or it was not measured.
        """
        want("trace", path=(path, TEXT))
        self._asked()
        return figures(self.steps, dict(self.model.named_modules()), path)

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

    def trend(self) -> Trend:
        """Return how the factors between what goes into a block and what comes out develop over the traced steps.

        For every place where the signal was found to grow or vanish, and for the block with the largest factor forward
        and backward: the factor in the first and the last step, the first step in which it stood out, and in how many
        steps it doubles.
        """
        self._asked()
        return trend(self.steps, self._growth.found)

    def to_dict(self) -> dict[str, Any]:
        """Return findings, advice, patches, and the statistics of every tensor of every step, as plain values."""
        self._asked()
        found = table.to_dict(self.steps, self.findings, self.intentional)
        return {**found, "advice": list(self.advice), "patches": list(self.patches)}

    def to_json(self, path: str | Path) -> None:
        """Write `to_dict()` to a JSON file, atomically."""
        write_atomically(Path(path), json.dumps(self.to_dict(), indent=1))

    def to_html(self, path: str | Path, *, dtype: str | torch.dtype | None = None) -> None:
        """Write a self-contained HTML page: a curve over the blocks of one step, or a heat map of blocks by steps.

        Args:
            path: The file.
            dtype: The dtype for whose limits the heat map is coloured; by default each tensor's own if one is float16,
                else the largest value of the pass.

        Raises:
            InputError: Another dtype, or the file cannot be written.
        """
        self._asked()
        write_atomically(Path(path), self._picture(dtype).to_html())

    def plot(self, path: str | Path, *, dtype: str | torch.dtype | None = None) -> None:
        """Write the picture of `to_html` as a PNG (needs matplotlib, `pip install hfpatch[plot]`).

        Args:
            path: The file.
            dtype: As for `to_html`.

        Raises:
            InputError: matplotlib is missing, another dtype, or the file cannot be written.
        """
        self._asked()
        self._picture(dtype).to_png(Path(path))

    def _repr_html_(self) -> str:
        """Return the table, and below it the picture, for a notebook."""
        return f"{super()._repr_html_()}\n{self._picture(None).to_frame()}"

    def _title(self) -> str:
        return f"trace of {type(self.model).__name__}: {len(self.steps)} step{'' if len(self.steps) == 1 else 's'}"

    def _trends(self) -> list[str]:
        """Return how the places that were found develop, in words, if several steps were traced."""
        found = len(self._growth.found) if len(self.steps) > 1 else 0
        return [f"trend: {course.sentence}" for course in self.trend().courses[:found]] if found else []

    def _picture(self, dtype: str | torch.dtype | None) -> Curve | Heatmap:
        notes = [*(f.sentence for f in self.findings[:3]), *self._trends(), *self.advice]
        return picture.picture(self._title(), self.steps, self.places, self.findings, notes, dtype)
