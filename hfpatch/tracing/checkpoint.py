"""Loads a checkpoint to trace it: weights from local safetensors files, and the tokenizer.

No pickle is read and nothing is downloaded. Code in the checkpoint runs only with `trust_remote_code`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hfpatch.errors import InputError
from hfpatch.given import shown
from hfpatch.model.embed import find_embedding
from hfpatch.model.source import (
    CONFIG,
    REJECTIONS,
    build_on_meta,
    check_loads_nothing,
    load_config,
    model_class,
)
from hfpatch.untrusted.adapter_config import CONFIG as ADAPTER
from hfpatch.untrusted.adapter_config import read_adapter_config
from hfpatch.untrusted.hub_code import code_of_model, kernels_of_weights
from hfpatch.untrusted.ordinary import DATA, brief, check_folder, read_json

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
TOKENIZER = "tokenizer_config.json"
WEIGHTS, INDEX = ".safetensors", ".safetensors.index.json"
PER_BYTE, LOOSE = 16, 2**26
"""Weights that a config may describe: so many for each byte of the files, and so many more."""
LONGEST = 300
"""Characters of another library's message that are quoted."""


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
        name: As the caller named it.
        model: The model, on its device, in evaluation mode.
        tokenizer: A tokenizer of transformers.
        missing: Parameters and buffers that the checkpoint does not hold: they have new initial values.
        unexpected: Tensors in the checkpoint that the model does not have.
    """

    name: str
    model: PreTrainedModel
    tokenizer: Any
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    def batch(self, text: str, most: int, *, loss: bool) -> dict[str, torch.Tensor]:
        """Return the model's arguments for the first tokens of a text, as one row on the model's device.

        Args:
            text: The text.
            most: Maximum number of tokens; lower if the model has fewer positions.
            loss: Add the token ids as `labels`, so that the model returns a loss.

        Returns:
            `input_ids`, int64 `[1, tokens]`, and the tokenizer's other tensors that the model takes.

        Raises:
            InputError: The text is too short, the tokenizer does not fit the model, or a loss was asked for and the
                model takes no labels.
        """
        takes = inspect.signature(self.model.forward).parameters
        if loss and "labels" not in takes:
            raise InputError(
                f"{self.name}: {type(self.model).__name__} takes no labels, so it returns no loss for a backward pass; "
                "trace it without --backward, or in Python with your own loss"
            )
        positions: Any = getattr(_text_config(self.model.config), "max_position_embeddings", None)
        limit = min(most, positions) if isinstance(positions, int) and positions > 0 else most
        try:
            encoded: Any = self.tokenizer(text, return_tensors="pt", truncation=True, max_length=limit)
        except REJECTIONS as error:
            raise InputError(f"{self.name}: its tokenizer cannot read this text: {reason(error)}") from error
        batch: dict[str, torch.Tensor] = {k: v for k, v in encoded.items() if k in takes or k == "input_ids"}
        ids = batch["input_ids"]
        if ids.shape[1] < (2 if loss else 1):
            held, wants = ("one token", "a loss needs two") if ids.shape[1] else ("no token", "the model needs one")
            raise InputError(f"{self.name}: its tokenizer makes {held} of the text, and {wants}; use a longer text")
        embedding = find_embedding(self.model)
        rows = embedding.num_embeddings if isinstance(embedding, nn.Embedding) else None
        if rows is not None and int(ids.max()) >= rows:
            raise InputError(
                f"{self.name}: its tokenizer gives id {int(ids.max()):,}, but its embedding has {rows:,} rows; "
                "this is the tokenizer of another model; save the model's own beside its weights"
            )
        if loss or (self.model.config.is_encoder_decoder and "labels" in takes):
            batch["labels"] = ids
        elif self.model.config.is_encoder_decoder:
            batch["decoder_input_ids"] = ids
        return {k: v.to(self.model.device) for k, v in batch.items()}


def load(
    name: str,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    attention: str | None = None,
    trust_remote_code: bool = False,
) -> Checkpoint:
    """Load a checkpoint with its weights and its tokenizer.

    Args:
        name: A directory, or a name on the hub whose files are in the local cache.
        dtype: The dtype of the weights; None for the one that the checkpoint declares.
        device: The device of the model; None for the CPU.
        attention: The attention implementation; None for the default of transformers.
        trust_remote_code: Run model code from the checkpoint.

    Raises:
        ModelNotFoundError: No model with that name.
        InputError: No safetensors weights or no tokenizer there, or they do not fit the config.
    """
    config, folder = _checked(name, attention, trust_remote_code)
    tokenizer = _tokenizer(name, folder, config, trust_remote_code)
    model, missing, unexpected = _loaded(name, folder, config, dtype, device, attention, trust_remote_code)
    if model.main_input_name != "input_ids":
        raise InputError(
            f"{name}: {type(model).__name__} takes {model.main_input_name}, not text; trace it in Python on your own "
            "batch: `with hfpatch.trace(model) as t: model(**batch)`"
        )
    return Checkpoint(name, model, tokenizer, missing, unexpected)


def load_model(
    name: str,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    attention: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, tuple[str, ...], tuple[str, ...]]:
    """Load the weights of a checkpoint; a tokenizer is not needed.

    Args:
        name: As for `load`.
        dtype: As for `load`.
        device: As for `load`.
        attention: As for `load`.
        trust_remote_code: As for `load`.

    Returns:
        The model on its device, in evaluation mode; `missing` and `unexpected` as in `Checkpoint`.

    Raises:
        ModelNotFoundError: No model with that name.
        InputError: No safetensors weights there, or they do not fit the config.
    """
    config, folder = _checked(name, attention, trust_remote_code)
    return _loaded(name, folder, config, dtype, device, attention, trust_remote_code)


def _checked(name: str, attention: str | None, trust_remote_code: bool) -> tuple[PreTrainedConfig, Path]:
    """Return the config and the directory of a checkpoint, once everything that is about to be read was looked at."""
    if not trust_remote_code and code_of_model({"attention_implementation": attention}):
        raise InputError(
            f"{name}: attention={attention!r} is code from the hub, which is not run by default; read that code, then "
            "pass trust_remote_code=True (--trust-remote-code)"
        )
    config = load_config(name, trust_remote_code=trust_remote_code)
    folder = folder_of(name, config)
    _check_weights(name, folder)
    _check_files(name, folder, config, trust_remote_code)
    return config, folder


def _loaded(
    name: str,
    folder: Path,
    config: PreTrainedConfig,
    dtype: torch.dtype | None,
    device: torch.device | None,
    attention: str | None,
    trust_remote_code: bool,
) -> tuple[PreTrainedModel, tuple[str, ...], tuple[str, ...]]:
    model, told = _model(
        name,
        folder,
        config,
        dtype=dtype if dtype is not None else "auto",
        attn_implementation=attention,
        trust_remote_code=trust_remote_code,
    )
    try:
        if device is not None and model.device.type != device.type:
            nn.Module.to(model, device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch without CUDA
        raise InputError(
            f"{name}: the model cannot be moved to {device} ({reason(error)}); use another device or a narrower dtype"
        ) from error
    return model.eval(), tuple(sorted(told["missing_keys"])), tuple(sorted(told["unexpected_keys"]))


def reason(error: BaseException) -> str:
    """Return type and message of an exception from other code, shortened to one line."""
    text = " ".join(str(error).split()).rstrip(".") or "no reason given"
    return f"{type(error).__name__}: {text if len(text) <= LONGEST else text[: LONGEST - 3] + '...'}"


def _text_config(config: PreTrainedConfig) -> Any:
    try:
        return config.get_text_config()
    except ValueError:  # several text configs, and none is preferred
        return config


def folder_of(name: str, config: PreTrainedConfig) -> Path:
    """Return the directory that a config was read from: for a name on the hub, the snapshot in the local cache."""
    named = config.name_or_path or name
    place = Path(named)
    if not place.exists():
        cached = huggingface_hub.try_to_load_from_cache(named, CONFIG)
        place = Path(cached).parent if isinstance(cached, str) else place
    if not place.is_dir():
        raise InputError(f"{name}: this is a config without weights; name the directory of a saved model")
    return place


def _check_weights(name: str, folder: Path) -> None:
    held = sorted(p.name for p in folder.iterdir())
    if SAFE_WEIGHTS_NAME in held or SAFE_WEIGHTS_INDEX_NAME in held:
        return
    pickles = [n for n in held if n.endswith(PICKLES)]
    other = [n for n in held if n.endswith((".safetensors", ".gguf"))]
    if other:
        raise InputError(
            f"{name}: the directory holds {other[0]} but no {SAFE_WEIGHTS_NAME}; save the model with save_pretrained"
        )
    if pickles:
        raise InputError(
            f"{name}: its weights are a pickle ({pickles[0]}), which can run code and is never read; load it yourself "
            f"and call save_pretrained, which writes {SAFE_WEIGHTS_NAME}"
        )
    if Path(name).expanduser().exists():
        raise InputError(f"{name} holds a config without weights; put the model's {SAFE_WEIGHTS_NAME} beside it")
    raise InputError(f"{name}: its weights are not in the local hub cache; download them first (hf download {name})")


def _check_files(name: str, folder: Path, config: PreTrainedConfig, trust_remote_code: bool) -> None:
    """Check the files that transformers reads beside the config, before it does.

    Raises:
        InputError: One is not an ordinary file, is too large, names a file that is not one, or would have code or
            another model loaded; or the config describes far more weights than there are.
    """
    try:
        check_folder(folder)
    except InputError as error:
        raise InputError(f"{name}: {error}; name a directory of saved files") from error
    if (folder / ADAPTER).exists():
        read_adapter_config(folder, trust_remote_code=trust_remote_code)
    if (named := folder / TOKENIZER).exists():
        for key, file in _json(named).items():
            if key.endswith("_file") and isinstance(file, str) and not _may_be_opened(file):
                raise InputError(f"{named}: {key} names {brief(file)}, which is not an ordinary file; remove the key")
    shards = _shards(folder, config)
    held = sum((folder / shard).stat().st_size for shard in shards)
    count = sum(p.numel() for p in build_on_meta(config, trust_remote_code=trust_remote_code).parameters())
    if count > LOOSE + PER_BYTE * held:
        raise InputError(
            f"{name}: its config describes {count:,} weights, and its files have {held:,} bytes; correct the config"
        )
    if not trust_remote_code and (method := kernels_of_weights(vars(config))):
        raise InputError(
            f"{name}: its weights are quantised by {method}, whose layers transformers would load from the hub, and "
            "which was not asked; name an unquantised checkpoint, or pass trust_remote_code=True (--trust-remote-code)"
        )


def _shards(folder: Path, config: PreTrainedConfig) -> list[str]:
    """Return the files of weights that transformers reads, which are safetensors in the folder.

    Raises:
        InputError: One would be something else.
    """
    named: Any = getattr(config, "transformers_weights", None)  # a file that the config names in place of the usual one
    first = named or (SAFE_WEIGHTS_NAME if (folder / SAFE_WEIGHTS_NAME).exists() else SAFE_WEIGHTS_INDEX_NAME)
    if isinstance(first, str) and first.endswith(INDEX):
        where: Any = _json(folder / first).get("weight_map")
        if not isinstance(where, dict) or not where or not all(isinstance(shard, str) for shard in where.values()):
            raise InputError(f"{folder / first}: want a weight_map from tensors to file names; save the model again")
        shards: list[Any] = sorted(set(where.values()))
    else:
        shards = [first]
    for shard in shards:
        if not isinstance(shard, str) or not shard.endswith(WEIGHTS) or Path(shard).name != shard:
            raise InputError(
                f"{folder}: it names {shown(shard)} as its weights; want a safetensors file beside its config"
            )
        if not (folder / shard).is_file():
            raise InputError(f"{folder}: {brief(shard)}, which it names as its weights, is not there; download it")
    return shards


def _json(file: Path) -> dict[str, Any]:
    try:
        values = read_json(file, DATA)
    except (FileNotFoundError, InputError) as error:
        why = error if isinstance(error, InputError) else "there is no such file"
        raise InputError(f"{file}: {why}; save it again") from error
    if not isinstance(values, dict):
        raise InputError(f"{file}: want a JSON object; save it again")
    return values


def _may_be_opened(file: str) -> bool:
    """True if a path is that of an ordinary file, or of none."""
    try:
        return Path(file).is_file() or not Path(file).exists()
    except (OSError, ValueError):  # too long, or a null byte: it is not opened either
        return True


def _tokenizer(name: str, folder: Path, config: PreTrainedConfig, trust_remote_code: bool) -> Any:
    auto: Any = transformers.AutoTokenizer
    try:
        tokenizer = auto.from_pretrained(
            folder, config=config, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:
        if not isinstance(error, REJECTIONS) and type(error) is not Exception:  # the tokenizers library raises that
            raise
        raise InputError(
            f"{name}: its tokenizer cannot be loaded ({reason(error)}); save the model's own beside its weights"
        ) from error
    # Without the files, transformers may silently make an empty tokenizer of the right class.
    files = set(tokenizer.vocab_files_names.values()) | {"tokenizer.json"}
    files = files if tokenizer.vocab_files_names else {"tokenizer_config.json"}  # a byte-level one has no vocabulary
    if not any((folder / file).is_file() for file in files):
        raise InputError(f"{name}: no tokenizer there ({_any_of(files)}); save the model's own beside its weights")
    return tokenizer


def _any_of(names: Iterable[str]) -> str:
    return "want " + " or ".join(sorted(names))


def _model(name: str, folder: Path, config: PreTrainedConfig, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    cls: Any = model_class(config)
    if not options["trust_remote_code"]:
        check_loads_nothing(config, cls, name)
    try:
        model, told = cls.from_pretrained(
            folder,
            config=config,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # raised below, by name
            **{k: v for k, v in options.items() if v is not None},
        )
    except (*REJECTIONS, SafetensorError, MemoryError) as error:
        raise InputError(f"{name}: {cls.__name__} cannot be loaded: {reason(error)}") from error
    if told["mismatched_keys"]:
        key, held, wanted = sorted(told["mismatched_keys"])[0]
        raise InputError(
            f"{name}: {key} is {_shape(held)} in the checkpoint and {_shape(wanted)} by its config "
            f"({len(told['mismatched_keys'])} such tensors); correct the config, or name another checkpoint"
        )
    return model, told


def _shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "a number"
