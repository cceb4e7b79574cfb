"""Scanning weight files: values, headers, shards and their index, processes, the command."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import hfpatch
from hfpatch.errors import InputError
from hfpatch.report.progress import progress
from hfpatch.scanning import values as values_module
from hfpatch.scanning import worker as worker_module
from hfpatch.scanning.header import Tensor, read_header
from hfpatch.scanning.layout import total_bytes
from hfpatch.scanning.result import Found, ScanReport
from tests.sampling import first_quick

scan_module = importlib.import_module("hfpatch.scanning.scan")
FLOATS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip


def write(path: Path, header: bytes | Mapping[str, Any], data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def scanned(tmp_path: Path, **tensors: torch.Tensor) -> ScanReport:
    save_file(tensors, tmp_path / "model.safetensors")
    return hfpatch.scan(tmp_path / "model.safetensors")


def kinds(found: tuple[Found, ...]) -> list[tuple[str, str]]:
    return [(f.kind, f.tensor or f.file) for f in found]


@pytest.fixture(params=first_quick(["here", "workers"]))
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Small lots, read in this process and in workers: each tensor is cut many times."""
    monkeypatch.setattr(scan_module, "LOT", 4096)
    if request.param == "workers":
        monkeypatch.setattr(scan_module, "SMALL", 0)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    return request.param


# values


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_planted_nan_is_found_wherever_it_is(tmp_path: Path, where: str, dtype: str) -> None:
    tensors = {"good": torch.ones(3).to(FLOATS[dtype])}
    for place in (0, 511, 512, 1023, 1024, 2047, 2048, 4095, 4096, 5000):
        for sign in (1, -1):
            x = torch.full((5001,), 0.5).to(FLOATS[dtype])
            x[place] = math.copysign(math.nan, sign)
            tensors[f"{place}, {sign}"] = x
    report = scanned(tmp_path, **tensors)
    assert {f.tensor for f in report.findings} == set(tensors) - {"good"}
    assert all((f.kind, f.figures) == ("NaN", {"count": 1}) for f in report.findings)


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "F8_E5M2"])
def test_infinities_are_counted_by_sign(tmp_path: Path, where: str, dtype: str) -> None:
    x = torch.full((70, 71), -0.25).to(FLOATS[dtype])
    x[0, 0] = x[69, 70] = -math.inf
    x[30, 1] = math.inf
    x[3, 3] = math.nan
    found = {f.kind: f for f in scanned(tmp_path, x=x).findings}
    assert found["Inf"].figures == {"positive": 1, "negative": 2}
    assert found["NaN"].figures == {"count": 1}
    assert "1 +Inf and 2 -Inf of 4,970" in found["Inf"].text


@pytest.mark.parametrize("place", [2**18 - 1, 2**18, 2**19 + 2])
def test_nan_at_the_edge_of_a_chunk(tmp_path: Path, place: int) -> None:
    assert values_module.CHUNK == 2**20
    x = torch.zeros(2**19 + 3)
    x[place] = math.nan
    assert kinds(scanned(tmp_path, x=x).findings) == [("NaN", "x")]


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_value_of_a_format(tmp_path: Path, dtype: str) -> None:
    """All bit patterns of a byte or two, and random ones of wider formats, against torch."""
    size = FLOATS[dtype].itemsize
    if size <= 2:
        bits = torch.arange(2 ** (8 * size)).to(torch.uint8 if size == 1 else torch.int16)
    else:
        bits = torch.randint(-(2**31), 2**31, (3000,)).to(torch.int32 if size == 4 else torch.int64)
        bits = bits << 32 | bits if size == 8 else bits
    x = bits.view(FLOATS[dtype])
    save_file({"x": x}, tmp_path / "m.safetensors")
    (tensor,) = read_header(tmp_path / "m.safetensors")
    piece = values_module.Piece(tensor.dtype, tensor.start, tensor.end)
    (held,) = values_module.measure(tmp_path / "m.safetensors", [piece])
    wide = x.double()
    finite = wide[wide.isfinite()].abs()
    assert held.nan == int(wide.isnan().sum())
    assert (held.posinf, held.neginf) == (int((wide == math.inf).sum()), int((wide == -math.inf).sum()))
    assert held.largest == float(finite.max())
    assert held.beyond == (int((finite > 65504).sum()) if dtype in ("F64", "F32", "BF16") else 0)


def test_beyond_float16_is_a_note(tmp_path: Path) -> None:
    report = scanned(
        tmp_path,
        far=torch.tensor([1.0, -7e4, 1e9], dtype=torch.bfloat16),
        near=torch.tensor([65504.0, 65510.0]),
        fits=torch.tensor([65504.0, -65504.0]),
        half=torch.tensor([65504.0], dtype=torch.float16),
        spoilt=torch.tensor([math.inf, 1e5]),
    )
    assert kinds(report.findings) == [("Inf", "spoilt")]
    notes = {f.tensor: f for f in report.notes if f.kind == "beyond float16"}
    assert list(notes) == ["far", "spoilt", "near"]
    assert notes["far"].figures["count"] == 2
    assert "infinite in float16" in notes["far"].text
    assert "rounds down" in notes["near"].text
    assert float(torch.tensor(65519.9).half()) == 65504
    assert float(torch.tensor(65520.0).half()) == math.inf


def test_small_values_are_told_by_share(tmp_path: Path) -> None:
    edge = 2.0**-25
    x = torch.ones(1000)
    x[:10] = edge  # a tie, to even: 0
    y = torch.full((1000,), 2.0**-24)
    z = torch.ones(1000)
    z[0] = 1e-30
    found = [f for f in scanned(tmp_path, x=x, y=y, z=z).notes if f.kind == "small for float16"]
    assert [f.tensor for f in found] == ["x"]
    assert found[0].figures == {"share": 0.01}
    assert float(torch.tensor(edge).half()) == 0 < float(torch.tensor(edge * 1.001).half())


def test_all_zero(tmp_path: Path, where: str) -> None:
    zero = torch.zeros(3000)
    zero[7] = -0.0
    last = torch.zeros(3000, dtype=torch.bfloat16)
    last[-1] = 1e-40
    report = scanned(
        tmp_path, zero=zero, last=last, ints=torch.zeros(9, dtype=torch.int64), flags=torch.zeros(5, dtype=torch.bool),
        some=torch.tensor([False, True]), scalar=torch.tensor(0.0), tiny=torch.tensor(1e-45), empty=torch.zeros(0, 4),
    )  # fmt: skip
    assert not report.findings
    assert sorted(f.tensor for f in report.notes if f.kind == "all zero") == ["flags", "ints", "scalar", "zero"]


def test_outliers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 512) * 0.02
    tame = x.clone()
    x[200, 3] = 2.0
    alone = torch.zeros(100_000)
    alone[77] = 3.0
    notes = {f.tensor: f for f in scanned(tmp_path, x=x, tame=tame, alone=alone).notes if f.kind == "outlier"}
    assert list(notes) == ["alone", "x"]
    assert notes["x"].figures["ratio"] == pytest.approx(2 / float(x.square().mean().sqrt()), rel=0.08)
    assert notes["alone"].figures["ratio"] == pytest.approx(100_000**0.5, rel=1e-6)


def test_complex_numbers_are_two_values(tmp_path: Path) -> None:
    report = scanned(tmp_path, x=torch.tensor([1 + 2j, complex(math.nan, math.inf)]))
    assert kinds(report.findings) == [("NaN", "x"), ("Inf", "x")]
    assert "of 4 C64 values" in report.findings[0].text


def test_census_and_narrow_dtypes(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "a": entry("F4", [3, 2], 0, 3),
        "b": entry("F6_E2M3", [4], 3, 6),
        "c": entry("F8_E8M0", [2], 6, 8),
        "d": entry("F32", [2], 8, 16),
    }
    file = write(tmp_path / "m.safetensors", header, bytes(range(1, 9)) + struct.pack("<2f", 1, math.nan))
    report = hfpatch.scan(file)
    assert {d: (c.tensors, c.parameters, c.bytes) for d, c in report.census.items()} == {
        "F32": (1, 2, 8), "F4": (1, 6, 3), "F6_E2M3": (1, 4, 3), "F8_E8M0": (1, 2, 2),
    }  # fmt: skip
    assert kinds(report.findings) == [("NaN", "d")]  # and its bytes lie at no multiple of 4


# headers

# not ru_maxrss: a child's begins at what its parent, here the whole test run, had when it forked
PEAK = """
        print(next(int(l.split()[1]) // 1024 for l in open("/proc/self/status") if l.startswith("VmHWM")))
"""
ONE = {"x": entry("F32", [1], 0, 4)}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "0 bytes"),
        (b"\x01\x00", "2 bytes"),
        (b"\xff" * 8 + b"{}", "18,446,744,073,709,551,615 bytes"),
        (struct.pack("<Q", 100) + b"{}", "truncated"),
        (struct.pack("<Q", 0), "not a JSON object"),
        (b"PK\x03\x04" + b"\0" * 60, "not a JSON object"),
        (struct.pack("<Q", 4) + b"{\xff\xfe}", "not UTF-8"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "git lfs pull"),
    ],
)
def test_what_is_no_safetensors_file(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "m.safetensors"
    file.write_bytes(content)
    (found,) = hfpatch.scan(file).findings
    assert (found.kind, words in found.text, "\n" in found.text) == ("broken file", True, False), found.text


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        (ONE, 3, "truncated"),
        (ONE, 5, "after its last tensor belong to no tensor"),
        ({"x": entry("F32", [1], 0, 4), "y": entry("F32", [1], 2, 6)}, 6, "overlaps"),
        ({"x": entry("F32", [1], 0, 4), "y": entry("F32", [1], 6, 10)}, 10, "belong to no tensor"),
        ({"x": entry("F32", [2], 0, 4)}, 4, "needs 8 bytes"),
        ({"x": entry("F32", [1], 4, 0)}, 4, "needs 4 bytes"),
        ({"x": entry("F32", [-1], 0, 4)}, 4, "not counts"),
        ({"x": entry("F32", [10**30], 0, 4)}, 4, "not counts"),
        ({"x": entry("F32", [2**40, 2**40, 0], 0, 0)}, 0, "fit in memory"),
        ({"x": entry("F32", [True], 0, 4)}, 4, "not counts"),
        ({"x": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, 4, "not counts"),
        ({"x": {"dtype": "F32", "shape": [1]}}, 4, "no dtype, shape"),
        ({"x": entry("Q8_0", [1], 0, 4)}, 4, "does not have"),
        ({"x": entry("F4", [1], 0, 1)}, 1, "needs"),
        ({"x": 5}, 0, "no dtype, shape"),
        (b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"x":{"dtype":"F32","shape":[0],'
         b'"data_offsets":[4,4]}}', 4, "twice"),
        (b'{"x":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}', 0, "not counts"),
        (b'{"x":{"dtype":"F32","shape":[' + b"9" * 3000 + b'],"data_offsets":[0,0]}}', 0, "not counts"),
        (b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 0, "no dtype, shape"),
        (b'{"x":{"a":' + b"[" * 2000 + b"]" * 2000 + b"}}", 0, "no dtype, shape"),
        (b'{"' + b"x" * 5000 + b'":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}', 0, "a name of 5,002"),
        (b'{"__metadata__":{"a":1}}', 0, "not a JSON object"),
        (b'{"\\ud800":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}', 0, "not a JSON object"),
        (b'{"x":{"dtype":"F32","shape":[01],"data_offsets":[0,4]}}', 4, "no dtype, shape"),
        (b'{"x":{"dtype":"F32","shape":[1,],"data_offsets":[0,4]}}', 4, "no dtype, shape"),
        (b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,04]}}', 4, "no dtype, shape"),
        (b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4],}}', 4, "no dtype, shape"),
        (b'{"x', 0, "not a JSON object"),
        (b"{} x", 0, "not a JSON object"),
        (b"[]", 0, "not a JSON object"),
    ],
)  # fmt: skip
def test_headers_that_lie(tmp_path: Path, header: Any, data: int, words: str) -> None:
    (found,) = hfpatch.scan(write(tmp_path / "m.safetensors", header, b"\1" * data)).findings
    assert (found.kind, words in found.text, "\n" in found.text) == ("broken file", True, False), found.text


def test_names_cannot_command_the_terminal(tmp_path: Path) -> None:
    header = {"\x1b]0;owned\x07\n": entry("F32", [1], 0, 4)}
    report = hfpatch.scan(write(tmp_path / "m.safetensors", header, struct.pack("<f", math.nan)))
    assert "\x1b" not in str(report)
    assert "\\x1b]0;owned" in str(report)
    assert report.findings[0].tensor == next(iter(header))


def test_unusual_headers_that_are_right(tmp_path: Path) -> None:
    metadata = {"notes": '"\\ \u20ac\U0001f600' * 2000, "": ""}
    header = json.dumps({"__metadata__": metadata, 'a"\\\u00e9\U0001f600': entry("F32", [], 0, 4)}, indent=2)
    file = write(tmp_path / "m.safetensors", header.encode() + b"  \n", struct.pack("<f", 1))
    with safe_open(file, "pt") as opened:
        assert [t.name for t in read_header(file)] == list(opened.keys())
    report = hfpatch.scan(write(tmp_path / "n.safetensors", b"{}"))
    assert kinds(report.notes) == [("no tensor", "n.safetensors")]


DTYPES = ["F32", "F16", "BOOL", "F4", "F6_E3M2", "F8_E8M0", "C64", "F8_E4M3FNUZ", "nope"]
COUNTS = st.one_of(st.integers(0, 4), st.sampled_from([-1, 2**31, 2**62, 2**63, 2**64, 1.0, True, None, "1"]))


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A right file, or one in which some of its header was changed."""
    entries: list[tuple[str, Any]] = []
    place = 0
    for name in draw(st.lists(st.text(max_size=3), max_size=4)):
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        dtype = draw(st.sampled_from(DTYPES[:8]))
        bits = {"F32": 32, "F16": 16, "BOOL": 8, "F4": 4, "F6_E3M2": 6, "F8_E8M0": 8, "C64": 64, "F8_E4M3FNUZ": 8}[
            dtype
        ]
        end = place + math.prod(shape) * bits // 8
        entries.append((name, entry(dtype, shape, place, end)))
        place = end
    if entries and draw(st.booleans()):
        held = entries[draw(st.integers(0, len(entries) - 1))][1]
        change = draw(st.sampled_from(["dtype", "shape", "offsets", "drop", "more"]))
        if change == "dtype":
            held["dtype"] = draw(st.sampled_from([*DTYPES, None, 3]))
        elif change == "shape":
            held["shape"] = draw(st.lists(COUNTS, max_size=4))
        elif change == "offsets":
            held["data_offsets"] = draw(st.lists(COUNTS, max_size=3))
        elif change == "drop":
            del held[draw(st.sampled_from(sorted(held)))]
        else:
            held["more"] = [1]
    members = [f"{json.dumps(name)}: {json.dumps(held)}" for name, held in draw(st.permutations(entries))]
    members += draw(st.sampled_from([[], [], ['"__metadata__": {"a": "b\\ud83d\\ude00"}'], ['"__metadata__": [1]']]))
    raw = bytearray(("{" + ", ".join(members) + "}").encode() + b" " * draw(st.integers(0, 3)))
    if raw and draw(st.integers(0, 3)) == 0:
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    length = max(0, len(raw) + draw(st.sampled_from([0] * 6 + [-1, 1, 9, 2**40])))
    return struct.pack("<Q", length) + raw + b"\0" * max(0, place + draw(st.sampled_from([0] * 6 + [-1, 1])))


@hypothesis.settings(max_examples=1500, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(content=files())
@pytest.mark.slow
def test_what_safetensors_refuses_is_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "property.safetensors"
    file.write_bytes(content)
    try:
        with safe_open(file, "pt") as opened:
            theirs = set(opened.keys())
    except (SafetensorError, OSError, OverflowError):
        theirs = None
    try:
        ours = {tensor.name for tensor in read_header(file)}
    except InputError as error:
        assert str(error).isprintable()
        return
    assert ours == theirs


def test_what_safetensors_writes_is_accepted(tmp_path: Path) -> None:
    tensors = {f"layers.{i}.w\u00e9": torch.ones(i, 3, dtype=t) for i, t in enumerate(FLOATS.values())}
    save_file(tensors, tmp_path / "m.safetensors", metadata={"a": 'b "c" \n'})
    assert {t.name for t in read_header(tmp_path / "m.safetensors")} == set(tensors)


@pytest.mark.slow
def test_a_hostile_header_takes_no_memory(tmp_path: Path) -> None:
    """Each as long as the format allows; a bare json.loads of the first takes gigabytes."""
    long = 99_000_000
    nested = b'{"x":[' + b"[]," * (long // 3) + b"[]]}"
    escapes = b'{"__metadata__":{"a":"' + b"\\n" * (long // 2) + b'"}}'
    wide = b'{"__metadata__":{"a":"' + "\U0001f600".encode() * (long // 4) + b'"}}'
    script = (
        """
        import sys, hfpatch
        print(hfpatch.scan(sys.argv[1]).to_dict()["findings"])
    """
        + PEAK
    )
    for header, word in ((nested, "no dtype, shape"), (escapes, "[]"), (wide, "[]")):
        file = write(tmp_path / "m.safetensors", header)
        said, peak = run(script, file).splitlines()
        assert word in said
        assert int(peak) < 400


# shards and indexes


def sharded(folder: Path, shards: Mapping[str, Mapping[str, torch.Tensor]], **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for name, tensors in shards.items():
        save_file(dict(tensors), folder / name)
    total = sum(t.nbytes for tensors in shards.values() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": {t: n for n, held in shards.items() for t in held}}
    index.update(changes)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
TWO = {A: {"a": torch.ones(3), "b": torch.ones(4)}, B: {"c": torch.ones(5)}}


def test_shards_that_are_right(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", TWO)
    for path in (folder, folder / "model.safetensors.index.json"):
        report = hfpatch.scan(path)
        assert (report.files, report.findings, report.notes) == (2, (), ())
        assert report.census["F32"].tensors == 3


@pytest.mark.parametrize("given", ["", "model.safetensors.index.json"])
def test_what_does_not_fit_the_index(tmp_path: Path, given: str) -> None:
    folder = sharded(tmp_path / "m", TWO)
    path = folder / given
    index: dict[str, Any] = json.loads((folder / "model.safetensors.index.json").read_text())

    def now(**changes: Any) -> list[tuple[str, str]]:
        (folder / "model.safetensors.index.json").write_text(json.dumps({**index, **changes}))
        return kinds(hfpatch.scan(path).findings)

    where = index["weight_map"]
    assert now(metadata={"total_size": 49}) == [("wrong size", "model.safetensors.index.json")]
    assert now(metadata={}) == now(metadata={"total_size": 48.0}) == []
    assert now(weight_map={**where, "d": B}) == [("missing tensor", "d")]
    assert now(weight_map={**where, "b": B}) == [("missing tensor", "b")]
    assert now(weight_map={"a": A, "c": B}) == [("unknown tensor", "b")]
    gone = "model-00003-of-00003.safetensors"
    assert now(weight_map={**where, "d": gone}) == [("missing shard", gone)]
    save_file({"c": torch.ones(5), "a": torch.ones(3)}, folder / B)
    assert now(metadata={}) == [("duplicate tensor", "a")]
    save_file(TWO[B], folder / B)
    save_file({"c": torch.ones(5)}, folder / gone)
    assert now() == [("unknown shard", gone)]
    (folder / gone).unlink()
    (folder / B).write_bytes((folder / B).read_bytes()[:-2])
    assert now() == [("broken file", B)]


def test_many_tensors_at_the_wrong_place_are_counted(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", TWO)
    where = {"a": A, "b": A, "c": B, **{f"t{i}": A for i in range(1000)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    found = hfpatch.scan(folder).findings
    assert [f.kind for f in found] == ["missing tensor"] * 21
    assert "980 tensors more" in found[-1].text


def test_one_broken_file_does_not_hide_the_others(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", {**TWO, B: {"c": torch.tensor([math.nan] * 5)}})
    (folder / A).write_bytes(b"")
    assert kinds(hfpatch.scan(folder).findings) == [("broken file", A), ("NaN", "c")]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ('{"weight_map": {"a": "../../x.safetensors"}}', "beside it"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "beside it"),
        ('{"weight_map": {"a": "pytorch_model.bin"}}', "beside it"),
        ('{"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}}', "twice"),
        ('{"weight_map": {"a": 1}}', "weight_map"),
        ("[]", "weight_map"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "nested too deep"),
        ('{"a": ' + "9" * 5000 + "}", "thousands of digits"),
    ],
)
def test_indexes_that_are_none(tmp_path: Path, raw: str, words: str) -> None:
    folder = sharded(tmp_path / "m", TWO)
    index = folder / "model.safetensors.index.json"
    index.write_text(raw)
    with pytest.raises(InputError, match=words):
        hfpatch.scan(index)
    report = hfpatch.scan(folder)
    assert kinds(report.findings) == [("broken index", index.name)]
    assert words in report.findings[0].text
    assert report.files == 2


def test_shards_without_an_index(tmp_path: Path) -> None:
    for n in (1, 3):
        save_file({f"t{n}": torch.ones(2), "same": torch.ones(1)}, tmp_path / f"m-0000{n}-of-00004.safetensors")
    assert kinds(hfpatch.scan(tmp_path).findings) == [
        ("missing index", "m.safetensors.index.json"),
        ("missing shard", "m-00002-of-00004.safetensors"),
        ("missing shard", "m-00004-of-00004.safetensors"),
        ("duplicate tensor", "same"),
    ]
    assert not hfpatch.scan(tmp_path / "m-00001-of-00004.safetensors").findings
    save_file({"x": torch.ones(2)}, tmp_path / "n-000000001-of-999999999.safetensors")
    assert len(hfpatch.scan(tmp_path).findings) < 40


def test_variants_adapters_and_pipelines(tmp_path: Path) -> None:
    unet = sharded(tmp_path / "unet", TWO)
    (unet / "model.safetensors.index.json").rename(unet / "model.safetensors.index.fp16.json")
    (tmp_path / "vae").mkdir()
    save_file({"v": torch.tensor([math.nan])}, tmp_path / "vae" / "vae.fp16.safetensors")
    report = hfpatch.scan(tmp_path)
    assert report.files == 3
    assert [(f.kind, f.file) for f in report.findings] == [("NaN", "vae/vae.fp16.safetensors")]
    save_file({"lora_B": torch.zeros(2)}, tmp_path / "adapter_model.safetensors")
    report = hfpatch.scan(tmp_path)
    assert (report.files, report.findings) == (1, ())
    assert [f.file for f in report.notes] == ["unet/", "vae/", "adapter_model.safetensors"]
    save_file({"a": torch.ones(2)}, unet / "model.safetensors")
    assert kinds(hfpatch.scan(unet).notes) == [("beside shards", "model.safetensors")]


def test_links(tmp_path: Path) -> None:
    """The hub's cache is links into ../../blobs; one may lead nowhere."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    save_file({"x": torch.ones(2)}, blobs / "0a1b")
    snapshot = tmp_path / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/0a1b")
    assert not hfpatch.scan(snapshot).findings
    (snapshot / "other.safetensors").symlink_to("../../blobs/none")
    os.mkfifo(snapshot / "pipe.safetensors")
    (snapshot / "dir.safetensors").mkdir()
    found = hfpatch.scan(snapshot).findings
    assert [(f.kind, f.file) for f in found] == [("broken file", f"{n}.safetensors") for n in ("dir", "other", "pipe")]
    assert "does not exist" in found[1].text
    assert total_bytes(snapshot) == (blobs / "0a1b").stat().st_size


def test_a_hub_name_is_looked_up_in_the_cache_only(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("a" * 40)
    save_file({"x": torch.ones(2)}, snapshot / "model.safetensors")
    script = "import hfpatch, sys; print(hfpatch.scan(sys.argv[1]).files)"
    assert run(script, "some/model", HF_HUB_CACHE=str(tmp_path)) == "1\n"
    with pytest.raises(InputError, match="hf download no-such/model"):
        hfpatch.scan("no-such/model")


@pytest.mark.parametrize(
    ("make", "name", "words"),
    [
        ([], "nowhere", "no such file"),
        (["x.bin"], "x.bin", "pickle"),
        (["x.txt"], "x.txt", "want a safetensors file"),
        (["pytorch_model.bin"], "", "only pickles such as pytorch_model.bin"),
        (["config.json"], "", "hold safetensors files"),
        (["config.json"], "config.json", "not valid JSON"),
    ],
)
def test_paths_that_mean_no_weights(tmp_path: Path, make: list[str], name: str, words: str) -> None:
    for file in make:
        (tmp_path / file).write_text("")
    with pytest.raises(InputError, match=words):
        hfpatch.scan(tmp_path / name)


# processes


def run(script: str, *words: Any, **env: str) -> str:
    """A script, without `if __name__ == "__main__"`, as a file."""
    root = str(Path(hfpatch.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, **env}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "script.py"
        file.write_text(textwrap.dedent(script))
        command = [sys.executable, str(file), *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def big(folder: Path, size: int) -> Path:
    """A file of zeros that takes no room, a NaN in its middle and at its end."""
    folder.mkdir(exist_ok=True)
    file = write(folder / "big.safetensors", {"x": entry("F32", [size // 4], 0, size)})
    start = file.stat().st_size
    with file.open("r+b") as handle:
        handle.truncate(start + size)
        for place in (size // 2 // 4 * 4, size - 4):
            handle.seek(start + place)
            handle.write(struct.pack("<f", math.nan))
    return file


@pytest.mark.slow
def test_processes_agree_and_memory_does_not_grow(tmp_path: Path) -> None:
    """Of a script with no `if __name__ == "__main__"`; torch is not needed."""
    script = (
        """
        import json, resource, sys, hfpatch
        told = []
        report = hfpatch.scan(sys.argv[1], processes=int(sys.argv[2]), progress=told.append)
        assert "torch" not in sys.modules
        print(json.dumps([report.to_dict(), sum(told)]))
        print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)
    """
        + PEAK
    )
    file = big(tmp_path, 3 * 2**29)
    (one, _, alone), (two, worker, mine) = (run(script, file, n).splitlines() for n in (1, 2))
    assert one == two
    report, told = json.loads(two)
    assert report["findings"][0]["figures"] == {"count": 2}
    assert told == file.stat().st_size
    assert int(worker) > 0, "no worker ran"
    assert int(alone) < 200
    assert int(mine) + 2 * int(worker) < 400


def test_findings_do_not_depend_on_how_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    tensors = {f"t{i}": torch.randn(i * 37, 50, dtype=torch.float32).to(torch.bfloat16) for i in range(1, 30)}
    tensors["t3"][5, 5], tensors["t9"][0, 0] = math.nan, 1e6
    save_file(tensors, tmp_path / "m.safetensors")
    monkeypatch.setattr(scan_module, "LOT", 2**16)
    here = hfpatch.scan(tmp_path, processes=1)
    assert kinds(here.findings) == [("NaN", "t3")]
    processes = started(monkeypatch)
    assert hfpatch.scan(tmp_path, processes=3) == here
    assert len(processes) == 3
    with pytest.raises(InputError, match="at least 1"):
        hfpatch.scan(tmp_path, processes=0)


def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The processes that will have been started."""
    processes: list[Any] = []
    popen = subprocess.Popen

    def kept(*words: Any, **more: Any) -> Any:
        processes.append(popen(*words, **more))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", kept)
    return processes


def test_an_interrupt_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = started(monkeypatch)

    def interrupt(_: int) -> None:
        if processes:  # after the header, which this process reads
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hfpatch.scan(big(tmp_path, 2**30), processes=2, progress=interrupt)
    assert processes
    assert all(p.poll() is not None for p in processes)


def test_workers_end_when_the_caller_is_killed(tmp_path: Path) -> None:
    script = f"""
        import os, signal, subprocess, sys
        sys.path.insert(0, {str(Path(hfpatch.__file__).parents[1])!r})
        import hfpatch
        popen, pids = subprocess.Popen, []
        def kept(*words, **more):
            process = popen(*words, **more); pids.append(process.pid); return process
        subprocess.Popen = kept
        def die(_):
            if pids: print(*pids, flush=True); os.kill(os.getpid(), signal.SIGKILL)
        hfpatch.scan(sys.argv[1], processes=2, progress=die)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(big(tmp_path, 2**30))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(p) for p in done.stdout.split()]
    assert pids
    end = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(alive, pids))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_worker_that_dies_costs_one_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"x": torch.ones(5)}, tmp_path / "m.safetensors")
    (tensor,) = read_header(tmp_path / "m.safetensors")
    lot = (tmp_path / "m.safetensors", [values_module.Piece(tensor.dtype, tensor.start, tensor.end)])
    popen, pids = subprocess.Popen, []

    def the_first_dies(*words: Any, **more: Any) -> Any:
        process = popen(*words, **more)
        if not pids:
            os.kill(process.pid, signal.SIGBUS)
            process.wait()
        pids.append(process.pid)
        return process

    monkeypatch.setattr(subprocess, "Popen", the_first_dies)
    with worker_module.measured([lot, lot, lot], processes=1) as answers:
        lost, *answered = answers
    assert lost == "the process that read the file ended (the file was truncated while it was read, or the disk fails)"
    (held,), again = answered
    assert isinstance(held, values_module.Values)
    assert held.largest == 1
    assert again == [held]
    assert len(pids) == 2


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"x": torch.ones(5000), "y": torch.full((5000,), math.nan)}, tmp_path / "a.safetensors")
    save_file({"z": torch.tensor([math.nan])}, tmp_path / "b.safetensors")
    read = scan_module.read_header

    def then_cut(file: Path) -> list[Tensor]:
        tensors = read(file)
        if file.name == "a.safetensors":
            os.truncate(file, 30_000)
        return tensors

    monkeypatch.setattr(scan_module, "read_header", then_cut)
    found = hfpatch.scan(tmp_path).findings
    assert kinds(found) == [("broken file", "a.safetensors"), ("NaN", "z")]
    assert "was truncated" in found[0].text
    assert found[1].figures == {"count": 1}


# the command


def command(*words: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "80", "HF_HUB_OFFLINE": "1"}
    line = [sys.executable, "-m", "hfpatch.cli", "scan", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, env=environment, timeout=120, check=False)


@pytest.mark.slow
def test_command(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    for folder, value in ((good, 1.0), (bad, math.nan)):
        folder.mkdir()
        save_file(
            {"model.layers.0.self_attn.q_proj.weight": torch.tensor([value, 7e4]), "b": torch.zeros(2)},
            folder / "model.safetensors",
        )
    fine = command(good)
    assert (fine.returncode, fine.stderr) == (0, "")
    assert "nothing wrong in 1 file" in " ".join(fine.stdout.split())
    wrong = command(bad)
    assert (wrong.returncode, wrong.stderr) == (1, "")
    for text in (fine.stdout, wrong.stdout):
        assert max(map(len, text.splitlines()[1:])) <= 80, text
        assert "beyond float16" in text
        assert "all zero" in text
        assert "F32: 2 tensors, 4 parameters, 16 bytes" in text
    assert "1 of 2 F32 values" in wrong.stdout
    shown = json.loads(command(bad, "--json").stdout)
    assert list(shown) == ["path", "files", "findings", "notes", "census"]
    assert [f["kind"] for f in shown["findings"]] == ["NaN"]
    assert list(shown["findings"][0]) == ["kind", "file", "tensor", "text", "figures"]
    for words in ([tmp_path / "none"], [good, "--processes", "0"]):
        refused = command(*words)
        assert refused.returncode == 2
        assert refused.stderr.startswith("hfpatch: ")
        assert len(refused.stderr.splitlines()) == 1


def test_progress_is_silent_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("scanning", 10) as advance:
        advance(10)
    assert capsys.readouterr() == ("", "")


def test_progress_in_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress("scanning", 10) as advance:
        advance(10)
    shown = capsys.readouterr()
    assert not shown.out
    assert "scanning" in shown.err
    assert "100 %" in shown.err
