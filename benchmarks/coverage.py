"""What hfpatch covers of the architectures transformers has: tiny models that train, LoRA targets, float16 streams.

    OMP_NUM_THREADS=1 python benchmarks/coverage.py

For each mapping: architectures; those whose tiny model takes a training step on its example inputs, loss and every
gradient finite; those in which PEFT adapts exactly what `lora_targets` names; those that fp16-residual-overflow
serves, by themselves or by their language model. A few minutes on two cores.
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
    table("By mapping of transformers", facts["rows"])
    table("What is left", facts["left"])
    write_json(args.json, facts)


def row(task: str, found: list[dict[str, Any]]) -> Row:
    """The counts of one mapping."""
    counts = Counter(key for f in found for key in ("step", "lora", "fp16") if f[key] == "yes")
    return {
        "mapping": task,
        "architectures": len(found),
        "tiny model trains": counts["step"],
        "goal": GOALS[task],
        "LoRA reaches what is named": counts["lora"],
        "float16 stream served": counts["fp16"],
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
    found = {"task": task, "architecture": architecture, "step": "yes", "lora": "yes", "fp16": "no"}
    try:
        tiny_model(architecture, task=task)
    except (HfpatchError, *REJECTIONS) as error:
        return {**found, "step": said(error), "lora": "not built"}
    for key, ask in (("step", step), ("lora", lora), ("fp16", served)):
        try:
            found[key] = ask(tiny_model(architecture, task=task))
        except (HfpatchError, *REJECTIONS) as error:
            found[key] = said(error)
    return found


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


def served(model: Any) -> str:
    """Whether the float16 patch would be applied to it in float16."""
    from hfpatch.patching import registry
    from hfpatch.patching.verifying.proving import plan_alone

    made = plan_alone(registry.get("fp16-residual-overflow"), model.half(), asked=False)
    return "yes" if made.edits else "no"


if __name__ == "__main__":
    main()
