"""Turns a hub name, a directory or a config.json into a config, and a config into a model without weights.

No code from a checkpoint runs unless `trust_remote_code=True`; no pickle is read.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import re
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import huggingface_hub
import torch
import transformers
from huggingface_hub import errors as hub
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel, configuration_utils

from hfpatch.compat import implementation, initial, loading
from hfpatch.errors import InputError, ModelNotFoundError
from hfpatch.given import shown
from hfpatch.model.fault import field_at_fault
from hfpatch.model.limits import check_sizes, suspects
from hfpatch.untrusted.hub_code import code_of_model
from hfpatch.untrusted.ordinary import read_json

CONFIG = "config.json"
HUB_SECONDS = 3.0
MAX_BYTES = 16 * 2**20
OR_TRUST = "remove it, or read that code and pass trust_remote_code=True (--trust-remote-code)"

# Of httpx, httpx2 or requests, depending on the version of huggingface_hub.
_HTTP_ERROR: type[Exception] = getattr(hub, "HTTPError", ConnectionError)

REJECTIONS = (
    ValueError, TypeError, LookupError, AttributeError, RuntimeError, AssertionError, ArithmeticError, ImportError,
    OSError, hub.StrictDataclassError, _HTTP_ERROR,
)  # fmt: skip
"""Exceptions that the config and model classes of transformers raise for a config they cannot use."""

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
"""Auto classes tried if a config names no class, the most specific first: most composites and encoders are also
mapped to a causal LM, which is only a part of them."""


def load_config(name: str | Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Return the config of a model.

    Args:
        name: A directory, the path of a config.json, or a name on the hub (offline, from the local cache).
        trust_remote_code: Run the checkpoint's own config class if transformers has none for its `model_type`.

    Raises:
        ModelNotFoundError: No file, directory or hub model of that name was found, or it has no config.json.
        InputError: The config is not a JSON object, has no known `model_type`, needs remote code, has sizes beyond
            the limits or an unknown dtype, or is rejected by its class.
    """
    file = _config_file(name)
    read = _read(file)
    with _rejecting(file, f"{name}: transformers cannot read its config", read):
        if (listed := read.get("configuration_files")) is not None:
            _read(file.with_name(configuration_utils.get_configuration_file(listed)))
        # Resolves files by version, timm checkpoints and infinities, as transformers does.
        values, _ = PreTrainedConfig.get_config_dict(_directory(file), local_files_only=True)
    check_sizes(values, str(name))
    _check_runs_nothing(values, name, trust_remote_code)
    _check_dtype(values, name)
    model_type = values.get("model_type")
    known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    with _rejecting(file, f"{name}: the config class for {model_type!r} rejects it", values):
        if not known and _auto_map(values):
            auto: Any = transformers.AutoConfig
            config: PreTrainedConfig = auto.from_pretrained(_place(file, name), trust_remote_code=True)
        else:
            config = _config_class(values, name).from_dict(values)
    config.name_or_path = _place(file, name)
    return config


def build_on_meta(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Build a config's model without weights: parameters on meta, in the declared dtype, in training mode.

    Parameters that the class keeps in float32 are float32, as `from_pretrained` leaves them. The config is copied,
    not changed. Time: about 3 ms a layer; memory: a few kB a module.

    Raises:
        InputError: The config has sizes beyond the limits, transformers has no class for it, its class rejects it, or
            the model would load code from the hub and `trust_remote_code` is False.
    """
    name = config.name_or_path or type(config).__name__
    check_sizes(vars(config), name)
    config = copy.deepcopy(config)
    dtype = declared_dtype(config)
    cls: Any = None

    def build(given: PreTrainedConfig) -> PreTrainedModel:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):  # some classes still draw on the CPU
            return initial.built(cls, given, dtype)

    whole = copy.deepcopy(config)  # a class may write to its config before it fails
    try:
        cls = model_class(config)
        if not trust_remote_code:
            check_loads_nothing(config, cls, name)
        model = build(config)
    except InputError:
        raise
    except REJECTIONS as error:
        whose = cls.__name__ if cls is not None else f"the class for {config.model_type!r}"
        at_fault = "" if cls is None else field_at_fault(whole, build, error, REJECTIONS)
        _reject(f"{name}: {whose} rejects this config", error, vars(config), at_fault)
    _keep_in_float32(model, dtype)
    return model


def check_loads_nothing(config: PreTrainedConfig, cls: type[PreTrainedModel], name: str) -> None:
    """Raise if a class that is built from a config would load code from the hub.

    Raises:
        InputError: It would, such as an attention kernel.
    """
    said = _code_of(vars(config), name)
    if not said and "flash" in str(implementation.chosen(config)):
        kernel = next((way for way in implementation.taken(cls) if "/" in way), None)
        said = f"{cls.__name__} takes no other flash attention than {kernel}, code on the hub" if kernel else ""
    if said:
        raise InputError(f"{name}: {said}; {OR_TRUST}")


def declared_dtype(config: PreTrainedConfig) -> torch.dtype | None:
    """Return the dtype that a config declares for its weights, or else its text part; None if neither does."""
    try:
        text: Any = config.get_text_config()
    except ValueError:  # several text parts
        text = None
    for part in (config, text):
        dtype: Any = getattr(part, "dtype", None)
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype, None)
        if isinstance(dtype, torch.dtype):
            return dtype
    return None


def kept_in_float32(model: PreTrainedModel, dtype: torch.dtype | None) -> dict[str, nn.Parameter]:
    """Return the parameters in `dtype` that `from_pretrained` would keep in float32, by name."""
    loose, strict = loading.kept_wide(model)
    patterns = loose | strict if dtype == torch.float16 else strict if dtype == torch.bfloat16 else set[str]()
    if not patterns:
        return {}
    wanted = re.compile("|".join(p.replace("*", ".*") for p in sorted(patterns)))  # as the loader matches
    return {name: p for name, p in model.named_parameters() if p.dtype == dtype and wanted.search(name)}


def _keep_in_float32(model: PreTrainedModel, dtype: torch.dtype | None) -> None:
    kept = kept_in_float32(model, dtype)
    new = {id(p): nn.Parameter(p.detach().float(), requires_grad=p.requires_grad) for p in kept.values()}
    for module in model.modules() if new else ():
        for slot, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) in new:  # tied parameters stay tied
                module.register_parameter(slot, new[id(parameter)])


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class that `config.architectures` names, or the most specific one from the auto classes.

    A named class counts if transformers has it and it takes this config.

    Raises:
        InputError: No class was found.
    """
    named: Any = getattr(config, "architectures", None)
    for name in named if isinstance(named, (list, tuple)) else ():
        cls: Any = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(cls, type) and issubclass(cls, PreTrainedModel) and _accepts(cls, config):
            return cls
    from transformers.models.auto import modeling_auto

    if type(config).__module__.startswith("transformers_modules."):
        return _remote_class(config)
    for auto in (*_auto_classes(config), *(a for a in modeling_auto.__all__ if a.startswith("AutoModel"))):
        mapping = loading.classes_of(auto)
        for kind in type(config).__mro__:
            if kind in mapping:
                hit = mapping[kind]
                return hit[0] if isinstance(hit, (list, tuple)) else hit
    for auto in _AUTO:  # some config classes serve two architectures and are mapped under one name only
        cls = getattr(transformers, str(loading.names_of(auto).get(config.model_type)), None)
        if isinstance(cls, type) and issubclass(cls, PreTrainedModel) and _accepts(cls, config):
            return cls
    raise InputError(
        f"{type(config).__name__} ({config.model_type!r}): transformers {transformers.__version__} has no model class "
        "for it; name the config of a whole model"
    )


def _accepts(cls: type[PreTrainedModel], config: PreTrainedConfig) -> bool:
    wanted: Any = cls.config_class
    return isinstance(wanted, type) and isinstance(config, wanted)


def _auto_classes(config: PreTrainedConfig) -> tuple[str, ...]:
    if getattr(config, "is_encoder_decoder", False):
        return tuple(a for a in _AUTO if a not in ("AutoModelForMaskedLM", "AutoModelForCausalLM"))
    return tuple(a for a in _AUTO if a != "AutoModelForMaskedLM") if getattr(config, "is_decoder", False) else _AUTO


def _remote_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the model class from the checkpoint's own code, which the caller trusts."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    wants: Mapping[str, Any] = getattr(config, "auto_map", None) or {}
    for auto in (*_auto_classes(config), *wants):
        if auto.startswith("AutoModel") and isinstance(reference := wants.get(auto), str):
            cls: Any = get_class_from_dynamic_module(reference, config.name_or_path or "")
            return cls
    raise InputError(
        f"{config.name_or_path}: its auto_map names a config class but no model class; add the model class to it"
    )


def _config_file(name: str | Path) -> Path:
    if not str(name).strip():
        raise ModelNotFoundError("the model's name is empty: want a hub name, a directory or the path of a config.json")
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            file = path / CONFIG
            if file.is_file():
                return file
            held = sorted(p.name for p in path.iterdir())
            raise ModelNotFoundError(f"{name}: no {CONFIG} in this directory; {_suggestion(held)}")
        if path.is_file():
            return path
        if path.exists():
            raise ModelNotFoundError(f"{name}: neither a directory nor a file; want one that holds a {CONFIG}")
    except OSError as error:
        raise InputError(f"{name}: cannot be read ({error.strerror}); check the path and its permissions") from error
    text = str(name)
    if isinstance(name, Path) or text.startswith(("/", ".", "~")) or text.endswith(".json") or text.count("/") > 1:
        raise ModelNotFoundError(f"{name}: no such directory or file; check the path")
    return _from_hub(text)


def _suggestion(held: list[str]) -> str:
    if "adapter_config.json" in held:
        return "it holds a PEFT adapter: name the base model, or pass the loaded model"
    if CONFIG in held or not held:
        return "what has this name is not an ordinary file" if held else "it is empty"
    shown = ", ".join(held[:5]) + (", ..." if len(held) > 5 else "")
    return f"it holds {shown}: name the directory of a saved model, or its {CONFIG}"


def _from_hub(name: str) -> Path:
    try:
        cached = huggingface_hub.try_to_load_from_cache(name, CONFIG)
        if not isinstance(cached, str):
            # Fails at once without a network; hf_hub_download alone would retry for 24 s.
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
        value: Any = read_json(where, MAX_BYTES)
    except FileNotFoundError as error:
        raise InputError(f"{where}: there is no such file, and {CONFIG} names it in configuration_files") from error
    except InputError as error:
        raise InputError(f"{where}: {error}; name the {CONFIG} of a model, or download it again") from error
    if not isinstance(value, dict):
        kind = {"list": "an array", "str": "a string", "NoneType": "null"}.get(type(value).__name__, shown(value))
        raise InputError(f"{where}: want a JSON object, got {kind}; name the config of a model")
    return value


def _config_class(values: dict[str, Any], name: str | Path) -> Any:
    model_type = values.get("model_type")
    if model_type is None:
        if "peft_type" in values:
            raise InputError(f"{name}: this is the config of a PEFT adapter; name the base model")
        raise InputError(f"{name}: its {CONFIG} has no model_type, so its class is unknown; add its model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(model_type), list(CONFIG_MAPPING.keys()), n=3)
        hint = f"similar names: {', '.join(near)}" if near else "a newer transformers may have it"
        raise InputError(
            f"{name}: transformers {transformers.__version__} does not have the model_type {model_type!r}; {hint}"
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
            f"{name}: transformers {transformers.__version__} has no model_type {model_type!r}, and the config needs "
            f"remote code ({wanted}), which was not run; read that code, then pass trust_remote_code=True"
        )
    if said := _code_of(raw, str(name)):
        raise InputError(f"{name}: {said}; {OR_TRUST}")


def _code_of(values: Mapping[str, Any], name: str) -> str:
    try:
        return code_of_model(values)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error


def _auto_map(raw: Mapping[str, Any]) -> str | None:
    wanted = raw.get("auto_map")
    reference = wanted.get("AutoConfig") if isinstance(wanted, dict) else None
    return reference if isinstance(reference, str) else None


def _check_dtype(raw: dict[str, Any], name: str | Path) -> None:
    for key in ("dtype", "torch_dtype"):
        value = raw.get(key)
        if value is not None and not (isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)):
            raise InputError(f"{name}: {key} {value!r} is not a torch dtype; want one such as 'bfloat16'")


def _directory(file: Path) -> str:
    return str(file.parent if file.name == CONFIG else file)


def _place(file: Path, name: str | Path) -> str:
    """Return where transformers finds the checkpoint's other files: the directory, or the name on the hub."""
    return _directory(file) if Path(name).expanduser().exists() else str(name)


@contextlib.contextmanager
def _rejecting(file: Path, what: str, values: Mapping[str, Any]) -> Generator[None]:
    """Turn what transformers raises of a config into an InputError."""
    try:
        yield
    except InputError:
        raise
    except RecursionError as error:
        raise InputError(f"{file} is nested too deep to be a config") from error
    except REJECTIONS as error:
        _reject(what, error, values)


def _reject(what: str, error: Exception, values: Mapping[str, Any], at_fault: str = "") -> NoReturn:
    if isinstance(error, _HTTP_ERROR):
        part = f" ({values['backbone']})" if isinstance(values.get("backbone"), str) else ""
        raise InputError(
            f"{what}: it names a part on the hub{part}, which cannot be downloaded; download it first"
        ) from error
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
