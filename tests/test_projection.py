"""Projectors: which layer is one, what proves it untouched, what it is drawn from, and what is refused."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import hfpatch
from hfpatch.errors import InputError, RefusedError
from hfpatch.lab.tiny import SpeechLLM, tiny_model, trained_speech_llm
from hfpatch.model.projector import projector as projectors
from hfpatch.model.projector.untouched import default_init, untouched
from hfpatch.model.survey import Survey
from hfpatch.numerics.init import Normal, Zeros
from hfpatch.patching.kinds.set_tensor import SetTensor
from tests.fingerprint import fingerprint
from tests.sampling import first_quick

ID = "projection-init"
SHAPES = [(32, 24), (64, 16), (100, 3), (640, 384), (17, 1000), (33, 100), (256, 1024), (200, 2), (64, 7)]


def options(**settings: Any) -> dict[str, Any]:
    return {ID: settings}


def decision(model: nn.Module, **words: Any) -> Any:
    (found,) = [d for d in hfpatch.plan(model, **words).decisions if d.patch == ID]
    return found


def trained(layer: nn.Linear, optimizer: Any, rate: float, steps: int) -> nn.Linear:
    made = optimizer(layer.parameters(), lr=rate)
    for _ in range(steps):
        made.zero_grad()
        layer(torch.randn(4, layer.in_features)).square().sum().backward()
        made.step()
    return layer


def initialised(layer: nn.Linear, init: Callable[[torch.Tensor], Any]) -> nn.Linear:
    init(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class MLP(nn.Module):
    """A projector written as a module: the layer called last is defined first."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.out = nn.Linear(hidden, hidden)
        self.into = nn.Linear(width, hidden)
        self.calls = 0

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.out(torch.relu(nn.functional.dropout(self.into(features), 0.5, self.training)))


def speech(projector: nn.Module, llm: Any = None) -> SpeechLLM:
    model = SpeechLLM(llm or tiny_model("llama"))
    model.speech_proj = projector
    return model


# --- the proof ---


@pytest.mark.parametrize("shape", first_quick(SHAPES, every=3))
@pytest.mark.parametrize("bias", [True, False])
def test_torchs_own_values_are_known_at_every_seed(shape: tuple[int, int], bias: bool) -> None:
    for seed in range(8):
        torch.manual_seed(seed)
        layer = nn.Linear(shape[1], shape[0], bias=bias)
        assert untouched(layer)
        assert untouched(copy.deepcopy(layer))
        assert untouched(pickle.loads(pickle.dumps(layer)))  # noqa: S301


TOUCHED: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "two steps of AdamW at 1e-6": lambda m: trained(m, torch.optim.AdamW, 1e-6, 2),
    "one step of AdamW at 1e-7": lambda m: trained(m, torch.optim.AdamW, 1e-7, 1),
    "one step of SGD at 1e-6": lambda m: trained(m, torch.optim.SGD, 1e-6, 1),
    "float16": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "float64": lambda m: m.double(),
    "through float16": lambda m: m.half().float(),
    "through bfloat16": lambda m: m.bfloat16().float(),
    "xavier": lambda m: initialised(m, nn.init.xavier_uniform_),
    "kaiming of relu": lambda m: initialised(m, nn.init.kaiming_uniform_),
    "normal inside the bound": lambda m: initialised(m, lambda w: nn.init.normal_(w, std=1e-2 / w.shape[1] ** 0.5)),
    "half the bound": lambda m: initialised(m, lambda w: nn.init.uniform_(w, -0.5 / w.shape[1] ** 0.5, 0.5)),
    "zeros": lambda m: initialised(m, nn.init.zeros_),
    "identity": lambda m: initialised(m, nn.init.eye_),
    "on meta": lambda m: m.to("meta"),
}


@pytest.mark.parametrize("how", TOUCHED)
@pytest.mark.parametrize("shape", [(32, 24), (64, 64), (40, 4096), (128, 1)])
def test_anything_else_is_not_untouched(how: str, shape: tuple[int, int]) -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        assert not untouched(TOUCHED[how](nn.Linear(shape[1], shape[0])))


def test_a_layer_that_changed_in_the_last_chunk_only() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(1024, 1100)
    assert untouched(layer)
    with torch.no_grad():
        layer.weight[-1] *= 1 + 1e-5
    assert not untouched(layer)


def test_a_trained_bias_and_a_frozen_layer() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(24, 32)
    with torch.no_grad():
        layer.bias += 1e-6
    assert not default_init(layer)
    frozen = nn.Linear(24, 32).requires_grad_(requires_grad=False)
    assert default_init(frozen)
    assert not untouched(frozen)
    assert not untouched(nn.LayerNorm(64))


# --- the values ---


def test_values_are_seeded_and_leave_the_global_state() -> None:
    state = torch.get_rng_state()
    old = torch.ones(400, 300, dtype=torch.float16)
    new = Normal(0.03, 7)(old)
    assert torch.equal(torch.get_rng_state(), state)
    assert (new.dtype, new.shape) == (old.dtype, old.shape)
    assert torch.equal(new, Normal(0.03, 7)(old))
    assert not torch.equal(new, Normal(0.03, 8)(old))
    assert float(new.double().std()) == pytest.approx(0.03, rel=0.01)
    assert abs(float(new.double().mean())) < 1e-3
    assert torch.equal(old, torch.ones_like(old))
    assert not Zeros()(old).any()
    assert (str(Normal(0.0312)), str(Zeros())) == ("normal(0, 0.0312) seed 0", "zeros")
    assert pickle.loads(pickle.dumps(Normal(0.03, 7))) == Normal(0.03, 7)  # noqa: S301


# --- what a bare apply does ---


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2", "gemma3"])
def test_outputs_take_the_rms_of_the_embeddings_as_the_model_sees_them(architecture: str) -> None:
    torch.manual_seed(0)
    model = SpeechLLM(tiny_model(architecture), width=96)
    before, state = fingerprint(model), torch.get_rng_state()
    fix = hfpatch.apply(model, only=ID, verbose=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert [(e.path, e.slot) for e in fix.edits] == [("speech_proj", "tensor weight"), ("speech_proj", "tensor bias")]
    features = torch.randn(4096, 96, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        mine = model.speech_proj(features).double().square().mean().sqrt()
        text = hfpatch.embed_tokens(model)(torch.arange(64)).double().square().mean().sqrt()
    assert float(mine / text) == pytest.approx(1, abs=0.06)  # 96 * 32 draws
    assert not model.speech_proj.bias.any()
    fix.revert()
    assert fingerprint(model) == before
    assert untouched(model.speech_proj)


def test_bare_apply_says_so_and_a_second_one_does_nothing() -> None:
    model = SpeechLLM(tiny_model("llama"))
    fix = hfpatch.apply(model, verbose=False)
    assert {d.patch: d.effect for d in fix.plan.of("applied")}[ID] == "prepares"
    weight = model.speech_proj.weight.clone()
    assert (decision(model).decided, decision(model).reason) == ("not needed", "already applied (2 edits)")
    trained(model.speech_proj, torch.optim.AdamW, 1e-3, 2)
    hfpatch.apply(model, verbose=False)
    assert not torch.equal(model.speech_proj.weight, weight)  # what was trained since stays
    fix = hfpatch.apply(model, include=ID, options=options(std=0.02), verbose=False)
    (found,) = (d for d in fix.plan.decisions if d.patch == ID)
    assert (found.decided, found.edits) == ("not needed", ())
    assert "tensor weight of speech_proj was set to " in found.otherwise


@pytest.mark.parametrize("how", ["two steps of AdamW at 1e-6", "bfloat16", "normal inside the bound"])
def test_what_may_be_trained_is_drawn_anew_only_when_named(how: str) -> None:
    model = SpeechLLM(tiny_model("llama"))
    TOUCHED[how](model.speech_proj)
    before = model.speech_proj.weight.detach().clone()
    found = decision(model, include="suggested")
    assert (found.decided, found.effect) == ("opt-in", "reinitialises")
    assert "not provably untouched" in found.reason
    hfpatch.apply(model, include="suggested", verbose=False)
    assert torch.equal(model.speech_proj.weight, before)
    fix = hfpatch.apply(model, only=ID, verbose=False)
    assert not torch.equal(model.speech_proj.weight, before)
    assert model.speech_proj.weight.dtype == before.dtype
    fix.revert()
    assert torch.equal(model.speech_proj.weight, before)


def test_a_frozen_projector_is_left_alone() -> None:
    model = SpeechLLM(tiny_model("llama"))
    model.speech_proj.requires_grad_(requires_grad=False)
    assert decision(model).decided == "opt-in"


def test_options_fix_std_seed_and_input() -> None:
    model = SpeechLLM(tiny_model("llama"))
    with hfpatch.apply(model, only=ID, options=options(std=0.02, seed=5), verbose=False):
        assert torch.equal(model.speech_proj.weight, Normal(0.02, 5)(model.speech_proj.weight))
    one, ten = (decision(model, options=options(input_rms=rms)).edits[0].after.std for rms in (1.0, 10.0))
    assert one == pytest.approx(10 * ten, rel=1e-3)


# --- projectors of several layers ---


def sequential(hidden: int = 32) -> nn.Module:
    return nn.Sequential(nn.Linear(24, hidden), nn.GELU(), nn.Linear(hidden, hidden))


@pytest.mark.parametrize(("make", "end"), [(sequential, "2"), (lambda: MLP(24, 32), "out")])
def test_the_layer_called_last_is_drawn_and_its_input_measured(make: Callable[[], nn.Module], end: str) -> None:
    torch.manual_seed(0)
    model = speech(make()).train()
    before, state = fingerprint(model), torch.get_rng_state()
    made = hfpatch.plan(model, only=ID)
    assert fingerprint(model) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert {e.path for e in made.edits} == {f"speech_proj.{end}"}
    assert getattr(model.speech_proj, "calls", 0) == 0
    hfpatch.apply(model, only=ID, verbose=False)
    with torch.no_grad():
        features = torch.randn(4096, 24, generator=torch.Generator().manual_seed(3))
        mine = model.eval().speech_proj(features).double().square().mean().sqrt()
        text = hfpatch.embed_tokens(model)(torch.arange(64)).double().square().mean().sqrt()
    assert float(mine / text) == pytest.approx(1, abs=0.08)


def test_a_projector_that_cannot_be_run_on_noise_takes_the_options_word() -> None:
    class Odd(MLP):
        def forward(self, features: Any, lengths: Any) -> Any:
            return super().forward(features) + lengths

    model = speech(Odd(24, 32))
    assert decision(model).decided == "refused"  # either of two layers may be the last
    fix = hfpatch.apply(model, only=ID, options=options(modules=["speech_proj.out"], input_rms=0.5), verbose=False)
    assert {e.path for e in fix.edits} == {"speech_proj.out"}
    text = hfpatch.embed_tokens(model).weight.double().square().mean().sqrt().item()
    assert fix.edits[0].after.std == pytest.approx(text / (0.5 * math.sqrt(32)), rel=1e-3)


# --- which layer it is ---


def test_several_projectors_are_asked_about() -> None:
    model = speech(nn.ModuleDict({"audio": nn.Linear(24, 32), "image": nn.Linear(16, 32)}))
    found = decision(model)
    assert found.decided == "refused"
    assert found.reason == (
        "several layers may be the projector: speech_proj.audio, speech_proj.image; "
        'name one or more with options={"projection-init": {"modules": [\'speech_proj.audio\']}}'
    )
    fix = hfpatch.apply(model, only=ID, options=options(modules="speech_proj.*"), verbose=False)
    assert [(e.path, e.after.seed) for e in fix.edits if e.slot == "tensor weight"] == [
        ("speech_proj.audio", 0),
        ("speech_proj.image", 1),
    ]


def test_heads_blocks_and_inserted_adapters_are_no_projectors() -> None:
    llm = tiny_model("llama")
    llm.model.layers[0].adapter = nn.Sequential(nn.Linear(32, 4), nn.GELU(), nn.Linear(4, 32))
    model = nn.ModuleDict({"llm": llm, "value": nn.Linear(32, 1), "pool": nn.Linear(32, 32)})
    model["blocks"] = nn.ModuleList([nn.TransformerEncoderLayer(32, 4, 48)])
    survey = Survey(model)
    assert projectors.found(survey, survey.submodels[0]) == ()
    assert decision(model).decided == "not needed"


def test_a_square_projector_behind_an_encoder_of_that_width() -> None:
    from transformers import WhisperModel

    from tests.test_embed import WHISPER

    model = nn.ModuleDict(
        {"encoder": WhisperModel(WHISPER).encoder, "proj": nn.Linear(32, 32), "llm": tiny_model("llama")}
    )
    assert decision(model).edits[0].path == "proj"


def test_lora_matrices_never_and_copies_of_peft_together() -> None:
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj", "speech_proj"])
    model = get_peft_model(SpeechLLM(tiny_model("llama"), width=32), config)
    assert not [e for e in hfpatch.plan(model).edits if "lora" in e.path]
    with pytest.raises(RefusedError, match=r"lora_B\.default is part of an adapter"):
        hfpatch.apply(model, only=ID, options=options(modules="*speech_proj.lora_B.default"))
    saved = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["speech_proj"])
    model = get_peft_model(SpeechLLM(tiny_model("llama")), saved)
    fix = hfpatch.apply(model, only=ID, verbose=False)
    weights = [model.get_submodule(e.path).weight for e in fix.edits if e.slot == "tensor weight"]
    assert len(weights) == 2
    assert torch.equal(*weights)


# --- bad input ---


@pytest.mark.parametrize(
    ("projector", "says"),
    [
        (nn.Linear(24, 48), "speech_proj has 48 output features, the token embeddings of LlamaForCausalLM at "),
        (nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 48)), "speech_proj.2 has 48 output features"),
        (nn.Conv1d(24, 32, 3), "speech_proj is a Conv1d and holds no linear layer"),
    ],
)  # fmt: skip
def test_a_projector_that_does_not_fit(projector: nn.Module, says: str) -> None:
    model = speech(copy.deepcopy(projector))
    before = fingerprint(model)
    for words in ({}, {"options": options(modules=["speech_proj"])}):
        with pytest.raises(RefusedError, match="projection-init was asked for and is refused") as error:
            hfpatch.apply(model, only=ID, **words)
        assert says in str(error.value)
        assert "\n" not in str(error.value)
    assert fingerprint(model) == before


def test_weights_that_cannot_be_drawn_anew() -> None:
    model = SpeechLLM(tiny_model("llama"))
    nn.utils.parametrizations.weight_norm(model.speech_proj)
    assert decision(model).decided == "not needed"
    assert "is computed from other parameters" in decision(model, options=options(modules="speech_proj")).reason
    model = SpeechLLM(tiny_model("llama"))
    model.twin = nn.Linear(24, 32)
    model.twin.weight = model.speech_proj.weight
    found = decision(model, options=options(modules="speech_proj"))
    assert (found.decided, found.reason) == (
        "refused",
        "the weight of speech_proj is also that of twin: untie them first",
    )


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"std": -1}, "std: want a positive number, got -1"),
        ({"std": float("nan")}, "std: want a positive number, got nan"),
        ({"input_rms": None}, "input_rms: want a positive number, got None"),
        ({"seed": "x"}, r"seed: want an integer from 0 to 2\*\*62 - 1, got 'x'"),
        ({"seed": True}, "got True"),
        ({"seed": 2**70}, "seed: want an integer from 0"),
        ({"std": True}, "std: want a positive number, got True"),
        ({"backbone": "x"}, r"backbone: no submodel 'x'; there are 'llm' \(llama\)"),
        ({"modules": 3}, "modules: want paths, globs or modules, got int 3"),
        ({"modules": nn.Linear(2, 2)}, "modules: a Linear that is not part of this model"),
        ({"modules": "nothing.here"}, "no module's path matches 'nothing.here'"),
    ],
)
def test_options_that_cannot_be_used(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        hfpatch.plan(SpeechLLM(tiny_model("llama")), options=options(**settings))


def test_weights_that_are_not_loaded_and_several_language_models() -> None:
    assert "are on meta (not loaded, or offloaded)" in decision(SpeechLLM(tiny_model("llama")).to("meta")).reason
    model = nn.ModuleDict({"proj": nn.Linear(24, 32), "a": tiny_model("llama"), "b": tiny_model("gpt2")})
    assert "is unknown: set the option backbone" in decision(model).reason
    assert decision(model, options=options(backbone="b")).decided == "applied"


def test_trained_speech_llm_of_the_cases_is_trained() -> None:
    assert not default_init(trained_speech_llm(tiny_model("llama")).speech_proj)


# --- what speaks for a projector, and what its module puts out ---


class Pooler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(32, 32)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(h))


class Shift(nn.Module):
    """A modulation by 1 + tanh, with a linear layer of the embeddings' width."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(24, 32)

    def forward(self, h: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return h * (1 + torch.tanh(self.proj(c)))


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: nn.Sequential(nn.Linear(32, 32), nn.Tanh()),
    "pooler": Pooler,
    "mlp": lambda: nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)),
    "time": lambda: nn.Sequential(nn.Linear(1, 32), nn.SiLU(), nn.Linear(32, 32)),
    "contrast": lambda: nn.Linear(8, 32),
    "prefix": lambda: nn.Linear(8, 32),
    "shift": Shift,
}


@pytest.mark.parametrize("name", OTHERS)
def test_layers_for_which_nothing_speaks_are_not_drawn_unasked(name: str) -> None:
    model = nn.ModuleDict({name: OTHERS[name](), "llm": tiny_model("llama")})
    before = fingerprint(model)
    assert decision(model).decided in ("opt-in", "not needed")
    made = hfpatch.apply(model, include="suggested", verbose=False).edits
    assert not [e for e in made if isinstance(e.change, SetTensor)]
    hfpatch.revert(model)
    assert fingerprint(model) == before


def test_a_projector_beside_all_of_them_is_the_one() -> None:
    model = SpeechLLM(tiny_model("llama"))
    for name, make in OTHERS.items():
        model.add_module(name, make())
    assert {e.path for e in decision(model).edits} == {"speech_proj"}
    assert decision(model).decided == "applied"


def test_a_layer_nothing_speaks_for_can_be_named() -> None:
    model = nn.ModuleDict({"prefix": nn.Linear(8, 32), "llm": tiny_model("llama")})
    assert "neither its name nor an encoder or a norm" in decision(model).reason
    assert {e.path for e in hfpatch.plan(model, only=ID).edits} == {"prefix"}
    assert decision(model, options=options(modules=model["prefix"])).decided == "applied"


def test_a_misfit_is_said_and_nothing_else_drawn() -> None:
    model = nn.ModuleDict({"proj": nn.Linear(24, 48), "prefix": nn.Linear(8, 32), "llm": tiny_model("llama")})
    found = decision(model)
    assert (found.decided, found.reason[:28]) == ("refused", "proj has 48 output features,")
    model["speech"] = nn.Linear(24, 32)
    found = decision(model)
    assert {e.path for e in found.edits} == {"speech"}
    assert "left as it is: proj has 48 output features" in found.reason


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(24, 32)
        self.b = nn.Linear(24, 32)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.a(h) * torch.sigmoid(self.b(h))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(24, 32)
        self.b = nn.Linear(32, 32)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        x = self.a(h)
        return x + self.b(torch.relu(x))


class Viewed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(24, 32)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.a(h), 0.1, self.training).transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize(
    "make", [Gated, Residual, lambda: nn.Sequential(nn.Linear(24, 32), nn.LayerNorm(32)), lambda: Refuses(Residual())]
)
def test_where_something_follows_the_layer_it_is_refused(make: Callable[[], nn.Module]) -> None:
    model = speech(make())
    found = decision(model)
    assert found.decided == "refused" or isinstance(model.speech_proj, Refuses)
    assert not found.edits or found.decided == "opt-in"
    if not isinstance(model.speech_proj, Refuses):
        assert "another operation follows, so the weight does not set the size of the outputs" in found.reason
        with pytest.raises(RefusedError, match="another operation follows"):
            hfpatch.apply(model, only=ID, options=options(modules="speech_proj"))


class Refuses(nn.Module):
    """Raises an exception of its own where it is not called as it wants to be."""

    class Mine(Exception):
        pass

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, _features: torch.Tensor) -> torch.Tensor:
        raise self.Mine


def test_a_projector_seen_through_views() -> None:
    assert decision(speech(Viewed())).decided == "applied"


def test_one_layer_that_cannot_be_run_alone_is_only_offered() -> None:
    found = decision(speech(Refuses(nn.Linear(24, 32))))
    assert (found.decided, "cannot be run alone" in found.reason) == ("opt-in", True)


def test_what_was_trained_since_stays_unless_the_patch_is_named(capsys: Any) -> None:
    model = SpeechLLM(tiny_model("llama"))
    old = model.speech_proj.weight.clone()
    fix = hfpatch.apply(model, verbose=False)
    trained(model.speech_proj, torch.optim.AdamW, 1e-3, 2)
    learned = copy.deepcopy(model.speech_proj)
    kept = copy.deepcopy(model)
    capsys.readouterr()
    fix.revert()
    assert "speech_proj was trained since projection-init and keeps its values" in capsys.readouterr().err
    assert torch.equal(model.speech_proj.weight, learned.weight)
    assert torch.equal(model.speech_proj.bias, learned.bias)
    assert (model.ln_speech.eps, bool(hfpatch.status(model))) == (1e-4, False)
    hfpatch.revert(kept, only=ID)
    assert torch.equal(kept.speech_proj.weight, old)
    assert hfpatch.status(kept).patches == ("embed-token-resolver", "eps-alignment")


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("slot", ["bias", "weight"])
def test_a_tensor_that_is_gone_or_of_another_shape_is_left_alone(slot: str, named: bool) -> None:
    model = SpeechLLM(tiny_model("llama"))
    fix = hfpatch.apply(model, only=ID, verbose=False)
    if slot == "bias":
        model.speech_proj.bias = None
    else:
        model.speech_proj.weight = nn.Parameter(torch.zeros(3, 5))
    if named:
        hfpatch.revert(model, only=ID)
    else:
        fix.revert()
    assert not hfpatch.status(model)
    assert slot == "bias" or torch.equal(model.speech_proj.weight, torch.zeros(3, 5))
