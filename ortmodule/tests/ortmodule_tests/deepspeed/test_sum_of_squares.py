"""The fused sum of squares equals double precision, also beyond the range of float32's squares."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ortmodule._internal.deepspeed.sum_of_squares import float64_sum_of_squares

# The dtypes that are cast to float32 first.
HALVES = (torch.float16, torch.bfloat16)


def exact(tensors: list[Tensor]) -> float:
    return math.fsum(float(tensor.double().square().sum()) for tensor in tensors)


def wide(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal values whose size falls over six decades."""
    return (
        torch.randn(count, generator=torch.Generator().manual_seed(1))
        * torch.logspace(0, -6, count)
    ).to(dtype)


@pytest.fixture
def no_slow_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if the sum is computed in float64."""
    monkeypatch.setattr(
        "ortmodule._internal.deepspeed.sum_of_squares._sum_squares_in_float64",
        lambda tensors: pytest.fail("went the slow way"),
    )


@pytest.mark.usefixtures("no_slow_way")
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
# Around the length of a row (256), and more than one block of 2**20.
@pytest.mark.parametrize("count", [1, 255, 256, 257, 3_000_001])
def test_equal_to_double_precision(count: int, dtype: torch.dtype) -> None:
    """The root of the sum is within 2e-7 of float64's; float32 itself resolves 1e-7."""
    tensors = [wide(count, dtype), wide(7, dtype).reshape(7, 1), torch.ones((), dtype=dtype)]
    found = float64_sum_of_squares(tensors)
    assert (found.dtype, found.shape) == (torch.float64, ())
    assert math.sqrt(float(found)) == pytest.approx(math.sqrt(exact(tensors)), rel=2e-7)


@pytest.mark.usefixtures("no_slow_way")
def test_a_hundred_million_elements() -> None:
    """The norm of 1e8 elements is within 3e-7, though float32 alone misses it by over 1e-5."""
    tensor = torch.full((100_000_000,), 0.1)
    # The root of 1e8 equal squares; 0.1 as float32 has it.
    norm = 1e4 * float(tensor[0].double())
    assert math.sqrt(float(float64_sum_of_squares([tensor]))) == pytest.approx(norm, rel=3e-7)
    assert float(torch.linalg.vector_norm(tensor)) != pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 255, 256, 5000, 9999])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_one_bad_element_anywhere_is_seen(bad: float, place: int, dtype: torch.dtype) -> None:
    """One inf or nan at any place of any tensor makes the sum inf or nan."""
    for tensors in ([torch.ones(10_000), torch.ones(3)], [torch.ones(3), torch.ones(10_000)]):
        held = [tensor.to(dtype) for tensor in tensors]
        assert float64_sum_of_squares(held).isfinite()
        # In the larger tensor, which has full rows and a rest.
        max(held, key=Tensor.numel)[place] = bad
        assert not float64_sum_of_squares(held).isfinite()


@pytest.mark.parametrize("size", [1e30, 3e38, 1e-20, 1e-38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_float32_cannot_square_is_measured_in_double(size: float, dtype: torch.dtype) -> None:
    """The sum is exact for finite values whose squares overflow or vanish in float32."""
    tensors = [torch.full((5000,), size, dtype=dtype), torch.zeros(5, dtype=dtype)]
    assert exact(tensors) > 0
    assert float(float64_sum_of_squares(tensors)) == pytest.approx(exact(tensors), rel=1e-6)


def test_nothing_and_zeros() -> None:
    """Empty tensors and zeros have the sum 0."""
    assert float(float64_sum_of_squares([torch.empty(0)])) == 0
    assert float(float64_sum_of_squares([torch.empty(0, 3), torch.zeros(2000)])) == 0
    assert float(float64_sum_of_squares([torch.empty(0), torch.full((2,), 3.0)])) == pytest.approx(
        18, rel=4e-7
    )


def test_strides_and_mixed_precisions() -> None:
    """Tensors of any stride and mixed dtypes count each element once, and are not changed."""
    tensors = [
        wide(4000).reshape(40, 100).t(),
        wide(5000)[::2],
        wide(3000, torch.bfloat16),
        wide(9).requires_grad_(),
    ]
    before = [tensor.detach().clone() for tensor in tensors]
    found = float64_sum_of_squares(tensors)
    assert not found.requires_grad
    assert float(found) == pytest.approx(exact([tensor.detach() for tensor in tensors]), rel=4e-7)
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("count", [7, 100_000_000])
def test_on_cuda(count: int, dtype: torch.dtype) -> None:
    """On CUDA the sum is within 1e-6 of float64, and detects a bad element and huge finite ones."""
    tensors = [
        wide(count, dtype).cuda(),
        wide(1000, dtype).cuda(),
        torch.empty(0, dtype=dtype, device="cuda"),
    ]
    assert math.sqrt(float(float64_sum_of_squares(tensors))) == pytest.approx(
        math.sqrt(exact(tensors)), rel=1e-6
    )
    tensors[0][-1] = math.nan
    assert not float64_sum_of_squares(tensors).isfinite()
    # 1e30 is beyond float16.
    if dtype != torch.float16:
        tensors[0][-1] = 1e30
        assert float(float64_sum_of_squares(tensors)) == pytest.approx(exact(tensors), rel=1e-6)
