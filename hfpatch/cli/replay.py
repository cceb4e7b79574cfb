"""`hfpatch replay`: run the batch in a black box's bundle on a checkpoint, to reproduce the fault."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfpatch.cli.common import Json, TrustRemoteCode, broken_patch_files, quiet_transformers, show
from hfpatch.errors import HfpatchError, InputError
from hfpatch.untrusted.adapter_config import CONFIG, read_adapter_config

if TYPE_CHECKING:
    from torch import nn

    from hfpatch.blackbox.bundle import Bundle


def replay(
    bundle: Annotated[Path, typer.Argument(help="A bundle: runs/box/step-00001234-rank0.", show_default=False)],
    model: Annotated[
        str,
        typer.Option(
            help="The checkpoint, a directory: a model, or an adapter whose base model is available here.",
            show_default=False,
        ),
    ],
    dtype: Annotated[str | None, typer.Option(help="Load the weights in this dtype. Default: as in the run.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1. Default: a GPU if there is one.")] = None,
    unpatched: Annotated[
        bool, typer.Option("--unpatched", help="Leave out the patches that the run had applied.")
    ] = False,
    json: Json = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Run the batch of a bundle on a checkpoint, with the run's random state, autocast and loss scale.

    Exit 1 if a fault is found (the recorded one or another), 0 if not.

    The patches that were applied in the run are applied first. Nothing is written.

    JSON: `{"bundle", "model", "event", "recorded", "replayed", "reproduced", "patches", "notes", "advice"}`.
    """
    quiet_transformers()
    from hfpatch.blackbox.bundle import read_bundle
    from hfpatch.blackbox.replayed import Replayed

    held = read_bundle(bundle)
    loaded = _load(held, model, dtype, device, trust_remote_code)
    broken_patch_files()
    _check_architecture(held, loaded, model)
    patches = () if unpatched else _patched(held, loaded, model)
    notes = tuple(_differences(held, loaded, patches))
    found = held.replay(loaded)
    if found.obstacle is not None and (found.finding is None or found.finding.raised):
        raise InputError(f"{bundle} cannot be run on {model}: {found.obstacle}")
    show(Replayed(held, model, found, patches, notes, found.advice), json)
    if found.finding is not None:
        raise typer.Exit(1)


def _load(bundle: Bundle, name: str, dtype: str | None, device: str | None, trust_remote_code: bool) -> nn.Module:
    from hfpatch.blackbox.packing import DTYPES
    from hfpatch.cli.common import torch_device
    from hfpatch.tracing.checkpoint import load_model

    wanted = dtype or bundle.model["dtype"]
    if wanted is not None and (wanted not in DTYPES or not DTYPES[wanted].is_floating_point):
        raise InputError(f"--dtype {wanted!r}: want float32, float16 or bfloat16")
    base = _base(name, trust_remote_code)
    chosen = torch_device(device)
    loaded, missing, _ = load_model(
        base or name,
        dtype=DTYPES[wanted] if wanted is not None else None,
        device=chosen,
        attention=bundle.model["attention"],
        trust_remote_code=trust_remote_code,
    )
    if missing:
        raise InputError(
            f"{base or name} lacks {len(missing)} weights of the model ({missing[0]} first), which would be random; "
            "name a complete checkpoint"
        )
    if base is None:
        return loaded
    import peft
    from safetensors import SafetensorError

    from hfpatch.model.source import REJECTIONS
    from hfpatch.tracing.checkpoint import reason

    try:
        # trainable, as in the run: else there are no gradients
        return peft.PeftModel.from_pretrained(loaded, name, is_trainable=True, torch_device=str(chosen))
    except (*REJECTIONS, SafetensorError, MemoryError) as error:
        raise InputError(
            f"{name}: its adapter cannot be loaded on {base} ({reason(error)}); name the base model it was trained on"
        ) from error


def _base(name: str, trust_remote_code: bool) -> str | None:
    """Return the base model that an adapter names; None if the directory holds no adapter."""
    folder = Path(name).expanduser()
    if not (file := folder / CONFIG).is_file():
        return None
    base: Any = read_adapter_config(folder, trust_remote_code=trust_remote_code).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise InputError(f"{file} names no base model; write its directory into base_model_name_or_path")
    return base


def _check_architecture(bundle: Bundle, model: nn.Module, name: str) -> None:
    here = getattr(getattr(model, "config", None), "model_type", None)
    if bundle.model["architecture"] not in (None, here):
        raise InputError(
            f"{name} is a {here}, but the run of {bundle.path} trained a {bundle.model['architecture']}; name a "
            "checkpoint of that run"
        )


def _patched(bundle: Bundle, model: nn.Module, name: str) -> tuple[str, ...]:
    from hfpatch.patching.apply import apply

    if not bundle.patches:
        return ()
    try:
        return tuple(
            dict.fromkeys(d.patch for d in apply(model, only=list(bundle.patches), verbose=False).plan.of("applied"))
        )
    except HfpatchError as error:
        raise InputError(
            f"{bundle.path}: the patches of the run cannot be applied to {name}: {error}; --unpatched leaves them out"
        ) from error


def _differences(bundle: Bundle, model: nn.Module, patches: tuple[str, ...]) -> list[str]:
    """Return the differences to the run, as sentences."""
    from hfpatch.blackbox.account import dtype, fingerprint

    was = bundle.model
    first = next(model.parameters())
    notes = [f"In the run: {doubt}." for doubt in bundle.about["replay"]["doubts"]]
    if was["class"] != type(model).__name__:
        notes.append(f"The run trained a {was['class']}, this is a {type(model).__name__}.")
    if was["dtype"] != dtype(model):
        notes.append(f"The run's weights were {was['dtype']}, these are {dtype(model)}.")
    elif was["fingerprint"] != fingerprint(model):
        notes.append("The weights differ from those of the run at that step.")
    if was["device"] and was["device"].partition(":")[0] != first.device.type:
        notes.append(f"The run was on {was['device']}, this is on {first.device}: random numbers and rounding differ.")
    if left := [patch for patch in bundle.patches if patch not in patches]:
        notes.append(f"Not applied here, but in the run: {', '.join(left)}.")
    if patches:
        notes.append(f"Applied as in the run: {', '.join(patches)}.")
    return notes
