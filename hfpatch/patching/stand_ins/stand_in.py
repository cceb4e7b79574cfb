"""Stand-ins for modules: run in their place, so that whatever a forward writes, the model stays as it is."""

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
"""Keys of a module's `__dict__` that are put together anew or left out."""

DEPTH = 4
"""How deep plain containers are copied."""


class Through(nn.Module):
    """Stands for a part that is transformers' own: gives back its first tensor.

    A whole model gives back an output of the usual kind, with random states as wide as its own.
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
        """The first tensor among the arguments, or a model's output for it."""
        first = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)), None)
        if self.hidden is None or first is None:
            return first
        wide = first.is_floating_point() and first.shape[-1] == self.hidden
        states: Any = first if wide else torch.randn(*first.shape[:2], self.hidden, device=first.device)
        if self.head is None:
            return BaseModelOutputWithPast(last_hidden_state=states, hidden_states=(states,))
        logits: Any = torch.randn(*states.shape[:2], self.head, device=first.device)
        return CausalLMOutputWithPast(logits=logits, hidden_states=(states,))


class StandIns:
    """Makes stand-ins, one for each module.

    They have copies of parameters, buffers, tensors and plain containers, no hooks, and are in evaluation mode, parts
    alike. Parts that are transformers' own are not run: a `Through` is in their place.

    Memory: the parameters of what is not transformers' own once more, while it lives.
    """

    def __init__(self) -> None:
        self.modules: dict[int, nn.Module] = {}
        self.tensors: dict[int, torch.Tensor] = {}

    def of(self, module: nn.Module, *, inner: bool = False) -> nn.Module:
        """The stand-in for a module; `inner` for a part of one, which may be transformers' own."""
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
            self.tensors[id(value)] = made  # quantised and lazy parameters have a class of their own: shared
        return self.tensors[id(value)]
