"""LoRA targets of every architecture: PEFT adapts exactly what the names in its source say, and it trains.

What is meant is written down here a second time, from names: those of transformers' own sources, read by people.
`hfpatch` reads structure and no such list. Each disagreement is one's mistake.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hfpatch.atlas.atlas import MAPPINGS
from hfpatch.errors import InputError
from hfpatch.lab.example import example_inputs
from hfpatch.lab.tiny import TASKS, tiny_model
from hfpatch.lora.targets import LoraTargets, lora_targets
from hfpatch.model.source import REJECTIONS

pytestmark = pytest.mark.architectures

EVERY = [(task, name) for task in MAPPINGS for name in sorted(TASKS[task])]

SWEPT = (29, 30, 29, 27, 27, 29, 29, 28, 29, 29, 29, 28)
"""Models of each shard, counted on transformers 5.24: 192 causal, 113 multimodal, 38 encoder-decoder."""

RAN = (28, 30, 29, 26, 26, 29, 27, 28, 29, 28, 27, 28)
"""Those of them that are tiny and run, so that their adapters were trained a step."""

SHARDS = len(SWEPT)
IDLE = "does not run"

TOWER = re.compile(
    r"vision|visual|video|image|img_|timestamp|acoustic|semantic_token|audio|speech|sound|protein|qformer|perceiver|resampler|projector|connector|merger|aligner"
    r"|vqmodel|codec|talker|token2wav|code2wav|\bdit\b|patcher"
)
"""In the path to a block: it is no block of the language model."""

OTHER = re.compile(r"\bpatcher\.|protein_encoder\.|\.dit\.|(^|\.)talker\.")
"""Neither language model nor eye nor ear: what speaks, moves, cuts text or reads proteins. Only in scope `all`."""

ENCODES_OTHERS = {
    "pix2struct", "pp_formulanet", "vision-encoder-decoder", "pp_chart2table", "granite_speech", "granite_speech_plus",
}  # fmt: skip
"""Architectures whose `encoder` reads an image or a sound."""

ROUTER = re.compile(r"(^|\.)(gate|\w*router\w*|shared_expert_gate)(\.|$)")
"""In a block: chooses experts, or weighs a shared one."""

EXPERT = re.compile(r"(^|\.)experts(\.|$)|(^|\.)(mlp|block_sparse_moe)\.(input|output)_linear(\.|$)")
"""In a block: routed experts. JetMoE and its like call the stacks of experts linears."""

PASSED_BY = re.compile(
    r"\.indexer\."  # picks positions: no gradient
    r"|altup\.(correction|prediction)_coefs$"  # clamped, so the weight is read
    r"|\.o_a_proj$"  # one map for each group of heads
)
OUT = frozenset({"out_proj"})
KERNELS = {
    "mamba": OUT | {"x_proj", "dt_proj"},
    "falcon_mamba": OUT | {"x_proj", "dt_proj"},
    "jamba": frozenset({"dt_proj"}),
    "mamba2": OUT,
    "bamba": OUT,
    "falcon_h1": OUT,
    "granitemoehybrid": OUT,
    "zamba2": OUT,
    "nemotron_h": OUT,
    "nemotron_h_omni": OUT,
    "nemo_speechlm": OUT,
}
"""Maps of a Mamba mixer whose weights go to the fused kernels, past an adapter."""


def starred(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def split(path: str, model: nn.Module) -> tuple[str, str] | None:
    """The path of the block that a module lies in, and the rest; None outside blocks."""
    parts = path.split(".")
    for i, part in enumerate(parts[1:], 1):
        item = ".".join(parts[: i + 1])
        if part.isdigit() and isinstance(model.get_submodule(".".join(parts[:i])), (nn.ModuleList, nn.Sequential)):
            if isinstance(model.get_submodule(item), (nn.Linear, nn.Conv2d)) or not list(
                model.get_submodule(item).children()
            ):
                return None
            return item, ".".join(parts[i + 1 :])
    return None


def kind_of(path: str, architecture: str, model: nn.Module) -> str:
    """language | router | expert | passed by | elsewhere."""
    found = split(path, model)
    if found is None or TOWER.search(found[0]):
        return "elsewhere"
    block, rest = found
    if architecture in ENCODES_OTHERS and re.match(r"(model\.)?encoder\.", block):
        return "elsewhere"
    if ROUTER.search(rest):
        return "router"
    if EXPERT.search(rest):
        return "expert"
    leaf = rest.rpartition(".")[2]
    last = architecture in {"pi0", "diffusion_gemma"} and block.endswith("language_model.layers.3")
    if last and leaf not in {"k_proj", "v_proj"}:
        return "passed by"  # keys and values are all that is read of it
    if re.search(r"mamba|mixer", rest) and leaf in KERNELS.get(architecture, ()):
        return "passed by"
    if hasattr(model.get_submodule(path.rpartition(".")[0]), "query_key") and leaf in {"query_key", "value"}:
        return "passed by"  # Reformer with a cache reads the weights
    return "passed by" if PASSED_BY.search(f".{rest}") else "language"


def linear_maps(model: nn.Module) -> Iterator[str]:
    return (path for path, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D)))


def stacks(model: nn.Module) -> Iterator[str]:
    """Stacked experts, routed or shared, by path."""
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.dim() > 1 and ("expert" in path or EXPERT.search(path)) and "bias" not in path:
            yield path


def meant(model: nn.Module, architecture: str) -> set[str]:
    own = {path for path in linear_maps(model) if kind_of(path, architecture, model) == "language"}
    shared = {path for path in stacks(model) if re.search(r"shared_experts\.\w+$", path)}
    return own | {p for p in shared if not TOWER.search(p) and model.get_parameter(p).dim() == 3}


def adapted(model: nn.Module) -> set[str]:
    found: set[str] = set()
    for path, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            plain = re.sub(r"\.base_layer(?=\.|$)", "", path)
            name = getattr(module, "parameter_name", None)
            found.add(plain if name in (None, "weight") else f"{plain}.{name}")
    return found


def injected(model: nn.Module, targets: LoraTargets) -> nn.Module:
    meta = next(model.parameters()).is_meta
    mine = copy.deepcopy(model)
    return inject_adapter_in_model(LoraConfig(r=2, **targets.kwargs()), mine, low_cpu_mem_usage=meta)


NO_WEIGHTS = re.compile(r"bias|attention_input\.query")
"""Parameters of two dimensions that products read and that are no weights: biases of heads, learned queries."""

REFUSED = {"pp_formulanet"}
"""Models that PEFT refuses whole: it asks them for embeddings, and their class raises."""


class Multiplied(TorchDispatchMode):
    """Notes which parameters are factors of a matrix product."""

    PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "mv", "addmv"})

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names: dict[int, set[str]] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            if p.dim() > 1 and not NO_WEIGHTS.search(name):
                self.names.setdefault(p.untyped_storage().data_ptr(), set()).add(name)
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.PRODUCTS:
            for arg in args:
                if isinstance(arg, torch.Tensor) and arg.dim() > 1:
                    self.found |= self.names.get(arg.untyped_storage().data_ptr(), set())
        return func(*args, **(kwargs or {}))


def built(task: str, architecture: str) -> PreTrainedModel | None:
    """A tiny model, else one of the default config on meta; None where neither is to be had."""
    try:
        return tiny_model(architecture, task=task)
    except REJECTIONS:
        pass
    name: Any = TASKS[task][architecture]
    cls: Any = getattr(transformers, name[0] if isinstance(name, (list, tuple)) else name)
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            return shortened(cls._from_config(CONFIG_MAPPING[architecture]()))
    except REJECTIONS:
        return None


def shortened(model: PreTrainedModel) -> PreTrainedModel:
    """The model with two layers of each kind in each of its lists."""
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList) and len(module) > 4:
            kinds = [_kind(item) for item in module]
            for i in reversed(range(len(module))):
                if kinds[:i].count(kinds[i]) > 1:
                    del module[i]
    return model


def _kind(layer: nn.Module) -> list[Any]:
    return [(n, type(m), [p.shape for p in m.parameters(recurse=False)]) for n, m in layer.named_modules()]


LONG = {"deepseek_v4": 160}
"""Tokens, where some maps see nothing of a shorter text."""


APART = {"encoder-decoder", "diffusion_gemma", "pi0"}
"""Nothing reads the end of the first stack: the default decoder has no cross-attention; the second reads a cache."""


def inputs_of(model: nn.Module, architecture: str) -> dict[str, Any]:
    """Text, where the model runs on that; else what it reads."""
    length = LONG.get(architecture, 12)
    ids = (torch.arange(2 * length).reshape(2, length) * 7 + 3) % 40 + 2
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        for inputs in (text, {**text, "decoder_input_ids": ids}):
            try:
                model(**inputs)
            except REJECTIONS:
                continue
            return inputs
    try:
        return example_inputs(model)
    except REJECTIONS:
        return text


def run(model: nn.Module, inputs: dict[str, Any]) -> Any:
    try:
        return model(**inputs)
    except REJECTIONS:
        return None


def complaints(model: PreTrainedModel, architecture: str) -> Iterator[str]:
    """What is wrong with the targets of a model."""
    targets = lora_targets(model)
    if architecture in REFUSED:
        with pytest.raises(NotImplementedError):
            injected(model, targets)
        return
    lora = injected(model, targets)
    got, want = adapted(lora), meant(model, architecture)
    for said, paths in (("missing", want - got), ("extra", got - want)):
        if paths:
            yield f"{said}: {sorted({starred(p) for p in paths})}"
    yield from wrong_when_asked(model, architecture, got)
    yield from in_neither(model)
    if len(model.config.sub_configs) > 1:
        yield from wrong_in_scopes(model, architecture)
    if next(model.parameters()).is_meta:
        return
    inputs = inputs_of(model, architecture)
    watch = Multiplied(model)
    torch.manual_seed(0)
    with torch.no_grad():
        before = run(model, inputs)
        if before is None:
            yield IDLE
            return
        with watch:
            model(**inputs)
    yield from unsaid(model, architecture, targets, watch.found, got)
    yield from wrong_in_training(model, architecture, lora.eval(), inputs, before, watch.found)


def wrong_when_asked(model: nn.Module, architecture: str, plain: set[str]) -> Iterator[str]:
    routed = {p for p in stacks(model) if kind_of(p, architecture, model) == "expert" and p not in plain}
    listed = {p.removesuffix(".weight") for p in routed} & set(linear_maps(model))
    routed = {p for p in routed if p.removesuffix(".weight") not in listed} | listed
    got = adapted(injected(model, lora_targets(model, experts=True))) - plain
    if got != {re.sub(r"\.weight$", "", p) for p in routed}:
        yield f"experts: {sorted({starred(p) for p in got})} for {sorted({starred(p) for p in routed})}"


def in_neither(model: nn.Module) -> Iterator[str]:
    """Every linear map is adapted in the scope `all`, or left out with a reason. None is in torch's encoder layers."""
    targets = lora_targets(model, "all")
    held = {starred(p.removesuffix(".weight")) for p in (*targets.modules, *targets.parameters)}
    held |= {out.path for out in targets.left_out if out.reason}
    if silent := {starred(p) for p in linear_maps(model)} - held:
        yield f"all: neither adapted nor left out: {sorted(silent)}"
    if any(isinstance(module, nn.TransformerEncoderLayer) for module in model.modules()):
        yield "holds one of torch's encoder layers, which test_encoder_fast_path.py tries in composites only"


def wrong_in_scopes(model: nn.Module, architecture: str) -> Iterator[str]:
    """Towers and what joins them to the language model: apart from each other, and by name what they are."""
    found: dict[str, set[str]] = {}
    for scope in ("language", "vision", "audio", "projector", "all"):
        try:
            targets = lora_targets(model, scope)
        except InputError:
            continue
        found[scope] = {*targets.modules, *targets.parameters}
    whole = found.pop("all")
    for scope, paths in found.items():
        if paths - whole:
            yield f"{scope}, not in all: {sorted({starred(p) for p in paths - whole})}"
        for other, theirs in found.items():
            if other < scope and paths & theirs:
                yield f"{scope} and {other}: {sorted({starred(p) for p in paths & theirs})}"
    if rest := {p for p in whole - set().union(*found.values()) if not OTHER.search(p)}:
        yield f"all, in no scope: {sorted({starred(p) for p in rest})}"
    if odd := {p for p in whole - found["language"] if kind_of(p, architecture, model) == "language"}:
        yield f"language, elsewhere: {sorted({starred(p) for p in odd})}"


def unsaid(model: nn.Module, architecture: str, targets: LoraTargets, used: set[str], got: set[str]) -> Iterator[str]:
    """Matrices of the language model's blocks that take part in the run and are neither adapted nor left out."""
    out = {o.path for o in targets.left_out}
    silent = {
        starred(path)
        for path in used
        if kind_of(path, architecture, model) != "elsewhere" and not {path, path.removesuffix(".weight")} & got
    }
    silent = {p for p in silent if not {p, p.removesuffix(".weight")} & out}
    if silent:
        yield f"neither adapted nor left out: {sorted(silent)}"


def backward(model: nn.Module, inputs: dict[str, Any]) -> bool:
    """Make a backward pass, and say whether the model can."""
    try:
        model(**inputs).logits.float().square().mean().backward()
    except REJECTIONS:
        return False
    return True


def wrong_in_training(
    model: nn.Module, architecture: str, lora: nn.Module, inputs: dict[str, Any], before: Any, used: set[str]
) -> Iterator[str]:
    # PEFT freezes the base, and torch multiplies a transposed input by a frozen weight with another kernel, which
    # rounds otherwise (FSMT, LED). A gradient is also wanted by layers that save memory by running twice.
    lora.requires_grad_(True)
    torch.manual_seed(0)  # Reformer hashes at random
    with torch.no_grad():
        now = lora(**inputs).logits
    if not torch.equal(now.nan_to_num(), before.logits.nan_to_num()):
        yield f"another answer, by {(now - before.logits).abs().max():.1g}"
    torch.manual_seed(0)
    weights = {n: p for n, p in lora.named_parameters() if "lora_" in n}
    for name, parameter in weights.items():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    if not (backward(lora.eval(), inputs) or backward(lora.train(), inputs)):
        if backward(model.eval(), inputs) or backward(model.train(), inputs):
            yield "trains without adapters only"
        return
    idle = {
        starred(name)
        for name, p in weights.items()
        if p.grad is None and f"{name.partition('.lora_')[0]}.weight" in used
    }
    if idle and architecture not in APART:
        yield f"no gradient: {sorted(idle)}"


@pytest.mark.parametrize("shard", range(SHARDS))
def test_exactly_what_is_meant_and_all_of_it_trains(shard: int) -> None:
    transformers.logging.set_verbosity(50)
    wrong: list[str] = []
    swept = ran = 0
    for task, architecture in EVERY[shard::SHARDS]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = built(task, architecture)
            if model is None:
                continue
            swept += 1
            try:
                found = list(complaints(model, architecture))
            except (InputError, *REJECTIONS) as error:
                found = [f"{type(error).__name__}: {error}"]
        ran += IDLE not in found and not next(model.parameters()).is_meta
        wrong += [f"{task} {architecture}: {text}" for text in found if text != IDLE]
    assert not wrong, "\n".join(wrong)
    assert swept >= SWEPT[shard], "fewer models than there were"
    assert ran >= RAN[shard], "fewer models that run than there were"
