"""Guard: a plain training loop that survives a bad batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hfpatch.compat.accelerate import says_skipped
from hfpatch.deprecated import keywords
from hfpatch.errors import InputError
from hfpatch.given import FLAG, REAL, WHOLE, having, optional, torch_optimizer, want
from hfpatch.guarding.checks import check, outside, trained_parameters
from hfpatch.guarding.gradient_norms import clip_
from hfpatch.guarding.history import OnSpike
from hfpatch.guarding.inputs import check_loss, check_state, globs, matching
from hfpatch.guarding.judge import Judge, Verdict
from hfpatch.guarding.ledger import Limits
from hfpatch.guarding.outcome import Facts, Outcome
from hfpatch.guarding.recorder import BOX, Box, record_and_raise
from hfpatch.guarding.stepping import check_arguments, keeps_on_device, update_parameters
from hfpatch.model.walk import root_module
from hfpatch.report import say

if TYPE_CHECKING:
    from torch import Tensor


SCHEDULER = having("a scheduler, with a step(),", "step")
SCALER = having("a GradScaler", "scale", "unscale_", "update", "is_enabled")
ACCELERATOR = having("an Accelerator", "backward", "prepare")
GROUP = having("a process group", "rank", "size")
SELDOM = 10
"""Steps between two checks of the weights where the host does not wait for a decision: one costs 2 ms of host time for
200 parameters, on a host that feeds an H200."""


class Guard:
    """For each batch: backward, unscale, decide, clip, step or skip, update the scale, schedule, zero the gradients.

        guard = hfpatch.Guard(model, optimizer, scheduler)
        for batch in loader:
            outcome = guard.step(model(**batch).loss)

    A skipped batch changes neither weights nor optimizer state nor schedule. The host reads the decision once per step,
    except with a fused optimizer on CUDA: the optimizer gets the decision as `found_inf`, and the host reads it at the
    next `step` or `settle()`. The scheduler is stepped, a skip reported and `GuardStop` raised only then.

    A skip under a GradScaler lowers the scale once if the gradients were not finite, as in torch. Running statistics
    (BatchNorm) were updated by the forward pass already and are not restored.

    The guard judges, clips and zeroes the gradients of the parameters in the optimizer, including those added later. A
    model with two optimizers needs two guards: one backward, then `check_and_step` of each (but not with one shared
    GradScaler, which each guard would update).

    Over several ranks the guard must be made on every rank, after the model was wrapped, and `step` must be called
    equally often on all of them; one all-reduce per step gives all ranks the same decision.

    Args:
        model: The model that is trained, wrapped as it is called (DDP, `fully_shard`, `accelerator.prepare`).
        optimizer: A torch optimizer, or one that accelerate prepared.
        scheduler: Stepped after each step that was not skipped; None if you step it yourself.
        scaler: A `torch.amp.GradScaler`; accelerate's own is found.
        accelerator: Runs backward; its `sync_gradients` marks the end of a window (`accelerator.accumulate`).
        max_grad_norm: Norm to clip to; None for no clipping.
        explode_at: Norm, before clipping, above which a step is skipped whatever the history; None for no limit.
        accumulation_steps: Micro-batches per step, without an accelerator.
        spike_at: Multiple of the median norm (64 good steps, once there are 16) above which a step stands out; None
            for no limit. Healthy batches reach 144 times the median, with a loss as usual (see `guarding/history.py`).
        on_spike: `skip`: a step that stands out is skipped if its loss is unusual too, or its norm beyond 1,000 times
            the median; else it is taken, clipped to the median norm. `clip`: it is clipped in any case.
        components: Globs of parameter names by component, such as `{"encoder": "audio_tower.*"}`; `Outcome.norms` has
            the gradient norm of each.
        clear_outside: Clear gradients of parameters outside the optimizer that are not finite, where a step is skipped.
            They are named in any case.
        divide_loss: Divide each loss by the number of micro-batches. False if losses are already shares of the
            window's loss (sum over tokens, divided by `num_items_in_batch` of the whole window).
        max_skips: Skips in a row after which training stops, without ordinary overflows and zero-gradient steps.
        min_scale: Loss scale below which an overflow is no longer ordinary.
        check_parameters: Check for non-finite weights every this many steps; 0 for only after a batch that is not
            finite. None for every step, or every 10 steps if the decision stays on the device. They are checked before
            they are saved and at the end too.
        on_device: Keep the decision on the device; None: if the optimizer is fused and all parameters are on CUDA. True
            needs a fused optimizer other than SGD with momentum.
        group: Process group of the ranks that decide together; None for all ranks.
        black_box: An `hfpatch.BlackBox`, which keeps skipped batches and names what went wrong in them.
        verbose: Report skipped steps on stderr.

    Attributes:
        warnings: The warnings at construction.

    Raises:
        InputError: See `hfpatch.guarding.checks.check`; a scheduler that needs a metric; contradicting arguments.
    """

    @keywords("Guard", "by position a scaler and an accelerator, or two norms, are easily exchanged")
    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        scheduler: Any = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
        accelerator: Any = None,
        max_grad_norm: float | None = 1.0,
        explode_at: float | None = None,
        accumulation_steps: int = 1,
        spike_at: float | None = 10.0,
        on_spike: OnSpike = "skip",
        components: Mapping[str, str | Sequence[str]] | None = None,
        clear_outside: bool = False,
        divide_loss: bool = True,
        max_skips: int = 10,
        min_scale: float = 1.0,
        check_parameters: int | None = None,
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
        every = 1 if check_parameters is None else check_parameters
        limits = Limits(explode_at, spike_at, max_skips, min_scale, every, on_spike, clear_outside)
        check_arguments(scheduler, accelerator, accumulation_steps, max_grad_norm, limits)
        self.model = model = root_module(model)
        self.scheduler = scheduler
        self.accelerator = accelerator
        self.max_grad_norm = max_grad_norm
        self.divide_loss = divide_loss
        self.accumulation_steps = accumulation_steps
        if accelerator is not None:
            self.accumulation_steps = int(accelerator.gradient_accumulation_steps)
        self._given = optimizer
        self.optimizer = torch_optimizer("guard", optimizer)
        scaler = scaler if scaler is not None else getattr(optimizer, "scaler", None)
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        parameters = trained_parameters(model, self.optimizer)
        self.warnings = check(model, self.optimizer, parameters, scaled=self.scaler is not None)
        self.on_device = keeps_on_device(self.optimizer, parameters, on_device)
        if check_parameters is None and self.on_device:
            limits = replace(limits, check_parameters=SELDOM)
        self.judge = Judge(parameters, limits, micro_batches=self.accumulation_steps, group=group, verbose=verbose)
        self.judge.outside = outside(model, self.optimizer)
        self.judge.components = matching(globs(components), self.judge.names)
        self.recorder = black_box.attach(model) if black_box is not None else None
        self._pending: _Pending | None = None
        self._owed: bool | None = None
        self._micro = 0
        if verbose:
            say(self.warnings)

    def step(self, loss: Tensor, *, tokens: Tensor | int | None = None) -> Outcome:
        """Backward, then `check_and_step`. A window whose backward pass raises or is interrupted is dropped.

        Args:
            loss: Loss of this micro-batch, as the model returned it, one number.
            tokens: Number of supervised tokens in it, if known. Without it a micro-batch counts as empty if its loss is
                NaN or 0 and no gradient changed; over several ranks, only if that holds on all of them.

        Returns:
            The outcome. If the decision is on a device, reading the outcome waits for it.

        Raises:
            GuardStop: Too many skips in a row, or a weight is not finite.
            InputError: The loss is not one number, or has no graph.
        """
        check_loss(loss, tokens)
        if not loss.requires_grad:
            raise InputError(
                "guard: this loss has no autograd graph (it is detached, was made under no_grad, or depends on no "
                "trained parameter), so backward() cannot run; pass the loss that the model returned"
            )
        share = loss / self.accumulation_steps if self.divide_loss and self.accumulation_steps > 1 else loss
        ended = False
        try:
            if self.accelerator is not None:
                # accelerate divides by itself
                self.accelerator.backward(loss if self.divide_loss else loss * self.accumulation_steps)
            elif self.scaler is not None:
                self.scaler.scale(share).backward()
            else:
                share.backward()
            ended = True
        finally:
            if not ended:
                self._drop_window()
        return self.check_and_step(share, tokens=tokens)

    def check_and_step(self, loss: Tensor, *, tokens: Tensor | int | None = None) -> Outcome:
        """Do everything after backward, if you call backward yourself. Do not unscale, clip, step or zero in addition.

        Args:
            loss: The loss of backward, before `scaler.scale`; with accumulation, this micro-batch's share.
            tokens: As for `step`.

        Raises:
            GuardStop: Too many skips in a row, or a weight is not finite.
        """
        check_loss(loss, tokens)
        self._catch_up()
        update_parameters(self.judge, self.model, self.optimizer, scaled=self.scaler is not None)
        self.judge.add(loss, tokens)
        if self.recorder is not None:
            self.recorder.end_micro_batch(loss)
        self._micro += 1
        if not self._window_ends():
            return Outcome(Facts(self.judge.ledger.steps + 1, "accumulating"))
        self._micro = 0
        scale = None
        if self.scaler is not None:
            scale = self.scaler.scale(torch.ones((), device=loss.device, dtype=torch.float32))
            self.scaler.unscale_(self.optimizer)
        verdict = self.judge.decide(scale)
        window = self.recorder.end_window() if self.recorder is not None else None
        return self._act_on_device(verdict, window) if self.on_device else self._act_on_host(verdict, window)

    def settle(self) -> None:
        """Wait for the last step's decision, act on it, and check the weights; call it at the end of a run.

        If parameters are sharded over ranks, call it on all ranks.

        Raises:
            GuardStop: Too many skips in a row, a weight is not finite, or every step of the run was skipped.
        """
        self._catch_up()
        self.judge.require_finite_weights()
        self.judge.ledger.require_a_step()

    def metrics(self) -> dict[str, float]:
        """Return the counts so far, named `guard/...`."""
        self._fetch_decision()
        return self.judge.ledger.totals()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values for JSON. Save model, optimizer, scheduler and scaler with it.

        The scheduler is not stepped: if a step for the last decision is outstanding, the state says so. If parameters
        are sharded over ranks, call it on all ranks.

        Raises:
            GuardStop: A weight is not finite (keep the previous checkpoint), or too many skips in a row.
            InputError: Called in the middle of an accumulation window.
        """
        self._fetch_decision()
        self.judge.require_finite_weights()
        return {**self.judge.state_dict(), "owed": self._owed}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Raises:
            InputError: It is no such state.
        """
        check_state(saved)
        self.judge.load_state_dict(saved)
        self._owed = saved.get("owed")

    def _fetch_decision(self) -> None:
        """Fetch the last decision if it is still on the device, and note whether the scheduler is to be stepped."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        *report, ruined = pending.figures()
        pending.facts = self.judge.read(pending.verdict, report)
        self.judge.stop_for_weights(ruined=bool(ruined))
        self._owed = pending.facts.kind == "stepped"
        window, pending.window = pending.window, None  # released, because the caller may keep the outcome
        record_and_raise(self.recorder, window, self.judge, pending.facts, self.scaler)

    def _catch_up(self) -> None:
        self._fetch_decision()
        if self._owed is not None:
            owed, self._owed = self._owed, None
            self._schedule(stepped=owed)

    def _drop_window(self) -> None:
        """Forget the window's micro-batches: some parameters have their gradient, others not."""
        self._micro = 0
        self.judge.drop_window()
        if self.recorder is not None:
            self.recorder.end_window()
        self.optimizer.zero_grad(set_to_none=True)

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
        self.judge.check_weights(facts)
        record_and_raise(self.recorder, window, self.judge, facts, self.scaler)
        return Outcome(facts, partial(self.judge.by_component, verdict))

    def _act_on_device(self, verdict: Verdict, window: Any) -> Outcome:
        self._clip(verdict)
        fused: Any = self.optimizer
        fused.grad_scale, fused.found_inf = None, verdict.skip.float()
        try:
            self.optimizer.step()
        finally:
            del fused.grad_scale, fused.found_inf
        self._close(verdict)
        self._pending = pending = _Pending(verdict, self.judge.check_weights(None), window)

        def facts() -> Facts:
            if pending.facts is None:
                self._catch_up()
            assert pending.facts is not None  # noqa: S101 - _catch_up sets it before it can raise
            return pending.facts

        return Outcome(facts, partial(self.judge.by_component, verdict))

    def _clip(self, verdict: Verdict) -> None:
        if self.max_grad_norm is not None or self.judge.limits.spike_at is not None:
            clip_(verdict.grads, self.max_grad_norm or math.inf, verdict.norm, verdict.limit)

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
    """A verdict that is being copied to the host, and the window that the black box keeps until then."""

    def __init__(self, verdict: Verdict, ruined: Tensor | None, window: Any) -> None:
        self.verdict = verdict
        self.window = window
        self.facts: Facts | None = None
        self._event: torch.cuda.Event | None = None
        report = verdict.report
        flag = torch.zeros_like(report[:1]) if ruined is None else ruined.to(report).reshape(1)
        self._report = torch.cat([report, flag])
        if report.is_cuda:
            # a plain read would also wait for everything queued since; this waits for the copy only
            host = torch.empty(self._report.shape, dtype=report.dtype, device="cpu", pin_memory=True)
            self._report = host.copy_(self._report, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def figures(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        return self._report.tolist()
