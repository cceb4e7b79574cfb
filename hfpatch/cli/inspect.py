"""`hfpatch inspect`: facts about a model, or about every architecture. Needs no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfpatch.cli.common import (
    ComputeDtype,
    Json,
    TrustRemoteCode,
    broken_patch_files,
    manifest_beside,
    quiet_transformers,
    show,
)
from hfpatch.errors import InputError
from hfpatch.report import Shown

if TYPE_CHECKING:
    from hfpatch.inspecting.info import ModelInfo
    from hfpatch.patching.apply import Plan
    from hfpatch.patching.manifest.file import Manifest
    from hfpatch.report import Sheet


@dataclass(frozen=True, repr=False)
class Inspected(Shown):
    """Facts about a model, what would be patched in it, and the manifest beside it."""

    info: ModelInfo
    plan: Plan
    manifest: Manifest | None

    def to_dict(self) -> dict[str, Any]:
        """Return the facts, `plan` and `manifest`."""
        manifest = None if self.manifest is None else self.manifest.to_dict()
        return {**self.info.to_dict(), "plan": self.plan.to_dict(), "manifest": manifest}

    def sheet(self) -> Sheet:
        """Return the first table of the facts."""
        return self.info.sheet()

    def sheets(self) -> tuple[Sheet, ...]:
        """Return all tables of the facts, the plan, and the manifest."""
        beside = () if self.manifest is None else self.manifest.sheets()
        return (*self.info.sheets(), self.plan.sheet(), *beside)


def inspect(
    model: Annotated[
        str | None, typer.Argument(help="A hub name, a local directory, or a config.json.", show_default=False)
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every architecture of transformers, from its default config.")
    ] = False,
    compute_dtype: ComputeDtype = None,
    json: Json = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Show architecture, submodels, embedding, norms and their eps, attention, hazards, and the plan of patches.

    JSON: the keys of `ModelInfo.to_dict()`, `plan` as `hfpatch plan --json` prints it, and `manifest`: what
    `hfpatch.json` beside the weights says, or null. With `--all`:
    `{"versions": {package: version}, "architectures": {name: facts, or "reason" if its default does not build}}`.
    """
    if every:
        if model is not None or compute_dtype is not None or trust_remote_code:
            raise InputError("--all can be combined only with --json: it reads the default config of each architecture")
        _show_all(json)
        return
    if model is None:
        raise InputError("no model named: want a hub name, a directory, a config.json, or --all")
    quiet_transformers()
    broken_patch_files()
    from hfpatch.foretold import inspect as look
    from hfpatch.model.source import build_on_meta, load_config
    from hfpatch.patching.apply import plan

    built = build_on_meta(load_config(model, trust_remote_code=trust_remote_code), trust_remote_code=trust_remote_code)
    beside = manifest_beside(model)
    show(Inspected(look(built), plan(built, compute_dtype=compute_dtype), beside), json)


def _show_all(json: bool) -> None:
    from hfpatch.atlas.atlas import architectures, read_atlas
    from hfpatch.report.progress import progress

    wanted = architectures()
    with progress(f"reading {len(wanted)} architectures", len(wanted)) as advance:
        atlas = read_atlas(wanted, progress=advance)
    show(atlas, json)
