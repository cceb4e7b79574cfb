"""What hfpatch covers of the architectures transformers has: tiny models that train, LoRA targets, float16 streams.

    OMP_NUM_THREADS=1 python benchmarks/coverage.py

For each mapping: architectures; those whose tiny model takes a training step on its example inputs, loss and every
gradient finite; those in which PEFT adapts exactly what `lora_targets` names. And what the plan of a float16 model says
of its stacks, towers and language model alike:

    cured      every stack is widened, or a run on a tiny model showed that its stream cannot overflow
    harmless   as cured, and no stack needs a patch
    in part    one stack is widened and another is not
    refused    no stack is widened, and one may overflow

The plan takes its word from proofs (`hfpatch prove`): runs in which the stream of a tiny model of this architecture was
made to overflow, and the patched outputs were compared with float32. What is left has the reason of the plan. A few
minutes on two cores.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import warnings
from collections import Counter
from typing import Any

from common import Row, cpu_name, header, table, write_json

GOALS = {"causal": 190, "multimodal": 105, "seq2seq": 36}
"""Tiny models that train, at least."""

CURED = {"causal": 160, "multimodal": 80, "seq2seq": 32}
"""Models in which every float16 stream is cured, at least."""

PATCHES = ("fp16-residual-overflow", "wo-overflow")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures here as well")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()

    from hfpatch.lab.tiny import TASKS

    facts = header("Architectures covered", cpu_name(), "torch", "transformers", "peft", "hfpatch")
    wanted = [(task, name) for task, known in TASKS.items() for name in sorted(known)]
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        found = pool.starmap(look, wanted, chunksize=4)
    facts["rows"] = [row(task, [f for f in found if f["task"] == task]) for task in TASKS]
    facts["left"] = [{k: f[k] for k in ("task", "architecture", "step", "lora")} for f in found if short(f)]
    facts["streams"] = [
        {"task": f["task"], "architecture": f["architecture"], **row} for f in found for row in f.get("left", [])
    ]
    table("By mapping of transformers", facts["rows"])
    table("What is left", facts["left"])
    table("Streams that are not cured", facts["streams"])
    write_json(args.json, facts)


def row(task: str, found: list[dict[str, Any]]) -> Row:
    """The counts of one mapping."""
    counts = Counter(key for f in found for key in ("step", "lora") if f[key] == "yes")
    streams = Counter(f["fp16"] for f in found)
    return {
        "mapping": task,
        "architectures": len(found),
        "tiny model trains": counts["step"],
        "goal": GOALS[task],
        "LoRA reaches what is named": counts["lora"],
        "float16 streams cured": streams["cured"] + streams["harmless"],
        "goal of cured": CURED[task],
        "of these harmless": streams["harmless"],
        "in part": streams["in part"],
        "refused": streams["refused"],
    }


def short(found: dict[str, Any]) -> bool:
    """Whether something is left to be done for an architecture, float16 aside."""
    return found["step"] != "yes" or found["lora"] != "yes"


def look(task: str, architecture: str) -> dict[str, Any]:
    """One architecture: `yes`, or why not, for each question."""
    warnings.simplefilter("ignore")
    import transformers

    from hfpatch.errors import HfpatchError
    from hfpatch.lab.tiny import tiny_model
    from hfpatch.model.source import REJECTIONS

    transformers.logging.set_verbosity(50)
    found: dict[str, Any] = {
        "task": task,
        "architecture": architecture,
        "step": "yes",
        "lora": "yes",
        "fp16": "not built",
    }
    try:
        tiny_model(architecture, task=task)
    except (HfpatchError, *REJECTIONS) as error:
        return {**found, "step": said(error), "lora": "not built"}
    for key, ask in (("step", step), ("lora", lora)):
        try:
            found[key] = ask(tiny_model(architecture, task=task))
        except (HfpatchError, *REJECTIONS) as error:
            found[key] = said(error)
    return found | streams(tiny_model(architecture, task=task))


def said(error: Exception) -> str:
    """An error in one line."""
    return re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:160]


def step(model: Any) -> str:
    """A training step on the example inputs. The model is changed."""
    from hfpatch.lab.example import example_inputs

    out = model.train()(**example_inputs(model))
    loss = out.loss if getattr(out, "loss", None) is not None else out[0].float().square().mean()
    loss.backward()
    bad = [n for n, p in model.named_parameters() if p.grad is not None and not bool(p.grad.isfinite().all())]
    return "loss not finite" if not bool(loss.isfinite()) else "yes" if not bad else f"gradient of {bad[0]} not finite"


def lora(model: Any) -> str:
    """What PEFT adapts, against the targets, as sets of paths. The model is changed."""
    from peft import LoraConfig, inject_adapter_in_model

    from hfpatch.lora.targets import lora_targets

    targets = lora_targets(model)
    adapted: set[str] = set()
    for path, module in inject_adapter_in_model(LoraConfig(r=2, **targets.kwargs()), model).named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            name = getattr(module, "parameter_name", None)
            plain = re.sub(r"\.base_layer(?=\.|$)", "", path)
            adapted.add(plain if name in (None, "weight") else f"{plain}.{name}")
    apart = adapted ^ {*targets.modules, *targets.parameters}
    return f"{len(apart)} differ, such as {min(apart)}" if apart else "yes"


def streams(model: Any) -> dict[str, Any]:
    """What the plan says of the streams of a model in float16: a word, and the rows that are not cured."""
    import hfpatch

    made = hfpatch.plan(model.half(), only=PATCHES).decisions
    served = {d.submodel for d in made if d.decided == "applied"}
    left = [
        {"stack": d.submodel or "", "reason": re.sub(r"\s+", " ", d.reason)[:240]}
        for d in made
        if d.decided == "refused" and d.submodel not in served and d.submodel is not None
    ]
    if left:
        return {"fp16": "in part" if served else "refused", "left": left}
    return {"fp16": "cured" if served else "harmless"}


if __name__ == "__main__":
    main()
