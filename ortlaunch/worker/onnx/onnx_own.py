"""What of a user's own model becomes a graph: from the batch, without what its loss alone takes, to what it returns."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ortlaunch.errors import InputError
from ortlaunch.recipe import Recipe
from ortlaunch.worker.data import LoadedData, stack_of
from ortlaunch.worker.model.model import loss_of
from ortlaunch.worker.model.own_numbers import LOSS, named

Batch = dict[str, torch.Tensor]
_SAMPLES = ((0, 1, 2), (3, 4), (5,))  # of the batches


class Outputs(nn.Module):
    """`forward(*inputs)` -> those outputs of a model that have a row a sample, a tuple."""

    def __init__(self, model: nn.Module, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.inputs = tuple(inputs)
        self.outputs = outputs

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.named(*tensors).values())

    def named(self, *tensors: torch.Tensor) -> Batch:
        """The same, each under its name."""
        found = _tensors(self.model(**dict(zip(self.inputs, tensors))))
        return {name: found[name] for name in self.outputs}


@torch.no_grad()
def own_outputs(recipe: Recipe, model: nn.Module, data: LoadedData) -> tuple[Outputs, list[Batch]]:
    """The model as a graph will have it, and batches of the run's own data: of three samples, two and one.

    Raises:
        InputError: it returns nothing beside its loss.
    """
    samples = data.evaluation or data.train
    model = model.eval()
    stack = stack_of(recipe)
    whole = [
        stack([samples.sample(index % len(samples), epoch=0) for index in indices])
        for indices in _SAMPLES
    ]
    inputs = _inputs(model, whole[0])
    batches = [{name: batch[name] for name in inputs} for batch in whole]
    found = [_tensors(model(**batch)) for batch in batches]
    sizes = [len(indices) for indices in _SAMPLES]
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
    """What forward takes of a batch, in its order, but for that without which it returns the same, and no loss."""
    taken = inspect.signature(model.forward).parameters
    wild = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
    given = [name for name in taken if name in batch] + [
        name for name in batch if wild and name not in taken
    ]
    expected = [*_tensors(model(**{name: batch[name] for name in given})).values()]

    def without(*left_out: str) -> list[str]:
        """The rest, if it is enough."""
        rest = [name for name in given if name not in left_out]
        try:
            output = model(**{name: batch[name] for name in rest})
        except Exception:  # whatever the user's own forward raises: it needs them
            return given
        found = [*_tensors(output).values()]
        same = len(found) == len(expected) and all(map(torch.equal, found, expected))
        return rest if same and not _has_loss(output) else given

    return without(*(name for name in given if without(name) is not given))


def _has_loss(output: Any) -> bool:
    try:
        loss_of(output)
    except InputError:
        return False
    return True


def _tensors(output: Any) -> Batch:
    """All but the loss, and numbers."""
    pairs = {"output": output} if isinstance(output, torch.Tensor) else named(output)
    return {
        name: value
        for name, value in pairs.items()
        if name != LOSS and isinstance(value, torch.Tensor) and value.dim()
    }
