"""The helpers of a loop of one's own: the loss, the gradients, a distillation loss."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hfpatch.errors import InputError
from hfpatch.guarding.helpers import LARGEST, gradient_report, validate_loss
from hfpatch.numerics.losses import FLOOR, normalized_mse

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


# validate_loss


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_good_loss_comes_back_itself(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    loss = torch.full(shape, 2.5, dtype=dtype, requires_grad=True)
    assert validate_loss(loss) is loss
    validate_loss(loss, low=2.5, high=3)
    validate_loss(loss, low=0, high=2.5)
    assert loss.grad is None


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (math.nan, "the loss is NaN; if every label of the batch is -100, check the collator"),
        (math.inf, "the loss is +inf; hfpatch.trace"),
        (-math.inf, "the loss is -inf; hfpatch.trace"),
        (1e7, "the loss is 1e+07, outside -1e+06 to 1e+06; check the batch"),
        (-1e7, "the loss is -1e+07, outside"),
    ],
)
def test_a_bad_loss_is_said(value: float, said: str) -> None:
    with pytest.raises(InputError) as error:
        validate_loss(torch.tensor(value))
    assert str(error.value).startswith("validate_loss: " + said)


def test_no_range_makes_nan_good() -> None:
    with pytest.raises(InputError, match="NaN"):
        validate_loss(torch.tensor(math.nan), low=-math.inf, high=math.inf)
    with pytest.raises(InputError, match="inf"):
        validate_loss(torch.tensor(math.inf), low=-math.inf, high=math.inf)
    with pytest.raises(InputError, match="outside 0 to 1"):
        validate_loss(torch.tensor(1.5), 0, 1)


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (2.0, 1.0), (math.nan, 1.0), (0.0, math.nan)])
def test_no_range(low: float, high: float) -> None:
    with pytest.raises(InputError, match="want low below high"):
        validate_loss(torch.tensor(1.0), low, high)


def test_what_is_no_loss() -> None:
    for bad in (torch.ones(3), torch.ones(0), torch.ones((), dtype=torch.complex64)):
        with pytest.raises(InputError, match="want a loss of one real number"):
            validate_loss(bad)


# gradient_report


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_norms_of_gradients(dtype: torch.dtype) -> None:
    model = net().to(dtype)
    for i, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 300.0 * (i + 1))  # squares pass float16
    exact = {n: p.grad.double().norm().item() for n, p in model.named_parameters()}
    found = gradient_report(model)
    assert found.norm == pytest.approx(math.hypot(*exact.values()), rel=1e-6)
    assert [n for n, _ in found.largest] == sorted(exact, key=lambda n: -exact[n])
    assert dict(found.largest) == pytest.approx(exact, rel=1e-6)
    assert (found.nonfinite, found.parameters, found.missing) == (0.0, 4, ())
    scaled = gradient_report(model, loss_scale=1000.0)
    assert scaled.norm == pytest.approx(found.norm / 1000, rel=1e-6)
    assert scaled.largest[0][1] == pytest.approx(found.largest[0][1] / 1000, rel=1e-6)


def test_what_is_not_finite_comes_first() -> None:
    model = net()
    model(torch.randn(4, 6)).square().mean().backward()
    model[2].bias.grad[0] = math.inf
    assert gradient_report(model).norm == math.inf
    model[0].bias.grad[0] = math.nan
    found = gradient_report(model)
    assert math.isnan(found.norm)
    assert [n for n, _ in found.largest[:2]] == ["0.bias", "2.bias"]
    assert found.nonfinite == pytest.approx(2 / sum(p.numel() for p in model.parameters()))
    assert "2.41% of the values not finite" in str(found)


def test_gradients_that_are_missing() -> None:
    model = net()
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    model(torch.randn(4, 6)).square().mean().backward()
    model[2].bias.requires_grad_(True)
    found = gradient_report(nn.DataParallel(model))
    assert (found.parameters, found.missing) == (1, ("2.bias",)), "a frozen one lacks nothing"
    assert "1 trained parameters have no gradient: 2.bias" in str(found)
    many = nn.Sequential(*(nn.Linear(2, 2) for _ in range(9)))
    many(torch.ones(1, 2)).sum().backward()
    assert len(gradient_report(many).largest) == LARGEST < gradient_report(many).parameters
    assert json.loads(json.dumps(found.to_dict()))["missing"] == ["2.bias"]


def test_gradients_of_shards_are_those_of_the_whole() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    x = torch.randn(4, 6)
    plain, sharded = net(), net()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    for model in (plain, sharded):
        model(x).square().mean().backward()
    a, b = gradient_report(plain), gradient_report(sharded)
    assert b.norm == pytest.approx(a.norm, rel=1e-6)
    assert [n for n, _ in b.largest] == [n for n, _ in a.largest]


def test_no_gradients() -> None:
    with pytest.raises(InputError, match=r"none of 4 parameters of Sequential has a gradient; call it after backward"):
        gradient_report(net())
    for scale in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InputError, match="want a loss_scale above 0"):
            gradient_report(net(), loss_scale=scale)


# normalized_mse


def pair(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    teacher = torch.randn(*shape, generator=made, dtype=torch.float64)
    student = teacher + 0.3 * torch.randn(*shape, generator=made, dtype=torch.float64)
    return student.to(dtype), teacher.to(dtype)


def written_out(student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The formula, in float64, token by token."""
    s, t = student.double().flatten(0, -2), teacher.double().flatten(0, -2)
    keep = torch.ones(len(t), dtype=torch.bool) if mask is None else mask.flatten() != 0
    s, t = s[keep], t[keep]
    size = t.square().mean(-1).sqrt()
    held = sorted(x.item() for x in size if x > 0)
    if not held:
        return s.square().mean()
    size = size.clamp(min=FLOOR * held[(len(held) - 1) // 2])
    return (((s - t) / size[:, None]).square().mean(-1)).mean()


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 4, 5)])
@pytest.mark.parametrize("masked", [False, True])
def test_value_and_gradient_are_those_of_the_formula(shape: tuple[int, ...], masked: bool) -> None:
    student, teacher = pair(*shape)
    mask = (torch.arange(teacher[..., 0].numel()).reshape(shape[:-1]) % 3 != 2).long() if masked else None
    one, two = student.clone().requires_grad_(), student.clone().requires_grad_()
    rows = (lambda x: x) if len(shape) > 1 else (lambda x: x[None])
    got = normalized_mse(one, teacher, mask)
    want = written_out(rows(two), rows(teacher), mask)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    got.backward()
    want.backward()
    torch.testing.assert_close(one.grad, two.grad, rtol=1e-10, atol=1e-14)
    assert torch.autograd.gradcheck(lambda s: normalized_mse(s, teacher, mask), (student.clone().requires_grad_(),))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_against_float64(dtype: torch.dtype, autocast: bool) -> None:
    student, teacher = pair(4, 16, 64, dtype=dtype)
    student.requires_grad_()
    exact = student.detach().double().requires_grad_()
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        loss = normalized_mse(student, teacher)
    loss.backward()
    reference = written_out(exact, teacher)
    reference.backward()
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss.double(), reference, rtol=1e-6, atol=0)
    # what is left is the rounding of the gradient to the student's dtype
    step = torch.finfo(dtype).eps
    least = torch.finfo(dtype).smallest_normal * step
    torch.testing.assert_close(student.grad.double(), exact.grad, rtol=step, atol=least)


@pytest.mark.parametrize("factor", [1e-12, 1e-3, 1.0, 1e4, 1e18])
def test_the_teachers_magnitude_does_not_matter(factor: float) -> None:
    student, teacher = pair(3, 7, dtype=torch.float32)
    base = normalized_mse(student, teacher)
    torch.testing.assert_close(normalized_mse(student * factor, teacher * factor), base, rtol=1e-5, atol=0)
    assert normalized_mse(torch.zeros_like(teacher), teacher * factor).item() == pytest.approx(1, rel=1e-5)
    assert normalized_mse(teacher, teacher).item() == 0


@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 6e4), (torch.bfloat16, 3e38), (torch.float32, 3e38)])
def test_squares_that_pass_the_dtype(dtype: torch.dtype, size: float) -> None:
    teacher = torch.full((2, 4), size, dtype=dtype)
    student = (teacher * 0.5).requires_grad_()
    loss = normalized_mse(student, teacher)
    assert loss.item() == pytest.approx(0.25, rel=1e-2)
    loss.backward()
    assert student.grad.isfinite().all()


def test_a_massive_token_does_not_drown_the_others() -> None:
    student, teacher = pair(8, 16)
    teacher[0] *= 1e4
    student[0] *= 1e4
    loss = normalized_mse(student, teacher).item()
    assert 0.02 < loss < 0.5
    better = student.clone()
    better[1:] = teacher[1:]
    assert normalized_mse(better, teacher).item() < 0.3 * loss
    plain = (student - teacher).square().sum() / teacher.square().sum()
    assert ((better - teacher).square().sum() / teacher.square().sum() / plain).item() > 0.999


def test_a_token_that_is_nearly_zero_does_not_explode() -> None:
    student, teacher = pair(8, 16)
    teacher[3] *= 1e-9
    student.requires_grad_()
    loss = normalized_mse(student, teacher)
    assert loss.item() < 100
    loss.backward()
    assert student.grad.abs().max() < 100
    teacher[3] = 0
    assert normalized_mse(student, teacher).isfinite()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_teacher_of_zeros(dtype: torch.dtype) -> None:
    student = torch.full((2, 3), 2.0, dtype=dtype, requires_grad=True)
    loss = normalized_mse(student, torch.zeros(2, 3, dtype=dtype))
    assert loss.item() == 4
    loss.backward()
    assert student.grad.tolist() == [[pytest.approx(4 / 6, rel=1e-2)] * 3] * 2


def test_padding_adds_nothing_whatever_it_holds() -> None:
    student, teacher = pair(2, 4, 8)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    base = normalized_mse(student, teacher, mask)
    for junk in (math.nan, math.inf, 1e300):
        s, t = student.clone(), teacher.clone()
        s[mask == 0] = junk
        t[mask == 0] = -junk
        s.requires_grad_()
        loss = normalized_mse(s, t, mask.bool())
        torch.testing.assert_close(loss, base)
        loss.backward()
        assert (s.grad[mask == 0] == 0).all()
        assert s.grad[mask != 0].abs().min() > 0
    s = student.clone().requires_grad_()
    loss = normalized_mse(s, teacher, torch.zeros_like(mask))
    assert loss.item() == 0
    loss.backward()
    assert (s.grad == 0).all()


@pytest.mark.parametrize("junk", [math.nan, math.inf])
@pytest.mark.parametrize("where", [0, 1])
def test_nothing_that_is_not_finite_is_hidden(junk: float, where: int) -> None:
    tensors = [t.float() for t in pair(4, 8)]
    tensors[where][2, 3] = junk
    assert not normalized_mse(*tensors).isfinite()
    everywhere = [torch.full((2, 3), junk) if i == where else torch.ones(2, 3) for i in range(2)]
    assert not normalized_mse(*everywhere).isfinite()


def test_no_gradient_goes_into_the_teacher() -> None:
    student, teacher = (t.requires_grad_() for t in pair(3, 4))
    normalized_mse(student, teacher).backward()
    assert teacher.grad is None
    assert student.grad is not None


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((torch.ones(2, 3), torch.ones(2, 4)), "the same shape [..., width], got (2, 3) and (2, 4)"),
        ((torch.tensor(1.0), torch.tensor(1.0)), "got () and ()"),
        ((torch.ones(2, 3).long(), torch.ones(2, 3)), "want floating-point tensors, got torch.int64"),
        ((torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3)), "want a mask of shape (2,)"),
    ],
)
def test_tensors_that_do_not_go_together(args: Any, said: str) -> None:
    with pytest.raises(InputError) as error:
        normalized_mse(*args)
    assert said in str(error.value)
