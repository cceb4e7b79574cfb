"""Trainings with planted spikes under five rules: what is skipped, and where the loss ends.

    python benchmarks/guard_history.py run --checkpoint DIR --what lora --rule history --seed 0 --json OUT.json
    python benchmarks/guard_history.py report DIR --json OUT.json    a table of the JSON files in a directory

Two steps in a hundred have random labels and a loss that is scaled until the gradient norm is 10 to 200 times the
median of the last 64 healthy steps. `lora`: adapters on q_proj and v_proj. `projector`: a fresh two-layer projector in
front of the frozen model, which gets 32 vectors made from the next 32 tokens. Rules: `none` clips to 1; `fixed` also
skips norms above 100; `history` is `hfpatch.Guard` as it is; `zclip` is arXiv 2504.02507 (mean and variance of norms,
z above 2.5 is clipped to mean + 2.5^2 / z standard deviations); `adagc` is arXiv 2502.11034 (each tensor is clipped to
1.05 times its running norm, after 100 steps of warm-up with a norm of 1).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from pathlib import Path
from typing import Any

from common import ROOT, cpu_name, header, table, write_json

RULES = ("none", "fixed", "history", "zclip", "adagc")
SHARE = 0.02
QUIET = 50
"""Steps before the first spike."""
LAST = 50
"""Healthy steps that the final loss is a mean of."""
BATCH, TOKENS, PREFIX = 4, 64, 32
SUMS = (
    "steps", "planted", "spikes skipped", "healthy skipped", "spikes clipped", "healthy clipped", "above 10",
)  # fmt: skip


class ZClip:
    """Clips by the z-score of the norm; mean and variance are exponential averages."""

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters, self.warm = parameters, []
        self.mean = self.variance = 0.0

    def __call__(self, norm: float) -> None:
        import torch

        if len(self.warm) < 25:
            self.warm.append(norm)
            self.mean, self.variance = statistics.fmean(self.warm), statistics.pvariance(self.warm)
            return
        deviation = math.sqrt(self.variance) + 1e-6
        z = (norm - self.mean) / deviation
        kept = self.mean + 2.5**2 / z * deviation if z > 2.5 else norm
        if kept < norm:
            for p in self.parameters:
                p.grad.mul_(kept / norm)
        with torch.no_grad():
            self.variance = 0.97 * self.variance + 0.03 * (kept - self.mean) ** 2
            self.mean = 0.97 * self.mean + 0.03 * kept


class AdaGC:
    """Clips each tensor by its own running norm."""

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters, self.steps, self.running = parameters, 0, None

    def __call__(self, norm: float) -> None:
        import torch

        if self.steps < 100:
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        norms = torch.stack([p.grad.norm() for p in self.parameters])
        if self.steps < 100:
            self.running = norms if self.running is None else torch.minimum(self.running, norms)
        else:
            factors = torch.clamp(1.05 * self.running / (norms + 1e-12), max=1.0)
            for p, factor in zip(self.parameters, factors.unbind(), strict=True):
                p.grad.mul_(factor)
            self.running = 0.98 * self.running + 0.02 * norms * factors
        self.steps += 1


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True, dest="verb")
    one = verbs.add_parser("run")
    one.add_argument("--checkpoint", required=True)
    one.add_argument("--what", choices=("lora", "projector"), required=True)
    one.add_argument("--rule", choices=RULES, required=True)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--steps", type=int, default=1000)
    one.add_argument("--device", default="cpu")
    many = verbs.add_parser("report")
    many.add_argument("directory", type=Path)
    for each in (one, many):
        each.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    facts = trained(args) if args.verb == "run" else report(args.directory)
    write_json(args.json, facts)


def trained(args: Any) -> dict[str, Any]:
    """One training; prints a line."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(args.seed)
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32).to(args.device)
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    text = "\n".join(p.read_text() for p in sorted((ROOT / "hfpatch").rglob("*.py")))
    ids = torch.tensor(tokenizer(text)["input_ids"])
    if args.what == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"])).train()
        parameters = [p for p in model.parameters() if p.requires_grad]
        loss_of, rate, judged = lora_loss, 5e-4, model
    else:
        model.requires_grad_(False).eval()
        judged = torch.nn.ModuleDict({"llm": model, "projector": projector(model).to(args.device)})
        parameters = list(judged["projector"].parameters())
        features = torch.randn(len(tokenizer), 64, device=args.device)
        loss_of, rate = (lambda _m, x, y: projector_loss(judged, features, x, y)), 1e-3
    optimizer = torch.optim.AdamW(parameters, lr=rate, fused=args.device != "cpu")
    return walk(args, judged, parameters, optimizer, loss_of, ids)


def projector(model: Any) -> Any:
    """Two linear layers as torch draws them."""
    from torch import nn

    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, model.config.hidden_size))


def lora_loss(model: Any, x: Any, y: Any) -> Any:
    """Next tokens."""
    return model(input_ids=x, labels=y).loss


def projector_loss(both: Any, features: Any, x: Any, y: Any) -> Any:
    """The tokens after a prefix of projected features."""
    import torch

    embeds = both["llm"].get_input_embeddings()(x)
    prefix = both["projector"](features[x[:, :PREFIX]])
    labels = torch.cat([torch.full_like(x[:, :PREFIX], -100), y], 1)
    return both["llm"](inputs_embeds=torch.cat([prefix, embeds], 1), labels=labels).loss


def walk(args: Any, model: Any, parameters: list[Any], optimizer: Any, loss_of: Any, ids: Any) -> dict[str, Any]:
    """Train, with spikes at the same steps for every rule."""
    import torch

    import hfpatch

    draw = random.Random(args.seed)  # noqa: S311 - a seed, not a secret
    planted = {s: draw.uniform(10.5, 200.0) for s in draw.sample(range(QUIET, args.steps), round(SHARE * args.steps))}
    guard, clip = None, None
    if args.rule in ("fixed", "history"):
        limits: dict[str, Any] = {"explode_at": 100.0, "spike_at": None} if args.rule == "fixed" else {}
        guard = hfpatch.Guard(model, optimizer, max_skips=10**9, verbose=False, **limits)
    elif args.rule != "none":
        clip = (ZClip if args.rule == "zclip" else AdaGC)(parameters)
    made = torch.Generator().manual_seed(args.seed)
    healthy: list[float] = []
    losses: list[float] = []
    counts = dict.fromkeys(("spikes skipped", "healthy skipped", "spikes clipped", "healthy clipped", "above 10"), 0)
    start = time.perf_counter()
    for step in range(args.steps):
        starts = torch.randint(0, len(ids) - TOKENS, (BATCH,), generator=made)
        x = torch.stack([ids[s : s + TOKENS] for s in starts.tolist()]).to(args.device)
        wanted = planted.get(step)
        y = torch.randint(0, int(ids.max()), x.shape, generator=made).to(args.device) if wanted else x
        factor = 1.0
        if wanted:
            loss_of(model, x, y).backward()
            norm = float(torch.nn.utils.get_total_norm([p.grad for p in parameters]))
            optimizer.zero_grad()
            factor = wanted * statistics.median(healthy[-64:]) / norm
        loss = factor * loss_of(model, x, y)
        kind = "spikes" if wanted else "healthy"
        if guard is not None:
            facts = guard.step(loss).facts
            norm = float(facts.norm or math.nan)
            counts[f"{kind} skipped"] += facts.kind == "skipped"
            counts[f"{kind} clipped"] += facts.clipped
        else:
            loss.backward()
            norm = float(torch.nn.utils.get_total_norm([p.grad for p in parameters]))
            if clip is None:
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            else:
                clip(norm)
            optimizer.step()
            optimizer.zero_grad()
        if not wanted:
            counts["above 10"] += len(healthy) >= 16 and norm > 10 * statistics.median(healthy[-64:])
            healthy.append(norm)
            losses.append(float(loss.detach()))
    name = cpu_name() if args.device == "cpu" else torch.cuda.get_device_name()
    facts = header("A training with planted spikes", name, "torch", "transformers", "peft", "hfpatch")
    final = statistics.fmean(losses[-LAST:])
    facts |= {"what": args.what, "rule": args.rule, "seed": args.seed, "steps": args.steps, "planted": len(planted)}
    facts |= {"weights": Path(args.checkpoint).name, "final loss": final, **counts}
    facts["seconds"] = time.perf_counter() - start
    print(f"- {args.what}, {args.rule}, seed {args.seed}: final loss {final:.4f}, {counts}")
    return facts


def report(directory: Path) -> dict[str, Any]:
    """All runs of a directory as a table."""
    runs = [json.loads(p.read_text()) for p in sorted(directory.glob("*.json"))]
    facts = {k: runs[0][k] for k in ("title", "device", "versions")}
    facts["command"] = "python benchmarks/guard_history.py run, for each row and seed; then report"
    print(f"# {facts['title']}\n\n- command: `{facts['command']}`\n- device: {facts['device']}")
    print(f"- versions: {', '.join(f'{k} {v}' for k, v in facts['versions'].items())}")
    rows = []
    for what in dict.fromkeys(r["what"] for r in runs):
        for rule in RULES:
            mine = [r for r in runs if r["what"] == what and r["rule"] == rule]
            if mine:
                seeds = ", ".join(str(r["seed"]) for r in sorted(mine, key=lambda r: r["seed"]))
                total = {k: sum(r[k] for r in mine) for k in ("planted", "spikes skipped", "healthy skipped")}
                total |= {
                    k: sum(r[k] for r in mine) for k in ("spikes clipped", "healthy clipped", "above 10", "steps")
                }
                ends = ", ".join(f"{r['final loss']:.3f}" for r in sorted(mine, key=lambda r: r["seed"]))
                rows.append(
                    {
                        "what": f"{what}, {mine[0]['weights']}",
                        "rule": rule,
                        "seeds": seeds,
                        **total,
                        "final loss by seed": ends,
                    }
                )
    table(
        "Planted spikes, sums over the seeds",
        rows,
        "\n`above 10`: healthy steps with a norm above 10 times the median of the 64 healthy steps before.",
        "A seed that is missing was cut off by a time limit.",
    )
    return {**facts, "rows": rows}


if __name__ == "__main__":
    main()
