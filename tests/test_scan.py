"""`hfpatch.scan`: real safetensors files, good, odd and hostile."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import hfpatch
from hfpatch.errors import InputError
from hfpatch.scanning.header import read_header
from hfpatch.scanning.values import BUFFER

NAN = float("nan")


def save(path: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors, path)
    return path


def kinds(report: Any) -> list[tuple[str, str]]:
    return [(f.kind, f.tensor) for f in report.findings]


def raw(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


class TestValues:
    def test_healthy(self, tmp_path: Path) -> None:
        report = hfpatch.scan(save(tmp_path / "a.safetensors", w=torch.randn(8, 8), n=torch.arange(3)))
        assert not report
        assert report.notes == ()
        assert {d: (c.tensors, c.parameters, c.bytes) for d, c in report.census.items()} == {
            "F32": (1, 64, 256),
            "I64": (1, 3, 24),
        }

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
    @pytest.mark.parametrize("place", [0, BUFFER // 8 - 1, BUFFER // 8, BUFFER // 4, -1])
    def test_one_bad_value_anywhere(self, tmp_path: Path, dtype: torch.dtype, place: int) -> None:
        """At the ends, and on both sides of where a buffer ends."""
        w = torch.ones(BUFFER // 4 + 5, dtype=dtype)
        w[place] = NAN
        v = torch.ones(7, dtype=dtype)
        v[3], v[4] = float("inf"), float("-inf")
        report = hfpatch.scan(save(tmp_path / "a.safetensors", w=w, v=v))
        assert sorted(kinds(report)) == [("Inf", "v"), ("NaN", "w")]
        texts = {f.tensor: f.text for f in report.findings}
        assert texts["w"].startswith("1 of ")
        assert texts["v"].startswith("2 of 7 ")

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
    def test_float8(self, tmp_path: Path, dtype: torch.dtype) -> None:
        w = torch.tensor([1.0, NAN, 2.0]).to(dtype)
        assert kinds(hfpatch.scan(save(tmp_path / "a.safetensors", w=w))) == [("NaN", "w")]

    def test_notes(self, tmp_path: Path) -> None:
        big = torch.ones(1000)
        big[5] = 1e5
        tensors = {
            "big": big.bfloat16(),
            "zero": torch.zeros(4),
            "minus": -torch.zeros(4),
            "flags": torch.zeros(4, dtype=torch.bool),
        }
        report = hfpatch.scan(save(tmp_path / "a.safetensors", **tensors))
        assert not report
        assert sorted((f.kind, f.tensor) for f in report.notes) == [
            ("all zero", "flags"),
            ("all zero", "minus"),
            ("all zero", "zero"),
            ("beyond float16", "big"),
        ]

    def test_outlier(self, tmp_path: Path) -> None:
        w = torch.randn(20000)
        w[7] = 5000.0
        (note,) = hfpatch.scan(save(tmp_path / "a.safetensors", w=w)).notes
        assert note.kind == "outlier"
        assert "5000" in note.text

    def test_empty_and_scalar(self, tmp_path: Path) -> None:
        report = hfpatch.scan(save(tmp_path / "a.safetensors", e=torch.ones(0, 3), s=torch.tensor(NAN)))
        assert kinds(report) == [("NaN", "s")]

    def test_several_processes_agree(self, tmp_path: Path) -> None:
        w = torch.randn(300, 300)
        w[7, 7] = NAN
        save(tmp_path / "a.safetensors", w=w, v=torch.ones(5))
        save(tmp_path / "b.safetensors", u=torch.full((9,), float("inf")))
        done: list[int] = []
        report = hfpatch.scan(tmp_path, processes=2, progress=done.append)
        assert report == hfpatch.scan(tmp_path, processes=1)
        assert sum(done) == 4 * (300 * 300 + 5 + 9)


class TestLayout:
    def sharded(self, folder: Path, **change: Any) -> Path:
        save(folder / "model-1.safetensors", a=torch.ones(2), b=torch.ones(3))
        save(folder / "model-2.safetensors", c=torch.ones(4))
        index = {
            "metadata": {"total_size": 36},
            "weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"},
        }
        index["weight_map"].update(change.pop("where", {}))
        index.update(change)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    def test_whole(self, tmp_path: Path) -> None:
        folder = self.sharded(tmp_path)
        assert not hfpatch.scan(folder)
        assert hfpatch.scan(folder / "model.safetensors.index.json").files == 2

    def test_missing_shard(self, tmp_path: Path) -> None:
        folder = self.sharded(tmp_path, where={"d": "model-3.safetensors"})
        assert [f.kind for f in hfpatch.scan(folder).findings] == ["missing shard"]

    def test_tensor_elsewhere_or_nowhere(self, tmp_path: Path) -> None:
        folder = self.sharded(tmp_path, where={"c": "model-1.safetensors", "x": "model-2.safetensors"})
        texts = [f.text for f in hfpatch.scan(folder).findings if f.kind == "missing tensor"]
        assert len(texts) == 2
        assert "it is in model-2.safetensors" in texts[0]
        assert "nowhere" in texts[1]

    def test_duplicate(self, tmp_path: Path) -> None:
        folder = self.sharded(tmp_path)
        save(folder / "model-2.safetensors", c=torch.ones(4), a=torch.ones(2))
        assert "duplicate tensor" in [f.kind for f in hfpatch.scan(folder).findings]

    def test_wrong_size(self, tmp_path: Path) -> None:
        folder = self.sharded(tmp_path, metadata={"total_size": 37})
        assert [f.kind for f in hfpatch.scan(folder).findings] == ["wrong size"]

    def test_an_index_stays_in_its_directory(self, tmp_path: Path) -> None:
        folder = self.sharded(tmp_path, where={"a": "../other.safetensors"})
        with pytest.raises(InputError, match="no plain file name"):
            hfpatch.scan(folder)

    def test_one_broken_file_does_not_stop_the_others(self, tmp_path: Path) -> None:
        save(tmp_path / "a.safetensors", w=torch.tensor([NAN]))
        (tmp_path / "b.safetensors").write_bytes(b"\0" * 4)
        assert [f.kind for f in hfpatch.scan(tmp_path).findings] == ["broken file", "NaN"]

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
    def test_pickle_is_never_read(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_bytes(b"\x80\x04.")
        for path in (tmp_path, tmp_path / name):
            with pytest.raises(InputError, match="a pickle, which may run code"):
                hfpatch.scan(path)

    def test_nothing_there(self, tmp_path: Path) -> None:
        for path in (tmp_path, tmp_path / "no"):
            with pytest.raises(InputError, match="want"):
                hfpatch.scan(path)


GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


class TestHeaders:
    @pytest.mark.parametrize(
        ("header", "data", "words"),
        [
            (GOOD, b"\0" * 4, "truncated, its tensors need"),
            (GOOD, b"\0" * 12, "4 bytes follow its last tensor"),
            ({"a": {**GOOD["a"], "shape": [3]}}, b"\0" * 8, "takes 12 bytes, not 8"),
            ({"a": {**GOOD["a"], "shape": [-2]}}, b"\0" * 8, "no counts"),
            ({"a": {**GOOD["a"], "shape": [2**70]}}, b"\0" * 8, "no counts"),
            ({"a": {**GOOD["a"], "dtype": "F99"}}, b"\0" * 8, "does not know"),
            ({"a": {"dtype": "F32"}}, b"", "no dtype, shape and data_offsets"),
            ({**GOOD, "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, b"\0" * 12, "overlaps"),
            ({**GOOD, "b": {"dtype": "F32", "shape": [1], "data_offsets": [12, 16]}}, b"\0" * 16, "4 bytes unused"),
            (b"[1, 2]", b"", "no JSON object"),
            (b'{"a": \xff}', b"", "no JSON object"),
            (b'{"a":' + b'{"a":' * 100_000, b"", "header"),
            (b'{"a": {}, "a": {}}', b"", "twice"),
        ],
    )
    def test_one_clear_line(self, tmp_path: Path, header: Any, data: bytes, words: str) -> None:
        with pytest.raises(InputError) as caught:
            read_header(raw(tmp_path / "a.safetensors", header, data))
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("length", [2**63, 200_000_000, 50])
    def test_lengths_that_lie(self, tmp_path: Path, length: int) -> None:
        file = tmp_path / "a.safetensors"
        file.write_bytes(struct.pack("<Q", length) + b"{}")
        with pytest.raises(InputError, match="header"):
            read_header(file)

    @settings(deadline=None, max_examples=150)
    @given(st.integers(0, 200), st.integers(0, 255))
    def test_what_we_take_the_library_takes(self, place: int, byte: int) -> None:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            file = save(Path(folder) / "a.safetensors", w=torch.ones(2, 3), v=torch.zeros(4, dtype=torch.int8))
            data = bytearray(file.read_bytes())
            data[place % len(data)] = byte
            file.write_bytes(data)
            try:
                read_header(file)
            except InputError:
                return
            try:
                with safe_open(file, "pt"):
                    pass
            except SafetensorError as error:
                pytest.fail(f"we take what safetensors refuses: {error}")


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """A sparse file of 1.5 GB in a process of its own."""
    file = tmp_path / "a.safetensors"
    size = 1_500_000_000
    raw(file, {"w": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}})
    with file.open("r+b") as sparse:
        sparse.truncate(file.stat().st_size + size)
    script = (
        "import sys, hfpatch; r = hfpatch.scan(sys.argv[1], processes=1); status = open('/proc/self/status').read(); "
        "print(r.notes[0].kind, int(status.partition('VmHWM:')[2].split()[0]) // 1024)"
    )
    out = subprocess.run([sys.executable, "-c", script, str(file)], capture_output=True, text=True, check=True)
    kind, _, mib = out.stdout.strip().rpartition(" ")
    assert kind == "all zero"
    assert int(mib) < 400


class TestCommand:
    def run(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hfpatch.cli", "scan", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def test_exit_codes(self, tmp_path: Path) -> None:
        good = save(tmp_path / "good.safetensors", w=torch.ones(2))
        bad = save(tmp_path / "bad.safetensors", w=torch.tensor([NAN]))
        assert self.run(good).returncode == 0
        done = self.run(bad, "--json")
        assert done.returncode == 1
        assert json.loads(done.stdout)["findings"][0]["kind"] == "NaN"
        missing = self.run(tmp_path / "no")
        assert missing.returncode == 2
        assert len(missing.stderr.strip().splitlines()) == 1
