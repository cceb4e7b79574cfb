"""Composites for cases about adapters: LoRA on q and v only, as in many scripts, and LoRA on all linear maps."""

from __future__ import annotations

from collections.abc import Sequence

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


def _trained(llm: PreTrainedModel, targets: Sequence[str]) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = get_peft_model(llm, LoraConfig(r=2, target_modules=targets if isinstance(targets, str) else [*targets]))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    return model.eval()
