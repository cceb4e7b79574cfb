"""A transformers of tomorrow: modules of the installed one with another text, and a release that was never tested.

`python -m tests.newer DRIFT FOLDER` changes the modules in this process alone: it writes them into the folder, and they
are imported from there, so their source is what `inspect` reads. Then it plans and applies each patch on the
architectures that drifted and prints, as JSON, what came of each.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

RELEASE = "5.99.0"
"""Within the window that `pyproject.toml` states, and later than every release that was tested."""
FILES = {"llama": "llama", "gemma3_text": "gemma3", "qwen2": "qwen2", "cohere": "cohere", "t5": "t5"}
"""Architecture -> the folder that its code is in."""
ADD = r"hidden_states = residual \+ hidden_states\b"
SUM = r"hidden_states = (residual) \+ (hidden_states_attention \+ hidden_states_mlp)\b"
CALL = r"(decoder_layer\()\n(\s+)hidden_states,"
LAYER = r"(class \w+DecoderLayer\(.*?def forward\(\n\s+self,\n\s+)hidden_states(: torch\.Tensor,.*?\n\s+)(residual = )"
MODEL = r"(class \w+Model\(\w+PreTrainedModel\):.*?super\(\)\.__init__\(config\)\n)"
RETURN = r"(class \w+DecoderLayer\(.*?\n        return )hidden_states\n"
CALLED = r"(hidden_states = decoder_layer\(\n.*?\n            \))\n"
EAGER = r"(def eager_attention_forward\([^()]*\)[^\n]*:\n)"

Rewrite = tuple[str, str]
TABLE: tuple[Rewrite, ...] = (
    (r"\b(\w*?_?)original_inv_freq\b", r"\1first_frequencies"),
    (r"\binv_freq\b", "frequencies"),
    (r"_type\}_inv_freq\b", "_type}_frequencies"),
)
DRIFTS: dict[str, tuple[Rewrite, ...]] = {
    "a release alone": (),
    "the residual add is reordered": (
        (ADD, "hidden_states = hidden_states + residual"),
        (SUM, r"hidden_states = \2 + \1"),
    ),
    "the stream gets the dtype of the branch": (
        (ADD, "hidden_states = (residual + hidden_states).to(hidden_states.dtype)"),
        (SUM, r"hidden_states = (\1 + \2).to(hidden_states.dtype)"),
    ),
    "a norm computes in the dtype of its weight": (
        (r"\.to\(torch\.float32\)\n(\s+(?:variance|mean) = )", r".to(self.weight.dtype)\n\1"),
        (r"self\._norm\(x\.float\(\)\)", "self._norm(x.to(self.weight.dtype))"),
    ),
    "the feed-forward part has another name": ((r"self\.mlp\b", "self.ffn"), (r"\bself\.DenseReluDense\b", "self.ffn")),
    "the last map of the feed-forward part has another name": (
        (r"\b(self|module)\.(?:down_proj|wo)\b", r"\1.last"),
        (r'\["wo"\]', '["last"]'),
    ),
    "the stream is a keyword of another name": (
        (CALL, r"\1\n\2stream=hidden_states,"),
        (LAYER, r"\1*,\n        stream\2hidden_states = stream\n        \3"),
    ),
    "the stream is a keyword of its own name": ((CALL, r"\1\n\2hidden_states=hidden_states,"),),
    "the stream comes in a tuple": (
        (CALL, r"\1\n\2(hidden_states, position_ids),"),
        (LAYER, r"\1packed\2hidden_states, _ = packed\n        \3"),
    ),
    "the attention interface gets no scaling": (
        (r"\n\s+scaling=self\.scaling,", ""),
        (r"scaling: float(?: \| None)?(?: = None)?,", "scaling: float | None = None,"),
        (EAGER, r"\1    scaling = module.scaling\n"),
    ),
    "the attention interface gets the mask by another name": (
        (r"(value_states,\n\s+)attention_mask,(\n\s+dropout=)", r"\1mask=attention_mask,\2"),
        (r"(value: torch\.Tensor,\n\s+)attention_mask: torch\.Tensor \| None,", r"\1mask: torch.Tensor | None,"),
        (EAGER, r"\1    attention_mask = mask\n"),
    ),
    "the attention interface returns a tensor alone": (
        (r"attn_output, attn_weights = (attention_interface\()", r"attn_weights, attn_output = None, \1"),
        (r"(def eager_attention_forward\(.*?return attn_output), attn_weights", r"\1"),
    ),
    "the eps has moved in the config": (
        (r"config\.(?:rms_norm_eps|layer_norm_eps)\b", 'config.norms["eps"]'),
        (MODEL, r'\1        config.norms = {"eps": 1e-5}\n'),
    ),
    "the head is a product with its weight": (
        (r"logits = self\.lm_head\((.*?)\)\n", r"logits = nn.functional.linear(\1, self.lm_head.weight)\n"),
    ),
    "a layer returns an output with names": (
        (RETURN, r"\1BaseModelOutputWithPast(last_hidden_state=hidden_states)\n"),
        (CALLED, r"\1.last_hidden_state\n"),
    ),
    "the norms are of a class of another name": ((r"(\w+)(?:RMSNorm|LayerNorm)\b", r"\1Rescaling"),),
    "the eps of a norm has another name": ((r"self\.(?:variance_epsilon|eps)\b", "self.smallest"),),
    "the attention interface is looked up by another name": ((r"\bget_interface\b", "interface_for"),),
    "the head has another name": ((r"\blm_head\b", "output_map"),),
    "the rotary table has another name": TABLE,
    "the rotary table has another name, and the loader knows it": TABLE,
}  # fmt: skip
"""What a release may do to its code -> regular expressions and what they become, in each file that has them."""
SHARED = {
    "the attention interface is looked up by another name": ("modeling_utils",),
    "the head has another name": ("modeling_utils",),
    "the rotary table has another name, and the loader knows it": ("modeling_utils", "modeling_rope_utils"),
}
"""Drift -> the modules of all architectures that it changes too."""


@dataclass(frozen=True)
class Came:
    """What came of a patch on a drifted architecture.

    Attributes:
        patch: Its id.
        case: The case that was built.
        decided: The words of its decisions, without doubles.
        reasons: Their reasons.
        edits: The number of edits.
        before: The symptom on the stock model; None if it does not show.
        after: The symptom once the plan is applied; None if it does not show.
        healthy: Its logits on healthy weights: their relative distance from float32, patched and stock.
        most: What that may be.
        raised: A traceback's last line, where one was raised by hfpatch or by the model once it is patched.
    """

    patch: str
    case: str
    decided: list[str]
    reasons: list[str]
    edits: int = 0
    before: str | None = None
    after: str | None = None
    healthy: tuple[float, float] | None = None
    most: float = 0.0
    raised: str = ""


class Newer(MetaPathFinder):
    """Finds modules in other files."""

    def __init__(self, files: dict[str, Path]) -> None:
        self.files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self.files.get(fullname)
        return file and importlib.util.spec_from_file_location(fullname, file)


def drift(name: str, folder: Path) -> list[str]:
    """Write the modules that a drift changes; return the architectures whose code it changed. Imports nothing."""
    package = Path(importlib.util.find_spec("transformers").origin).parent
    files: dict[str, Path] = {}
    changed: list[str] = []
    for module in SHARED.get(name, ()):
        files |= _rewritten(name, package, module, folder)
    for architecture, where in FILES.items():
        found = _rewritten(name, package, f"models.{where}.modeling_{where}", folder)
        if found or not DRIFTS[name]:
            changed.append(architecture)
        files |= found
    sys.meta_path.insert(0, Newer(files))
    return changed


def _rewritten(name: str, package: Path, module: str, folder: Path) -> dict[str, Path]:
    """Write a module's text as a drift changes it, if it does; return the file by the module's name."""
    was = text = package.joinpath(*module.split(".")).with_suffix(".py").read_text()
    for old, new in DRIFTS[name]:
        text = re.sub(old, new, text, flags=re.DOTALL)
    if text == was:
        return {}
    file = folder / f"{module}.py"
    file.write_text(text)
    return {f"transformers.{module}": file}


def pretend(folder: Path) -> None:
    """Let packages that ask which transformers is installed hear of the later release."""
    about = folder / f"transformers-{RELEASE}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformers\nVersion: {RELEASE}\n")
    sys.path.insert(0, str(folder))
    import transformers

    transformers.__version__ = RELEASE
    transformers.logging.set_verbosity_error()


def outcomes(architectures: list[str]) -> Iterator[Came]:
    """Yield what comes of each patch on each architecture that it names, of one that names none on the first."""
    from hfpatch.errors import InputError
    from hfpatch.patching import registry
    from hfpatch.patching.language import ANY
    from hfpatch.patching.verifying.proving import repros
    from hfpatch.patching.verifying.trial import build

    for entry in registry.entries().values():
        for architecture in architectures:
            named = [case for case in repros(entry) if case.architecture == architecture and case.device == "cpu"]
            if not named and ANY in entry.architectures and architecture == architectures[0]:
                named = [replace(case, architecture=architecture) for case in repros(entry)[:1] if case.device == "cpu"]
            for case in named[:2]:
                try:
                    trial = build(case)
                except InputError:
                    continue  # its weights or flags are those of another architecture
                yield came(entry, trial)


def came(entry: Any, trial: Any) -> Came:
    """Plan and apply one patch as a caller who asks for it by name does."""
    import hfpatch
    from hfpatch.patching.proofs.prove import healthy, most_error
    from hfpatch.patching.verifying.proving import FAILURES
    from hfpatch.patching.verifying.trial import build

    case, out = trial.case, Came(entry.id, str(trial.case), [], [])
    try:
        out = replace(out, before=entry.patch.symptom(trial))
    except FAILURES as error:
        return replace(out, before=f"the stock model does not run: {type(error).__name__}: {error}")
    try:
        made = hfpatch.plan(trial.model, only=entry.id, batch=trial.inputs() if case.branches else None)
        decided = list(dict.fromkeys(d.decided for d in made.decisions))
        out = replace(out, decided=decided, reasons=[d.reason for d in made.decisions], edits=len(made.edits))
        if not made.edits:
            return out
        made.apply(verbose=False)
        out = replace(out, after=entry.patch.symptom(trial))
        if not {d.effect for d in made.decisions if d.effect} <= {"exact", "equivalent"}:
            return out
        well = build(healthy(case))
        stock = well.error(well.logits())
        hfpatch.apply(well.model, only=entry.id, verbose=False)
        return replace(out, healthy=(well.error(well.logits()), stock), most=most_error(entry, stock))
    except FAILURES as error:
        return replace(out, raised=f"{type(error).__name__}: {error}")


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    os.environ["HF_ASSETS_CACHE"] = str(folder / "assets")
    changed = drift(name, folder)
    pretend(folder)
    print(json.dumps([asdict(each) for each in outcomes(changed)]))


if __name__ == "__main__":
    main()
