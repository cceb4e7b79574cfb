"""GuardCallback: the guard inside a transformers Trainer.

A callback can neither skip a step nor see gradients before they are clipped. So while an epoch runs, these methods are
replaced on the instances of this Trainer: `accelerator.backward` (to see the raw loss), `accelerator.clip_grad_norm_`
(to judge unclipped gradients), the prepared optimizer's `step` (which does nothing for a bad batch and marks the step
as skipped, so the Trainer does not step the schedule), `trainer.log` (to add the figures) and
`trainer._save_checkpoint` (so that bad weights are not saved). A replaced `trainer._run_epoch` sets the others and puts
the originals back, also when an exception is raised.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from hfpatch.compat.accelerate import EPOCH, SAVE, says_skipped
from hfpatch.errors import InputError
from hfpatch.given import FLAG, optional, torch_optimizer, want
from hfpatch.guarding.checks import check, outside, trained_parameters
from hfpatch.guarding.gradient_norms import clip_
from hfpatch.guarding.history import OnSpike
from hfpatch.guarding.inputs import globs, matching
from hfpatch.guarding.judge import Judge
from hfpatch.guarding.ledger import Limits
from hfpatch.guarding.outcome import Facts
from hfpatch.guarding.recorder import BOX, Box, Recorder, record_and_raise
from hfpatch.guarding.stepping import update_parameters
from hfpatch.report import say

if TYPE_CHECKING:
    from torch import Tensor

LOST = (
    "guard: restore_callback_states_from_checkpoint=True has recreated the GuardCallback without its black box; leave "
    "that option off: the guard restores its state from a checkpoint by itself"
)


class GuardCallback(TrainerCallback, ExportableState):
    """Skips bad batches in a `transformers.Trainer` or a subclass (such as TRL's), and logs losses and norms.

        Trainer(model, args, train_dataset=data, callbacks=[hfpatch.GuardCallback()]).train()

    A skipped batch changes neither weights nor optimizer state nor schedule; it counts as a step of the Trainer
    (`max_steps`). Gradients are clipped to the Trainer's `max_grad_norm`, with the norm that was judged. Each log gets
    `guard/loss_raw` (mean since the last log; NaN if a loss was NaN, which the Trainer's own `loss` hides),
    `guard/loss` (mean of the steps that were not skipped, without empty micro-batches), `guard/norm` (largest since
    the last log), and the counts of `Guard.metrics`. The host reads the decision once per step. Checkpoints hold the
    guard's state, and a resumed run continues with it. The weights are checked before each checkpoint and at the end:
    non-finite weights are not saved.

    Args:
        explode_at: Norm, before clipping, above which a step is skipped; None for no limit.
        spike_at: As for `hfpatch.Guard`, like the three below.
        max_skips: Skips in a row after which training stops with `GuardStop`. Ordinary overflows and steps with zero
            loss and gradients are not counted.
        min_scale: Loss scale below which an overflow is no longer ordinary.
        check_parameters: Check for non-finite weights every this many steps; 0 for only after a batch that is not
            finite. They are checked before they are saved and at the end too.
        verbose: Report skipped steps on stderr.
        black_box: An `hfpatch.BlackBox`, which keeps skipped batches and names what went wrong in them.
        on_spike: `skip` or `clip`.
        components: Each log gets `guard/norm/<component>`, of the last step.
        clear_outside: Clear non-finite gradients of parameters outside the optimizer where a step is skipped.

    Raises:
        InputError: An argument is not of its kind.
    """

    def __init__(
        self,
        explode_at: float | None = None,
        spike_at: float | None = 10.0,
        max_skips: int = 10,
        min_scale: float = 1.0,
        check_parameters: int = 1,
        verbose: bool = True,
        black_box: Box | None = None,
        *,
        on_spike: OnSpike = "skip",
        components: Mapping[str, str | Sequence[str]] | None = None,
        clear_outside: bool = False,
    ) -> None:
        want("GuardCallback", verbose=(verbose, FLAG), black_box=(black_box, optional(BOX)))
        self.limits = Limits(explode_at, spike_at, max_skips, min_scale, check_parameters, on_spike, clear_outside)
        self.components = globs(components)
        self.verbose = verbose
        self.black_box = black_box
        self.boxed = black_box is not None
        self.recorder: Recorder | None = None
        self.judge: Judge | None = None
        self.saved: dict[str, Any] | None = None
        self._recent: list[Facts] = []
        self._facts: Facts | None = None
        self._parts: Callable[[], dict[str, float]] | None = None
        self._methods: list[tuple[Any, str, Callable[..., Any]]] = []
        self._undo: list[Callable[[], None]] = []

    def state(self) -> dict[str, Any]:
        """Return the state that the Trainer writes into a checkpoint."""
        if self.judge is not None and not self.judge.open:
            self.saved = self.judge.state_dict()
        arguments = {**asdict(self.limits), "verbose": self.verbose, "components": self.components}
        return {"args": arguments, "attributes": {"saved": self.saved, "boxed": self.boxed}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set up the guard on the calling Trainer.

        Raises:
            InputError: DeepSpeed, FSDP1, or an optimizer that accelerate did not prepare; see also `checks.check`.
        """
        self._release()
        trainer = _caller(self)
        optimizer: Any = trainer.optimizer
        accelerator: Any = trainer.accelerator
        if not isinstance(optimizer, AcceleratedOptimizer) or trainer.is_deepspeed_enabled:
            raise InputError(
                f"GuardCallback: this Trainer steps a {type(optimizer).__name__}"
                f"{' under DeepSpeed' if trainer.is_deepspeed_enabled else ''}, which the guard cannot make skip; "
                "use DDP or FSDP2, or leave the callback out"
            )
        model: Any = trainer.model_wrapped
        inner = torch_optimizer("guard", optimizer)
        parameters = trained_parameters(model, inner)
        warnings = check(model, inner, parameters, scaled=accelerator.scaler is not None)
        self.judge = Judge(
            parameters, self.limits, micro_batches=args.gradient_accumulation_steps, verbose=self.verbose
        )
        self.judge.outside = outside(model, inner)
        self.judge.components = matching(self.components, self.judge.names)
        exported: Any = (state.stateful_callbacks or {}).get(type(self).__name__)
        saved = (exported[0] if isinstance(exported, list) else exported or {}).get("attributes", {}).get("saved")
        if saved is not None and state.global_step > 0:
            self.judge.load_state_dict(saved)
        self._recent, self._facts = [], None
        if self.verbose:
            say(warnings)
        if self.black_box is None and self.boxed:
            say([LOST])
        self._methods = [
            (accelerator, "backward", self._backward(accelerator, model, inner)),
            (accelerator, "clip_grad_norm_", self._clip(accelerator, inner)),
            (optimizer, "step", self._step(optimizer)),
            (trainer, "log", self._log),
            (trainer, SAVE, self._saving),
        ]
        self._replace(trainer, EPOCH, self._epoch(trainer, model))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Judge gradients that the Trainer clipped by another function (gradients on several meshes).

        Non-finite gradients are found all the same; the reported norms are those after clipping.
        """
        if self._facts is None and self.judge is not None and self.judge.open:
            self._facts = self.judge.read(self.judge.decide())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put the Trainer's methods back, and check the weights.

        Raises:
            GuardStop: A weight is not finite, or every step was skipped.
        """
        self._release()
        if self.judge is not None:
            self.judge.require_finite_weights()
            self.judge.ledger.require_a_step()

    def _backward(self, accelerator: Any, model: Any, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
        def backward(original: Callable[..., Any], loss: Tensor, **kwargs: Any) -> None:
            original(loss, **kwargs)
            assert self.judge is not None  # noqa: S101 - set before this was installed
            update_parameters(self.judge, model, optimizer, scaled=accelerator.scaler is not None)
            self.judge.add(loss)
            if self.recorder is not None:
                self.recorder.end_micro_batch(loss)

        return backward

    def _clip(self, accelerator: Any, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
        def clip(original: Callable[..., Any], parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
            assert self.judge is not None  # noqa: S101 - set before this was installed
            if not self.judge.open:
                return original(parameters, max_norm, norm_type)
            scaler = accelerator.scaler
            scale = None
            if scaler is not None:
                scale = scaler.scale(torch.ones((), device=accelerator.device, dtype=torch.float32))
                scaler.unscale_(optimizer)
            verdict = self.judge.decide(scale)
            self._facts = self.judge.read(verdict)
            if self._facts.kind == "stepped":
                clip_(verdict.grads, max_norm, verdict.norm, verdict.limit)
            self._parts = partial(self.judge.by_component, verdict) if self.components else None
            return verdict.norm

        return clip

    def _step(self, optimizer: AcceleratedOptimizer) -> Callable[..., Any]:
        def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            facts, self._facts = self._facts, None
            if facts is None or self.judge is None:
                raise InputError(
                    "GuardCallback: the optimizer is about to step, but no loss went through accelerator.backward, so "
                    "nothing was judged; in your Trainer's training_step call self.accelerator.backward(loss) instead "
                    "of loss.backward(), or leave the callback out"
                )
            window = self.recorder.end_window() if self.recorder is not None else None
            self._recent.append(facts)
            skipped = facts.kind == "skipped"
            given: Any = None
            if not skipped:
                given = original(*args, **kwargs)
            elif optimizer.scaler is not None:
                optimizer.scaler.update()
            says_skipped(optimizer, skipped)
            self.judge.check_weights(facts)
            record_and_raise(self.recorder, window, self.judge, facts, optimizer.scaler)
            return given

        return step

    def _log(self, original: Callable[..., Any], logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and self.judge is not None:
            logs.update(_figures(self._recent), **self.judge.ledger.totals())
            if self._parts is not None:
                logs.update({f"guard/norm/{name}": norm for name, norm in self._parts().items()})
            self._recent = []
        original(logs, *args, **kwargs)

    def _saving(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.judge is not None:
            self.judge.require_finite_weights()
        return original(*args, **kwargs)

    def _epoch(self, trainer: Trainer, model: Any) -> Callable[..., Any]:
        def run_epoch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self not in trainer.callback_handler.callbacks:  # removed after a run that raised at its start
                self._release()
                return original(*args, **kwargs)
            done = False
            if self.black_box is not None and self.recorder is None:
                self.recorder = self.black_box.attach(model)
            for owner, name, wrapper in self._methods:
                self._replace(owner, name, wrapper)
            try:
                given = original(*args, **kwargs)
                done = True
                return given
            finally:
                self._put_back(keep=1)  # this one
                if not done:
                    self._release()

        return run_epoch

    def _replace(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        kept = owner.__dict__.get(name)
        original = getattr(owner, name)

        live = [True]

        @functools.wraps(original)  # copies attributes too: a scheduler marks the step it has wrapped
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs) if live[0] else original(*args, **kwargs)

        owner.__dict__[name] = replaced

        def undo() -> None:
            live[0] = False
            if owner.__dict__.get(name) is not replaced:
                return  # other code wrapped it since: its wrapper stays, and ours inside it calls the original
            if kept is None:
                del owner.__dict__[name]
            else:
                owner.__dict__[name] = kept

        self._undo.append(undo)

    def _put_back(self, keep: int = 0) -> None:
        while len(self._undo) > keep:
            self._undo.pop()()

    def _release(self) -> None:
        self._put_back()
        if self.recorder is not None:
            self.recorder.detach()
            self.recorder = None


def _figures(recent: list[Facts]) -> dict[str, float]:
    raw = [f.loss for f in recent if f.loss is not None]
    taken = [f.learned for f in recent if f.learned is not None and f.kind == "stepped"]
    norms = [f.norm for f in recent if f.norm is not None]
    found: dict[str, float] = {}
    if raw:
        found["guard/loss_raw"] = sum(raw) / len(raw)
        found["guard/norm"] = math.nan if any(math.isnan(n) for n in norms) else max(norms)
    if taken:
        found["guard/loss"] = sum(taken) / len(taken)
    return found


def _caller(callback: GuardCallback) -> Trainer:
    """Return the Trainer whose training loop is calling, from the call stack: callbacks are not passed it.

    Raises:
        InputError: No Trainer is calling.
    """
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer) and callback in owner.callback_handler.callbacks:
            return owner
        frame = frame.f_back
    raise InputError(
        "GuardCallback: no Trainer is calling it; pass it as callbacks=[GuardCallback()], or use Guard in your own loop"
    )
