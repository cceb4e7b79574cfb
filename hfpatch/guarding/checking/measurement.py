"""A rehearsed step of a subject: what it gave, what was measured by it in words, and what it cost."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hfpatch.compat import checkpointing, hooks
from hfpatch.guarding.checking.adapting.halves import noise, pairs
from hfpatch.guarding.checking.forward_pass import Passed, forward_pass, rounding
from hfpatch.guarding.checking.rehearsal import FORWARD, Rehearsal, rehearse
from hfpatch.guarding.checking.subject import Subject
from hfpatch.guarding.checks import clean_name
from hfpatch.model.embed import find_embedding
from hfpatch.model.walk import starred
from hfpatch.numerics.outputs import copied as copied_output

BUDGET = 3.5
"""Training steps that a check may cost in all."""
CACHE = "use_cache"
NAMED = 3
"""Parameters, or kinds of them, that a sentence names."""


@dataclass(frozen=True)
class Measurement:
    """A rehearsed step of a subject.

    Attributes:
        subject: What is checked.
        batch: On which batch.
        said: Facts that were measured.
        missed: Facts that were not looked at, each with the reason.
        judged: Names of the trained parameters of which all was said.
        costs: What each run cost, in training steps.
    """

    subject: Subject
    batch: Mapping[str, Any]
    said: list[str] = field(default_factory=list[str])
    missed: list[str] = field(default_factory=list[str])
    judged: set[str] = field(default_factory=set[str])
    costs: list[float] = field(default_factory=list[float])

    @cached_property
    def step(self) -> Rehearsal:
        """The step as the arguments ask for it."""
        return self.run(reentrant=self.asked)

    @property
    def asked(self) -> bool | None:
        """The kind of checkpointing that the arguments turn on: True for the reentrant one; None for none."""
        settings = self.subject.settings
        return settings.reentrant if settings is not None and settings.checkpointing else None

    @property
    def reentrant(self) -> bool:
        """True if layers are checkpointed by torch's reentrant implementation, by the arguments or already."""
        return self.asked or (self.asked is None and self.subject.checkpoints_reentrant)

    def affords(self, cost: float = 1.0) -> bool:
        """True if a run of this cost, in training steps, is within the budget."""
        return sum(self.costs) + cost <= BUDGET

    def run(
        self,
        *,
        reentrant: bool | None,
        inputs: bool | None = None,
        copied: Collection[nn.Module] = (),
        instead: Mapping[nn.Parameter, torch.Tensor] = MappingProxyType({}),
        of: Collection[str] | None = None,
    ) -> Rehearsal:
        """Rehearse a step.

        Args:
            reentrant: The kind of activation checkpointing that is turned on; None to turn none on.
            inputs: True to make the inputs require gradients, by `enable_input_require_grads()`; False to stop that.
            copied: Modules whose output is replaced by a copy that requires a gradient.
            instead: Tensors in place of parameters.
            of: Names of the trained parameters whose gradients are wanted; None for all of them.
        """
        subject = self.subject

        def prepare() -> None:
            if reentrant is not None:
                enable_checkpointing(subject, reentrant=reentrant)
            if inputs is not None:
                require_inputs(subject, on=inputs)
            for module in copied:
                hooks.after(module, _copied)

        found = rehearse(
            subject.called,
            {n: p for n, p in subject.parameters.items() if of is None or n in of},
            self.batch,
            autocast=subject.autocast,
            reentrant=bool(reentrant) or (reentrant is None and subject.checkpoints_reentrant),
            prepare=prepare,
            watch=self.first_layers,
            embeddings=self.embeddings,
            instead=instead,
            compiled=bool(subject.survey.compiled),
        )
        self.costs.append(found.cost)
        return found

    @cached_property
    def at_noise(self) -> dict[nn.Parameter, torch.Tensor]:
        """Noise in place of each trained half that is 0, as `lora_B` is in a fresh adapter."""
        draw = torch.Generator().manual_seed(0)
        trained = [p for p in pairs(self.subject) if p.trains_a or p.trains_b]
        zero = [p.low if p.zero_a else p.high for p in trained if p.zero_a or p.zero_b]
        return {parameter: noise(parameter, draw) for parameter in zero}

    @cached_property
    def evaluated(self) -> Passed:
        """A pass in evaluation mode, with every trained half that is 0 at noise."""
        return self.forward()

    @property
    def evaluation_cost(self) -> float:
        """What `evaluated` costs, in training steps: nothing once it was run."""
        return 0.0 if "evaluated" in vars(self) else FORWARD

    def forward(
        self,
        changed: Mapping[str, Any] = MappingProxyType({}),
        *,
        training: bool = False,
        instead: Mapping[nn.Parameter, torch.Tensor] | None = None,
        within: contextlib.AbstractContextManager[object] | None = None,
        cost: float = FORWARD,
        seed: int = 0,
    ) -> Passed:
        """Run a forward pass without gradients, with the `use_cache` that a Trainer sets.

        Args:
            changed: Values in place of those of the batch; None leaves one out.
            training: True for training mode, in which nothing is dropped.
            instead: Tensors in place of parameters; None for those of `at_noise`.
            within: A context that changes the model for the pass.
            cost: What it costs, in training steps.
            seed: Of the random state.
        """
        subject, settings = self.subject, self.subject.settings
        cache = {} if settings is None or settings.cache is None else {CACHE: settings.cache}
        batch = {**(cache if self.takes_cache else {}), **self.batch, **changed}
        self.costs.append(cost)
        return forward_pass(
            subject.called,
            {k: v for k, v in batch.items() if v is not None},
            training=training,
            autocast=subject.autocast,
            instead=self.at_noise if instead is None else instead,
            within=within,
            compiled=bool(subject.survey.compiled),
            seed=seed,
        )

    @cached_property
    def takes_cache(self) -> bool:
        """True if the model's forward takes `use_cache`."""
        parameters = inspect.signature(type(self.subject.inner).forward).parameters
        return CACHE in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())

    @property
    def rounding(self) -> float:
        """The largest difference of two outputs, over their size, that rounding makes."""
        return rounding(self.subject.model, self.subject.autocast)

    @cached_property
    def first_layers(self) -> dict[str, nn.Module]:
        """The first layer of each submodel's last stack, by the submodel's path."""
        return {path: stacks[-1].layers[0][1] for path, stacks in self.subject.survey.stacks.items()}

    @cached_property
    def embeddings(self) -> dict[str, nn.Module]:
        """The token embeddings of every transformers model inside, by path."""
        models = [m for m in self.subject.survey.modules.values() if isinstance(m, PreTrainedModel)]
        held = {id(found) for m in models if (found := find_embedding(m)) is not None}
        return {clean_name(n): m for n, m in self.subject.model.named_modules() if id(m) in held}


def _copied(_module: nn.Module, _args: Any, output: Any) -> Any:
    return copied_output(output)


def enable_checkpointing(subject: Subject, *, reentrant: bool) -> None:
    """Turn activation checkpointing on as a Trainer does, by the name that this release of transformers has.

    In a hand-written model without such a method, that of each transformers model in it is called.
    """
    asked: list[Any] = [subject.inner]
    if not hasattr(subject.inner, "gradient_checkpointing_enable"):
        asked = [s.model for s in subject.survey.outermost_built if s.model.supports_gradient_checkpointing]
    for model in asked:
        checkpointing.turn_on(model, reentrant=reentrant)


def require_inputs(subject: Subject, *, on: bool) -> None:
    """Make the inputs of the layers require gradients, or stop that, by transformers' own methods."""
    name = "enable_input_require_grads" if on else "disable_input_require_grads"
    asked: list[Any] = [subject.inner]
    if not hasattr(subject.inner, name):
        asked = [s.model for s in subject.survey.outermost_built]
    for model in asked:
        getattr(model, name)()


def places(names: list[str]) -> str:
    """Return parameters as the kinds of places that they are, the first few of them."""
    kinds = dict.fromkeys(starred(n) for n in names)
    few = list(kinds)[:NAMED]
    return ", ".join(few) + (f", and {len(kinds) - NAMED} more kinds" if len(kinds) > NAMED else "")
