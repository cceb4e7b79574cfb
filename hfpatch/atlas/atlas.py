"""The atlas: facts about every architecture of transformers, from its default config."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from importlib import metadata
from multiprocessing import get_context
from typing import Any

from hfpatch.atlas import tables
from hfpatch.report import Sheet, Shown

MAPPINGS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "multimodal": "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}
"""Names used here -> names of transformers' mappings of architectures."""

EXTRAS = ("timm", "torchvision", "pillow")
"""Packages that some architectures need to be built."""


@dataclass(frozen=True)
class Row:
    """One architecture: its facts, from `ModelInfo.to_dict()`, or the reason why its default config cannot be built."""

    architecture: str
    mappings: tuple[str, ...]
    facts: dict[str, Any] | None
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON: mappings, and either the facts or `reason`."""
        return {"mappings": list(self.mappings), **(self.facts or {"reason": self.reason})}


@dataclass(frozen=True, repr=False)
class Atlas(Shown):
    """Every architecture, and the package versions from which they were read."""

    versions: dict[str, str | None]
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON: versions {package: version, null where missing}, architectures {name: see `Row.to_dict`}."""
        return {"versions": self.versions, "architectures": {r.architecture: r.to_dict() for r in self.rows}}

    def sheets(self) -> tuple[Sheet, ...]:
        """Return three tables: the number of each kind; the architectures that build; those that do not."""
        return tables.sheets(self.to_dict())

    def sheet(self) -> Sheet:
        """Return the first table: the number of architectures of each kind."""
        return self.sheets()[0]


def architectures() -> dict[str, tuple[str, ...]]:
    """Return every architecture that transformers maps to a causal, multimodal or encoder-decoder language model.

    Returns:
        Architecture -> the keys of `MAPPINGS` that contain it, sorted by name. Imports no model class.
    """
    from transformers.models.auto import modeling_auto

    found: dict[str, tuple[str, ...]] = {}
    for mapping, name in MAPPINGS.items():
        for architecture in getattr(modeling_auto, name):
            found[architecture] = (*found.get(architecture, ()), mapping)
    return dict(sorted(found.items()))


def versions() -> dict[str, str | None]:
    """Return the versions of transformers and of `EXTRAS`, on which the facts depend; None for a missing package."""
    found: dict[str, str | None] = {}
    for package in ("transformers", *EXTRAS):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def read_row(architecture: str, mappings: tuple[str, ...]) -> Row:
    """Read one architecture from its default config, built on meta.

    Time: about 0.3 s, at most 3 s. Memory: a few MB per thousand modules, freed afterwards.
    """
    from transformers import CONFIG_MAPPING

    from hfpatch.errors import InputError
    from hfpatch.inspecting.inspect import inspect
    from hfpatch.model.source import REJECTIONS

    try:
        config = CONFIG_MAPPING[architecture]()
    except REJECTIONS as error:
        return Row(architecture, mappings, None, f"its config class rejects its own defaults: {_line(error)}")
    try:
        facts = inspect(config).to_dict()
    except InputError as error:
        return Row(architecture, mappings, None, str(error))
    return Row(architecture, mappings, architecture_facts(facts), "")


def architecture_facts(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the items of `ModelInfo.to_dict()` that belong to an architecture, not to one loaded model."""
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
    """Read every architecture, in separate processes. If one fails, its row has the reason.

    Args:
        wanted: Architectures with their mappings; all if not given.
        processes: Number of processes; each takes about 400 MB.
        progress: Called with 1 after each architecture.

    Returns:
        The atlas, sorted by architecture.

    Time: see `benchmarks/inspect_all.py`.
    """
    wanted = architectures() if wanted is None else wanted
    done: dict[str, Row] = {}
    for row in _rows(wanted, processes):
        done[row.architecture] = row
        progress(1)
    for architecture in sorted(wanted.keys() - done.keys()):  # one of them killed its process: now each has its own
        done.update({row.architecture: row for row in _rows({architecture: wanted[architecture]}, 1, last=True)})
        progress(1)
    return Atlas(versions(), tuple(done[a] for a in sorted(done)))


def _rows(wanted: dict[str, tuple[str, ...]], processes: int, *, last: bool = False) -> Iterator[Row]:
    """Yield rows as they are finished; architectures lost when a process died get a row only in the last attempt."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_quiet) as pool:
        running: dict[Future[Row], str] = {pool.submit(read_row, a, m): a for a, m in wanted.items()}
        for future in as_completed(running):
            architecture, error = running[future], future.exception()
            if error is None:
                yield future.result()
            elif last or not isinstance(error, BrokenProcessPool):
                died = isinstance(error, BrokenProcessPool)
                reason = "the process that built it died, possibly for lack of memory" if died else _line(error)
                yield Row(architecture, wanted[architecture], None, f"could not be read: {reason}")


def _quiet() -> None:
    import warnings

    import torch
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(50)
    torch.set_num_threads(1)


def _line(error: BaseException) -> str:
    """Return an exception's class and message in one line, of at most 300 characters."""
    text = re.sub(r"\s+", " ", str(error.__cause__ or error)).strip()
    return f"{type(error.__cause__ or error).__name__}: {text}"[:300]
