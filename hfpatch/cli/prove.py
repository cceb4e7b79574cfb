"""`hfpatch prove`: run a patch's repros on tiny models of architectures, and keep what came of it beside the patch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hfpatch.cli.common import Json, quiet_transformers, show
from hfpatch.errors import InputError
from hfpatch.patching.language import ANY
from hfpatch.report.sheet import say

if TYPE_CHECKING:
    from hfpatch.patching.proofs.proof import Proof


def prove(
    patch: Annotated[str, typer.Argument(help="Id of a patch that declares `serves`.", show_default=False)],
    architecture: Annotated[
        list[str] | None,
        typer.Option(help="Only this model_type; may be repeated. Default: all that can be built.", show_default=False),
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Put the proofs into the file beside the patch.")] = False,
    json: Json = False,
) -> None:
    """Run a patch's repros on tiny models of all architectures that have the structure it serves.

    --write puts them into `<defect>.proofs.json` beside the patch, in place of those of the same architectures and
    releases; those of other releases stay. A plan needs no run for what is in this file.

    JSON: `{"patch", "counts", "proofs": [{architecture, flags, bodies, torch, transformers, outcome, text, patch}]}`.
    """
    from hfpatch.patching import registry

    entry = registry.get(patch)
    if entry.patch.serves is None:
        names = "every architecture" if ANY in entry.architectures else f"only {', '.join(entry.architectures)}"
        raise InputError(f"prove {patch}: it is declared for {names}; hfpatch verify {patch} runs its cases")
    quiet_transformers()
    import torch

    from hfpatch.patching.proofs import shelf
    from hfpatch.patching.proofs.prove import candidates, prove_all
    from hfpatch.patching.proofs.results import Proofs
    from hfpatch.report.progress import progress

    torch.set_num_threads(1)  # the models are tiny: more threads would be slower
    known = candidates()
    if unknown := [name for name in architecture or () if name not in known]:
        raise InputError(f"prove {patch} --architecture {unknown[0]}: no tiny model of it can be built here")
    names = architecture or known
    with progress(f"prove {patch}", len(names)) as done:
        found: list[Proof] = []
        for name in names:
            found += prove_all(entry, [name])
            done(1)
    show(Proofs(patch, tuple(found), entry.patch.but), json)
    if write:
        path = shelf.beside(entry.file)
        shelf.write(path, shelf.merged(found, shelf.shipped(entry.file), names))
        say([f"hfpatch: {path}: {len(found)} proofs written"])
