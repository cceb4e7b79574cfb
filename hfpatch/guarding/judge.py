"""The decision: losses and gradients of one window of micro-batches -> step or skip.

Everything up to the verdict is tensor arithmetic on the gradients' device, without a host read. Over several ranks
one all-reduce carries the sums of squares of every parameter and the flags, and the decision is made from its
result, so that it is the same everywhere.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hfpatch.errors import InputError
from hfpatch.given import NUMBER, Kind, optional, want
from hfpatch.guarding.gradient_norms import piece, tensor_norms
from hfpatch.guarding.ledger import NAMED, Ledger, Limits
from hfpatch.guarding.outcome import Facts, Reason

if TYPE_CHECKING:
    from torch import Tensor, nn

TOKENS = Kind("a number of tokens", lambda v: v.numel() == 1 if isinstance(v, torch.Tensor) else NUMBER.fits(v))
WINDOW = 64
"""Good steps the running median is taken over."""
WARMUP = 16
"""Good steps before a norm can be called a spike."""
HEAD = 10
"""Numbers before the sums of squares in what the ranks reduce: bad losses, filled, micro-batches, loss, ruined, loss
without the NaN, NaN losses, micro-batches told to be empty; then the micro-batches that are empty if no gradient is,
and how many of those have a NaN loss."""
RUINED, SKIP = 4, -2
"""Places in a report."""


class Verdict(NamedTuple):
    """A decision, still on the device.

    `skip` bool and `norm` (of the local gradients where nothing is sharded, as torch sums it) are 0-dim; `report`
    holds the figures and `squares [parameters]` the sum of squares of each gradient, over all ranks; `grads` are the
    local parts.
    """

    skip: Tensor
    norm: Tensor
    report: Tensor
    squares: Tensor
    grads: list[Tensor]


class Judge:
    """Judges windows. Touches no weight, no gradient, no optimizer.

    Args:
        parameters: Whose gradients are judged, by name.
        limits: When to skip and when to stop.
        micro_batches: Micro-batches in a window; 1 spares the norm after each.
        group: Ranks that decide together; None is all of them.
        verbose: Say on stderr what was skipped (rank 0).

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
        self._norms: list[float] = []
        self._good_steps = 0
        self._ring: Tensor | None = None
        self._good: Tensor | None = None
        self._ruined: Tensor | None = None
        self._losses: list[Tensor] = []
        self._empties: list[Tensor | None] = []
        self._told: list[bool] = []
        self._before: Tensor | None = None
        self._seen_gradients = False
        self._constants: dict[Any, Tensor] = {}
        if self.world > 1:
            self._check_ranks()

    @property
    def open(self) -> bool:
        """Whether a window was begun and not judged yet."""
        return bool(self._losses)

    def follow(self, parameters: dict[str, nn.Parameter]) -> None:
        """Judge other parameters from now on, on all ranks alike."""
        self.names = self.ledger.names = list(parameters)
        self.parameters = list(parameters.values())
        self.ids = {id(p) for p in self.parameters}
        self._before = None

    def note(self, loss: Tensor, tokens: Tensor | int | None = None) -> None:
        """Take in a micro-batch, after its backward.

        Args:
            loss: Its loss as the model gave it, or its share of the window's; one number.
            tokens: Supervised tokens in it, where known. Else a micro-batch is empty if its loss is NaN or 0 and it
                left every gradient as it was.

        Raises:
            InputError: The loss is not one number.
        """
        check_loss(loss)
        value = loss.detach().reshape(())
        self._losses.append(value)
        self._told.append(tokens is not None)
        if tokens is not None:
            self._empties.append(_is_zero(tokens, value.device))
        elif self.micro_batches > 1:
            after = self._local_norms()
            before = self._before if self._before is not None else torch.zeros_like(after)
            # sharded gradients say nothing here: a rank may hold no part of them, or get them with the last micro-batch
            plain = [not piece(g, 1)[2] for p in self.parameters if (g := p.grad) is not None]
            same = (after == before).all().to(value.device) if plain and all(plain) else None
            self._empties.append(None if same is None else (value.isnan() | (value == 0)) & same)
            self._before = after
        else:
            self._empties.append(None)

    def weigh(self, scale: Tensor | None = None) -> Verdict:
        """Judge the window that ends here, without a host read. Gradients must be unscaled and unclipped.

        Args:
            scale: The loss scale they were made with, 0-dim.

        Raises:
            InputError: No parameter ever had a gradient.
        """
        places = [i for i, p in enumerate(self.parameters) if p.grad is not None]
        if not places and not self._seen_gradients:
            raise InputError(
                f"guard: none of {len(self.parameters)} parameters has a gradient after backward ({self.names[0]} "
                "first); make the guard after prepare() and fully_shard(), with the model that is called"
            )
        self._seen_gradients = True
        pieces = [piece(g, self.world) for p in self.parameters if (g := p.grad) is not None]
        grads = [local for local, _, _ in pieces]
        device = grads[0].device if grads else self._losses[0].device
        real = torch.float32 if device.type == "mps" else torch.float64
        norms = tensor_norms(grads) if grads else torch.zeros(1, device=device)
        norm = torch.linalg.vector_norm(norms)
        squares = torch.zeros(len(self.parameters), dtype=real, device=device)
        if grads:
            share = self._shares(tuple(weight for _, weight, _ in pieces), device)
            part = norms.to(real).square() * share
            squares = (
                part if len(places) == len(squares) else squares.index_copy(0, self._index(tuple(places), device), part)
            )
        head = self._head(device, real)
        if self.world > 1:
            packed = torch.cat([head, squares])
            torch.distributed.all_reduce(packed, group=self.group)
            head, squares = packed[:HEAD], packed[HEAD:]
        sharded = any(cut for _, _, cut in pieces)
        total = squares.sum().sqrt() if self.world > 1 or sharded else norm.to(real)
        verdict = self._decide(head, total, scale)
        self._losses, self._empties, self._told, self._before = [], [], [], None
        return Verdict(verdict[SKIP] > 0, total.float() if sharded else norm, verdict, squares, grads)

    def _head(self, device: torch.device, real: torch.dtype) -> Tensor:
        losses = torch.stack([x.to(device=device, dtype=real) for x in self._losses])
        candidate = losses.isnan() | (losses == 0)
        never, always = (make((), dtype=torch.bool, device=device) for make in (torch.zeros, torch.ones))
        empty = torch.stack([never if known is None else known.to(device) for known in self._empties])
        doubtful = candidate & torch.stack([always if known is None else never for known in self._empties])
        wrong = ~losses.isfinite() & ~empty
        bad = (wrong & ~doubtful).sum().to(real)
        filled = (~empty & ~doubtful).sum().to(bad)
        count = torch.full_like(bad, len(losses))
        ruined = torch.zeros_like(bad) if self._ruined is None else self._ruined.to(bad)
        told = torch.stack([known if told else never for known, told in zip(empty, self._told, strict=True)])
        learned = losses.nansum() / self.world
        sums = [s.sum().to(bad) for s in (losses.isnan(), told, doubtful, wrong & doubtful)]
        return torch.stack([bad, filled, count, losses.sum() / self.world, ruined, learned, *sums])

    def _decide(self, head: Tensor, total: Tensor, scale: Tensor | None) -> Tensor:
        """The report: head less the doubtful ones, total, median, exploded, spiked, scale, skip, unfilled."""
        busy = (total != 0).to(head)
        doubtful, doubtful_bad = head[-2] * busy, head[-1] * busy
        head = torch.cat([torch.stack([head[0] + doubtful_bad, head[1] + doubtful]), head[2:-2]])
        ring, good = self._memory(total)
        count = good.clamp(max=WINDOW)
        median = ring.sort().values.gather(0, ((count - 1) // 2).clamp(min=0).reshape(1))[0]
        never = torch.zeros_like(total, dtype=torch.bool)
        explode, spike = self.limits.explode_at, self.limits.spike_at
        exploded = never if explode is None else total > explode
        spiked = never if spike is None else (count >= WARMUP) & (median > 0) & (total > spike * median)
        unfilled = head[1] == 0
        skip = (head[0] > 0) | ~total.isfinite() | exploded | spiked | unfilled | (head[RUINED] > 0)
        here = torch.arange(WINDOW, device=ring.device) == good % WINDOW
        self._ring = torch.where(here & ~skip, total, ring)
        self._good = good + (~skip).to(good)
        loss_scale = torch.full_like(total, math.nan) if scale is None else scale.to(total)
        median = median.masked_fill(count < WARMUP, math.nan)
        flags = [total, median, exploded, spiked, loss_scale, skip, unfilled]
        return torch.cat([head, torch.stack([f.to(total) for f in flags])])

    def read(self, verdict: Verdict, figures: list[float] | None = None) -> Facts:
        """Fetch a verdict (the one host read; a second one if it was a skip) and count it.

        Args:
            verdict: What `weigh` gave.
            figures: Its report, if it is on the host already.
        """
        report = verdict.report.tolist() if figures is None else figures
        if report[RUINED]:
            self._condemn()
        return self.ledger.enter(report, verdict.squares.tolist() if report[SKIP] else ())

    def look_at_parameters(self, facts: Facts | None) -> Tensor | None:
        """Look, after a step or a skip, whether a weight became non-finite.

        On the CPU the ledger is told at once. Over several ranks the answer rides with the next window, so that all
        of them stop in the same step.

        Args:
            facts: What was done; None if only the device knows.

        Returns:
            Whether one did, 0-dim, on the device; None if it was not looked at.
        """
        every = self.limits.check_parameters
        due = every > 0 and (self.ledger.steps + (facts is None)) % every == 0
        broken = facts is not None and facts.reason in (Reason.LOSS, Reason.GRADIENTS)
        self._ruined = None
        if (due or broken) and self.ledger.stopping is None:
            self._ruined = self._broken()
            if facts is not None and self._ruined.device.type == "cpu":
                self.condemn(ruined=bool(self._ruined))
        return self._ruined

    def condemn(self, *, ruined: bool) -> None:
        """Have the ledger stop because weights are not finite, unless other ranks must hear of it first."""
        if ruined and self.world == 1:
            self._condemn()

    def confirm(self) -> None:
        """Look at the weights now: before they are saved, and when training is over.

        Ranks that hold copies come to the same answer alone; those that hold shards must all call.

        Raises:
            GuardStop: A weight is not finite.
        """
        if self.limits.check_parameters == 0 and self._ruined is None:
            return
        ruined = self._broken().float()
        if self.world > 1 and any(piece(p.detach(), 1)[2] for p in self.parameters):
            torch.distributed.all_reduce(ruined, op=torch.distributed.ReduceOp.MAX, group=self.group)
        if ruined:
            self._condemn()
        self.ledger.raise_if_due()

    def _broken(self) -> Tensor:
        parts = [piece(p.detach(), 1)[0] for p in self.parameters if p.is_floating_point()]
        return ~tensor_norms(parts).isfinite().all()

    def _condemn(self) -> None:
        self.ledger.stop(self._ruin(self.ledger.steps))
        self._ruined = None  # told: whoever puts good weights back may go on

    def _ruin(self, step: int) -> str:
        found = [
            n
            for n, p in zip(self.names, self.parameters, strict=True)
            if p.is_floating_point() and not bool(piece(p.detach(), 1)[0].isfinite().all())
        ]
        where = f"{len(found)} of {len(self.names)} parameters are not finite"
        if not found:
            where = "a parameter is not finite on another rank, or has a norm beyond float32"
        return (
            f"guard: {where} after step {step}{': ' if found else ''}{', '.join(found[:NAMED])}. Skipping cannot mend "
            "weights: go back to the checkpoint before, train in float32 or bfloat16, look at the optimizer's eps and "
            "learning rate"
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
        return {
            **self.ledger.state_dict(),
            "good_steps": self._good_steps if self._good is None else int(self._good),
            "norms": self._norms if self._ring is None else [None if math.isnan(n) else n for n in self._ring.tolist()],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.ledger.load_state_dict(saved)
        self._good_steps = saved["good_steps"]
        self._norms = [math.nan if n is None else n for n in saved["norms"]]
        self._ring = self._good = self._ruined = None

    def _memory(self, like: Tensor) -> tuple[Tensor, Tensor]:
        if self._ring is None or self._good is None:
            known = self._norms or [math.nan] * WINDOW
            self._ring = torch.tensor(known, dtype=like.dtype, device=like.device)
            self._good = torch.tensor(self._good_steps, device=like.device)
        return self._ring, self._good

    def _local_norms(self) -> Tensor:
        grads = [(i, piece(g, 1)[0]) for i, p in enumerate(self.parameters) if (g := p.grad) is not None]
        if not grads:
            return torch.zeros(len(self.parameters), device=self._losses[-1].device)
        norms = tensor_norms([g for _, g in grads])
        empty = torch.zeros(len(self.parameters), dtype=norms.dtype, device=norms.device)
        return empty.index_copy(0, self._index(tuple(i for i, _ in grads), norms.device), norms)

    def _index(self, places: tuple[int, ...], device: torch.device) -> Tensor:
        """A list of places as a tensor; kept, because copying it to a device makes the host wait."""
        return self._kept((places, device), places, device)

    def _shares(self, weights: tuple[float, ...], device: torch.device) -> float | Tensor:
        return weights[0] if len(set(weights)) == 1 else self._kept((weights, device), weights, device)

    def _kept(self, key: Any, values: tuple[float, ...], device: torch.device) -> Tensor:
        if key not in self._constants:
            if len(self._constants) > 64:  # parameters that come and go (layer drop) make many
                self._constants.clear()
            self._constants[key] = torch.tensor(values, device=device)
        return self._constants[key]

    def _check_ranks(self) -> None:
        mine = len(self.parameters)
        device = piece(self.parameters[0].detach(), 1)[0].device
        counts = torch.tensor([mine, -mine], device=device)
        torch.distributed.all_reduce(counts, op=torch.distributed.ReduceOp.MAX, group=self.group)
        most, least = int(counts[0]), -int(counts[1])
        if most != least:
            raise InputError(
                f"guard: this rank trains {mine} parameters, others {least} to {most}; ranks that hold different "
                "layers (pipeline stages) cannot be judged together: pass group= with the ranks that hold the same"
            )


def check_loss(loss: Any, tokens: Any = None) -> None:
    """Refuse what is no loss, or no number of tokens.

    Raises:
        InputError: One is not one number.
    """
    want("guard", tokens=(tokens, optional(TOKENS)))
    if not isinstance(loss, torch.Tensor):
        raise InputError(f"guard: want a loss, a tensor of one number; got {type(loss).__name__}; pass output.loss")
    if loss.numel() != 1:
        raise InputError(f"guard: want a loss of one number; got shape {tuple(loss.shape)}; reduce it first")


def _is_zero(tokens: Tensor | int, device: torch.device) -> Tensor:
    if isinstance(tokens, torch.Tensor):
        return tokens.to(device).reshape(()) == 0
    return torch.full((), tokens == 0, dtype=torch.bool, device=device)
