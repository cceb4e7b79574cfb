"""Model classes of a user's own, for the tests: variants of Llama in a module that another process can import."""

from __future__ import annotations

import atexit
import subprocess
import sys
import time
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


class ScaledConfig(LlamaConfig):
    """Llama's config with a factor on the branches."""

    model_type = "scaled_llama"

    def __init__(self, branch_scale: float = 1.0, **words: Any) -> None:
        super().__init__(**words)
        self.branch_scale = branch_scale


class ScaledLayer(LlamaDecoderLayer):
    """A pre-norm layer written by hand."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        self.scale = config.branch_scale

    def forward(self, hidden_states: torch.Tensor, **words: Any) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **words)
        hidden_states = hidden_states + self.scale * attended
        return hidden_states + self.scale * self.mlp(self.post_attention_layernorm(hidden_states))


class RawLayer(ScaledLayer):
    """A layer whose MLP reads the stream without a norm: no cast of its branches helps."""

    def forward(self, hidden_states: torch.Tensor, **words: Any) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **words)
        hidden_states = hidden_states + attended
        return hidden_states.to(attended.dtype) + self.mlp(self.post_attention_layernorm(hidden_states))


class _Own(LlamaForCausalLM):
    layer: type[nn.Module] = ScaledLayer

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers = nn.ModuleList([self.layer(config, i) for i in range(config.num_hidden_layers)])
        self.post_init()


class Scaled(_Own):
    """A model that the patch of the residual stream cures."""

    config_class = ScaledConfig


class Raw(_Own):
    """A model that it does not cure."""

    config_class = ScaledConfig
    layer = RawLayer


class Stock(LlamaForCausalLM):
    """A model of its own `model_type` whose layers are Llama's."""

    config_class = ScaledConfig


class Talks(Scaled):
    """A model that prints, at the end of its process too, and leaves a process behind."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if "pytest" not in sys.modules:
            print("x" * 1_000_000)
            atexit.register(print, "goodbye")
            subprocess.Popen(["sleep", "600"])


class Hangs(Scaled):
    """A model that is slow to build in any process but the test's."""

    def __init__(self, config: Any) -> None:
        if "pytest" not in sys.modules:
            time.sleep(1000)
        super().__init__(config)


class Exits(Scaled):
    """A model whose construction ends any process but the test's."""

    def __init__(self, config: Any) -> None:
        if "pytest" not in sys.modules:
            sys.exit(3)
        super().__init__(config)
