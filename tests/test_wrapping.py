"""The one way to what wrappers hold."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import hfpatch
from hfpatch.lab.tiny import tiny_model
from hfpatch.model import wrapping
from tests.lifecycle import gloo


def ddp(model: nn.Module) -> nn.Module:
    gloo()
    return nn.parallel.DistributedDataParallel(model)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def peft(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))


def prompts(model: Any) -> Any:
    from peft import PromptTuningConfig, get_peft_model

    return get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))


WRAPPERS: dict[str, list[Callable[[Any], Any]]] = {
    "DDP": [ddp],
    "DataParallel": [nn.DataParallel],
    "torch.compile": [compiled],
    "checkpoint": [checkpoint_wrapper],
    "PEFT": [peft, prompts],
}


@pytest.mark.parametrize(("kind", "wrap"), [(kind, wrap) for kind, each in WRAPPERS.items() for wrap in each])
def test_a_wrapper_is_seen_through_where_its_kind_is_asked_for(kind: str, wrap: Callable[[Any], Any]) -> None:
    model = tiny_model("llama")
    wrapper = wrap(model)
    assert wrapper is not model
    assert wrapping.unwrap(wrapper) is wrapping.unwrap(wrapper, (kind,)) is model
    assert wrapping.unwrap(wrapper, tuple(k for k in WRAPPERS if k != kind)) is wrapper
    path, inner = wrapping.unwrapped("part", wrapper)
    assert nn.ModuleDict({"part": wrapper}).get_submodule(path) is inner is model


@pytest.mark.parametrize("order", [(peft, ddp, compiled), (compiled, peft, nn.DataParallel), (peft, compiled)])
def test_wrappers_around_wrappers(order: tuple[Callable[[Any], Any], ...]) -> None:
    model = wrapped = tiny_model("llama")
    for wrap in order:
        wrapped = wrap(wrapped)
    assert wrapping.unwrap(wrapped) is model


def test_what_is_no_wrapper_stays() -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.model, self.base_model, self.base_layer = (nn.Linear(2, 2) for _ in range(4))

    mine = Mine()
    assert wrapping.held(mine) is None
    assert wrapping.unwrap(mine) is mine


def test_an_adapter_is_seen_through_where_it_is_asked_for() -> None:
    model = tiny_model("llama")
    linear = model.model.layers[0].self_attn.q_proj
    layer = peft(model).base_model.model.model.layers[0].self_attn.q_proj
    assert wrapping.unwrap(layer) is layer
    assert wrapping.unwrap(layer, ("adapter",)) is linear


def test_a_path_is_as_it_is_without_wrappers() -> None:
    path = "module.layers.0._checkpoint_wrapped_module._orig_mod.submodule.weight"
    assert wrapping.plain(path) == "module.layers.0.submodule.weight"
    assert wrapping.plain(path, "module") == "layers.0.submodule.weight"


def test_fsdp2_is_named_by_inspect() -> None:
    from torch.distributed.fsdp import fully_shard

    gloo()
    model = copy.deepcopy(tiny_model("llama"))
    fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
    assert [(w.kind, w.path) for w in hfpatch.inspect(model).wrappers] == [("FSDP2", "")]
    assert wrapping.unwrap(model) is model
