"""The description of a tiny model that a patch is tested on. Imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Case:
    """A tiny model that a patch is tested on.

    Args:
        architecture: `config.model_type` of the language model; `*` for each that a patch with `serves` is proved for.
        dtype: Dtype of its weights.
        scale: Parameter globs -> factor, to bring tiny random weights into the failing range.
        fill: Parameter globs -> constant.
        config: Overrides for the tiny config. A list of strings is repeated to an entry for each layer.
        layers: Number of layers, if the tiny config takes another than its own; None for its own.
        cls: Name of the class of transformers; None for the most general language model of the architecture.
        inside: Name of a composite of `hfpatch.lab.tiny` that holds the model; None for the bare model.
        autocast: Dtype of an autocast region around the run; None for no autocast.
        attention: Attention implementation; written to the config directly, because the setter may refuse it.
        padded: Number of padding tokens on the left of the first of the two rows.
        tokens: Length of the two rows.
        device: `cpu` or `cuda`; a case for `cuda` is skipped without a GPU.
        tower: True if the architecture is a tower's: it runs inside a model that holds it, on an example batch with
            images or sounds, its own stream is the one that overflows, and what it returns counts beside the logits.
        overflow: Scale the layers that write to the residual stream until the stream passes 65,504 and no branch does.
        branches: Scale the feed-forward parts of two layers, and the last map of an attention if that is possible,
            until values in them pass 65,504. What they reach is measured, as with `plan(batch=)`.
    """

    architecture: str
    dtype: str = "float32"
    scale: Mapping[str, float] = field(default_factory=dict[str, float])
    fill: Mapping[str, float] = field(default_factory=dict[str, float])
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    layers: int | None = None
    cls: str | None = None
    inside: str | None = None
    autocast: str | None = None
    attention: str = "eager"
    padded: int = 0
    tokens: int = 12
    device: Literal["cpu", "cuda"] = "cpu"
    overflow: bool = False
    tower: bool = False
    branches: bool = False

    def __str__(self) -> str:
        overflow = " overflowing" if self.overflow else " with overflowing branches" if self.branches else ""
        inside = f" in {self.inside}" if self.inside else ""
        autocast = f" under {self.autocast} autocast" if self.autocast else ""
        attention = "" if self.attention == "eager" else f" {self.attention}"
        padded = " padded" if self.padded else ""
        return f"{self.cls or self.architecture} {self.dtype}{attention}{padded}{overflow}{autocast}{inside}"
