"""Loads saved adapters on models built anew, and writes their logits, as they are and merged, to a file.

python -m tests.real.adapter_worker OUT speech=FOLDER text=FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import PreTrainedModel

import hfpatch
from tests.real.whisper_gemma import batch, language_model, speech_llm, text_batch


def main() -> None:
    """Write `loaded <name>` and `merged <name>` for each adapter."""
    out, *given = sys.argv[1:]
    found: dict[str, torch.Tensor] = {}
    for name, folder in (item.split("=", 1) for item in given):
        base: Any = speech_llm(seed=7) if name == "speech" else language_model()
        inputs = batch() if name == "speech" else text_batch()
        if isinstance(base, PreTrainedModel):  # a hand-written model cannot be built anew from a config
            report = hfpatch.scan(folder, model=base)
            assert not report, str(report)
        model: Any = PeftModel.from_pretrained(base, folder).eval()
        with torch.no_grad():
            found[f"loaded {name}"] = model(**inputs).logits
            found[f"merged {name}"] = model.merge_and_unload()(**inputs).logits
    save_file(found, Path(out))


if __name__ == "__main__":
    main()
