"""`hfpatch verify`: run the cases that prove the patches."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from hfpatch.cli.common import Json, broken_patch_files, quiet_transformers, show_json


def verify(
    patch: Annotated[
        str | None, typer.Argument(help="Id or glob; all patches if not given.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Run a patch's repros (symptom unpatched, cured patched) and the cases it must leave alone; exit 1 on a failure.

    JSON: `{"passed": bool, "cases": [{patch, kind, case, passed, text}]}`.
    """
    from hfpatch.patching import registry

    failed = broken_patch_files()
    ids = registry.match(patch or "*")
    quiet_transformers()
    import torch

    from hfpatch.patching.verify import CaseResult, prove_patch

    torch.set_num_threads(1)  # the cases are tiny: threads only wait for each other
    results: list[CaseResult] = []
    for patch_id in ids:
        results.extend(prove_patch(registry.get(patch_id)))
    passed = all(r.passed for r in results)
    if json:
        show_json({"passed": passed, "cases": [asdict(r) for r in results]})
    else:
        from hfpatch.report import Sheet

        rows = tuple((r.patch, r.kind, "passed" if r.passed else "failed", f"{r.case}\n{r.text}") for r in results)
        good = sum(r.passed for r in results)
        print(
            Sheet(
                f"{good} of {len(results)} cases passed",
                ("patch", "kind", "", "case, and what was seen"),
                rows,
                wide=("case, and what was seen",),
            ).to_text()
        )
    if not passed or failed:
        raise typer.Exit(2 if failed else 1)
