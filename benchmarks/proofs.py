"""What is proved, what a proof on demand gives for configs that are not shipped, and how long a plan then takes.

    OMP_NUM_THREADS=1 python benchmarks/proofs.py

The architectures that release 0.1 listed by name, beside those that are proved now; 13 configs of eight architectures
whose layers are built in another way than the default config's; `hfpatch.plan` in new processes, with an empty cache of
proofs and with a filled one, beside the plan of the same model in float32. A few minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from typing import Any

from common import ROOT, Row, cpu_name, header, median, table, write_json

STREAM, WO = "fp16-residual-overflow", "wo-overflow"

VARIANTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (STREAM, "bloom", {"apply_residual_connection_post_layernorm": True}),
    (STREAM, "gpt_neox", {"use_parallel_residual": False}),
    (STREAM, "falcon", {"new_decoder_architecture": True}),
    (STREAM, "falcon", {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}),
    (STREAM, "falcon", {"parallel_attn": False}),
    (STREAM, "stablelm", {"use_parallel_residual": True}),
    (STREAM, "opt", {"do_layer_norm_before": False}),
    (STREAM, "granitemoehybrid", {"layer_types": ["attention"] * 4}),
    (STREAM, "granitemoehybrid", {"layer_types": ["mamba"] * 4}),
    (STREAM, "deepseek_v3", {"first_k_dense_replace": 0}),
    (STREAM, "deepseek_v3", {"first_k_dense_replace": 9}),
    (WO, "t5", {"feed_forward_proj": "gated-gelu"}),
    (WO, "t5", {"feed_forward_proj": "gated-silu"}),
)
"""Patch, architecture, what the config of a tiny model has beside the defaults."""

TIMED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama (a shipped proof)": ("llama", {}),
    "gpt_neox, use_parallel_residual=False (a proof on demand)": ("gpt_neox", {"use_parallel_residual": False}),
}

PLAN = """
import json, sys, time
import torch, transformers
transformers.logging.set_verbosity(50)
torch.set_num_threads(1)
import hfpatch
from hfpatch.lab.tiny import tiny_model
architecture, config, dtype = json.loads(sys.argv[1])
model = tiny_model(architecture, **config).to(getattr(torch, dtype))
times = []
for _ in range(2):
    start = time.perf_counter()
    made = hfpatch.plan(model)
    times.append(time.perf_counter() - start)
decided = [f"{d.decided}: {d.reason}" for d in made.decisions if d.patch == "fp16-residual-overflow"]
print(json.dumps({"first": times[0], "again": times[1], "decision": decided}))
"""


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()

    facts = header("Proofs: architectures, configs, seconds", cpu_name(), "torch", "transformers", "hfpatch")
    facts["load average"] = {"at the start": load()}
    print(f"- load average at the start: {facts['load average']['at the start']}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_ASSETS_CACHE"] = folder
        facts["served"], facts["outcomes"] = served(), outcomes()
        facts["variants"] = variants()
    facts["plans"] = plans(args.rounds)
    facts["load average"]["at the end"] = load()
    print(f"\nLoad average at the end: {facts['load average']['at the end']}")
    write_json(args.json, facts)


def load() -> str:
    """The load average of the last 1, 5 and 15 minutes: other programs on this machine make the seconds longer."""
    return ", ".join(f"{value:.1f}" for value in os.getloadavg())


def proving() -> list[Any]:
    """The patches that are served by structure."""
    from hfpatch.patching import registry

    return [entry for entry in registry.entries().values() if entry.patch.serves]


def served() -> list[Row]:
    """The architectures of release 0.1, and those of today."""
    before = set((ROOT / "tests" / "data" / "served_0.1.txt").read_text().split())
    now = {entry.id: set(entry.proved) for entry in proving()}
    rows: list[Row] = []
    for name, proved in {**now, "all of them": set().union(*now.values())}.items():
        rows.append(
            {
                "patch": name,
                "architectures proved": len(proved),
                "listed by 0.1": len(proved & before),
                "new": len(proved - before),
                "new ones": ", ".join(sorted(proved - before)) or "-",
            }
        )
    lost = sorted(before - set().union(*now.values()))
    table("Architectures served", rows, f"0.1 listed {len(before)}; of these {len(lost)} are lost: {lost or 'none'}.")
    return rows


def outcomes() -> list[Row]:
    """The shipped proofs of each patch, by outcome: those of tiny configs, and those of other flags."""
    from hfpatch.patching.proofs import shelf
    from hfpatch.patching.proofs.proof import OUTCOMES

    rows: list[Row] = []
    for entry in proving():
        found = [p for p in shelf.shipped(entry.file) if p.subject.patch == entry.digest]
        plain, other = [p for p in found if not p.subject.settings], [p for p in found if p.subject.settings]
        for flags, proofs in (("those of the tiny config", plain), ("others", other)):
            counts = Counter(p.outcome for p in proofs)
            row: Row = {"patch": entry.id, "flags": flags, "proofs": len(proofs)}
            rows.append(row | {outcome: counts[outcome] for outcome in OUTCOMES})
    table(
        "Outcomes of the shipped proofs",
        rows,
        "Flags: values of the config that the layers read. Others: where the default config's differ from the tiny's.",
        *(f"{entry.id}: {len(entry.patch.but)} are left out, named in `but=`." for entry in proving()),
    )
    return rows


def variants() -> list[Row]:
    """Each config: what its proof on demand gives, run twice, and what the plan of such a model says."""
    warnings.simplefilter("ignore")
    import torch
    import transformers

    transformers.logging.set_verbosity(50)
    torch.set_num_threads(1)
    rows = [variant(*of) for of in VARIANTS]
    counts = Counter(row["outcome"] for row in rows)
    shipped = sum(row["shipped"] != "-" for row in rows)
    table(
        f"{len(VARIANTS)} configs of {len({a for _, a, _ in VARIANTS})} architectures",
        rows,
        f"{', '.join(f'{count} {word}' for word, count in counts.most_common())}. {shipped} of them need no run in a "
        "plan: a shipped proof is about the same flags and code.",
        "Seconds: of the repros alone, twice in this process, where what they import is imported already.",
    )
    return rows


def variant(patch: str, architecture: str, config: dict[str, Any]) -> Row:
    """One config."""
    import hfpatch
    from hfpatch.lab.tiny import tiny_model
    from hfpatch.model.survey import Survey
    from hfpatch.patching import registry
    from hfpatch.patching.context import Context
    from hfpatch.patching.proofs import shelf
    from hfpatch.patching.proofs.bodies import code_of, subject
    from hfpatch.patching.proofs.prove import prove

    entry = registry.get(patch)
    model = tiny_model(architecture, **config).half()
    survey = Survey(model)
    inside = next(s for s in survey.submodels if s.architecture == architecture)
    context = Context(survey, inside, None, entry.patch.options)
    about = subject(entry, context, code_of(entry, context))
    shipped = shelf.find(shelf.shipped(entry.file), about)
    seconds: list[float] = []
    for _ in range(2):
        start = time.perf_counter()
        proof = prove(entry, architecture, about)
        seconds.append(time.perf_counter() - start)
    assert proof is not None
    decisions = [d for d in hfpatch.plan(model).decisions if d.patch == patch]
    return {
        "architecture": architecture,
        "config": ", ".join(f"{key}={value}" for key, value in config.items()),
        "flags": ", ".join(f"{key}={value}" for key, value in about.settings.items()) or "-",
        "outcome": proof.outcome,
        "shipped": shipped.outcome if shipped else "-",
        "plan": ", ".join(d.decided + ", with a warning" * ("warning: " in d.reason) for d in decisions),
        "s": seconds[0],
        "s again": seconds[1],
        "text": proof.text,
    }


def plans(rounds: int) -> list[Row]:
    """`hfpatch.plan` of tiny models in new processes, in turn."""
    ways = ("float32", "float16, cold", "float16, warm")
    found: dict[tuple[str, str], list[dict[str, Any]]] = {(name, way): [] for name in TIMED for way in ways}
    for _ in range(rounds):
        for name, (architecture, config) in TIMED.items():
            with (
                tempfile.TemporaryDirectory() as folder
            ):  # empty at first: the second process in float16 finds it filled
                for way in ways:
                    asked = (architecture, config, way.partition(",")[0])
                    found[name, way].append(run(PLAN, json.dumps(asked), folder))
    rows: list[Row] = []
    for (name, way), runs in found.items():
        first = [r["first"] for r in runs]
        rows.append(
            {
                "model": name,
                "dtype, cache of proofs": way,
                "s, first plan": median(first),
                "least": min(first),
                "most": max(first),
                "s, again in that process": median(r["again"] for r in runs),
                "decision": "; ".join(runs[0]["decision"]),
            }
        )
    table(
        f"Seconds of `hfpatch.plan` of a tiny model, new processes, median of {rounds}",
        rows,
        "The model is built before the clock starts. The first plan of a process imports what plans need.",
    )
    return rows


def run(script: str, argument: str, cache: str) -> dict[str, Any]:
    """Run a script in a new process of this python, outside the checkout, with a folder as its cache of proofs."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_ASSETS_CACHE": cache}
    env["PYTHONPATH"] = os.pathsep.join(paths)
    done = subprocess.run(
        [sys.executable, "-c", script, argument], capture_output=True, text=True, check=True, env=env, cwd=cache
    )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
