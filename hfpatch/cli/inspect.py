"""`hfpatch inspect`: what is this model. Needs no weights."""

from __future__ import annotations

from hfpatch.cli.common import (
    ComputeDtype,
    Json,
    Model,
    TrustRemoteCode,
    broken_patch_files,
    quiet_transformers,
    show_json,
)


def inspect(
    model: Model,
    compute_dtype: ComputeDtype = None,
    json: Json = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Show architecture, submodels, embedding, norms and their eps, attention, hazards, and what would be patched.

    JSON: the keys of `ModelInfo.to_dict()`, and `plan` as `hfpatch plan --json` prints it.
    """
    quiet_transformers()
    broken_patch_files()
    from hfpatch.model.inspect import inspect as look
    from hfpatch.model.source import build_on_meta, load_config
    from hfpatch.patching.plan import plan

    built = build_on_meta(load_config(model, trust_remote_code=trust_remote_code))
    info, made = look(built), plan(built, compute_dtype=compute_dtype)
    if json:
        show_json({**info.to_dict(), "plan": made.to_dict()})
    else:
        print(f"{info}\n\n{made}")
