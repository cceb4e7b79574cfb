"""The training arguments that `hfpatch.check` needs, from TrainingArguments, a dict or a file."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Any

import yaml

from hfpatch.errors import InputError
from hfpatch.given import shown
from hfpatch.untrusted.ordinary import brief, parsed_json, read_ordinary

MAX_BYTES = 2**16
"""Largest file of training arguments that is read, in bytes: a second of YAML. A usual one has 5,000."""
PRECISIONS = ("no", "fp16", "bf16")
LARGEST_BITS = 1024
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.ASCII | re.IGNORECASE)
_TRUTHS = {"true": True, "false": False}


@dataclass(frozen=True)
class Settings:
    """Settings of a training run with `transformers.Trainer`.

    Attributes:
        precision: `no`, `fp16` (autocast and a GradScaler), `bf16` (autocast) or `fp8`.
        optim: Name of the optimizer, as in `TrainingArguments.optim`.
        eps: The eps of Adam.
        accumulation: Micro-batches per step.
        processes: Number of ranks over which supervised tokens are counted; 1 if each rank counts its own.
        clip: Norm to clip to; 0 if clipping is off.
        nan_filter: True if the Trainer's log leaves out losses that are not finite.
        smoothing: True if the Trainer computes the loss itself, with label smoothing.
        checkpointing: True if the Trainer turns activation checkpointing on.
        reentrant: True if checkpointing uses torch's reentrant implementation.
        cpu: True if it trains on the CPU.
        rate: Learning rate, at its highest.
        decay: Weight decay.
        full_eval: `fp16` or `bf16` if evaluation casts the model to it; else empty.
        cache: The `use_cache` that the Trainer sets in the model's config; None if it sets none.
        ignored: Keys that TrainingArguments does not have.
    """

    precision: str
    optim: str
    eps: float
    accumulation: int
    processes: int
    clip: float
    nan_filter: bool
    smoothing: bool
    checkpointing: bool
    reentrant: bool
    cpu: bool
    rate: float = 5e-5
    decay: float = 0.0
    full_eval: str = ""
    cache: bool | None = None
    ignored: tuple[str, ...] = ()

    @property
    def scaled(self) -> bool:
        """True if a GradScaler multiplies the loss."""
        return self.precision == "fp16"

    @property
    def is_torch_adam(self) -> bool:
        """True if the optimizer is torch's AdamW, whose state has the parameters' dtype."""
        return self.optim in ("adamw_torch", "adamw_torch_fused")

    @property
    def fused(self) -> bool:
        """True if it is the fused AdamW, whose state has the parameters' dtype and which computes in float32."""
        return self.optim == "adamw_torch_fused"


def read_settings(args: Any) -> Settings:
    """Return the settings in `TrainingArguments`, a subclass such as TRL's SFTConfig, or a mapping with such keys.

    Missing keys have the defaults of TrainingArguments. `mixed_precision` ("no", "fp16", "bf16"), as in accelerate's
    configuration, stands for `fp16` and `bf16`.

    Raises:
        InputError: `args` is none of these, or a value does not fit its key.
    """
    if isinstance(args, Mapping):
        given = {str(k): v for k, v in args.items()}
    elif hasattr(args, "gradient_accumulation_steps") and hasattr(args, "max_grad_norm"):
        given = {name: getattr(args, name) for name in (*_defaults(), "mixed_precision") if hasattr(args, name)}
        given["world_size"] = args.world_size
    else:
        raise InputError(
            f"check: args: want TrainingArguments, or a dict with its keys; got {type(args).__name__}; leave it out to "
            "check the model alone"
        )
    read = _Reader({**_defaults(), **{k: v for k, v in given.items() if v is not None}})
    options = read.mapping("optim_args")
    kwargs = read.mapping("activation_checkpointing_kwargs") or read.mapping("gradient_checkpointing_kwargs")
    shared = read.boolean("average_tokens_across_devices")
    return Settings(
        precision=read.precision(),
        optim=str(getattr(read.values["optim"], "value", read.values["optim"])),
        eps=_Reader({"eps": options["eps"]}).number("eps") if "eps" in options else read.number("adam_epsilon"),
        accumulation=read.count("gradient_accumulation_steps"),
        processes=read.count("world_size") if shared and "world_size" in read.values else 1,
        clip=0.0 if "max_grad_norm" in given and given["max_grad_norm"] is None else read.number("max_grad_norm"),
        nan_filter=read.boolean("logging_nan_inf_filter"),
        smoothing=read.number("label_smoothing_factor") > 0,
        checkpointing=read.boolean("activation_checkpointing") or read.boolean("gradient_checkpointing"),
        # without kwargs transformers uses the non-reentrant implementation; with some, torch's default is reentrant
        reentrant=bool(kwargs) and kwargs.get("use_reentrant", True) is not False,
        cpu=read.boolean("use_cpu"),
        rate=read.number("learning_rate"),
        decay=read.number("weight_decay"),
        full_eval=next((name for name in ("fp16", "bf16") if read.boolean(f"{name}_full_eval")), ""),
        cache=read.boolean("use_cache") if "use_cache" in read.values else None,
        ignored=tuple(k for k in given if k not in _defaults() and k not in ("mixed_precision", "world_size")),
    )


def settings_file(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON or YAML file.

    Raises:
        InputError: The file cannot be read, or does not hold a mapping.
    """
    try:
        raw = read_ordinary(path, MAX_BYTES)
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"--args {path}: not a text file (training_args.bin is a pickle, which is not read); want JSON or YAML, "
            "such as the output of TrainingArguments.to_json_string()"
        ) from error
    except FileNotFoundError as error:
        raise InputError(f"--args {path}: cannot be read ({error.strerror}); want a JSON or YAML file") from error
    except InputError as error:
        raise InputError(f"--args {brief(str(path))}: cannot be read ({error}); want a JSON or YAML file") from error
    try:
        value = parsed_json(raw, strict=True) if path.suffix.lower() == ".json" else _yaml(text)
    except InputError as error:
        raise InputError(f"--args {path}: {error}; want key: value lines, or a .json file") from error
    if not isinstance(value, dict):
        kind = "nothing" if value is None else f"a {type(value).__name__}"
        raise InputError(f"--args {path}: want a mapping of training arguments, got {kind}")
    return {str(k): v for k, v in value.items()}


class _WithoutAliases(yaml.SafeLoader):
    """A safe loader that takes neither anchors nor aliases."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        if event.anchor is not None:
            raise InputError(f"line {event.start_mark.line + 1} has an anchor or an alias; write the value out")
        return super().compose_node(parent, index)


def _yaml(text: str) -> Any:
    """Return what `yaml.safe_load` does, as the Trainer's own parser reads a file.

    Aliases are refused, which make gigabytes of a few lines; so are keys that are named twice.

    Raises:
        InputError: It is not YAML, or a value does not fit its tag; the message is without the file's name.
    """
    try:
        loader = _WithoutAliases(text)
        tree: Any = loader.get_single_node()
        if isinstance(tree, yaml.MappingNode):
            keys = [key.value for key, _ in tree.value if isinstance(key, yaml.ScalarNode)]
            if again := next((key for key, times in Counter(keys).items() if times > 1), ""):
                raise InputError(f"it names {brief(again)} twice")
        return None if tree is None else loader.construct_document(tree)
    except yaml.YAMLError as error:
        mark: Any = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
        raise InputError(f"not valid YAML{where}") from error
    except RecursionError as error:
        raise InputError("nested too deep for training arguments") from error
    except (ValueError, LookupError, AttributeError, TypeError) as error:  # of a tag, a date or a number that is none
        if isinstance(error, InputError):
            raise
        raise InputError(f"a value in it cannot be read ({type(error).__name__}: {brief(str(error))})") from error


@cache
def _defaults() -> dict[str, Any]:
    from transformers import TrainingArguments

    fields = dataclasses.fields(TrainingArguments)
    values = {f.name: None if f.default is dataclasses.MISSING else f.default for f in fields}
    # each version of transformers has one of the two names
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        values[name] = values.get(name) or False
        values.setdefault(f"{name}_kwargs", None)
    return values


class _Reader:
    """Reads values by key, and raises `InputError` if one does not fit."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def number(self, key: str, least: float = 0.0) -> float:
        value = self.values[key]
        number = math.nan
        if isinstance(value, bool):
            pass
        elif isinstance(value, Real):
            number = math.inf if isinstance(value, int) and value.bit_length() > LARGEST_BITS else float(value)
        elif isinstance(value, str) and _NUMBER.fullmatch(value):  # YAML reads 1e-8 as a string
            number = float(value)
        if not least <= number < math.inf:
            raise InputError(f"check: {key}: want a number of at least {least:g}, got {shown(value)}")
        return number

    def count(self, key: str) -> int:
        number = self.number(key, least=1)
        if number != int(number):
            raise InputError(f"check: {key}: want a whole number of at least 1, got {shown(self.values[key])}")
        return int(number)

    def boolean(self, key: str) -> bool:
        value = self.values[key]
        if isinstance(value, str):
            value = _TRUTHS.get(value.lower(), value)
        if not isinstance(value, bool):
            raise InputError(f"check: {key}: want true or false, got {shown(value)}")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """Return a mapping, also one given as text on a command line: JSON, or `name=value, ...`."""
        value = self.values.get(key)
        if isinstance(value, Mapping):
            return {str(k): v for k, v in value.items()}
        if value is None or value == "":
            return {}
        if isinstance(value, str):
            if value.lstrip().startswith("{"):
                try:
                    return dict(parsed_json(value.encode()))
                except (InputError, UnicodeEncodeError) as error:
                    raise InputError(f"check: {key}: not valid JSON: {shown(value)}") from error
            pairs = [part.partition("=") for part in value.split(",")]
            if all(sign for _, sign, _ in pairs):
                return {name.strip(): text.strip() for name, _, text in pairs}
        raise InputError(f"check: {key}: want a mapping, got {shown(value)}")

    def precision(self) -> str:
        asked = [name for name in ("fp16", "bf16") if self.boolean(name)]
        if len(asked) > 1:
            raise InputError("check: fp16 and bf16 are both true, which the Trainer refuses; choose one")
        named = self.values.get("mixed_precision", "no")
        if named is False:  # YAML reads a bare `no` as false
            named = "no"
        if named not in PRECISIONS and named != "fp8":
            raise InputError(f"check: mixed_precision: want one of {', '.join(PRECISIONS)}, got {shown(named)}")
        return asked[0] if asked else str(named)
