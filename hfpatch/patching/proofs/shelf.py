"""Files of proofs: those beside the patches, and the cache. Imports neither torch nor transformers."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

from hfpatch.errors import InputError
from hfpatch.patching.proofs.proof import Proof, Subject, is_saved
from hfpatch.report.files import write_atomically
from hfpatch.untrusted.ordinary import read_json

LARGEST = 64 * 2**20
"""Largest file of proofs that is read, in bytes."""


def beside(patch_file: Path) -> Path:
    """Return the path of the proofs that are shipped with a patch."""
    return patch_file.with_suffix(".proofs.json")


@cache
def shipped(patch_file: Path) -> tuple[Proof, ...]:
    """Return the proofs beside a patch; none if there is no file. A file that cannot be read gives a warning."""
    return _read(beside(patch_file), "hfpatch prove --write makes it again")


@cache
def proved_names(patch_file: Path, digest: str) -> tuple[str, ...]:
    """Return the architectures for which a shipped proof of this patch says *proved*, of any release, sorted.

    Args:
        patch_file: The file of the patch.
        digest: Of the patch as it is now.
    """
    return tuple(
        sorted({p.subject.architecture for p in shipped(patch_file) if _says(p, digest) and p.outcome == "proved"})
    )


def _says(proof: Proof, digest: str) -> bool:
    return proof.subject.patch == digest and not proof.subject.settings


def find(proofs: Iterable[Proof], subject: Subject) -> Proof | None:
    """Return the first proof that covers a subject; None if there is none."""
    return next((proof for proof in proofs if proof.covers(subject)), None)


def merged(new: Sequence[Proof], old: Iterable[Proof], tried: Collection[str]) -> list[Proof]:
    """Return new proofs and the old ones that they do not replace, sorted.

    Kept are the proofs of other releases, and those of the same code and releases for architectures not tried now.

    Args:
        new: Proofs that were run now, all with the same releases and code.
        old: Proofs in the file.
        tried: The architectures that were tried now; some of them may have given no proof.
    """
    here = {(_releases(p), p.subject.patch) for p in new}
    kept = [
        p
        for p in old
        if _releases(p) not in {releases for releases, _ in here}
        or ((_releases(p), p.subject.patch) in here and p.subject.architecture not in tried)
    ]
    return sorted(
        [*new, *kept], key=lambda p: (p.subject.architecture, p.subject.flags, _releases(p), sorted(p.subject.bodies))
    )


def _releases(proof: Proof) -> tuple[str, str]:
    return proof.subject.transformers, proof.subject.torch


def write(path: Path, proofs: Sequence[Proof]) -> None:
    """Write a file of proofs, a line each, with a checksum. Atomic.

    Raises:
        InputError: The file cannot be written.
    """
    lines = [json.dumps(proof.to_dict()) for proof in proofs]
    body = ",\n".join(lines)
    write_atomically(path, f'{{"checksum": "{_checksum(lines)}", "proofs": [\n{body}\n]}}\n')


def _checksum(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def _read(path: Path, advice: str) -> tuple[Proof, ...]:
    try:
        content = read_json(path, LARGEST)
        found = tuple(Proof.from_dict(values) for values in content["proofs"])
        if content["checksum"] != _checksum(json.dumps(proof.to_dict()) for proof in found):
            raise ValueError("its checksum is not that of its content")
    except FileNotFoundError:
        return ()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        warnings.warn(f"{path} was edited or is damaged ({why}), so it counts for nothing; {advice}", stacklevel=2)
        return ()
    return found


def cache_folder() -> Path:
    """Return the folder of the proofs that were run on this machine by this version of hfpatch."""
    from huggingface_hub.constants import HF_ASSETS_CACHE

    # not cached_assets_path, which makes the folder when it is asked, and raises an error if it cannot
    return Path(HF_ASSETS_CACHE, "hfpatch", "proofs", metadata.version("hfpatch"))


def cached(subject: Subject) -> Proof | None:
    """Return the proof of a subject in the cache; None if there is none."""
    if not is_saved(subject):
        return None
    return find(_read(cache_folder() / f"{subject.key}.json", "it is proved again"), subject)


def keep(subject: Subject, proof: Proof) -> None:
    """Write a proof into the cache. A folder that cannot be written gives a warning, once."""
    if not is_saved(subject):
        return
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / f"{subject.key}.json", [proof])
    except (OSError, InputError) as error:
        _say_once(f"proofs cannot be kept, so the next plan of a new process proves again: {error}")


@cache
def _say_once(text: str) -> None:
    warnings.warn(text, stacklevel=3)
