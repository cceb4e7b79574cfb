"""A sample of the atlas that has every kind of architecture in it, from a config, live and from a directory."""

from __future__ import annotations

import json
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING

import hfpatch
from hfpatch.atlas import atlas as module
from hfpatch.atlas.atlas import architecture_facts, architectures, read_atlas, read_row
from hfpatch.atlas.eps_audit import DESIGNED, DISPUTED, audit
from hfpatch.errors import InputError
from hfpatch.lab.tiny import tiny_model
from hfpatch.model.fault import field_at_fault
from hfpatch.model.source import REJECTIONS, load_config
from tests.conftest import Ran
from tests.sampling import first_quick

LAYERS: dict[str, set[tuple[str, str, int, str]]] = {
    "llama": {("text", "model.layers", 32, "attention")},
    "gpt2": {("text", "transformer.h", 12, "attention")},
    "bert": {("text", "bert.encoder.layer", 12, "attention")},
    "xlm": {("text", "transformer.attentions", 12, "attention")},
    "t5": {("text", "encoder.block", 6, "attention"), ("text", "decoder.block", 6, "attention")},
    "whisper": {("audio", "model.encoder.layers", 4, "attention"), ("text", "model.decoder.layers", 4, "attention")},
    "mamba": {("text", "backbone.layers", 32, "mamba")},
    "rwkv": {("text", "rwkv.blocks", 32, "rwkv")},
    "jamba": {("text", "model.layers", 32, "mamba 28, attention 4")},
    "falcon_h1": {("text", "model.layers", 32, "mamba + attention")},
    "qwen3_next": {("text", "model.layers", 48, "linear attention 36, attention 12")},
    "kimi_linear": {("text", "model.layers", 27, "linear attention 21, attention 6")},
    "minimax": {("text", "model.layers", 32, "attention 16, linear attention 16")},
    "recurrent_gemma": {("text", "model.layers", 26, "recurrent 18, attention 8")},
    "nemotron_h": {("text", "model.layers", 4, "mamba 1, feed-forward 2, attention 1")},
    "deepseek_v3": {("text", "model.layers", 61, "attention")},
    "gemma3": {
        ("vision", "model.vision_tower.encoder.layers", 12, "attention"),
        ("text", "model.language_model.layers", 26, "attention"),
    },
    "florence2": {
        ("vision", "model.vision_tower.blocks.*", 12, "attention + convolution"),
        ("text", "model.language_model.encoder.layers", 12, "attention"),
        ("text", "model.language_model.decoder.layers", 12, "attention"),
    },
    "phi4_multimodal": {
        ("text", "model.layers", 32, "attention"),
        ("vision", "model.embed_tokens_extend.image_embed.img_processor.encoder.layers", 27, "attention"),
        ("audio", "model.embed_tokens_extend.audio_embed.encoder.encoders", 24, "attention + convolution"),
    },
    "qwen3_vl": {
        ("vision", "model.visual.blocks", 27, "attention"),
        ("text", "model.language_model.layers", 32, "attention"),
    },
}
"""By hand, from the classes and their configs."""


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", first_quick(LAYERS, every=3))
def test_layers_of_every_kind(architecture: str) -> None:
    found: set[tuple[str, str, int, str]] = set()
    for one in hfpatch.inspect(CONFIG_MAPPING[architecture]()).layers:
        counts: dict[str, int] = {}
        for kind in one.kinds:
            name = " + ".join(sorted(kind.kinds.split(" + "), key=["mamba", "attention"].index)
                              if "mamba +" in kind.kinds else sorted(kind.kinds.split(" + ")))  # fmt: skip
            counts[name] = counts.get(name, 0) + len(kind.layers)
        told = ", ".join(f"{n} {c}" for n, c in counts.items()) if len(counts) > 1 else next(iter(counts))
        found.add((one.modality, one.path, one.layers, told))
    assert found == LAYERS[architecture]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "path", "count", "per_token", "router", "shared", "layers"),
    [
        ("mixtral", "model.layers.*.mlp.experts", 8, 2, "model.layers.*.mlp.gate", None, 32),
        ("qwen2_moe", "model.layers.*.mlp.experts", 60, 4, "model.layers.*.mlp.gate",
         "model.layers.*.mlp.shared_expert", 24),
        ("deepseek_v3", "model.layers.*.mlp.experts", 256, 8, "model.layers.*.mlp.gate",
         "model.layers.*.mlp.shared_experts", 58),
        ("longcat_flash", "model.layers.*.mlp.experts", 512, 12, "model.layers.*.mlp.router", None, 28),
        ("granitemoeshared", "model.layers.*.block_sparse_moe.experts", 8, 2,
         "model.layers.*.block_sparse_moe.router", None, 32),
        ("zaya", "model.layers.*.mlp.experts", 16, 1, "model.layers.*.mlp.gate", None, 40),
    ],
)  # fmt: skip
def test_experts(
    architecture: str, path: str, count: int, per_token: int, router: str, shared: str | None, layers: int
) -> None:
    (found,) = hfpatch.inspect(CONFIG_MAPPING[architecture]()).experts
    assert (found.path, found.count, found.per_token, found.layers) == (path, count, per_token, layers)
    assert (found.router, found.shared) == (router, shared)


def test_experts_in_a_list() -> None:
    found = hfpatch.inspect(CONFIG_MAPPING["switch_transformers"]()).experts
    assert {(e.form, e.count, e.layers) for e in found} == {("list of modules", 8, 3)}
    assert not hfpatch.inspect(CONFIG_MAPPING["llama"]()).experts


@pytest.mark.parametrize(
    ("architecture", "parts"),
    [
        ("llama", {}),
        ("gpt2", {"c_attn": ("query_states", "key_states", "value_states")}),
        ("phi3", {"qkv_proj": 3, "gate_up_proj": ("gate", "up_states")}),
        ("bloom", {"query_key_value": 3}),
        ("qwen3_next", {"in_proj_qkvz": ("query", "key", "value", "z"), "in_proj_ba": ("b", "a"), "gate_up_proj": 2,
                        "q_proj": ("query_states", "gate")}),
        ("deepseek_v3", {"kv_a_proj_with_mqa": 2, "kv_b_proj": ("k_nope", "value_states"), "gate_up_proj": 2}),
    ],
)  # fmt: skip
def test_fused_projections(architecture: str, parts: dict[str, Any]) -> None:
    found = {f.path.rpartition(".")[2]: f.parts for f in hfpatch.inspect(CONFIG_MAPPING[architecture]()).fused}
    wanted = {name: len(v) if isinstance(parts.get(name), int) else v for name, v in found.items()}
    assert wanted == parts


@pytest.mark.slow
def test_head_tied_to_the_embedding_of_the_decoder() -> None:
    (head,) = hfpatch.inspect(CONFIG_MAPPING["t5gemma2"]()).heads
    assert head.tied


def test_one_answer_from_config_live_and_directory(tmp_path: Path) -> None:
    for name in ("llama", "gemma3", "mixtral", "gpt2"):
        live = tiny_model(name)
        live.save_pretrained(tmp_path / name)
        answers = [architecture_facts(hfpatch.inspect(x).to_dict()) for x in (live, live.config, tmp_path / name)]
        for row in (row for answer in answers for row in answer["attention"]):
            row.pop("implementation")  # no checkpoint says which one its weights were used with
        assert answers[0] == answers[1] == answers[2], name


@pytest.mark.slow
def test_a_factor_in_a_method_or_under_a_root() -> None:
    (ctrl,) = hfpatch.inspect(CONFIG_MAPPING["ctrl"]()).embeddings
    assert (ctrl.scale, ctrl.scale_at) == (pytest.approx(1280**0.5), "model: d_model_size**0.5")
    kosmos = hfpatch.inspect(CONFIG_MAPPING["kosmos-2"]()).embeddings[0]
    assert (kosmos.scale, kosmos.scale_at) == (pytest.approx(2048**0.5), "model: embed_scale")
    (falcon,) = hfpatch.inspect(CONFIG_MAPPING["falcon"]()).embeddings
    assert falcon.scale is None


@pytest.mark.parametrize(
    ("architecture", "field"),
    [
        ("nemotron", "num_key_value_heads is None"),
        ("ministral", "head_dim is None"),
        ("chameleon", "vocabulary_map is None"),
        ("cohere_compass", "text_config.rope_parameters has no 'full_attention'"),
        ("dbrx", "attn_config.rope_theta is missing"),
        ("aya_vision", "vision_config.num_attention_heads is 14"),
        ("gemma4_assistant", "hidden_size_per_layer_input must be 0, got 256"),
    ],
)
def test_a_default_that_does_not_build_names_the_field(architecture: str, field: str) -> None:
    row = read_row(architecture, ("causal",))
    assert row.facts is None
    assert field in row.reason
    assert "\n" not in row.reason


def test_field_at_fault_changes_nothing_and_says_nothing_where_nothing_speaks() -> None:
    config = CONFIG_MAPPING["ministral"]()
    before = config.to_dict()

    def build(given: Any) -> object:
        if given.hidden_size:
            raise ValueError("no luck")
        return given

    assert field_at_fault(config, build, ValueError("no luck"), REJECTIONS) == ""
    assert config.to_dict() == before
    assert type(config) is CONFIG_MAPPING["ministral"]


def test_a_part_of_a_config_that_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "llava", "text_config": {"model_type": "no-such"}}')
    with pytest.raises(InputError, match="Unrecognized model type for subconfig: no-such"):
        load_config(tmp_path)
    file.write_text(
        '{"model_type": "llava", "vision_config": {"model_type": "siglip_vision_model", "image_size": null}}'
    )
    with pytest.raises(InputError, match=r"Field 'image_size' with value None"):
        load_config(tmp_path)


WANTED = {"llama": ("causal",), "nemotron": ("causal",), "t5": ("seq2seq",)}


@pytest.mark.thorough
def test_read_atlas_in_processes() -> None:
    seen: list[int] = []
    atlas = read_atlas(WANTED, progress=seen.append)
    assert [r.architecture for r in atlas.rows] == sorted(WANTED)
    assert sum(seen) == len(WANTED)
    rows = json.loads(json.dumps(atlas.to_dict()))["architectures"]
    assert "num_key_value_heads" in rows["nemotron"]["reason"]
    assert rows["llama"]["parameters"] == hfpatch.inspect(CONFIG_MAPPING["llama"]()).parameters
    assert "2 of 3 architectures" in str(atlas)


def test_a_process_that_dies_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that was lost with it is tried in a process of its own."""
    pools: list[list[str]] = []

    class Dies:
        def __init__(self, *_: Any, **__: Any) -> None:
            pools.append([])

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...

        def submit(self, _work: Any, architecture: str, *_: Any) -> Future[Any]:
            pools[-1].append(architecture)
            future: Future[Any] = Future()
            future.set_exception(BrokenProcessPool("a process ended"))
            return future

    monkeypatch.setattr(module, "ProcessPoolExecutor", Dies)
    atlas = read_atlas(WANTED)
    assert [sorted(asked) for asked in pools] == [sorted(WANTED), ["llama"], ["nemotron"], ["t5"]]
    assert [r.architecture for r in atlas.rows] == sorted(WANTED)
    assert all(r.facts is None and "the process that built it died" in r.reason for r in atlas.rows)


@pytest.mark.thorough
def test_inspect_all_on_the_command_line(here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "architectures", lambda: WANTED)
    ran: Ran = here("inspect", "--all", "--json")
    assert set(ran.figures["architectures"]) == set(WANTED)
    assert ran.figures["versions"]["transformers"] == transformers.__version__
    assert "--all can be combined only with --json" in here("inspect", "some-model", "--all", code=2).sentence
    assert "no model named" in here("inspect", code=2).sentence


def test_every_mapping_is_there() -> None:
    names = architectures()
    assert list(names) == sorted(names)
    assert names["bart"] == ("causal", "seq2seq")


@pytest.mark.slow
def test_eps_audit_of_known_departures() -> None:
    rows = {a: read_row(a, ()).to_dict() for a in ("glm_moe_dsa", "deepseek_v3", "llama", "mllama")}
    found = {(d.architecture, d.norm.path): d for d in audit(rows)}
    disputed = found["glm_moe_dsa", "model.layers.*.self_attn.q_a_layernorm"]
    assert (disputed.differs, disputed.verdict, disputed.norm.eps) == (True, DISPUTED, 1e-6)
    meant = found["deepseek_v3", "model.layers.*.self_attn.kv_a_layernorm"]
    assert (meant.differs, meant.verdict) == (False, DESIGNED)
    assert found["mllama", "model.vision_model.layernorm_pre"].verdict == DESIGNED
    assert not any(name == "llama" for name, _ in found)
