"""From a hub name, a directory, a config.json or a config object to a config, a class and a model without weights.

Nothing that a checkpoint brings along is executed and no pickle is read, unless `trust_remote_code=True`.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import huggingface_hub
import torch
import transformers
from huggingface_hub import errors as hub
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from hfpatch.compat import initial, loading
from hfpatch.errors import InputError, ModelNotFoundError
from hfpatch.model.fault import field_at_fault
from hfpatch.model.limits import check_sizes, suspects

CONFIG = "config.json"
HUB_SECONDS = 3.0
MAX_BYTES = 16 * 2**20

# httpx, httpx2 or requests, by the version of huggingface_hub: all under this name.
_HTTP_ERROR: type[Exception] = getattr(hub, "HTTPError", ConnectionError)

REJECTIONS = (
    ValueError, TypeError, LookupError, AttributeError, RuntimeError, AssertionError, ArithmeticError, ImportError,
    OSError, hub.StrictDataclassError, _HTTP_ERROR,
)  # fmt: skip
"""What the config and model classes of transformers raise at a config they cannot use."""

_AUTO = (
    "AutoModelForImageTextToText",
    "AutoModelForMultimodalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForTextToWaveform",
    "AutoModel",
    "AutoModelForPreTraining",
)
"""Auto classes to ask where a config names no class, the more special first: most composites and encoders
are also mapped to a causal LM, which is only a part of them."""


def load_config(name: str | Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The config of a model.

    Args:
        name: A directory, the path of a config.json, or a name on the hub (the local cache serves it offline).
        trust_remote_code: Run the config class that the checkpoint brings, where transformers has none.

    Raises:
        ModelNotFoundError: Nothing of that name, or nothing in it that describes a model.
        InputError: There is a config, but it is no JSON object, of no known `model_type`, wants code of
            its own, asks for absurd sizes, or its class rejects it.
    """
    file = _config_file(name)
    raw = _read(file)
    check_sizes(raw, str(name))
    _check_runs_nothing(raw, name, trust_remote_code)
    _check_dtype(raw, name)
    model_type = raw.get("model_type")
    known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    try:
        if not known and _auto_map(raw):
            auto: Any = transformers.AutoConfig
            config: PreTrainedConfig = auto.from_pretrained(_place(file, name), trust_remote_code=True)
        else:
            # Resolves what transformers resolves: files by version, timm checkpoints, infinities.
            values, _ = PreTrainedConfig.get_config_dict(_directory(file))
            check_sizes(values, str(name))
            config = _config_class(values, name).from_dict(values)
    except InputError:
        raise
    except RecursionError as error:
        raise InputError(f"{file} is nested too deep to be a config") from error
    except REJECTIONS as error:
        _reject(f"{name}: the config class for {model_type!r} rejects it", error, raw)
    config.name_or_path = _place(file, name)
    return config


def build_on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """The model a config describes, without weights: parameters on meta, in the declared dtype.

    Parameters that the class keeps in float32 are float32, as `from_pretrained` leaves them. The config
    is copied, not changed; the model is left in training mode. Time: some 3 ms a layer; memory: a few kB a module.

    Raises:
        InputError: The config asks for absurd sizes, transformers has no class for it, or its class rejects it.
    """
    name = config.name_or_path or type(config).__name__
    check_sizes(vars(config), name)
    config = copy.deepcopy(config)
    dtype = declared_dtype(config)
    cls: Any = None

    def build(given: PreTrainedConfig) -> PreTrainedModel:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):  # some draw on the CPU all the same
            return initial.built(cls, given, dtype)

    whole = copy.deepcopy(config)  # a class may have written to the other before it failed
    try:
        cls = model_class(config)
        model = build(config)
    except InputError:
        raise
    except REJECTIONS as error:
        whose = cls.__name__ if cls is not None else f"the class for {config.model_type!r}"
        at_fault = "" if cls is None else field_at_fault(whole, build, error, REJECTIONS)
        _reject(f"{name}: {whose} rejects this config", error, vars(config), at_fault)
    _keep_in_float32(model, dtype)
    return model


def declared_dtype(config: PreTrainedConfig) -> torch.dtype | None:
    """The dtype a checkpoint declares for its weights, its text part's where it has none of its own."""
    try:
        text: Any = config.get_text_config()
    except ValueError:  # several, none of them the one
        text = None
    for part in (config, text):
        dtype: Any = getattr(part, "dtype", None)
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype, None)
        if isinstance(dtype, torch.dtype):
            return dtype
    return None


def kept_in_float32(model: PreTrainedModel, dtype: torch.dtype | None) -> dict[str, nn.Parameter]:
    """Parameters in `dtype` that the class keeps in float32 when `from_pretrained` loads it, by name."""
    loose, strict = loading.kept_wide(model)
    patterns = loose | strict if dtype == torch.float16 else strict if dtype == torch.bfloat16 else set[str]()
    if not patterns:
        return {}
    wanted = re.compile("|".join(p.replace("*", ".*") for p in sorted(patterns)))  # matched as the loader does
    return {name: p for name, p in model.named_parameters() if p.dtype == dtype and wanted.search(name)}


def _keep_in_float32(model: PreTrainedModel, dtype: torch.dtype | None) -> None:
    kept = kept_in_float32(model, dtype)
    new = {id(p): nn.Parameter(p.detach().float(), requires_grad=p.requires_grad) for p in kept.values()}
    for module in model.modules() if new else ():
        for slot, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) in new:  # a tied one stays tied
                module.register_parameter(slot, new[id(parameter)])


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class named in `config.architectures` where transformers has it and it takes this config, else the
    most special one that an auto class maps the config to.

    Raises:
        InputError: There is none.
    """
    named: Any = getattr(config, "architectures", None)
    for name in named if isinstance(named, (list, tuple)) else ():
        cls: Any = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(cls, type) and issubclass(cls, PreTrainedModel) and _takes(cls, config):
            return cls
    from transformers.models.auto import modeling_auto

    if type(config).__module__.startswith("transformers_modules."):
        return _brought_along(config)
    for auto in (*_order(config), *(a for a in modeling_auto.__all__ if a.startswith("AutoModel"))):
        mapping = loading.classes_of(auto)
        for kind in type(config).__mro__:
            if kind in mapping:
                hit = mapping[kind]
                return hit[0] if isinstance(hit, (list, tuple)) else hit
    for auto in _AUTO:  # some config classes go by two architectures' names, and are found under one alone
        cls = getattr(transformers, str(loading.names_of(auto).get(config.model_type)), None)
        if isinstance(cls, type) and issubclass(cls, PreTrainedModel) and _takes(cls, config):
            return cls
    raise InputError(
        f"{type(config).__name__} ({config.model_type!r}): transformers {transformers.__version__} builds no model "
        "from it; name the config of a whole model"
    )


def _takes(cls: type[PreTrainedModel], config: PreTrainedConfig) -> bool:
    wanted: Any = cls.config_class
    return isinstance(wanted, type) and isinstance(config, wanted)


def _order(config: PreTrainedConfig) -> tuple[str, ...]:
    if getattr(config, "is_encoder_decoder", False):
        return tuple(a for a in _AUTO if a not in ("AutoModelForMaskedLM", "AutoModelForCausalLM"))
    return tuple(a for a in _AUTO if a != "AutoModelForMaskedLM") if getattr(config, "is_decoder", False) else _AUTO


def _brought_along(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class a trusted checkpoint brings: its config's class is such a one already."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    wants: Mapping[str, Any] = getattr(config, "auto_map", None) or {}
    for auto in (*_order(config), *wants):
        if auto.startswith("AutoModel") and isinstance(reference := wants.get(auto), str):
            cls: Any = get_class_from_dynamic_module(reference, config.name_or_path or "")
            return cls
    raise InputError(f"{config.name_or_path}: its auto_map names a config class but no model class")


def _config_file(name: str | Path) -> Path:
    if not str(name).strip():
        raise ModelNotFoundError("no model named: want a hub name, a directory or the path of a config.json")
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            file = path / CONFIG
            if file.is_file():
                return file
            held = sorted(p.name for p in path.iterdir())
            raise ModelNotFoundError(f"{name}: no {CONFIG} in this directory; {_instead(held)}")
        if path.is_file():
            return path
        if path.exists():
            raise ModelNotFoundError(f"{name}: neither a directory nor a file; want one that holds a {CONFIG}")
    except OSError as error:
        raise InputError(f"{name}: cannot be read ({error.strerror}); check the path and its permissions") from error
    text = str(name)
    if isinstance(name, Path) or text.startswith(("/", ".", "~")) or text.endswith(".json") or text.count("/") > 1:
        raise ModelNotFoundError(f"{name}: no such directory or file")
    return _from_hub(text)


def _instead(held: list[str]) -> str:
    if "adapter_config.json" in held:
        return "it holds a PEFT adapter: name the base model, or pass the loaded model"
    if not held:
        return "it is empty"
    shown = ", ".join(held[:5]) + (", ..." if len(held) > 5 else "")
    return f"it holds {shown}: name the directory of a saved model, or its {CONFIG}"


def _from_hub(name: str) -> Path:
    try:
        cached = huggingface_hub.try_to_load_from_cache(name, CONFIG)
        if not isinstance(cached, str):
            # Fails at once where there is no network; hf_hub_download alone would retry for 24 s.
            huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(name, CONFIG), timeout=HUB_SECONDS)
        return Path(huggingface_hub.hf_hub_download(name, CONFIG, etag_timeout=HUB_SECONDS))
    except hub.HFValidationError as error:
        raise ModelNotFoundError(f"{name!r}: neither a directory, a file nor a possible name on the hub") from error
    except hub.GatedRepoError as error:
        raise ModelNotFoundError(f"{name}: gated on the hub; ask for access on its page, then log in") from error
    except hub.RepositoryNotFoundError as error:
        raise ModelNotFoundError(f"{name}: no such directory here, and no model on the hub that you can see") from error
    except hub.EntryNotFoundError as error:
        if not isinstance(error, hub.LocalEntryNotFoundError):
            raise ModelNotFoundError(f"{name}: this repository on the hub has no {CONFIG}") from error
        _unreachable(name, error)
    except (OSError, _HTTP_ERROR) as error:
        _unreachable(name, error)


def _unreachable(name: str, error: Exception) -> NoReturn:
    why = "HF_HUB_OFFLINE is set" if isinstance(error, hub.OfflineModeIsEnabled) else "the hub cannot be reached"
    raise ModelNotFoundError(
        f"{name}: no such directory here, not in the local hub cache, and {why}; download it first, or name a directory"
    ) from error


def _read(where: Path) -> dict[str, Any]:
    try:
        if (size := where.stat().st_size) > MAX_BYTES:
            raise InputError(f"{where}: {size:,} bytes are no {CONFIG}; name the directory of the model")
        value: Any = json.loads(where.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        place = (
            f"line {error.lineno}, column {error.colno}: {error.msg.removesuffix(' at')}"
            if error.doc
            else "it is empty"
        )
        raise InputError(f"{where} is not valid JSON ({place}); it may be cut short, fetch it again") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{where} is not text; want a {CONFIG}, or the directory that holds it") from error
    except RecursionError as error:
        raise InputError(f"{where} is nested too deep to be a config") from error
    except OSError as error:
        raise InputError(f"{where}: cannot be read ({error.strerror}); check its permissions") from error
    if not isinstance(value, dict):
        kind = {"list": "an array", "str": "a string", "NoneType": "null"}.get(type(value).__name__, repr(value))
        raise InputError(f"{where}: want a JSON object, got {kind}; name the config of a model")
    return value


def _config_class(values: dict[str, Any], name: str | Path) -> Any:
    model_type = values.get("model_type")
    if model_type is None:
        if "peft_type" in values:
            raise InputError(f"{name}: the config of a PEFT adapter; name the base model")
        raise InputError(f"{name}: its {CONFIG} has no model_type, so its class is unknown; add the one it had")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(model_type), list(CONFIG_MAPPING.keys()), n=3)
        hint = f"near names: {', '.join(near)}" if near else "a newer transformers may have it"
        raise InputError(
            f"{name}: model_type {model_type!r} is not one that transformers {transformers.__version__} has; {hint}"
        )
    if model_type == "mistral" and "layer_types" in values:  # as AutoConfig does
        values["model_type"] = model_type = "ministral"
    return CONFIG_MAPPING[model_type]


def _check_runs_nothing(raw: dict[str, Any], name: str | Path, trusted: bool) -> None:
    if trusted:
        return
    model_type = raw.get("model_type")
    known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    if not known and (wanted := _auto_map(raw)):
        raise InputError(
            f"{name}: transformers {transformers.__version__} has no model_type {model_type!r}, and the config wants "
            f"code of its own ({wanted}), which is not run; read that code, then pass trust_remote_code=True"
        )
    for key, value in _strings(raw):
        if key.endswith(("attn_implementation", "experts_implementation")) and "/" in value:
            raise InputError(
                f"{name}: {key} asks for code from the hub ({value}), which is not run; remove the key, "
                "or read that code and pass trust_remote_code=True"
            )


def _auto_map(raw: Mapping[str, Any]) -> str | None:
    wanted = raw.get("auto_map")
    reference = wanted.get("AutoConfig") if isinstance(wanted, dict) else None
    return reference if isinstance(reference, str) else None


def _strings(value: Any, key: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Every text in a config with the key it is under; below `attn_implementation` that key stays."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping) and depth < 32:
        for name, item in value.items():
            yield from _strings(item, key if key.endswith("_implementation") else str(name), depth + 1)


def _check_dtype(raw: dict[str, Any], name: str | Path) -> None:
    for key in ("dtype", "torch_dtype"):
        value = raw.get(key)
        if value is not None and not (isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)):
            raise InputError(f"{name}: {key} {value!r} is no dtype of torch; want one such as 'bfloat16'")


def _directory(file: Path) -> str:
    return str(file.parent if file.name == CONFIG else file)


def _place(file: Path, name: str | Path) -> str:
    """Where transformers finds what else is in the checkpoint: the directory, or the name on the hub."""
    return _directory(file) if Path(name).expanduser().exists() else str(name)


def _reject(what: str, error: Exception, values: Mapping[str, Any], at_fault: str = "") -> NoReturn:
    if isinstance(error, _HTTP_ERROR):
        part = f" ({values['backbone']})" if isinstance(values.get("backbone"), str) else ""
        raise InputError(f"{what}: it names a part on the hub{part}, which cannot be fetched") from error
    cause = error.__cause__ if isinstance(error, hub.StrictDataclassError) and error.__cause__ else error
    text = re.sub(r"\s+", " ", str(cause)).partition(" Should contain one of")[0]  # 500 names
    text = text.strip().rstrip(".") or "no reason given"
    text = text if len(text) <= 300 else f"{text[:297]}..."
    if isinstance(cause, ImportError) and (package := re.search(r"requires the (\S+) library", text)):
        raise InputError(f"{what}: it needs the package {package[1]}, which is not installed") from error
    odd = [f"{path} is {value!r}" for path, value in suspects(values, cause) if path.rpartition(".")[2] not in text]
    if at_fault and (not odd or isinstance(cause, KeyError)):
        odd = [at_fault]
    hint = f" ({', '.join(list(dict.fromkeys(odd))[:3])})" if odd else ""
    todo = "install what it needs" if isinstance(cause, ImportError) else "correct the config"
    raise InputError(f"{what}: {type(cause).__name__}: {text}{hint}; {todo}") from error
