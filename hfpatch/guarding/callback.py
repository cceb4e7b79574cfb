"""GuardCallback: the guard inside a transformers Trainer.

A callback can neither skip a step nor see gradients before they are clipped. So while an epoch runs, and on this
Trainer's own objects only, bound methods are replaced on their instances: `accelerator.backward` (the raw loss),
`accelerator.clip_grad_norm_` (unclipped gradients, judged), the prepared optimizer's `step` (which then does nothing
for a bad batch, and says so, whereupon the Trainer leaves the schedule alone), `trainer.log` (the figures) and
`trainer._save_checkpoint` (ruined weights are not saved over a good checkpoint). `trainer._run_epoch` puts them there,
and takes them off whatever is raised.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from hfpatch.compat.accelerate import says_skipped
from hfpatch.compat.trainer import EPOCH, SAVE
from hfpatch.errors import InputError
from hfpatch.given import FLAG, optional, want
from hfpatch.guarding.checks import check, trained
from hfpatch.guarding.gradient_norms import clip_
from hfpatch.guarding.guard import follow, unwrapped
from hfpatch.guarding.judge import Judge
from hfpatch.guarding.ledger import Limits
from hfpatch.guarding.outcome import Facts
from hfpatch.guarding.recorder import BOX, Box, Recorder, conclude
from hfpatch.report import say

if TYPE_CHECKING:
    from torch import Tensor

LOST = (
    "guard: restore_callback_states_from_checkpoint=True made the GuardCallback anew, without its black box; leave it "
    "off: the guard goes on from a checkpoint by itself"
)


class GuardCallback(TrainerCallback, ExportableState):
    """Skips bad batches in a `transformers.Trainer` (TRL's trainers are such), and logs what it saw.

        Trainer(model, args, train_dataset=data, callbacks=[hfpatch.GuardCallback()]).train()

    A skipped batch changes neither weights nor optimizer state nor schedule; it counts as a step of the Trainer
    (`max_steps`). Clipping is the Trainer's (`max_grad_norm`), done with the norm that was judged. Each log gains
    `guard/loss_raw` (mean since the last log, NaN where a loss was NaN: the Trainer's own `loss` hides it),
    `guard/loss` (mean of the steps taken, without empty micro-batches), `guard/norm` (largest since the last log), and
    the counts of `Guard.metrics`. The host reads the decision once a step. A checkpoint carries the state, and a
    resumed run goes on. Before each checkpoint and at the end the weights are looked at: ruined ones are not saved.

    Args:
        explode_at: Norm, before clipping, at which a step is skipped; None: no limit.
        spike_at: Multiple of the running median at which a step is skipped; None: no limit. A good batch can have some
            twenty times the median norm (1 of 900 did: SmolLM2 135M, LoRA).
        max_skips: Skips in a row, ordinary overflows not counted, after which training stops with `GuardStop`.
        min_scale: Loss scale below which an overflow is no longer ordinary.
        check_parameters: Look for non-finite weights every so many steps; 0: only after a non-finite batch.
        verbose: Say on stderr what was skipped.
        black_box: An `hfpatch.BlackBox`, which keeps skipped batches and names what went wrong in them.
    """

    def __init__(
        self,
        explode_at: float | None = 100.0,
        spike_at: float | None = 50.0,
        max_skips: int = 10,
        min_scale: float = 1.0,
        check_parameters: int = 1,
        verbose: bool = True,
        black_box: Box | None = None,
    ) -> None:
        want("GuardCallback", verbose=(verbose, FLAG), black_box=(black_box, optional(BOX)))
        self.limits = Limits(explode_at, spike_at, max_skips, min_scale, check_parameters)
        self.verbose = verbose
        self.black_box = black_box
        self.boxed = black_box is not None
        self.recorder: Recorder | None = None
        self.judge: Judge | None = None
        self.saved: dict[str, Any] | None = None
        self._recent: list[Facts] = []
        self._facts: Facts | None = None
        self._methods: list[tuple[Any, str, Callable[..., Any]]] = []
        self._undo: list[Callable[[], None]] = []

    def state(self) -> dict[str, Any]:
        """What the Trainer writes into a checkpoint."""
        if self.judge is not None and not self.judge.open:
            self.saved = self.judge.state_dict()
        arguments = {**asdict(self.limits), "verbose": self.verbose}
        return {"args": arguments, "attributes": {"saved": self.saved, "boxed": self.boxed}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take hold of the Trainer that calls.

        Raises:
            InputError: DeepSpeed, FSDP1 or an optimizer accelerate did not prepare; see also `checks.check`.
        """
        self._release()
        trainer = _caller(self)
        optimizer: Any = trainer.optimizer
        accelerator: Any = trainer.accelerator
        if not isinstance(optimizer, AcceleratedOptimizer) or trainer.is_deepspeed_enabled:
            raise InputError(
                f"GuardCallback: this Trainer steps a {type(optimizer).__name__}"
                f"{' under DeepSpeed' if trainer.is_deepspeed_enabled else ''}, which skips by rules of its own; "
                "use DDP or FSDP2, or leave the callback out"
            )
        model: Any = trainer.model_wrapped
        inner = unwrapped(optimizer)
        parameters = trained(model, inner)
        warnings = check(model, inner, parameters, scaled=accelerator.scaler is not None)
        self.judge = Judge(
            parameters, self.limits, micro_batches=args.gradient_accumulation_steps, verbose=self.verbose
        )
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
        """Judge what the Trainer clipped by another way (gradients on several meshes); blame is lost, safety is not."""
        if self._facts is None and self.judge is not None and self.judge.open:
            self._facts = self.judge.read(self.judge.weigh())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let go, after a last look at the weights.

        Raises:
            GuardStop: A weight is not finite.
        """
        self._release()
        if self.judge is not None:
            self.judge.confirm()

    def _backward(self, accelerator: Any, model: Any, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
        def backward(original: Callable[..., Any], loss: Tensor, **kwargs: Any) -> None:
            original(loss, **kwargs)
            assert self.judge is not None  # noqa: S101 - set before this was installed
            follow(self.judge, model, optimizer, scaled=accelerator.scaler is not None)
            self.judge.note(loss)
            if self.recorder is not None:
                self.recorder.noted(loss)

        return backward

    def _clip(self, accelerator: Any, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
        def clip(original: Callable[..., Any], parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
            assert self.judge is not None  # noqa: S101 - set before this was installed
            if not self.judge.open:
                return original(parameters, max_norm, norm_type)
            scaler = accelerator.scaler
            scale = None
            if scaler is not None:
                scale = scaler.scale(torch.ones((), device=accelerator.device))
                scaler.unscale_(optimizer)
            verdict = self.judge.weigh(scale)
            self._facts = self.judge.read(verdict)
            if self._facts.kind == "stepped":
                clip_(verdict.grads, max_norm, verdict.norm)
            return verdict.norm

        return clip

    def _step(self, optimizer: AcceleratedOptimizer) -> Callable[..., Any]:
        def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            facts, self._facts = self._facts, None
            if facts is None or self.judge is None:
                raise InputError(
                    "GuardCallback: the optimizer is about to step, and no loss came through accelerator.backward, so "
                    "that nothing was judged; in your Trainer's training_step call self.accelerator.backward(loss) "
                    "instead of loss.backward(), or leave the callback out"
                )
            window = self.recorder.window() if self.recorder is not None else None
            self._recent.append(facts)
            skipped = facts.kind == "skipped"
            given: Any = None
            if not skipped:
                given = original(*args, **kwargs)
            elif optimizer.scaler is not None:
                optimizer.scaler.update()
            says_skipped(optimizer, skipped)
            self.judge.look_at_parameters(facts)
            conclude(self.recorder, window, self.judge, facts, optimizer.scaler)
            return given

        return step

    def _log(self, original: Callable[..., Any], logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and self.judge is not None:
            logs.update(_figures(self._recent), **self.judge.ledger.totals())
            self._recent = []
        original(logs, *args, **kwargs)

    def _saving(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.judge is not None:
            self.judge.confirm()
        return original(*args, **kwargs)

    def _epoch(self, trainer: Trainer, model: Any) -> Callable[..., Any]:
        def run_epoch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self not in trainer.callback_handler.callbacks:  # taken out after a training that raised at its start
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

        @functools.wraps(original)  # with its attributes: a scheduler marks the step it has wrapped
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs) if live[0] else original(*args, **kwargs)

        owner.__dict__[name] = replaced

        def undo() -> None:
            live[0] = False
            if owner.__dict__.get(name) is not replaced:
                return  # somebody wrapped it since: theirs stays, ours inside it passes on
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
    """The Trainer whose training loop is calling: callbacks are told its model and optimizer, but not itself.

    Raises:
        InputError: None is.
    """
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer) and callback in owner.callback_handler.callbacks:
            return owner
        frame = frame.f_back
    raise InputError(
        "GuardCallback: no Trainer is calling; pass it as callbacks=[GuardCallback()], or use Guard in your own loop"
    )
