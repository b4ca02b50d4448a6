"""Comparison of the first pass of a divided model with plain PyTorch.

Rank 0 has the whole model before it is divided: it runs forward and backward of its first micro
batch there, on its CPU. Then all ranks run the same micro batch on their parts, so that the average
of their gradients is that of rank 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ortlaunch.tables.precisions import PRECISIONS
from ortlaunch.worker.engine.comparison import (
    UnrepeatableRandomNumbersError,
    disable_dropout,
    loss_and_scaled_gradients,
    use_whole_logits_without_reentrancy,
)
from ortlaunch.worker.engine.differences import (
    Comparison,
    PassResult,
    loss_gradient_and_state_differences,
)
from ortlaunch.worker.engine.stepping import DeepSpeedStepper, ShardedStepper
from ortlaunch.worker.model.matmul_precision import use_matmul_precision
from ortlaunch.worker.model.precision import narrow_dtype_or_none
from ortlaunch.worker.process_group.distributed import (
    DistributedContext,
    overwrite_by_values_of_rank_0,
)
from ortlaunch.worker.tensor_batch import TensorBatch


@dataclass
class ReferencePass:
    """The first micro batch of rank 0, and its pass in plain PyTorch."""

    batch: TensorBatch
    result: PassResult | None
    """None on the other ranks, without a pass, and after the comparison."""
    error: str = ""
    """Why rank 0 has none that can be compared, on all ranks."""
    is_compared: bool = False
    """Whether the comparison was made: a rollback may lead to the first step again."""


def run_reference_pass_on_rank_0(
    model: nn.Module,
    batch: TensorBatch,
    precision: str,
    group: DistributedContext,
    uses_autocast: bool = True,
) -> ReferencePass:
    """Run a pass of the whole model on rank 0, and share its batch (collective).

    Args:
        model: the model that returns its loss; on rank 0 with its weights, on the CPU.
        batch: this rank's micro batch, on the CPU; that of rank 0 counts.
        precision: the recipe's `precision`.
        group: all ranks.
        uses_autocast: whether operators choose the type in a 16-bit precision; else weights have it.
    """
    shared_batch = _batch_of_rank_0(batch, group)
    result, error = None, ""
    if group.rank == 0:
        # Such as a kernel that a CPU lacks. The divided model may train all the same.
        try:
            result = _result_of_whole_model(model, shared_batch, precision, uses_autocast)
        except Exception as raised:
            error = str(raised) or type(raised).__name__
    return ReferencePass(shared_batch, result, group.gather(error)[0])


def _result_of_whole_model(
    model: nn.Module, batch: TensorBatch, precision: str, uses_autocast: bool
) -> PassResult:
    """Run the pass on the CPU.

    Raises:
        UnrepeatableRandomNumbersError: the model draws random numbers, and slices draw others.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    dtype = narrow_dtype_or_none(precision) if uses_autocast else None
    with (
        _comparable_passes_until_end(model),
        use_whole_logits_without_reentrancy(model),
        torch.autocast("cpu", dtype, enabled=dtype is not None),
    ):
        random_state = torch.get_rng_state()
        loss, gradients = loss_and_scaled_gradients(
            model.forward, batch, trained, PRECISIONS[precision].scale
        )
        if not torch.equal(random_state, torch.get_rng_state()):
            raise UnrepeatableRandomNumbersError
    return PassResult(loss, gradients, {})


def compare_pass_of_divided_model_on_rank_0(
    stepper: ShardedStepper | DeepSpeedStepper,
    reference: ReferencePass,
    device_batch: TensorBatch,
    precision: str,
) -> Comparison | None:
    """Run the pass on all parts and compare it (collective); None on all ranks but rank 0.

    Weights, buffers and random numbers are as before afterwards.
    """
    scale = PRECISIONS[precision].scale * stepper.gradient_factor
    with _comparable_passes_until_end(stepper.model):
        loss = stepper.run_micro_batch(device_batch, is_last_of_step=True)
        gradients: dict[str, torch.Tensor | None] = {}
        # One whole gradient after another.
        for name, gradient in stepper.whole_gradients():
            if reference.result is not None:
                gradients[name] = None if gradient is None else gradient.cpu() * scale
        stepper.drop_gradients()
        stepper.returned_values.begin_step()
    # Else rank 0 would hold the gradients of the whole model for the whole run.
    reference_result, reference.result = reference.result, None
    reference.is_compared = True
    if reference_result is None:
        return None
    return loss_gradient_and_state_differences(
        PassResult(float(loss), gradients, {}), reference_result, PRECISIONS[precision]
    )


@contextlib.contextmanager
def _comparable_passes_until_end(model: nn.Module) -> Iterator[None]:
    """Switch dropout off, compute exactly, and restore buffers and random numbers at the end."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = {buffer.device for buffer, _ in buffers if buffer.device.type == "cuda"}
    with (
        torch.random.fork_rng([*devices]),
        disable_dropout(model),
        use_matmul_precision("highest"),
    ):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


def _batch_of_rank_0(batch: TensorBatch, group: DistributedContext) -> TensorBatch:
    forms = group.gather({name: [list(v.shape), str(v.dtype)] for name, v in batch.items()})[0]
    shared = {}
    for name, (shape, dtype_text) in forms.items():
        dtype = getattr(torch, dtype_text.removeprefix("torch."))
        value = batch[name] if group.rank == 0 else torch.empty(shape, dtype=dtype)
        flat = value.to(group.device).contiguous().view(-1)
        overwrite_by_values_of_rank_0(flat)
        shared[name] = flat.cpu().view(shape)
    return shared
