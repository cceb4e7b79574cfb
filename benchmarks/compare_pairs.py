"""Thirty planted pairs of models, over five architectures, in float32: what `compare` names, and two other ways.

    OMP_NUM_THREADS=1 python benchmarks/compare_pairs.py

Beside `compare`: the first mismatch of the hashes of torch's DebugMode, and the first module whose output differs, as a
diff of captured activations shows it. Both run A and B from end to end. They name an operation or a module and no
cause, so they count as right where that is the planted module.
"""

from __future__ import annotations

import argparse
import copy
import logging
import time
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from common import Row, cpu_name, header, median, table, write_json
from torch import nn
from torch.nn import functional

import hfpatch
from hfpatch.testing import example_inputs, tiny_model

Plant = Callable[[Any], Any]


@dataclass(frozen=True)
class Pair:
    """A planted difference.

    Attributes:
        architecture: Of the tiny model.
        name: The difference in a few words.
        plant: Changes B in place.
        kind: Kind of the fact that is the cause.
        place: Path and name of that fact; of a class and of attention, the path of the module.
    """

    architecture: str
    name: str
    plant: Plant
    kind: str
    place: str

    @property
    def module(self) -> str | None:
        """Path of the module whose own code parts; None if only rounding differs."""
        if self.kind == "attention":
            return None
        if self.kind == "config":
            return "model" if self.place == "sliding_window" else ""
        return self.place if self.kind == "class" else self.place.rpartition(".")[0]


def part(path: str) -> Callable[[Any], Any]:
    """Return a function that gets a module by its path."""
    return lambda model: model.get_submodule(path)


def scaled(path: str, name: str = "weight", by: float = 1.0001) -> Plant:
    """Multiply a weight."""

    def plant(model: Any) -> None:
        with torch.no_grad():
            getattr(part(path)(model), name).mul_(by)

    return plant


def drawn(path: str, name: str = "weight") -> Plant:
    """Leave a weight as a new model has it: the key of the checkpoint did not match."""

    def plant(model: Any) -> None:
        with torch.no_grad():
            getattr(part(path)(model), name).normal_(0, 0.02)

    return plant


def attribute(path: str, name: str, value: Any) -> Plant:
    """Set an attribute of a module."""
    return lambda model: setattr(part(path)(model), name, value)


def configured(name: str, value: Any) -> Plant:
    """Set a value of the config."""
    return lambda model: setattr(model.config, name, value)


def half(path: str, name: str) -> Plant:
    """Round a buffer to bfloat16."""

    def plant(model: Any) -> None:
        module = part(path)(model)
        setattr(module, name, getattr(module, name).bfloat16())

    return plant


def based(path: str, name: str, factor: float) -> Plant:
    """Compute rotary frequencies from another base."""

    def plant(model: Any) -> None:
        module = part(path)(model)
        value = getattr(module, name)
        steps = torch.arange(len(value)) / len(value)
        setattr(module, name, value * factor**-steps)

    return plant


def training(model: Any) -> None:
    """Leave the whole model in training mode."""
    model.train()


def attending(name: str) -> Plant:
    """Choose another attention implementation."""
    return lambda model: model.set_attn_implementation(name)


def without_padding_mask(model: Any) -> None:
    """Forget the padding in the text model's forward."""
    inner = model.model
    stock = type(inner).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(self, *args, **{**kwargs, "attention_mask": None})

    inner.forward = types.MethodType(forward, inner)


def replaced(path: str, name: str, cls: Callable[[], nn.Module]) -> Plant:
    """Put a module of another class in the place of one."""
    return lambda model: setattr(part(path)(model), name, cls())


def summed(path: str) -> Plant:
    """Add gate and up in place of multiplying them."""

    def plant(model: Any) -> None:
        module = part(path)(model)

        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))

        module.forward = types.MethodType(forward, module)

    return plant


def centred(path: str) -> Plant:
    """Give a norm another class, which subtracts the mean."""

    def plant(model: Any) -> None:
        module = part(path)(model)

        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            return functional.layer_norm(x, x.shape[-1:], self.weight, None, self.variance_epsilon)

        module.__class__ = type("Centred", (type(module),), {"forward": forward})

    return plant


def untied(model: Any) -> None:
    """Give the head weights of its own, as a resume without ties does."""
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 1.001)


L, T, H = "model.layers", "encoder.block", "transformer.h"
ROTARY, NORM = "model.rotary_emb", f"{L}.1.input_layernorm"
FEED, CROSS = f"{T}.1.layer.1.DenseReluDense", "decoder.block.1.layer.1.EncDecAttention"
BIAS, LAST = f"{T}.0.layer.0.SelfAttention.relative_attention_bias", "decoder.final_layer_norm"
EPS, QUERIES, EMBED, GATE = "variance_epsilon", f"{L}.3.self_attn.q_norm", "model.embed_tokens", f"{L}.0.mlp.gate"
PAIRS = (
    Pair("llama", "a weight", scaled(f"{L}.2.mlp.down_proj"), "weight", f"{L}.2.mlp.down_proj.weight"),
    Pair("llama", "an eps", attribute(NORM, EPS, 1e-5), "eps", f"{NORM}.{EPS}"),
    Pair("llama", "a buffer's dtype", half(ROTARY, "inv_freq"), "buffer", f"{ROTARY}.inv_freq"),
    Pair("llama", "a rotary base", based(ROTARY, "inv_freq", 2.0), "buffer", f"{ROTARY}.inv_freq"),
    Pair("llama", "a mask without padding", without_padding_mask, "class", "model"),
    Pair("llama", "a class body", summed(f"{L}.1.mlp"), "class", f"{L}.1.mlp"),
    Pair("gemma3_text", "an eps", attribute(QUERIES, "eps", 1e-5), "eps", f"{QUERIES}.eps"),
    Pair("gemma3_text", "a sliding window", configured("sliding_window", 4), "config", "sliding_window"),
    Pair("gemma3_text", "a soft-cap", configured("final_logit_softcapping", 30.0), "config", "final_logit_softcapping"),
    Pair("gemma3_text", "an attention implementation", attending("sdpa"), "attention", f"{L}.0.self_attn"),
    Pair("gemma3_text", "an activation", replaced(f"{L}.2.mlp", "act_fn", nn.GELU), "class", f"{L}.2.mlp.act_fn"),
    Pair("gemma3_text", "a scale", scaled(EMBED, "embed_scale", 1.01), "buffer", f"{EMBED}.embed_scale"),
    Pair("gpt2", "dropout left on", training, "dropout", "transformer.drop.p"),
    Pair("gpt2", "an eps", attribute(f"{H}.2.ln_2", "eps", 1e-4), "eps", f"{H}.2.ln_2.eps"),
    Pair("gpt2", "a missed key", drawn(f"{H}.2.mlp.c_fc"), "weight", f"{H}.2.mlp.c_fc.weight"),
    Pair("gpt2", "a bias", drawn(f"{H}.1.attn.c_attn", "bias"), "weight", f"{H}.1.attn.c_attn.bias"),
    Pair("gpt2", "a scale of attention", attribute(f"{H}.0.attn", "scaling", 0.2), "attribute", f"{H}.0.attn.scaling"),
    Pair("gpt2", "a head that is tied no more", untied, "weight", "lm_head.weight"),
    Pair("mixtral", "experts", scaled(f"{L}.1.mlp.experts", "down_proj"), "weight", f"{L}.1.mlp.experts.down_proj"),
    Pair("mixtral", "a router", scaled(f"{L}.2.mlp.gate", by=1.01), "weight", f"{L}.2.mlp.gate.weight"),
    Pair("mixtral", "experts per token", attribute(GATE, "top_k", 1), "attribute", f"{GATE}.top_k"),
    Pair("mixtral", "an eps", attribute("model.norm", EPS, 1e-6), "eps", f"model.norm.{EPS}"),
    Pair("mixtral", "a rotary base", based(ROTARY, "inv_freq", 100.0), "buffer", f"{ROTARY}.inv_freq"),
    Pair("mixtral", "another class of a norm", centred(f"{L}.3.input_layernorm"), "class", f"{L}.3.input_layernorm"),
    Pair("t5", "a weight", scaled(f"{FEED}.wo"), "weight", f"{FEED}.wo.weight"),
    Pair("t5", "an eps", attribute(LAST, EPS, 1e-5), "eps", f"{LAST}.{EPS}"),
    Pair("t5", "dropout left on", training, "dropout", "encoder.dropout.p"),
    Pair("t5", "a relative bias", scaled(BIAS, by=1.01), "weight", f"{BIAS}.weight"),
    Pair("t5", "a missed key", drawn(f"{CROSS}.v"), "weight", f"{CROSS}.v.weight"),
    Pair("t5", "an activation", replaced(FEED, "act", nn.GELU), "class", f"{FEED}.act"),
)  # fmt: skip


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="architecture or name of the pairs to run")
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()
    import transformers

    transformers.logging.set_verbosity(50)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    facts = header("Planted pairs: where two models part", cpu_name(), "torch", "transformers", "hfpatch")
    rows = [judged(p) for p in PAIRS if args.only in f"{p.architecture} {p.name}"]
    facts["pairs"] = rows
    table("What is named", rows)
    counts = {way: [r[way] for r in rows] for way in ("compare", "DebugMode", "activations")}
    facts["sum"] = [
        {"way": way, "rightly": sum(v == "right" for v in found), "wrongly": sum(v == "wrong" for v in found),
         "missed": sum(v == "missed" for v in found), "of": len(found)}
        for way, found in counts.items()
    ]  # fmt: skip
    table(
        "In all",
        facts["sum"],
        "`compare`: the cause and its value; DebugMode and activations: the module, and no cause.",
        "Where only rounding differs (an attention implementation), right is to say so; the others name a module.",
    )
    facts["cost"] = cost()
    table("Time, in forward passes of A", facts["cost"])
    write_json(args.json, facts)


def judged(pair: Pair) -> Row:
    """Return what each way says of a pair."""
    a = tiny_model(pair.architecture)
    batch = example_inputs(a)
    b = copy.deepcopy(a)
    b = pair.plant(b) or b
    torch.manual_seed(0)
    found = hfpatch.compare(a, b, batch)
    return {
        "architecture": pair.architecture,
        "difference": pair.name,
        "compare": of_compare(pair, found),
        "said": said(found),
        "DebugMode": of_module(pair, debugged(a, b, batch)),
        "activations": of_module(pair, activations(a, b, batch)),
    }


def said(found: hfpatch.Comparison) -> str:
    """Return the cause that was named."""
    if found.first is None:
        return "no more than rounding" if found.places else "bit for bit"
    return ", ".join(f"{f.kind} {f.place}".strip() for f in found.first.cause) or f"no cause in {found.first.title}"


def of_compare(pair: Pair, found: hfpatch.Comparison) -> str:
    """Return `right`, `wrong` or `missed`."""
    if pair.module is None:
        told = any(f.kind == pair.kind and f.place.startswith(pair.place) for f in found.facts)
        return "right" if told and not found else "wrong"
    if found.first is None:
        return "missed"
    causes = [f for f in found.first.cause if f.kind == pair.kind and f.place.startswith(pair.place)]
    return "right" if causes and len(causes) == len(found.first.cause) else "wrong"


def of_module(pair: Pair, named: str | None) -> str:
    """Return `right`, `wrong` or `missed`, for a way that names a module."""
    if named is None:
        return "right" if pair.module is None else "missed"
    return "right" if pair.module is not None and named == pair.module else "wrong"


def debugged(a: nn.Module, b: nn.Module, batch: dict[str, Any]) -> str | None:
    """Return the module in which DebugMode's logs first differ, in operation or hash; None if they do not."""
    from torch.utils._debug_mode import DebugMode

    logs: list[list[Any]] = []
    for model in (a, b):
        torch.manual_seed(0)
        with torch.no_grad(), DebugMode(record_nn_module=True) as mode, DebugMode.log_tensor_hashes():
            model(**batch)
        logs.append(list(mode.logs))
    inside: dict[int, str] = {}
    for one, other in zip(*logs, strict=False):
        depth = max(one.call_depth, other.call_depth)
        inside = {d: path for d, path in inside.items() if d < depth}
        if (tag := getattr(one, "tag", None)) is not None and tag == getattr(other, "tag", None):
            inside[depth] = tag.partition(".")[2]
            continue
        differ = str(getattr(one, "op", one)) != str(getattr(other, "op", other))
        hashes = [(getattr(log, "log", None) or {}).get("hash") for log in (one, other)]
        if differ or str(hashes[0]) != str(hashes[1]):
            return inside[max(inside)] if inside else ""
    return None


def activations(a: nn.Module, b: nn.Module, batch: dict[str, Any]) -> str | None:
    """Return the first module, in the order in which they return, whose output is not the same, bit for bit."""
    seen: list[list[tuple[str, Any]]] = []
    for model in (a, b):
        mine: list[tuple[str, Any]] = []

        def keep(path: str, mine: list[tuple[str, Any]] = mine) -> Any:
            def hook(_module: Any, _args: Any, output: Any) -> None:
                first = output[0] if isinstance(output, (tuple, list)) else output
                first = getattr(first, "logits", getattr(first, "last_hidden_state", first))
                if isinstance(first, torch.Tensor):
                    mine.append((path, first.clone()))

            return hook

        handles = [m.register_forward_hook(keep(p)) for p, m in model.named_modules()]
        torch.manual_seed(0)
        with torch.no_grad():
            model(**batch)
        for handle in handles:
            handle.remove()
        seen.append(mine)
    for (path, one), (_, other) in zip(*seen, strict=False):
        if one.shape != other.shape or not torch.equal(one, other):
            return path
    return None


def cost() -> list[Row]:
    """Return how long `compare` takes, in forward passes."""
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 8000,
             "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}  # fmt: skip
    a = tiny_model("llama", **sizes)
    batch = {"input_ids": torch.arange(256).reshape(2, 128) * 31 % 8000}
    weight = copy.deepcopy(a)
    scaled(f"{L}.4.mlp.down_proj")(weight)
    from hfpatch.model.cast_buffers import cast_buffers
    from hfpatch.model.survey import Survey

    bfloat = copy.deepcopy(a).bfloat16()
    for found in cast_buffers(Survey(bfloat)).cast:
        setattr(found.module, found.name, found.values)
    passes: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        with torch.no_grad():
            a(**batch)
        passes.append(time.perf_counter() - start)
    rows: list[Row] = []
    for name, b in (("a copy", copy.deepcopy(a)), ("one weight", weight), ("bfloat16", bfloat)):
        start = time.perf_counter()
        found = hfpatch.compare(a, b, batch)
        seconds = time.perf_counter() - start
        rows.append({"B": name, "parts": bool(found), "seconds": seconds, "forward passes": seconds / median(passes)})
    return rows


if __name__ == "__main__":
    main()
