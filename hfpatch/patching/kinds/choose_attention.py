"""A change that sets the attention implementation of a submodel, for this model only.

transformers' public setter writes the config, and configs are shared with parents and between models. So the configs
of the submodel, its parents and its children are copied first, every module is pointed at the copies, and the setter
writes to these.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import eager_mask, sdpa_mask

from hfpatch.compat import implementation
from hfpatch.numerics.attention_functions import (
    fp32_logits_attention,
    fp32_logits_attention_masked,
    fp32_logits_mask,
    sdpa_without_cudnn,
)
from hfpatch.patching.kinds.attention_names import FP32_LOGITS, FP32_LOGITS_MASKED, WITHOUT_CUDNN
from hfpatch.patching.kinds.base import Change
from hfpatch.patching.kinds.states import HERE, State
from hfpatch.patching.record import exchange, logged

# Registered on import, not when a patch is applied: the config of a pickled model names these functions, and
# unpickling its records imports this module. Without an entry in the mask interface there would be no mask.
AttentionInterface.register(FP32_LOGITS, fp32_logits_attention)
AttentionMaskInterface.register(FP32_LOGITS, fp32_logits_mask)
AttentionInterface.register(FP32_LOGITS_MASKED, fp32_logits_attention_masked)
AttentionMaskInterface.register(FP32_LOGITS_MASKED, eager_mask)
AttentionInterface.register(WITHOUT_CUDNN, sdpa_without_cudnn)
AttentionMaskInterface.register(WITHOUT_CUDNN, sdpa_mask)


WRITTEN_BY_A_SAVE = ("architectures", "dtype", "transformers_version")
"""Keys that `save_pretrained` writes into the config of the saved model, which are no changes by the user."""


@dataclass(frozen=True, eq=False)
class Configs:
    """The configs that were copied.

    Attributes:
        pairs: Each config with its copy.
        implementations: The attention implementation that each had.
    """

    pairs: tuple[tuple[PreTrainedConfig, PreTrainedConfig], ...]
    implementations: tuple[str, ...]

    def each(self) -> Iterable[tuple[tuple[PreTrainedConfig, PreTrainedConfig], str]]:
        """Return ((config, copy), implementation) for each config."""
        return zip(self.pairs, self.implementations, strict=True)


@dataclass(frozen=True)
class ChooseAttention(Change):
    """Sets a submodel's attention implementation, an entry of transformers' `AttentionInterface`."""

    unseen = "torch.compile would keep running the attention that it has compiled"

    implementation: str

    @property
    def slot(self) -> str:
        return "attention"

    @property
    def after(self) -> str:
        return self.implementation

    def now(self, module: nn.Module) -> Any:
        return implementation.chosen(module.config)

    def inverse(self, root: nn.Module, module: nn.Module) -> Configs:
        # a model may hold several separate trees of configs (T5's encoder and decoder have copies)
        mine = {id(c) for held in _held(module) for c in _tree(held)}
        shared = [c for c in _held(root) if not mine.isdisjoint(id(t) for t in _tree(c))]
        memo: dict[int, Any] = {}
        for each in shared:
            copy.deepcopy(each, memo)
        olds = {id(t): t for each in shared for t in _tree(each)}
        pairs = tuple((old, memo[key]) for key, old in olds.items())
        return Configs(pairs, tuple(str(implementation.chosen(old)) for old, _ in pairs))

    def write(self, root: nn.Module, module: nn.Module, before: Configs) -> None:
        _point(root, {id(old): new for old, new in before.pairs})
        was = self.now(module)
        module.set_attn_implementation({"": self.implementation})  # pyright: ignore[reportCallIssue]
        mine = _architecture(module)
        for (_, new), had in before.each():
            if new.model_type != mine:  # the setter also writes to submodels whose config is not part of the model's
                implementation.note(new, had)
            elif had == was:  # a layer may hold its own config, which the setter does not reach
                implementation.note(new, self.implementation)
        if self.now(module) != self.implementation:
            raise ValueError(
                f"{type(module).__name__} does not accept attention {self.implementation!r}: it does not use "
                "transformers' AttentionInterface"
            )

    def read(self, root: nn.Module, module: nn.Module, before: Configs) -> State:
        mine = _architecture(module)
        was = {choice for (old, _), choice in before.each() if old.model_type == mine}
        now = self.now(module)
        if now != self.implementation:
            return State("gone" if now in was else "changed", str(now))
        copies = {id(new) for _, new in before.pairs}
        for path, part in module.named_modules():
            for held in _configs(part):
                now = implementation.chosen(held)
                if held.model_type == mine and now != self.implementation and id(held) not in copies:
                    return State("gone" if now in was else "changed", f"{now} in {path}")
        return HERE

    def restore(self, root: nn.Module, module: nn.Module, before: Configs) -> None:
        for config, was in self._chosen(module, before):
            implementation.note(config, was)
        _hand_over(root, before)
        if all(_same(old, new) for old, new in before.pairs):  # else other values were set since, and stay
            _point(root, {id(new): old for old, new in before.pairs})

    def suspend(self, root: nn.Module, module: nn.Module, before: Configs, held: list[Any]) -> None:
        """Restore the implementations in the present configs; modules keep the configs that they hold."""
        chosen = list(self._chosen(module, before))
        held.extend((config, implementation.chosen(config)) for config, _ in chosen)
        for config, was in chosen:
            implementation.note(config, was)

    def resume(self, root: nn.Module, module: nn.Module, before: Configs, held: list[Any]) -> None:
        for config, now in reversed(held):
            implementation.note(config, now)

    def _chosen(self, module: nn.Module, before: Configs) -> Iterable[tuple[PreTrainedConfig, str]]:
        """Return the configs in which the implementation was set, each with the implementation it had before.

        These are our copies, which modules outside the root may hold too, and copies that a later edit made of them.
        """
        mine = _architecture(module)
        copies = [(new, was) for (_, new), was in before.each() if new.model_type == mine]
        known = {id(new) for new, _ in copies}
        yield from copies
        for held in _held(module) if copies else ():
            if held.model_type == mine and implementation.chosen(held) == self.implementation and id(held) not in known:
                known.add(id(held))
                yield held, copies[0][1]


def _architecture(module: nn.Module) -> str:
    config: Any = module.config
    return config.model_type


def _hand_over(root: nn.Module, gone: Configs) -> None:
    """Let later edits, which copied the copies of the edit that is undone, restore the configs before both."""
    first = {id(new): (old, choice) for (old, new), choice in gone.each()}
    for _, module, record in logged(root):
        before = record.before
        if not isinstance(before, Configs) or before is gone or not any(id(old) in first for old, _ in before.pairs):
            continue
        back = [(*first.get(id(old), (old, had)), new) for (old, new), had in before.each()]
        handed = Configs(tuple((old, new) for old, _, new in back), tuple(had for _, had, _ in back))
        exchange(module, record, replace(record, before=handed))


def _configs(module: nn.Module) -> Iterable[PreTrainedConfig]:
    return (v for v in module.__dict__.values() if isinstance(v, PreTrainedConfig))


def _held(root: nn.Module) -> Iterable[PreTrainedConfig]:
    for module in root.modules():
        yield from _configs(module)


def _tree(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return a config and the configs in it, at any depth."""
    out = [config]
    for value in config.__dict__.values():
        if isinstance(value, PreTrainedConfig):
            out += _tree(value)
    return out


def _point(root: nn.Module, to: dict[int, PreTrainedConfig]) -> None:
    """Replace configs that modules hold, by the id of the old config."""
    for module in root.modules():
        for name, value in module.__dict__.items():
            if isinstance(value, PreTrainedConfig) and id(value) in to:
                module.__dict__[name] = to[id(value)]


def _same(old: PreTrainedConfig, new: PreTrainedConfig) -> bool:
    """True if two configs are equal except for attention and `WRITTEN_BY_A_SAVE`; configs inside are not compared."""

    def values(config: PreTrainedConfig) -> dict[str, Any]:
        skip = (*implementation.KEYS, *WRITTEN_BY_A_SAVE)
        return {k: v for k, v in config.__dict__.items() if k not in skip and not isinstance(v, PreTrainedConfig)}

    return values(old) == values(new)
