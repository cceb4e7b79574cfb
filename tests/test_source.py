"""From a name, a directory, a config.json or a config to a model on meta; one sentence for each bad input."""

from __future__ import annotations

import copy
import json
import os
import pickle
import socket
import tracemalloc
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub import constants
from huggingface_hub import errors as hub
from transformers import AutoConfig, PreTrainedConfig

from hfpatch.errors import InputError, ModelNotFoundError
from hfpatch.model.limits import check_sizes, numbers
from hfpatch.model.source import build_on_meta, declared_dtype, load_config, model_class
from tests.counting import calls

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


def saved(directory: Path, values: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return directory


def sentence(error: pytest.ExceptionInfo[InputError]) -> str:
    text = str(error.value)
    assert "\n" not in text, text
    assert 20 < len(text) < 500, text
    return text


def llama(**changes: Any) -> dict[str, Any]:
    return {**LLAMA, **changes}


BAD_CONFIGS: dict[str, tuple[object, str]] = {
    "truncated": ('{"model_type": "lla', "is not valid JSON (line 1, column 16"),
    "empty": ("", "it is empty"),
    "array": ([1], "want a JSON object, got an array"),
    "null": ("null", "want a JSON object, got null"),
    "deep": ("[" * 100_000, "nested too deep"),
    "deep, within what json reads": ('{"a": ' + "[" * 900 + "]" * 900 + "}", "nested too deep"),
    "no model_type": ({"hidden_size": 32}, "has no model_type"),
    "unknown model_type": (llama(model_type="lama"), "similar names: llama"),
    "model_type a number": (llama(model_type=5), "does not have the model_type 5;"),
    "model_type a list": (llama(model_type=["llama"]), "does not have the model_type ['llama']"),
    "adapter": ({"peft_type": "LORA"}, "PEFT adapter; name the base model"),
    "heads": (llama(num_attention_heads=5), "hidden size (32) is not a multiple of the number of attention heads (5)"),
    "no heads": (llama(num_attention_heads=0), "num_attention_heads is 0"),
    "negative width": (llama(hidden_size=-32), "hidden_size is -32"),
    "negative inner width": (llama(intermediate_size=-48), "intermediate_size is -48"),
    "negative depth": (llama(num_hidden_layers=-1), "num_hidden_layers is -1; want at least 0"),
    "width as text": (llama(hidden_size="32"), "'hidden_size' expected int, got str"),
    "width a bool": (llama(hidden_size=True), "'hidden_size' expected int, got bool"),
    "no width": (llama(hidden_size=None), "'hidden_size' expected int, got NoneType"),
    "no vocabulary": (llama(vocab_size=0), "vocab_size is 0; want at least 1"),
    "activation": (llama(hidden_act="nope"), "hidden_act is 'nope'"),
    "rope": (llama(rope_scaling={"rope_type": "nope"}), "rope_type is 'nope'"),
    "dtype": (llama(dtype="flaot16"), "dtype 'flaot16' is not a torch dtype"),
    "dtype a function": (llama(torch_dtype="load"), "torch_dtype 'load' is not a torch dtype"),
    "dtype of integers": (llama(dtype="int8"), "not a floating-point dtype"),
    "labels": (llama(id2label=5), "'int' object has no attribute 'items'"),
    "attention": (llama(attn_implementation="nope"), 'attn_implementation="nope"'),
    "attention from the hub": (llama(attn_implementation="some/kernel"), "code on the hub (some/kernel)"),
    "attention from the hub, inside": (
        {"model_type": "gemma3", "text_config": {"_attn_implementation": {"": "some/kernel"}}},
        "code on the hub (some/kernel)",
    ),
    "backbone on the hub": (
        {"model_type": "dpt", "backbone": "no/such-backbone", "use_pretrained_backbone": True},
        "backbone names a part on the hub (no/such-backbone), which was not downloaded",
    ),
    "attention not installed": (llama(attn_implementation="flash_attention_2"), "; install what it needs"),
    "part of an unknown model_type": (
        {"model_type": "llava", "text_config": {"model_type": "lama"}},
        "Unrecognized model type for subconfig: lama; correct",
    ),
    "code of its own": (
        {**LLAMA, "model_type": "own", "auto_map": {"AutoConfig": "own.Own"}},
        "trust_remote_code=True",
    ),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_config(case: str, tmp_path: Path) -> None:
    values, message = BAD_CONFIGS[case]
    with pytest.raises(InputError) as error:
        build_on_meta(load_config(saved(tmp_path, values)))
    assert not isinstance(error.value, ModelNotFoundError)
    assert message in sentence(error)
    assert str(tmp_path) in str(error.value)


ABSURD: dict[str, tuple[object, str]] = {
    "layers": (llama(num_hidden_layers=10**9), "num_hidden_layers is 1,000,000,000"),
    "layers of a config that lists them": ({"model_type": "qwen2", "num_hidden_layers": 10**9}, "num_hidden_layers is"),
    "infinite layers": ('{"model_type": "llama", "num_hidden_layers": 1e999}', "num_hidden_layers is inf"),
    "old key": ({"model_type": "gpt2", "n_layer": 20_000}, "n_layer is 20,000, more than any model has (limit 1,500)"),
    "vocabulary": (llama(vocab_size=10**12), "vocab_size is 1,000,000,000,000"),
    "width": (llama(hidden_size=10**9), "hidden_size is 1,000,000,000"),
    "experts": ({"model_type": "mixtral", "num_local_experts": 10**9}, "num_local_experts is"),
    "labels": (llama(num_labels=10**9), "num_labels is 1,000,000,000"),
    "sub-config": (
        {"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**9}},
        "text_config.num_hidden_layers is",
    ),
    "heads": (llama(num_attention_heads=10**6), "num_attention_heads is 1,000,000, more than any model has"),
    "no width": (llama(hidden_size=0), "hidden_size is 0; want at least 1"),
    "no number as eps": ('{"model_type": "llama", "rms_norm_eps": NaN}', "rms_norm_eps is nan, with which no norm"),
    "infinite eps": ('{"model_type": "llama", "rms_norm_eps": 1e999}', "rms_norm_eps is inf, with which no norm"),
    "vision depths": ({"model_type": "swin", "depths": [2, 10**9]}, "depths is 1,000,000,000"),
}


@pytest.mark.parametrize("case", ABSURD)
def test_absurd_sizes_cost_nothing(case: str, tmp_path: Path) -> None:
    values, message = ABSURD[case]
    directory = saved(tmp_path, values)
    tracemalloc.start()
    try:
        with pytest.raises(InputError) as error:
            load_config(directory)
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    finally:
        tracemalloc.stop()
    assert message in sentence(error)

    def refused() -> None:
        with pytest.raises(InputError):
            load_config(directory)

    assert calls(refused) < 2000, "one call a layer would be 20,000"


def test_absurd_config_object() -> None:
    config = AutoConfig.for_model("llama")
    config.num_hidden_layers = 10**9
    with pytest.raises(InputError, match="num_hidden_layers is 1,000,000,000"):
        build_on_meta(config)


def test_sizes_of_real_models_pass() -> None:
    for model_type in ("doge", "gemma3n", "qwen3_vl_moe", "blt", "whisper", "deepseek_v3"):
        check_sizes(vars(transformers.CONFIG_MAPPING[model_type]()), model_type)
    check_sizes({"max_position_embeddings": 10_485_760, "rope_theta": 10**10, "rms_norm_eps": 1e-6}, "long context")


MISSING: dict[str, tuple[Any, str]] = {
    "nothing": ("", "the model's name is empty"),
    "blank": ("  ", "the model's name is empty"),
    "absolute path": ("/no/such/directory", "no such directory or file"),
    "relative path": ("./no-such", "no such directory or file"),
    "path": (Path("no-such"), "no such directory or file"),
    "json": ("no-such.json", "no such directory or file"),
    "three parts": ("a/b/c", "no such directory or file"),
    "impossible name": ("what is this!", "nor a possible name on the hub"),
    "null byte": ("a\0b", "nor a possible name on the hub"),
    "device": ("/dev/null", "neither a directory nor a file"),
}


@pytest.mark.parametrize("case", MISSING)
def test_no_such_model(case: str) -> None:
    name, message = MISSING[case]
    with pytest.raises(ModelNotFoundError) as error:
        load_config(name)
    assert message in sentence(error)


def test_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json in this directory; it is empty"):
        load_config(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"it holds model\.gguf: name the directory of a saved model"):
        load_config(tmp_path)
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(ModelNotFoundError, match="it holds a PEFT adapter: name the base model"):
        load_config(tmp_path)


def test_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = saved(tmp_path / "model", LLAMA)
    real = os.open

    def refuse(path: Path, *_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)  # the tests may run as root, who may read everything
    with pytest.raises(InputError, match=r"config\.json: it cannot be read \(Permission denied\)"):
        load_config(directory)
    monkeypatch.setattr(os, "open", real)
    monkeypatch.setattr(Path, "is_dir", refuse)
    with pytest.raises(InputError, match=r"model: cannot be read \(Permission denied\)"):
        load_config(directory)


def test_files_that_are_no_config(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"\xff\xfe\x00" * 100)
    with pytest.raises(InputError, match="is not text"):
        load_config(weights)
    with weights.open("wb") as file:
        file.truncate(100 * 2**20)
    with pytest.raises(InputError, match="it has 104,857,600 bytes, and at most 16,777,216 are read"):
        load_config(weights)


def test_offline_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked: list[Any] = []
    monkeypatch.setattr(socket, "create_connection", lambda *words, **_: asked.append(words))
    with pytest.raises(ModelNotFoundError) as error:
        load_config("no/such-model")
    assert asked == [], "nobody is asked"
    assert "not in the local hub cache, and HF_HUB_OFFLINE is set" in sentence(error)


def test_unreachable_hub_does_not_hang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    closed = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_url", lambda name, file: closed.format(repo_id=name, revision="main", filename=file)
    )
    asked: list[float] = []
    ask = huggingface_hub.get_hf_file_metadata

    def once(url: str, timeout: float) -> Any:
        asked.append(timeout)
        return ask(url, timeout=timeout)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", once)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: pytest.fail("it tries again for 24 s"))
    with pytest.raises(ModelNotFoundError) as error:
        load_config("no/such-model")
    assert len(asked) == 1
    assert asked[0] <= 10
    assert "the hub cannot be reached" in sentence(error)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (hub.RepositoryNotFoundError, "no model on the hub that you can see"),
        (hub.GatedRepoError, "gated on the hub"),
        (hub.RemoteEntryNotFoundError, "this repository on the hub has no config.json"),
        (hub.LocalEntryNotFoundError, "the hub cannot be reached"),
        (hub.HfHubHTTPError, "the hub cannot be reached"),
    ],
)
def test_what_the_hub_says(
    kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))

    def answer(*_: Any, **__: Any) -> None:
        raise kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", answer)
    with pytest.raises(ModelNotFoundError) as error:
        load_config("some/model")
    assert message in sentence(error)


def test_cached_hub_model_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commit = "0" * 40
    repository = tmp_path / "models--some--model"
    saved(repository / "snapshots" / commit, LLAMA)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    config = load_config("some/model")
    assert (config.model_type, config.name_or_path) == ("llama", "some/model")


CODE = """
import pathlib
pathlib.Path({ran!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_nothing_of_a_checkpoint_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = tmp_path / "ran"
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    directory = saved(tmp_path / "model", llama(auto_map=auto_map))
    (directory / "own.py").write_text(CODE.format(ran=str(ran)))
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(ran)))
    for trust in (False, True):  # a built-in model_type needs no code of the checkpoint's
        model = build_on_meta(load_config(directory, trust_remote_code=trust))
        assert type(model) is transformers.LlamaForCausalLM
    saved(directory, llama(model_type="own", auto_map=auto_map))
    with pytest.raises(InputError, match=r"needs remote code \(own\.OwnConfig\), which was not run"):
        load_config(directory)
    assert not ran.exists()

    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    model = build_on_meta(load_config(directory, trust_remote_code=True))
    assert type(model).__name__ == "OwnModel"
    assert ran.exists()


@pytest.mark.parametrize("given", ["directory", "file", "text", "other name"])
def test_ways_to_name_a_model(given: str, tmp_path: Path) -> None:
    directory = saved(tmp_path / "model", LLAMA)
    other = tmp_path / "other.json"
    other.write_text(json.dumps(LLAMA))
    name = {"directory": directory, "file": directory / "config.json", "text": str(directory), "other name": other}[
        given
    ]
    config = load_config(name)
    assert config.model_type == "llama"
    assert config.to_dict() == AutoConfig.from_pretrained(other if given == "other name" else directory).to_dict()
    assert config.name_or_path == str(other if given == "other name" else directory)


def test_files_by_version_as_transformers_reads_them(tmp_path: Path) -> None:
    directory = saved(tmp_path, llama(configuration_files=["config.4.0.0.json"]))
    (directory / "config.4.0.0.json").write_text(json.dumps(llama(num_hidden_layers=7)))
    assert load_config(directory).num_hidden_layers == 7
    (directory / "config.4.0.0.json").write_text(json.dumps(llama(num_hidden_layers=10**9)))
    with pytest.raises(InputError, match="num_hidden_layers is 1,000,000,000"):
        load_config(directory)


@pytest.mark.parametrize(
    ("model_type", "architectures", "expected"),
    [
        ("llama", None, "LlamaForCausalLM"),
        ("llama", ["LlamaForSequenceClassification"], "LlamaForSequenceClassification"),
        ("llama", ["NoSuchClass", "LlamaModel"], "LlamaModel"),
        ("llama", ["BertModel"], "LlamaForCausalLM"),  # a lie: it does not take this config
        ("llama", ["Trainer"], "LlamaForCausalLM"),
        ("llama", "LlamaModel", "LlamaForCausalLM"),
        ("bert", None, "BertForMaskedLM"),
        ("t5", None, "T5ForConditionalGeneration"),
        ("bart", None, "BartForConditionalGeneration"),
        ("whisper", None, "WhisperForConditionalGeneration"),
        ("mllama", None, "MllamaForConditionalGeneration"),
        ("qwen2_audio", None, "Qwen2AudioForConditionalGeneration"),
        ("musicgen", None, "MusicgenForConditionalGeneration"),
        ("siglip", None, "SiglipModel"),
        ("superpoint", None, "SuperPointForKeypointDetection"),
    ],
)
def test_class(model_type: str, architectures: Any, expected: str) -> None:
    config = transformers.CONFIG_MAPPING[model_type]()
    config.architectures = architectures
    assert model_class(config).__name__ == expected


def test_no_class_for_a_part() -> None:
    with pytest.raises(InputError, match=r"SamPromptEncoderConfig .* has no model class for it"):
        build_on_meta(transformers.SamPromptEncoderConfig())


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16, torch.bfloat16])
def test_parameters_have_the_declared_dtype(dtype: torch.dtype | None) -> None:
    config = AutoConfig.for_model(**LLAMA, dtype=dtype)
    model = build_on_meta(config)
    assert {p.dtype for p in model.parameters()} == {dtype or torch.float32}
    assert all(p.is_meta for p in model.parameters())
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32
    assert declared_dtype(config) == dtype


def test_dtype_declared_by_the_text_part_only() -> None:
    text = {**LLAMA, "dtype": "bfloat16"}
    config = transformers.LlavaConfig(text_config=text, vision_config={"num_hidden_layers": 1})
    assert config.dtype is None
    assert declared_dtype(config) == torch.bfloat16
    assert declared_dtype(transformers.MusicgenConfig()) is None  # two text parts, none of them the one


def test_kept_in_float32_as_from_pretrained_does(tmp_path: Path) -> None:
    small = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    transformers.T5ForConditionalGeneration(transformers.T5Config(**small)).half().save_pretrained(tmp_path)
    loaded = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path)
    built = build_on_meta(load_config(tmp_path))
    assert {n: p.dtype for n, p in built.named_parameters()} == {n: p.dtype for n, p in loaded.named_parameters()}
    assert torch.float32 in {p.dtype for p in built.parameters()}
    assert built.shared.weight is built.lm_head.weight  # still tied


def test_config_is_left_as_it_was() -> None:
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlavaConfig(text_config=LLAMA, vision_config=vision, dtype="bfloat16")
    before, parts = copy.deepcopy(state(config)), (config.text_config, config.vision_config)
    model = build_on_meta(config)
    assert state(config) == before
    assert parts == (config.text_config, config.vision_config)
    assert model.config is not config


def state(value: Any) -> Any:
    """A config as nested dictionaries, private values included."""
    return {k: state(v) for k, v in vars(value).items()} if isinstance(value, PreTrainedConfig) else value


def test_environment_is_left_as_it_was(tmp_path: Path) -> None:
    before = dict(os.environ), torch.get_rng_state()
    build_on_meta(load_config(saved(tmp_path, LLAMA)))
    assert dict(os.environ) == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_an_object_that_is_no_config_is_not_looked_into() -> None:
    """A mock has an attribute of every name, and gains one by the question."""
    assert [*numbers({"hidden_size": MagicMock(), "layers": [3]})] == [("layers", "layers", 3)]
