"""verify: a reference that is float32 in truth, losses that are the model's own, a model that is left as it was."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForSequenceClassification

import hfpatch
from hfpatch.lab.tiny import SpeechLLM, tiny_config
from hfpatch.model.rebuilt import as_loaded, floating_buffers
from hfpatch.model.survey import Survey
from hfpatch.patching.verifying.lending import as_it_was, weights_as
from hfpatch.report.progress import patience
from hfpatch.testing import example_inputs, tiny_model
from tests.conftest import Ran
from tests.fingerprint import fingerprint
from tests.sampling import first_quick, slow

CASTS = {"half": torch.float16, "bfloat16": torch.bfloat16}
SHARP = ("gemma3_text", "deepseek_v3", "qwen3", "m2m_100")


def cast(model: Any, how: str) -> Any:
    return getattr(copy.deepcopy(model), how)()


def floats(batch: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in batch.items()}


def kl(exact: torch.Tensor, mine: torch.Tensor) -> float:
    p, q = exact.double().log_softmax(-1), mine.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def sharp(name: str) -> Any:
    """Attention that looks at few tokens, so that positions matter, and a head that tells them apart."""
    wide: dict[str, Any] = {} if name in ("deepseek_v3", "m2m_100") else {"head_dim": 64}
    if name == "gemma3_text":
        wide |= {"layer_types": ["full_attention"] * 4}
    model = tiny_model(name, max_position_embeddings=2048, **wide)
    if name == "deepseek_v3":
        model.set_experts_implementation("eager")  # the grouped one takes no float64
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.fill_(3)
            elif path.endswith(("q_proj.weight", "k_proj.weight", "q_b_proj.weight", "kv_a_proj_with_mqa.weight")):
                parameter.mul_(40)
        model.get_output_embeddings().weight.mul_(8)
    return model


def rounded_weights(model: Any, dtype: torch.dtype) -> Any:
    """In float64: the parameters and what a checkpoint holds rounded to a dtype, other buffers as they were made."""
    twin = copy.deepcopy(model)
    kept = set(twin.state_dict())
    with torch.no_grad():
        for path, tensor in [*twin.named_parameters(), *twin.named_buffers()]:
            if path in kept and tensor.is_floating_point():
                tensor.copy_(tensor.to(dtype))
    return twin.double()


@pytest.mark.parametrize("how", first_quick(CASTS))
@pytest.mark.parametrize("name", first_quick(SHARP))
def test_the_printed_kl_is_the_true_one(name: str, how: str) -> None:
    """The true one is measured in float64, with the buffers that the model had before it was cast."""
    model = sharp(name)
    batch: dict[str, Any] = {"input_ids": torch.randint(4, 64, (1, 500), generator=torch.Generator().manual_seed(0))}
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = batch["input_ids"]
    half = cast(model, how)
    with torch.no_grad():
        exact = rounded_weights(model, CASTS[how])(**batch).logits
        true = kl(exact, half(**batch).logits)
    found = hfpatch.verify(half, batch, runs=["as it is", "as loaded with dtype="])
    printed = found["as it is"].kl
    assert (true < 1e-6 and printed < 1e-6) or true / 1.5 <= printed <= true * 1.5, (true, printed)
    assert any("rounded to half precision" in note for note in found.notes)
    if name == "gemma3_text":
        assert found["as loaded with dtype="].kl < printed / 1.5


@pytest.mark.parametrize("how", first_quick(CASTS))
@pytest.mark.parametrize("name", ["llama", "gptj", "falcon_h1", "xglm", "gemma3", "qwen2_vl", "m2m_100"])
def test_buffers_are_rebuilt(name: str, how: str) -> None:
    """To the bit, also after a way back to float32; and those of a loaded model have the loader's dtypes and values."""
    model = tiny_model(name)
    exact = dict(model.named_buffers())
    for other in (cast(model, how), cast(model, how).float(), cast(cast(model, "bfloat16"), how)):
        found = [b for b in floating_buffers(Survey(other)) if b.state != "persistent"]
        assert found
        for buffer in found:
            assert buffer.exact is not None
            assert torch.equal(buffer.exact, exact[f"{buffer.path}.{buffer.name}"])
            assert buffer.state == "rounded" or torch.equal(buffer.value.float(), buffer.exact)
    assert {b.state for b in floating_buffers(Survey(model))} <= {"as made", "persistent"}


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "m2m_100"])
def test_as_loaded_is_what_the_loader_leaves(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    left = as_loaded(Survey(cast(model, "bfloat16")))
    assert left
    for (path, buffer), value in left.items():
        there = loaded.get_submodule(path).get_buffer(buffer)
        assert (there.dtype, torch.equal(there, value)) == (value.dtype, True)


class Sinusoids(nn.Module):
    """Takes no config: a user's own table of positions, before a linear layer."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.length, self.width = length, width
        angles = torch.arange(length)[:, None] * torch.exp(-torch.arange(0, width, 2) / width * math.log(10000))
        self.register_buffer("table", torch.cat([angles.sin(), angles.cos()], 1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.get_buffer("table")[: x.shape[1]].to(x.dtype)


class Composite(nn.Module):
    """Features with positions, before the text; the labels are those of the text."""

    def __init__(self, llm: Any) -> None:
        super().__init__()
        self.positions = Sinusoids(64, 24)
        self.ln = nn.LayerNorm(24, eps=1e-6)
        self.proj = nn.Linear(24, llm.config.hidden_size)
        self.llm = llm

    def forward(self, input_ids: torch.Tensor, features: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        heard = self.proj(self.ln(self.positions(features)))
        text = self.llm.get_input_embeddings()(input_ids)
        if labels is not None:
            labels = torch.cat([labels.new_full(heard.shape[:2], -100), labels], 1)
        return self.llm(inputs_embeds=torch.cat([heard, text.to(heard.dtype)], 1), labels=labels)


def test_a_table_of_the_users_own_is_rebuilt(ids: torch.Tensor) -> None:
    torch.manual_seed(0)
    model = Composite(tiny_model("llama")).eval()
    batch = {"input_ids": ids, "features": torch.randn(2, 48, 24).half().float(), "labels": ids}
    exact = rounded_weights(model, torch.float16)
    with torch.no_grad():
        loss = float(exact(**floats(batch, torch.float64)).loss)
    proof = hfpatch.verify(model.half(), floats(batch, torch.float16), runs=())
    assert proof.reference.loss == pytest.approx(loss, abs=1e-6)
    assert any("positions.table" in note for note in proof.notes)


def test_what_cannot_be_rebuilt_is_named(ids: torch.Tensor) -> None:
    """A dynamic table that grew, and a router's bias that the checkpoint holds."""
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny_model("llama", rope_parameters=scaled, max_position_embeddings=16)
    with torch.no_grad():
        model(input_ids=ids.repeat(1, 4))
    notes = hfpatch.verify(model.half(), {"input_ids": ids.repeat(1, 4)}, runs=()).notes
    (note,) = [n for n in notes if "cannot be rebuilt" in n]
    assert "model.rotary_emb.inv_freq" in note
    notes = hfpatch.verify(tiny_model("deepseek_v3").bfloat16(), {"input_ids": ids}, runs=()).notes
    (note,) = [n for n in notes if "stored with the weights" in n]
    assert "e_score_correction_bias" in note


OWN = ("llama", "t5", "mbart", "whisper", "qwen2_vl", "gemma3", "bert", "mixtral", "deepseek_v3", "m2m_100")


@pytest.mark.parametrize("how", first_quick(CASTS))
@pytest.mark.parametrize("name", OWN)
def test_the_loss_is_the_models_own(name: str, how: str) -> None:
    model = tiny_model(name)
    batch = example_inputs(model)
    half = cast(model, how)
    given = floats(batch, CASTS[how])
    with torch.no_grad():
        own = half(**given).loss.item()
        exact = rounded_weights(model, CASTS[how]).float()(**floats(given, torch.float32)).loss.item()
    proof = hfpatch.verify(half, given, runs="as it is")
    assert proof["as it is"].loss == own
    assert proof.reference.loss == pytest.approx(exact, abs=1e-5)


def test_what_experts_add_to_the_loss_is_shown_apart(ids: torch.Tensor) -> None:
    model = tiny_model("mixtral", output_router_logits=True)
    with torch.no_grad():
        out = model(input_ids=ids, labels=ids)
    proof = hfpatch.verify(model, {"input_ids": ids, "labels": ids}, runs=())
    assert proof.reference.loss == pytest.approx(out.loss.item(), abs=1e-6)
    assert proof.reference.auxiliary == pytest.approx(out.aux_loss.item(), abs=1e-6)
    assert any("auxiliary loss" in note for note in proof.notes)


def test_a_causal_model_without_labels_is_given_its_ids(ids: torch.Tensor) -> None:
    """Padding is no label, and is not compared."""
    model, mask = tiny_model("llama"), torch.ones_like(ids)
    mask[0, :5] = 0
    with torch.no_grad():
        own = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.item()
    proof = hfpatch.verify(model, {"input_ids": ids, "attention_mask": mask}, runs=())
    assert proof.reference.loss == pytest.approx(own, abs=1e-6)
    assert any("input_ids were given as labels" in note for note in proof.notes)
    assert any(note.startswith("17 tokens compared") for note in proof.notes)  # 6 of 7 real ones, and 11 of 12


@pytest.mark.parametrize("batch", [{}, {"labels": 1}])
def test_a_model_that_takes_no_labels_has_no_loss(batch: dict[str, Any], ids: torch.Tensor) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.llm = tiny_model("llama")

        def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": self.llm(input_ids=input_ids).logits}

    proof = hfpatch.verify(Bare(), {"input_ids": ids} | dict.fromkeys(batch, ids), runs="as it is")
    assert proof["as it is"].loss is None
    assert proof["as it is"].kl == 0
    assert any("no loss" in note for note in proof.notes)
    assert str(proof).splitlines()[2].split()[2] == "-"


@pytest.mark.parametrize("answer", ["tensor", "tuple", "rows"])
def test_other_outputs(answer: str, ids: torch.Tensor) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.llm = tiny_model("llama")

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            out = self.llm(input_ids=input_ids, labels=labels)
            return out.logits if answer == "tensor" else (out.loss, out.logits)

    if answer == "rows":
        model: Any = AutoModelForSequenceClassification.from_config(tiny_config("bert"))
        batch = {"input_ids": ids, "labels": torch.tensor([0, 1])}
        model.eval()
        loss = model(**batch).loss.item()
    else:
        model, batch = Other(), {"input_ids": ids, "labels": ids}
        loss = None if answer == "tensor" else model.llm(**batch).loss.item()
    proof = hfpatch.verify(model, batch, runs="as it is")
    assert proof["as it is"].loss == loss
    assert proof["as it is"].top1 == 1


def test_what_changes_the_function_is_scored_apart(ids: torch.Tensor) -> None:
    """A projector drawn anew is in place in every row, and what it did is a line with the loss before and after."""
    llm = tiny_model("gemma3_text")
    torch.manual_seed(0)
    model = Composite(llm).eval()
    batch = {"input_ids": ids, "features": torch.randn(2, 5, 24), "labels": ids}
    with torch.no_grad():
        before = model(**batch).loss.item()
    fix = hfpatch.apply(model, include="suggested", verbose=False)
    assert "projection-init" in {d.patch for d in fix.plan.of("applied")}
    with torch.no_grad():
        after = model(**batch).loss.item()
    for proof in (fix.verify(batch), hfpatch.verify(model, batch)):
        assert proof.reference.loss == pytest.approx(after, abs=1e-5)
        assert proof["after"].top1 == 1
        assert proof["after"].kl < 1e-9
        (change,) = [c for c in proof.changes if c.patch == "projection-init"]
        assert (change.before, change.after) == (pytest.approx(before, abs=1e-6), pytest.approx(after, abs=1e-6))
        assert "before" in str(change)
    fix.revert()
    with torch.no_grad():
        assert model(**batch).loss.item() == before


def test_lost_handle_and_handle_agree(gemma: Any, ids: torch.Tensor) -> None:
    fix = hfpatch.apply(gemma, verbose=False)
    runs = ["before", "after"]
    assert (
        hfpatch.verify(gemma, {"input_ids": ids}, runs=runs).to_dict()
        == fix.verify({"input_ids": ids}, runs=runs).to_dict()
    )


class ByHand(Composite):
    """Casts by hand, as speech LLMs in float16 do: the encoder and the LLM in half, what is between in float32."""

    def __init__(self, llm: Any, relative: bool) -> None:
        super().__init__(llm.half())
        self.encoder = nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.LayerNorm(24)).half()
        self.relative = relative

    def forward(self, input_ids: torch.Tensor, features: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        heard = self.proj(self.positions(self.encoder(features.half()).float()))
        text = self.llm.get_input_embeddings()(input_ids)
        heard = heard.to(text.dtype) if self.relative else heard.half()
        if labels is not None:
            labels = torch.cat([labels.new_full(heard.shape[:2], -100), labels], 1)
        return self.llm(inputs_embeds=torch.cat([heard, text], 1), labels=labels)


@pytest.mark.parametrize("relative", [True, False])
def test_casts_by_hand_run_in_every_row(relative: bool, ids: torch.Tensor) -> None:
    torch.manual_seed(0)
    model = ByHand(tiny_model("gemma3_text"), relative).eval()
    batch = {"input_ids": ids, "features": torch.randn(2, 5, 24), "labels": ids}
    with torch.no_grad():
        own = model(**batch).loss.item()
    runs = ["as it is", "bfloat16 weights", "float32 weights, float16 autocast"]
    proof = hfpatch.verify(model, batch, runs=runs)
    assert proof["as it is"].loss == own
    assert [r.finite for r in proof.rows] == [True] * 3
    assert all(r.kl < 1e-4 for r in proof.rows)
    assert any("the model's own casts stayed" in note for note in proof.notes)
    assert any("test_verify.py:" in note for note in proof.notes)


def test_what_cannot_run_in_float32_is_one_sentence(ids: torch.Tensor) -> None:
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.llm = tiny_model("llama").half()

        def forward(self, input_ids: torch.Tensor) -> Any:
            if self.llm.dtype != torch.float16:
                raise RuntimeError("this model wants float16\nand nothing else")
            return self.llm(input_ids=input_ids)

    with pytest.raises(hfpatch.errors.InputError, match=r"there is no reference: this model wants float16$"):
        hfpatch.verify(Stubborn(), {"input_ids": ids})


def test_a_row_that_cannot_run_is_a_note(ids: torch.Tensor) -> None:
    class Numpy(nn.Module):
        """numpy has no bfloat16."""

        def __init__(self) -> None:
            super().__init__()
            self.llm = tiny_model("llama")

        def forward(self, input_ids: torch.Tensor) -> Any:
            embeds = self.llm.get_input_embeddings()(input_ids)
            return self.llm(inputs_embeds=torch.from_numpy(embeds.numpy()))

    proof = hfpatch.verify(Numpy(), {"input_ids": ids}, runs=["as it is", "bfloat16 weights"])
    assert [r.finite for r in proof.rows] == [True, False]
    assert any(note.startswith("bfloat16 weights: does not run here") for note in proof.notes)


def test_shards_are_refused(ids: torch.Tensor, tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/x", rank=0, world_size=1)
    model = tiny_model("llama")
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(hfpatch.errors.InputError, match="before the model is sharded"):
        hfpatch.verify(model, {"input_ids": ids})


def test_nothing_applied_compares_dtypes(ids: torch.Tensor) -> None:
    model = tiny_model("llama")
    proof = hfpatch.apply(model, verbose=False).verify({"input_ids": ids})
    assert [r.name for r in proof.rows][:3] == ["as it is", "float16 weights", "bfloat16 weights"]
    assert proof["as it is"].kl == 0
    with torch.no_grad():
        exact = model(input_ids=ids).logits[:, :-1]
        for name, other in (("float16 weights", model.half()), ("bfloat16 weights", tiny_model("llama").bfloat16())):
            found = proof[name].kl
            assert 0 < found < kl(exact, other(input_ids=ids).logits[:, :-1]) * 1.5


def test_rows_are_chosen(ids: torch.Tensor) -> None:
    model, batch = tiny_model("llama"), {"input_ids": ids}
    assert [r.name for r in hfpatch.verify(model, batch, runs="bfloat16 weights").rows] == ["bfloat16 weights"]
    assert hfpatch.verify(model, batch, runs=[]).rows == ()
    with pytest.raises(hfpatch.errors.InputError, match=r"runs='bf16': no such row .* bfloat16 weights"):
        hfpatch.verify(model, batch, runs="bf16")
    with pytest.raises(hfpatch.errors.InputError, match="must be a name or names of rows"):
        hfpatch.verify(model, batch, runs=3)  # pyright: ignore[reportArgumentType]


def interrupted(where: str) -> Callable[..., None]:
    """A hook that raises once it is called in the dtype of a lent weight."""

    def hook(module: nn.Module, *_: Any) -> None:
        dtype = next(module.parameters()).dtype
        if str(dtype) == f"torch.{where}":
            raise KeyboardInterrupt

    return hook


@pytest.mark.parametrize("stop", ["", slow("float32"), "bfloat16"])
def test_the_model_is_left_as_it_was(stop: str, ids: torch.Tensor) -> None:
    """Dynamic rotary tables, modes, gradients, hooks and random states too; also after Ctrl-C."""
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    llm = tiny_model("llama", rope_parameters=scaled, max_position_embeddings=8, attention_dropout=0.5).half()
    model = get_peft_model(llm, LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.5))
    model.train()
    llm.model.layers[0].mlp.eval()
    hfpatch.apply(model, verbose=False)
    model(input_ids=ids[:, :4], labels=ids[:, :4]).loss.backward()
    grads = {n: (id(p.grad), p.grad.clone()) for n, p in model.named_parameters() if p.grad is not None}
    buffers = {n: (id(b), b.clone()) for n, b in model.named_buffers()}
    plain = {n: dict(m.__dict__) for n, m in model.named_modules()}
    handle = llm.model.layers[2].register_forward_pre_hook(interrupted(stop)) if stop else None
    was, random = fingerprint(model), torch.get_rng_state()
    if stop:
        with pytest.raises(KeyboardInterrupt):
            hfpatch.verify(model, {"input_ids": ids})
    else:
        hfpatch.verify(model, {"input_ids": ids})
    assert fingerprint(model) == was
    assert torch.equal(torch.get_rng_state(), random)
    assert {n: id(b) for n, b in model.named_buffers()} == {n: i for n, (i, _) in buffers.items()}
    assert all(torch.equal(b, buffers[n][1]) for n, b in model.named_buffers())
    now = {n: (id(p.grad), p.grad) for n, p in model.named_parameters() if p.grad is not None}
    assert {n: i for n, (i, _) in now.items()} == {n: i for n, (i, _) in grads.items()}
    assert all(torch.equal(g, grads[n][1]) for n, (_, g) in now.items())
    for name, module in model.named_modules():
        assert list(module.__dict__) == list(plain[name])
        assert all(module.__dict__[k] is v for k, v in plain[name].items() if k != "_hfpatch")
    if handle is not None:
        handle.remove()


def test_weights_of_one_block_at_a_time_are_cast(ids: torch.Tensor) -> None:
    """What a block at rest holds takes no memory, and has the lent dtype for whoever asks."""
    model: Any = tiny_model("mixtral").half()
    layers = model.model.layers
    seen: list[list[int]] = []

    def look(*_: Any) -> None:
        seen.append([sum(p.data.untyped_storage().nbytes() for p in layer.parameters()) for layer in layers])

    for layer in layers:
        layer.mlp.register_forward_pre_hook(look)
    full = [sum(p.numel() * 4 for p in layer.parameters()) for layer in layers]
    with torch.no_grad(), weights_as(model, torch.float32):
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        model(input_ids=ids)
        part = layers[1].self_attn.q_proj
        assert part(torch.ones(1, 32)).isfinite().all()  # a part of a block called on its own
        assert part.weight.data.isnan().all()
    for at, sizes in enumerate(seen):
        assert sizes[at] == full[at]
        assert all(size < full[i] / 100 for i, size in enumerate(sizes) if i != at)


def test_weights_read_from_outside_of_their_layer(ids: torch.Tensor) -> None:
    """A model that uses the weights of its layers itself: all are cast at once, and that is said."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.llm = tiny_model("llama").half()

        def forward(self, input_ids: torch.Tensor) -> Any:
            scale = self.llm.model.layers[0].input_layernorm.weight.mean()
            return self.llm(inputs_embeds=self.llm.get_input_embeddings()(input_ids) * scale)

    proof = hfpatch.verify(Reads().eval(), {"input_ids": ids}, runs="as it is")
    assert proof.reference.finite
    assert proof["as it is"].kl < 1e-5
    assert any("all were cast at once" in note for note in proof.notes)


def test_codes_of_one_byte_are_no_weights_to_cast(ids: torch.Tensor) -> None:
    model: Any = tiny_model("llama").half()
    codes = nn.Parameter(torch.ones(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
    model.register_parameter("codes", codes)
    with weights_as(model, torch.float32):
        assert model.codes.dtype == torch.float8_e4m3fn
    proof = hfpatch.verify(model, {"input_ids": ids}, runs=())
    assert any("1 quantised weights" in note for note in proof.notes)


def test_batch_norms_run_in_float32(ids: torch.Tensor) -> None:
    """Buffers that a checkpoint holds follow the weights, or float32 would not run."""

    class Normed(SpeechLLM):
        def __init__(self) -> None:
            super().__init__(tiny_model("llama"))
            self.ln_speech = nn.BatchNorm1d(5)

    model = Normed().eval().half()
    batch = {"input_ids": ids, "features": torch.randn(2, 5, 24).half()}
    proof = hfpatch.verify(model, batch, runs=["as it is", "bfloat16 weights"])
    assert all(r.finite and r.kl < 1e-4 for r in proof.rows)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["parallel", "compiled"])
def test_wrapped_models(wrap: str, ids: torch.Tensor) -> None:
    inner = tiny_model("llama").half()
    wanted = hfpatch.verify(inner, {"input_ids": ids}, runs="bfloat16 weights")
    torch._dynamo.reset()
    model: Any = nn.DataParallel(inner) if wrap == "parallel" else torch.compile(inner, backend="eager")
    with torch.no_grad():
        model(input_ids=ids)
    found = hfpatch.verify(model, {"input_ids": ids}, runs="bfloat16 weights")
    assert found.rows == wanted.rows
    assert found.reference == wanted.reference
    assert any("without the compiler" in note for note in found.notes) == (wrap == "compiled")
    torch._dynamo.reset()


def test_every_row_draws_the_same_random_numbers(ids: torch.Tensor) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.llm = tiny_model("llama")

        def forward(self, input_ids: torch.Tensor) -> Any:
            embeds = self.llm.get_input_embeddings()(input_ids)
            return self.llm(inputs_embeds=embeds + torch.rand(embeds.shape[-1]).to(embeds.dtype))

    assert hfpatch.verify(Noisy(), {"input_ids": ids}, runs="as it is")["as it is"].kl == 0


def test_as_it_was_puts_back_what_a_forward_writes() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("seen", torch.zeros(2))
            self.count = 0

        def forward(self) -> None:
            self.count += 1
            self.new = 1
            self.get_buffer("seen").add_(1)
            self.register_buffer("later", torch.ones(1))

    model = Writes()
    with as_it_was(model):
        assert not model.training
        model()
    assert model.training
    assert model.count == 0
    assert not hasattr(model, "new")
    assert set(dict(model.named_buffers())) == {"seen"}
    assert model.get_buffer("seen").tolist() == [0, 0]


def test_what_takes_long_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    quick, slow = patience("verify"), patience("verify", first=0, every=1000)
    for tick in (quick, slow, slow):
        tick("row 2 of 3")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hfpatch: verify: row 2 of 3, 0 s so far")


def test_cases_for_a_gpu_are_skipped_without_one(here: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shown = here("verify", "cudnn-*", "--json").figures
    assert (shown["passed"], shown["skipped"]) == (True, 1)
    assert [c["skipped"] for c in shown["cases"] if c["text"] == "skipped: no GPU"] == [True]
    assert "1 skipped, no GPU" in here("verify", "cudnn-*").text


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a tiny Llama, with a tokenizer of its own."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder, unknown = tmp_path_factory.mktemp("llama"), "[UNK]"
    tiny_model("llama").save_pretrained(folder)
    words = {w: i for i, w in enumerate([unknown, "the", "harbour", "was", "quiet", "when", "first", "boats"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unknown).save_pretrained(folder)
    return folder


def test_verify_of_a_model_on_the_command_line(saved: Path, tmp_path: Path, here: Callable[..., Ran]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the harbour was quiet when the first boats was quiet")
    options = ("--text", text, "--device", "cpu", "--run", "as it is", "--run", "bfloat16 weights")
    shown = here("verify", saved, *options, "--json").figures
    assert [r["name"] for r in shown["rows"]] == ["as it is", "bfloat16 weights"]
    assert shown["rows"][0]["kl"] == 0
    assert 0 < shown["rows"][1]["kl"] < 1e-3
    assert "bfloat16 weights" in here("verify", saved, *options, "--dtype", "float16").stdout
    assert "a loss needs two" in here("verify", saved, "--tokens", 1, code=2).sentence
    assert "but eps-alignment is a patch" in here("verify", "eps-alignment", "--text", text, code=2).sentence
    assert "no such directory" in here("verify", tmp_path / "nowhere", code=2).sentence
    assert "(nor is there a directory" in here("verify", "eps-aligment", code=2).sentence


def test_a_checkpoint_that_is_not_finite_is_exit_1(saved: Path, tmp_path: Path, here: Callable[..., Ran]) -> None:
    import shutil

    folder = tmp_path / "broken"
    shutil.copytree(saved, folder)
    model: Any = tiny_model("llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    model.save_pretrained(folder)
    shown = here("verify", folder, "--device", "cpu", "--run", "as it is", "--json", code=1).figures
    assert shown["rows"][0]["loss"] is None
    assert any("float32 itself is not finite" in note for note in shown["notes"])


def test_where_a_class_rejects_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """What keeps its config is made again by itself; the rest is not rebuilt."""

    def reject(*_: Any) -> None:
        raise ValueError("no such size")

    monkeypatch.setattr("hfpatch.compat.initial.without_weights", reject)
    model = tiny_model("gemma3_text", rms_norm_eps=3e-6).half()  # of no other test: builds are kept by config
    states = {b.name: b.state for b in floating_buffers(Survey(model))}
    assert states["embed_scale"] == "changed"
    assert states["full_attention_inv_freq"] == "rounded"


@pytest.mark.parametrize("measure", ["verify", "need"])
def test_autograds_own_hooks_stay(measure: str) -> None:
    """DDP averages gradients in hooks on autograd's accumulators, which a parameter loses if its dtype changes."""
    model = tiny_model("gemma3_text").half()
    fired: list[str] = []
    kept = []  # autograd holds an accumulator only weakly
    for name, parameter in model.named_parameters():
        accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        accumulator.register_hook(lambda *_, name=name: fired.append(name))
        kept.append(accumulator)
    ids = torch.arange(12).reshape(1, 12) + 3
    before = dict(model.named_parameters())
    if measure == "verify":
        hfpatch.apply(model, verbose=False).verify({"input_ids": ids})
    else:
        hfpatch.plan(model, batch={"input_ids": ids})
    assert all(now is before[name] for name, now in model.named_parameters())
    model(input_ids=ids, labels=ids).loss.backward()
    assert sorted(fired) == sorted(before)
