"""Stand-ins: copies of modules that run in their place, so a forward that writes to its module changes no model."""

from __future__ import annotations

import copy
import types
from collections import OrderedDict, defaultdict, deque
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from hfpatch.compat import accelerate, hooks
from hfpatch.compat.dynamo import COMPILED_CALL
from hfpatch.compat.modules import BUFFERS, CHILDREN, PARAMETERS, children
from hfpatch.model.walk import is_stock
from hfpatch.patching.record import RECORDS

TABLES = (PARAMETERS, BUFFERS)
OWN = (*TABLES, CHILDREN, "forward", accelerate.FORWARD, accelerate.HOOK, COMPILED_CALL, RECORDS)
"""Keys of a module's `__dict__` that are rebuilt or left out, not copied."""

DEPTH = 4
"""Number of levels of nested containers that are copied."""


class Through(nn.Module):
    """Stands for one of transformers' own parts, and returns its first tensor argument.

    In the place of a whole model it returns a ModelOutput, with random hidden states of the model's width.
    """

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.config: Any = getattr(of, "config", None)
        self.hidden: int | None = None
        self.head: int | None = None
        if isinstance(of, PreTrainedModel):
            text = of.config.get_text_config()
            self.hidden = getattr(text, "hidden_size", None)
            self.head = getattr(text, "vocab_size", None) if hasattr(of, "lm_head") else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first tensor among the arguments, or a ModelOutput."""
        first = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)), None)
        if self.hidden is None or first is None:
            return first
        wide = first.is_floating_point() and first.shape[-1] == self.hidden
        states: Any = (
            first if wide else torch.randn(*first.shape[:2], self.hidden, device=first.device, dtype=torch.float32)
        )
        if self.head is None:
            return BaseModelOutputWithPast(last_hidden_state=states, hidden_states=(states,))
        logits: Any = torch.randn(*states.shape[:2], self.head, device=first.device, dtype=torch.float32)
        return CausalLMOutputWithPast(logits=logits, hidden_states=(states,))


class StandIns:
    """Makes stand-ins, one per module.

    A stand-in has copies of parameters, buffers, other tensors and plain containers. It has no hooks, except those of
    `torch.nn.utils`, and is in evaluation mode, as are its parts. A `Through` stands for each of transformers' own
    parts, which do not run.

    Memory: a second copy of the parameters that are not in transformers' own parts, for the lifetime of this object.
    """

    def __init__(self) -> None:
        self.modules: dict[int, nn.Module] = {}
        self.tensors: dict[int, torch.Tensor] = {}

    def of(self, module: nn.Module, *, inner: bool = False) -> nn.Module:
        """Return the stand-in of a module.

        Args:
            module: The module.
            inner: True for a part, for which a `Through` stands if it is transformers' own.
        """
        if id(module) in self.modules:
            return self.modules[id(module)]
        if inner and is_stock(type(module)):
            self.modules[id(module)] = Through(module)
            return self.modules[id(module)]
        new = type(module).__new__(type(module))
        self.modules[id(module)] = new
        own = {k: v for k, v in module.__dict__.items() if k not in OWN and k not in hooks.EVERY}
        new.__dict__.update(own, **{CHILDREN: {}})
        for name in hooks.EVERY:
            table = module.__dict__.get(name) or {}
            kept = ((k, h) for k, h in table.items() if type(h).__module__.startswith("torch.nn.utils."))
            new.__dict__[name] = OrderedDict(kept)
        for name in TABLES:
            new.__dict__[name] = {k: self._copied(v) for k, v in module.__dict__[name].items()}
        new.__dict__.update({k: self._copied(v) for k, v in own.items()}, training=False)
        forward = module.__dict__.get(accelerate.FORWARD, module.__dict__.get("forward"))
        if forward is not None:
            new.__dict__["forward"] = self._copied(forward)
        for name, child in children(module).items():
            children(new)[name] = None if child is None else self.of(child, inner=True)
        return new

    def _copied(self, value: Any, depth: int = DEPTH) -> Any:
        if isinstance(value, nn.Module):
            return self.of(value, inner=True)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
            return types.MethodType(value.__func__, self.of(value.__self__, inner=True))
        if depth == 0 or type(value) not in (dict, OrderedDict, defaultdict, list, deque, set, tuple):
            return value
        if isinstance(value, (set, tuple)):
            return type(value)(self._copied(v, depth - 1) for v in value)
        new: Any = copy.copy(value)
        for key, item in list(new.items() if isinstance(new, dict) else enumerate(new)):
            new[key] = self._copied(item, depth - 1)
        return new

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if id(value) not in self.tensors:
            made = value
            if type(value) is nn.Parameter:
                made = nn.Parameter(value.detach().clone(), value.requires_grad)
            elif type(value) is torch.Tensor:
                made = value.detach().clone()
            self.tensors[id(value)] = made  # other classes (quantised and lazy parameters) are shared
        return self.tensors[id(value)]
