"""The atlas in docs is what transformers is, and what inspect says of each architecture holds against other counts."""

from __future__ import annotations

import contextlib
import json
import warnings
from functools import cache
from typing import Any

import pytest
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel

from hfpatch.atlas.atlas import architecture_facts, architectures, read_row, versions
from hfpatch.inspecting.inspect import inspect
from hfpatch.model.source import build_on_meta
from tests.conftest import ROOT

pytestmark = pytest.mark.architectures

SHARDS = 16


@cache
def atlas() -> dict[str, Any]:
    return json.loads((ROOT / "docs" / "atlas.json").read_text())


@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_row_is_fresh_and_right(shard: int) -> None:
    """Exact with the transformers that the atlas was made with; against the counts here with any."""
    transformers.logging.set_verbosity(50)
    made_here = depends_on(atlas()["versions"]) == depends_on(versions())
    rows = atlas()["architectures"]
    stale: list[str] = []
    for architecture, mappings in list(architectures().items())[shard::SHARDS]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if "reason" in rows.get(architecture, {"reason": ""}):
                row = read_row(architecture, mappings).to_dict()
            else:
                model = build_on_meta(CONFIG_MAPPING[architecture]())
                facts = inspect(model).to_dict()
                agree(architecture, model, facts)
                row = {"mappings": list(mappings), **architecture_facts(facts)}
        if made_here and json.loads(json.dumps(row)) != rows.get(architecture):
            stale.append(architecture)
    assert not stale, "run python docs/atlas.py"


def depends_on(found: dict[str, str | None]) -> dict[str, str | bool | None]:
    """What rows depend on: the version of transformers, and whether the other packages are there at all."""
    return {name: version if name == "transformers" else version is not None for name, version in found.items()}


def agree(architecture: str, model: PreTrainedModel, facts: dict[str, Any]) -> None:
    """Facts against other ways to come by them."""
    modules = dict(model.named_modules())
    paths = {id(m): p for p, m in modules.items()}

    assert facts["parameters"] == sum({id(p): p.numel() for p in model.parameters()}.values()), architecture

    with contextlib.suppress(NotImplementedError):  # pp_formulanet has none
        assert paths[id(model.get_input_embeddings())] in {e["path"] for e in facts["embeddings"]}, architecture
    for found in facts["embeddings"]:
        if found["width"] is not None:
            shape = modules[found["path"]].get_parameter("weight").shape
            assert tuple(shape) == (found["vocabulary"], found["width"]), architecture

    head = model.get_output_embeddings()
    assert head is None or paths[id(head)] in {h["path"] for h in facts["heads"]}, architecture
    for found in facts["heads"]:
        weight = getattr(modules[found["path"]], "weight", None)
        tables = {id(m.weight) for m in modules.values() if isinstance(m, nn.Embedding)}
        assert found["tied"] is (id(weight) in tables), architecture

    assert sum(n["count"] for n in facts["norms"]) == sum(map(by_name_a_norm, modules.values())), architecture

    assert {(starred(p), e["count"]) for p, e in stacked(modules, facts)} == {
        (e["path"], e["count"]) for e in facts["experts"] if e["form"] == "stacked parameters"
    }, architecture

    made = {name for name, _ in model.named_buffers(remove_duplicate=False)} - set(model.state_dict())
    assert {starred(name) for name in made} == {b["path"] for b in facts["buffers"]}, architecture

    for found in facts["layers"]:
        inside = [p for p in modules if starred(p).startswith(f"{found['path']}.") and owns_index(p, found["path"])]
        assert found["layers"] == len(inside), (architecture, found["path"])
        assert sorted(i for k in found["kinds"] for i in k["layers"]) == list(range(found["layers"])), architecture
    agree_on_depth(architecture, model, facts)


def by_name_a_norm(module: nn.Module) -> bool:
    """The walk of one who knows norms by the names of their classes."""
    name = type(module).__name__.lower()
    holds = next(module.children(), None) is not None
    return "norm" in name and "batchnorm" not in name and "groupnorm" not in name and not holds


def stacked(modules: dict[str, nn.Module], facts: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Modules that hold three-dimensional parameters and are called experts, shared ones left out."""
    known = {e["path"]: e for e in facts["experts"]}
    found: list[tuple[str, dict[str, Any]]] = []
    for path, module in modules.items():
        deep = [p for p in module.parameters(recurse=False) if p.dim() == 3]
        named = "expert" in f"{path.rpartition('.')[2]} {type(module).__name__}".lower()
        if deep and named and "shared" not in path.rpartition(".")[2]:
            at = known.get(starred(path))
            counts = {int(p.shape[0]) for p in deep}
            one = next((e for e in facts["experts"] if e["path"] == starred(path) and e["count"] in counts), None)
            found.append((path, one or at or {"count": min(counts)}))
    return found


def agree_on_depth(architecture: str, model: PreTrainedModel, facts: dict[str, Any]) -> None:
    """A list of layers of what the config names a text, vision or audio part has that part's depth and modality."""
    for key, modality in (("text_config", "text"), ("vision_config", "vision"), ("audio_config", "audio")):
        part = getattr(model.config, key, None)
        homes = [p for p, m in model.named_modules() if isinstance(m, PreTrainedModel) and m.config is part and p]
        own = [f for f in facts["layers"] if any(f["path"].startswith(f"{home}.") for home in homes)]
        if part is None or not own or part is model.config:
            continue
        assert modality in {f["modality"] for f in own}, (architecture, key)
        depth = getattr(part, "num_hidden_layers", None)
        if isinstance(depth, int) and modality == "text" and not getattr(part, "is_encoder_decoder", False):
            assert depth in {f["layers"] for f in own}, (architecture, key)


def starred(path: str) -> str:
    return ".".join("*" if name.isdigit() else name for name in path.split("."))


def owns_index(path: str, layers: str) -> bool:
    """Whether a path is that of a layer itself, one index below the list."""
    return path.count(".") == layers.count(".") + 1


def test_pages_are_made_from_the_atlas() -> None:
    from tests.conftest import load_script

    page = load_script("docs/atlas.py")
    assert (ROOT / "docs" / "atlas.md").read_text() == page.atlas_page(atlas())
    assert (ROOT / "docs" / "eps.md").read_text() == page.eps_page(atlas())
    assert set(atlas()["architectures"]) == set(architectures()) or (
        atlas()["versions"]["transformers"] != transformers.__version__
    )
