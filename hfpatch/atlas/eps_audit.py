"""The eps audit: norms that do not follow the expected config key, with a verdict on those checked by hand."""

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

    `differs` is True if its eps differs from the keys' values in the default config; if not, it differs once the key
    is changed.
    """

    architecture: str
    norm: NormKind
    differs: bool
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
"""(architecture, path, verdict, why), checked by hand; the first match counts."""


def audit(architectures: Mapping[str, Mapping[str, Any]]) -> tuple[Departure, ...]:
    """Return every departure in an atlas.

    Args:
        architectures: Rows of an atlas by name, from `Atlas.to_dict()`.
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
            differs = norm.eps not in [value for _, value in norm.expected]
            yield Departure(architecture, norm, differs, verdict, why)


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
