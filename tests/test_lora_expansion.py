"""An adapter gains the linear maps it misses: nothing else moves, it saves and loads, and it can be taken back."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from torch import nn

import hfpatch
from hfpatch.errors import InputError, RefusedError
from hfpatch.lab.composites_lora import peft_all, peft_qv
from hfpatch.lab.tiny import SpeechLLM, tiny_model
from hfpatch.lora.expand import why_no_new_parameters
from hfpatch.model.survey import Survey
from tests.fingerprint import fingerprint
from tests.sampling import first_quick
from tests.test_lora import DENSE, adapted, meant, reads_as_experts

ID = "lora-target-expansion"
QV = ["q_proj", "v_proj"]


def expand(model: nn.Module, **options: Any) -> hfpatch.Applied:
    return hfpatch.apply(model, only=ID, verbose=False, options={ID: options})


def lora(name: str = "llama", dtype: torch.dtype = torch.float32, **words: Any) -> Any:
    """A tiny PEFT model in evaluation mode, with its adapter trained."""
    words.setdefault("target_modules", QV)
    model = get_peft_model(tiny_model(name).to(dtype), LoraConfig(r=2, **words))
    return trained(model).eval()


def trained(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def logits(model: nn.Module) -> torch.Tensor:
    ids = (torch.arange(24).reshape(2, 12) * 7 + 3) % 64
    with torch.no_grad():
        return model(input_ids=ids).logits


def of_peft(model: Any) -> dict[str, Any]:
    """What PEFT itself notes beside the modules."""
    unsaved = "base_model_name_or_path=None"  # some releases write an empty one when they save
    said = {k: repr(c).replace("base_model_name_or_path=''", unsaved) for k, c in model.peft_config.items()}
    return {
        "configs": {k: (id(c), id(c.target_modules), said[k]) for k, c in model.peft_config.items()},
        "noted": list(model.base_model.targeted_module_names),
    }


def two(model: Any) -> Any:
    model.add_adapter("b", LoraConfig(r=4, target_modules=["k_proj", "q_proj"]))
    return trained(model).eval()


LLAMA = meant("llama")
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], set[str]]] = {
    "q and v": (lora, {}, LLAMA),
    "q, k, v, o": (lambda: lora(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]), {}, LLAMA),
    "bfloat16": (lambda: lora(dtype=torch.bfloat16), {}, LLAMA),
    "float16": (lambda: lora(dtype=torch.float16), {}, LLAMA),
    "adapter in bfloat16": (lambda: lora(dtype=torch.bfloat16).bfloat16(), {}, LLAMA),
    "Llama names on a fused model": (
        lambda: lora("phi3", target_modules=[p.rpartition(".")[2] for p in sorted(LLAMA)]),
        {},
        meant("phi3"),
    ),
    "Conv1D": (lambda: lora("gpt2", target_modules=["c_attn"], fan_in_fan_out=True), {}, meant("gpt2")),
    "biases": (
        lambda: lora("gpt2", target_modules=["c_attn"], fan_in_fan_out=True, bias="lora_only"),
        {},
        meant("gpt2"),
    ),
    "some layers": (
        lambda: lora(layers_to_transform=[1, 2]),
        {},
        {p for p in LLAMA if p.split(".")[2] in {"1", "2"}},
    ),
    "one layer by its path": (
        lambda: lora(target_modules=["model.layers.3.self_attn.q_proj"]),
        {},
        {p for p in LLAMA if p.split(".")[2] == "3"},
    ),
    "excluded and saved modules": (
        lambda: lora(exclude_modules=["k_proj"], modules_to_save=["lm_head"]),
        {},
        {p for p in LLAMA if not p.endswith("k_proj")},
    ),
    "an embedding too": (
        lambda: lora(target_modules=["q_proj", "embed_tokens"]),
        {},
        LLAMA | {"model.embed_tokens"},
    ),
    "trainable tokens": (lambda: lora(trainable_token_indices=[1, 2]), {}, LLAMA),
    "DoRA": (lambda: lora(use_dora=True), {}, LLAMA),
    "rsLoRA with patterns": (
        lambda: lora(use_rslora=True, rank_pattern={"k_proj": 4}, alpha_pattern={"down_proj": 32}),
        {},
        LLAMA,
    ),
    "gaussian": (lambda: lora(init_lora_weights="gaussian"), {}, LLAMA),
    "B drawn at random": (lambda: lora(init_lora_weights=False), {}, LLAMA),
    "language model of a VLM": (
        lambda: lora("gemma3", target_modules=[f"model.language_model.layers.{i}.self_attn.q_proj" for i in range(4)]),
        {},
        {p.replace("model.layers", "model.language_model.layers") for p in LLAMA},
    ),
    "experts are left alone": (lambda: lora("mixtral"), {}, meant("mixtral")),
    "two adapters, the active one": (lambda: two(lora()), {}, LLAMA),
    "two adapters, the other": (lambda: two(lora()), {"adapters": "b"}, LLAMA),
    "two adapters, both": (lambda: two(lora()), {"adapters": "all"}, LLAMA),
}


@pytest.mark.parametrize("case", first_quick(CASES, every=6))
def test_expanded_saved_loaded_and_taken_back(case: str, tmp_path: Path) -> None:
    make, options, want = CASES[case]
    model = make()
    before, noted, was = fingerprint(model), of_peft(model), logits(model)
    parameters = dict(model.named_parameters())
    held = {n: (p, p.detach().clone(), p.requires_grad) for n, p in parameters.items() if "lora_" in n}

    fix = expand(model, **options)
    assert adapted(model) == want
    if "DoRA" not in case or model.dtype == torch.float32:
        assert torch.equal(logits(model), was)
    now = dict(model.named_parameters())
    for name, (parameter, value, flag) in held.items():
        assert now[name] is parameter
        assert torch.equal(parameter, value)
        assert parameter.requires_grad is flag
    new = {n for n, p in now.items() if id(p) not in {id(q) for q in parameters.values()}}
    assert {id(now[n]) for n in new} == {id(p) for p in fix.new_parameters}
    assert new
    dtypes = {p.dtype for p, _, _ in held.values()}
    assert {p.dtype for p in fix.new_parameters} <= dtypes
    assert not hfpatch.plan(model, only=ID, options={ID: options}).edits

    names = options.get("adapters", "default")
    for parameter in fix.new_parameters:
        parameter.data.add_(0.05)
    after = logits(model)
    if names == "default":
        assert not torch.equal(after, was)
        model.save_pretrained(tmp_path)
        named = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
        assert set(named) == set(model.peft_config["default"].target_modules)
        base = copy.deepcopy(model).unload()
        loaded = PeftModel.from_pretrained(base, tmp_path, autocast_adapter_dtype=case != "adapter in bfloat16").eval()
        assert adapted(loaded) == want
        assert torch.equal(logits(loaded), after)

    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        hfpatch.revert(other, only=ID)
        assert not hfpatch.status(other)
        assert torch.equal(logits(other), was)
    for parameter in fix.new_parameters:
        parameter.data.zero_()
    fix.revert()
    assert fingerprint(model) == before
    assert of_peft(model) == noted
    assert torch.equal(logits(model), was)


def test_new_weights_are_those_peft_would_draw() -> None:
    """The same draws, in the same order, from the same generator; B is 0."""
    model = lora()
    torch.manual_seed(7)
    fix = expand(model)
    left = torch.get_rng_state()
    torch.manual_seed(7)
    rest = ["k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    fresh = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules=rest))
    assert torch.equal(torch.get_rng_state(), left)
    theirs = {n: p for n, p in fresh.named_parameters() if "lora_" in n}
    ours = {n: p for n, p in model.named_parameters() if id(p) in {id(q) for q in fix.new_parameters}}
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[n], ours[n]) for n in ours)
    assert all(not p.any() for n, p in ours.items() if "lora_B" in n)


def test_a_plan_draws_nothing() -> None:
    model, state = lora(), torch.get_rng_state()
    assert hfpatch.plan(model, only=ID).edits
    assert torch.equal(torch.get_rng_state(), state)


def test_it_trains_and_is_not_run_unasked(capsys: Any) -> None:
    model = lora(lora_dropout=0.1).train()
    bare = hfpatch.apply(model, verbose=False)
    assert [d.decided for d in bare.plan.decisions if d.patch == ID] == ["opt-in"]
    assert not bare.new_parameters
    before = fingerprint(model)
    fix = expand(model)
    assert {m.training for m in model.modules()} == {True}
    optimizer = torch.optim.SGD(fix.new_parameters, lr=0.1)
    ids = torch.arange(12)[None]
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        assert all(p.grad is not None for p in fix.new_parameters)
        optimizer.step()
    assert all(p.any() for n, p in model.named_parameters() if "k_proj.lora_B" in n)
    model.zero_grad()
    capsys.readouterr()
    fix.revert()
    assert "20 layers that were trained since are removed" in capsys.readouterr().err
    assert fingerprint(model) == before


@pytest.mark.parametrize(("freeze", "want"), [(False, {True}), (True, {False})])
def test_new_layers_train_as_the_others_do(freeze: bool, want: set[bool]) -> None:
    model = lora()
    if freeze:
        model.requires_grad_(requires_grad=False)
    assert {p.requires_grad for p in expand(model).new_parameters} == want


def test_a_base_weight_that_trains_goes_on_training() -> None:
    model = lora()
    up = model.base_model.model.model.layers[0].mlp.up_proj
    up.weight.requires_grad_(requires_grad=True)
    fix = expand(model)
    assert up.weight.requires_grad
    assert not model.base_model.model.model.layers[1].mlp.up_proj.base_layer.weight.requires_grad
    fix.revert()
    assert up.weight.requires_grad


def test_adapters_that_are_switched_off_stay_off() -> None:
    model = lora()
    model.base_model.disable_adapter_layers()
    was = logits(model)
    fix = expand(model)
    for parameter in fix.new_parameters:
        parameter.data.add_(0.5)
    assert torch.equal(logits(model), was)
    model.base_model.enable_adapter_layers()
    assert not torch.equal(logits(model), was)


def test_gradient_checkpointing_goes_on() -> None:
    model = lora().train()
    model.gradient_checkpointing_enable()
    fix = expand(model)
    ids = torch.arange(12)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in fix.new_parameters)


def test_a_peft_model_inside_a_composite() -> None:
    model = SpeechLLM(lora())
    before = fingerprint(model)
    fix = expand(model)
    assert adapted(model.llm) == LLAMA
    assert [e.path for e in fix.edits] == ["llm.base_model"]
    fix.revert()
    assert fingerprint(model) == before


def test_compiled_code_notices() -> None:
    model = lora()
    compiled: Any = torch.compile(model, backend="eager")
    was = logits(compiled)
    fix = expand(model)
    assert torch.equal(logits(compiled), was)
    for parameter in fix.new_parameters:
        parameter.data.add_(0.5)
    torch.testing.assert_close(logits(compiled), logits(model))
    assert not torch.allclose(logits(compiled), was)


def test_verify_lifts_it_and_puts_it_back() -> None:
    model = lora()
    fix = expand(model)
    for parameter in fix.new_parameters:
        parameter.data.add_(0.05)
    patched = fingerprint(model)
    assert "loss" in str(fix.verify({"input_ids": torch.arange(12)[None], "labels": torch.arange(12)[None]}))
    assert fingerprint(model) == patched


def test_a_second_adapter_is_expanded_later_on_its_own() -> None:
    model = lora()
    first = expand(model)
    model.add_adapter("b", LoraConfig(r=4, target_modules=["k_proj"]))
    model.set_adapter("b")
    second = expand(model)
    assert adapted(model) == LLAMA
    own = {p for p in LLAMA if p.endswith(("q_proj", "v_proj"))}
    other = copy.deepcopy(model)
    hfpatch.revert(other)
    assert adapted(other) == own | {p for p in LLAMA if p.endswith("k_proj")}
    first.revert()
    assert adapted(model) == LLAMA
    second.revert()
    assert adapted(model) == own | {p for p in LLAMA if p.endswith("k_proj")}
    assert type(model.base_model.model.model.layers[0].mlp.up_proj) is nn.Linear
    assert not {p for p in model.base_model.targeted_module_names if "mlp" in p}


def later(model: Any, **words: Any) -> Any:
    """Adapter b, added after an expansion, trained and switched to."""
    model.add_adapter("b", LoraConfig(r=2, target_modules=["k_proj"], **words))
    model.set_adapter("b")
    return trained(model).eval()


def test_neither_verify_nor_revert_touches_what_was_set_since() -> None:
    """The active adapter, what trains, and the layers of an adapter that came later in the same place."""
    model = lora()
    fix = expand(model)
    later(model)
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    layer.base_layer.weight.requires_grad_(requires_grad=True)
    was, seen = fingerprint(model), logits(model)
    trains = {id(p) for p in model.parameters() if p.requires_grad}
    assert "before" in str(fix.verify({"input_ids": torch.arange(12)[None]}))
    assert torch.equal(logits(model), seen)
    assert {k: v["values"] for k, v in fingerprint(model).items()} == {k: v["values"] for k, v in was.items()}
    hfpatch.revert(model, only=ID)
    assert torch.equal(logits(model), seen)
    assert {id(p) for p in model.parameters() if p.requires_grad} == trains
    assert model.base_model.model.model.layers[0].self_attn.k_proj.active_adapters == ["b"]
    assert model.base_model.model.model.layers[0].mlp.up_proj.weight.requires_grad


def test_a_named_revert_takes_merged_layers_out_of_the_base(capsys: pytest.CaptureFixture[str]) -> None:
    model = lora()
    layers = model.base_model.model.model.layers
    base = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" not in n}
    was = logits(model)
    fix = expand(model)
    trained(model)
    model.merge_adapter()
    fix.revert()
    assert "adapter default is merged into the base weights at" in capsys.readouterr().err
    assert hfpatch.status(model)
    seen = logits(model)
    fix.verify({"input_ids": torch.arange(12)[None]})
    assert torch.equal(logits(model), seen)
    hfpatch.revert(model, only=ID)
    assert type(layers[0].mlp.up_proj) is nn.Linear
    model.unmerge_adapter()
    for name, parameter in model.named_parameters():
        if name in base:
            torch.testing.assert_close(parameter, base[name])
    assert not torch.equal(was, seen)


def test_a_named_revert_leaves_another_adapter_merged() -> None:
    model = lora()
    fix = expand(model)
    later(model)
    model.set_adapter("default")
    trained(model)
    model.base_model.set_adapter(["default", "b"])
    model.merge_adapter()
    hfpatch.revert(model, only=ID)
    assert not hfpatch.status(model)
    assert fix.new_parameters == ()
    layer = model.base_model.model.model.layers[0].self_attn.k_proj
    assert layer.merged_adapters == ["b"]
    merged = logits(model)
    model.unmerge_adapter()
    torch.testing.assert_close(logits(model), merged, rtol=1e-4, atol=1e-5)


def test_a_deleted_adapter_is_gone() -> None:
    model = lora()
    fix = expand(model)
    later(model)
    model.delete_adapter("default")
    (edit,) = fix.status().edits
    assert (edit.state.word, edit.state.now) == ("gone", "deleted")
    seen = logits(model)
    hfpatch.revert(model)
    assert torch.equal(logits(model), seen)
    assert type(model.base_model.model.model.layers[0].mlp.up_proj) is nn.Linear


def test_a_head_among_the_targets_is_no_obstacle() -> None:
    """Its path is one name, without a dot."""
    model = lora("phi3", target_modules=["qkv_proj", "lm_head"])
    expand(model)
    assert adapted(model) == meant("phi3") | {"lm_head"}


def test_what_somebody_did_since_stands_in_the_way_of_a_revert(capsys: pytest.CaptureFixture[str]) -> None:
    model = lora()
    fix = expand(model)
    model.merge_adapter()
    fix.revert()
    assert "adapter default is merged into the base weights" in capsys.readouterr().err
    model.unmerge_adapter()
    model.peft_config["default"].target_modules = {"q_proj"}
    fix.revert()
    assert "adapter default is at other target_modules: q_proj" in capsys.readouterr().err
    assert [e.state.word for e in fix.status().edits] == ["changed"]
    hfpatch.revert(model, only=ID)
    assert not fix.status().edits


def test_two_expansions_of_one_adapter_do_not_stack() -> None:
    model = lora(layers_to_transform=[1])
    expand(model)
    model.peft_config["default"].layers_to_transform = [1, 2]
    had = {name for name, _ in model.named_modules() if name.endswith("lora_A")}
    assert expand(model).edits == ()
    assert {name for name, _ in model.named_modules() if name.endswith("lora_A")} == had


def test_a_failure_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lora()
    before, noted = fingerprint(model), of_peft(model)
    make, calls = model.base_model._create_and_replace, []

    def fails(*args: Any, **words: Any) -> None:
        calls.append(words)
        if len(calls) == 5:
            raise OSError("no memory")
        make(*args, **words)

    monkeypatch.setattr(type(model.base_model), "_create_and_replace", lambda _self, *a, **w: fails(*a, **w))
    with pytest.raises(hfpatch.errors.ApplyError, match="apply changes nothing"):
        expand(model)
    monkeypatch.undo()
    assert (fingerprint(model), of_peft(model)) == (before, noted)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a plain model": (lambda: tiny_model("llama"), r"no PEFT model with LoRA to expand.*hfpatch\.lora_config\(model\)"),
    "layers without a PEFT model": (
        lambda: inject_adapter_in_model(LoraConfig(target_modules=QV), tiny_model("llama")),
        r"were injected without a PEFT model around .*lora_config\(model, base=config\)",
    ),
    "an expression": (lambda: lora(target_modules=r".*\.q_proj"), r"expression target_modules='\.\*\\\\\.q_proj'"),
    "PiSSA": (lambda: lora(init_lora_weights="pissa"), "init_lora_weights='pissa', which changes the base weights"),
    "OLoRA": (lambda: lora(init_lora_weights="olora"), "init_lora_weights='olora'"),
    "a merged adapter": (lambda: _merged(lora()), r"is merged into the base weights .*unmerge_adapter\(\) first"),
    "another kind": (
        lambda: get_peft_model(tiny_model("llama"), IA3Config(target_modules=["k_proj"], feedforward_modules=[])),
        "is of type IA3; only LoRA adapters are expanded",
    ),
}


def _merged(model: Any) -> Any:
    model.merge_adapter()
    return model


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_a_sentence_and_nothing_changed(case: str) -> None:
    make, sentence = REFUSED[case]
    model = make()
    before = fingerprint(model)
    with pytest.raises(RefusedError, match=sentence):
        expand(model)
    assert fingerprint(model) == before


@pytest.mark.parametrize("names", [3, None, True, [1]])
def test_adapters_that_are_no_names(names: Any) -> None:
    with pytest.raises(InputError, match=r"adapters=.*: want the name of an adapter, a list of names, or 'all'"):
        expand(lora(), adapters=names)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_an_adapter_of_the_experts_alone_is_expanded_in_their_blocks(name: str) -> None:
    stacks = {n for n, p in tiny_model(name).named_parameters() if p.dim() == 3}
    model = lora(name, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    assert adapted(model) == stacks
    before, was = fingerprint(model), logits(model)
    fix = expand(model)
    assert adapted(model) == meant(name) | stacks
    assert torch.equal(logits(model), was)
    fix.revert()
    assert fingerprint(model) == before


def test_an_adapter_there_is_not() -> None:
    with pytest.raises(InputError, match="no adapter 'c'; want one of default"):
        expand(lora(), adapters=["c"])


def test_ddp_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model = nn.parallel.DistributedDataParallel(lora())
    with pytest.raises(RefusedError, match=r"wrapped in DDP, .*expand the adapter first and wrap in DDP afterwards"):
        expand(model)
    assert why_no_new_parameters(Survey(model.module)) is None
    fix = expand(model.module)
    around = nn.parallel.DistributedDataParallel(model.module)
    hfpatch.revert(around)
    assert "adapter default is inside DDP (the model), which fixed its parameters" in capsys.readouterr().err
    assert fix.status()
    fix.revert()
    assert not fix.status().edits


def test_what_cannot_be_named_is_left_out_and_said() -> None:
    """In a Qwen3-MoE, gate_proj of the dense layer would be read as the experts when the adapter is loaded."""
    model = get_peft_model(tiny_model("qwen3_moe", mlp_only_layers=[0]), LoraConfig(r=2, target_modules=QV)).eval()
    fix = expand(model)
    said = "PEFT would take the name gate_proj for the routed experts" in fix.plan.decisions[0].reason
    assert said is reads_as_experts()
    assert adapted(model) == meant("qwen3_moe") | (set() if said else DENSE)


def test_the_composites_of_the_cases() -> None:
    assert adapted(peft_qv(tiny_model("llama"))) == {p for p in LLAMA if p.endswith(("q_proj", "v_proj"))}
    assert adapted(peft_qv(tiny_model("gpt2"))) == {p for p in meant("gpt2") if p.endswith("c_attn")}
    assert adapted(peft_all(tiny_model("llama"))) == LLAMA
