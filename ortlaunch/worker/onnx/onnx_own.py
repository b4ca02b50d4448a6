"""The inputs and outputs of the graph of a user's own model.

Inputs are the tensors of a batch that the outputs need; those for the loss alone are left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ortlaunch.errors import InputError
from ortlaunch.recipe import Recipe
from ortlaunch.worker.data import LoadedData, stack_of
from ortlaunch.worker.data.mixture import at_hand
from ortlaunch.worker.model.model import loss_of
from ortlaunch.worker.model.own_numbers import LOSS, outputs_by_name

Batch = dict[str, torch.Tensor]
# The samples of each batch; different batch sizes show which outputs have a row for each sample.
_SAMPLES = ((0, 1, 2), (3, 4), (5,))


class Exported(nn.Module):
    """A model as a graph: `forward(*inputs)` -> a tuple of the outputs that a subclass names."""

    def __init__(self, model: nn.Module, inputs: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.inputs = tuple(inputs)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.outputs_by_name(*tensors).values())

    def outputs_by_name(self, *tensors: torch.Tensor) -> Batch:
        """Return the same outputs by name."""
        raise NotImplementedError


class Outputs(Exported):
    """A model without its loss: the outputs with a row for each sample."""

    def __init__(self, model: nn.Module, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__(model, inputs)
        self.outputs = outputs

    def outputs_by_name(self, *tensors: torch.Tensor) -> Batch:
        """Return the same outputs by name."""
        found = _tensors(self.model(**dict(zip(self.inputs, tensors))))
        return {name: found[name] for name in self.outputs}


def own_batches(recipe: Recipe, data: LoadedData) -> list[Batch]:
    """Return batches of three samples, two and one of the run's own data."""
    samples = data.evaluation or data.train
    hand = at_hand(samples)
    stack = stack_of(recipe)
    return [
        stack([samples.sample(hand[index % len(hand)], epoch=0) for index in indices])
        for indices in _SAMPLES
    ]


@torch.no_grad()
def own_outputs(recipe: Recipe, model: nn.Module, data: LoadedData) -> tuple[Outputs, list[Batch]]:
    """Return the part of a model that the graph will have, and batches of the run's own data.

    The batches have three samples, two and one.

    Raises:
        InputError: the model has no output besides its loss, or one with the name of an input.
    """
    model = model.eval()
    whole = own_batches(recipe, data)
    inputs = _inputs(model, whole[0])
    batches = [{name: batch[name] for name in inputs} for batch in whole]
    found = [_tensors(model(**batch)) for batch in batches]
    sizes = [len(indices) for indices in _SAMPLES]
    # Outputs with as many rows as samples, in each batch.
    outputs = [name for name in found[0] if [len(each.get(name, ())) for each in found] == sizes]
    for name in outputs:
        if name in inputs:
            raise InputError(
                f"--format onnx: {type(model).__name__}.forward returns {name!r}, "
                "which is an input's name, too; give "
                "the output another one"
            )
    if not outputs:
        raise InputError(
            f"--format onnx: {type(model).__name__}.forward returns nothing beside its loss that "
            "has a row a sample; "
            'let it return {"loss": LOSS, "NAME": TENSOR}, '
            "and each TENSOR is an output of the graph"
        )
    return Outputs(model, inputs, outputs).eval(), batches


def _inputs(model: nn.Module, batch: Batch) -> list[str]:
    """Return the names of the tensors that forward needs, in the order of its parameters.

    A tensor is left out if forward returns the same outputs and no loss without it.
    """
    taken = inspect.signature(model.forward).parameters
    wild = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
    given = [name for name in taken if name in batch] + [
        name for name in batch if wild and name not in taken
    ]
    expected = [*_tensors(model(**{name: batch[name] for name in given})).values()]

    def without(*left_out: str) -> list[str]:
        """Return the remaining names if they are sufficient, else all names (the same list)."""
        rest = [name for name in given if name not in left_out]
        try:
            output = model(**{name: batch[name] for name in rest})
        # The user's own forward may raise anything: it needs these tensors.
        except Exception:
            return given
        found = [*_tensors(output).values()]
        same = len(found) == len(expected) and all(map(torch.equal, found, expected))
        return rest if same and not _has_loss(output) else given

    # Tensors that can be left out one by one may still be needed together: `without` checks them.
    return without(*(name for name in given if without(name) is not given))


def _has_loss(output: Any) -> bool:
    try:
        loss_of(output)
    except InputError:
        return False
    return True


def _tensors(output: Any) -> Batch:
    """Return the named output tensors, without the loss and without scalars."""
    pairs = {"output": output} if isinstance(output, torch.Tensor) else outputs_by_name(output)
    return {
        name: value
        for name, value in pairs.items()
        if name != LOSS and isinstance(value, torch.Tensor) and value.dim()
    }
