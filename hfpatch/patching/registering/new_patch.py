"""`hfpatch new`: the beginning of a patch, in this checkout or as a package of one's own."""

from __future__ import annotations

import keyword
import re
import sys
from pathlib import Path

from hfpatch import patches
from hfpatch.errors import InputError
from hfpatch.patching import registry
from hfpatch.patching.language import HEADINGS
from hfpatch.report.files import write_atomically

DOCSTRING = {
    HEADINGS[0]: "TODO: the fault: in which models, with which values, and what a user sees.",
    HEADINGS[1]: "TODO: the edits, and what stays as it is.",
    HEADINGS[2]: "TODO: exact, equivalent within a tolerance, or a change of the function; with figures.",
    HEADINGS[3]: "TODO: models that are refused, and what the patch does not fix.",
    HEADINGS[4]: "TODO: issues and papers, e.g. huggingface/transformers#12345.",
}

PATCH = '''\
"""TODO: what this patch does, in one line.

{docstring}"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpatch.patching import edits, select
from hfpatch.patching.language import Case, NotNeeded, Patch, Verdict

if TYPE_CHECKING:
    import torch

    from hfpatch.patching.context import Context
    from hfpatch.patching.verifying.trial import Trial


def condition(context: Context) -> Verdict:
    """TODO: when is it needed? Return Needed, NotNeeded, Offered or Refused, each with the reason."""
    return NotNeeded("TODO: this patch is not written yet")


def symptom(trial: Trial) -> str | None:
    """TODO: return a sentence if the trial's outputs show the fault, else None."""
    return None if bool(trial.logits().isfinite().all()) else "logits are not finite"


def changed(output: torch.Tensor) -> torch.Tensor:
    """TODO: return what the module's output should be, in the same shape."""
    return output


PATCH = Patch(
    title="TODO: the fix, in a line",
    architectures=("{architecture}",),
    condition=condition,
    edits=(edits.map_output(select.final_norm(), changed, "TODO: what this edit does"),),
    effect="changes-function",
    symptom=symptom,
    repros=(Case("{architecture}", dtype="float16"),),
    leaves_alone=(Case("{architecture}"),),
)
'''

PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{package}"
version = "0.1.0"
description = "Patches for hfpatch."
requires-python = ">=3.11"
dependencies = ["hfpatch"]

# a line for each patch: its id, and the module that defines PATCH
[project.entry-points."hfpatch.patches"]
{id} = "{module}.{family}.{defect}"

[tool.hatch.build.targets.wheel]
packages = ["{module}"]
"""


def new_patch(name: str, package: str | None = None) -> list[Path]:
    """Write the beginning of a patch. It loads, and does nothing until it is written.

    Args:
        name: `FAMILY/DEFECT`: the folder and the file; the id is DEFECT with hyphens.
        package: Name of a new package for it, in the current directory; None for the `patches/` of this checkout.

    Returns:
        The files that were written.

    Raises:
        InputError: A name is malformed, the id is in use, a file exists already, or this hfpatch is not a checkout.
            Nothing was written.
    """
    family, defect = _names(name)
    patch_id = defect.replace("_", "-")
    if taken := registry.holder(patch_id):
        raise InputError(f"new: the id {patch_id!r} is that of {taken}; choose another name")
    architecture = "llama" if family == "shared" else family
    docstring = "".join(f"## {heading}\n{text}\n\n" for heading, text in DOCSTRING.items()).rstrip("\n") + "\n"
    patch = PATCH.format(docstring=docstring, architecture=architecture)
    if package is None:
        return _written({_checkout() / family / f"{defect}.py": patch})
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", package):
        raise InputError(f"--package {package!r}: want small letters, digits and hyphens, e.g. acme-patches")
    module = package.replace("-", "_")
    if module in sys.stdlib_module_names or keyword.iskeyword(module) or module == "hfpatch":
        raise InputError(f"--package {package}: Python has a module {module}, or hfpatch is; choose another name")
    project = PROJECT.format(package=package, id=patch_id, module=module, family=family, defect=defect)
    home = Path(package)
    return _written(
        {
            home / "pyproject.toml": project,
            home / module / "__init__.py": f'"""Patches for hfpatch, of {package}."""\n',
            home / module / family / "__init__.py": "",
            home / module / family / f"{defect}.py": patch,
        }
    )


def _names(name: str) -> tuple[str, str]:
    family, _, defect = name.replace("-", "_").partition("/")
    for part in (family, defect):
        if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", part) or keyword.iskeyword(part):
            raise InputError(
                f"new: {name!r} is not FAMILY/DEFECT in small letters, digits and hyphens, "
                "e.g. gemma2/logit-cap or shared/logit-cap"
            )
    if defect in registry.NOT_PATCHES:
        raise InputError(f"new: a file {defect}.py is not read as a patch; choose another name")
    return family, defect


def _checkout() -> Path:
    folder = patches.__path__[0]
    home = Path(folder)
    if not (home.parent / "pyproject.toml").is_file():
        raise InputError("new: this hfpatch is installed, not a checkout; --package NAME writes a package of your own")
    return home


def _written(files: dict[Path, str]) -> list[Path]:
    """Write new files, none of them if one is in the way of another."""
    for path in files:
        for place in (path, *path.parents):
            if place.exists() and not (place.is_dir() and place != path):
                raise InputError(f"new: {place} exists already; nothing was written")
    for path, text in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"new: cannot make the folder {path.parent}: {error.strerror}") from error
        write_atomically(path, text)
    return list(files)
