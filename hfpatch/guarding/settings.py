"""What a training run is asked to do, from TrainingArguments, a dict or a file: only what `hfpatch.check` looks at."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hfpatch.errors import InputError

MAX_BYTES = 4 * 2**20
PRECISIONS = ("no", "fp16", "bf16")
_TRUTHS = {"true": True, "false": False}


@dataclass(frozen=True)
class Settings:
    """A training run as `transformers.Trainer` would do it.

    Attributes:
        precision: no, fp16 (autocast and a GradScaler) or bf16 (autocast).
        optim: Name of the optimizer, as in `TrainingArguments.optim`.
        eps: Of Adam.
        accumulation: Micro-batches in a step.
        processes: Ranks that share the count of supervised tokens; 1 where it is not shared.
        clip: Norm to clip to; 0: clipping is off.
        nan_filter: The Trainer's log leaves out losses that are not finite.
        smoothing: The Trainer computes the loss itself, with label smoothing.
        checkpointing: The Trainer turns activation checkpointing on.
        reentrant: With torch's reentrant implementation.
        cpu: It trains on the CPU.
        rate: Learning rate, at its highest.
        decay: Weight decay.
        full_eval: `fp16` or `bf16` where evaluation casts the model to it; else empty.
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
    ignored: tuple[str, ...] = ()

    @property
    def scaled(self) -> bool:
        """A GradScaler multiplies the loss."""
        return self.precision == "fp16"

    @property
    def is_torch_adam(self) -> bool:
        """The optimizer is torch's own Adam, whose arithmetic and state are in the parameters' dtype."""
        return self.optim in ("adamw_torch", "adamw_torch_fused")

    @property
    def fused(self) -> bool:
        """It is the fused one: its state is in the parameters' dtype, its arithmetic in float32."""
        return self.optim == "adamw_torch_fused"


def read_settings(args: Any) -> Settings:
    """Settings of `TrainingArguments` (or a subclass, such as TRL's SFTConfig), or of a mapping with such keys.

    Keys that are left out have the defaults of TrainingArguments; `mixed_precision` ("no", "fp16", "bf16") is taken
    for `fp16` and `bf16`, as accelerate's configuration has it.

    Raises:
        InputError: Neither, or a value that is none for its key.
    """
    if isinstance(args, Mapping):
        given = {str(k): v for k, v in args.items()}
    elif hasattr(args, "gradient_accumulation_steps") and hasattr(args, "max_grad_norm"):
        given = {name: getattr(args, name) for name in (*_defaults(), "mixed_precision") if hasattr(args, name)}
        given["world_size"] = args.world_size
    else:
        raise InputError(
            f"check: args: want TrainingArguments, or a dict with its keys; got {type(args).__name__}; leave it out to "
            "look at the model alone"
        )
    read = _Reader({**_defaults(), **{k: v for k, v in given.items() if v is not None}})
    options = read.mapping("optim_args")
    kwargs = read.mapping("activation_checkpointing_kwargs") or read.mapping("gradient_checkpointing_kwargs")
    shared = read.truth("average_tokens_across_devices")
    return Settings(
        precision=read.precision(),
        optim=str(getattr(read.values["optim"], "value", read.values["optim"])),
        eps=_Reader({"eps": options["eps"]}).number("eps") if "eps" in options else read.number("adam_epsilon"),
        accumulation=int(read.number("gradient_accumulation_steps", least=1)),
        processes=int(read.number("world_size", least=1)) if shared and "world_size" in read.values else 1,
        clip=0.0 if "max_grad_norm" in given and given["max_grad_norm"] is None else read.number("max_grad_norm"),
        nan_filter=read.truth("logging_nan_inf_filter"),
        smoothing=read.number("label_smoothing_factor") > 0,
        checkpointing=read.truth("activation_checkpointing") or read.truth("gradient_checkpointing"),
        # without any kwargs transformers asks for the other one; with some, torch's default is this one
        reentrant=bool(kwargs) and kwargs.get("use_reentrant", True) is not False,
        cpu=read.truth("use_cpu"),
        rate=read.number("learning_rate"),
        decay=read.number("weight_decay"),
        full_eval=next((name for name in ("fp16", "bf16") if read.truth(f"{name}_full_eval")), ""),
        ignored=tuple(k for k in given if k not in _defaults() and k not in ("mixed_precision", "world_size")),
    )


def settings_file(path: Path) -> dict[str, Any]:
    """The mapping in a JSON or YAML file.

    Raises:
        InputError: It cannot be read, or holds something else.
    """
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise InputError(f"--args {path}: {size:,} bytes are no training arguments; name a JSON or YAML file")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"--args {path}: not text (training_args.bin is a pickle, which is not read); want JSON or YAML, such as "
            "TrainingArguments.to_json_string() gives"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        why = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"--args {path}: cannot be read ({why}); want a JSON or YAML file") from error
    value = _parsed(text, path)
    if not isinstance(value, dict):
        kind = "nothing" if value is None else f"a {type(value).__name__}"
        raise InputError(f"--args {path}: want a mapping of training arguments, got {kind}")
    return {str(k): v for k, v in value.items()}


def _parsed(text: str, path: Path) -> Any:
    if path.suffix.lower() == ".json":
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(
                f"--args {path}: not valid JSON (line {error.lineno}, column {error.colno}: {error.msg})"
            ) from error
        except RecursionError as error:
            raise InputError(f"--args {path}: nested too deep for training arguments") from error
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark: Any = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
        raise InputError(f"--args {path}: not valid YAML{where}; want key: value lines, or a .json file") from error
    except RecursionError as error:
        raise InputError(f"--args {path}: nested too deep for training arguments") from error


@cache
def _defaults() -> dict[str, Any]:
    from transformers import TrainingArguments

    fields = dataclasses.fields(TrainingArguments)
    values = {f.name: None if f.default is dataclasses.MISSING else f.default for f in fields}
    # one of each pair is missing, by the version of transformers
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        values[name] = values.get(name) or False
        values.setdefault(f"{name}_kwargs", None)
    return values


class _Reader:
    """Values by key, of the kind that is wanted."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def number(self, key: str, least: float = 0.0) -> float:
        value = self.values[key]
        try:
            number = float(value)  # YAML reads 1e-8 as a text
        except (TypeError, ValueError):
            number = math.nan
        if isinstance(value, bool) or not least <= number < math.inf:
            raise InputError(f"check: {key}: want a number of at least {least:g}, got {value!r}")
        return number

    def truth(self, key: str) -> bool:
        value = self.values[key]
        if isinstance(value, str):
            value = _TRUTHS.get(value.lower(), value)
        if not isinstance(value, bool):
            raise InputError(f"check: {key}: want true or false, got {value!r}")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """A mapping, or its text as command lines have it: JSON, or `name=value, ...`."""
        value = self.values.get(key)
        if isinstance(value, Mapping):
            return {str(k): v for k, v in value.items()}
        if value is None or value == "":
            return {}
        if isinstance(value, str):
            if value.lstrip().startswith("{"):
                try:
                    return dict(json.loads(value))
                except json.JSONDecodeError as error:
                    raise InputError(f"check: {key}: not valid JSON: {value!r}") from error
            pairs = [part.partition("=") for part in value.split(",")]
            if all(sign for _, sign, _ in pairs):
                return {name.strip(): text.strip() for name, _, text in pairs}
        raise InputError(f"check: {key}: want a mapping, got {value!r}")

    def precision(self) -> str:
        asked = [name for name in ("fp16", "bf16") if self.truth(name)]
        if len(asked) > 1:
            raise InputError("check: fp16 and bf16 are both true, which the Trainer refuses; choose one")
        named = self.values.get("mixed_precision", "no")
        if named is False:  # YAML reads a bare `no` as false
            named = "no"
        if named not in PRECISIONS and named != "fp8":
            raise InputError(f"check: mixed_precision: want one of {', '.join(PRECISIONS)}, got {named!r}")
        return asked[0] if asked else str(named)
