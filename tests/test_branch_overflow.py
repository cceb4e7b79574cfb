"""Values inside a feed-forward part that float16 cannot hold: scaled by a power of two, or computed in float32."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import hfpatch
from hfpatch.inspecting.branch_ends import branch_ends
from hfpatch.lab.branch_overflow import branch_overflow
from hfpatch.lab.tiny import rescale, tiny_model
from hfpatch.model.survey import Survey
from hfpatch.numerics.float32_inside import Float32Inside, for_float32_inside, plain
from hfpatch.patching.verifying.need import measure
from tests.fingerprint import fingerprint
from tests.sampling import first_quick, slow
from tests.test_cli import hfpatch as hfpatch_cli
from tests.test_trace_cli import save

ID, STREAM = "fp16-branch-overflow", "fp16-residual-overflow"
IDS = (torch.arange(24).reshape(2, 12) * 7 + 3) % 64
BATCH = {"input_ids": IDS}
LOSS_SCALE = 128.0
SCALED, INSIDE, MAPS = (
    {"branch scale", "map scale"},
    {"compute dtype inside", "input compute dtype"},
    {"input compute dtype"},
)
KINDS = {
    "llama": SCALED,
    "gemma3_text": SCALED,
    "phi3": SCALED,
    "mixtral": SCALED,
    "gpt2": INSIDE,
    "bloom": INSIDE,
    "opt": MAPS,
}
"""Architecture -> how its parts and the last maps of its attentions are changed.

Gated, with one fused map, experts; with biases; in the layer itself.
"""


END = dict.fromkeys(KINDS, ".self_attn.o_proj") | {
    "gpt2": ".attn.c_proj",
    "bloom": ".self_attention.dense",
    "opt": ".self_attn.out_proj",
}
"""Architecture -> the end of the path of an attention's last map."""


@cache
def overflowing(architecture: str) -> Any:
    """A model in float32 whose weights float16 holds, and three of whose branches it does not."""
    model = tiny_model(architecture)
    if architecture == "mixtral":
        rescale(model, {"*mlp.gate.weight": 100.0}, {})  # no token near a tie of two experts
    branch_overflow(model, BATCH)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.half().float()


def half(architecture: str) -> Any:
    return copy.deepcopy(overflowing(architecture)).half()


def apply(model: Any) -> hfpatch.Applied:
    return hfpatch.apply(model, verbose=False, batch=BATCH, only=ID)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**BATCH).logits.float()


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float(((got - exact).norm() / exact.norm()).item())


def gradients(model: Any, scale: float = 1.0) -> torch.Tensor:
    model.zero_grad()
    (model(**BATCH).logits.float().square().mean() * scale).backward()
    named = sorted((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)
    return torch.cat([g.float().flatten() / scale for _, g in named])


def of(plan: Any, patch: str = ID) -> Any:
    (decision,) = [d for d in plan.decisions if d.patch == patch]
    return decision


@pytest.mark.parametrize("architecture", [n if n in ("llama", "gpt2", "opt") else slow(n) for n in KINDS])
def test_outputs_and_gradients_are_those_of_float32(architecture: str) -> None:
    master, model = overflowing(architecture), half(architecture)
    exact, true = logits(master), gradients(copy.deepcopy(master))
    bfloat16 = copy.deepcopy(master).bfloat16()
    assert not logits(model).isfinite().all()
    before = fingerprint(model)
    fix = apply(model)
    assert {e.slot for e in of(fix.plan).edits} == KINDS[architecture]
    ends = [e.path for e in of(fix.plan).edits if e.path.endswith(END[architecture])]
    assert len(ends) == 1
    assert error(logits(model), exact) < error(logits(bfloat16), exact) / 4
    assert error(gradients(model, LOSS_SCALE), true) < error(gradients(bfloat16), true) / 2
    model.zero_grad()
    fix.revert()
    assert fingerprint(model) == before


def lora(model: Any, dtype: torch.dtype, **words: Any) -> Any:
    names = ["c_fc", "c_proj"] if hasattr(model, "transformer") else ["gate_proj", "up_proj", "down_proj", "o_proj"]
    config = LoraConfig(r=4, target_modules=names, fan_in_fan_out=hasattr(model, "transformer"), **words)
    adapted = get_peft_model(model, config, autocast_adapter_dtype=False).eval()
    for at, (name, parameter) in enumerate(sorted(adapted.named_parameters())):
        if "lora_" in name:
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(at)) / 4
            parameter.data = noise.half().to(dtype)
    return adapted


@pytest.mark.parametrize("autocast", first_quick([False, True]), ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("first", ["adapter first", "patch first"])
@pytest.mark.parametrize("architecture", first_quick(["llama", "gpt2"]))
def test_adapters_of_the_maps(architecture: str, first: str, dtype: torch.dtype, autocast: bool) -> None:
    exact = logits(lora(copy.deepcopy(overflowing(architecture)), torch.float32))
    assert error(logits(overflowing(architecture)), exact) > 0.5  # the adapter does a lot
    model = half(architecture)
    if first == "patch first":
        apply(model)
    model = lora(model, dtype)
    if first == "adapter first":
        apply(model)
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        assert error(logits(model), exact) < 5e-3


def test_an_adapter_with_a_bias() -> None:
    """A bias after the scaled activation would be scaled up: finite and wrong."""
    exact = logits(lora(copy.deepcopy(overflowing("llama")), torch.float32, lora_bias=True))
    late = half("llama")
    apply(late)
    with pytest.raises(hfpatch.errors.RefusedError, match=r"its down_proj adds lora_B\.default\.bias since"):
        logits(lora(late, torch.float32, lora_bias=True))
    early = lora(half("llama"), torch.float32, lora_bias=True)
    fix = apply(early)
    assert {e.slot for e in of(fix.plan).edits} == {"compute dtype inside", "map scale"}
    assert error(logits(early), exact) < 5e-3


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_gradient_checkpointing_changes_nothing(architecture: str, reentrant: bool) -> None:
    model = half(architecture)
    apply(model)
    plain_gradients = gradients(model, LOSS_SCALE)
    model.train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert torch.equal(gradients(model, LOSS_SCALE), plain_gradients)


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_compiled(architecture: str) -> None:
    model = half(architecture)
    apply(model)
    layers = model.transformer.h if architecture == "gpt2" else model.model.layers
    del layers[2:]
    eager = logits(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(2):
        assert torch.equal(logits(compiled), eager)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("way", first_quick(["eager", "batched_mm", "grouped_mm"]))
@pytest.mark.parametrize("architecture", ["mixtral", "gpt_oss"])
def test_experts_in_each_implementation(architecture: str, way: str) -> None:
    """gpt-oss clamps before its product, so there only what the last weights write can pass."""
    master = tiny_model(architecture)
    first = {"*layers.1.*gate_up_proj": 60.0}
    router = {"*mlp.gate.weight": 0.0} if architecture == "mixtral" else {"*router.weight": 0.0}  # no ties to break
    rescale(master, {**first, "*layers.1.*experts.down_proj": 1e5, **router}, {})
    master.config._experts_implementation = way
    master = master.half().float()
    exact, model = logits(master), copy.deepcopy(master).half()
    assert not logits(model).isfinite().all()
    apply(model)
    assert error(logits(model), exact) < error(logits(copy.deepcopy(master).bfloat16()), exact) / 3


def test_a_forward_that_does_not_run_the_activation_raises() -> None:
    model = half("llama")
    apply(model)
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: mlp.down_proj(nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    with pytest.raises(hfpatch.errors.RefusedError, match="its act_fn did not run"):
        logits(model)


def test_an_activation_outside_a_call_of_its_part_is_as_before() -> None:
    model = half("llama")
    act = model.model.layers[1].mlp.act_fn
    x = torch.ones(3).half()
    stock = act(x)
    apply(model)
    assert torch.equal(act(x), stock)


class Packed(nn.Linear):
    """A linear layer with int8 weights and a scale per row, as quantised layers have."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        wide = layer.weight.data.float()
        self.rows = nn.Buffer((wide.abs().amax(1, keepdim=True) / 127).half())
        self.weight = nn.Parameter((wide / self.rows.float()).round().to(torch.int8), requires_grad=False)
        self.bias = layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = nn.functional.linear(x.half(), self.weight.half() * self.rows.half())
        return out if self.bias is None else out + self.bias


def packed(model: Any, name: str) -> Any:
    for module in list(model.modules()):
        if isinstance(getattr(module, name, None), nn.Linear):
            setattr(module, name, Packed(getattr(module, name)))
    return model


def test_quantised_maps_are_scaled_or_refused_by_name() -> None:
    """The scale lies outside of a quantised map; float32 inside of it is impossible.

    Such a map casts to float16 itself, in a measurement too, which then sees no further.
    """
    model = packed(half("llama"), "down_proj")
    assert not logits(model).isfinite().all()
    assert [e.path for e in of(hfpatch.plan(model, batch=BATCH)).edits] == ["model.layers.1.mlp"]
    hfpatch.apply(model, include=[ID], verbose=False)
    assert error(logits(model), logits(overflowing("llama"))) < 0.05
    plain_mlp = packed(half("opt"), "fc2")
    decision = of(hfpatch.plan(plain_mlp, batch=BATCH))
    assert decision.decided == "refused"
    assert "fc2.weight is quantised" in decision.reason
    assert decision.worst


class TestAttention:
    """What an attention's last map writes passes 65,504, and nothing else does."""

    @staticmethod
    @cache
    def master(architecture: str, scaled: str = "*layers.1.self_attn.o_proj.weight") -> Any:
        model = tiny_model(architecture)
        rescale(model, {"*v_proj.weight": 30.0, scaled: 1e4 if "v_proj" in scaled else 2e5}, {})
        return model.half().float()

    def half(self, architecture: str, *scaled: str) -> Any:
        return copy.deepcopy(self.master(architecture, *scaled)).half()

    @pytest.mark.parametrize("batch", [BATCH, None], ids=["measured", "by name"])
    def test_only_what_needs_it_is_changed(self, batch: Any) -> None:
        model, exact = self.half("llama"), logits(self.master("llama"))
        assert not logits(hfpatch.apply(copy.deepcopy(model), verbose=False).model).isfinite().all()
        fix = hfpatch.apply(model, include=ID, batch=batch, verbose=False)
        edits = [(e.path, e.slot) for e in of(fix.plan).edits]
        if batch is None:
            assert len(edits) == 8  # of four layers
        else:
            assert edits == [("model.layers.1.self_attn.o_proj", "map scale")]
            assert "1 of 4 attention outputs come near 65,504; the largest value reaches" in of(fix.plan).reason
        assert error(logits(model), exact) < 2e-3

    def test_an_adapter_that_came_later_gets_its_input_as_it_is(self) -> None:
        config = LoraConfig(r=4, target_modules=["o_proj"], init_lora_weights=False)
        model = self.half("llama")
        apply(model)
        torch.manual_seed(0)
        late = get_peft_model(model, config)
        torch.manual_seed(0)
        exact = get_peft_model(copy.deepcopy(self.master("llama")), config)
        late.model.load_state_dict(exact.model.state_dict())
        with exact.disable_adapter():
            without = logits(exact)
        assert error(without, logits(exact)) > 0.1  # the adapter does a lot
        assert error(logits(late), logits(exact)) < 2e-3
        late.merge_adapter()
        assert error(logits(late), logits(exact)) < 2e-3

    def test_a_bias_that_came_later_raises(self) -> None:
        model = self.half("llama")
        apply(model)
        model.model.layers[1].self_attn.o_proj.bias = nn.Parameter(torch.ones(32).half())
        with pytest.raises(hfpatch.errors.RefusedError, match="a Linear runs scaled by a power of two, and has a bias"):
            logits(model)

    def test_a_map_before_it_that_overflows_is_named(self) -> None:
        model = self.half("llama", "*layers.1.self_attn.v_proj.weight")
        decision = of(hfpatch.plan(model, batch=BATCH))
        assert (decision.decided, decision.worst) == ("refused", True)
        assert decision.reason.startswith("v_proj, which no patch serves, reaches")
        assert decision.reason.endswith("of 65,504 in model.layers.1.self_attn.v_proj")

    def test_a_quantised_map_is_scaled_or_refused_by_name(self) -> None:
        model = packed(self.half("llama"), "o_proj")
        hfpatch.apply(model, include=ID, verbose=False)
        assert error(logits(model), logits(self.master("llama"))) < 0.05
        biased = packed(self.half("opt", "*layers.1.self_attn.out_proj.weight"), "out_proj")
        decision = of(hfpatch.plan(biased, batch=BATCH))
        assert decision.decided == "refused"
        assert "self_attn.out_proj.weight is quantised and cannot be computed in float32" in decision.reason

    def test_a_map_whose_weight_is_used_directly_is_none_of_them(self) -> None:
        """Hooks of such a map would not run."""
        model = tiny_model("llama")
        survey = Survey(model)
        (stack,) = survey.stacks[""]
        assert [p for p, _ in branch_ends(stack, survey.modules)] == [
            f"model.layers.{i}.self_attn.o_proj" for i in range(4)
        ]
        holders = {**survey.modules, "model.layers.0.self_attn": nn.MultiheadAttention(4, 2)}
        assert len(list(branch_ends(stack, holders))) == 3


class TestNeed:
    def test_a_plan_says_what_is_reached(self) -> None:
        plan = hfpatch.plan(half("llama"), batch=BATCH)
        assert of(plan).decided == "applied"
        assert "2 of 4 feed-forward parts and 1 of 4 attention outputs come near 65,504" in of(plan).reason
        assert "of 65,504 in model.layers.2.self_attn.o_proj" in of(plan).reason
        edited = ["model.layers.1.mlp", "model.layers.3.mlp", "model.layers.2.self_attn.o_proj"]
        assert [e.path for e in of(plan).edits] == edited
        assert "of 65,504 in model.layers.3" in of(plan, STREAM).reason

    def test_without_need_it_stays_opt_in_and_says_the_room(self) -> None:
        model = tiny_model("llama").half()
        plan = hfpatch.plan(model, batch=BATCH)
        assert (of(plan).decided, of(plan).suggested, of(plan).worst) == ("opt-in", False, False)
        assert "x on this batch" in of(plan).reason
        assert of(plan, STREAM).decided == "applied"
        assert "x on this batch" in of(plan, STREAM).reason
        hfpatch.apply(model, batch=BATCH, verbose=False)
        assert ID not in hfpatch.status(model).patches

    def test_without_a_batch_it_is_opt_in(self) -> None:
        model = half("llama")
        decision = of(hfpatch.plan(model))
        assert (decision.decided, decision.worst) == ("opt-in", False)
        assert "hfpatch.apply(model, batch=batch) measures it" in decision.reason
        hfpatch.apply(model, include=[ID], verbose=False)
        assert logits(model).isfinite().all()

    def test_what_is_in_force_stays(self) -> None:
        model = half("llama")
        apply(model)
        for plan in (hfpatch.plan(model), hfpatch.plan(model, batch=BATCH)):
            decision = of(plan)
            assert (decision.decided, decision.already, decision.otherwise) == ("not needed", 3, "")

    @pytest.mark.parametrize("architecture", ["llama", "gpt2"])
    def test_measuring_changes_nothing_and_sees_through_the_patch(self, architecture: str) -> None:
        model = half(architecture).train()
        before, random = fingerprint(model), torch.get_rng_state()
        first = measure(model, BATCH)
        assert fingerprint(model) == before
        assert torch.equal(torch.get_rng_state(), random)
        apply(model)
        again = measure(model, BATCH)
        assert again.values == pytest.approx(first.values, rel=1e-3)

    def test_a_batch_that_does_not_run_is_one_sentence(self) -> None:
        model = half("llama")
        before = fingerprint(model)
        with pytest.raises(hfpatch.errors.InputError, match=r"plan\(batch=\): LlamaForCausalLM does not run on this"):
            hfpatch.plan(model, batch={"input_ids": IDS, "nonsense": torch.ones(1), "position_ids": torch.ones(5)})
        with pytest.raises(hfpatch.errors.InputError, match=r"plan\(batch=\): batch must hold the model's keyword"):
            hfpatch.plan(model, batch=IDS)  # type: ignore[arg-type]
        assert fingerprint(model) == before

    def test_a_mask_is_not_a_value(self) -> None:
        padded = {**BATCH, "attention_mask": torch.ones_like(IDS).index_fill(1, torch.tensor([0, 1]), 0)}
        peaks = measure(tiny_model("gpt2").half(), padded)
        assert max(v for path, v in peaks.values.items() if "attn" in path) < 100

    def test_from_a_terminal(self, tmp_path: Path) -> None:
        model = tiny_model("llama", pad_token_id=None)
        branch_overflow(model, BATCH)
        folder, text = save(model.half(), tmp_path / "model"), tmp_path / "text"
        text.write_text("".join(map(chr, range(ord(" "), ord(" ") + 60))))
        ran = hfpatch_cli("plan", str(folder), "--text", str(text), "--only", ID, "--json")
        (decision,) = [d for d in json.loads(ran.stdout)["decisions"] if d["patch"] == ID]
        assert (ran.returncode, decision["decision"]) == (0, "applied")
        assert "come near 65,504; the largest value reaches" in decision["reason"]


class TestNeeds:
    def test_a_patch_brings_what_it_needs(self) -> None:
        model = half("llama")
        fix = apply(model)
        assert {d.patch for d in fix.plan.of("applied")} == {ID, STREAM}
        assert logits(model).isfinite().all()

    def test_without_it_it_is_refused(self) -> None:
        model = half("llama")
        decision = of(hfpatch.plan(model, exclude=[STREAM], batch=BATCH))
        assert (decision.decided, decision.code, decision.edits) == ("refused", "needs-another", ())
        assert f"it needs {STREAM}" in decision.reason

    def test_in_force_is_enough(self) -> None:
        model = half("llama")
        hfpatch.apply(model, only=STREAM, verbose=False)
        assert of(hfpatch.plan(model, exclude=[STREAM], batch=BATCH)).decided == "applied"


class TestFloat32Inside:
    def half(self) -> torch.Tensor:
        return torch.tensor([60_000.0, 2.0]).half()

    def test_everything_computes_in_float32(self) -> None:
        x, weight = for_float32_inside(self.half()), torch.full((1, 2), 2.0).half()
        with torch.autocast("cpu", torch.float16):
            results = (x @ weight.T, nn.functional.linear(x, weight), torch.cat([x, weight[0]]) * 2, x.chunk(2)[0] * 2)
        assert all(isinstance(r, Float32Inside) and r.dtype is torch.float32 for r in results)
        assert [float(plain(r)[0]) for r in results] == [120_004.0, 120_004.0, 120_000.0, 120_000.0]
        assert type(plain((results[0],))[0]) is torch.Tensor

    def test_it_is_not_narrowed(self) -> None:
        x = for_float32_inside(self.half()) * 2
        casts = (x.half(), x.to(torch.float16), x.to(dtype=torch.float16), x.to(self.half()), x.type_as(self.half()))
        assert all(float(plain(c)[0]) == 120_000.0 for c in casts)
        assert x.to(torch.int32).dtype is torch.int32

    def test_what_it_writes_to_is_written(self) -> None:
        x = for_float32_inside(torch.ones(2, 2).half())
        own, wide = torch.zeros(3, 2).half(), torch.zeros_like(x)
        own.index_add_(0, torch.tensor([0, 2]), x)
        own[1] = x[0] * 3
        own += x[0]
        wide.index_add_(0, torch.tensor([0, 1]), x * 2)
        assert own.tolist() == [[2, 2], [4, 4], [2, 2]]
        assert plain(wide).tolist() == [[2, 2], [2, 2]]

    def test_gradients_reach_half_weights(self) -> None:
        weight = nn.Parameter(torch.ones(1, 2).half())
        plain(nn.functional.linear(for_float32_inside(self.half()), weight)).sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [[60_000.0, 2.0]]
