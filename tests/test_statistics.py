"""Statistics of a tensor against a plain float64 reference."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hfpatch.numerics.statistics import SAMPLE, CPURows, rows, stride
from hfpatch.numerics.statistics_lots import Lots
from hfpatch.numerics.statistics_plain import COLUMNS, THRESHOLDS, DeviceRows

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -2.5,
    math.nan,
    math.inf,
    -math.inf,
    2.0**-25,
    2.0**-24,
    2.0**-17,
    1.1 * 2.0**-17,
    2.0**-10,
    60000.0,
]


def reference(tensor: torch.Tensor) -> list[float]:
    x = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    x = x.double().flatten().cpu()
    finite = x[x.isfinite()]
    size = finite.abs()
    return [
        *(float(v.sum()) for v in (x.isnan(), x == math.inf, x == -math.inf, size == 0)),
        *(float(((size > 0) & (size <= t)).sum()) for t in THRESHOLDS),
        float(finite.min()) if len(finite) else math.inf,
        float(finite.max()) if len(finite) else -math.inf,
        float(finite.sum()),
        float((finite * finite).sum()),
        float(len(finite)),
    ]


def plain(most: int = 0) -> Lots:
    """The rows of a device without a kernel, tried on a CPU as well."""
    return Lots(DeviceRows(), most)


def measured(*tensors: torch.Tensor, kind: Any = None) -> list[list[float]]:
    gathered = kind() if kind is not None else rows(tensors[0].device)
    numbers = [gathered.add(t) for t in tensors]
    table = gathered.read()
    assert table.dtype == torch.float64
    assert numbers == list(range(len(tensors)))
    return table.tolist()


def same(row: list[float], tensor: torch.Tensor, rel: float = 1e-5) -> None:
    for name, got, want in zip(COLUMNS, row, reference(tensor), strict=True):
        assert got == pytest.approx(want, rel=rel, abs=1e-4 if name == "sum" else 1e-12), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_values(dtype: torch.dtype, device: str) -> None:
    x = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype).to(device)
    (row,) = measured(x)
    same(row, x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_device_rows_agree(dtype: torch.dtype, device: str) -> None:
    x = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype).to(device)
    (row,) = measured(x, kind=plain)
    same(row, x)


@pytest.mark.parametrize("device", DEVICES)
def test_layouts(device: str) -> None:
    x = torch.randn(3, 8, 10, device=device)
    wave = torch.randn(4, 4, dtype=torch.complex64, device=device)
    image = torch.randn(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last)
    tensors = [
        x, x.transpose(0, 2), x[:, ::2], x[1], x[..., 3], x[0, 0, 0], torch.ones(2, 1, device=device).expand(2, 6),
        image, wave, wave.conj(), wave.conj().imag, wave[0].conj().imag[:1], x.requires_grad_(),
    ]  # fmt: skip
    for row, tensor in zip(measured(*tensors), tensors, strict=True):
        same(row, tensor.detach())


@pytest.mark.parametrize("device", DEVICES)
def test_empty_and_nothing_finite(device: str) -> None:
    empty = torch.ones(0, 4, device=device)
    lost = torch.full((5,), math.nan, device=device)
    first, second = measured(empty, lost)
    assert first == [0.0] * 7 + [math.inf, -math.inf, 0.0, 0.0, 0.0]
    assert second == [5.0] + [0.0] * 6 + [math.inf, -math.inf, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("place", [0, 70_001, -1])
def test_one_bad_element_anywhere_in_a_large_tensor(place: int, device: str) -> None:
    for value, column in ((math.nan, 0), (math.inf, 1), (-math.inf, 2)):
        x = torch.randn(300, 401, device=device)
        x.view(-1)[place] = value
        x.view(-1)[5] = 99.0
        (row,) = measured(x)
        assert [row[i] for i in range(3)] == [float(i == column) for i in range(3)]
        assert row[8] == 99.0


def test_a_large_tensor_on_a_cpu_is_sampled_evenly() -> None:
    """Every channel comes up: one that is 100 times larger than the others is seen in the RMS."""
    x = torch.ones(2048, 256)
    x[:, 7] = 100
    (row,) = measured(x)
    assert SAMPLE / 2 <= row[11] <= 2 * SAMPLE
    assert (row[10] / row[11]) ** 0.5 == pytest.approx(float(x.square().mean().sqrt()), rel=0.25)
    assert (row[7], row[8]) == (float(x.min()), float(x.max()))


@pytest.mark.slow
@CUDA
def test_a_large_tensor_on_a_gpu() -> None:
    """Zeros and what vanishes are counted in every eighth block, all else in all."""
    x = torch.randn(4096, 3001, device="cuda", dtype=torch.bfloat16)
    x[::3] = 0
    (row,) = measured(x)
    want = reference(x)
    assert row[3] == pytest.approx(want[3], rel=0.05)
    assert row[6] == pytest.approx(want[6], rel=0.2)
    same([*row[:3], *want[3:7], *row[7:]], x, rel=1e-4)


@CUDA
def test_no_wait_for_the_gpu() -> None:
    gathered = rows(torch.device("cuda", 0))
    x = torch.randn(64, 64, device="cuda")
    gathered.add(x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2000):  # more than a chunk of rows
            gathered.add(x)
        gathered.add(x[:0])
        gathered.add(x.double())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    same(gathered.read()[1500].tolist(), x)


@given(st.integers(2 * SAMPLE + 1, 10**9))
def test_stride_meets_every_channel(size: int) -> None:
    step = stride(size)
    assert math.gcd(step, size) == 1
    assert step >= size // SAMPLE
    assert size // step >= 300


@pytest.mark.parametrize("layout", ["rows", "channels_last", "permuted", "a last dimension of 1", "complex"])
def test_the_sample_meets_every_channel_in_any_layout(layout: str) -> None:
    x = torch.ones(8, 64, 32, 64)  # channel 7 of 64
    x[..., 7] = 100
    tensor = {
        "rows": x,
        "channels_last": x.permute(0, 3, 1, 2),
        "permuted": x.transpose(1, 3),
        "a last dimension of 1": x.unsqueeze(-1),
        "complex": torch.complex(torch.ones(4000, 33), torch.full((4000, 33), 100.0)),
    }[layout]
    (row,) = measured(tensor)
    want = reference(tensor)
    assert row[11] < want[11]
    assert row[10] / row[11] == pytest.approx(want[10] / want[11], rel=0.1)


@pytest.mark.parametrize("device", DEVICES)
def test_the_callers_defaults_do_not_matter(device: str) -> None:
    """A default device that holds no values, and a default dtype too narrow for a row."""
    x = torch.full((300, 300), 1000.25, device=device)
    kinds: list[Any] = [lambda: rows(x.device), plain]
    for kind in kinds:
        gathered = kind()
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.bfloat16)
        try:
            gathered.add(x)
            gathered.add(x[:0])
            table = gathered.read()
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
        assert (table.device.type, table.dtype) == ("cpu", torch.float64)
        assert table[0, [0, 1, 2, 3, 7, 8]].tolist() == [0, 0, 0, 0, 1000.25, 1000.25]
        assert table[1, 11] == 0


@pytest.mark.parametrize("device", DEVICES)
def test_float64_beyond_float32(device: str) -> None:
    x = torch.tensor([1e100, -2.0], dtype=torch.float64, device=device)
    for kind in (None, plain):
        row, other = measured(x, torch.ones(3, device=device), kind=kind)
        same(row, x)
        assert other[:9] == [0.0] * 7 + [1.0, 1.0]


@CUDA
def test_a_waiting_tensor_keeps_no_graph_and_no_replaced_data() -> None:
    parameter = torch.nn.Parameter(torch.ones(10, device="cuda"))
    result = parameter * 2
    node = weakref.ref(result)
    gathered = rows(parameter.device)
    gathered.add(parameter)
    gathered.add(result)
    parameter.data = torch.full((20,), 5.0, device="cuda")
    del result
    assert node() is None
    assert gathered.read()[:, 8].tolist() == [1.0, 2.0]


@settings(deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), max_size=40),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_any_values(values: list[float], dtype: torch.dtype) -> None:
    x = torch.tensor(values, dtype=torch.float32).to(dtype)
    (row,) = measured(x)
    want = reference(x)
    assert row[:9] == want[:9]
    assert row[11] == want[11]


@pytest.mark.parametrize("device", DEVICES)
def test_many_rows_keep_their_order(device: str) -> None:
    """More than are reduced or launched at once, of several dtypes in turn."""
    dtypes = [torch.float32, torch.bfloat16, torch.float64]
    tensors = [torch.full((7,), float(i % 200), dtype=dtypes[i % 3], device=device) for i in range(400)]
    for row, tensor in zip(measured(*tensors), tensors, strict=True):
        same(row, tensor)


def test_nothing_of_the_tensor_changes() -> None:
    x = torch.randn(100, 100, requires_grad=True)
    y = x * 2
    before = (y._version, y.grad_fn)
    gathered = CPURows()
    gathered.add(y)
    y.sum().backward()
    assert (y._version, y.grad_fn) == before
    assert torch.equal(x.grad, torch.full_like(x, 2.0))  # type: ignore[arg-type]


class TestLots:
    def test_what_was_written_to_while_it_waited_is_named(self) -> None:
        gathered = plain(most=10**9)
        kept, written = torch.ones(4), torch.ones(4)
        view = written.view(2, 2)
        numbers = [gathered.add(t) for t in (kept, view, written)]
        written.mul_(3)
        numbers.append(gathered.add(written))
        assert gathered.read()[:, 8].tolist() == [1.0, 3.0, 3.0, 3.0]
        assert gathered.late == {1, 2}
        assert numbers == [0, 1, 2, 3]

    def test_at_once_is_before_the_write(self) -> None:
        gathered = plain(most=10**9)
        x, y = torch.ones(4), torch.ones(4)
        gathered.add(x, at_once=True)
        gathered.add(y)
        gathered.flush()
        x.mul_(3)
        y.mul_(3)
        assert gathered.read()[:, 8].tolist() == [1.0, 1.0]
        assert not gathered.late

    def test_a_tensor_that_counts_no_versions_does_not_wait(self) -> None:
        gathered = plain(most=10**9)
        with torch.inference_mode():
            x = torch.ones(4)
            gathered.add(x)
            x.mul_(3)
        assert gathered.read()[0, 8] == 1.0

    @pytest.mark.parametrize("count", [3, 1000])
    def test_what_waits_is_bounded(self, count: int) -> None:
        """In bytes, however many tensors follow, and in their number."""
        gathered = plain(most=4 * 100 * 4)
        alive: list[weakref.ref[torch.Tensor]] = []
        for value in range(count):
            x = torch.full((100,), float(value))
            alive.append(weakref.ref(x))
            gathered.add(x)
            del x
            assert sum(ref() is not None for ref in alive[-20:]) <= 4
        assert gathered.read()[:, 8].tolist() == [float(v) for v in range(count)]
