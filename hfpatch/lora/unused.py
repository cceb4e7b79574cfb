"""Maps whose output the loss never sees, so that an adapter on them gets no gradient.

Where a value of the config says it, it is read there: `vision_feature_layer=-2` takes the output of the layer before
the last. The others are listed by architecture. `tests/architectures/test_unused_sweep.py` holds both against a
backward pass of every multimodal architecture.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hfpatch.lora.blocks import Layout
from hfpatch.model.walk import inside

AROUND = ("vision_feature_layer", "vision_feature_layers")
"""Keys of the config of a model around towers: which of the hidden states of each vision tower it reads."""
WITHIN = "feature_layer"
"""Key of a vision tower's own config that says the same (Phi-4)."""

OTHERWISE = frozenset({"granite4_vision"})
"""Architectures that read further hidden states, which other keys name."""

LAST = r"language_model\.layers\.LAST\.(self_attn\.[qo]_proj|mlp\.)"

NEVER: Mapping[str, tuple[tuple[str, str], ...]] = {
    "diffusion_gemma": (
        (rf"model\.encoder\.{LAST}", "of the encoder's last layer, the decoder reads keys and values only"),
    ),
    "emu3": ((r"model\.vqmodel\.", "images become tokens before they are read"),),
    "janus": ((r"model\.generation_aligner\.", "it is for images that the model draws"),),
    "kyutai_speech_to_text": ((r"codec_model\.", "sounds come as the tokens of its codec"),),
    "nemo_speechlm": (
        (r"model\.audio_tower\.diarization_model\.", "who speaks is decided beside the text"),
        (r"model\.word_timestamp_encoder\.", "when a word is said is decided beside the text"),
    ),
    "pi0": ((rf"model\.vlm\.{LAST}", "of the last layer, the actions read keys and values only"),),
    "vibevoice_asr": ((r"model\.(acoustic|semantic)_tokenizer_encoder\.", "its tokenizers run without gradients"),),
}
"""Architecture -> paths that the text's loss never sees, each with the reason. `LAST`: the index of the last layer."""


def unused(layout: Layout) -> dict[str, str]:
    """Return the linear maps whose output the loss never sees: path -> reason."""
    found: dict[str, str] = {}
    for block, reason in _beyond_the_feature_layer(layout):
        found |= {path: reason for path in layout.below(block) if path in layout.sizes}
    for top, model in layout.models.items():
        for pattern, reason in NEVER.get(model.config.model_type, ()):
            last = max((len(blocks) for home, blocks in layout.blocks.items() if layout.is_language(home)), default=0)
            start = re.compile(pattern.replace("LAST", str(last - 1)))
            for path in layout.sizes:
                if inside(path, top) and start.match(path[len(top) :].lstrip(".")):
                    found.setdefault(path, f"never used: {reason}, so it gets no gradient")
    return found


def _beyond_the_feature_layer(layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield the blocks of vision towers after the last hidden state that is read, with the reason."""
    for home, blocks in layout.blocks.items():
        if layout.part_kind(home) != "vision":
            continue
        key, value = _feature_layer(layout, home)
        read: list[Any] = [value] if isinstance(value, int) else list(value or ())
        lists: dict[str, list[str]] = {}
        for block in blocks:
            lists.setdefault(block.rpartition(".")[0], []).append(block)
        if not read or not all(isinstance(v, int) for v in read) or len(lists) != 1:
            continue
        depth = len(blocks)
        last = max(v if v >= 0 else depth + 1 + v for v in read)  # of the hidden states, the first is the embedding
        for block in blocks[last:]:
            yield block, f"never used: {key}={value} reads the output of an earlier layer, so it gets no gradient"


def _feature_layer(layout: Layout, home: str) -> tuple[str, Any]:
    """Return the key and the value that say which hidden states of a tower are read; ("", None) if none does."""
    own: Any = getattr(layout.places[home].module, "config", None)
    if isinstance(value := getattr(own, WITHIN, None), int):
        return WITHIN, value
    for top in sorted((path for path in layout.models if inside(home, path) and path != home), key=len, reverse=True):
        config: Any = layout.models[top].config
        for key in AROUND if config.model_type not in OTHERWISE else ():
            if (value := getattr(config, key, None)) is not None:
                return key, value
    return "", None
