"""Whether a saved adapter fits a model: which of its tensors land, and what renaming would make the others land."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfpatch.errors import InputError
from hfpatch.report.progress import patience
from hfpatch.scanning.header import read_header
from hfpatch.scanning.result import Found
from hfpatch.untrusted.adapter_config import CONFIG, WEIGHTS, read_adapter_config
from hfpatch.untrusted.ordinary import brief

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hfpatch.lora.landing import Landing

NAMED = 3


def adapter_findings(folder: Path, model: object) -> tuple[list[Found], list[Found]]:
    """Return what of a saved adapter does not fit a model, and what does; no weight is read and none is loaded.

    Args:
        folder: A directory with adapter_config.json and adapter_model.safetensors.
        model: A name, a directory or a config, of which only the config is read, or a loaded transformers model.

    Returns:
        The findings, and the notes.

    Raises:
        InputError: The folder holds no adapter, or its config cannot be used; the model cannot be built.
    """
    from hfpatch.lora.landing import landing

    config, build = _config(folder), _builder(model)
    tick = patience("scan, the adapter", every=2.0)
    try:
        tensors = read_header(folder / WEIGHTS)
    except InputError as error:
        return [Found("broken file", WEIGHTS, "", str(error))], []
    tick(f"reading the shapes of {len(tensors):,} tensors")
    try:
        found = landing(build, config, _shapes(folder / WEIGHTS, [t.name for t in tensors]), tick)
    except InputError as error:
        return [Found("adapter does not fit", WEIGHTS, "", str(error))], []
    return _findings(found), [_note(found)]


def _note(found: Landing) -> Found:
    text = f"{found.landed} of {found.wanted} parameters of the adapter are filled by a tensor of the file"
    return Found("adapter", WEIGHTS, "", text, {"wanted": found.wanted, "landed": found.landed})


def _findings(found: Landing) -> list[Found]:
    out: list[Found] = []
    if found.unknown:
        text = f"{len(found.unknown)} tensors fit no parameter of the model: {_few(found.unknown)}"
        out.append(Found("keys do not land", WEIGHTS, "", text, {"count": len(found.unknown)}))
    if found.missing:
        text = f"{len(found.missing)} of {found.wanted} parameters stay as drawn, for want of a tensor: " + _few(
            found.missing
        )
        out.append(Found("parameters not filled", WEIGHTS, "", text, {"count": len(found.missing)}))
    for name, (given, wanted) in list(found.shapes.items())[:NAMED]:
        text = f"the file has the shape {list(given)}, the model {list(wanted)}"
        if len(found.shapes) > NAMED:
            text += f" (the first {NAMED} of {len(found.shapes)} such)"
        out.append(Found("wrong shape", WEIGHTS, name, text))
    if found.renaming:
        pairs = "; ".join(
            f"{brief(old or '(nothing)')} -> {brief(new or '(nothing)')}" for old, new in found.renaming.items()
        )
        text = f"with other names {found.renamed} of {found.wanted} are filled (tried): {pairs}"
        out.append(Found("renaming", WEIGHTS, "", text, {"landed": found.renamed}))
    return out


def _few(names: tuple[str, ...]) -> str:
    more = f", and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(map(brief, names[:NAMED])) + more


def _config(folder: Path) -> Mapping[str, Any]:
    file = folder / CONFIG
    if not file.is_file() or not (folder / WEIGHTS).exists():
        raise InputError(
            f"{folder}: want a directory with {CONFIG} and {WEIGHTS} beside --model; without it the files are scanned"
        )
    return read_adapter_config(folder)


def _shapes(file: Path, names: list[str]) -> dict[str, tuple[int, ...]]:
    from safetensors import safe_open

    opened: Any = safe_open(file, framework="numpy")
    with opened as held:
        return {name: tuple(held.get_slice(name).get_shape()) for name in names}


def _builder(model: object) -> Callable[[], PreTrainedModel]:
    """Return what builds a model on meta, without adapters: of a name or a config, or of a loaded model's class.

    Raises:
        InputError: There is no such model, or it is none of transformers'.
    """
    from transformers import PreTrainedConfig, PreTrainedModel

    from hfpatch.compat import initial
    from hfpatch.model.source import build_on_meta, load_config
    from hfpatch.model.survey import Survey
    from hfpatch.model.walk import stock_class
    from hfpatch.model.wrapping import unwrap

    if isinstance(model, (str, Path, PreTrainedConfig)):
        return partial(build_on_meta, model if isinstance(model, PreTrainedConfig) else load_config(model))
    inner = unwrap(Survey(model).root)
    if not isinstance(inner, PreTrainedModel):
        raise InputError(f"scan: model: want a transformers model, a name or a config, got {type(inner).__name__}")
    return partial(initial.without_weights, stock_class(inner) or type(inner), inner.config, inner.dtype)
