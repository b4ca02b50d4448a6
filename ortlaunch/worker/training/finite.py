"""Errors for losses, gradients and weights that are not finite: their step, samples and parameter.

All ranks raise the same error: a bad loss or gradient of one rank is in every rank's averaged
gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from ortlaunch.errors import FIRST_PARAMETER, NonFiniteError
from ortlaunch.ortmodule.deepspeed.sum_of_squares import sum_of_squares
from ortlaunch.run_folder.records import BadStep
from ortlaunch.worker.data import Batches
from ortlaunch.worker.process_group.distributed import DistributedContext

Named = Iterable[tuple[str, "torch.Tensor | None"]]
# Samples and micro batches that a message names at most.
_SHOWN = 16
# Bad steps that a message describes: the first one shows the cause.
_STEPS = 1
# diagnose/ prints the advice.
_END = "The run ends here; nothing is exported, and no checkpoint of this step is written."


class BadLoss(NamedTuple):
    """A loss that is not finite: its rank, its value, and its `place` in the caller's list."""

    rank: int
    place: int
    loss: float


def bad_losses(group: DistributedContext, losses: Sequence[torch.Tensor]) -> list[BadLoss]:
    """Return the non-finite losses of all ranks, with their place in `losses` (collective)."""
    mine = [
        (place, loss) for place, loss in enumerate(map(float, losses)) if not math.isfinite(loss)
    ]
    # Python's JSON also reads and writes nan and inf.
    of_ranks = group.gather(mine)
    return [BadLoss(rank, *found) for rank, losses in enumerate(of_ranks) for found in losses]


def bad_loss(step: int, found: BadLoss, samples: list[int]) -> str:
    """Return the line about one loss; `step` counts from 0."""
    return (
        f"step {step + 1}: the loss is {found.loss} on rank {found.rank}, "
        f"samples {some(samples)} of data.train"
    )


def bad_step(
    group: DistributedContext,
    batches: Batches,
    step: int,
    losses: list[BadLoss],
    gradients: Named,
    *,
    again: bool = True,
) -> NonFiniteError:
    """Return the error of a bad step (collective).

    Args:
        group: all ranks.
        batches: the order of the samples.
        step: counted from 0.
        losses: the non-finite losses of its passes.
        gradients: the parameters' gradients, by name.
        again: whether the passes were repeated to get these gradients.
    """
    lines = [
        bad_loss(step, bad, batches.indices(step, bad.place, bad.rank)) for bad in losses[:_SHOWN]
    ]
    samples = batches.indices_of_step(step)
    if not losses:
        lines = [
            f"step {step + 1}: every loss is finite, and a gradient is not; "
            f"samples {some(samples)} of data.train"
        ]
    first = _first(group, gradients)
    without = _NOT_AGAIN if again else "every gradient is finite"
    lines.append(f"{FIRST_PARAMETER}: {first}" if first else without)
    found = BadStep(step + 1, "loss" if losses else "gradient", "\n".join(lines), samples, first)
    return NonFiniteError(f"{found.message}\n{_END}", found)


def require_finite_loss(
    mean: float | None,
    group: DistributedContext,
    batches: Batches,
    first: int,
    losses: Sequence[torch.Tensor],
) -> None:
    """Check the mean of all ranks' losses, for a non-finite one with finite gradients (collective).

    Args:
        mean: the same on all ranks; None if there are no losses.
        group: all ranks.
        batches: the order of the samples.
        first: the step of the first loss, from 0.
        losses: this rank's losses, one for each step from `first` on.

    Raises:
        NonFiniteError: a loss is not finite; all ranks raise the same.
    """
    if mean is None or math.isfinite(mean):
        return
    lines = []
    found = sorted(bad_losses(group, losses), key=lambda bad: bad.place)
    for bad in found[:_STEPS]:
        step = first + bad.place
        passes = range(batches.batch.accumulation_steps)
        lines.append(
            bad_loss(
                step, bad, [index for i in passes for index in batches.indices(step, i, bad.rank)]
            )
        )
    if len(found) > _STEPS:
        lines.append(
            f"{len(found) - _STEPS} later losses are not finite either, up to step "
            f"{first + found[-1].place + 1}"
        )
    raise NonFiniteError(
        "\n".join([*lines, "its gradients were finite, so the weights are finite, too", _END])
    )


def require_finite_weights(step: int, weights: Named) -> None:
    """Check trained weights after `step` steps.

    Raises:
        NonFiniteError: a weight of this rank is not finite: the step's gradients were finite, and
            the update was too large.
    """
    named = [(name, tensor) for name, tensor in weights if tensor is not None]
    # One sum of squares reads all weights fast; the loop over them only searches for the name.
    if named and not sum_of_squares([tensor for _, tensor in named]).isfinite():
        name = next(_bad(named))[1]
        raise NonFiniteError(
            f"step {step}: the weights of {name} are not finite after this step, "
            f"whose gradients were\n{_END}"
        )


def nan_buffers(model: torch.nn.Module) -> Iterator[str]:
    """Yield the name of each buffer of a model that has nan; masks have inf."""
    for name, tensor in model.named_buffers():
        if tensor.is_floating_point() and tensor.isnan().any():
            yield name.removeprefix("model.")


def require_buffers(step: int, model: torch.nn.Module, known: set[str]) -> None:
    """Check the buffers of a model after `step` steps, such as statistics of a normalization.

    Raises:
        NonFiniteError: a buffer has nan and is not known to have it.
    """
    if name := next((name for name in nan_buffers(model) if name not in known), None):
        raise NonFiniteError(f"step {step}: the buffer {name} has nan after this step\n{_END}")


_NOT_AGAIN = (
    "a repetition of this step has finite gradients: the model draws random numbers or keeps state"
)


def _first(group: DistributedContext, gradients: Named) -> str | None:
    """Return the first bad parameter in the model's order on any rank (collective)."""
    # With sharded gradients, each rank has only a part of them.
    mine = next(_bad(gradients), None)
    found = [each for each in group.gather(mine) if each is not None]
    return str(min(found)[1]) if found else None


def _bad(tensors: Named) -> Iterator[tuple[int, str]]:
    """Yield (place in the model, name) of each tensor that is not finite."""
    for place, (name, tensor) in enumerate(tensors):
        # The values of a sparse gradient are a tensor of their own.
        if (
            tensor is not None
            and not (tensor.coalesce().values() if tensor.is_sparse else tensor).isfinite().all()
        ):
            # LossModule adds the prefix.
            yield place, name.removeprefix("model.")


def some(samples: list[int]) -> str:
    """Return samples as text; of many, only the first ones."""
    shown = ", ".join(map(str, samples[:_SHOWN]))
    return shown if len(samples) <= _SHOWN else f"{shown} and {len(samples) - _SHOWN} more"
