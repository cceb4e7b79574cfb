"""Cases 21 and 32: towers whose float16 stream overflows, in models of transformers and in hand-written ones."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel, HubertModel

import hfpatch
from hfpatch.errors import RefusedError
from hfpatch.lab.example import example_inputs
from hfpatch.lab.overflow import overflow
from hfpatch.lab.tiny import tiny_config, tiny_model, tiny_of_class
from hfpatch.lab.towers import holding
from hfpatch.patching.verifying.case import Case
from hfpatch.patching.verifying.trial import build
from tests.test_branch_overflow import packed

STREAM = "fp16-residual-overflow"


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float(((got.float() - exact).norm() / exact.norm()).item())


def half(batch: dict[str, Any]) -> dict[str, Any]:
    return {k: v.half() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in batch.items()}


def failing(holder: str, tower: str) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    """Return a model whose tower overflows, in float16 and in float32 with the same weights, and a batch."""
    model = holding(holder, tower, 8)
    if hasattr(model.config, "vision_feature_layer"):
        model.config.vision_feature_layer = -1  # the last layer, so that the fault reaches the logits
    batch = example_inputs(model)
    return *spoiled(model, batch, tower), batch


def spoiled(model: nn.Module, batch: dict[str, Any], tower: str) -> tuple[nn.Module, nn.Module]:
    """Make a tower overflow on a batch; return the model in float16, and in float32 with the same weights."""
    overflow(model, batch, tower)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())
    return copy.deepcopy(model).half(), model


def fix(model: nn.Module) -> hfpatch.Applied:
    return hfpatch.apply(model, verbose=False, only=STREAM)


def gradients(model: nn.Module, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the gradients of the mean squared logit in float32, by the largest loss scale that keeps them finite."""
    for scale in (2.0**12, 2.0**8, 2.0**4, 1.0):
        model.zero_grad(set_to_none=True)
        (model(**batch).logits.float().square().mean() * scale).backward()
        found = {n: p.grad.float() / scale for n, p in model.named_parameters() if p.grad is not None}
        if all(bool(g.isfinite().all()) for g in found.values()):
            return found
    raise AssertionError("no loss scale keeps the gradients finite")


def distance(got: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], within: str) -> float:
    """Return the relative L2 distance of all gradients below a path."""
    names = [n for n in exact if n.startswith(within)]
    return error(torch.cat([got[n].flatten() for n in names]), torch.cat([exact[n].flatten() for n in names]))


SLOW = pytest.mark.slow
TOWERS = (
    ("llava", "clip_vision_model", "model.vision_tower"),  # read raw, by a projector
    ("qwen2_audio", "qwen2_audio_encoder", "model.audio_tower"),  # clamps
    pytest.param("aya_vision", "siglip_vision_model", "model.vision_tower", marks=SLOW),
    pytest.param("mistral3", "pixtral", "model.vision_tower", marks=SLOW),
    pytest.param("internvl", "internvl_vision", "model.vision_tower", marks=SLOW),  # with learned scales
    pytest.param("qwen2_vl", "qwen2_vl_vision", "model.visual", marks=SLOW),
)


@pytest.mark.parametrize(("holder", "tower", "path"), TOWERS)
def test_a_tower_is_cured(holder: str, tower: str, path: str) -> None:
    """Stock is wrong; patched, logits and gradients are nearer to float32 than those of bfloat16."""
    model, exact, batch = failing(holder, tower)
    bfloat16 = copy.deepcopy(exact).bfloat16()
    rough_batch = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()}
    with torch.no_grad():
        known, rough, stock = exact(**batch).logits, bfloat16(**rough_batch).logits, model(**half(batch)).logits
        assert not stock.isfinite().all() or error(stock, known) > error(rough, known)
        applied = fix(model)
        assert {d.submodel: d.decided for d in applied.plan.decisions}[path] == "applied"
        assert error(model(**half(batch)).logits, known) < error(rough, known) / 3
    slopes = gradients(exact, batch)
    mine = gradients(model, half(batch))
    assert distance(mine, slopes, path) < distance(gradients(bfloat16, rough_batch), slopes, path)
    applied.revert()
    with torch.no_grad():
        assert torch.equal(model(**half(batch)).logits.nan_to_num(), stock.nan_to_num())


class Captioner(nn.Module):
    """A hand-written composite: CLIP's image tower, a linear projector, a language model."""

    def __init__(self) -> None:
        super().__init__()
        config = CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=8,
            num_attention_heads=4,
            image_size=16,
            patch_size=4,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.eyes, self.bridge = CLIPVisionModel(config).eval(), nn.Linear(32, 32)
            nn.init.normal_(self.bridge.weight, std=0.02)
        self.llm = tiny_model("llama")

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor | None = None) -> Any:
        embeds = self.llm.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            seen = self.bridge(self.eyes(pixel_values=pixel_values).last_hidden_state)
            embeds = torch.cat([seen.to(embeds.dtype), embeds], dim=1)
        return self.llm(inputs_embeds=embeds)


@pytest.fixture
def captioner(ids: torch.Tensor) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "pixel_values": pixels}
    return *spoiled(Captioner(), batch, "clip_vision_model"), batch


@pytest.mark.slow
def test_a_tower_in_a_hand_written_model(captioner: Any, ids: torch.Tensor) -> None:
    """The projector reads CLIP's raw stream; a batch without images runs as before."""
    model, exact, batch = captioner
    with torch.no_grad():
        known = exact(**batch).logits
        assert not model(**half(batch)).logits.isfinite().all()
        applied = fix(model)
        assert {d.submodel for d in applied.plan.decisions if d.decided == "applied"} == {"eyes", "llm"}
        assert error(model(**half(batch)).logits, known) < 3e-3
        assert error(model(input_ids=ids).logits, exact(input_ids=ids).logits) < 3e-3
    assert not any(
        isinstance(row.reason, str) and row.decided == "refused" for row in hfpatch.plan(model, only=STREAM).decisions
    )


@pytest.mark.parametrize("lora_first", [True, False])
def test_lora_on_a_tower(captioner: Any, lora_first: bool) -> None:
    model, exact, batch = captioner
    model.eyes.requires_grad_(False)

    def adapted(root: nn.Module) -> None:
        config = LoraConfig(r=2, target_modules=["q_proj", "fc1", "fc2"], init_lora_weights=False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model: Any = root
            model.eyes = get_peft_model(model.eyes, config, autocast_adapter_dtype=False)

    adapted(exact)
    if lora_first:
        adapted(model)
        model.eyes.half()
    fix(model)
    if not lora_first:
        adapted(model)
        model.eyes.half()
    known, mine = gradients(exact, batch), gradients(model, half(batch))
    with torch.no_grad():
        assert error(model(**half(batch)).logits, exact(**batch).logits) < 6e-3
    assert distance(mine, known, "eyes") < 5e-2


def test_a_copied_and_a_pickled_tower(captioner: Any) -> None:
    model, _, batch = captioner
    fix(model)
    with torch.no_grad():
        mine = model(**half(batch)).logits
        pickled = io.BytesIO()
        torch.save(model, pickled)
        pickled.seek(0)
        for other in (copy.deepcopy(model), torch.load(pickled, weights_only=False)):
            assert torch.equal(other(**half(batch)).logits, mine)
            assert len(hfpatch.status(other).records) == len(hfpatch.status(model).records)
            hfpatch.revert(other)
            assert not other(**half(batch)).logits.isfinite().all()


def test_a_compiled_tower_is_refused_by_name(captioner: Any) -> None:
    model, _, batch = captioner
    model.eyes.compile(backend="eager")
    with torch.no_grad():
        model(**half(batch))
    rows = {d.submodel: d for d in hfpatch.plan(model, only=STREAM).decisions}
    assert rows["eyes"].decided == "refused"
    assert "compile" in rows["eyes"].reason


@pytest.fixture(scope="module")
def llava() -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    return failing("llava", "clip_vision_model")


class TestOddTowers:
    def decided(self, model: nn.Module, **words: Any) -> dict[str | None, Any]:
        return {d.submodel: d for d in hfpatch.plan(model, only=STREAM, **words).decisions}

    def test_a_batch_without_images_says_that_the_tower_did_not_run(self, llava: Any) -> None:
        model, _, batch = llava
        ids = batch["input_ids"].masked_fill(batch["input_ids"] == model.config.image_token_id, 1)
        found = self.decided(model, batch={"input_ids": ids})
        assert found["model.vision_tower"].reason.endswith("; it did not run on this batch")
        assert "x on this batch" in found["model.language_model"].reason
        seen = self.decided(model, batch=half(batch))["model.vision_tower"]
        assert "of 65,504 in model.vision_tower." in seen.reason

    @pytest.mark.parametrize("kind", ["frozen", "quantised", "not in memory"])
    def test_it_is_served(self, llava: Any, kind: str) -> None:
        model, master, batch = copy.deepcopy(llava[0]), *llava[1:]
        tower = model.get_submodule("model.vision_tower")
        if kind == "frozen":
            tower.requires_grad_(False)
        elif kind == "quantised":
            for name in ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"):
                packed(tower, name)
        else:
            tower.to("meta")
        assert self.decided(model)["model.vision_tower"].decided == "applied"
        if kind != "not in memory":
            fix(model)
            with torch.no_grad():
                got, exact = model(**half(batch)).logits, master(**batch).logits
            assert error(got, exact) < (0.05 if kind == "quantised" else 5e-3)

    def test_a_quantised_projector_that_reads_its_stream_is_refused_by_name(self, llava: Any) -> None:
        model = copy.deepcopy(llava[0])
        packed(model.get_submodule("model.multi_modal_projector"), "linear_1")
        found = self.decided(model)["model.vision_tower"]
        assert (found.decided, found.worst) == ("refused", True)
        why = "linear_1.weight is quantised (torch.int8) and cannot be computed with in float32"
        assert found.reason == f"model.multi_modal_projector.{why}"


class Coded(torch.Tensor):
    """A tensor class that says float16 and holds codes, as a quantiser's does."""


@pytest.mark.parametrize(
    ("patch", "architecture", "name"), [("fp32-lm-head", "llama", "lm_head"), (STREAM, "olmo2", "q_proj")]
)
def test_a_weight_of_a_quantisers_tensor_class_is_refused_by_name(patch: str, architecture: str, name: str) -> None:
    model = tiny_model(architecture).half()
    for path, module in model.named_modules():
        if path.endswith(name):
            module.weight = nn.Parameter(module.weight.detach().as_subclass(Coded), requires_grad=False)
    (found,) = hfpatch.plan(model, only=patch).decisions
    assert found.decided == "refused"
    assert f"{name}.weight is quantised (tests's Coded) and cannot be computed with in float32" in found.reason


@pytest.mark.slow
def test_a_tower_that_is_float32_or_harmless_has_a_row_that_says_so() -> None:
    model = tiny_model("blip-2").half()
    rows = {d.submodel: (d.decided, d.code) for d in hfpatch.plan(model, only=STREAM).decisions}
    assert rows["vision_model"][0] == rows["language_model"][0] == "applied"
    assert rows["qformer"] == ("not needed", "harmless")
    model.vision_model.float()
    rows = {d.submodel: d.decided for d in hfpatch.plan(model, only=STREAM).decisions}
    assert "vision_model" not in rows


@pytest.mark.slow
def test_a_named_patch_is_refused_for_a_tower_alone_however_often_it_is_applied() -> None:
    """Where it is proved it is applied, and stays applied; the tower that it is not proved for is named."""
    model = tiny_model("fun_asr_nano").half()
    first = fix(model)
    assert {d.submodel for d in first.plan.of("applied")} == {"", "model.language_model"}
    assert [d.submodel for d in first.plan.of("refused")] == ["model.audio_tower"]
    records = len(hfpatch.status(model).records)
    again = fix(model).plan
    assert again.edits == ()
    assert [d.submodel for d in again.of("refused")] == ["model.audio_tower"]
    assert [(d.code, d.already) for d in again.of("not needed")] == [
        ("already-applied", len(first.plan.of("applied")[0].edits))
    ]
    assert len(hfpatch.status(model).records) == records
    hfpatch.revert(model)
    with pytest.raises(RefusedError, match="fun_asr_nano_encoder"):  # nothing of it is in force, and nothing can be
        fix(model.model.audio_tower)


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    ["olmo2", "gemma4_text", "megatron-bert", "mamba", "dbrx"],
)
def test_layers_of_other_shapes(architecture: str, ids: torch.Tensor) -> None:
    """Branches that read the raw stream or begin with a norm, layers that cast the stream: logits and gradients."""
    trial = build(Case(architecture, "float16", layers=16, overflow=True))
    model, exact, batch = trial.model, trial.master, {"input_ids": ids}
    rough = copy.deepcopy(exact).bfloat16()
    with torch.no_grad():
        assert not model(**batch).logits.isfinite().all()
        fix(model)
        known = exact(**batch).logits
        assert error(model(**batch).logits, known) < error(rough(**batch).logits, known)
    slopes = gradients(exact, batch)
    assert distance(gradients(model, batch), slopes, "") < distance(gradients(rough, batch), slopes, "")


@pytest.mark.slow
def test_flags_that_choose_the_layers_of_a_tower() -> None:
    """HuBERT's and Wav2Vec 2.0's large models have norms before the branches, the small ones after them."""
    for stable, decided in ((False, "not needed"), (True, "applied")):
        config = tiny_config("hubert", do_stable_layer_norm=stable, conv_bias=True)
        model = tiny_of_class(HubertModel, config).half()
        (row,) = hfpatch.plan(model, only=STREAM).decisions
        assert row.decided == decided
