"""docs/authoring.md: the patch on the page is run, and so is what it says about it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import hfpatch
from hfpatch import testing
from hfpatch.lab.tiny import tiny_model
from hfpatch.patching import edits, registry
from tests.fingerprint import fingerprint

PAGE = (Path(__file__).parent.parent / "docs" / "authoring.md").read_text()
PATCH, USE, BY_STRUCTURE = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The patch of the page, written to a file in the current directory."""
    (tmp_path / "logit_cap.py").write_text(PATCH)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import logit_cap  # type: ignore[import-not-found]

    yield logit_cap
    for patch_id in registry.by_hand():
        hfpatch.unregister(patch_id)
    import sys

    del sys.modules["logit_cap"]


def uncapped() -> Any:
    model = tiny_model("gemma2", final_logit_softcapping=None)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(200)
    return model


def test_its_cases_pass(module: ModuleType) -> None:
    results = testing.prove_patch(module.PATCH)
    assert [r.word for r in results] == ["passed"] * 3, results
    assert {r.patch for r in results} == {"unregistered"}
    assert "a logit is" in results[0].text


@pytest.mark.need(
    "a soft-cap in place of that",
    "refused",
    "it changes the function; a patch of your own can, by name (docs/authoring.md)",
)
@pytest.mark.need(
    "a clamp on the RMS scale, weights on the residual",
    "refused",
    "they change the function: `hfpatch.apply(model)` does neither; a patch of your own can, by name "
    "(docs/authoring.md)",
)
def test_what_the_page_says_about_it(module: ModuleType, ids: torch.Tensor, capsys: Any) -> None:
    exec(USE, {})  # noqa: S102 - the page's own lines
    out, err = capsys.readouterr()
    assert "logit-cap (registered by hand) applied (changes-function): 1 edit in the model" in " ".join(err.split())
    assert "from registered by hand, " in " ".join(out.split())
    assert registry.by_hand() == ()

    model = uncapped()
    before, stock = fingerprint(model), model(input_ids=ids).logits
    assert stock.abs().max() > 30
    hfpatch.register(module.PATCH, id="logit-cap")
    assert hfpatch.apply(model, verbose=False).edits == ()
    fix = hfpatch.apply(model, include="logit-cap", verbose=False)
    model_with_cap = uncapped()
    model_with_cap.config.final_logit_softcapping = 30.0
    assert torch.equal(model(input_ids=ids).logits, model_with_cap(input_ids=ids).logits)
    fix.revert()
    assert fingerprint(model) == before
    assert torch.equal(model(input_ids=ids).logits, stock)


def test_what_serves_a_structure_is_as_in_the_patch_that_does() -> None:
    whole = registry.get("fp16-residual-overflow").file.read_text()
    parts = re.findall(r"serves=.*|depends_on=.*|Case\(.*?\)|T5 = .*|but=.*", BY_STRUCTURE)
    assert len(parts) == 5
    assert all(part in whole for part in parts)


def test_the_page_names_every_kind_of_edit() -> None:
    functions = {name: each for name, each in vars(edits).items() if inspect.isfunction(each) and name[0] != "_"}
    kinds = [name for name, each in functions.items() if inspect.signature(each).return_annotation == "Template"]
    assert len(kinds) >= 9
    assert all(f"`{kind}(" in PAGE for kind in kinds)
