"""`hfpatch verify`: run the cases that prove the patches, or compare a checkpoint in several dtypes with float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from hfpatch.cli.common import (
    Json,
    TrustRemoteCode,
    broken_patch_files,
    quiet_transformers,
    read_text,
    say_missing,
    show,
    torch_device,
)
from hfpatch.errors import InputError, UnknownPatchError


def verify(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[PATCH | MODEL]",
            help="Id or glob of patches, or a patch file; or a model: a local directory, or a hub name in the local "
            "cache. Default: all patches.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(help="With a model: text file to run, - for stdin. Default: a built-in text.", show_default=False),
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="With a model: run at most this many tokens (128).")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="With a model: load it as float32, float16 or bfloat16. Default: its own.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="With a model: cpu, cuda, cuda:1. Default: a GPU if there is one.")
    ] = None,
    run: Annotated[
        list[str] | None, typer.Option(help="With a model: run this row only; may be repeated. Default: all rows.")
    ] = None,
    json: Json = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Prove patches on their cases; or run a model on text, in several dtypes, and compare with float32.

    PATCH: runs its repros (the symptom shows unpatched and not patched) and the cases it must leave alone; exit 1 on a
    failure. Cases that need a GPU are skipped if there is none.

    MODEL: loss, KL and top-1 of the checkpoint as it is and in other dtypes; exit 1 if it is not finite as it is. A
    name that is both a patch and a model means the patch.

    JSON: `{"passed": bool, "skipped": int, "cases": [{patch, kind, case, passed, text, skipped}]}`; for a model
    `{"model", "reference", "rows", "notes"}`.
    """
    failed = broken_patch_files()
    wants_model = any(option is not None for option in (text, tokens, dtype, device, run)) or trust_remote_code
    ids = _patches(name, wants_model)
    if ids is None:
        _verify_model(str(name), text, tokens or 128, dtype, device, run, json, trust_remote_code)
    elif wants_model:
        whose = f"{name} is a patch" if name else "no model is named"
        raise InputError(f"verify: --text, --tokens, --dtype, --device and --run need a model, but {whose}")
    else:
        _verify_patches(ids, json, failed)


def _patches(name: str | None, wants_model: bool) -> list[str] | None:
    """Return the ids of the patches that a name stands for; None if it is a model. A patch file is registered.

    Raises:
        UnknownPatchError: It is neither a patch nor a model.
        InputError: There is no such patch file, or its id is in use.
        PatchFileError: The patch file does not load.
    """
    from hfpatch.patching import registry
    from hfpatch.patching.registering.register import register

    if name is not None and name.endswith(".py"):
        return [register(name)]
    try:
        return registry.match(name) if name else sorted(registry.entries())
    except UnknownPatchError as error:
        if wants_model or "/" in str(name) or Path(str(name)).exists():
            return None
        raise UnknownPatchError(
            f"{error} (nor is there a directory of that name; for a model of the hub add --text)"
        ) from error


def _verify_patches(ids: list[str], json: bool, failed: bool) -> None:
    from hfpatch.patching import registry

    entries = [registry.get(patch_id) for patch_id in ids]
    quiet_transformers()
    import torch

    from hfpatch.patching.verifying.proving import CaseResults, prove_patch

    torch.set_num_threads(1)  # the cases are tiny: more threads would be slower
    results = CaseResults(result for entry in entries for result in prove_patch(entry))
    show(results, json)
    if not results.passed or failed:
        raise typer.Exit(2 if failed else 1)


def _verify_model(
    name: str,
    text: str | None,
    tokens: int,
    dtype: str | None,
    device: str | None,
    runs: list[str] | None,
    json: bool,
    trust_remote_code: bool,
) -> None:
    if tokens < 2:
        raise InputError(f"--tokens {tokens}: want at least 2, a loss needs two")
    words = read_text(text, tokens)
    quiet_transformers()
    from hfpatch.patching.arguments import as_dtype
    from hfpatch.patching.verifying.verify import verify as verify_model
    from hfpatch.tracing.checkpoint import load

    checkpoint = load(name, dtype=as_dtype(dtype), device=torch_device(device), trust_remote_code=trust_remote_code)
    say_missing(checkpoint.missing)
    batch = checkpoint.batch(words, tokens, loss=True)
    proof = verify_model(checkpoint.model, batch, runs=runs)
    show(replace(proof, model=name), json)
    if any(r.name == "as it is" and not r.finite for r in proof.rows):
        raise typer.Exit(1)
