"""Reads the config of a saved adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hfpatch.errors import InputError
from hfpatch.untrusted.hub_code import LARGEST_SIZE, code_of_adapter, too_large
from hfpatch.untrusted.ordinary import check_folder, read_json

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
LARGEST = 16 * 2**20


def read_adapter_config(folder: Path, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Return the content of adapter_config.json in the folder of an adapter that PEFT is about to load.

    Raises:
        InputError: It cannot be read, is not the config of an adapter, names something that PEFT would load or import,
            or has sizes that no adapter has; or the folder holds no safetensors weights, or anything but ordinary
            files.
    """
    file = folder / CONFIG
    try:
        values: Any = read_json(file, LARGEST)
    except FileNotFoundError as error:
        raise InputError(f"{folder}: it holds no {CONFIG}; name the directory of an adapter") from error
    except InputError as error:
        raise InputError(f"{file}: {error}; save the adapter again") from error
    if not isinstance(values, dict) or not isinstance(values.get("peft_type"), str):
        raise InputError(f"{file}: want the config of an adapter, with a peft_type")
    if not (folder / WEIGHTS).is_file():
        raise InputError(
            f"{folder}: an adapter without {WEIGHTS}; pickled weights are never read, save it as safetensors"
        )
    try:
        check_folder(folder)
        said = "" if trust_remote_code else code_of_adapter(values)
    except InputError as error:
        raise InputError(f"{folder}: {error}") from error
    if said:
        raise InputError(f"{file}: {said}; remove it from the config, or pass --trust-remote-code")
    if size := too_large(values):
        raise InputError(f"{file}: {size}, more than any adapter has (limit {LARGEST_SIZE:,}); correct the config")
    return values
