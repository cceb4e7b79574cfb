"""Cases 08, 09, 10: which modules LoRA should reach, and that PEFT adapts exactly those."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from hfpatch.errors import InputError
from hfpatch.lab.tiny import SpeechLLM, tiny_model
from hfpatch.lora.config import lora_config
from hfpatch.lora.linear import features
from hfpatch.lora.matrices import Reading
from hfpatch.lora.names import pattern
from hfpatch.lora.places import frame_of, places
from hfpatch.lora.targets import lora_targets

QKVO = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
GATED = (*QKVO, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
SHARED = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj")
MLA = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")

MEANT: dict[str, tuple[str, tuple[str, ...]]] = {
    "llama": ("model.layers", GATED),
    "mistral": ("model.layers", GATED),
    "qwen2": ("model.layers", GATED),
    "qwen3": ("model.layers", GATED),
    "gemma2": ("model.layers", GATED),
    "gemma3_text": ("model.layers", GATED),
    "phi3": ("model.layers", ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")),
    "gpt2": ("transformer.h", ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
    "gpt_neox": (
        "gpt_neox.layers",
        ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    ),
    "bloom": (
        "transformer.h",
        ("self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    ),
    "falcon": (
        "transformer.h",
        ("self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    ),
    "mixtral": ("model.layers", QKVO),
    "gpt_oss": ("model.layers", QKVO),
    "qwen3_moe": ("model.layers", QKVO),
    "qwen2_moe": ("model.layers", (*QKVO, *SHARED)),
    "mamba": ("backbone.layers", ("mixer.in_proj",)),
}
"""For each family its list of blocks, and the linear maps of a block that are meant, written down by hand."""


def meant(name: str, layers: int = 4) -> set[str]:
    blocks, maps = MEANT[name]
    return {f"{blocks}.{i}.{leaf}" for i in range(layers) for leaf in maps}


def adapted(model: nn.Module) -> set[str]:
    """What PEFT adapted: paths of modules, and of parameters of modules, by their names before injection."""
    found: set[str] = set()
    for path, place in places(frame_of(model)).items():
        layer: Any = place.wrapper
        while hasattr(layer, "lora_A"):
            found.add(f"{path}.{layer.parameter_name}" if type(layer).__name__ == "ParamWrapper" else path)
            layer = layer.base_layer
    return found


def injected(model: nn.Module, **words: Any) -> nn.Module:
    return get_peft_model(copy.deepcopy(model), LoraConfig(r=2, **words))


def expected(targets: Any) -> set[str]:
    """Of a `LoraTargets`, in the terms of `adapted`."""
    through = set(targets.through_parameters)
    return {f"{p}.weight" if p in through else p for p in targets.modules} | set(targets.parameters)


@pytest.mark.need(
    "LoRA on q, k, v, o -> plus gate, up, down",
    "one call",
    "`hfpatch.lora_config(model)`: all linear maps of the blocks, fused ones too; routed experts by "
    "`hfpatch.lora_config(model, experts=True)`",
)
@pytest.mark.parametrize("name", MEANT)
def test_exactly_the_linear_maps_of_the_blocks(name: str) -> None:
    """Named once, injected by PEFT, listed: as sets of paths, nothing is missing and nothing is extra."""
    model = tiny_model(name)
    targets = lora_targets(model)
    assert set(targets.modules) == meant(name)
    peft_model = injected(model, **targets.kwargs())
    assert adapted(peft_model) == expected(targets)
    assert targets.coverage.layers == targets.coverage.of_layers == 4
    again = lora_targets(peft_model)
    assert (again.modules, again.target_modules, again.coverage) == (
        targets.modules,
        targets.target_modules,
        targets.coverage,
    )


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "qwen2_moe", "llama4_text", "granitemoe"])
def test_routed_experts_are_parameters_and_only_when_asked(name: str) -> None:
    model = tiny_model(name)
    stacks = {n for n, p in model.named_parameters() if p.dim() == 3}
    assert len(stacks) == 8
    targets = lora_targets(model, experts=True)
    assert set(targets.parameters) == stacks
    assert adapted(injected(model, **targets.kwargs())) == expected(targets)
    assert not lora_targets(model).parameters
    assert {out.reason for out in lora_targets(model).left_out} == {
        "routed experts; add them with experts=True",
        "a router; add it with router=True",
    }


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "qwen2_moe"])
def test_routers_only_when_asked(name: str) -> None:
    model = tiny_model(name)
    targets = lora_targets(model, router=True)
    extra = expected(targets) - expected(lora_targets(model))
    leaves = {path.rpartition("layers.")[2].partition(".")[2] for path in extra}
    want = {"mlp.router.weight"} if name == "gpt_oss" else {"mlp.gate.weight"}
    assert leaves == want | ({"mlp.shared_expert_gate"} if name == "qwen2_moe" else set())
    assert adapted(injected(model, **targets.kwargs())) == expected(targets)


def qwen_vl() -> PreTrainedModel:
    text = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 4, "out_hidden_size": 32,
        "patch_size": 4, "fullatt_block_indexes": [1],
    }  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision)).eval()


def vlm(name: str) -> PreTrainedModel:
    return qwen_vl() if name == "qwen2_5_vl" else tiny_model(name)


TOWER = {"llava": "model.vision_tower.encoder.layers", "gemma3": "model.vision_tower.encoder.layers"}
PROJECTOR = {
    "llava": {"model.multi_modal_projector.linear_1", "model.multi_modal_projector.linear_2"},
    "qwen2_5_vl": {"model.visual.merger.mlp.0", "model.visual.merger.mlp.2"},
}


@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2_5_vl"])
def test_a_scope_is_reached_alone(name: str) -> None:
    model = vlm(name)
    linear = {p for p, m in model.named_modules() if isinstance(m, nn.Linear)}
    tower = TOWER.get(name, "model.visual.blocks")
    want = {
        "language": {p for p in linear if p.startswith("model.language_model.layers.")},
        "vision": {p for p in linear if p.startswith(f"{tower}.")},
    }
    if getattr(model.config, "vision_feature_layer", None) == -2:  # of two layers the last is never used
        want["vision"] = {p for p in want["vision"] if ".layers.1." not in p}
    if name in PROJECTOR:
        want["projector"] = PROJECTOR[name]
    want["all"] = set[str]().union(*want.values())
    for scope, paths in want.items():
        targets = lora_targets(model, scope)
        assert set(targets.modules) == paths, scope
        peft_model = injected(model, **targets.kwargs())
        assert adapted(peft_model) == paths, scope
        assert lora_targets(peft_model, scope).target_modules == targets.target_modules


def test_gemma3s_projector_is_a_parameter_and_said_so() -> None:
    with pytest.raises(
        InputError, match="scope='projector': Gemma3ForConditionalGeneration has no linear map of that scope"
    ):
        lora_targets(tiny_model("gemma3"), "projector")
    left = lora_targets(tiny_model("gemma3"), "all").left_out
    beside = [out for out in left if "a scope adapts blocks and projectors" in out.reason]
    assert [out.path for out in left if out not in beside] == ["model.multi_modal_projector.mm_input_projection_weight"]
    assert "lm_head" in {out.path for out in beside}


def test_a_hand_written_speech_model() -> None:
    model = SpeechLLM(tiny_model("llama"))
    assert {p.removeprefix("llm.") for p in lora_targets(model).modules} == meant("llama")
    assert lora_targets(model, "projector").modules == ("speech_proj",)
    assert str(lora_targets(model, "projector").coverage) == "outside all blocks"


def test_several_language_models_want_a_name() -> None:
    model = nn.ModuleDict({"a": tiny_model("llama"), "b": tiny_model("gpt2")})
    with pytest.raises(InputError, match="several token embeddings"):
        lora_targets(model)
    targets = lora_targets(model, submodel="b")
    assert {p.removeprefix("b.") for p in targets.modules} == meant("gpt2")
    assert adapted(injected(model, **targets.kwargs())) == set(targets.modules)


@pytest.mark.parametrize(("name", "scope"), [("llama", "vision"), ("llama", "elsewhere"), ("llama", "projector")])
def test_a_scope_there_is_not(name: str, scope: str) -> None:
    with pytest.raises(InputError, match=rf"scope='{scope}': "):
        lora_targets(tiny_model(name), scope)


def test_maps_that_an_adapter_would_not_work_on_are_left_out_with_the_reason() -> None:
    reasons = {out.path: out.reason for out in lora_targets(tiny_model("mamba")).left_out}
    assert set(reasons) == {f"backbone.layers.*.mixer.{n}" for n in ("x_proj", "dt_proj", "out_proj")}
    assert all("would bypass an adapter" in reason for reason in reasons.values())


class GroupedLinear(nn.Linear):
    """Multiplies each group of rows by its own weights, so its output has another shape than its weight says."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input).unflatten(-1, (2, -1)).sum(-2)


class QuantLinear(nn.Module):
    """A quantised layer of a package that PEFT does not know."""

    in_features = out_features = 32

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.zeros(32, 4, dtype=torch.int32))


class Held(nn.Module):
    """A linear map behind a wrapper, as clipped linears are."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_odd_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupedLinear, "__module__", "transformers.models.odd")
    model: Any = tiny_model("llama")
    attention = model.model.layers[0].self_attn
    attention.q_proj = GroupedLinear(32, 32)
    attention.k_proj = QuantLinear()
    attention.v_proj = Held(attention.v_proj)
    state = torch.get_rng_state()
    targets = lora_targets(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert {out.path: out.reason for out in targets.left_out} == {
        "model.layers.*.self_attn.q_proj": "the forward of GroupedLinear is not that of one linear map",
        "model.layers.*.self_attn.k_proj": "the installed PEFT has no layer for QuantLinear",
    }
    at = "model.layers.0.self_attn"
    assert set(targets.modules) == meant("llama") - {f"{at}.{n}_proj" for n in "qkv"} | {f"{at}.v_proj.linear"}
    assert adapted(injected(model, **targets.kwargs())) == set(targets.modules)


def test_legacy_lists_of_experts() -> None:
    model: Any = tiny_model("mixtral")
    for layer in model.model.layers:
        layer.mlp.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 32)) for _ in range(4))
    assert set(lora_targets(model).modules) == meant("mixtral")
    targets = lora_targets(model, experts=True)
    assert len(targets.modules) == len(meant("mixtral")) + 4 * 4 * 2
    assert adapted(injected(model, **targets.kwargs())) == set(targets.modules)


DENSE = {f"model.layers.0.mlp.{n}_proj" for n in ("gate", "up", "down")}


def reads_as_experts() -> bool:
    """Whether this PEFT turns gate_proj and its like into expert parameters (0.18 does not)."""
    model = tiny_model("qwen3_moe", mlp_only_layers=[0])
    return not adapted(injected(model, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])) & DENSE


def test_names_that_peft_reads_as_experts_go_through_the_parameter() -> None:
    """The dense layer of a Qwen3-MoE: PEFT turns gate_proj into expert parameters, so the names would miss it."""
    model = tiny_model("qwen3_moe", mlp_only_layers=[0])
    targets = lora_targets(model)
    assert set(targets.through_parameters) == (DENSE if reads_as_experts() else set())
    assert set(targets.modules) == meant("qwen3_moe") | DENSE
    assert adapted(injected(model, **targets.kwargs())) == expected(targets)


def test_what_goes_through_a_parameter_is_lora_and_survives_a_reload(tmp_path: Any) -> None:
    model = tiny_model("qwen3_moe", mlp_only_layers=[0])
    peft_model: Any = get_peft_model(copy.deepcopy(model), lora_config(model, r=4, scale=0.5, verbose=False)).eval()
    torch.manual_seed(0)
    for name, parameter in peft_model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    layer = peft_model.base_model.model.model.layers[0].mlp.gate_proj
    x = torch.randn(3, 32)
    weight, a, b = (m.weight.double() for m in (layer.base_layer, layer.lora_A["default"], layer.lora_B["default"]))
    torch.testing.assert_close(layer(x).double(), x.double() @ (weight + 0.5 * b @ a).T, rtol=1e-5, atol=1e-6)
    ids = torch.arange(12)[None]
    peft_model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, peft_model(input_ids=ids).logits)


def test_coverage_counts_weights_of_the_blocks() -> None:
    model = tiny_model("qwen2_moe")
    linear = {p: m for p, m in model.named_modules() if isinstance(m, nn.Linear) and p != "lm_head"}
    gates = sum(p.numel() for n, p in model.named_parameters() if n.endswith("mlp.gate.weight"))
    stacks = sum(p.numel() for p in model.parameters() if p.dim() == 3)
    total = sum(m.weight.numel() for m in linear.values()) + gates + stacks
    reached = sum(m.weight.numel() for p, m in linear.items() if not p.endswith("shared_expert_gate"))
    coverage = lora_targets(model).coverage
    assert (coverage.weights, coverage.of_weights, coverage.of_experts) == (reached, total, stacks)
    assert coverage.percent == pytest.approx(100 * reached / total)
    assert "routed experts are" in str(coverage)


def test_it_prints_and_dumps() -> None:
    targets = lora_targets(tiny_model("mixtral"))
    text = str(targets)
    assert "LoRA targets of MixtralForCausalLM, scope language" in text
    assert "target_modules=['q_proj', 'k_proj', 'v_proj', 'o_proj']" in text
    assert targets.to_dict()["coverage"]["percent"] == targets.coverage.percent


def test_compiled_and_read_on_meta() -> None:
    model = tiny_model("llama")
    assert set(lora_targets(torch.compile(model, backend="eager")).modules) == meant("llama")
    assert set(lora_targets(tiny_model("llama").to("meta")).modules) == meant("llama")


@pytest.mark.parametrize(
    ("wanted", "keys", "want"),
    [
        (["a.0.x", "a.1.x"], ["a.0.x", "a.1.x", "b.0.x"], r"a\.\d+\.x"),
        (["a.0.x"], ["a.0.x", "a.1.x"], r"a\.(?:0)\.x"),
        (["a.0.x", "a.1.x", "a.0.y", "a.1.y"], ["a.0.x", "a.0.y", "a.1.x", "a.1.y"], r"a\.\d+\.(?:x|y)"),
        (["head", "a.0"], ["head", "a.0", "a.1"], r"(?:head|a\.(?:0))"),
    ],
)
def test_pattern(wanted: list[str], keys: list[str], want: str) -> None:
    import re

    assert pattern(wanted, keys) == want
    assert {key for key in keys if re.fullmatch(want, key)} == set(wanted)


@pytest.mark.parametrize(
    ("words", "alpha", "scale"),
    [
        ({"r": 16}, 16, 1.0),
        ({}, 16, 1.0),
        ({"r": 8, "scale": 2}, 16, 2.0),
        ({"r": 16, "use_rslora": True}, 4, 1.0),
        ({"r": 8, "use_rslora": True, "scale": 2}, 2 * math.sqrt(8), 2.0),
        ({"r": 4, "lora_alpha": 32}, 32, 8.0),
    ],
)
def test_alpha_is_chosen_as_a_scale(
    words: dict[str, Any], alpha: float, scale: float, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model("llama")
    config = lora_config(model, **words)
    assert config.lora_alpha == pytest.approx(alpha)
    said = capsys.readouterr().err
    assert "LoRA on 28 matrices of LlamaForCausalLM: 100% of block weights, 4 of 4 layers" in said
    assert f"= {scale:g};" in said
    layer: Any = get_peft_model(model, config).base_model.model.model.layers[0].self_attn.q_proj
    assert layer.scaling["default"] == pytest.approx(scale)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"target_modules": ["q_proj"]}, r"target_modules= is chosen from the model here; .* base=LoraConfig"),
        ({"dropout": 0.1}, "dropout=: the LoraConfig of the installed PEFT has no such field"),
        ({"r": "16"}, "r='16': want a positive integer"),
        ({"r": 1.5}, "r=1.5: want a positive integer"),
        ({"r": True}, "r=True: want a positive integer"),
        ({"scale": "1"}, "scale='1': want a positive number"),
        ({"lora_alpha": None}, "lora_alpha=None: want a number"),
        ({"layers_pattern": "layers"}, "LoraConfig rejects these fields: When `layers_pattern`"),
        ({"task_type": "X"}, "LoraConfig rejects these fields: Invalid task type: 'X'"),
        ({"layers_to_transform": "0"}, "layers_to_transform='0': want the index of a layer"),
        ({"layers_to_transform": [9]}, r"layers_to_transform=\[9\]: PEFT would adapt none of the 28"),
        ({"base": {"r": 8}}, r"base=\{'r': 8\}: want a peft.LoraConfig"),
        (
            {"base": LoraConfig(target_modules=["q_proj"]), "experts": True},
            "experts=True cannot be combined with base=",
        ),
        (
            {"base": LoraConfig(target_modules=["q_proj"]), "scope": "vision"},
            "scope='vision' cannot be combined with base=",
        ),
        ({"r": 0}, "r=0: want a positive integer"),
        ({"scale": -1.0}, "scale=-1.0: want a positive number"),
        ({"scale": 1, "lora_alpha": 3}, "set the same factor"),
        ({"r": 4, "base": LoraConfig(target_modules=["q_proj"])}, "base= is expanded as it is"),
        (
            {"base": LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa")},
            "base=: .*init_lora_weights='pissa'",
        ),
    ],
)
def test_bad_arguments_are_one_sentence(words: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        lora_config(tiny_model("llama"), verbose=False, **words)


def test_dropout_does_not_go_with_parameters() -> None:
    with pytest.raises(InputError, match=r"lora_dropout=0.1 cannot be combined with target_parameters="):
        lora_config(tiny_model("mixtral"), experts=True, lora_dropout=0.1, verbose=False)
    assert lora_config(tiny_model("mixtral"), lora_dropout=0.1, verbose=False).lora_dropout == 0.1


@pytest.mark.parametrize("init", ["pissa", "olora", "orthogonal"])
def test_inits_from_a_weight_do_not_go_with_experts(init: str) -> None:
    with pytest.raises(InputError, match=f"init_lora_weights='{init}' needs the weight of a linear map"):
        lora_config(tiny_model("mixtral"), experts=True, init_lora_weights=init, verbose=False)
    assert lora_config(tiny_model("mixtral"), init_lora_weights=init, verbose=False).init_lora_weights == init


def test_layers_do_not_go_with_parameters() -> None:
    with pytest.raises(InputError, match=r"layers_to_transform=\[0\] cannot be combined with target_parameters"):
        lora_config(tiny_model("mixtral"), experts=True, layers_to_transform=[0], verbose=False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"layers_to_transform": [0]}, "LoRA on 7 matrices of LlamaForCausalLM: 25.0% of block weights, 1 of 4 layers"),
        ({"modules_to_save": ["self_attn"]}, "LoRA on 12 matrices of LlamaForCausalLM"),
    ],
)
def test_what_is_said_is_what_the_final_config_reaches(
    words: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model("llama")
    config = lora_config(model, **words)
    assert said in capsys.readouterr().err
    reached = {p for p in adapted(get_peft_model(model, config)) if p in meant("llama")}
    assert f"LoRA on {len(reached)} matrices" in said


def test_layers_by_index_where_the_targets_are_an_expression() -> None:
    model = tiny_model("gemma3")
    config = lora_config(model, layers_to_transform=[0, 2], verbose=False)
    want = {p for p in lora_targets(model).modules if p.split(".")[3] in {"0", "2"}}
    assert len(want) == 14
    assert adapted(get_peft_model(copy.deepcopy(model), config)) == want


@pytest.mark.parametrize(
    ("cls", "task", "head"),
    [
        (LlamaForSequenceClassification, "SEQ_CLS", "score"),
        (LlamaForTokenClassification, "TOKEN_CLS", "score"),
        (LlamaForQuestionAnswering, "QUESTION_ANS", "qa_outputs"),
    ],
)
def test_the_head_of_a_classifier_trains(cls: Any, task: str, head: str) -> None:
    model = cls(tiny_model("llama").config)
    config = lora_config(model, verbose=False)
    assert config.task_type == task
    trains = {n for n, p in get_peft_model(model, config).named_parameters() if p.requires_grad and "lora_" not in n}
    assert any(head in name and name.endswith("weight") for name in trains)


def test_heads_are_no_projector() -> None:
    targets = lora_targets(tiny_model("janus"), "projector")
    assert {p.split(".")[1] for p in targets.modules} == {"aligner"}
    assert {out.path.split(".")[1] for out in targets.left_out} == {"generation_aligner"}


def test_falcon_has_a_tiny_model() -> None:
    assert set(lora_targets(tiny_model("falcon")).modules) == meant("falcon")


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "qwen3_moe", "phi3"])
def test_a_config_works_as_it_is(name: str) -> None:
    model = tiny_model(name)
    peft_model = get_peft_model(copy.deepcopy(model), lora_config(model, verbose=False))
    assert adapted(peft_model) == meant(name)
    assert peft_model.peft_config["default"].task_type == "CAUSAL_LM"
    out = peft_model.eval()(input_ids=torch.arange(12)[None]).logits
    with torch.no_grad():
        torch.testing.assert_close(out, model(input_ids=torch.arange(12)[None]).logits)


FULL = meant("llama")


@pytest.mark.parametrize(
    ("base", "want"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, FULL),
        ({"target_modules": r".*\.q_proj"}, FULL),
        ({"target_modules": "all-linear"}, FULL),
        ({}, FULL),
        (
            {"target_modules": ["q_proj"], "layers_to_transform": [1, 2]},
            {p for p in FULL if p.split(".")[2] in {"1", "2"}},
        ),
        (
            {"target_modules": r"model\.layers\.[01]\.self_attn\.q_proj"},
            {p for p in FULL if p.split(".")[2] in {"0", "1"}},
        ),
        ({"target_modules": ["model.layers.3.self_attn.q_proj"]}, {p for p in FULL if p.split(".")[2] == "3"}),
        (
            {"target_modules": ["q_proj"], "exclude_modules": ["down_proj"], "modules_to_save": ["up_proj"]},
            {p for p in FULL if not p.endswith(("down_proj", "up_proj"))},
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_config_of_ones_own_is_expanded_before_injection(base: dict[str, Any], want: set[str]) -> None:
    model, mine = tiny_model("llama"), LoraConfig(r=3, lora_alpha=5, **base)
    before = copy.deepcopy(mine)
    config = lora_config(model, base=mine, verbose=False)
    assert mine == before
    assert (config.r, config.lora_alpha) == (3, 5)
    assert adapted(get_peft_model(copy.deepcopy(model), config)) == want


EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.mark.parametrize(
    "words", [{"target_modules": [], "target_parameters": EXPERTS}, {"target_parameters": EXPERTS}]
)
def test_a_config_of_the_experts_alone_is_expanded_in_their_blocks(
    words: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model("qwen3_moe")
    config = lora_config(model, base=LoraConfig(r=2, **words))
    stacks = {n for n, p in model.named_parameters() if p.dim() == 3}
    assert adapted(get_peft_model(copy.deepcopy(model), config)) == meant("qwen3_moe") | stacks
    assert "with 16 more modules: 99" in capsys.readouterr().err  # all but the routers


def test_an_expression_for_one_kind_of_layer_does_not_pick_layers() -> None:
    """Every second layer has no such map: that is the model's doing, not the expression's."""
    model: Any = tiny_model("llama")
    for layer in list(model.model.layers)[::2]:
        layer.self_attn.other = layer.self_attn.q_proj
        del layer.self_attn.q_proj
    base = LoraConfig(r=2, target_modules=r".*\.q_proj")
    config = lora_config(model, base=base, verbose=False)
    got = adapted(get_peft_model(model, config))
    assert got == {p.replace("q_proj", "other") if int(p.split(".")[2]) % 2 == 0 else p for p in FULL}


def test_llama_names_on_a_fused_model_are_expanded() -> None:
    """Case 08: the seven names match o_proj and down_proj alone."""
    model, names = tiny_model("phi3"), [path.rpartition(".")[2] for path in GATED]
    assert len(adapted(injected(model, target_modules=names))) == 8
    config = lora_config(model, base=LoraConfig(r=2, target_modules=names), verbose=False)
    assert adapted(get_peft_model(copy.deepcopy(model), config)) == meant("phi3")


def test_a_config_for_the_language_model_alone_stays_there() -> None:
    model = tiny_model("gemma3")
    base = LoraConfig(r=2, target_modules=r".*language_model.*\.q_proj")
    got = adapted(get_peft_model(copy.deepcopy(model), lora_config(model, base=base, verbose=False)))
    assert got == set(lora_targets(model).modules)


def test_blocks_are_those_of_the_stack() -> None:
    for name in ("llama", "gpt2", "mixtral", "mamba"):
        reading = Reading(tiny_model(name))
        assert reading.blocks[""] == tuple(path for path, _ in reading.survey.stacks[""][-1].layers)


def leaves(paths: Any) -> set[str]:
    """Ends of paths behind the block's index."""
    return {re.sub(r"^.*?\.\d+\.", "", path, count=1) for path in paths}


@pytest.mark.parametrize(
    ("name", "task", "words"),
    [
        ("zaya", None, "gate"),  # a router of several layers, with an output more than there are experts
        ("nllb-moe", "seq2seq", "router|experts"),  # experts by name in a dict, a dropout among them
        ("switch_transformers", "seq2seq", "router|experts"),
        ("longcat_flash", None, "router|experts"),
        ("gemma3n_text", None, "router|altup"),  # AltUp's router; its other maps are read past an adapter
        ("deepseek_v32", None, "indexer"),  # picks positions: no gradient
    ],
)
def test_what_chooses_is_no_target(name: str, task: str | None, words: str) -> None:
    model = tiny_model(name, task=task)
    targets = lora_targets(model)
    assert re.search(words, " ".join(out.path for out in targets.left_out))
    assert not re.search(rf"(^|[._])({words})[._\d]", " ".join(f"{leaf}." for leaf in leaves(targets.modules)))
    assert adapted(injected(model, **targets.kwargs())) == expected(targets)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "task", "stacks"),
    [
        ("t5gemma", "seq2seq", {"model.encoder.layers", "model.decoder.layers"}),
        ("t5gemma2", "multimodal", {"model.encoder.text_model.layers", "model.decoder.layers"}),
        (
            "blt",
            None,
            {
                "model.local_encoder.layers",
                "model.global_transformer.layers",
                "model.local_decoder.layers",
                "model.local_encoder.cross_attn_layers",
                "model.local_decoder.cross_attn_layers",
            },
        ),
        ("xlm", None, {"transformer.attentions", "transformer.ffns"}),
        ("idefics", "multimodal", {"model.layers", "model.gated_cross_attn_layers"}),
        ("instructblip", "multimodal", {"language_model.model.decoder.layers"}),
        ("diffusion_gemma", "multimodal", {"model.encoder.language_model.layers", "model.decoder.layers"}),
    ],
)
def test_the_stacks_of_a_language_model(name: str, task: str | None, stacks: set[str]) -> None:
    model = tiny_model(name, task=task)
    targets = lora_targets(model)
    assert {re.sub(r"\.\d+\..*$", "", path, count=1) for path in targets.modules} == stacks
    assert targets.coverage.layers == targets.coverage.of_layers
    assert adapted(injected(model, **targets.kwargs())) == expected(targets)


def test_the_layers_of_xlm_are_counted_once() -> None:
    model: Any = tiny_model("xlm")
    assert lora_targets(model).coverage.of_layers == len(model.transformer.attentions)


def test_shared_experts_in_a_stack_are_targets() -> None:
    targets = lora_targets(tiny_model("inkling_text"))
    assert leaves(targets.parameters) == {f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")}
    assert {"mlp.experts.gate_up_proj"} <= leaves(lora_targets(tiny_model("inkling_text"), experts=True).parameters)


def test_experts_with_all_rows_in_one_matrix() -> None:
    assert leaves(lora_targets(tiny_model("dbrx"), experts=True).parameters) == {
        f"ffn.experts.mlp.{n}" for n in ("w1", "v1", "w2")
    }


def test_bare_weights_in_a_block_are_said_and_counted() -> None:
    model = tiny_model("xlnet")
    targets = lora_targets(model)
    said = {out.path.rpartition(".")[2]: out.reason for out in targets.left_out}
    assert set(said) == {*"qkvor", "seg_embed"}
    assert set(said.values()) == {"a bare parameter, which PEFT would take for a stack of experts"}
    bare = sum(p.numel() for n, p in model.named_parameters() if n.rpartition(".")[2] in said)
    assert targets.coverage.of_weights == targets.coverage.weights + bare


@pytest.mark.parametrize("kind", [np.int64, torch.tensor, lambda n: torch.tensor(n, device="meta")], ids=range(3))
def test_sizes_that_are_no_plain_numbers(kind: Any) -> None:
    """A model that computes widths with NumPy or torch gives `nn.Linear` such numbers."""
    layer: Any = nn.Linear(4, 8)
    layer.in_features, layer.out_features = kind(4), kind(8)
    assert features(layer) == (4, 8)
