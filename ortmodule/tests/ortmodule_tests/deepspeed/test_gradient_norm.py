"""The fused pass on DeepSpeed's ZeRO 1 and 2 optimizer: its results, and unsupported optimizers."""

from __future__ import annotations

import math
import types
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("deepspeed")
import deepspeed
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ortmodule._internal.deepspeed import gradient_norm, known_sources
from ortmodule._internal.deepspeed.gradient_norm import (
    fuse_gradient_norm_or_get_reason,
)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make sums over ranks do nothing, as with one rank."""
    monkeypatch.setattr(deepspeed.comm, "all_reduce", lambda *_, **__: None)


def zero(*groups: list[Tensor], padding: tuple[Tensor, ...] = (), **fields: Any) -> Any:
    """Return DeepSpeed's optimizer during a step, with these gradients and padding."""
    # Without `__init__`, which needs process groups; only the attributes used are set.
    optimizer = object.__new__(DeepSpeedZeroOptimizer)
    weights = [
        [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in group] for group in groups
    ]
    state = {
        "bit16_groups": weights,
        "params_in_partition": weights,
        "averaged_gradients": {
            i: [*group, *(padding if i == 0 else ())] for i, group in enumerate(groups)
        },
        "cpu_offload": False,
        "has_moe_layers": False,
        "model_parallel_group": None,
        "model_parallel_rank": 0,
        "dp_process_group": None,
        "device": "cpu",
        **fields,
    }
    vars(optimizer).update(state)
    return optimizer


def norms(optimizer: Any) -> list[float]:
    """Return the norm of each group, computed as in scaled_global_norm."""
    groups = zip(optimizer.averaged_gradients.values(), optimizer.params_in_partition)
    return [
        float(optimizer.get_grad_norm_direct(gradients, params)) for gradients, params in groups
    ]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of elements read by each call."""
    read: list[int] = []
    plain = gradient_norm.float64_sum_of_squares

    def noting(tensors: Any) -> Tensor:
        read.append(sum(tensor.numel() for tensor in tensors))
        return plain(tensors)

    monkeypatch.setattr(gradient_norm, "float64_sum_of_squares", noting)
    return read


def gradients(*sizes: int) -> list[Tensor]:
    torch.manual_seed(5)
    return [torch.randn(size) for size in sizes]


def test_the_answers_are_deepspeeds() -> None:
    """Check and norms equal those of DeepSpeed's own functions in value, dtype and shape."""
    optimizer = zero(gradients(300, 7), gradients(5), [], padding=(torch.zeros(4),))
    stock = optimizer.has_overflow_partitioned_grads_serial(), norms(optimizer)
    assert fuse_gradient_norm_or_get_reason(optimizer) == ""
    check = optimizer.has_overflow_partitioned_grads_serial()
    assert (check.dtype, check.shape, bool(check)) == (stock[0].dtype, stock[0].shape, False)
    assert norms(optimizer) == pytest.approx(stock[1], rel=1e-6)
    norm = optimizer.get_grad_norm_direct(
        optimizer.averaged_gradients[0], optimizer.params_in_partition[0]
    )
    assert (norm.dtype, norm.shape) == (torch.float32, ())
    # Another norm than the 2-norm is left to DeepSpeed.
    largest = optimizer.get_grad_norm_direct(
        optimizer.averaged_gradients[1], [], norm_type=math.inf
    )
    # The infinity norm is the largest element.
    assert float(largest) == float(optimizer.averaged_gradients[1][0].abs().max())
    # Set on this optimizer alone.
    assert zero(gradients(3)).get_grad_norm_direct.__func__ is (
        DeepSpeedZeroOptimizer.get_grad_norm_direct
    )


def test_check_and_norm_share_one_pass(measured: list[int]) -> None:
    """The norm after the check reads nothing; a second norm, or other gradients, are read again."""
    optimizer = zero(gradients(300, 7), gradients(5))
    fuse_gradient_norm_or_get_reason(optimizer)
    optimizer.has_overflow_partitioned_grads_serial()
    assert measured == [307, 5]
    # The norm uses the sums of the check, each of them once.
    first = norms(optimizer)
    assert measured == [307, 5]
    assert norms(optimizer) == first
    assert measured == [307, 5, 307, 5]
    optimizer.has_overflow_partitioned_grads_serial()
    optimizer.averaged_gradients[1] = [2 * gradient for gradient in optimizer.averaged_gradients[1]]
    assert norms(optimizer) == pytest.approx([first[0], 2 * first[1]])


def test_a_gradient_changed_after_the_check_is_measured_again() -> None:
    """A gradient changed in place after the check is read again."""
    optimizer = zero(gradients(300), gradients(5))
    fuse_gradient_norm_or_get_reason(optimizer)
    optimizer.has_overflow_partitioned_grads_serial()
    before = norms(optimizer)
    optimizer.has_overflow_partitioned_grads_serial()
    optimizer.averaged_gradients[0][0].mul_(3)
    assert norms(optimizer) == pytest.approx([3 * before[0], before[1]])


def test_nothing_keeps_gradients_alive() -> None:
    """A step that ends by overflow frees its gradients, as with DeepSpeed's own functions."""
    optimizer = zero(gradients(300))
    fuse_gradient_norm_or_get_reason(optimizer)
    optimizer.has_overflow_partitioned_grads_serial()
    freed = weakref.ref(optimizer.averaged_gradients[0][0])
    # The sums of the check are still kept at this point.
    optimizer.averaged_gradients[0] = None
    assert freed() is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["first group", "last group", "padding"])
def test_a_bad_gradient_overflows(bad: float, place: str) -> None:
    """One bad element is an overflow, and its group's norm is -1."""
    # Padding counts for the check, but not for the norm.
    padding = torch.zeros(4)
    optimizer = zero(gradients(300, 7), gradients(5), padding=(padding,))
    hit = {"padding": padding}.get(place, optimizer.averaged_gradients[place == "last group"][0])
    hit[-1] = bad
    stock = bool(optimizer.has_overflow_partitioned_grads_serial()), norms(optimizer)
    fuse_gradient_norm_or_get_reason(optimizer)
    ours = bool(optimizer.has_overflow_partitioned_grads_serial()), norms(optimizer)
    assert ours[0] is stock[0] is True
    assert ours[1] == pytest.approx(stock[1], rel=1e-6)
    assert (-1.0 in ours[1]) == (place != "padding")


def test_huge_finite_gradients_are_no_overflow() -> None:
    """Gradients of 1e30 pass the check; a norm beyond float32 is -1, as in DeepSpeed."""
    # The squares of the first group overflow in float32, those of the second do not.
    optimizer = zero([torch.full((400,), 1e30)], [torch.full((3,), 1e18)])
    stock = norms(optimizer)
    fuse_gradient_norm_or_get_reason(optimizer)
    assert not optimizer.has_overflow_partitioned_grads_serial()
    assert norms(optimizer) == pytest.approx(stock, rel=1e-6)
    assert stock[0] == -1


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"cpu_offload": True}, "with CPU offload DeepSpeed measures gradients as it copies them"),
        ({"has_moe_layers": True}, "mixtures of experts are not supported"),
        ({"model_parallel_group": object()}, "model parallelism is not supported"),
        (
            {"bit16_groups": [[torch.zeros(2).double()]]},
            "only float32, float16 and bfloat16 are supported",
        ),
        ({"bit16_groups": [[torch.zeros(2, device="meta")]]}, "only CPU and CUDA are supported"),
    ],
)
def test_what_is_left_to_deepspeed(fields: dict[str, Any], why: str) -> None:
    """An optimizer that is not supported stays unchanged, and the reason is returned."""
    optimizer = zero(gradients(3), **fields)
    before = dict(vars(optimizer))
    assert fuse_gradient_norm_or_get_reason(optimizer) == why
    assert vars(optimizer) == before


def test_replicated_and_modified_optimizers() -> None:
    """Pipeline parallelism, another type of optimizer, and a second application are refused."""
    replicated = zero(gradients(3))
    replicated.bit16_groups[0][0].ds_pipe_replicated = True
    assert fuse_gradient_norm_or_get_reason(replicated) == "pipeline parallelism is not supported"
    twice = zero(gradients(3))
    assert [fuse_gradient_norm_or_get_reason(twice) for _ in range(2)] == [
        "",
        "the optimizer is modified already",
    ]
    other = fuse_gradient_norm_or_get_reason(torch.optim.SGD([torch.zeros(1)], lr=1.0))
    assert other == "only ZeRO 1 and 2 are supported, not SGD"


def scaled_global_norm(self: Any, norm_type: int = 2) -> None:
    """Do nothing; this source is in no release of DeepSpeed."""


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (DeepSpeedZeroOptimizer, "get_grad_norm_direct"),
        (DeepSpeedZeroOptimizer, "step"),
        (DeepSpeedZeroOptimizer, "scaled_global_norm"),
        (stage_1_and_2, "has_inf_or_nan"),
    ],
)
def test_an_unknown_source_is_left_alone(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function whose source is in no known release is named, and nothing is replaced."""
    if not hasattr(owner, name):
        pytest.skip(f"this DeepSpeed has no {name}")
    monkeypatch.setattr(owner, name, scaled_global_norm)
    optimizer = zero(gradients(3))
    assert fuse_gradient_norm_or_get_reason(optimizer) == (
        f"DeepSpeed {deepspeed.__version__} is not supported: {name} differs from all known "
        "releases (0.17.6 to 0.19.8)"
    )
    assert "get_grad_norm_direct" not in vars(optimizer)


def test_functions_of_two_releases_are_not_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known functions in an unknown combination are refused."""
    known = known_sources.known_hash_by_function_name_by_release()
    # One function of a later release.
    mixed = {**known["0.18.0"], "step": known["0.19.8"]["step"]}
    monkeypatch.setattr(known_sources, "installed_hash_by_function_name", lambda *_: mixed)
    assert known_sources.reason_deepspeed_source_is_unknown_or_empty(
        DeepSpeedZeroOptimizer
    ).startswith("step differs from all known releases")
    monkeypatch.setattr(
        known_sources, "installed_hash_by_function_name", lambda *_: known["0.18.0"]
    )
    assert known_sources.reason_deepspeed_source_is_unknown_or_empty(DeepSpeedZeroOptimizer) == ""


def test_a_function_without_source_is_unknown() -> None:
    """A function without source has no fingerprint, so that its release is unknown."""
    # Compiled, and made at run time.
    assert known_sources.function_source_hash_or_empty(len) == ""
    made: Any = types.FunctionType((lambda: 0).__code__.replace(co_filename="<made>"), {})
    assert known_sources.function_source_hash_or_empty(made) == ""


def test_fp16_optimizer_of_an_own_loop() -> None:
    """The public FP16_Optimizer replaces the functions of today's DeepSpeed."""
    from ortmodule import FP16_Optimizer

    optimizer = zero([torch.ones(3)], param_groups=[{"params": [torch.zeros(1)]}])
    assert FP16_Optimizer(optimizer) is optimizer
    assert type(optimizer.get_grad_norm_direct.__self__) is gradient_norm._FusedNormMethods
