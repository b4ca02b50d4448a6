"""The inputs and outputs of the graph of a user's own model.

Inputs are the tensors of a batch that the outputs need; those for the loss alone are left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ortlaunch.base.errors import InputError
from ortlaunch.recipe import Recipe
from ortlaunch.worker.data import LoadedData, collate_function_of_recipe
from ortlaunch.worker.data.mixture import indices_of_all_or_first_streamed_samples
from ortlaunch.worker.model.model import require_scalar_loss
from ortlaunch.worker.model.returned_values import LOSS, outputs_by_name_or_index
from ortlaunch.worker.tensor_batch import TensorBatch

# The samples of each batch; different batch sizes show which outputs have a row for each sample.
_SAMPLES = ((0, 1, 2), (3, 4), (5,))


class ExportedModule(nn.Module):
    """A model as a graph: `forward(*inputs)` -> a tuple of the outputs that a subclass names."""

    def __init__(self, model: nn.Module, inputs: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.inputs = tuple(inputs)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.loss_and_other_tensor_outputs_by_name(*tensors).values())

    def loss_and_other_tensor_outputs_by_name(self, *tensors: torch.Tensor) -> TensorBatch:
        """Return the same outputs by name."""
        raise NotImplementedError


class OutputsModel(ExportedModule):
    """A model without its loss: the outputs with a row for each sample."""

    def __init__(self, model: nn.Module, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__(model, inputs)
        self.outputs = outputs

    def loss_and_other_tensor_outputs_by_name(self, *tensors: torch.Tensor) -> TensorBatch:
        """Return the same outputs by name."""
        named_outputs = _output_tensors_besides_loss(self.model(**dict(zip(self.inputs, tensors))))
        return {name: named_outputs[name] for name in self.outputs}


def own_data_batches_of_three_two_and_one_samples(
    recipe: Recipe, data: LoadedData
) -> list[TensorBatch]:
    """Return batches of three samples, two and one of the run's own data."""
    samples = data.evaluation or data.train
    indices_at_hand = indices_of_all_or_first_streamed_samples(samples)
    stack = collate_function_of_recipe(recipe)
    return [
        stack(
            [
                samples.sample(indices_at_hand[index % len(indices_at_hand)], epoch=0)
                for index in indices
            ]
        )
        for indices in _SAMPLES
    ]


@torch.no_grad()
def model_with_row_outputs_and_batches(
    recipe: Recipe, model: nn.Module, data: LoadedData
) -> tuple[OutputsModel, list[TensorBatch]]:
    """Return the part of a model that the graph will have, and batches of the run's own data.

    The batches have three samples, two and one.

    Raises:
        InputError: the model has no output besides its loss, or one with the name of an input.
    """
    model = model.eval()
    full_batches = own_data_batches_of_three_two_and_one_samples(recipe, data)
    inputs = _names_of_inputs_that_outputs_need(model, full_batches[0])
    batches = [{name: batch[name] for name in inputs} for batch in full_batches]
    outputs_by_batch = [_output_tensors_besides_loss(model(**batch)) for batch in batches]
    sizes = [len(indices) for indices in _SAMPLES]
    # Outputs with as many rows as samples, in each batch.
    outputs = [
        name
        for name in outputs_by_batch[0]
        if [len(batch_outputs.get(name, ())) for batch_outputs in outputs_by_batch] == sizes
    ]
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
    return OutputsModel(model, inputs, outputs).eval(), batches


def _names_of_inputs_that_outputs_need(model: nn.Module, batch: TensorBatch) -> list[str]:
    """Return the names of the tensors that forward needs, in the order of its parameters.

    A tensor is left out if forward returns the same outputs and no loss without it.
    """
    forward_parameters = inspect.signature(model.forward).parameters
    takes_any_name = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in forward_parameters.values()
    )
    candidate_names = [name for name in forward_parameters if name in batch] + [
        name for name in batch if takes_any_name and name not in forward_parameters
    ]
    expected = [
        *_output_tensors_besides_loss(
            model(**{name: batch[name] for name in candidate_names})
        ).values()
    ]

    def names_if_sufficient(*left_out: str) -> list[str]:
        """Return the remaining names if they are sufficient, else all names (the same list)."""
        remaining = [name for name in candidate_names if name not in left_out]
        try:
            output = model(**{name: batch[name] for name in remaining})
        # The user's own forward may raise anything: it needs these tensors.
        except Exception:
            return candidate_names
        tensors = [*_output_tensors_besides_loss(output).values()]
        is_same = len(tensors) == len(expected) and all(map(torch.equal, tensors, expected))
        return remaining if is_same and not _has_loss(output) else candidate_names

    # Tensors that can be left out one by one may still be needed together: `without` checks them.
    return names_if_sufficient(
        *(name for name in candidate_names if names_if_sufficient(name) is not candidate_names)
    )


def _has_loss(output: Any) -> bool:
    try:
        require_scalar_loss(output)
    except InputError:
        return False
    return True


def _output_tensors_besides_loss(model_output: Any) -> TensorBatch:
    """Return the named output tensors, without the loss and without scalars."""
    pairs = (
        {"output": model_output}
        if isinstance(model_output, torch.Tensor)
        else outputs_by_name_or_index(model_output)
    )
    return {
        name: value
        for name, value in pairs.items()
        if name != LOSS and isinstance(value, torch.Tensor) and value.dim()
    }
