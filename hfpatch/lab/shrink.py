"""Shrinks the default config of any architecture to that of a tiny model, by the names of its size keys."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from hfpatch.lab.sizes import AUDIO, DEFAULTS, QUIRKS, SIZES, UNSET, VISION, VOCABULARY


def shrunk(cls: Any, kind: str = "text", **overrides: Any) -> dict[str, Any]:
    """Return arguments for a config class that shrink its default to a tiny model.

    Each sub-config is shrunk by its own class. Lists with one entry per layer are cut so that each kind of layer in
    them stays if there are enough layers.

    Args:
        cls: A config class of transformers.
        kind: What the config describes: text | vision | audio.
        overrides: Config values; of the text part if the config has several. Lists follow `num_hidden_layers`.
    """
    default = DEFAULTS.get(cls.model_type, {})
    return _shrunk(cls(**copy.deepcopy(default)), default, kind, overrides)  # configs may modify their arguments


def shrunk_like(config: Any, kind: str = "text", **overrides: Any) -> Any:
    """Return a config of the same class as this one, with the same settings and the sizes of a tiny model.

    Args:
        config: A config, of a class of transformers or another.
        kind: What it describes: text | vision | audio.
        overrides: Config values; of the text part if the config has several.
    """
    given = {key: value for key, value in config.to_dict().items() if not _computed(config, key)}
    return type(config).from_dict({**given, **_shrunk(config, {}, kind, overrides)})


def _shrunk(have: Any, default: Mapping[str, Any], kind: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    cls: Any = type(have)
    whole = "text_config" not in cls.sub_configs
    kept = _sizes(have, kind, overrides.get("num_hidden_layers") if whole else None)
    for name in cls.sub_configs:
        if (part := getattr(have, name, None)) is not None:
            wanted = overrides if name == "text_config" else {}
            kept[name] = {**shrunk(type(part), _kind(name, part), **wanted), "model_type": type(part).model_type}
    for key, value in copy.deepcopy({**default, **QUIRKS.get(cls.model_type, {})}).items():
        kept[key] = {**_mapping(kept.get(key, getattr(have, key, None))), **value} if isinstance(value, dict) else value
    return {**kept, **overrides} if whole else kept


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _kind(name: str, part: Any) -> str:
    if name == "text_config":
        return "text"
    words = f"{name} {type(part).model_type}"
    if any(w in words for w in ("vision", "vq", "image", "vit", "siglip", "visual")):
        return "vision"
    return "audio" if any(w in words for w in ("audio", "speech", "codec", "encoder_config")) else "text"


def _sizes(have: Any, kind: str, wanted_layers: int | None) -> dict[str, Any]:
    wanted = {**SIZES, **{"vision": VISION, "audio": AUDIO}.get(kind, {})}
    names = {own: common for common, own in have.attribute_map.items()}
    kept: dict[str, Any] = {}
    layers = None
    for key, value in have.to_dict().items():
        common = key if key in wanted else names.get(key, key)
        if isinstance(value, bool) or _computed(have, key):
            continue
        if isinstance(value, list):  # one entry per layer: as many as layers stay
            if isinstance(wanted.get(common), list):
                kept[key] = list(wanted[common])
            elif common in wanted and len(value) == getattr(have, "num_hidden_layers", None):
                kept[key] = [wanted[common]] * wanted["num_hidden_layers"]
            elif common in wanted and len(value) == 2:  # height and width, or one for text and one for images
                kept[key] = [wanted[common]] * 2
            continue
        if common in wanted and not isinstance(wanted[common], list) and (value is not None or common in UNSET):
            kept[key] = wanted[common]
        if common == "num_hidden_layers" and isinstance(value, int):
            layers = value, wanted_layers or wanted[common]
    kept.update(_tokens(have))
    if getattr(have, "is_encoder_decoder", False):
        kept["decoder_start_token_id"] = 1
    if "kv_lora_rank" in kept and "num_key_value_heads" in kept:  # latent attention expands to every head
        kept["num_key_value_heads"] = kept["num_attention_heads"]
    if layers:
        kept.update(_lists(have, kept, *layers))
    if "head_dim" not in kept:
        kept.pop("query_pre_attn_scalar", None)
    return kept


def _computed(have: Any, key: str) -> bool:
    return isinstance(p := getattr(type(have), key, None), property) and p.fset is None


def _lists(have: Any, kept: Mapping[str, Any], layers: int, fewer: int) -> dict[str, Any]:
    """Return the lists with one entry per layer, cut to the same layers."""
    said = have.to_dict()
    full = {k: v for k, v in said.items() if isinstance(v, list) and len(v) == layers and not _computed(have, k)}
    full = {k: v for k, v in full.items() if k not in SIZES}
    own: dict[int, Any] = {int(k): v for k, v in said.get("per_layer_config", {}).items()}
    if not full:
        return {}
    rows = [repr([*(v[i] for v in full.values()), own.get(i)]) for i in range(layers)]
    chosen = sorted({rows.index(kind) for kind in dict.fromkeys(rows)})[:fewer]
    spare = [i for i in range(layers) if i not in chosen]
    chosen = sorted((chosen + spare)[:fewer])
    chosen = [chosen[i % len(chosen)] for i in range(fewer)]
    cut: dict[str, Any] = {k: [v[i] for i in chosen] for k, v in full.items()}
    if own:
        cut["per_layer_config"] = {
            new: {k: _scaled(said, kept, k, v) for k, v in own[old].items()}
            for new, old in enumerate(chosen)
            if old in own
        }
    return cut


def _scaled(said: Mapping[str, Any], kept: Mapping[str, Any], key: str, value: Any) -> Any:
    """Return a layer's own value, scaled like the config's value for all layers, and at least 2; else unchanged."""
    return max(2, kept[key] * value // said[key]) if key in kept else value


def _tokens(have: Any) -> dict[str, Any]:
    """Return token ids inside the small vocabulary; each placeholder of an image or a sound gets a unique id."""
    kept: dict[str, Any] = {}
    free = VOCABULARY - 1
    for key, value in have.to_dict().items():
        if not key.endswith(("token_id", "token_index")) or (value is None and key != "pad_token_id"):
            continue
        if key in ("bos_token_id", "eos_token_id", "decoder_start_token_id"):
            kept[key] = 1
        elif key == "pad_token_id":
            kept[key] = 0 if isinstance(value, int) else None
        elif isinstance(value, int):
            kept[key], free = free, free - 1
    return kept
