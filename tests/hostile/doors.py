"""The doors of a checkpoint: what a file in it can name, and transformers or PEFT would run, import or download."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile.traps import EVIL, trap_code

KERNEL = "somebody/kernel"
Plant = Callable[[Path], object]


def edit(folder: Path, file: str, **values: Any) -> None:
    """Set keys of a JSON file, which may be new."""
    path = folder / file
    held = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**held, **values}))


def config(**values: Any) -> Plant:
    return lambda folder: edit(folder, "config.json", **values)


def second_file(**values: Any) -> Plant:
    """Values in a config that is innocent until this transformers chooses another one by its version."""

    def plant(folder: Path) -> None:
        shutil.copy(folder / "config.json", folder / "config.5.0.0.json")
        edit(folder, "config.5.0.0.json", **values)
        edit(folder, "config.json", configuration_files=["config.4.0.0.json", "config.5.0.0.json", "config.99.0.json"])

    return plant


def code(*modules: str) -> Plant:
    def plant(folder: Path) -> None:
        for module in modules:
            (folder / f"{module}.py").write_text(trap_code(f"{module}.py of the checkpoint"))

    return plant


def all_of(*plants: Plant) -> Plant:
    return lambda folder: [plant(folder) for plant in plants]


def adapter(**values: Any) -> Plant:
    """An adapter beside the weights, which transformers loads with them."""

    def plant(folder: Path) -> None:
        held = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "base_model_name_or_path": str(folder)}
        edit(folder, "adapter_config.json", **{**held, **values})
        (folder / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")

    return plant


def pickled_adapter(folder: Path) -> None:
    adapter()(folder)
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(PICKLE)


PICKLE = f"c{EVIL}\nanything\n.".encode()
"""A pickle that imports the trap."""

MODEL: dict[str, Plant] = {
    "a kernel in the file for this release": second_file(attn_implementation=KERNEL),
    "a private key in the file for this release": second_file(_attn_implementation_internal=KERNEL),
    "code in the file for this release": all_of(
        second_file(model_type="own", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}),
        code("own"),
    ),
    "a kernel": config(attn_implementation=KERNEL),
    "a kernel, old key": config(_attn_implementation=KERNEL),
    "a kernel, private key": config(_attn_implementation_internal=KERNEL),
    "a kernel with a revision and a function": config(attn_implementation=f"{KERNEL}@main:flash"),
    "a kernel of transformers' own organisation": config(attn_implementation="kernels-community/flash-attn2"),
    "a kernel behind a prefix": config(attn_implementation=f"paged|{KERNEL}"),
    "kernels by part": config(attn_implementation={"": "sdpa", "text_config": KERNEL}),
    "a kernel in a list": config(layer_configs=[{"attn_implementation": KERNEL}]),
    "flash attention that is not installed": config(attn_implementation="flash_attention_2"),
    "later flash attention": config(_attn_implementation="flash_attention_3"),
    "a kernel for experts": config(experts_implementation=KERNEL),
    "experts of the hub": config(_experts_implementation="sonicmoe"),
    "a part with a kernel": config(
        model_type="llava",
        text_config={"model_type": "llama", "attn_implementation": KERNEL},
        vision_config={"model_type": "clip_vision_model"},
    ),
    "code of its own": all_of(
        config(model_type="own", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}),
        code("own"),
    ),
    "code of its own for a known model": all_of(
        config(auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel", "AutoTokenizer": "own.Tok"}),
        code("own"),
    ),
    "code of another repository": config(model_type="own", auto_map={"AutoConfig": "somebody/repo--own.Own"}),
    "a backbone of the hub": config(model_type="dpt", architectures=None, backbone="somebody/backbone"),
    "a backbone by a bare name": config(model_type="dpt", architectures=None, backbone="resnet50"),
    "weights of a backbone": config(
        model_type="timm_backbone", architectures=None, backbone="resnet18", use_pretrained_backbone=True
    ),
    "timm from the hub": config(model_type="timm_wrapper", architectures=["x"], architecture="hf-hub:somebody/model"),
}
"""Doors of config.json. Every verb that takes a model goes through them."""

WEIGHTS: dict[str, Plant] = {
    "a tokenizer with code": all_of(
        lambda folder: edit(
            folder,
            "tokenizer_config.json",
            tokenizer_class="OwnTok",
            auto_map={"AutoTokenizer": ["own.Tok", "own.Tok"]},
        ),
        code("own"),
    ),
    "a tokenizer's file that is a device": lambda folder: edit(
        folder, "tokenizer_config.json", vocab_file="/dev/zero", tokenizer_file="/dev/zero"
    ),
    "code that generates": all_of(
        lambda folder: edit(
            folder, "generation_config.json", attn_implementation=KERNEL, custom_generate=str(folder), use_kernels=True
        ),
        lambda folder: (folder / "custom_generate").mkdir(),
        code("custom_generate/generate", "generate", "modeling_own", "sitecustomize", "conftest"),
    ),
    "layers of the hub, fp8": config(quantization_config={"quant_method": "fp8"}),
    "layers of the hub, mxfp4": config(quantization_config={"quant_method": "mxfp4"}),
    "layers of the hub, eetq": config(quantization_config={"quant_method": "eetq", "weights": "int8"}),
    "layers of the hub, metal": config(quantization_config={"quant_method": "metal"}),
    "a method of quantisation by a module's name": config(quantization_config={"quant_method": EVIL}),
    "an adapter that imports a module": adapter(megatron_config={"a": 1}, megatron_core=EVIL),
    "an adapter that names another base": adapter(base_model_name_or_path="somebody/model", megatron_core=EVIL),
    "an adapter in a pickle": pickled_adapter,
    "weights in a pickle": lambda folder: [
        (folder / "model.safetensors").unlink(),
        (folder / "pytorch_model.bin").write_bytes(PICKLE),
    ],
    "a pickle beside the weights": lambda folder: (folder / "pytorch_model.bin").write_bytes(PICKLE),
    "a shard elsewhere": lambda folder: [
        (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors"),
        edit(folder, "model.safetensors.index.json", metadata={}, weight_map={"a": "../elsewhere.safetensors"}),
    ],
    "weights by another name, in a pickle": all_of(
        config(transformers_weights="adapter_model.bin"),
        lambda folder: (folder / "adapter_model.bin").write_bytes(PICKLE),
    ),
    "an index by another name, of a pickle": all_of(
        config(transformers_weights="own.safetensors.index.json"),
        lambda folder: (folder / "evil.bin").write_bytes(PICKLE),
        lambda folder: edit(
            folder, "own.safetensors.index.json", metadata={}, weight_map={"lm_head.weight": "evil.bin"}
        ),
    ),
    "a shard that is a pickle": lambda folder: [
        (folder / "model.safetensors").unlink(),
        (folder / "evil.bin").write_bytes(PICKLE),
        edit(folder, "model.safetensors.index.json", metadata={}, weight_map={"lm_head.weight": "evil.bin"}),
    ],
}
"""Doors of the other files, for the verbs that load weights."""

ADAPTERS: dict[str, dict[str, Any]] = {
    "a module to import": {"megatron_config": {"a": 1}, "megatron_core": EVIL},
    "a pickle to read": {
        "init_lora_weights": "corda",
        "corda_config": {"cache_file": "cache.bin", "covariance_file": "cache.bin"},
    },
    "another model": {"peft_type": "SHADOW", "shadow_model": "somebody/model"},
    "other adapters": {"peft_type": "XLORA", "adapters": {"0": "somebody/adapter"}},
    "a tokenizer": {
        "peft_type": "PROMPT_TUNING",
        "num_virtual_tokens": 2,
        "prompt_tuning_init": "TEXT",
        "prompt_tuning_init_text": "x",
        "tokenizer_name_or_path": "somebody/model",
        "tokenizer_kwargs": {"trust_remote_code": True},
    },
    "a state that PEFT reads": {
        "peft_type": "MULTITASK_PROMPT_TUNING",
        "num_virtual_tokens": 2,
        "prompt_tuning_init": "EXACT_SOURCE_TASK",
        "prompt_tuning_init_state_dict_path": "cache.bin",
    },
    "a rank without end": {"r": 10**9},
}
"""Doors of the config of an adapter, for `replay` and `scan`."""


def special(folder: Path, kind: str, name: str) -> None:
    """Put something that is no ordinary file in the place of one."""
    place = folder / name
    place.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "endless":
        place.symlink_to("/dev/zero")
    elif kind == "directory":
        place.mkdir()
    else:
        with place.open("wb") as file:
            file.truncate(2**36)  # without a block on the disk


SPECIAL = ("pipe", "endless", "directory", "64 GiB")
