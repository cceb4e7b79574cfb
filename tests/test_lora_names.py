"""Names in a LoraConfig that fit no module, or more modules than were meant, and PEFT's own parts among them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import hfpatch
from hfpatch.errors import InputError
from hfpatch.lab.tiny import tiny_model


class Held(nn.Module):
    """A language model with a projector of some name, and a tower with a map whose name ends in it."""

    def __init__(self, name: str, *, tower: bool = True) -> None:
        super().__init__()
        setattr(self, name, nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32)))
        self.llm = tiny_model("llama")
        self.config = self.llm.config
        if tower:
            self.tower = nn.Module()
            setattr(self.tower, f"x_{name}", nn.Linear(16, 16))


def trained_in_full(model: nn.Module, config: LoraConfig) -> set[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lora: Any = get_peft_model(model, config)  # type: ignore[arg-type]
    inside = (n.partition(".modules_to_save")[0] for n, p in lora.named_parameters() if p.requires_grad)
    return {n.removeprefix("base_model.model.") for n in inside if ".lora_" not in n}


def refused(model: nn.Module, name: str, **words: Any) -> str:
    with pytest.raises(InputError) as error:
        hfpatch.lora_config(model, r=2, modules_to_save=[name], verbose=False, **words)
    return str(error.value)


@pytest.mark.parametrize("name", ["A", "B", "out", "dropout", "default", "base_layer", "lora_A", "layer"])
def test_a_name_that_fits_a_part_of_pefts_own(name: str) -> None:
    said = refused(Held(name, tower=False) if name != "default" else tiny_model("llama"), name)
    assert name in said
    if name in ("A", "out"):
        assert "refuses what it finds" in said


@pytest.mark.parametrize("name", ["proj", "norm", "connector", "mlp"])
def test_a_name_that_ends_others(name: str) -> None:
    model = Held(name)
    said = refused(model, name)
    assert "end of a path" in said
    if "name one by more of its path: " in said:  # what the message says works
        longer = said.partition("name one by more of its path: ")[2].split(", ")[0].split(" and ")[0]
        config = hfpatch.lora_config(model, r=2, modules_to_save=[longer], verbose=False)
        (path,) = trained_in_full(model, config)
        assert path.rpartition(".")[2] == name


@pytest.mark.parametrize(
    ("name", "near"), [("lm_heed", "lm_head"), ("embed_token", "embed_tokens"), ("zzz", "no name")]
)
def test_an_unknown_name(name: str, near: str) -> None:
    said = refused(tiny_model("llama"), name)
    assert "no module has this name" in said
    assert near in said


def test_a_norm_of_every_layer_and_the_last() -> None:
    said = refused(tiny_model("llama"), "norm")
    assert "model.norm" in said
    assert "model.layers.*.input_layernorm" in said


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("lm_head", {"lm_head"}),
        ("model.norm", {"model.norm"}),
        ("embed_tokens", {"model.embed_tokens"}),
        ("self_attn", {f"model.layers.{i}.self_attn" for i in range(4)}),
        ("input_layernorm", {f"model.layers.{i}.input_layernorm" for i in range(4)}),
    ],
)
def test_a_good_name_is_said_and_is_what_peft_trains(
    name: str, full: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model("llama")
    state = torch.get_rng_state()
    config = hfpatch.lora_config(model, r=2, modules_to_save=[name])
    assert torch.equal(torch.get_rng_state(), state)
    assert f"trained in full: {sorted(full)[0].replace('.0.', '.*.')} ({len(full)})" in capsys.readouterr().err
    assert trained_in_full(model, config) == full


@pytest.mark.parametrize("names", ["lm_head", [""], [3]])
def test_what_is_no_list_of_names(names: Any) -> None:
    with pytest.raises(InputError, match="modules_to_save"):
        hfpatch.lora_config(tiny_model("llama"), modules_to_save=names, verbose=False)


class TestBase:
    @pytest.mark.parametrize("excluded", [["q_prj"], r".*q_prj", ["layers.9.self_attn"]])
    def test_an_exclusion_that_excludes_nothing(self, excluded: Any) -> None:
        base = LoraConfig(target_modules=["q_proj"], exclude_modules=excluded)
        with pytest.raises(InputError, match="fits no module"):
            hfpatch.lora_config(tiny_model("llama"), base=base)

    @pytest.mark.parametrize("excluded", [["k_proj"], r".*\.3\..*", ["layers.3.self_attn.v_proj"]])
    def test_one_that_excludes_something(self, excluded: Any) -> None:
        base = LoraConfig(target_modules=["q_proj"], exclude_modules=excluded)
        hfpatch.lora_config(tiny_model("llama"), base=base, verbose=False)

    def test_names_of_another_architecture_are_said(self, capsys: pytest.CaptureFixture[str]) -> None:
        hfpatch.lora_config(tiny_model("phi3"), base=LoraConfig(target_modules=["o_proj", "q_proj", "k_proj"]))
        assert "no module is called k_proj, q_proj" in capsys.readouterr().err

    def test_modules_to_save(self) -> None:
        base = LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"])
        with pytest.raises(InputError, match="input_layernorm"):
            hfpatch.lora_config(tiny_model("llama"), base=base)


class Named(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        setattr(self, name, nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32)))
        self.llm = tiny_model("llama")
        self.config = self.llm.config


@pytest.mark.parametrize("name", ["lora_proj", "lora_A", "my_lora_B"])
def test_a_module_whose_name_is_like_pefts_own(name: str) -> None:
    model = Named(name)
    assert f"{name}.1" in hfpatch.lora_targets(model, "all").modules
    lora = get_peft_model(model, hfpatch.lora_config(model, r=2, scope="all", verbose=False))  # type: ignore[arg-type]
    assert hasattr(lora.get_submodule(f"base_model.model.{name}.1"), "base_layer")
    trained = {n for n, p in lora.named_parameters() if p.requires_grad}
    assert f"base_model.model.{name}.1.lora_A.default.weight" in trained
    assert f"base_model.model.{name}.1.base_layer.weight" not in trained


@pytest.mark.parametrize(
    ("architecture", "path"),
    [
        ("gemma4", "model.language_model.per_layer_model_projection"),
        ("gemma4_text", "model.per_layer_model_projection"),
        ("qwen4_exp_text", "model.hyper_connection_mixer.input_mix_weight_down"),
    ],
)
@pytest.mark.parametrize("scope", ["language", "all"])
def test_a_map_beside_the_blocks_is_left_out_with_a_reason(architecture: str, path: str, scope: str) -> None:
    targets = hfpatch.lora_targets(tiny_model(architecture), scope)
    (reason,) = {out.reason for out in targets.left_out if out.path == path}
    assert "beside the blocks of the language model" in reason
    heads = {out.path for out in targets.left_out if "an output head" in out.reason}
    assert heads == ({"lm_head"} if scope == "all" else set())


@pytest.mark.parametrize(("value", "unused"), [(-2, [1]), (-1, []), (1, [1]), (2, []), ([-2, 1], [1]), ([0, -1], [])])
def test_layers_that_the_feature_layer_leaves_unused_are_no_coverage(value: Any, unused: list[int]) -> None:
    model = tiny_model("llava")
    model.config.vision_feature_layer = value
    targets = hfpatch.lora_targets(model, "vision")
    layers = {int(p.partition(".layers.")[2][0]) for p in targets.modules}
    assert layers == {0, 1} - set(unused)
    coverage = targets.coverage
    assert coverage.layers == coverage.of_layers == 2 - len(unused)
    assert coverage.percent == 100
    assert coverage.unused == sum(out.count for out in targets.left_out if "never used" in out.reason)
    assert bool(coverage.unused) == bool(unused) == ("matrices that the loss never sees" in str(targets))
    said = {out.reason for out in targets.left_out if out.path.startswith("model.vision_tower.encoder.")}
    assert all(f"never used: vision_feature_layer={value} reads" in reason for reason in said)
    assert bool(said) == bool(unused)
