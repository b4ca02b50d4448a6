"""Gradients of ranks that compute each layer together, and errors of models that cannot be sliced."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from ortlaunch.base.errors import InputError, first_message_line
from ortlaunch.base.units import first_names_and_count_of_rest
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortmodule.loops import float64_sum_of_squares

# Parts of torch's errors where a forward takes a layer for wider than a rank's slice of it.
_SIZE_ERRORS = ("is invalid for input of size", "cannot be multiplied", "must match the size of")
# Ranks that compute a layer together differ by roundings in the gradients that each has whole.
_GRADIENT_TOLERANCE = 0.01


@contextlib.contextmanager
def explain_errors_of_sliced_layers() -> Iterator[None]:
    """Raise errors that a slice in the place of a layer causes as errors of the recipe."""
    try:
        yield
    except RuntimeError as error:
        message = str(error)
        if not any(text in message for text in (*_SIZE_ERRORS, "mixed torch.Tensor and DTensor")):
            raise
        raise InputError(
            f"parallel.tensor: {first_message_line(error)}; a rank has a slice of a layer, and "
            "the model computes as with the size or the weights of the whole; write -1 for "
            "the number of heads in its forward, and leave out of parallel.tensor_plan a layer "
            "whose weights are used without calling it, as in nn.MultiheadAttention"
        ) from error


def sum_of_squares(tensors: Sequence[torch.Tensor]) -> float:
    """Return the sum of the squares of all elements, in float64."""
    return float(float64_sum_of_squares(tensors)) if tensors else 0.0


def sum_of_gradient_squares_over_ranks(
    gradients: Sequence[torch.Tensor],
    whole_gradients: Sequence[torch.Tensor],
    group: DistributedContext,
) -> float:
    """Return the sum over all ranks, with those of a tensor group counted once (collective).

    Args:
        gradients: this rank's gradients, or its parts of them.
        whole_gradients: those of parameters that each rank of a tensor group has.
        group: all ranks.
    """
    tensor = group.mesh.tensor if group.mesh else 1
    own_squares = sum_of_squares(gradients) - sum_of_squares(whole_gradients) * (1 - 1 / tensor)
    return group.sum_over_ranks(own_squares)


def require_alike_in_tensor_groups(
    gradient_by_name: Mapping[str, torch.Tensor | None], group: DistributedContext
) -> None:
    """Check the gradients of parameters that each rank of a tensor group has whole (collective).

    Args:
        gradient_by_name: this rank's part of each; None: it has none.
        group: all ranks.

    Raises:
        InputError: each has that of its own slices.
    """
    assert group.mesh is not None
    squares_by_rank = group.gather_numbers(
        [0.0 if g is None else sum_of_squares([g]) for g in gradient_by_name.values()]
    )
    # The ranks that have the same slice share these gradients, or each have them.
    norms_by_slice = [
        [math.sqrt(sum(squares)) for squares in zip(*squares_by_rank[index :: group.mesh.tensor])]
        for index in range(group.mesh.tensor)
    ]
    differing = [
        name
        for name, *norms in zip(gradient_by_name, *norms_by_slice)
        if max(norms) - min(norms) > _GRADIENT_TOLERANCE * max(norms)
    ]
    if differing:
        raise InputError(
            f"parallel.tensor: {first_names_and_count_of_rest(differing, 5)} gets another "
            "gradient on each rank that computes its layer, as it is between sliced layers and not "
            "sliced; give in parallel.tensor_plan all layers, and to the layer that has it the "
            "style replicated_with_grad_allreduce, or use parallel.shard alone"
        )
