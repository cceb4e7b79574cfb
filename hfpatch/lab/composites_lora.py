"""Composites for cases about adapters: LoRA on q and v only, as in many scripts, on all linear maps that it should
adapt, on all that PEFT would, and on torch's encoder layers in front of the language model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def peft_qv(llm: PreTrainedModel) -> nn.Module:
    """Return a PEFT model with a trained adapter on q and v, or on the first linear map if they have other names.

    Args:
        llm: The language model; it is changed.

    Raises:
        InputError: It has no linear map to adapt.
    """
    from hfpatch.lora.targets import lora_targets

    leaves = dict.fromkeys(path.rpartition(".")[2] for path in lora_targets(llm).modules)
    return _trained(llm, [leaf for leaf in leaves if leaf in {"q_proj", "v_proj"}] or list(leaves)[:1])


def peft_all(llm: PreTrainedModel) -> nn.Module:
    """Return a PEFT model with a trained adapter on every linear map of its blocks.

    Args:
        llm: The language model, one whose target names PEFT takes for names of modules; it is changed.

    Raises:
        InputError: It has no linear map to adapt.
    """
    from hfpatch.lora.targets import lora_targets

    return _trained(llm, lora_targets(llm).target_modules)


def peft_towers(llm: PreTrainedModel) -> nn.Module:
    """Return a PEFT model with a trained adapter on every linear map of its blocks, towers included.

    Args:
        llm: The model; it is changed.
    """
    from hfpatch.lora.targets import lora_targets

    return _trained(llm, lora_targets(llm, "all").target_modules)


def peft_all_linear(llm: PreTrainedModel) -> nn.Module:
    """Return a PEFT model with a trained adapter on every linear map but the head, as PEFT's "all-linear" names them.

    Those are also maps that `lora_targets` leaves out.

    Args:
        llm: The language model; it is changed.
    """
    return _trained(llm, "all-linear")


def _trained(llm: PreTrainedModel, targets: Sequence[str]) -> nn.Module:
    from peft import LoraConfig

    return _trained_in(llm, LoraConfig(r=2, target_modules=targets if isinstance(targets, str) else [*targets]))


def _trained_in(inner: Any, config: Any) -> nn.Module:
    from peft import get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = get_peft_model(inner, config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    return model.eval()


class EncodedLLM(nn.Module):
    """Token embeddings -> two of torch's encoder layers -> language model.

    Args:
        llm: The language model.
        batch_first: False for layers that take `[tokens, batch, width]`, for which torch has no fused kernel.
    """

    def __init__(self, llm: PreTrainedModel, *, batch_first: bool = True) -> None:
        super().__init__()
        width = int(llm.config.get_text_config().hidden_size)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=batch_first)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first)
        self.llm = llm

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        """Run on `input_ids [batch, tokens]`."""
        from hfpatch.model.embed import embed_tokens

        embeds = embed_tokens(self.llm)(input_ids)
        embeds = embeds + self.encoder(embeds.to(next(self.encoder.parameters()).dtype)).to(embeds.dtype)
        return self.llm(inputs_embeds=embeds, **kwargs)


def torch_encoder(llm: PreTrainedModel) -> nn.Module:
    """Return an `EncodedLLM` with a trained adapter on the linear maps of its encoder."""
    return _encoder_adapted(EncodedLLM(llm))


def torch_encoder_time_first(llm: PreTrainedModel) -> nn.Module:
    """Return the same with encoder layers for which torch has no fused kernel."""
    return _encoder_adapted(EncodedLLM(llm, batch_first=False))


def _encoder_adapted(model: EncodedLLM) -> nn.Module:
    from peft import LoraConfig

    config = LoraConfig(r=2, target_modules=r"encoder\.layers\.\d+\.linear[12]")
    return _trained_in(model, config)
