"""What the README says is what a run gave, or what the code says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import hfpatch
from hfpatch.patching import registry
from tests.conftest import load_script
from tests.test_registry import CARD

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_figures_are_those_of_the_results() -> None:
    assert load_script("benchmarks/readme.py").filled(README) == README
    assert "NaN losses stock" in README


def test_what_apply_says(gemma: Any, capsys: Any) -> None:
    gemma.set_attn_implementation("sdpa")  # what from_pretrained gives
    hfpatch.apply(gemma)
    for line in capsys.readouterr().err.splitlines():
        assert line in README


def test_every_patch_and_public_function_is_named() -> None:
    named = set(re.findall(r"^\| `([a-z0-9-]+)` \|", README, flags=re.MULTILINE))
    assert CARD <= named <= set(registry.entries())
    functions = {n for n in hfpatch.__all__ if n[0].islower() and n not in ("errors", "nn", "testing")}
    assert functions <= set(re.findall(r"\w+", README))


def test_how_many_architectures_have_their_stream_widened() -> None:
    served = registry.get("fp16-residual-overflow").proved
    assert {"gemma2", "gemma3_text"} < set(served)
    assert f"of Gemma 2 and 3 and of {len(set(served)) - 2} other architectures" in README


def test_links() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).exists(), target
