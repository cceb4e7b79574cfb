"""A fresh environment of Python, and what is installed into it. Shared with benchmarks/stranger.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PIP = ("--quiet", "--disable-pip-version-check", "--retries", "5", "--timeout", "60")


@dataclass(frozen=True)
class Environment:
    """A folder with a Python of its own."""

    folder: Path

    @classmethod
    def made(cls, folder: Path) -> Environment:
        """Return a new, empty environment."""
        venv.create(folder, with_pip=True)
        return cls(folder)

    @property
    def python(self) -> Path:
        """Its Python."""
        return self.folder / "bin" / "python"

    def install(self, *what: str, constraints: Sequence[str] = ()) -> None:
        """Install by pip, as a person would. Constraints are lines such as `torch==2.11`.

        Raises:
            RuntimeError: pip could not.
        """
        file = self.folder / "constraints.txt"
        file.write_text("\n".join([*constraints, ""]))
        try:
            self.run("-m", "pip", "install", *PIP, "-c", str(file), *what)
        except RuntimeError as error:
            wanted = f"{', '.join(what)} with {', '.join(constraints) or 'any release'}"
            raise RuntimeError(f"pip did not install {wanted}: is a package index in reach?\n{error}") from error

    def versions(self) -> dict[str, str]:
        """Return what is installed, by name."""
        listed = self.run("-m", "pip", "list", "--format=json", "--disable-pip-version-check")
        return {each["name"].lower().replace("_", "-"): each["version"] for each in json.loads(listed)}

    def run(self, *words: str, cwd: Path | None = None) -> str:
        """Run its Python and return what it printed; nothing of this process's packages is seen there.

        Raises:
            RuntimeError: It ended with another code than 0.
        """
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
        done = subprocess.run(
            [str(self.python), *words], cwd=cwd or self.folder, env=env, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr[-8000:]}")
        return done.stdout


def build(into: Path) -> Path:
    """Build an sdist of the checkout, and a wheel from it, into a folder; return the folder."""
    words = ["-m", "build", "--no-isolation", "--outdir", str(into), str(ROOT)]
    done = subprocess.run([sys.executable, *words], cwd=into, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the build failed:\n{done.stderr[-4000:]}")
    return into
