"""Errors for losses, gradients and weights that are not finite: their step, samples and parameter.

All ranks raise the same error: a bad loss or gradient of one rank is in every rank's averaged
gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from ortlaunch.base.errors import FIRST_PARAMETER, NonFiniteError
from ortlaunch.base.units import first_names_and_count_of_rest
from ortlaunch.run_folder.records import BadStep
from ortlaunch.worker.data import Batches
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortmodule.loops import float64_sum_of_squares

NameTensorPairs = Iterable[tuple[str, "torch.Tensor | None"]]
# Samples and micro batches that a message names at most.
MAX_SHOWN = 16
# Bad steps that a message describes: the first one shows the cause.
_MAX_DESCRIBED_STEPS = 1
# diagnose/ prints the advice.
_END_MESSAGE = "The run ends here; nothing is exported, and no checkpoint of this step is written."
_LOSS_END = (
    "The run ends here; nothing is exported, and no checkpoint of this step or a later one is "
    "written."
)


class NonFiniteLoss(NamedTuple):
    """A loss that is not finite: its data-parallel rank, its value, its index in the caller's list."""

    rank: int
    loss_index: int
    loss: float
    process_rank: int
    """The first rank that computed it; those of its tensor group follow."""


def gather_non_finite_losses(
    group: DistributedContext, rank_losses: Sequence[torch.Tensor]
) -> list[NonFiniteLoss]:
    """Return the non-finite losses of all ranks, with their place in `rank_losses` (collective)."""
    indexed_losses = [
        (loss_index, loss)
        for loss_index, loss in enumerate(map(float, rank_losses))
        if not math.isfinite(loss)
    ]
    # Python's JSON also reads and writes nan and inf.
    losses_by_rank = group.data_parallel.gather(indexed_losses)
    tensor = group.mesh.tensor if group.mesh else 1
    return [
        NonFiniteLoss(rank, loss_index, loss, rank * tensor)
        for rank, rank_losses in enumerate(losses_by_rank)
        for loss_index, loss in rank_losses
    ]


def non_finite_loss_line(
    step_index: int, non_finite_loss: NonFiniteLoss, sample_indices: list[int]
) -> str:
    """Return the line about one loss; `step_index` counts from 0."""
    return (
        f"step {step_index + 1}: the loss is {non_finite_loss.loss} on rank {non_finite_loss.process_rank}, "
        f"samples {first_names_and_count_of_rest(sample_indices, MAX_SHOWN)} of data.train"
    )


def build_non_finite_step_error(
    group: DistributedContext,
    batches: Batches,
    step_index: int,
    non_finite_losses: list[NonFiniteLoss],
    named_gradients: NameTensorPairs,
    *,
    passes_were_repeated: bool = True,
) -> NonFiniteError:
    """Return the error of a bad step (collective).

    Args:
        group: all ranks.
        batches: the order of the samples.
        step_index: counted from 0.
        non_finite_losses: the non-finite losses of its passes.
        named_gradients: the parameters' gradients, by name.
        passes_were_repeated: whether the passes were repeated to get these gradients.
    """
    lines = [
        non_finite_loss_line(
            step_index,
            bad,
            batches.sample_indices_of_micro_batch(step_index, bad.loss_index, bad.rank),
        )
        for bad in non_finite_losses[:MAX_SHOWN]
    ]
    sample_indices = batches.sample_indices_of_step(step_index)
    if not non_finite_losses:
        lines = [
            f"step {step_index + 1}: every loss is finite, and a gradient is not; "
            f"samples {first_names_and_count_of_rest(sample_indices, MAX_SHOWN)} of data.train"
        ]
    bad_parameter = _first_non_finite_gradient_name(group, named_gradients)
    no_parameter_text = _NOT_REPRODUCED if passes_were_repeated else "every gradient is finite"
    lines.append(f"{FIRST_PARAMETER}: {bad_parameter}" if bad_parameter else no_parameter_text)
    bad_step_record = BadStep(
        step_index + 1,
        "loss" if non_finite_losses else "gradient",
        "\n".join(lines),
        sample_indices,
        bad_parameter,
    )
    return NonFiniteError(f"{bad_step_record.message}\n{_END_MESSAGE}", bad_step_record)


def require_finite_mean_loss(
    mean_loss: float | None,
    group: DistributedContext,
    batches: Batches,
    first_step_index: int,
    loss_by_step: Sequence[torch.Tensor],
) -> None:
    """Check the mean of all ranks' losses, for a non-finite one with finite gradients (collective).

    Args:
        mean_loss: the same on all ranks; None if there are no losses.
        group: all ranks.
        batches: the order of the samples.
        first_step_index: the step of the first loss, from 0.
        loss_by_step: this rank's losses, one for each step from `first_step_index` on.

    Raises:
        NonFiniteError: a loss is not finite; all ranks raise the same.
    """
    if mean_loss is None or math.isfinite(mean_loss):
        return
    lines = []
    sorted_bad_losses = sorted(
        gather_non_finite_losses(group, loss_by_step), key=lambda bad: bad.loss_index
    )
    for bad in sorted_bad_losses[:_MAX_DESCRIBED_STEPS]:
        step_index = first_step_index + bad.loss_index
        passes = range(batches.batch.accumulation_steps)
        lines.append(
            non_finite_loss_line(
                step_index,
                bad,
                [
                    index
                    for pass_index in passes
                    for index in batches.sample_indices_of_micro_batch(
                        step_index, pass_index, bad.rank
                    )
                ],
            )
        )
    if len(sorted_bad_losses) > _MAX_DESCRIBED_STEPS:
        lines.append(
            f"{len(sorted_bad_losses) - _MAX_DESCRIBED_STEPS} later losses are not finite either, up to step "
            f"{first_step_index + sorted_bad_losses[-1].loss_index + 1}"
        )
    raise NonFiniteError(
        "\n".join([*lines, "its gradients were finite, so the weights are finite, too", _LOSS_END])
    )


def require_finite_weights(completed_steps: int, named_weights: NameTensorPairs) -> None:
    """Check trained weights after `completed_steps` steps.

    Raises:
        NonFiniteError: a weight of this rank is not finite: the step's gradients were finite, and
            the update was too large.
    """
    named = [(name, tensor) for name, tensor in named_weights if tensor is not None]
    # One sum of squares reads all weights fast; the loop over them only searches for the name.
    if named and not float64_sum_of_squares([tensor for _, tensor in named]).isfinite():
        name = next(_index_and_name_of_non_finite(named))[1]
        raise NonFiniteError(
            f"step {completed_steps}: the weights of {name} are not finite after this step, "
            f"whose gradients were\n{_END_MESSAGE}"
        )


def nan_buffer_names(model: torch.nn.Module) -> Iterator[str]:
    """Yield the name of each buffer of a model that has nan; masks have inf."""
    for name, tensor in model.named_buffers():
        if tensor.is_floating_point() and tensor.isnan().any():
            yield name.removeprefix("model.")


def require_buffers_without_nan(
    completed_steps: int, model: torch.nn.Module, known_nan_buffers: set[str]
) -> None:
    """Check the buffers of a model after `completed_steps` steps, such as statistics of a normalization.

    Raises:
        NonFiniteError: a buffer has nan and is not known to have it.
    """
    if name := next(
        (name for name in nan_buffer_names(model) if name not in known_nan_buffers), None
    ):
        raise NonFiniteError(
            f"step {completed_steps}: the buffer {name} has nan after this step\n{_END_MESSAGE}"
        )


_NOT_REPRODUCED = (
    "a repetition of this step has finite gradients: the model draws random numbers or keeps state"
)


def _first_non_finite_gradient_name(
    group: DistributedContext, named_gradients: NameTensorPairs
) -> str | None:
    """Return the first bad parameter in the model's order on any rank (collective)."""
    # With sharded gradients, each rank has only a part of them.
    rank_bad_tensor = next(_index_and_name_of_non_finite(named_gradients), None)
    bad_of_ranks = [
        ranked_tensor
        for ranked_tensor in group.gather(rank_bad_tensor)
        if ranked_tensor is not None
    ]
    return str(min(bad_of_ranks)[1]) if bad_of_ranks else None


def _index_and_name_of_non_finite(named_tensors: NameTensorPairs) -> Iterator[tuple[int, str]]:
    """Yield (place in the model, name) of each tensor that is not finite."""
    for tensor_index, (name, tensor) in enumerate(named_tensors):
        # The values of a sparse gradient are a tensor of their own.
        if (
            tensor is not None
            and not (tensor.coalesce().values() if tensor.is_sparse else tensor).isfinite().all()
        ):
            # LossModule adds the prefix.
            yield tensor_index, name.removeprefix("model.")
