"""`hfpatch verify`: run the cases that prove the patches, or hold a checkpoint's dtypes against float32."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hfpatch.cli.common import (
    Json,
    TrustRemoteCode,
    broken_patch_files,
    quiet_transformers,
    read_text,
    show_json,
    torch_device,
)
from hfpatch.errors import InputError, UnknownPatchError

if TYPE_CHECKING:
    from hfpatch.patching.verifying.proving import CaseResult


def verify(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[PATCH | MODEL]",
            help="Id or glob of patches; else a model: a local directory, or a hub name in the local cache. "
            "All patches if not given.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            help="With a model: file of text to run, - for stdin. A few lines are built in.", show_default=False
        ),
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="With a model: run at most this many tokens (128).")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="With a model: load it as float32, float16 or bfloat16. Else as it says.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="With a model: cpu, cuda, cuda:1. Else a GPU if there is one.")
    ] = None,
    run: Annotated[
        list[str] | None, typer.Option(help="With a model: a row that is wanted; can be repeated. Else all.")
    ] = None,
    json: Json = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Prove patches on their cases; or run a model on text, in several dtypes, against float32.

    PATCH: its repros (symptom unpatched, cured patched) and the cases it must leave alone; exit 1 on a failure. Cases
    that need a GPU are skipped where there is none.

    MODEL: loss, KL and top-1 of the checkpoint as it is and in other dtypes; exit 1 if as it is it is not finite. A
    name that a patch has is a patch.

    JSON: `{"passed": bool, "skipped": int, "cases": [{patch, kind, case, passed, text, skipped}]}`; of a model
    `{"model", "reference", "rows", "notes"}`.
    """
    failed = broken_patch_files()
    wants_model = any(option is not None for option in (text, tokens, dtype, device, run)) or trust_remote_code
    ids = _patches(name, wants_model)
    if ids is None:
        _verify_model(str(name), text, tokens or 128, dtype, device, run, json, trust_remote_code)
    elif wants_model:
        whose = f"{name} is a patch" if name else "no model is named"
        raise InputError(f"verify: --text, --tokens, --dtype, --device and --run go with a model, but {whose}")
    else:
        _verify_patches(ids, json, failed)


def _patches(name: str | None, wants_model: bool) -> list[str] | None:
    """The patches that a name means; None where it is a model's.

    Raises:
        UnknownPatchError: It is neither.
    """
    from hfpatch.patching import registry

    try:
        return registry.match(name or "*")
    except UnknownPatchError as error:
        if wants_model or "/" in str(name) or Path(str(name)).exists():
            return None
        raise UnknownPatchError(
            f"{error} (nor is there a directory of that name; for a model of the hub add --text)"
        ) from error


def _verify_patches(ids: list[str], json: bool, failed: bool) -> None:
    from hfpatch.patching import registry

    quiet_transformers()
    import torch

    from hfpatch.patching.verifying.proving import prove_patch

    torch.set_num_threads(1)  # the cases are tiny: threads only wait for each other
    results: list[CaseResult] = []
    for patch_id in ids:
        results.extend(prove_patch(registry.get(patch_id)))
    skipped = sum(r.skipped for r in results)
    passed = all(r.passed or r.skipped for r in results)
    if json:
        show_json({"passed": passed, "skipped": skipped, "cases": [asdict(r) for r in results]})
    else:
        print(_sheet(results, skipped))
    if not passed or failed:
        raise typer.Exit(2 if failed else 1)


def _sheet(results: list[CaseResult], skipped: int) -> str:
    from hfpatch.report import Sheet

    def word(result: CaseResult) -> str:
        return "skipped" if result.skipped else "passed" if result.passed else "failed"

    rows = tuple((r.patch, r.kind, word(r), f"{r.case}\n{r.text}") for r in results)
    tried = len(results) - skipped
    title = f"{sum(r.passed for r in results)} of {tried} cases passed"
    return Sheet(
        f"{title}; {skipped} skipped, no GPU" if skipped else title,
        ("patch", "kind", "", "case, and what was seen"),
        rows,
        wide=("case, and what was seen",),
    ).to_text()


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
    for missing in checkpoint.missing[:1]:
        print(
            f"hfpatch: {len(checkpoint.missing)} tensors are not in the checkpoint, so random ({missing}, ...): the "
            "figures are of such a model",
            file=sys.stderr,
        )
    batch = checkpoint.batch(words, tokens, loss=True)
    proof = verify_model(checkpoint.model, batch, runs=runs)
    if json:
        show_json({"model": name, **proof.to_dict()})
    else:
        print(proof)
    if any(r.name == "as it is" and not r.finite for r in proof.rows):
        raise typer.Exit(1)
