"""The atlas: what every architecture of transformers is, from its default config alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from importlib import metadata
from multiprocessing import get_context
from typing import Any

from hfpatch.atlas.tables import sheets

MAPPINGS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "multimodal": "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}
"""transformers' own lists of architectures, by the names they go by here."""

EXTRAS = ("timm", "torchvision", "pillow")
"""Packages some architectures need: with them there may be more rows that build."""


@dataclass(frozen=True)
class Row:
    """One architecture: its facts as `ModelInfo.to_dict()` gives them, or why its default does not build."""

    architecture: str
    mappings: tuple[str, ...]
    facts: dict[str, Any] | None
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON: mappings, and either the facts or `reason`."""
        return {"mappings": list(self.mappings), **(self.facts or {"reason": self.reason})}


@dataclass(frozen=True)
class Atlas:
    """Every architecture, by name, and the versions that it was read from."""

    versions: dict[str, str | None]
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON: versions {package: version, null where missing}, architectures {name: see `Row.to_dict`}."""
        return {"versions": self.versions, "architectures": {r.architecture: r.to_dict() for r in self.rows}}

    def __str__(self) -> str:
        return "\n\n".join(s.to_text() for s in sheets(self.to_dict()))


def architectures() -> dict[str, tuple[str, ...]]:
    """Every architecture that transformers maps to a causal, multimodal or encoder-decoder language model.

    Returns:
        The mappings that have it, by name, in order of the names. Imports transformers but no model.
    """
    from transformers.models.auto import modeling_auto

    found: dict[str, tuple[str, ...]] = {}
    for mapping, name in MAPPINGS.items():
        for architecture in getattr(modeling_auto, name):
            found[architecture] = (*found.get(architecture, ()), mapping)
    return dict(sorted(found.items()))


def versions() -> dict[str, str | None]:
    """What the facts depend on: transformers, and the packages without which some architectures do not build."""
    found: dict[str, str | None] = {}
    for package in ("transformers", *EXTRAS):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def read_row(architecture: str, mappings: tuple[str, ...]) -> Row:
    """Read one architecture from its default config, built on meta.

    Time and memory: 0.3 s, at most 3; a few MB for each thousand modules, given back.
    """
    from transformers import CONFIG_MAPPING

    from hfpatch.errors import InputError
    from hfpatch.inspecting.inspect import inspect
    from hfpatch.model.source import REJECTIONS

    try:
        config = CONFIG_MAPPING[architecture]()
    except REJECTIONS as error:
        return Row(architecture, mappings, None, f"its default config is rejected by its own class: {_line(error)}")
    try:
        facts = inspect(config).to_dict()
    except InputError as error:
        return Row(architecture, mappings, None, str(error))
    return Row(architecture, mappings, of_architecture(facts), "")


def of_architecture(facts: dict[str, Any]) -> dict[str, Any]:
    """What of `ModelInfo.to_dict()` holds for every model of an architecture's default config."""
    return {key: value for key, value in facts.items() if key not in _OF_ONE_OBJECT}


_OF_ONE_OBJECT = frozenset(
    ["architecture", "name", "weights_loaded", "declared_dtype", "quantization", "wrappers", "adapters", "hazards"]
)


def read_atlas(
    wanted: dict[str, tuple[str, ...]] | None = None,
    *,
    processes: int = 2,
    progress: Callable[[int], None] = lambda _: None,
) -> Atlas:
    """Read every architecture, in processes of their own; one that fails, however, is a row that says why.

    Args:
        wanted: Architectures with their mappings; all if not given.
        processes: How many; each takes some 400 MB.
        progress: Called with 1 as each is done.

    Time: see `benchmarks/inspect_all.py`.
    """
    wanted = architectures() if wanted is None else wanted
    done: dict[str, Row] = {}
    for row in _rows(wanted, processes):
        done[row.architecture] = row
        progress(1)
    for architecture in sorted(wanted.keys() - done.keys()):  # one of them ended its process: each gets its own
        done.update({row.architecture: row for row in _rows({architecture: wanted[architecture]}, 1, last=True)})
        progress(1)
    return Atlas(versions(), tuple(done[a] for a in sorted(done)))


def _rows(wanted: dict[str, tuple[str, ...]], processes: int, *, last: bool = False) -> Iterator[Row]:
    """Rows as they come; none for what was lost when a process died, unless this is the last try."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_quiet) as pool:
        running: dict[Future[Row], str] = {pool.submit(read_row, a, m): a for a, m in wanted.items()}
        for future in as_completed(running):
            architecture, error = running[future], future.exception()
            if error is None:
                yield future.result()
            elif last or not isinstance(error, BrokenProcessPool):
                died = isinstance(error, BrokenProcessPool)
                reason = "the process that built it died; is there memory enough?" if died else _line(error)
                yield Row(architecture, wanted[architecture], None, f"could not be read: {reason}")


def _quiet() -> None:
    import warnings

    import torch
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(50)
    torch.set_num_threads(1)


def _line(error: BaseException) -> str:
    """What an exception says, in one line."""
    text = re.sub(r"\s+", " ", str(error.__cause__ or error)).strip()
    return f"{type(error.__cause__ or error).__name__}: {text}"[:300]
