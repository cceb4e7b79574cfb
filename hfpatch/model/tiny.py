"""Tiny random models to try a patch on: real transformers classes from shrunk configs, and composites around them."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from hfpatch.errors import InputError
from hfpatch.model.composites_lora import peft_all, peft_qv
from hfpatch.model.composites_modulation import gated, modulated, trained_modulated

VOCABULARY = 64
HIDDEN = 32

TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "sliding_window": 8,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "query_pre_attn_scalar": 8,
    "attn_implementation": "eager",
}
"""Sizes by config key; a key is set only where the architecture's config has it."""

VISION: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}


def tiny_config(architecture: str, **overrides: Any) -> Any:
    """A config of a few thousand parameters.

    Raises:
        InputError: transformers knows no such architecture.
    """
    if architecture not in CONFIG_MAPPING:
        raise InputError(f"architecture {architecture!r}: this transformers knows no such model_type")
    cls: Any = CONFIG_MAPPING[architecture]
    if "text_config" in cls.sub_configs:
        have = cls()
        return cls(
            text_config={**_known(have.text_config, TINY), **overrides},
            vision_config=_known(have.vision_config, VISION),
            **({"mm_tokens_per_image": 4} if hasattr(have, "mm_tokens_per_image") else {}),
        )
    return cls(**{**_known(cls(), TINY), **overrides})


def _known(have: Any, wanted: Mapping[str, Any]) -> dict[str, Any]:
    computed = {k for k in wanted if isinstance(p := getattr(type(have), k, None), property) and p.fset is None}
    kept = {k: v for k, v in wanted.items() if k not in computed and (hasattr(have, k) or k in have.attribute_map)}
    if "head_dim" not in kept:
        kept.pop("query_pre_attn_scalar", None)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        kept[key] = None if key == "pad_token_id" else 1
    return kept


def tiny_model(architecture: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A tiny model in evaluation mode, float32, with eager attention (sdpa on a CPU hides NaN).

    Args:
        architecture: `config.model_type`.
        seed: For the weights; the global random state is left as it was.
        overrides: Config values.

    Raises:
        InputError: transformers knows no such architecture.
    """
    config = tiny_config(architecture, **overrides)
    build: Any = AutoModelForImageTextToText if "text_config" in type(config).sub_configs else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build.from_config(config, attn_implementation="eager", dtype=torch.float32)
    return model.eval()


def rescale(model: nn.Module, scale: Mapping[str, float], fill: Mapping[str, float]) -> None:
    """Multiply, or fill, the parameters whose paths match; a glob that matches none is an error.

    Raises:
        InputError: No parameter matches a glob.
    """
    names = dict(model.named_parameters())
    with torch.no_grad():
        for pattern, change in [
            *((p, ("mul_", v)) for p, v in scale.items()),
            *((p, ("fill_", v)) for p, v in fill.items()),
        ]:
            hits = fnmatch.filter(names, pattern)
            if not hits:
                raise InputError(f"no parameter of {type(model).__name__} matches {pattern!r}")
            for name in hits:
                getattr(names[name], change[0])(change[1])


class SpeechLLM(nn.Module):
    """Features -> LayerNorm -> projector -> language model, as speech LLMs are built by hand.

    Args:
        llm: The language model.
        width: Features a frame.
        eps: Of the LayerNorm.
    """

    def __init__(self, llm: PreTrainedModel, width: int = 24, eps: float = 1e-4) -> None:
        super().__init__()
        self.ln_speech = nn.LayerNorm(width, eps=eps)
        self.speech_proj = nn.Linear(width, int(llm.config.get_text_config().hidden_size))
        self.llm = llm

    def forward(self, input_ids: torch.Tensor, features: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """Run with `features [batch, frames, width]` before the text `input_ids [batch, tokens]`."""
        from hfpatch.model.embed import embed_tokens

        embeds = embed_tokens(self.llm)(input_ids)
        if features is not None:
            speech = self.speech_proj(self.ln_speech(features.to(self.ln_speech.weight.dtype)))
            embeds = torch.cat([speech.to(embeds.dtype), embeds], dim=1)
        return self.llm(inputs_embeds=embeds, **kwargs)


def trained_speech_llm(llm: PreTrainedModel) -> SpeechLLM:
    """A `SpeechLLM` whose LayerNorm and projector no longer have the weights they were made with."""
    model = SpeechLLM(llm)
    with torch.no_grad():
        model.ln_speech.weight.mul_(1.25)
        model.speech_proj.weight.mul_(1.25)
    return model


COMPOSITES: dict[str, Callable[[PreTrainedModel], nn.Module]] = {
    "speech-llm": SpeechLLM,
    "trained-speech-llm": trained_speech_llm,
    "lora-qv": peft_qv,
    "lora-all": peft_all,
    "modulated": modulated,
    "trained-modulated": trained_modulated,
    "gated": gated,
}
"""What `Case.inside` may name."""
