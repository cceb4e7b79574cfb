"""Targets of the scope `all` in every multimodal architecture: each gets a gradient, or it is left out and named."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import hfpatch
from hfpatch.errors import InputError
from hfpatch.lab.example import example_inputs
from hfpatch.lab.tiny import TASKS, tiny_model
from hfpatch.model.source import REJECTIONS
from hfpatch.model.walk import starred

pytestmark = pytest.mark.architectures

EVERY = sorted(TASKS["multimodal"])
SHARDS = 8
LEAST = 100
"""Of the 116 architectures, those that must have run."""

BY_THE_CASE = {
    "granite_docling": r"\.connector\.fine\.",  # runs if the caller asks for fine features
    "minicpm_ocr": r"\.vit_merger\.self_attn\.",  # one window in so small an image
}
"""Maps that the tiny model or its example batch does not run, and that others do."""


def dead(model: nn.Module, batch: dict[str, Any]) -> set[str]:
    """The linear maps whose output the loss does not depend on: of B at noise, the gradient would be none."""
    seen: dict[str, torch.Tensor] = {}
    lent = {path: nn.Parameter(torch.zeros(1)) for path, m in model.named_modules() if hasattr(m, "out_features")}

    def add(path: str) -> Any:
        return lambda _module, _args, out: out + lent[path]

    modules = dict(model.named_modules())
    handles = [modules[path].register_forward_hook(add(path)) for path in lent]
    try:
        out = model.eval()(**batch)
        loss = getattr(out, "loss", None)
        loss = out.logits.float().square().mean() if loss is None else loss
        found = torch.autograd.grad(loss, list(lent.values()), allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    seen = {path: g for path, g in zip(lent, found, strict=True) if g is not None}
    return set(lent) - set(seen)


def complaints(architecture: str, model: nn.Module, batch: dict[str, Any]) -> list[str]:
    targets = hfpatch.lora_targets(model, "all")
    idle = dead(model, batch)
    known = re.compile(BY_THE_CASE.get(architecture, "(?!)"))
    found = {path for path in targets.modules if path in idle and not known.search(path)}
    said = {o.path for o in targets.left_out if o.reason.startswith("never used: ")}
    lies = said - {starred(path) for path in idle}
    out = [f"{architecture}: adapted, without a gradient: {sorted({starred(p) for p in found})}"] if found else []
    return out + ([f"{architecture}: called unused, and is used: {sorted(lies)}"] if lies else [])


@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_target_gets_a_gradient_or_is_named(shard: int) -> None:
    transformers.logging.set_verbosity(50)
    wrong: list[str] = []
    ran = 0
    for architecture in EVERY[shard::SHARDS]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                model = tiny_model(architecture, task="multimodal")
                batch = example_inputs(model)
            except (InputError, *REJECTIONS):
                continue
            wrong += complaints(architecture, model, batch)
            for key in ("vision_feature_layer", "vision_feature_layers"):
                value = getattr(model.config, key, None)
                if value is None:
                    continue
                other: Any = -1 if value == -2 else -2
                setattr(model.config, key, other if isinstance(value, int) else [other] * len(value))
                wrong += [f"{key}={other}: {text}" for text in complaints(architecture, model, batch)]
        ran += 1
    assert not wrong, "\n".join(wrong)
    assert ran >= LEAST // SHARDS - 1
