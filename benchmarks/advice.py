"""What the tracer's advice is worth: faults planted in models of many kinds, traced; the advice followed on a copy.

    OMP_NUM_THREADS=1 python benchmarks/advice.py
    python benchmarks/advice.py --only llama "static cache"

Each row is a model with one planted fault and one call. It is traced; if a patch is advised, a fresh copy is patched by
that line, and the same call is made: it is *cured* if the trace finds nothing, output and gradients are finite, and the
output is near that of float32. If none is advised, every patch for the symptom is applied to a copy: the silence was
*right* if none of them cures it. Of the traced model every parameter, buffer, gradient, hook, attribute and random
state is compared before and after. Targets: all advice cures; no silence was wrong; nothing is changed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common import Row, cpu_name, header, table, write_json

STREAMS = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt2", "gpt_neox", "opt",
    "falcon", "bloom", "cohere", "stablelm", "starcoder2", "mixtral", "mbart", "t5", "pegasus", "smollm3",
)  # fmt: skip
NEAR = 2e-2
"""Largest relative distance of a cured output from float32."""


@dataclass(frozen=True)
class Planted:
    """A model with a fault, the call that shows it, and the same model in float32.

    Attributes:
        model: The model.
        inputs: Makes the arguments of the call, for a model.
        exact: The same weights in float32, for the reference; None if the fault is one of the backward pass.
        backward: Runs the backward pass of what the call returned; None for no gradients.
        autocast: Dtype of an autocast region.
        around: Wraps the model for the traced call, as DDP does.
        call: Makes the call; None for `model(**inputs)`.
    """

    model: Any
    inputs: Callable[[Any], dict[str, Any]]
    exact: Any = None
    backward: Callable[[Any], None] | None = None
    autocast: Any = None
    around: Callable[[Any], Any] = field(default=lambda model: model)
    call: Callable[[Any, dict[str, Any]], Any] | None = None

    def run(self, model: Any) -> Any:
        """Make the call."""
        import torch

        torch.manual_seed(3)
        grad = torch.enable_grad() if self.backward else torch.no_grad()
        cast = torch.autocast("cpu", dtype=self.autocast) if self.autocast else contextlib.nullcontext()
        with grad, cast:
            inputs = self.inputs(model)
            out = self.call(model, inputs) if self.call else model(**inputs)
        if self.backward:
            self.backward(out)
        return out


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="rows; all by default")
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()
    warnings.simplefilter("ignore")

    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    facts = header("Advice that was tried", cpu_name(), "torch", "transformers", "peft", "hfpatch")
    rows = [row(name, make) for name, make in planted().items() if not args.only or name in args.only]
    facts["rows"] = rows
    counts = Counter(r["verdict"] for r in rows)
    advised = sum(r["advice"] not in ("none", "not tried") for r in rows)
    slow = sorted(r["trial s"] for r in rows)
    facts["counts"] = dict(counts)
    table(
        "Planted faults",
        rows,
        f"Advice given {advised}, cured {counts['cured']}; "
        f"not given because tried and failed, or because no patch reaches the place: {counts['right']} rightly, "
        f"{counts['WRONG']} wrongly; given untried: {counts['not tried']}. Models changed: "
        f"{sum(r['changed'] != '' for r in rows)}. The trial took {slow[len(slow) // 2]:.2f} s in the median, "
        f"{slow[-1]:.2f} s at most, {sorted(r['trial / call'] for r in rows)[len(rows) // 2]:.1f} traced calls.",
    )
    write_json(args.json, facts)


def row(name: str, make: Callable[[], Planted]) -> Row:
    """One fault: what was advised, and what came of it."""
    import torch

    import hfpatch

    torch.manual_seed(0)
    case = make()
    whole = case.around(case.model)
    warm = copy.deepcopy(case.model)
    with hfpatch.trace(warm):
        case.run(warm)  # classes are read, proofs are looked up
    spent: list[float] = []
    case.run(case.model)  # some classes set hooks of their own in the first call
    case.model.zero_grad()
    before = state(case.model)
    stock = case.around(copy.deepcopy(case.model)) if whole is case.model else None
    after = None
    if stock is not None:
        case.run(stock)
        after = (torch.get_rng_state(), {n: p.grad for n, p in stock.named_parameters()}, dict(stock.named_buffers()))
    start = time.perf_counter()
    with hfpatch.trace(whole) as t:
        answers = t.answers

        def timed(*given: Any) -> Any:
            begun = time.perf_counter()
            try:
                return answers(*given)
            finally:
                spent.append(time.perf_counter() - begun)

        t.answers = timed
        case.run(whole)
    total = time.perf_counter() - start
    changed = differs(case.model, before, after)
    found, said = t.first_bad, " | ".join(t.advice)
    plain = total - sum(spent)
    advice = "none" if not t.patches else ", ".join(t.patches) if said.startswith("tried") else "not tried"
    if found is None:
        verdict = "no fault found"
    elif advice == "not tried":
        verdict = "not tried"
    elif t.patches:
        verdict = "cured" if cured(case, make, t.patches) else "WRONG"
    else:
        verdict = "WRONG" if any(cured(case, make, patches) for patches in others(make, found)) else "right"
    return {
        "fault": name, "symptom": found and found.symptom, "in": found and found.module, "advice": advice,
        "verdict": verdict, "changed": changed, "trial s": round(sum(spent), 3),
        "trial / call": round(sum(spent) / plain, 1), "said": said,
    }  # fmt: skip


def state(model: Any) -> Any:
    """What a trial must leave, apart from what the call itself changes."""
    from tests.fingerprint import fingerprint

    return fingerprint(model)


def differs(model: Any, before: Any, after: Any) -> str:
    """What a traced call changed that a plain one does not; empty if nothing."""
    import torch

    now, found = state(model), []
    for path, there in before.items():
        found += [f"{path}: {k}" for k, v in there.items() if k not in ("buffers", "values") and now[path][k] != v]
    if after is not None:
        random, grads, buffers = after
        if not torch.equal(random, torch.get_rng_state()):
            found.append("random state")
        found += [n for n, b in model.named_buffers() if not same(b, buffers[n])]
        found += [f"{n}.grad" for n, p in model.named_parameters() if not same(p.grad, grads[n])]
    return "; ".join(found[:3])


def same(a: Any, b: Any) -> bool:
    """True if two tensors are equal, NaN where NaN."""
    import torch

    return a is b or (a is not None and b is not None and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


def cured(case: Planted, make: Callable[[], Planted], patches: tuple[str, ...]) -> bool:
    """Whether the call is right in a fresh model with these patches."""
    import torch

    import hfpatch
    from hfpatch.tracing.tensors import floating

    torch.manual_seed(0)
    fresh = make()
    hfpatch.apply(fresh.model, only=list(patches), verbose=False)
    with hfpatch.trace(fresh.model) as t:
        out = fresh.run(fresh.model)
    finite = all(bool(v.isfinite().all()) for _, v in floating(out))
    good = all(p.grad is None or bool(p.grad.isfinite().all()) for p in fresh.model.parameters())
    if not (finite and good) or (t.first_bad is not None and not t.first_bad.ordinary):
        return False
    if case.exact is None:
        return True
    exact = fresh.run(case.exact.train(fresh.model.training)) if case.autocast is None else plain(fresh, case.exact)
    logits = out.logits.float()
    return float((logits - exact.logits.float()).norm() / exact.logits.float().norm()) < NEAR


def plain(case: Planted, exact: Any) -> Any:
    """The call without autocast."""
    import torch

    with torch.no_grad():
        return exact(**case.inputs(exact))


def others(make: Callable[[], Planted], found: Any) -> list[tuple[str, ...]]:
    """The patches for a symptom that can be applied to a model, each alone, and all of them."""
    import hfpatch
    from hfpatch.patching import registry

    names = [
        name
        for name, entry in registry.entries().items()
        if found.symptom in (*entry.patch.answers, *entry.patch.answers_where_it_edits)
    ]
    if not names:
        return []
    can = {d.patch for d in hfpatch.plan(make().model, only=names).decisions if d.decided == "applied"}
    return [*((name,) for name in sorted(can)), *([tuple(sorted(can))] if len(can) > 1 else [])]


def planted() -> dict[str, Callable[[], Planted]]:
    """The faults by name."""
    import torch
    from hfpatch.patches.shared.fp32_attention_logits import FAILING, PADDED

    from hfpatch.lab.overflow import overflow
    from hfpatch.lab.tiny import SpeechLLM, rescale, tiny_model
    from hfpatch.patching.verifying.trial import inputs_of

    ids = (torch.arange(24).reshape(2, 12) * 7 + 3) % 64

    def stream(architecture: str, **config: Any) -> Any:
        depth = {} if "num_hidden_layers" in config else {"num_hidden_layers": 16}
        if architecture in ("gemma2", "gemma3_text"):
            model = tiny_model(architecture, **config)
            rescale(model, {}, {"*post_feedforward_layernorm.weight": 24000.0})
        else:
            try:
                model = tiny_model(architecture, **{**depth, **config})
                overflow(model, inputs_of(model, ids))
            except hfpatch.errors.InputError:
                model = tiny_model(architecture, **config)
                overflow(model, inputs_of(model, ids))
        return half(model)

    def half(model: Any) -> Any:
        model.half()
        return model

    def both(model: Any, **more: Any) -> Planted:
        return Planted(model, lambda m: inputs_of(m, ids), exact=copy.deepcopy(model).float(), **more)

    def loss(out: Any) -> None:
        out.loss.backward()

    def labelled(model: Any, **more: Any) -> Planted:
        return Planted(model, lambda m: {**inputs_of(m, ids), "labels": ids}, backward=loss, **more)

    def lora() -> Planted:
        from hfpatch.lab.composites_lora import peft_qv

        return labelled(peft_qv(stream("gemma3_text")).half().train())

    def checkpointed(reentrant: bool) -> Planted:
        model = stream("gemma3_text").train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        return labelled(model)

    def backward(scale: float) -> Planted:
        """The gradients of the stream add up to more than float16 holds; those of the branches do not."""
        model = tiny_model("llama", num_hidden_layers=8).half().train()

        def far(out: Any) -> None:
            weight = torch.ones_like(out.last_hidden_state)
            (out.last_hidden_state.float() * weight.float() * scale).sum().backward()

        return Planted(model.model, lambda m: {"input_ids": ids}, backward=far)

    def cache(kind: str) -> Planted:
        from transformers.cache_utils import DynamicCache, StaticCache

        model = stream("gemma3_text")
        exact = copy.deepcopy(model).float()

        def inputs(m: Any) -> dict[str, Any]:
            held = (
                DynamicCache(config=m.config) if kind == "dynamic" else StaticCache(config=m.config, max_cache_len=32)
            )
            with torch.no_grad():
                exact(ids[:, :4], past_key_values=held, use_cache=True)
            for layer in held.layers:
                layer.keys, layer.values = layer.keys.half(), layer.values.half()
            return {"input_ids": ids[:, 4:], "past_key_values": held, "use_cache": True}

        return Planted(model, inputs)

    def dropout() -> Planted:
        model = stream("gpt2", resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1).train()
        return labelled(model)

    def composite() -> Planted:
        model = half(SpeechLLM(stream("gemma3_text")))
        features = torch.randn(2, 3, 24, generator=torch.Generator().manual_seed(1))
        return Planted(model, lambda _: {"input_ids": ids, "features": features})

    def generate() -> Planted:
        model = stream("gemma3_text")
        made: Callable[[Any, dict[str, Any]], Any] = lambda m, i: m.generate(  # noqa: E731
            **i, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        return Planted(model, lambda _: {"input_ids": ids}, call=made)

    def t5(autocast: bool) -> Planted:
        model = tiny_model("t5")
        rescale(model, {"*.wo.weight": 1e7} if autocast else {"*.wo.weight": 3e4, "*.wi*.weight": 3.0}, {})
        if not autocast:
            return both(half(model))
        return both(model, autocast=torch.float16)

    def eager(padded: bool) -> Planted:
        model = tiny_model("qwen2")
        model.set_attn_implementation("eager")
        rescale(model, {}, PADDED if padded else FAILING)
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        inputs = {"input_ids": ids, **({"attention_mask": mask} if padded else {})}
        return Planted(half(model), lambda _: inputs, exact=None if padded else copy.deepcopy(model).float())

    def two() -> Planted:
        """The stream overflows, and so do the products of queries and keys in eager attention."""
        model = tiny_model("gemma3_text")
        model.set_attn_implementation("eager")
        rescale(
            model,
            {"*q_norm.weight": 1.0},
            {"*post_feedforward_layernorm.weight": 24000.0, "*q_norm.weight": 900.0, "*k_norm.weight": 900.0},
        )
        return both(half(model))

    def branch(kind: str) -> Planted:
        model = tiny_model("llama")
        layer = model.model.layers[1].mlp
        with torch.no_grad():
            if kind == "product":
                layer.gate_proj.weight.mul_(2500)
                layer.up_proj.weight.mul_(2500)
                layer.down_proj.weight.mul_(1e-3)
            else:
                layer.gate_proj.weight.mul_(150)
                layer.up_proj.weight.mul_(150)
                layer.down_proj.weight.mul_(2e4)
        return both(half(model))

    def stream_and_branch() -> Planted:
        model = stream("gemma3_text")
        layer = model.model.layers[-1].mlp
        with torch.no_grad():
            layer.gate_proj.weight.mul_(300)
            layer.up_proj.weight.mul_(300)
            layer.down_proj.weight.mul_(1e4)
        return both(model)

    def llava(tower: str) -> Planted:
        from transformers import (
            CLIPVisionConfig,
            LlamaConfig,
            LlavaConfig,
            LlavaForConditionalGeneration,
            SiglipVisionConfig,
        )

        text = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4,
            num_key_value_heads=2,
        )  # fmt: skip
        size = {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
            "image_size": 28, "patch_size": 14,
        }  # fmt: skip
        vision = SiglipVisionConfig(**size) if tower == "siglip" else CLIPVisionConfig(**size)
        config = LlavaConfig(
            vision_config=vision, text_config=text, image_token_index=60, vision_feature_layer=-1,
            vision_feature_select_strategy="full" if tower == "siglip" else "default",
        )  # fmt: skip
        model: Any = LlavaForConditionalGeneration(config).eval()
        if tower == "language":
            overflow(model.model.language_model, {"input_ids": ids})
        else:
            lists = [m for m in model.model.vision_tower.modules() if isinstance(m, torch.nn.ModuleList)]
            with torch.no_grad():
                for layer in lists[0]:
                    layer.mlp.fc2.bias.fill_(2.5e4)
        image = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(0)).half()
        tokens = torch.tensor([[1, *[60] * 4, 5, 6, 7]])
        return Planted(half(model), lambda _: {"input_ids": tokens, "pixel_values": image})

    def torch_attention() -> Planted:
        class Encoder(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                kind = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True, dropout=0.0)
                self.encoder = torch.nn.TransformerEncoder(kind, 4, enable_nested_tensor=False)
                self.llm = tiny_model("llama")
                for layer in self.encoder.layers:
                    torch.nn.init.constant_(layer.linear2.bias, 2.5e4)

            def forward(self, input_ids: torch.Tensor, x: torch.Tensor) -> Any:
                return self.llm(inputs_embeds=self.encoder(x) + self.llm.model.embed_tokens(input_ids))

        x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(0)).half()
        return Planted(half(Encoder()).train(), lambda _: {"input_ids": ids, "x": x})

    def ddp() -> Planted:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        if not dist.is_initialized():
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
            dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        return labelled(stream("gemma3_text").train(), around=DistributedDataParallel)

    import hfpatch

    cases: dict[str, Callable[[], Planted]] = {}
    for name in STREAMS:
        cases[name] = lambda name=name: both(stream(name))
    cases |= {
        "gemma3, training": lambda: labelled(stream("gemma3_text").train()),
        "LoRA": lora,
        "checkpointed": lambda: checkpointed(False),
        "checkpointed, reentrant": lambda: checkpointed(True),
        "backward, final norm": lambda: backward(3000.0),
        "backward, stream": lambda: backward(700.0),
        "dynamic cache": lambda: cache("dynamic"),
        "static cache": lambda: cache("static"),
        "dropout": dropout,
        "composite": composite,
        "generate": generate,
        "T5 wo": lambda: t5(False),
        "T5 wo, autocast": lambda: t5(True),
        "eager logits": lambda: eager(False),
        "eager, padded": lambda: eager(True),
        "stream and logits": two,
        "branch, product": lambda: branch("product"),
        "branch, down": lambda: branch("down"),
        "stream and branch": stream_and_branch,
        "Llava, language model": lambda: llava("language"),
        "Llava, CLIP": lambda: llava("clip"),
        "Llava, SigLIP": lambda: llava("siglip"),
        "nn.TransformerEncoder": torch_attention,
        "DDP": ddp,
    }
    return cases


if __name__ == "__main__":
    main()
