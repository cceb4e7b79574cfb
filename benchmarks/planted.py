"""Planted faults: small models, each with one fault of which module, operation and cause are known.

A fault is one entry of `FAULTS`. `benchmarks/trace_faults.py` runs them.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

NAN, INF = float("nan"), float("inf")
Run = Callable[[Callable[..., Any]], Any]
"""Runs one step. It is passed a function that a tool may wrap around a loss: `watch(loss_fn)`."""


@dataclass(frozen=True)
class Fault:
    """A fault, and what a tool should say of it.

    Attributes:
        name: Unique.
        make: Returns the model and the function that runs one step of it.
        module: Path of the module whose code runs the operation; `loss()` for a watched loss outside the model.
        words: Each must be in the finding's operation or cause; alternatives are separated by `|`.
        phase: `forward`, `backward` or `raises`.
        symptom: The finding's symptom; empty if any will do.
        node: The backward function in which torch meets the fault; empty if there is none.
    """

    name: str
    make: Callable[[], tuple[nn.Module, Run]]
    module: str
    words: tuple[str, ...]
    phase: str = "backward"
    symptom: str = ""
    node: str = ""


# functions with a fault


class Bad(torch.autograd.Function):
    """Does nothing forward; its backward is NaN."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient * NAN


def bad(x: torch.Tensor) -> torch.Tensor:
    return Bad.apply(x)  # pyright: ignore[reportReturnType]


def root_at_zero(x: torch.Tensor) -> torch.Tensor:
    return x + (x * 0).sqrt()


def power_at_zero(x: torch.Tensor) -> torch.Tensor:
    return x + (x * 0) ** 0.5


def hidden_exp(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.detach() < INF, x, (x * 0 + 1e4).exp())


def hidden_root(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.detach() < INF, x, (x * 0).sqrt())


def hidden_log(x: torch.Tensor) -> torch.Tensor:
    return x + (x * 0).log().masked_fill(x.detach() < INF, 0.0)


def hidden_division(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.detach() < INF, x, 1 / (x * 0))


def harmless_then_bad(x: torch.Tensor) -> torch.Tensor:
    """The norm of a zero vector makes NaN in backward and masks it; the fault is another."""
    return bad(x + (x * 0).norm(dim=-1, keepdim=True))


SAYS: dict[Callable[..., Any], tuple[tuple[str, ...], str]] = {
    bad: (("Bad",), "BadBackward"),
    root_at_zero: (("sqrt", "at 0"), "SqrtBackward0"),
    power_at_zero: (("power", "at 0"), "PowBackward0"),
    hidden_exp: (("exp", "where", "0 x inf"), "ExpBackward0"),
    hidden_root: (("sqrt", "where"), "SqrtBackward0"),
}
"""What is to be said of a function, and the backward function in which it fails."""


# where they are planted: each changes the module at a path so that it runs a function, and returns the model

Plant = Callable[[Any, str, Callable[..., Any]], Any]


def first(values: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply a function to a tensor, or to the first of a tuple."""
    return (function(values[0]), *values[1:]) if isinstance(values, tuple) else function(values)


def after(model: Any, path: str, function: Callable[..., Any]) -> Any:
    """On its output."""
    module = model.get_submodule(path)
    old = module.forward
    module.forward = lambda *args, **kwargs: first(old(*args, **kwargs), function)
    return model


def before(model: Any, path: str, function: Callable[..., Any]) -> Any:
    """On its first input."""
    module = model.get_submodule(path)
    old = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if args:
            return old(function(args[0]), *args[1:], **kwargs)
        name = next(iter(kwargs))
        return old(**{**kwargs, name: function(kwargs[name])})

    module.forward = forward
    return model


def gated(model: Any, path: str, function: Callable[..., Any]) -> Any:
    """In a gated MLP, on the product of its branches, before the child in which it ends."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(function(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))

    mlp = model.get_submodule(path)
    mlp.forward = types.MethodType(forward, mlp)
    return model


def attention(kind: str) -> Plant:
    """In every attention module, on the output of sdpa or eager attention, before the child in which it ends."""

    def plant(model: Any, _: str, function: Callable[..., Any]) -> Any:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import eager_mask, sdpa_mask
        from transformers.models.llama.modeling_llama import eager_attention_forward

        inner: Any = sdpa_attention_forward if kind == "sdpa" else eager_attention_forward

        def attend(*args: Any, **kwargs: Any) -> Any:
            kwargs.setdefault("scaling", 0.3)
            return first(inner(*args, **kwargs), function)

        AttentionInterface.register(f"planted_{kind}", attend)
        AttentionMaskInterface.register(f"planted_{kind}", sdpa_mask if kind == "sdpa" else eager_mask)
        model.set_attn_implementation(f"planted_{kind}")
        return model

    return plant


def checkpointed(plant: Plant, *, reentrant: bool) -> Plant:
    """Under gradient checkpointing."""

    def both(model: Any, path: str, function: Callable[..., Any]) -> Any:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return plant(model.train(), path, function)

    return both


def adapted(plant: Plant) -> Plant:
    """In a model with LoRA whose B is not 0."""

    def both(model: Any, path: str, function: Callable[..., Any]) -> Any:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"]))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_()
        return plant(model, path, function)

    return both


def step(model: nn.Module, batch: dict[str, Any], scale: float = 1.0) -> Run:
    """One step on the model's own loss, or on the mean square of its first output."""

    def run(_: Callable[..., Any]) -> None:
        out: Any = model(**batch)
        loss = out if isinstance(out, torch.Tensor) else out["loss"] if "loss" in out else out[0]
        loss = loss if loss.dim() == 0 else loss.float().square().mean()
        (loss * scale).backward()

    return run


def owner(name: str, architecture: str, path: str, plant: Plant, function: Callable[..., Any]) -> Fault:
    """A tiny model of an architecture that runs a function in the module at a path; the fault is in its backward."""

    def make() -> tuple[nn.Module, Run]:
        from hfpatch.lab.example import example_inputs
        from hfpatch.testing import tiny_model

        model: Any = tiny_model(architecture)
        batch = example_inputs(model)
        model = plant(model, path, function)
        return model, step(model, batch)

    words, node = SAYS[function]
    return Fault(f"{name}, {architecture}", make, path, words, node=node)


# hand-written modules


class Do(nn.Module):
    """Linear, a function, and with `ends` a Linear."""

    def __init__(self, function: Callable[..., Any], ends: bool = False) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(8, 8), function
        self.out = nn.Linear(8, 8) if ends else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.function(self.inner(x)))


def stack(*middle: nn.Module, x: torch.Tensor | None = None, half: bool = False) -> tuple[nn.Module, Run]:
    """Return linear layers around some modules, which are `1`, `2`, ..."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), *middle, nn.Linear(8, 4))
    model = model.half() if half else model
    given = torch.randn(2, 3, 8) if x is None else x
    return model, step(model, {"input": given.half() if half else given})


def do(function: Callable[..., Any], **options: Any) -> Callable[[], tuple[nn.Module, Run]]:
    """A stack with one hand-written module in the middle, at `1`, that runs a function."""
    ends = options.pop("ends", False)
    return lambda: stack(Do(function, ends), **options)


class Own(nn.Module):
    """A model whose forward is a function of itself and its inputs."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, **inputs: Any) -> Any:
        return self.function(self, **inputs)


def own(
    function: Callable[..., Any], batch: Callable[[], dict[str, Any]], **parts: Callable[[], nn.Module]
) -> Callable[[], tuple[nn.Module, Run]]:
    def make() -> tuple[nn.Module, Run]:
        torch.manual_seed(0)
        model = Own(function, **{name: part() for name, part in parts.items()})
        return model, step(model, batch())

    return make


def linear() -> nn.Module:
    return nn.Linear(8, 8)


def rows() -> dict[str, Any]:
    return {"x": torch.randn(2, 3, 8)}


def skip_connection(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The model's own code uses the first block's output again, after the second."""
    first_out = model.a(x)
    return model.c(model.b(first_out) + root_at_zero(first_out))


def by_hand(reentrant: bool) -> Callable[..., torch.Tensor]:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = model.a(x)
        return model.c(checkpoint(model.b, x, use_reentrant=reentrant))

    return forward


def inside_checkpoint(reentrant: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """A block that checkpoints a function of its own."""
    return lambda x: checkpoint(lambda y: bad(y * 2) + 1, x, use_reentrant=reentrant)


def twice(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.c(model.a(x) + model.a(x * 2))


class Scale(nn.Module):
    """A hand-written RMS norm without an eps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))


def pool(model: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return model.c((model.a(x) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def pool_chosen(model: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return model.c(model.a(x)[mask].mean(0, keepdim=True))


def attend_masked(model: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = model.a(x) @ x.transpose(1, 2)
    weights = scores.masked_fill(~mask[:, None, :], -INF).softmax(-1)
    return model.c(weights @ x)


def padding_only() -> dict[str, Any]:
    return {"x": torch.randn(2, 3, 8), "mask": torch.tensor([[1, 1, 0], [0, 0, 0]])}


def nothing_chosen() -> dict[str, Any]:
    return {"x": torch.randn(2, 3, 8), "mask": torch.zeros(2, 3, dtype=torch.bool)}


def none_kept() -> dict[str, Any]:
    return {"x": torch.randn(2, 3, 8), "mask": torch.tensor([[True, True, False], [False, False, False]])}


# losses outside the model


def entropy(logits: torch.Tensor, hidden: bool = False) -> torch.Tensor:
    """The entropy of GRPO, with forbidden tokens: 0 x -inf."""
    forbidden = torch.arange(logits.shape[-1]) > logits.shape[-1] - 4
    logp = logits.masked_fill(forbidden, -INF).log_softmax(-1)
    terms = logp.exp() * logp
    return -(terms.masked_fill(forbidden, 0) if hidden else terms).sum(-1).mean()


class TooShort(nn.Module):
    """CTC over fewer frames than labels."""

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        logp = logits.log_softmax(-1).transpose(0, 1)
        frames = torch.full((logits.shape[0],), 3)
        labels = torch.ones(logits.shape[0], 5, dtype=torch.long) * torch.arange(1, 6)
        return functional.ctc_loss(logp, labels, frames, torch.full_like(frames, 5))


def outside(loss_fn: Callable[[], Callable[..., Any]], watched: bool = True) -> Callable[[], tuple[nn.Module, Run]]:
    """A Llama whose loss is computed outside of it."""

    def make() -> tuple[nn.Module, Run]:
        from hfpatch.testing import tiny_model

        model = tiny_model("llama")
        ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))
        loss = loss_fn()

        def run(watch: Callable[..., Any]) -> None:
            (watch(loss) if watched else loss)(model(input_ids=ids).logits).backward()

        return model, run

    return make


# batches with a fault, and calls that raise


def spoiled(name: str, key: str, **overrides: Any) -> Callable[[], tuple[nn.Module, Run]]:
    """An architecture with a NaN in one tensor of the batch; `inputs_embeds` takes the place of the ids."""

    def make() -> tuple[nn.Module, Run]:
        from hfpatch.lab.example import example_inputs
        from hfpatch.testing import tiny_model

        model: Any = tiny_model(name, **overrides)
        batch = dict(example_inputs(model))
        if key == "inputs_embeds":
            batch[key] = model.get_input_embeddings()(batch.pop("input_ids")).detach()
        batch[key] = batch[key].clone()
        batch[key].view(-1)[5] = NAN
        return model, step(model, batch)

    return make


def given(
    name: str, change: Callable[[Any, dict[str, Any]], Any], **overrides: Any
) -> Callable[[], tuple[nn.Module, Run]]:
    """An architecture whose model and batch are changed so that forward raises."""

    def make() -> tuple[nn.Module, Run]:
        from hfpatch.lab.example import example_inputs
        from hfpatch.testing import tiny_model

        model = tiny_model(name, **overrides)
        batch = dict(example_inputs(model))
        change(model, batch)
        return model, step(model, batch)

    return make


def float32_embeds(model: Any, batch: dict[str, Any]) -> None:
    batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids")).detach()
    model.half()


def id_too_large(_: Any, batch: dict[str, Any]) -> None:
    batch["input_ids"] = batch["input_ids"].clone()
    batch["input_ids"][0, 2] = 64


def label_too_large(_: Any, batch: dict[str, Any]) -> None:
    batch["labels"] = batch["labels"].clone()
    batch["labels"][0, 2] = 99


def too_long(_: Any, batch: dict[str, Any]) -> None:
    for key in batch:
        batch[key] = torch.ones(1, 600, dtype=torch.long)


def one_cast(path: str) -> Callable[[Any, dict[str, Any]], None]:
    return lambda model, _: model.get_submodule(path).half()


def on_meta(path: str) -> Callable[[Any, dict[str, Any]], None]:
    return lambda model, _: model.get_submodule(path).to("meta")


def speech(model: Any, audio: torch.Tensor, input_ids: torch.Tensor) -> Any:
    joined = torch.cat([model.proj(audio), model.llm.get_input_embeddings()(input_ids)], 1)
    return model.llm(inputs_embeds=joined, labels=torch.zeros(joined.shape[:2], dtype=torch.long))


def half_llama() -> nn.Module:
    from hfpatch.testing import tiny_model

    return tiny_model("llama").half()


def heard() -> dict[str, Any]:
    return {"audio": torch.randn(2, 3, 8), "input_ids": torch.randint(0, 64, (2, 5))}


def hidden_entropy(logits: torch.Tensor) -> torch.Tensor:
    return entropy(logits, hidden=True)


def whisper(spoil: bool = False, half: bool = False) -> tuple[nn.Module, Run]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=64, d_model=16, num_mel_bins=8, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_source_positions=20, pad_token_id=0,
        max_target_positions=20, decoder_start_token_id=1, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    features = torch.randn(2, 8, 40)
    if spoil:
        features[1, 2, 3] = NAN
    return model.half() if half else model, step(model, {"input_features": features, "labels": torch.ones(2, 5).long()})


def heard_too_little() -> tuple[nn.Module, Run]:
    """Fewer frames of audio than labels."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    torch.manual_seed(0)
    config = Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, conv_dim=(8, 8),
        conv_stride=(5, 4), conv_kernel=(5, 4), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        vocab_size=20, mask_time_prob=0.0,
    )  # fmt: skip
    model = Wav2Vec2ForCTC(config)
    return model, step(model, {"input_values": torch.randn(1, 200), "labels": torch.arange(1, 15)[None]})


def steep_mlp() -> tuple[nn.Module, Run]:
    """Under a loss scale, a factor in the MLP takes the gradient past float16."""
    from hfpatch.testing import tiny_model

    model = gated(tiny_model("llama").half(), f"{L1}.mlp", lambda x: x * (1 / 6e4) * 6e4)
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))
    return model, step(model, {"input_ids": ids, "labels": ids}, 2.0**16)


L1, L3 = "model.layers.1", "model.layers.3"
TOWER = "model.vision_tower.encoder.layers.0.mlp"
PEFT = "base_model.model.model.layers.1"
FAULTS: tuple[Fault, ...] = (
    # the owner of a backward fault
    owner("own Function before the last child", "llama", f"{L1}.mlp", gated, bad),
    owner("root between children", "qwen3", f"{L1}.mlp", gated, root_at_zero),
    owner("own Function in sdpa attention", "llama", f"{L3}.self_attn", attention("sdpa"), bad),
    owner("root in eager attention", "mistral", f"{L3}.self_attn", attention("eager"), root_at_zero),
    owner("own Function after all children", "gpt2", "transformer.h.1", after, bad),
    owner("root before the first child", "gpt2", "transformer.h.1.mlp", before, root_at_zero),
    owner("power after a child", "bert", "bert.encoder.layer.1.output", after, power_at_zero),
    owner("own Function before a child", "t5", "encoder.block.1.layer.1", before, bad),
    owner("root before a child", "whisper", "model.decoder.layers.1", before, root_at_zero),
    owner("own Function in a tower", "llava", TOWER, after, bad),
    owner("own Function around experts", "mixtral", f"{L1}.mlp", before, bad),
    owner("root in a mixer", "mamba", "backbone.layers.1.mixer", before, root_at_zero),
    owner("own Function in lora_A", "llama", f"{PEFT}.self_attn.q_proj.lora_A.default", adapted(after), bad),
    owner("root in base_layer", "gemma3_text", f"{PEFT}.mlp.down_proj.base_layer", adapted(before), root_at_zero),
    owner("own Function in a LoRA layer", "llama", f"{PEFT}.mlp.down_proj", adapted(before), bad),
    owner("own Function before an adapted child", "llama", f"{PEFT}.mlp", adapted(gated), bad),
    owner("checkpointed, own Function", "llama", f"{L1}.mlp", checkpointed(gated, reentrant=False), bad),
    owner("checkpointed, root", "opt", "model.decoder.layers.1", checkpointed(after, reentrant=True), root_at_zero),
    Fault(
        "checkpoint by hand around a block",
        own(by_hand(False), rows, a=linear, b=lambda: Do(bad, True), c=linear),
        "b",
        ("Bad",),
        node="BadBackward",
    ),
    Fault(
        "checkpoint by hand around a block, reentrant",
        own(by_hand(True), rows, a=linear, b=lambda: Do(bad, True), c=linear),
        "b",
        ("Bad",),
        node="BadBackward",
    ),
    Fault("checkpoint by hand in a block", do(inside_checkpoint(False), ends=True), "1", ("Bad",), node="BadBackward"),
    Fault(
        "checkpoint by hand in a block, reentrant",
        do(inside_checkpoint(True), ends=True),
        "1",
        ("Bad",),
        node="BadBackward",
    ),
    Fault(
        "a skip connection in the model's own code",
        own(skip_connection, rows, a=linear, b=linear, c=linear),
        "",
        ("sqrt",),
        node="SqrtBackward0",
    ),
    Fault(
        "a module that is called twice",
        own(twice, rows, a=lambda: Do(bad, True), c=linear),
        "a",
        ("Bad",),
        node="BadBackward",
    ),
    Fault(
        "after a NaN that backward itself masks", do(harmless_then_bad, ends=True), "1", ("Bad",), node="BadBackward"
    ),
    # hidden in forward
    owner("where() hides exp", "llama", f"{L1}.mlp", gated, hidden_exp),
    owner("where() hides a root", "phi3", f"{L1}.mlp", after, hidden_root),
    Fault("masked_fill() hides a log", do(hidden_log, ends=True), "1", ("log", "masked_fill"), node="LogBackward0"),
    Fault(
        "where() hides a division",
        do(hidden_division, ends=True),
        "1",
        ("division", "where"),
        node="ReciprocalBackward0",
    ),
    # causes
    Fault(
        "0 x -inf, in the model",
        own(lambda m, x: {"loss": entropy(m.a(x))}, rows, a=linear),
        "",
        ("multiplication", "0 x -inf is NaN"),
        "forward",
    ),
    Fault(
        "inf - inf",
        do(lambda x: (x * 0 + 1e30) * 1e30 - (x * 0 + 1e30) * 1e30),
        "1",
        ("multiplication", "1e+30 x 1e+30 exceeds"),
        "forward",
    ),
    Fault(
        "inf - inf of what was given",
        own(
            lambda m, x, y: m.a(x) + (y - y).sum(),
            lambda: {"x": torch.randn(2, 8), "y": torch.full((2, 8), -INF)},
            a=linear,
        ),
        "",
        ("subtraction", "-inf - -inf is NaN"),
        "forward",
    ),
    Fault("0 / 0", do(lambda x: (x * 0) / (x * 0)), "1", ("division", "0 / 0"), "forward", "division-by-zero"),
    Fault(
        "inf / inf",
        own(
            lambda m, x, y: m.a(x) + (y / y).sum(),
            lambda: {"x": torch.randn(2, 8), "y": torch.full((2, 8), -INF)},
            a=linear,
        ),
        "",
        ("division", "-inf / -inf is NaN"),
        "forward",
    ),
    Fault(
        "exp past float16",
        do(lambda x: (x * 0 + 20).exp(), half=True),
        "1",
        ("exp", "exp of 20 exceeds float16's 65,504"),
        "forward",
        "overflow",
    ),
    Fault("CTC with too few frames, wav2vec2", heard_too_little, "", ("ctc", "frames", "labels"), "forward"),
    Fault(
        "LayerNorm with eps 0 on a constant row",
        lambda: stack(Do(lambda x: x * 0 + 3.0), nn.LayerNorm(8, eps=0.0)),
        "2",
        ("layer norm", "eps", "0"),
        "forward",
        "zero-norm",
    ),
    Fault(
        "RMS norm without eps on a zero row",
        lambda: stack(Do(lambda x: x * 0), Scale()),
        "2",
        ("root", "0"),
        "forward",
        "zero-norm",
    ),
    Fault(
        "torch's RMS norm with eps 0 on a zero row",
        lambda: stack(Do(lambda x: x * 0), nn.RMSNorm(8, eps=0.0)),
        "2",
        ("0",),
        "forward",
        "zero-norm",
    ),
    Fault(
        "std of a constant row",
        do(lambda x: (x * 0 + 2 - 2.0) / (x * 0 + 2).std(-1, keepdim=True)),
        "1",
        ("division", "0 / 0", "std"),
        "forward",
    ),
    Fault(
        "normalize with eps 0 on a zero row",
        do(lambda x: functional.normalize(x * 0, dim=-1, eps=0.0)),
        "1",
        ("division", "0 / 0", "norm"),
        "forward",
    ),
    Fault(
        "cosine with eps 0 of a zero row",
        do(lambda x: x + functional.cosine_similarity(x * 0, x, dim=-1, eps=0.0)[..., None]),
        "1",
        ("division", "0 / 0", "norm"),
        "forward",
    ),
    Fault(
        "mean over a row of padding",
        own(pool, padding_only, a=linear, c=linear),
        "",
        ("division", "0 / 0", "sum"),
        "forward",
    ),
    Fault(
        "mean over nothing", own(pool_chosen, nothing_chosen, a=linear, c=linear), "", ("mean", "no element"), "forward"
    ),
    Fault(
        "softmax of a row of padding",
        own(attend_masked, none_kept, a=linear, c=linear),
        "",
        ("softmax", "masked"),
        "forward",
        "masked-row",
    ),
    Fault("log of 0", do(lambda x: (x * 0).log()), "1", ("log", "log of 0"), "forward", "out-of-domain"),
    Fault("power of 0", do(lambda x: (x * 0) ** -0.5), "1", ("power", "0"), "forward"),
    Fault(
        "a gradient past float16, llama MLP",
        steep_mlp,
        f"{L1}.mlp",
        ("mul", "exceeds float16's 65,504"),
        node="MulBackward0",
    ),
    # losses outside the model
    Fault(
        "entropy outside, watched",
        outside(lambda: entropy),
        "entropy()",
        ("multiplication", "0 x -inf is NaN"),
        "forward",
    ),
    Fault(
        "entropy outside, hidden, watched",
        outside(lambda: hidden_entropy),
        "hidden_entropy()",
        ("multiplication", "0 x -inf is NaN"),
        node="MulBackward0",
    ),
    Fault(
        "entropy outside, not watched",
        outside(lambda: entropy, False),
        "lm_head",
        ("outside the model", "NaN"),
        node="MulBackward0",
    ),
    Fault(
        "CTC outside, a module, watched", outside(TooShort), "TooShort()", ("ctc", "3 frames", "5 labels"), "forward"
    ),
    # NaN in the batch
    Fault(
        "NaN in input_features, whisper", lambda: whisper(spoil=True), "", ("input_features",), "forward", "bad-input"
    ),
    Fault(
        "NaN in inputs_embeds, llama", spoiled("llama", "inputs_embeds"), "", ("inputs_embeds",), "forward", "bad-input"
    ),
    Fault(
        "NaN in a nested batch",
        own(lambda m, batch: m.a(batch["audio"][0]), lambda: {"batch": {"audio": [torch.full((2, 8), NAN)]}}, a=linear),
        "",
        ("batch.audio.0",),
        "forward",
        "bad-input",
    ),
    # forward raises
    Fault(
        "a speech model with a float16 LLM",
        own(speech, heard, proj=lambda: nn.Linear(8, 32), llm=half_llama),
        "llm.model.layers.0.self_attn.q_proj",
        ("linear", "float32", "float16", "inputs_embeds"),
        "raises",
        "mixed-dtypes",
    ),
    Fault(
        "float32 inputs_embeds, float16 gpt2",
        given("gpt2", float32_embeds),
        "transformer.h.0.ln_1",
        ("layer", "float32", "float16"),
        "raises",
        "mixed-dtypes",
    ),
    Fault(
        "one part cast, bert",
        given("bert", one_cast("bert.encoder.layer.1.intermediate")),
        "bert.encoder.layer.1.intermediate.dense",
        ("linear", "float32", "float16"),
        "raises",
        "mixed-dtypes",
    ),
    Fault(
        "float32 features, float16 whisper",
        lambda: whisper(half=True),
        "model.encoder.conv1",
        ("conv", "float32", "float16"),
        "raises",
        "mixed-dtypes",
    ),
    Fault(
        "a width that does not fit",
        own(lambda m, x: m.c(m.a(x)), rows, a=lambda: nn.Linear(8, 6), c=linear),
        "c",
        ("linear", "6", "8"),
        "raises",
        "shape-mismatch",
    ),
    Fault(
        "a sum that does not broadcast",
        own(lambda m, x: m.a(x) + x[..., :5], rows, a=linear),
        "",
        ("add", "2x3x8", "2x3x5"),
        "raises",
        "shape-mismatch",
    ),
    Fault(
        "a token id past the table, llama",
        given("llama", id_too_large),
        "model.embed_tokens",
        ("embedding", "64", "input_ids"),
        "raises",
        "index-out-of-range",
    ),
    Fault(
        "a batch that is too long, opt",
        given("opt", too_long),
        "model.decoder.embed_positions",
        ("embedding",),
        "raises",
        "index-out-of-range",
    ),
    Fault(
        "a label past the classes, llama",
        given("llama", label_too_large),
        "",
        ("cross_entropy|cross entropy", "99", "64"),
        "raises",
        "index-out-of-range",
    ),
    Fault(
        "one part on another device, gpt2",
        given("gpt2", on_meta("transformer.h.1.mlp")),
        "transformer.h.1.mlp.c_fc",
        ("cpu", "meta"),
        "raises",
        "device-mismatch",
    ),
    Fault(
        "sdpa of two dtypes",
        own(lambda m, x: functional.scaled_dot_product_attention(m.a(x), m.a(x), m.a(x).half()), rows, a=linear),
        "",
        ("scaled_dot_product_attention", "float32", "float16"),
        "raises",
        "mixed-dtypes",
    ),
)
