"""Guard: a plain training loop that survives a bad batch."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hfpatch.compat.accelerate import says_skipped
from hfpatch.compat.optimizers import skips_itself
from hfpatch.errors import InputError
from hfpatch.given import FLAG, REAL, WHOLE, having, optional, want
from hfpatch.guarding.checks import check, held, trained
from hfpatch.guarding.gradient_norms import clip_
from hfpatch.guarding.judge import Judge, Verdict, check_loss
from hfpatch.guarding.ledger import Limits
from hfpatch.guarding.outcome import Facts, Outcome
from hfpatch.guarding.recorder import BOX, Box, conclude
from hfpatch.model.walk import root_module
from hfpatch.report import say

if TYPE_CHECKING:
    from torch import Tensor


SCHEDULER = having("a scheduler, with a step(),", "step")
SCALER = having("a GradScaler", "scale", "unscale_", "update", "is_enabled")
ACCELERATOR = having("an Accelerator", "backward", "prepare")
GROUP = having("a process group", "rank", "size")


class Guard:
    """Does, for each batch: backward, unscale, judge, clip, step or skip, update the scale, schedule, zero.

        guard = hfpatch.Guard(model, optimizer, scheduler)
        for batch in loader:
            outcome = guard.step(model(**batch).loss)

    A skipped batch changes neither weights nor optimizer state nor schedule. On the CPU, and with optimizers that
    cannot skip by themselves, the decision is read by the host once a step. Where the gradients are on a CUDA
    device and the optimizer is fused, it stays there: the optimizer gets it as `found_inf`, and the host learns it
    one step late, before the next optimizer step, which is when it is needed: the scheduler is then stepped, a
    skip is reported, and `GuardStop` raised. `settle()` asks for it earlier.

    A skip under a GradScaler lowers the scale once if the gradients were not finite, as torch does. Running
    statistics (BatchNorm) were written by the forward already and cannot be taken back.

    Judged, clipped and zeroed is what the optimizer holds, also what joins it later. A model with two optimizers has
    two guards: one backward, then `check_and_step` of each (not under one GradScaler, which each would update).

    Over several ranks the guard must be made on every rank, after the model was wrapped, and `step` called equally
    often everywhere; one all-reduce a step makes the decision common.

    Args:
        model: What is trained, wrapped as it is called (DDP, `fully_shard`, `accelerator.prepare`).
        optimizer: A torch optimizer, or one that accelerate prepared.
        scheduler: Stepped after each step that was taken. None: step it yourself.
        scaler: A `torch.amp.GradScaler`; accelerate's own is found.
        accelerator: Runs backward, and says by `sync_gradients` where a window ends (`accelerator.accumulate`).
        max_grad_norm: Norm to clip to; None: no clipping.
        explode_at: Norm, before clipping, at which a step is skipped; None: no limit.
        accumulation_steps: Micro-batches in a step, without an accelerator.
        spike_at: Multiple of the running median (64 good steps, from the 16th on) at which a step is skipped; None:
            no limit. A good batch can have some twenty times the median norm (1 of 900 did: SmolLM2 135M, LoRA).
        divide_loss: Divide each loss by the number of micro-batches. False where losses are shares of the window's
            already (sum over tokens, divided by `num_items_in_batch` of the whole window).
        max_skips: Skips in a row, ordinary overflows not counted, after which training stops.
        min_scale: Loss scale below which an overflow is no longer ordinary.
        check_parameters: Look for non-finite weights every so many steps; 0: only after a non-finite batch.
        on_device: Keep the decision on the device; None: where it pays. True needs a fused optimizer, and no SGD with
            momentum.
        group: Ranks that decide together; None is all of them.
        black_box: An `hfpatch.BlackBox`, which keeps skipped batches and names what went wrong in them.
        verbose: Say on stderr what was skipped.

    Attributes:
        warnings: What was warned about at construction.

    Raises:
        InputError: See `hfpatch.guarding.checks.check`; a scheduler that needs a metric; contradicting arguments.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        scheduler: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        accelerator: Any = None,
        max_grad_norm: float | None = 1.0,
        explode_at: float | None = 100.0,
        accumulation_steps: int = 1,
        *,
        spike_at: float | None = 50.0,
        divide_loss: bool = True,
        max_skips: int = 10,
        min_scale: float = 1.0,
        check_parameters: int = 1,
        on_device: bool | None = None,
        group: Any = None,
        black_box: Box | None = None,
        verbose: bool = True,
    ) -> None:
        want("guard", scheduler=(scheduler, optional(SCHEDULER)), scaler=(scaler, optional(SCALER)))
        want("guard", max_grad_norm=(max_grad_norm, optional(REAL)))
        want("guard", accelerator=(accelerator, optional(ACCELERATOR)), group=(group, optional(GROUP)))
        want("guard", divide_loss=(divide_loss, FLAG), on_device=(on_device, optional(FLAG)), verbose=(verbose, FLAG))
        want("guard", black_box=(black_box, optional(BOX)), accumulation_steps=(accumulation_steps, WHOLE))
        limits = Limits(explode_at, spike_at, max_skips, min_scale, check_parameters)
        _check_arguments(scheduler, accelerator, accumulation_steps, max_grad_norm, explode_at, spike_at, max_skips)
        self.model = model = root_module(model)
        self.scheduler = scheduler
        self.accelerator = accelerator
        self.max_grad_norm = max_grad_norm
        self.divide_loss = divide_loss
        self.accumulation_steps = accumulation_steps
        if accelerator is not None:
            self.accumulation_steps = int(accelerator.gradient_accumulation_steps)
        self._given = optimizer
        self.optimizer = unwrapped(optimizer)
        scaler = scaler if scaler is not None else getattr(optimizer, "scaler", None)
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        parameters = trained(model, self.optimizer)
        self.warnings = check(model, self.optimizer, parameters, scaled=self.scaler is not None)
        self.on_device = _keeps_on_device(self.optimizer, parameters, on_device)
        self.judge = Judge(parameters, limits, micro_batches=self.accumulation_steps, group=group, verbose=verbose)
        self.recorder = black_box.attach(model) if black_box is not None else None
        self._pending: _Pending | None = None
        self._owed: bool | None = None
        self._micro = 0
        if verbose:
            say(self.warnings)

    def step(self, loss: Tensor, *, tokens: Tensor | int | None = None) -> Outcome:
        """Backward, then `check_and_step`.

        Args:
            loss: Of this micro-batch, as the model gave it, 0-dim; never replaced.
            tokens: Supervised tokens in it, if you know. Without it a micro-batch counts as empty where its loss is
                NaN or 0 and no gradient moved; over several ranks, where gradients are averages, only if that is so
                on all of them.

        Raises:
            GuardStop: Too many skips in a row, or a weight is not finite.
            InputError: The loss is not one number, or has no graph.
        """
        check_loss(loss, tokens)
        if not loss.requires_grad:
            raise InputError(
                "guard: this loss has no graph (detached, made under no_grad, or from nothing that trains), so that "
                "backward() has nowhere to go; pass what the model gave"
            )
        share = loss / self.accumulation_steps if self.divide_loss and self.accumulation_steps > 1 else loss
        if self.accelerator is not None:
            # accelerate divides by itself
            self.accelerator.backward(loss if self.divide_loss else loss * self.accumulation_steps)
        elif self.scaler is not None:
            self.scaler.scale(share).backward()
        else:
            share.backward()
        return self.check_and_step(share, tokens=tokens)

    def check_and_step(self, loss: Tensor, *, tokens: Tensor | int | None = None) -> Outcome:
        """For those who call backward themselves: everything after it. Do not unscale, clip, step or zero as well.

        Args:
            loss: What backward was called on, before `scaler.scale`; with accumulation, this micro-batch's share.
            tokens: As for `step`.

        Raises:
            GuardStop: Too many skips in a row, or a weight is not finite.
        """
        check_loss(loss, tokens)
        self._catch_up()
        follow(self.judge, self.model, self.optimizer, scaled=self.scaler is not None)
        self.judge.note(loss, tokens)
        if self.recorder is not None:
            self.recorder.noted(loss)
        self._micro += 1
        if not self._window_ends():
            return Outcome(Facts(self.judge.ledger.steps + 1, "accumulating"))
        self._micro = 0
        scale = None
        if self.scaler is not None:
            scale = self.scaler.scale(torch.ones((), device=loss.device))
            self.scaler.unscale_(self.optimizer)
        verdict = self.judge.weigh(scale)
        window = self.recorder.window() if self.recorder is not None else None
        return self._act_on_device(verdict, window) if self.on_device else self._act_on_host(verdict, window)

    def settle(self) -> None:
        """Wait for the last step's decision, act on it, and look at the weights: the end of a run.

        Where parameters are sharded over ranks, call it on all of them.

        Raises:
            GuardStop: Too many skips in a row, or a weight is not finite.
        """
        self._catch_up()
        self.judge.confirm()

    def metrics(self) -> dict[str, float]:
        """Counts so far, named `guard/...`."""
        self._learn()
        return self.judge.ledger.totals()

    def state_dict(self) -> dict[str, Any]:
        """Plain values that JSON holds. Save model, optimizer, scheduler and scaler beside it, before it or after.

        The schedule stays where it is: if it is to be stepped for the last decision, that is in the state. Where
        parameters are sharded over ranks, call it on all of them.

        Raises:
            GuardStop: A weight is not finite: keep the checkpoint before. Or too many skips in a row.
            InputError: In the middle of an accumulation window.
        """
        self._learn()
        self.judge.confirm()
        return {**self.judge.state_dict(), "owed": self._owed}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.judge.load_state_dict(saved)
        self._owed = saved.get("owed")

    def _learn(self) -> None:
        """Fetch the last decision if it is still on the device; what the schedule is owed for it is kept."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        *report, ruined = pending.figures()
        pending.facts = self.judge.read(pending.verdict, report)
        self.judge.condemn(ruined=bool(ruined))
        self._owed = pending.facts.kind == "stepped"
        window, pending.window = pending.window, None  # the caller may keep the outcome
        conclude(self.recorder, window, self.judge, pending.facts, self.scaler)

    def _catch_up(self) -> None:
        self._learn()
        if self._owed is not None:
            owed, self._owed = self._owed, None
            self._schedule(stepped=owed)

    def _window_ends(self) -> bool:
        if self.accelerator is not None:
            return bool(self.accelerator.sync_gradients)
        return self._micro >= self.accumulation_steps

    def _act_on_host(self, verdict: Verdict, window: Any) -> Outcome:
        facts = self.judge.read(verdict)
        stepped = facts.kind == "stepped"
        if stepped:
            self._clip(verdict)
            self.optimizer.step()
        self._close(verdict)
        self._schedule(stepped=stepped)
        self.judge.look_at_parameters(facts)
        conclude(self.recorder, window, self.judge, facts, self.scaler)
        return Outcome(facts)

    def _act_on_device(self, verdict: Verdict, window: Any) -> Outcome:
        self._clip(verdict)
        fused: Any = self.optimizer
        fused.grad_scale, fused.found_inf = None, verdict.skip.float()
        try:
            self.optimizer.step()
        finally:
            del fused.grad_scale, fused.found_inf
        self._close(verdict)
        self._pending = pending = _Pending(verdict, self.judge.look_at_parameters(None), window)

        def facts() -> Facts:
            if pending.facts is None:
                self._catch_up()
            assert pending.facts is not None  # noqa: S101 - it sets it before it can raise
            return pending.facts

        return Outcome(facts)

    def _clip(self, verdict: Verdict) -> None:
        if self.max_grad_norm is not None:
            clip_(verdict.grads, self.max_grad_norm, verdict.norm)

    def _close(self, verdict: Verdict) -> None:
        if self.scaler is not None and verdict.grads:  # a scaler that saw no gradient refuses to update
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def _schedule(self, *, stepped: bool) -> None:
        if self._given is not self.optimizer:
            says_skipped(self._given, not stepped)
        if stepped and self.scheduler is not None:
            self.scheduler.step()


class _Pending:
    """A verdict on its way to the host, and what the black box keeps of the window until it is there."""

    def __init__(self, verdict: Verdict, ruined: Tensor | None, window: Any) -> None:
        self.verdict = verdict
        self.window = window
        self.facts: Facts | None = None
        self._event: torch.cuda.Event | None = None
        report = verdict.report
        flag = torch.zeros_like(report[:1]) if ruined is None else ruined.to(report).reshape(1)
        self._report = torch.cat([report, flag])
        if report.is_cuda:
            # a plain read would wait for everything queued since; the copy is waited for alone
            host = torch.empty(self._report.shape, dtype=report.dtype, pin_memory=True)
            self._report = host.copy_(self._report, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def figures(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        return self._report.tolist()


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Torch's own optimizer in one that accelerate prepared.

    Raises:
        InputError: There is none.
    """
    inner: Any = optimizer
    while type(inner).__module__.startswith("accelerate."):
        inner = inner.optimizer
    if not isinstance(inner, torch.optim.Optimizer):
        raise InputError(
            f"guard: want a torch optimizer, or one that accelerate prepared; got {type(optimizer).__name__}"
        )
    return inner


def follow(judge: Judge, model: nn.Module, optimizer: torch.optim.Optimizer, *, scaled: bool) -> None:
    """Have the parameters judged that an optimizer holds now, if it gained or lost some.

    Raises:
        InputError: See `hfpatch.guarding.checks.check`.
    """
    if held(optimizer).keys() != judge.ids:
        parameters = trained(model, optimizer)
        check(model, optimizer, parameters, scaled=scaled)
        judge.follow(parameters)


def _keeps_on_device(
    optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter], wanted: bool | None
) -> bool:
    fused = skips_itself(optimizer)
    if fused and isinstance(optimizer, torch.optim.SGD) and any(g["momentum"] != 0 for g in optimizer.param_groups):
        if wanted:
            raise InputError(
                "guard: on_device=True, but SGD with momentum cannot skip by itself: where its first step is skipped, "
                "torch leaves the momentum uninitialised; use momentum=0 or fused AdamW, or leave on_device out: the "
                "host then reads the decision once a step"
            )
        return False
    if wanted and not fused:
        raise InputError(
            f"guard: on_device=True, but {type(optimizer).__name__} cannot skip by itself; pass fused=True to the "
            "optimizer, or leave on_device out: the host then reads the decision once a step"
        )
    if wanted is None:
        return fused and all(p.device.type == "cuda" for p in parameters.values())
    return wanted


def _check_arguments(
    scheduler: Any,
    accelerator: Any,
    accumulation_steps: int,
    max_grad_norm: float | None,
    explode_at: float | None,
    spike_at: float | None,
    max_skips: int,
) -> None:
    inner = getattr(scheduler, "scheduler", scheduler)
    if inner is not None and "metrics" in inspect.signature(inner.step).parameters:
        raise InputError(f"guard: {type(inner).__name__} needs a metric; leave scheduler= out and step it yourself")
    if accelerator is not None and accumulation_steps not in (1, accelerator.gradient_accumulation_steps):
        raise InputError(
            f"guard: accumulation_steps={accumulation_steps}, but the accelerator accumulates "
            f"{accelerator.gradient_accumulation_steps}; leave it out, the accelerator's counts"
        )
    numbers = {
        "accumulation_steps": accumulation_steps,
        "max_skips": max_skips,
        "max_grad_norm": max_grad_norm,
        "explode_at": explode_at,
        "spike_at": spike_at,
    }
    for name, value in numbers.items():
        if value is not None and not value > 0:
            raise InputError(f"guard: {name}={value}; want a number above 0, or None for no limit where there is one")
