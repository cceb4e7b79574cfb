"""Mutations of the files that hfpatch reads: each is taken, or refused with one sentence, soon and in little memory.

`python -m tests.hostile.fuzz --count 10000` prints the counts as JSON; `--markdown` writes them as a table. The seed is
the kind and the number of a mutation, so a case can be made again: `--kind configs --first 4711 --count 1`. With
`--kind`, a file of counts keeps those of the other kinds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import huggingface_hub
import torch
import transformers
import yaml
from safetensors.torch import save_file

from hfpatch.blackbox import folder as bundles
from hfpatch.blackbox.box import BlackBox
from hfpatch.blackbox.bundle import read_bundle
from hfpatch.cli.inspect import Inspected
from hfpatch.errors import HfpatchError
from hfpatch.foretold import inspect
from hfpatch.guarding.checking.settings import read_settings, settings_file
from hfpatch.guarding.guard import Guard
from hfpatch.lab.tiny import tiny_model
from hfpatch.model.source import build_on_meta, load_config
from hfpatch.model.survey import Survey
from hfpatch.patching.apply import apply, plan
from hfpatch.patching.manifest import file as manifests
from hfpatch.patching.status import status
from hfpatch.patching.undo import revert
from hfpatch.patching.verifying.kept_need import FILE as MEASURED
from hfpatch.patching.verifying.kept_need import keep_need, kept_need
from hfpatch.patching.verifying.sealed import sealed
from hfpatch.scanning.scan import scan
from hfpatch.tracing.checkpoint import load_model
from hfpatch.untrusted.adapter_config import read_adapter_config
from tests.hostile import doors, mutate, traps
from tests.interrupts import speech

SECONDS = 10
"""Limit of a case in processor time; more is a hang."""
WAITING = 6
"""How many times as long a case may take by the clock: others use the machine too, but a case that waits is a hang."""
MOST = 2**30
"""Bytes of memory that a case may add."""
SHOWN = 10
PART = 2_500
"""Mutations of a kind that one process reads, one after the other."""


class HangError(BaseException):
    """A case took too long. Nothing that catches exceptions catches it."""


@dataclass
class Counts:
    """What became of the mutations of a kind of file."""

    mutations: int = 0
    refused: int = 0
    taken: int = 0
    tracebacks: int = 0
    hangs: int = 0
    memory_over_1_gb: int = 0
    code_run: int = 0
    seconds: float = 0.0
    failed: list[str] = field(default_factory=list[str])

    def add(self, other: Counts) -> None:
        """Add the counts of other mutations of the same kind of file."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        self.seconds, self.failed = round(self.seconds, 1), self.failed[:SHOWN]


@cache
def models() -> tuple[dict[str, Any], ...]:
    """Configs of tiny models of several kinds."""
    names = ("llama", "gemma3_text", "mixtral", "bert", "t5", "gpt2", "whisper", "llava", "deepseek_v3", "mamba")
    return tuple(tiny_model(name).config.to_dict() for name in names)  # type: ignore[operator]


ABSURD = (
    0, 1, -1, -64, 3, 7, 1_500, 4_097, 10**5, 10**6, 99_999_999, 2**31, 2**40, 10**30, 0.5, -0.5, 1e308, 1e-320,
    float("nan"), float("inf"), "float8_e4m3fn", "int8", "complex64", "float16", "uint4", "nonsense", "eager", "relu",
    "linear", "yarn", "sliding_attention", "bert", "\x1b[31mred", "a\nb",
)  # fmt: skip
"""Sizes, dtypes and kinds that a config may say."""
PLANNED = 0.25
"""Share of the configs that are built whose model is inspected and planned too; a plan may have to run a proof."""
LONG_PROOF = "whisper"
"""An architecture whose proof takes half a minute by itself, so its models are not planned here."""


def config(place: Path, chance: Random) -> None:
    """A config that is mutated, or one of the same types with absurd values; what it describes is built and planned."""
    base = chance.choice(models())
    if chance.random() < 0.2:
        base = {**base, "configuration_files": ["config.5.0.0.json"]}
        (place / "config.5.0.0.json").write_bytes(mutate.json_of(chance.choice(models()), chance))
    raw = mutate.json_of(base, chance)
    if chance.random() < 0.5:
        raw = json.dumps(mutate.like_of(base, ABSURD, chance)).encode()
    (place / "config.json").write_bytes(raw)
    model = build_on_meta(load_config(place))
    if chance.random() < PLANNED and model.config.model_type != LONG_PROOF:
        found = Inspected(inspect(model), plan(model), None)
        str(found), json.dumps(found.to_dict(), allow_nan=False)


@cache
def weights() -> bytes:
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "w.safetensors"
        save_file({"a": torch.ones(3, 4), "b.weight": torch.zeros(2, dtype=torch.float16), "c": torch.ones(())}, file)
        return file.read_bytes()


def header(place: Path, chance: Random) -> None:
    raw = weights()
    length = int.from_bytes(raw[:8], "little")
    if chance.random() < 0.5:
        new = mutate.json_of(json.loads(raw[8 : 8 + length]), chance)
        said = len(new) if chance.random() < 0.8 else chance.choice((0, 1, length, 2**31, 2**63, 10**8))
        raw = said.to_bytes(8, "little") + new + raw[8 + length :]
    else:
        raw = mutate.bytes_of(raw, chance)
    (place / "model.safetensors").write_bytes(raw)
    str(scan(place / "model.safetensors", processes=1))
    if chance.random() < 0.05:
        load_mutated(place, chance)


@cache
def saved() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="hfpatch-fuzz-"))
    tiny_model("llama").save_pretrained(folder)  # type: ignore[operator]
    return folder


def load_mutated(place: Path, chance: Random) -> None:
    """Load a checkpoint whose file of weights is mutated near its beginning, where its header is."""
    raw = (saved() / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    (place / "model.safetensors").write_bytes(mutate.bytes_of(raw[:end], chance) + raw[end:])
    shutil.copy(saved() / "config.json", place)
    load_model(str(place))


def index(place: Path, chance: Random) -> None:
    for name in ("a", "b"):
        (place / f"{name}.safetensors").write_bytes(weights())
    held = {"metadata": {"total_size": 70}, "weight_map": {"a": "a.safetensors", "b.weight": "b.safetensors"}}
    (place / "model.safetensors.index.json").write_bytes(mutate.json_of(held, chance))
    str(scan(place / "model.safetensors.index.json", processes=1))


@cache
def trained() -> tuple[Any, Path]:
    """A tiny model, and a bundle of a step that was skipped."""
    model: Any = tiny_model("llama").train()
    place = Path(tempfile.mkdtemp(prefix="hfpatch-fuzz-"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = Guard(model, optimizer, black_box=BlackBox(place), verbose=False, explode_at=None)
    embedded = model.get_input_embeddings()(torch.arange(8)[None]).detach().clone()
    embedded[0, 3, 2] = float("nan")
    guard.step(model(inputs_embeds=embedded, labels=torch.arange(8)[None]).loss)
    (made,) = place.glob("step-*")
    return model, made


def bundle(place: Path, chance: Random) -> None:
    model, made = trained()
    there = place / made.name
    shutil.copytree(made, there)
    about = json.loads((there / bundles.ABOUT).read_bytes())
    batch = (there / bundles.BATCH).read_bytes()
    del about["sha256"]
    if chance.random() < 0.3:
        batch = mutate.bytes_of(batch, chance)
        (there / bundles.BATCH).write_bytes(batch)
        about["batch"] |= {"bytes": len(batch), "sha256": bundles.sha256(batch)}
    else:
        about = mutate.value_of(about, chance)
    if chance.random() < 0.8 and isinstance(about, dict):  # one whose digest is right, as somebody who lies would make
        about = {**about, "sha256": bundles.digest(about)}
    raw = json.dumps(about).encode()
    (there / bundles.ABOUT).write_bytes(mutate.bytes_of(raw, chance) if chance.random() < 0.2 else raw)
    held = read_bundle(there)
    str(held), json.dumps(held.to_dict())
    held.call(torch.device("cpu"))
    if chance.random() < 0.2:
        str(held.replay(model))


ARGS = {
    "fp16": True, "bf16": False, "learning_rate": 2e-4, "adam_epsilon": "1e-8", "max_grad_norm": 1.0,
    "optim": "adamw_torch", "gradient_accumulation_steps": 4, "gradient_checkpointing": True,
    "optim_args": "eps=1e-8, weight_decay=0.1",
    "gradient_checkpointing_kwargs": {"use_reentrant": False}, "label_smoothing_factor": 0.1,
    "mixed_precision": "fp16",
}  # fmt: skip


def args(place: Path, chance: Random) -> None:
    if chance.random() < 0.5:
        file = place / "args.json"
        file.write_bytes(mutate.json_of(ARGS, chance))
    else:
        file = place / "args.yaml"
        file.write_bytes(mutate.bytes_of(yaml.safe_dump(ARGS).encode(), chance))
    read_settings(settings_file(file))


def adapter(place: Path, chance: Random) -> None:
    doors.adapter(alpha_pattern={"q_proj": 3}, rank_pattern={"x": 2}, lora_alpha=4, loftq_config={})(place)
    file = place / "adapter_config.json"
    file.write_bytes(mutate.json_of(json.loads(file.read_bytes()), chance))
    read_adapter_config(place)


@cache
def measured() -> tuple[Any, bytes]:
    """A tiny model that was loaded from a folder, and what was measured of it."""
    from hfpatch.inspecting.peaks import Peaks

    model: Any = tiny_model("llama")
    folder = tempfile.mkdtemp(prefix="hfpatch-fuzz-")
    model.config.name_or_path = folder
    file = keep_need(model, Peaks({name: 3.0 for name, _ in model.named_modules()}, ""), {"input_ids": torch.arange(8)})
    return model, file.read_bytes()


def measurement(_: Path, chance: Random) -> None:
    model, raw = measured()
    new = mutate.json_of(json.loads(raw), chance) if chance.random() < 0.5 else mutate.bytes_of(raw, chance)
    (Path(model.config.name_or_path) / MEASURED).write_bytes(new)
    _, said = kept_need(Survey(model))
    if "\n" in said:
        raise AssertionError(f"more than a sentence: {said!r}")


CHANGES = (
    "SetTensor", "SetAttribute", "SetBuffer", "ComputeInFloat32", "AddTargets", "weight", "eps", "self", "__class__",
    "../../x", "nowhere", "weights", "trained", "equivalent", "language_model", "float16", "cpu", 1e308, 2**70,
)  # fmt: skip
"""Kinds of change, names and places that a manifest may say."""


@cache
def manifested() -> tuple[Any, Path, dict[str, torch.Tensor]]:
    """A tiny composite, a folder with a manifest of edits and of a tensor for it, and its values."""
    model: Any = speech()
    held = {name: value.clone() for name, value in model.state_dict().items()}
    folder = Path(tempfile.mkdtemp(prefix="hfpatch-fuzz-"))
    apply(model, include=["projection-init", "fp32-lm-head"], verbose=False).save(folder)
    revert(model)
    return model, folder, held


def manifest(place: Path, chance: Random) -> None:
    """A manifest that is mutated, its tensors, or both; often with the digests that somebody who lies would write."""
    model, made, held = manifested()
    shutil.copytree(made, place, dirs_exist_ok=True)
    said = json.loads((made / manifests.FILE).read_bytes())
    content, (tensors,) = said["manifest"], (place / manifests.TENSORS).iterdir()
    raw = None
    if chance.random() < 0.2:
        raw = mutate.bytes_of(tensors.read_bytes(), chance)
        tensors.write_bytes(raw)
        content["tensors"] |= {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    elif chance.random() < 0.6:  # what the types do not tell
        part = chance.choice(("patches", "patches", "patches", "weights", "bodies", "attention", "computed", "tensors"))
        content[part] = mutate.like_of(content[part], CHANGES, chance) if content[part] else content[part]
    elif chance.random() < 0.5:
        at = chance.randrange(len(content["patches"]))
        content["patches"][at] = mutate.value_of(content["patches"][at], chance)
    else:
        content = mutate.value_of(content, chance)
    text = sealed(content, manifests.SCHEMA, "manifest").encode()
    (place / manifests.FILE).write_bytes(mutate.bytes_of(text, chance) if chance.random() < 0.2 else text)
    try:
        found = manifests.read(place)
        str(found), json.dumps(found.to_dict() if found else None)
        apply(model, manifest=place, verbose=False)
    finally:
        revert(model)
        after = model.state_dict()
        if after.keys() != held.keys() or not all(value.equal(held[name]) for name, value in after.items()):
            raise AssertionError("the model is not what it was")
        if status(model).edits:
            raise AssertionError("an edit stayed")


KINDS: dict[str, Callable[[Path, Random], object]] = {
    "configs": config,
    "safetensors headers": header,
    "indexes": index,
    "bundles": bundle,
    "training arguments": args,
    "adapter configs": adapter,
    "kept measurements": measurement,
    "manifests": manifest,
}
"""Kind of file -> write a mutation of one into a folder, and read it; it may raise an `HfpatchError` of one sentence.

A kind of file that comes to be read is a line here."""


def run(kind: str, count: int, first: int = 0) -> Counts:
    """Read so many mutations of a kind of file, and return what became of them."""
    for made in (models, weights, saved, trained, measured, manifested):
        made()
    found, began = Counts(), time.perf_counter()
    was = {each: signal.signal(each, _end) for each in (signal.SIGALRM, signal.SIGPROF)}
    with tempfile.TemporaryDirectory(prefix="hfpatch-fuzz-") as top, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(first, first + count):
            place = Path(top) / "case"
            place.mkdir()
            before = peak(again=True)
            with traps.armed(Path(top) / "notes") as sprung:
                wrong = _case(KINDS[kind], place, Random(f"{kind} {number}"), found)  # noqa: S311 - a seed, no secret
            if sprung:
                found.code_run += 1
                wrong = wrong or sprung[0]
            if (grown := peak() - before) > MOST:
                found.memory_over_1_gb += 1
                wrong = wrong or f"memory grew by {grown:,} bytes"
            if wrong and len(found.failed) < SHOWN:
                found.failed.append(f"{number}: {wrong}")
            found.mutations += 1
            shutil.rmtree(place)
    for each, handler in was.items():
        signal.signal(each, handler)
    found.seconds = round(time.perf_counter() - began, 1)
    return found


def _case(read_it: Callable[[Path, Random], object], place: Path, chance: Random, found: Counts) -> str:
    """Read a mutation under the time limit, count what came of it, and return what is wrong; empty if nothing is."""
    _limit(SECONDS)
    try:
        read_it(place, chance)
        found.taken += 1
    except HfpatchError as error:
        found.refused += 1
        text = str(error)
        if "\n" in text or not 15 < len(text) < 1500:
            found.tracebacks += 1
            return f"not one sentence: {text!r:.300}"
    except HangError:
        found.hangs += 1
        return f"more than {SECONDS} s"
    except Exception as error:  # noqa: BLE001 - that there is none is what is measured
        found.tracebacks += 1
        at = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error!s:.200} ({Path(at.filename).name}:{at.lineno})"
    finally:
        _limit(0)
    return ""


def _limit(seconds: float) -> None:
    """Raise a `HangError` after this processor time, or much more by the clock; 0 for no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * WAITING)


def _end(_: int, __: FrameType | None) -> None:
    raise HangError


def peak(*, again: bool = False) -> int:
    """Return the largest resident memory of the process in bytes; `again` starts to look for it anew (on Linux)."""
    try:
        if again:
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def releases() -> str:
    """Return what reads the files, beside hfpatch."""
    return f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"


def merged(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the counts of a file with those of the kinds that were run anew, of the same releases."""
    if before["releases"] != now["releases"]:
        raise SystemExit(f"the file has counts of {before['releases']}, these are of {now['releases']}: run all kinds")
    kinds = before["kinds"] | now["kinds"]
    return {"releases": now["releases"], "kinds": {kind: kinds[kind] for kind in KINDS if kind in kinds}}


def page(facts: dict[str, Any]) -> str:
    """Return the page of the counts, in Markdown."""
    head = f"`make fuzz`: mutations of every kind of file that hfpatch reads ({facts['releases']})."
    found = {kind: Counts(**counts) for kind, counts in facts["kinds"].items()}
    return f"# Files that lie\n\n{head}\n\n{table(found)}\n"


def table(found: dict[str, Counts]) -> str:
    """Return the counts as a table in Markdown."""
    keys = ("mutations", "refused", "taken", "tracebacks", "hangs", "memory_over_1_gb", "code_run", "seconds")
    words = ("mutations", "refused", "taken", "tracebacks", "hangs", "memory over 1 GB", "code run", "seconds")
    lines = [f"| file | {' | '.join(words)} |", "|---" * (len(words) + 1) + "|"]
    for kind, counts in found.items():
        lines.append(f"| {kind} | {' | '.join(f'{asdict(counts)[key]:,}' for key in keys)} |")
    totals = (f"{sum(asdict(counts)[key] for counts in found.values()):,.0f}" for key in keys)
    return "\n".join([*lines, f"| all | {' | '.join(totals)} |"])


def prepare() -> None:
    """Make a process ready: the module that nobody may import is on its path, and proofs are kept for this run only."""
    huggingface_hub.constants.HF_ASSETS_CACHE = tempfile.mkdtemp(prefix="hfpatch-fuzz-")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    sys.path.insert(0, str(traps.install(Path(tempfile.mkdtemp(prefix="hfpatch-fuzz-")))))


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--count", type=int, default=10_000, help="mutations of each kind of file")
    words.add_argument("--kind", choices=[*KINDS], action="append", help="only this kind of file")
    words.add_argument("--first", type=int, default=0, help="the number of the first mutation")
    words.add_argument("--processes", type=int, default=1, help="processes at once")
    words.add_argument("--json", type=Path, help="write the counts here")
    words.add_argument("--markdown", type=Path, help="write a table here")
    given = words.parse_args()
    kinds = given.kind or list(KINDS)
    end = given.first + given.count
    parts = [(kind, min(PART, end - at), at) for kind in kinds for at in range(given.first, end, PART)]
    found = {kind: Counts() for kind in kinds}
    with ProcessPoolExecutor(given.processes, get_context("spawn"), prepare) as pool:
        for (kind, _, _), counts in zip(parts, pool.map(run, *zip(*parts, strict=True)), strict=True):
            found[kind].add(counts)
    facts = {"releases": releases(), "kinds": {kind: asdict(c) for kind, c in found.items()}}
    print(json.dumps(facts, indent=1))
    if given.kind and given.json and given.json.exists():
        facts = merged(json.loads(given.json.read_text()), facts)
    if given.json:
        given.json.write_text(json.dumps(facts, indent=1) + "\n")
    if given.markdown:
        given.markdown.write_text(page(facts))
    bad = sum(c.tracebacks + c.hangs + c.memory_over_1_gb + c.code_run for c in found.values())
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
