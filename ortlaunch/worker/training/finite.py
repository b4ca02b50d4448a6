"""What is said of a training whose numbers are not finite: in which step, of which samples, at which parameter.

All ranks come to the same error: a bad loss or gradient of one of them is in every rank's averaged gradients.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from ortlaunch.errors import FIRST_PARAMETER, NonFiniteError
from ortlaunch.run_folder.records import BadStep
from ortlaunch.worker.data import Batches
from ortlaunch.worker.deepspeed.sum_of_squares import sum_of_squares
from ortlaunch.worker.process_group.distributed import DistributedContext

Named = Iterable[tuple[str, "torch.Tensor | None"]]
_SHOWN = 16  # samples that are named, and micro batches
_STEPS = 1  # of several steps whose losses were not finite: the first tells
_END = "The run ends here; nothing is exported, and no checkpoint of this step is written."  # diagnose/ has the advice


class BadLoss(NamedTuple):
    """A loss that is not finite, and where it came up; `place` is counted by who asks."""

    rank: int
    place: int
    loss: float


def bad_losses(group: DistributedContext, losses: Sequence[torch.Tensor]) -> list[BadLoss]:
    """Of all ranks, by their place in `losses` (collective)."""
    mine = [
        (place, loss) for place, loss in enumerate(map(float, losses)) if not math.isfinite(loss)
    ]
    texts = group.gather(json.dumps(mine))
    return [BadLoss(rank, *found) for rank, text in enumerate(texts) for found in json.loads(text)]


def bad_loss(step: int, found: BadLoss, samples: list[int]) -> str:
    """The line about one loss; `step` from 0."""
    return f"step {step + 1}: the loss is {found.loss} on rank {found.rank}, samples {some(samples)} of data.train"


def bad_step(
    group: DistributedContext,
    batches: Batches,
    step: int,
    losses: list[BadLoss],
    gradients: Named,
    *,
    again: bool = True,
) -> NonFiniteError:
    """The error of a step (from 0), from its gradients (collective); `again`: the passes were made again for them."""
    lines = [
        bad_loss(step, bad, batches.indices(step, bad.place, bad.rank)) for bad in losses[:_SHOWN]
    ]
    samples = batches.indices_of_step(step)
    if not losses:
        lines = [
            f"step {step + 1}: every loss is finite, and a gradient is not; samples {some(samples)} of data.train"
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
    """Look at the mean of all ranks' losses: some are not finite, and their gradients are (collective).

    Args:
        mean: the same on all ranks; None: there are no losses.
        losses: this rank's, a step each from step `first` (from 0) on.

    Raises:
        NonFiniteError: on all ranks the same.
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
            f"so are {len(found) - _STEPS} losses after it, up to step {first + found[-1].place + 1}"
        )
    raise NonFiniteError(
        "\n".join([*lines, "its gradients were finite, so that the weights are, too", _END])
    )


def require_finite_weights(step: int, weights: Named) -> None:
    """Look at trained weights after `step` steps.

    Raises:
        NonFiniteError: one of this rank's is not finite: the step's gradients were, and the update was too large.
    """
    named = [(name, tensor) for name, tensor in weights if tensor is not None]
    if named and not sum_of_squares([tensor for _, tensor in named]).isfinite():
        name = next(_bad(named))[1]
        raise NonFiniteError(
            f"step {step}: the weights of {name} are not finite after this step, whose gradients were\n{_END}"
        )


_NOT_AGAIN = "made again, this step has finite gradients: the model draws random numbers, or keeps what it saw"


def _first(group: DistributedContext, gradients: Named) -> str | None:
    """The first bad parameter in the model's order that a rank sees (collective)."""
    mine = next(_bad(gradients), None)
    found = [tuple(json.loads(text)) for text in group.gather(json.dumps(mine)) if text != "null"]
    return str(min(found)[1]) if found else None


def _bad(tensors: Named) -> Iterator[tuple[int, str]]:
    """(place in the model, name) of what is not finite."""
    for place, (name, tensor) in enumerate(tensors):
        if (
            tensor is not None
            and not (tensor.coalesce().values() if tensor.is_sparse else tensor).isfinite().all()
        ):
            yield place, name.removeprefix("model.")  # that of LossModule


def some(samples: list[int]) -> str:
    """Samples for a person, the first of many."""
    shown = ", ".join(map(str, samples[:_SHOWN]))
    return shown if len(samples) <= _SHOWN else f"{shown} and {len(samples) - _SHOWN} more"
