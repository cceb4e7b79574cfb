"""The eps audit: norms that do not follow the config key one would expect, and what is known to be right."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hfpatch.inspecting.eps import NormKind

DESIGNED, DISPUTED, UNCHECKED = "as the reference", "disputed", "not checked"


@dataclass(frozen=True)
class Departure:
    """A kind of norm that follows no key of its own model's config.

    `apart` says whether its eps is another number than the keys hold in the default config; where it is not, the two
    part as soon as somebody sets the key.
    """

    architecture: str
    norm: NormKind
    apart: bool
    verdict: str
    why: str


_KNOWN: tuple[tuple[str, str, str, str], ...] = (
    (
        "glm_moe_dsa",
        "*.[qk]*_a_layernorm",
        DISPUTED,
        "the published config says 1e-5 and vLLM and SGLang use it, transformers builds 1e-6",
    ),
    (
        "deepseek_v3*",
        "*.[qk]*_a_layernorm",
        DESIGNED,
        "DeepSeek's own code builds the latent norms with its default, 1e-6",
    ),
    ("kimi_k25", "*.[qk]*_a_layernorm", DESIGNED, "the class is that of deepseek_v3"),
    ("sarvam_mla", "*.[qk]*_a_layernorm", DESIGNED, "the class is that of deepseek_v3"),
    ("deepseek_v32", "*.indexer.k_norm", DESIGNED, "a LayerNorm of the indexer, 1e-6 by design"),
    ("glm_moe_dsa", "*.indexer.k_norm", DESIGNED, "a LayerNorm of the indexer, 1e-6 by design"),
    ("mllama", "*.layernorm_p*", DESIGNED, "pre and post norms of the vision tower, 1e-5 by design"),
)
"""(architecture, path, verdict, why): what was looked up by hand, the first that matches counts."""


def audit(architectures: Mapping[str, Mapping[str, Any]]) -> tuple[Departure, ...]:
    """Every departure in an atlas.

    Args:
        architectures: Rows of an atlas by name, as `Atlas.to_dict()` gives them.
    """
    return tuple(_departures(architectures))


def _departures(architectures: Mapping[str, Mapping[str, Any]]) -> Iterator[Departure]:
    for architecture, facts in architectures.items():
        for norm in _norms(facts.get("norms", ())):
            if norm.follows:
                continue
            verdict, why = next(
                (
                    (verdict, why)
                    for name, path, verdict, why in _KNOWN
                    if fnmatch.fnmatchcase(architecture, name) and fnmatch.fnmatchcase(norm.path, path)
                ),
                (UNCHECKED, ""),
            )
            apart = norm.eps not in [value for _, value in norm.expected]
            yield Departure(architecture, norm, apart, verdict, why)


def _norms(rows: Iterable[Mapping[str, Any]]) -> Iterator[NormKind]:
    for row in rows:
        yield NormKind(
            path=row["path"],
            cls=row["class"],
            eps_name=row["eps_name"],
            eps=row["eps"],
            source=row["source"],
            as_built=row["as_built"],
            count=row["count"],
            expected=tuple(row["expected"].items()),
        )
