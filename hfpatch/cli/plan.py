"""`hfpatch plan`: the effect of each patch on this model. Needs no weights, except to measure the need on a text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfpatch.cli.common import (
    ComputeDtype,
    Json,
    Model,
    TrustRemoteCode,
    broken_patch_files,
    manifest_beside,
    quiet_transformers,
    read_text,
    show,
)
from hfpatch.errors import InputError
from hfpatch.report.sheet import say

if TYPE_CHECKING:
    from torch import nn

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
    text: Annotated[
        str | None, typer.Option(help="Load the weights and measure the need on this text file, - for stdin.")
    ] = None,
    save: Annotated[
        bool, typer.Option("--save", help="With --text: keep the measurement beside the weights, for later plans.")
    ] = False,
    tokens: Annotated[int, typer.Option(help="With --text: run at most this many tokens.")] = 128,
    json: Json = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Show what each patch would do to a model: applied, not needed, opt-in or refused, and why.

    With --text the model is run once, with float32 weights: decisions say how near float16's maximum its values come.
    With --save too, a later plan of these weights decides with what was measured.
    """
    if save and text is None:
        raise InputError("--save keeps what --text FILE measures; name a text file too")
    from hfpatch.patching import registry
    from hfpatch.patching.registering.installed import of_packages

    broken_patch_files()
    for name in [*(only or ()), *(exclude or ()), *(n for n in include or () if n != "suggested")]:
        registry.match(name)  # a wrong name is reported before torch is imported
    of_packages(trust or ())
    quiet_transformers()
    from hfpatch.patching.apply import plan as decide

    built, batch = _built(model, text, tokens, trust_remote_code=trust_remote_code)
    made = decide(
        built, only=only, include=include, exclude=exclude, compute_dtype=compute_dtype, trust=trust, batch=batch
    )
    if save:
        say([f"hfpatch: kept in {made.keep()}: later plans of these weights decide with it"])
    beside = manifest_beside(model)
    show(made, json)
    if beside is not None:
        again = ", ".join(beside.again) or "no patch"
        say([f"hfpatch: a manifest lies beside the weights; hfpatch.load(DIR) applies {again} again"])


def _built(name: str, text: str | None, tokens: int, *, trust_remote_code: bool) -> tuple[nn.Module, Any]:
    """Return the model on meta, without a batch; with a text, the model with its weights, and the text as its batch."""
    from hfpatch.model.source import build_on_meta, load_config

    if text is None:
        return build_on_meta(
            load_config(name, trust_remote_code=trust_remote_code), trust_remote_code=trust_remote_code
        ), None
    words = read_text(text, tokens)
    from hfpatch.tracing.checkpoint import load

    checkpoint = load(name, trust_remote_code=trust_remote_code)
    return checkpoint.model, checkpoint.batch(words, tokens, loss=False)
