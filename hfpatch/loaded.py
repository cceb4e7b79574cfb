"""`hfpatch.load`: a checkpoint with the manifest beside it."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hfpatch.compat import implementation
from hfpatch.errors import InputError
from hfpatch.given import DEVICE, FLAG, PATH, optional, want
from hfpatch.model.source import REJECTIONS, load_config, model_class
from hfpatch.model.wrapping import unwrapped
from hfpatch.patching.apply import apply
from hfpatch.patching.kinds.attention_names import STOCK
from hfpatch.patching.manifest.file import Manifest, missing, read
from hfpatch.tracing.checkpoint import folder_of, load_model, reason
from hfpatch.untrusted.adapter_config import CONFIG, read_adapter_config

if TYPE_CHECKING:
    from torch import nn

    from hfpatch.patching.arguments import Names


def load(
    directory: str | PathLike[str],
    *,
    device: str | torch.device | None = None,
    trust: Names = None,
    verbose: bool = True,
) -> nn.Module:
    """Load a model and replay the manifest that `applied.save` wrote beside it.

    The class is the one that `config.architectures` names. The dtypes are those that the manifest says, and so is the
    attention implementation, if it is one that needs no other package and no kernel. The directory of a PEFT adapter
    gives a `PeftModel` around its base model. Only safetensors are read, from this machine, and no code of the
    directory is run.

    Args:
        directory: A directory, or a name on the hub whose files are in the local cache.
        device: The device of the model; None for the CPU.
        trust: Names of installed packages whose patches may be imported, if the manifest names them.
        verbose: As for `hfpatch.apply`.

    Returns:
        The patched model, in evaluation mode. `hfpatch.status(model)` shows the patches, `hfpatch.revert(model)` undoes
        them.

    Raises:
        ModelNotFoundError: There is no such model.
        InputError: There is no manifest, or a file cannot be used.
        RefusedError: The weights or the installed code are others than when the manifest was saved.
        HfpatchError: As for `hfpatch.apply(model, manifest=)`.
    """
    want("load", directory=(directory, PATH), device=(device, optional(DEVICE)), verbose=(verbose, FLAG))
    name = str(directory)
    there = Path(name).expanduser()
    adapted = (there / CONFIG).is_file()
    folder = there if adapted else folder_of(name, load_config(name))
    manifest = read(folder)
    if manifest is None:
        raise InputError(f"load: {missing(name)}; load the model with transformers and call hfpatch.apply(model)")
    base = _base(there) if adapted else name
    chosen = manifest.attention.get("")
    usable = {*implementation.taken(model_class(load_config(base)))} & {*STOCK}
    attention = chosen if chosen in usable else None
    device = None if device is None else torch.device(device)
    model: Any = load_model(base, dtype=_dtype(manifest), device=device, attention=attention)[0]
    if adapted:
        model = _with_adapter(model, folder)
    _in_their_dtypes(model, manifest)
    apply(model, manifest=folder, trust=trust, verbose=verbose)
    return model


def _dtype(manifest: Manifest) -> torch.dtype | None:
    """Return the floating-point dtype that most values had."""
    sizes: dict[torch.dtype, int] = {}
    for _, shape, dtype, _ in manifest.weights:
        found = getattr(torch, dtype, None)
        if isinstance(found, torch.dtype) and found.is_floating_point:
            sizes[found] = sizes.get(found, 0) + torch.Size(shape).numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default=None)


def _in_their_dtypes(model: nn.Module, manifest: Manifest) -> None:
    """Cast the tensors that the loader keeps in another dtype than the saved model had: norms that `.half()` cast."""
    inner = unwrapped("", model)[1]
    named = {**dict(inner.named_buffers()), **dict(inner.named_parameters())}
    for name, _, dtype, _ in manifest.weights:
        tensor, wanted = named.get(name), getattr(torch, dtype, None)
        if tensor is not None and isinstance(wanted, torch.dtype) and tensor.is_floating_point():
            tensor.data = tensor.data.to(wanted)


def _base(adapter: Path) -> str:
    """Return the name of the model that the adapter in a folder is for."""
    base = read_adapter_config(adapter).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise InputError(
            f"load: {adapter} names no base model; load that, add the adapter, then hfpatch.apply(model, manifest=dir)"
        )
    return base


def _with_adapter(model: Any, folder: Path) -> nn.Module:
    try:
        from peft import PeftModel

        return PeftModel.from_pretrained(model, str(folder)).eval()
    except REJECTIONS as error:
        raise InputError(f"load: the adapter in {folder} cannot be loaded: {reason(error)}") from error
