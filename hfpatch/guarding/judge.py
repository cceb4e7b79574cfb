"""The decision: losses and gradients of one window of micro-batches -> step or skip.

The verdict is computed by tensor arithmetic on the gradients' device, without a host read. Over several ranks one
all-reduce carries the sum of squares of every gradient and the flags, and each rank decides from its result, so all
decide alike.
"""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hfpatch.errors import InputError
from hfpatch.guarding import window
from hfpatch.guarding.gradient_norms import local_part, local_parts, tensor_norms
from hfpatch.guarding.history import History
from hfpatch.guarding.inputs import check_loss, is_zero
from hfpatch.guarding.ledger import NAMED, Ledger, Limits
from hfpatch.guarding.outcome import Facts, Reason

if TYPE_CHECKING:
    from torch import Tensor, nn


class Verdict(NamedTuple):
    """A decision, on the device.

    Attributes:
        skip: True to skip the step, bool, 0-dim.
        limit: Norm to clip to, 0-dim, because the step stands out; infinite if it does not, None if no step can.
        norm: L2 norm of all gradients, 0-dim; if none is sharded, the norm of this rank's gradients as torch sums it.
        report: The figures, see `window.py`.
        squares: Sum of squares of each gradient over all ranks, `[parameters]`.
        grads: This rank's parts of the gradients.
        weights: The share with which each of them counts in a sum over all ranks.
        places: The index of each in the list of parameters.
    """

    skip: Tensor
    limit: Tensor | None
    norm: Tensor
    report: Tensor
    squares: Tensor
    grads: list[Tensor]
    weights: tuple[float, ...]
    places: tuple[int, ...]


class Judge:
    """Decides for each window of micro-batches. Changes no weight, no gradient and no optimizer.

    Args:
        parameters: The parameters whose gradients are judged, by name.
        limits: When to skip and when to stop.
        micro_batches: Micro-batches in a window; with 1 no norm is computed after each micro-batch.
        group: Process group of the ranks that decide together; None for all ranks.
        verbose: Report skipped steps on stderr (rank 0).

    Attributes:
        outside: Parameters of the model that train and are not judged, by name.
        components: Globs of parameter names, by component.

    Raises:
        InputError: The ranks hold different numbers of parameters.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        limits: Limits,
        *,
        micro_batches: int = 1,
        group: Any = None,
        verbose: bool = True,
    ) -> None:
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        self.ids = {id(p) for p in self.parameters}
        self.limits = limits
        self.micro_batches = micro_batches
        self.group = group
        dist = torch.distributed
        self.world = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
        self.ledger = Ledger(self.names, limits, verbose=verbose)
        self.outside: dict[str, nn.Parameter] = {}
        self.components: dict[str, tuple[str, ...]] = {}
        self.history = History(limits.spike_at, limits.on_spike)
        self._ruined: Tensor | None = None
        self._suspect = False
        self._losses: list[Tensor]
        self._empties: list[Tensor | None]
        self._told: list[bool]
        self._before: Tensor | None
        self.drop_window()
        self._seen_gradients = False
        self._constants = window.Constants()
        if self.world > 1:
            self._check_ranks()

    @property
    def open(self) -> bool:
        """True if a window was begun and not decided yet."""
        return bool(self._losses)

    def set_parameters(self, parameters: dict[str, nn.Parameter]) -> None:
        """Judge these parameters from now on; call it on all ranks."""
        self.names = self.ledger.names = list(parameters)
        self.parameters = list(parameters.values())
        self.ids = {id(p) for p in self.parameters}
        self._before = None

    def add(self, loss: Tensor, tokens: Tensor | int | None = None) -> None:
        """Add a micro-batch to the window, after its backward pass.

        Args:
            loss: Its loss as the model returned it, or its share of the window's loss; one number.
            tokens: Number of supervised tokens in it, if known. Without it a micro-batch counts as empty if its loss is
                NaN or 0 and it changed no gradient.

        Raises:
            InputError: The loss is not one number.
        """
        check_loss(loss)
        value = loss.detach().reshape(())
        self._losses.append(value)
        self._told.append(tokens is not None)
        if tokens is not None:
            self._empties.append(is_zero(tokens, value.device))
        elif self.micro_batches > 1:
            after = self._local_norms()
            before = self._before if self._before is not None else torch.zeros_like(after)
            # sharded gradients do not tell: a rank may hold no part of them, or get them with the last micro-batch
            plain = [not local_part(g, 1)[2] for p in self.parameters if (g := p.grad) is not None]
            same = (after == before).all().to(value.device) if plain and all(plain) else None
            self._empties.append(None if same is None else (value.isnan() | (value == 0)) & same)
            self._before = after
        else:
            self._empties.append(None)

    def drop_window(self) -> None:
        """Forget the micro-batches of this window."""
        self._losses, self._empties, self._told, self._before = [], [], [], None

    def decide(self, scale: Tensor | None = None) -> Verdict:
        """Decide for the window that ends here, without a host read. Gradients must be unscaled and unclipped.

        Args:
            scale: The loss scale of the backward pass, 0-dim; None without one.

        Returns:
            The verdict, on the gradients' device.

        Raises:
            InputError: No parameter ever had a gradient.
        """
        found = [(i, g) for i, p in enumerate(self.parameters) if (g := p.grad) is not None]
        if not found and not self._seen_gradients:
            raise InputError(
                f"guard: none of {len(self.parameters)} parameters (the first is {self.names[0]}) has a gradient after "
                "backward(); make the guard after prepare() and fully_shard(), with the model that is called"
            )
        self._seen_gradients = True
        grads, weights, sharded = local_parts([g for _, g in found], self.world)
        places = tuple(i for i, _ in found)
        device = grads[0].device if grads else self._losses[0].device
        real = torch.float32 if device.type == "mps" else torch.float64
        norms = tensor_norms(grads) if grads else torch.zeros(1, device=device, dtype=torch.float32)
        norm = torch.linalg.vector_norm(norms)
        squares = norms.to(real).square()
        if any(weight != 1 for weight in weights):
            squares = squares * self._shares(weights, device)
        if len(places) != len(self.parameters):
            none = torch.zeros(len(self.parameters), dtype=real, device=device)
            squares = none.index_copy(0, self._constants(places, device), squares) if grads else none
        head = window.figures(
            self._losses, self._empties, self._told, self._ruined, self.world, real, self._constants, device
        )
        if self.world > 1:
            packed = torch.cat([head, squares])
            torch.distributed.all_reduce(packed, group=self.group)
            head, squares = packed[: window.FIGURES], packed[window.FIGURES :]
        total = squares.sum().sqrt() if self.world > 1 or sharded else norm.to(real)
        judged = window.judged(head, total, scale, self.limits.explode_at, self.history.usual(), self._constants)
        self.drop_window()
        shown = total.float() if sharded else norm
        return Verdict(judged.skip, judged.limit, shown, judged.report, squares, grads, weights, places)

    def read(self, verdict: Verdict, on_host: list[float] | None = None) -> Facts:
        """Read a verdict on the host and count it: one host read, a second one if the step was skipped.

        Args:
            verdict: The result of `decide`.
            on_host: Its report, if it is on the host already.
        """
        report = verdict.report.tolist() if on_host is None else on_host
        facts = self._counted(verdict, report)
        self._suspect = facts.reason in (Reason.LOSS, Reason.GRADIENTS)
        return facts

    def _counted(self, verdict: Verdict, report: list[float]) -> Facts:
        if report[window.RUINED]:
            self._stop()
        if not report[window.SKIP]:
            self.history.add(report[window.TOTAL], report[window.LEARNED])
            return self.ledger.record(report, ())
        squares = verdict.squares
        if not math.isfinite(report[window.TOTAL]) and not report[0]:
            squares = self._wide_squares(verdict)
            report = [*report]
            report[window.TOTAL] = float(squares.sum().sqrt())
        return self.ledger.record(report, squares.tolist(), self._outside_nonfinite())

    def _wide_squares(self, verdict: Verdict) -> Tensor:
        """Return the sums of squares of a skipped step in float64: those of finite gradients can pass float32."""
        if verdict.squares.device.type == "mps" or not verdict.grads:
            return verdict.squares
        weights = torch.tensor(verdict.weights, dtype=torch.float64, device=verdict.squares.device)
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64).to(weights.device) for g in verdict.grads]
        squares = torch.zeros_like(verdict.squares)
        squares[torch.tensor(verdict.places, device=squares.device)] = torch.stack(norms).square() * weights
        if self.world > 1:
            torch.distributed.all_reduce(squares, group=self.group)
        return squares

    def _outside_nonfinite(self) -> tuple[str, ...]:
        """Return the parameters outside the optimizer whose gradients are not finite; clear these if asked to."""
        bad = {n: p for n, p in self.outside.items() if p.grad is not None and not bool(p.grad.isfinite().all())}
        for parameter in bad.values() if self.limits.clear_outside else ():
            parameter.grad = None
        return tuple(bad)

    def by_component(self, verdict: Verdict) -> dict[str, float]:
        """Return the gradient norm of each of `components`, read from the device."""
        squares = dict(zip(self.names, verdict.squares.tolist(), strict=True))
        return {
            part: math.sqrt(sum(s for n, s in squares.items() if any(fnmatchcase(n, glob) for glob in globs)))
            for part, globs in self.components.items()
        }

    def check_weights(self, facts: Facts | None) -> Tensor | None:
        """Check, after a step or a skip, whether a weight is not finite, if `limits.check_parameters` asks for it.

        On the CPU the result goes to the ledger at once. Over several ranks it is part of the next window's all-reduce,
        so that all ranks stop in the same step.

        Args:
            facts: The decision; None if it is still on the device, and the decision before it counts.

        Returns:
            True if a weight is not finite, 0-dim, on the device; None if the weights were not checked.
        """
        every = self.limits.check_parameters
        due = every > 0 and (self.ledger.steps + (facts is None)) % every == 0
        self._ruined = None
        if (due or self._suspect) and self.ledger.stopping is None:
            self._ruined = self._any_nonfinite()
            if facts is not None and self._ruined.device.type == "cpu":
                self.stop_for_weights(ruined=bool(self._ruined))
        return self._ruined

    def stop_for_weights(self, *, ruined: bool) -> None:
        """Have the ledger stop the run if weights are not finite; over several ranks the next window does so."""
        if ruined and self.world == 1:
            self._stop()

    def require_finite_weights(self) -> None:
        """Check the weights now: before they are saved, and when training is over.

        Ranks that hold copies of all weights come to the same result alone; if weights are sharded, all ranks must
        call this. With `check_parameters=0` it checks only after a non-finite batch.

        Raises:
            GuardStop: A weight is not finite, or too many steps in a row were skipped.
        """
        if self.limits.check_parameters == 0 and self._ruined is None:
            return
        ruined = self._any_nonfinite().float()
        if self.world > 1 and any(local_part(p.detach(), 1)[2] for p in self.parameters):
            torch.distributed.all_reduce(ruined, op=torch.distributed.ReduceOp.MAX, group=self.group)
        if ruined:
            self._stop()
        self.ledger.raise_if_due()

    def _any_nonfinite(self) -> Tensor:
        with torch.no_grad():
            parts, _, _ = local_parts([p for p in self.parameters if p.is_floating_point()], 1)
            return ~(tensor_norms(parts) < math.inf).all()

    def _stop(self) -> None:
        self.ledger.stop(self._weights_message(self.ledger.steps))
        self._ruined = None  # reported: a run with good weights restored may continue

    def _weights_message(self, step: int) -> str:
        found = [
            n
            for n, p in zip(self.names, self.parameters, strict=True)
            if p.is_floating_point() and not bool(local_part(p.detach(), 1)[0].isfinite().all())
        ]
        where = f"{len(found)} of {len(self.names)} parameters are not finite"
        if not found:
            where = "a parameter is not finite on another rank, or has a norm beyond float32"
        return (
            f"guard: {where} after step {step}{': ' if found else ''}{', '.join(found[:NAMED])}. Skipping steps cannot "
            "repair weights: go back to an earlier checkpoint, train in float32 or bfloat16, and check the optimizer's "
            "eps and learning rate"
        )

    def state_dict(self) -> dict[str, Any]:
        """Counters, history and the norms behind the median, as plain values (JSON holds them).

        Raises:
            InputError: In the middle of an accumulation window, whose gradients no checkpoint holds.
        """
        if self.open:
            raise InputError(
                f"guard: state_dict() after {len(self._losses)} of {self.micro_batches} micro-batches: their gradients "
                "are not in any checkpoint; save after a step"
            )
        return {**self.ledger.state_dict(), **self.history.state_dict()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.ledger.load_state_dict(saved)
        self.history.load_state_dict(saved)
        self._ruined = None

    def _local_norms(self) -> Tensor:
        grads = [(i, local_part(g, 1)[0]) for i, p in enumerate(self.parameters) if (g := p.grad) is not None]
        if not grads:
            return torch.zeros(len(self.parameters), device=self._losses[-1].device, dtype=torch.float32)
        norms = tensor_norms([g for _, g in grads])
        empty = torch.zeros(len(self.parameters), dtype=norms.dtype, device=norms.device)
        return empty.index_copy(0, self._constants(tuple(i for i, _ in grads), norms.device), norms)

    def _shares(self, weights: tuple[float, ...], device: torch.device) -> float | Tensor:
        return weights[0] if len(set(weights)) == 1 else self._constants(weights, device)

    def _check_ranks(self) -> None:
        mine = len(self.parameters)
        device = local_part(self.parameters[0].detach(), 1)[0].device
        counts = torch.tensor([mine, -mine], device=device)
        torch.distributed.all_reduce(counts, op=torch.distributed.ReduceOp.MAX, group=self.group)
        most, least = int(counts[0]), -int(counts[1])
        if most != least:
            raise InputError(
                f"guard: this rank trains {mine} parameters, other ranks {least} to {most}; ranks with different "
                "layers (pipeline stages) cannot decide together: pass group= with the ranks that hold the same layers"
            )
