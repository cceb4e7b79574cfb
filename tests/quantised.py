"""Tiny models quantised by each library, and every kind of edit on them: a table in docs/state.md.

`python -m tests.quantised` runs every cell and writes the table. A cell is *works* if the patched outputs and gradients
are those of a stock float32 model with the unpacked weights and the same patch, status finds every edit in force, the
state dict has no other names than without the patch, and a revert leaves neither a record nor a hook and the outputs
of the quantised model bit for bit; *refused* if hfpatch says why in a sentence; *not possible* if the library has no
way to do it.
"""

from __future__ import annotations

import importlib
import re
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import nn
from transformers import BitsAndBytesConfig, QuantoConfig, TorchAoConfig

import hfpatch
from hfpatch.compat.quantising.quantised import coded
from hfpatch.errors import HfpatchError
from hfpatch.lab.overflow import overflow
from hfpatch.lab.tiny import COMPOSITES, SpeechLLM, tiny_model
from hfpatch.patching.record import records_of

BATCH = {"input_ids": (torch.arange(24).reshape(2, 12) * 7 + 3) % 64}


def saved(model: Any) -> Path:
    """The folder of a checkpoint, for `from_pretrained`."""
    folder = Path(tempfile.mkdtemp(dir=tempfile.gettempdir()))
    model.save_pretrained(folder)
    return folder


def loaded(config: Callable[[], Any]) -> Callable[[Any], Any]:
    """A quantiser that `from_pretrained(quantization_config=)` runs."""

    def load(model: Any) -> Any:
        words = {"dtype": model.dtype, "attn_implementation": model.config._attn_implementation}
        return type(model).from_pretrained(saved(model), quantization_config=config(), **words).eval()

    return load


def torchao(config: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: TorchAoConfig(config(importlib.import_module("torchao.quantization")))


def int8(ao: Any) -> Any:
    return ao.Int8WeightOnlyConfig(version=2)


def int4(ao: Any) -> Any:
    """The int4 of torchao that runs on a CPU: `Int4WeightOnlyConfig` packs for GPUs."""
    groups = importlib.import_module("torchao.quantization.granularity").PerGroup(16)
    return ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=groups)


def hqq(model: Any) -> Any:
    """transformers 5.24 refuses `HqqConfig`: its quantiser is not there yet, so hqq's own door."""
    with torch.random.fork_rng(devices=[]):
        config = importlib.import_module("hqq.core.quantize").BaseQuantizeConfig(nbits=4, group_size=16)
        door = importlib.import_module("hqq.models.hf.base").AutoHQQHFModel
        door.quantize_model(model, quant_config=config, compute_dtype=model.dtype, device="cpu")
    return model


class Kernel:
    """In the place of `ggml-org/ggml-quantization`, which is on the hub and has nothing for a CPU.

    It multiplies by the blocks as transformers' own `dequantize` unpacks them.
    """

    gemv_types = frozenset({8})

    def supports(self, ggml_type: int) -> bool:
        return ggml_type in self.gemv_types

    def mul_mat_vec(self, weight: torch.Tensor, x: torch.Tensor, ggml_type: int, rows: int) -> torch.Tensor:
        dequantize = importlib.import_module("transformers.integrations.gguf.dequant").dequantize
        return x.float() @ dequantize(weight, ggml_type, torch.float32).reshape(rows, -1).T


def packed(model: Any) -> Any:
    """The modules in which transformers 5.24 keeps the blocks of a GGUF packed, Q8_0, in the place of linear layers.

    Its loader puts them there for qwen35, qwen35moe and lfm2 alone, and only if the kernel can be had.
    """
    import gguf
    from transformers.integrations.gguf import kernels, utils

    kernels._gguf_kernel = Kernel()
    linear = {
        f"{path}.weight": m for path, m in model.named_modules() if type(m) is nn.Linear and "lm_head" not in path
    }
    fits = {name: m.weight for name, m in linear.items() if m.in_features % 32 == 0 and m.out_features > 1}
    q8 = gguf.GGMLQuantizationType.Q8_0
    for name, module in utils.replace_with_gguf_modules(model, dict.fromkeys(fits, int(q8)), Kernel()).items():
        module.weight.data = torch.from_numpy(gguf.quants.quantize(fits[name].detach().float().numpy(), q8))
        if module.bias is not None:
            module.bias = linear[name].bias
    return model


def four_bits() -> Any:
    words: Any = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float16}
    return BitsAndBytesConfig(load_in_4bit=True, **words)


QUANTISED: dict[str, Callable[[Any], Any]] = {
    "torchao int8": loaded(torchao(int8)),
    "torchao int4": loaded(torchao(int4)),
    "bitsandbytes int8": loaded(lambda: BitsAndBytesConfig(load_in_8bit=True)),
    "bitsandbytes nf4": loaded(four_bits),
    "quanto int8": loaded(lambda: QuantoConfig(weights="int8")),
    "quanto int4": loaded(lambda: QuantoConfig(weights="int4")),
    "hqq int4": hqq,
    "GGUF packed": packed,
}


def torchao_in_place(config: Callable[[Any], Any]) -> Callable[[Any, set[str]], None]:
    def quantise(model: Any, names: set[str]) -> None:
        ao = importlib.import_module("torchao.quantization")
        ao.quantize_(model, config(ao), filter_fn=lambda module, name: name in names)

    return quantise


def quanto_in_place(kind: str) -> Callable[[Any, set[str]], None]:
    def quantise(model: Any, names: set[str]) -> None:
        tools = importlib.import_module("optimum.quanto")
        tools.quantize(model, weights=getattr(tools, kind), include=sorted(names))
        tools.freeze(model)

    return quantise


IN_PLACE: dict[str, Callable[[Any, set[str]], Any]] = {
    "torchao int8": torchao_in_place(int8),
    "torchao int4": torchao_in_place(int4),
    "quanto int8": quanto_in_place("qint8"),
    "quanto int4": quanto_in_place("qint4"),
    "hqq int4": lambda model, names: hqq(model),
}
"""Those that quantise a loaded model; the others do it while transformers loads."""


def llama(dtype: torch.dtype = torch.float16) -> Any:
    """A tiny Llama as `from_pretrained(dtype=)` leaves it."""
    model = tiny_model("llama", **SIZES)
    return type(model).from_pretrained(saved(model), dtype=dtype, attn_implementation="eager").eval()


def dequantised(model: Any) -> Any:
    """A stock float32 Llama with the values that each library itself unpacks."""
    return with_values(llama(torch.float32), model)


def with_values(twin: Any, model: Any) -> Any:
    """A float32 model with the weights of a quantised one, unpacked by its library."""
    state = {name: p.detach().float() for name, p in model.named_parameters() if type(p) is nn.Parameter}
    for path, module in model.named_modules():
        value = unpacked(module)
        if value is not None:
            bias: Any = getattr(module, "bias", None)
            state |= {} if bias is None else {f"{path}.bias": bias.detach().float()}  # of hqq no parameter
            state[f"{path}.weight"] = value.detach().float().reshape(twin.get_parameter(f"{path}.weight").shape)
    found = twin.load_state_dict({n: v for n, v in state.items() if not n.endswith("W_q")}, strict=False)
    assert set(found.missing_keys) <= {"lm_head.weight"} and not found.unexpected_keys, found  # a tied head
    return twin


def unpacked(module: Any) -> torch.Tensor | None:
    """The weight of a layer, by the function of its own library; None where it is not quantised."""
    kind = type(module).__name__
    if kind == "HQQLinear":
        return module.dequantize()
    if kind in ("Linear4bit", "Linear8bitLt"):
        tools = importlib.import_module("bitsandbytes.functional")
        if kind == "Linear8bitLt":
            scales = module.weight.SCB if module.state.SCB is None else module.state.SCB
            return tools.int8_vectorwise_dequant(module.weight.data, scales)
        return tools.dequantize_4bit(module.weight.data, module.weight.quant_state)
    if kind == "GgufLinear":
        dequantize = importlib.import_module("transformers.integrations.gguf.dequant").dequantize
        return dequantize(module.weight, module.ggml_type, torch.float32).reshape(module.out_features, -1)
    weight = getattr(module, "weight", None)
    if weight is None or type(weight) is nn.Parameter:
        return None
    exact = type(weight).__name__ == "Int8Tensor"  # its layer multiplies by the codes, then by the scale
    return weight.dequantize(torch.float32) if exact else weight.dequantize()


@dataclass(frozen=True)
class Case:
    """A language model to quantise, what stands around it, and a patch that makes one kind of edit."""

    base: Callable[[], Any]
    patch: str
    around: Callable[[Any], Any] = lambda model: model


SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
"""Large enough for the blocks of every quantiser."""


def overflowing() -> Any:
    model = tiny_model("llama", **{**SIZES, "num_hidden_layers": 4})
    overflow(model, BATCH)
    with torch.no_grad():  # its branches are at float16's limit, which int4 rounds beyond it
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(0.8)
    return model.half()


def plain(dtype: torch.dtype, architecture: str = "llama", **words: Any) -> Callable[[], Any]:
    return lambda: tiny_model(architecture, **{**SIZES, **words}).to(dtype)


def rounded(model: Any) -> Any:
    model.model.rotary_emb.bfloat16()  # as `.to(torch.bfloat16)` leaves it
    return model


def adapters(model: Any) -> Any:
    adapted: Any = COMPOSITES["lora-qv"](model)
    adapted.add_adapter("b", LoraConfig(r=4, target_modules=["k_proj", "q_proj"]))
    return adapted


FLOAT16, FLOAT32 = torch.float16, torch.float32
CASES: dict[str, Case] = {
    "attribute": Case(plain(FLOAT32, "gemma3_text"), "eps-alignment", SpeechLLM),
    "attribute that was not there": Case(plain(FLOAT32, "gemma3_text"), "embed-token-resolver", SpeechLLM),
    "hook": Case(overflowing, "fp16-residual-overflow"),
    "tensor": Case(plain(FLOAT32, "gemma3_text"), "projection-init", SpeechLLM),
    "buffer": Case(plain(torch.bfloat16), "fp32-buffers", rounded),
    "forward": Case(lambda: tiny_model("deepseek_v32", num_hidden_layers=1, index_topk=4), "fp32-indexer"),
    "scaled branch": Case(plain(FLOAT16), "fp16-branch-overflow"),
    "float32 inside": Case(plain(FLOAT16, mlp_bias=True), "fp16-branch-overflow"),
    "attention": Case(plain(FLOAT16), "fp32-attention-logits"),
    "adapter": Case(plain(FLOAT32), "lora-target-expansion", adapters),
    "one-plus-tanh": Case(plain(FLOAT32), "sigmoid-modulation", COMPOSITES["modulated"]),
}
ORDERS = ("before", "after")
"""The model is quantised before the patch, or after it."""
ALL = [(kind, quantiser, order) for kind in CASES for quantiser in QUANTISED for order in ORDERS]


@dataclass(frozen=True)
class Cell:
    kind: str
    quantiser: str
    order: str
    outcome: str
    """`works`, `refused`, `not possible`, or `FAILS`."""
    text: str


def call(model: nn.Module, *, gradients: bool = False) -> torch.Tensor:
    """Logits, of features before the text where the model takes them."""
    features = torch.linspace(-1, 1, 2 * 3 * 24).reshape(2, 3, 24)
    words = {"features": features} if hasattr(model, "speech_proj") else {}
    with torch.set_grad_enabled(gradients):
        return model(**BATCH, **words).logits.float()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    if not any(p.requires_grad for p in model.parameters()):
        return {}  # hqq freezes the model
    model.zero_grad()
    call(model, gradients=True).square().sum().backward()
    found = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def run(kind: str, quantiser: str, order: str) -> Cell:
    """Run one cell."""
    if order == "after" and quantiser not in IN_PLACE:
        return Cell(kind, quantiser, order, "not possible", "it quantises while transformers loads the model")
    case = CASES[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call(_quantised(case, quantiser, order))  # without a patch
        except (RuntimeError, ValueError, AttributeError, KeyError, AssertionError) as error:
            what = " ".join(f"{error}".split())[:160]
            return Cell(kind, quantiser, order, "not possible", f"without hfpatch either: {what}")
        try:
            outcome, text = _run(case, quantiser, order)
        except ValueError as error:
            outcome, text = "not possible", f"{error}"
        except HfpatchError as error:
            outcome, text = "refused", str(error)
        except AssertionError as error:
            outcome, text = "FAILS", f"{error}"
    return Cell(kind, quantiser, order, outcome, text)


def _quantised(case: Case, quantiser: str, order: str, patch: str = "") -> Any:
    """A quantised model, with what stands around it; with a patch that is applied before or after."""
    base = case.base().eval()
    model = _around(case, QUANTISED[quantiser](base) if order == "before" else base)
    if patch:
        fix = _applied(model, patch)
        assert fix.edits, f"nothing was applied: {fix.plan}"
    if order == "after":
        IN_PLACE[quantiser](base, _maps(case))
    if not any(coded(m) is not None for m in model.modules()):
        raise ValueError("it quantises no layer that has an adapter")
    return model


def _twin(case: Case, quantiser: str, order: str) -> Any:
    """A stock float32 model with the weights of the quantised one."""
    base = case.base().eval()
    if order == "before":
        base = QUANTISED[quantiser](base)
    else:
        IN_PLACE[quantiser](base, _maps(case))
    return _around(case, with_values(case.base().float().eval(), base))


def _maps(case: Case) -> set[str]:
    """Paths of the linear maps of the language model, but for the head."""
    return {path for path, m in case.base().named_modules() if type(m) is nn.Linear and path != "lm_head"}


def _run(case: Case, quantiser: str, order: str) -> tuple[str, str]:
    stock, twin = _quantised(case, quantiser, order), _twin(case, quantiser, order)
    model = _quantised(case, quantiser, order, case.patch)
    status = hfpatch.status(model)
    if status.lapsed:
        hfpatch.revert(model)
        _ends(model, stock)
        return "works", "quantising casts the model, which undoes the patch, and status says so"
    _applied(twin, case.patch)
    mine, theirs = gradients(model), gradients(twin)  # before an evaluation, which packs nf4 anew on some CPUs
    apart = sum(float((g - theirs[n]).square().sum()) for n, g in mine.items())
    size = sum(float(theirs[n].square().sum()) for n in mine)
    assert apart <= (3 * TOLERANCE) ** 2 * size, f"gradients are {(apart / size) ** 0.5:.1e} of their size away"
    if case.patch != "lora-target-expansion":
        assert list(model.state_dict()) == list(stock.state_dict()), "the state dict has other names"
    got, wanted = call(model), call(twin)
    off = float((got - wanted).norm() / wanted.norm())
    assert off < TOLERANCE, f"outputs are {off:.1e} of their size away"
    assert not hfpatch.status(model).lapsed, "an edit is gone after a step"
    hfpatch.revert(model)
    _ends(model, stock)
    return "works", ""


def _applied(model: Any, patch: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return hfpatch.apply(model, only=patch, verbose=False)


def _ends(model: Any, stock: Any) -> None:
    assert not hfpatch.status(model).edits, "the revert left edits"
    assert not any(records_of(module) for module in model.modules()), "a record stayed"
    same = torch.allclose(call(model), call(stock), rtol=0.0, atol=0.0, equal_nan=True)
    assert same, "the stock outputs did not come back"


TOLERANCE = 0.03
"""Relative error of float16 and of the quantiser's own arithmetic: bitsandbytes int8 rounds the inputs to 8 bits."""


def _around(case: Case, model: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return case.around(model).eval()


FILE = Path(__file__).parent.parent / "docs" / "state.md"
HEADING = "\n## Quantised weights\n"


def section(cells: list[Cell]) -> str:
    """The end of docs/state.md: a row for each quantiser and order, a column for each kind of edit."""
    found = {(c.kind, c.quantiser, c.order): c for c in cells}
    notes: dict[str, int] = {}

    def shown(cell: Cell) -> str:
        text = re.sub(r"^.* and is refused: ", "", " ".join(cell.text.split()))
        number = notes.setdefault(text, len(notes) + 1) if text else 0
        return cell.outcome + (f" [{number}]" if number else "")

    rows = [
        f"| {quantiser if order == 'before' else ''} | "
        f"{'quantise, apply' if order == 'before' else 'apply, quantise'} | "
        + " | ".join(shown(found[kind, quantiser, order]) for kind in CASES)
        + " |"
        for quantiser in QUANTISED
        for order in ORDERS
    ]
    counts = {word: sum(c.outcome == word for c in cells) for word in ("works", "refused", "not possible", "FAILS")}
    lines = [
        HEADING,
        "Made by `python -m tests.quantised`. *works*: the outputs and the gradients are those of a stock float32",
        "model with the weights as the library itself unpacks them and the same patch, `status` finds every edit in",
        "force, and a revert leaves the outputs of the quantised model bit for bit.",
        "",
        f"{counts['works']} cells work, {counts['refused']} are refused, {counts['not possible']} are not possible "
        f"without hfpatch either, {counts['FAILS']} fail.",
        "",
        f"| quantiser | order | {' | '.join(CASES)} |",
        f"|---|---|{'---|' * len(CASES)}",
        *rows,
        "",
        *(f"{number}. {text}" for text, number in notes.items()),
        "",
    ]
    return "\n".join(lines)


def documented() -> dict[tuple[str, str, str], str]:
    """Outcomes in docs/state.md, by kind, quantiser and order."""
    lines = [line for line in FILE.read_text().partition(HEADING)[2].splitlines() if line.startswith("|")]
    kinds = [cell.strip() for cell in lines[0].strip("|").split("|")][2:]
    out: dict[tuple[str, str, str], str] = {}
    for (quantiser, order), line in zip([(q, o) for q in QUANTISED for o in ORDERS], lines[2:], strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")][2:]
        out |= {(k, quantiser, order): re.sub(r" \[\d+\]$", "", c) for k, c in zip(kinds, cells, strict=True)}
    return out


if __name__ == "__main__":
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    ran: list[Cell] = []
    for place in ALL:
        ran.append(run(*place))
        print(f"{' | '.join(place)}: {ran[-1].outcome} {ran[-1].text[:200]}", flush=True)
    FILE.write_text(FILE.read_text().partition(HEADING)[0] + section(ran))
