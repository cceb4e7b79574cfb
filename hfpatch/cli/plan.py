"""`hfpatch plan`: the effect of each patch on this model. Needs no weights."""

from __future__ import annotations

from typing import Annotated

import typer

from hfpatch.cli.common import ComputeDtype, Json, Model, TrustRemoteCode, broken_patch_files, quiet_transformers, show

Ids = list[str] | None


def plan(
    model: Model,
    only: Annotated[Ids, typer.Option(help="Consider this patch only (id or glob; may be repeated).")] = None,
    include: Annotated[Ids, typer.Option(help="Apply this opt-in patch too; 'suggested' for all.")] = None,
    exclude: Annotated[Ids, typer.Option(help="Leave this patch out.")] = None,
    trust: Annotated[
        Ids, typer.Option(help="Import and plan the patches of this installed package too; may be repeated.")
    ] = None,
    compute_dtype: ComputeDtype = None,
    json: Json = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Show what each patch would do to a model: applied, not needed, opt-in or refused, and why."""
    from hfpatch.patching import registry
    from hfpatch.patching.registering.installed import of_packages

    broken_patch_files()
    for name in [*(only or ()), *(exclude or ()), *(n for n in include or () if n != "suggested")]:
        registry.match(name)  # a wrong name is reported before torch is imported
    of_packages(trust or ())
    quiet_transformers()
    from hfpatch.model.source import build_on_meta, load_config
    from hfpatch.patching.apply import plan as decide

    built = build_on_meta(load_config(model, trust_remote_code=trust_remote_code))
    made = decide(built, only=only, include=include, exclude=exclude, compute_dtype=compute_dtype, trust=trust)
    show(made, json)
