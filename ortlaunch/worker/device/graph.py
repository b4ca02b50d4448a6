"""A model with its loss as one trainable ONNX graph, for batches and texts of any size.

torch's TorchScript exporter writes it in training mode, so that dropout stays and no constants are
folded into the weights.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import nn

from ortlaunch.base.errors import EngineError, InputError, first_message_line
from ortlaunch.recipe import Recipe
from ortlaunch.worker.data import LoadedData, collate_function_of_recipe
from ortlaunch.worker.data.mixture import indices_of_all_or_first_streamed_samples
from ortlaunch.worker.model.chunked_head import LABELS
from ortlaunch.worker.model.model import LossModule, require_scalar_loss
from ortlaunch.worker.onnx.onnx_export import three_text_batches_of_own_data
from ortlaunch.worker.onnx.user_model import ExportedModule
from ortlaunch.worker.tensor_batch import TensorBatch
from ortmodule import export_onnx

# From 17 on, a LayerNorm is one operator, exported without outputs that ONNX Runtime's gradient
# needs.
OPSET = 15
Axes = dict[str, dict[int, str]]


class ModelWithLoss(ExportedModule):
    """A model with its loss: the loss and all named outputs."""

    def loss_and_other_tensor_outputs_by_name(self, *tensors: torch.Tensor) -> TensorBatch:
        """Return the same tensors by name."""
        output = self.model(**dict(zip(self.inputs, tensors)))
        pairs = output.items() if isinstance(output, Mapping) else ()
        others = {
            name: value for name, value in pairs if isinstance(value, torch.Tensor) and value.dim()
        }
        return {"loss": require_scalar_loss(output), **others}


class ForwardGraph(NamedTuple):
    """An exported graph, and its parameters by use."""

    path: Path
    inputs: Axes
    """Each input with its axes of variable size."""
    outputs: Axes
    """Each output with its axes of variable size."""
    trained: list[str]
    """Parameters that training changes, by their names in the graph."""
    frozen: list[str]
    """All other parameters of the graph."""
    unused: list[str]
    """Parameters that require gradients but that the loss does not use."""
    shapes: dict[str, list[int]]
    """Shapes of the graph's initializers (weights and constants)."""


def labelled_batches_in_forward_order(
    recipe: Recipe, loss_module: LossModule, data: LoadedData
) -> list[TensorBatch]:
    """Return batches of the run's own data, in the order of the parameters of the model's forward.

    The first two batches differ in the number of samples and, for texts, in length.
    """
    samples = data.evaluation or data.train
    indices_at_hand = indices_of_all_or_first_streamed_samples(samples)
    chosen_samples = [
        samples.sample(indices_at_hand[index % len(indices_at_hand)], epoch=0) for index in range(3)
    ]
    labelled_batch = collate_function_of_recipe(recipe)(chosen_samples)
    model: Any = loss_module.model
    # The forward of a peft model has no named parameters.
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    forward_parameters = inspect.signature(model.forward).parameters
    if recipe.model.traits.is_own or "input_ids" not in labelled_batch:
        # A forward with **kwargs accepts everything in the batch.
        takes_any_name = any(
            parameter.kind is inspect.Parameter.VAR_KEYWORD
            for parameter in forward_parameters.values()
        )
        whole_batch = {
            name: value
            for name, value in labelled_batch.items()
            if takes_any_name or name in forward_parameters
        }
        smaller = {name: value[:2] for name, value in whole_batch.items()}
        if not recipe.model.traits.is_own and labelled_batch["labels"].dim() > 1:
            # Transcripts are padded to the longest of their batch.
            smaller["labels"] = smaller["labels"][:, : labelled_batch["labels"].size(1) // 2 + 1]
        return [whole_batch, smaller]
    graph_batches = []
    for batch in three_text_batches_of_own_data(model, data):
        rows, length = batch["input_ids"].shape
        labels = {
            name: _cut_labels_keeping_one_counted(
                labelled_batch[name], rows, length, labelled_batch["input_ids"].size(1)
            )
            for name in LABELS
            if name in labelled_batch
        }
        labelled = {**batch, **labels}
        graph_batches.append(
            {name: labelled[name] for name in forward_parameters if name in labelled}
        )
    return graph_batches


def _cut_labels_keeping_one_counted(
    labels: torch.Tensor, rows: int, length: int, full_length: int
) -> torch.Tensor:
    """Return the labels of a smaller batch; at least one label of each text counts."""
    is_by_token = labels.dim() > 1 and not labels.is_floating_point()
    labels = (
        labels[:rows, :length].clone()
        if is_by_token and labels.size(1) == full_length
        else labels[:rows].clone()
    )
    if is_by_token:
        # The mean loss over no label would be nan. Position 1, as nothing predicts position 0 of a
        # causal model.
        labels[:, 1] = 0
    return labels


def export_loss_graph_and_sort_weights(
    loss_module: LossModule, batches: list[TensorBatch], graph_path: Path
) -> ForwardGraph:
    """Write the graph of a model in float32 on the CPU.

    Raises:
        InputError: the model keeps statistics of batches, or has nothing to train.
        EngineError: the exporter cannot write the model, or writes a shared weight twice.
    """
    module = ModelWithLoss(loss_module.model, tuple(batches[0])).train()
    _refuse_running_statistics_in_on_device_export(module)
    inputs = _variable_axis_names_by_tensor(batches)
    outputs = _variable_axis_names_by_tensor(
        [module.loss_and_other_tensor_outputs_by_name(*batch.values()) for batch in batches]
    )
    with warnings.catch_warnings(), torch.random.fork_rng():
        # Warnings about values that tracing fixes; the comparison with PyTorch shows whether they
        # matter.
        warnings.simplefilter("ignore")
        try:
            export_onnx(
                module, [*batches[0].values()], str(graph_path), input_names=[*inputs], output_names=[*outputs],
                dynamic_axes={**inputs, **outputs}, opset_version=OPSET, do_constant_folding=False,
                training=torch.onnx.TrainingMode.TRAINING,
            )  # fmt: skip
        # The exporter raises many classes of errors; each of them is reported.
        except Exception as error:
            raise EngineError(
                f"--format ondevice: the model does not export: {first_message_line(error)}"
            ) from error
    _write_intermediate_shapes_into_graph(graph_path, batches)
    return _sort_weights_into_trained_frozen_and_unused(
        module, ForwardGraph(graph_path, inputs, outputs, [], [], [], {})
    )


def _write_intermediate_shapes_into_graph(graph_path: Path, batches: list[TensorBatch]) -> None:
    import onnx

    # ONNX Runtime's gradient treats unknown sizes as equal. A broadcast dimension of size 1, such
    # as the batch of BERT's positions, was not summed over, and the gradient was silently wrong.
    model = onnx.load(str(graph_path))
    value_names = [name for node in model.graph.node for name in node.output if name]
    long, short = (_run_graph_for_all_values(model, value_names, batch) for batch in batches[:2])
    output_names = {graph_output.name for graph_output in model.graph.output}
    name_by_sizes = _axis_name_by_sizes(batches)
    for name in value_names:
        long_value = long[name]
        short_value = short[name]
        if name not in output_names and long_value.ndim == short_value.ndim:
            pairs = zip(long_value.shape, short_value.shape)
            # A size that is the same in both batches is fixed, another one gets a name.
            sizes = [a if a == b else name_by_sizes.get((a, b), f"size_{a}_{b}") for a, b in pairs]
            element_type = onnx.helper.np_dtype_to_tensor_dtype(long_value.dtype)
            model.graph.value_info.append(
                onnx.helper.make_tensor_value_info(name, element_type, sizes)
            )
    onnx.save(model, str(graph_path))


def _axis_name_by_sizes(batches: list[TensorBatch]) -> dict[tuple[int, int], str]:
    """Return the names of variable sizes: (size in batch 0, size in batch 1) -> name."""
    pairs = dict[tuple[int, int], str]()
    axes = _variable_axis_names_by_tensor(batches)
    for name, value in batches[0].items():
        pairs.update(
            {
                (value.size(axis), batches[1][name].size(axis)): word
                for axis, word in axes[name].items()
            }
        )
    return pairs


def _run_graph_for_all_values(
    model: Any, value_names: list[str], batch: TensorBatch
) -> dict[str, NDArray[Any]]:
    import onnx
    import onnxruntime

    full_graph = onnx.ModelProto()
    full_graph.CopyFrom(model)
    output_names = {graph_output.name for graph_output in model.graph.output}
    full_graph.graph.output.extend(
        onnx.ValueInfoProto(name=name) for name in value_names if name not in output_names
    )
    options = onnxruntime.SessionOptions()
    # An optimized graph would not have all values.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = onnxruntime.InferenceSession(
            full_graph.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    # onnxruntime has a class of its own for each type of error.
    except Exception as error:
        raise EngineError(
            f"--format ondevice: ONNX Runtime cannot run this model: {first_message_line(error)}"
        ) from error
    return dict(
        zip(
            value_names,
            session.run(value_names, {name: value.numpy() for name, value in batch.items()}),
        )
    )


def _refuse_running_statistics_in_on_device_export(module: nn.Module) -> None:
    tracking_names = [
        name for name, part in module.named_modules() if getattr(part, "track_running_stats", False)
    ]
    if tracking_names:
        raise InputError(
            f"--format ondevice: {tracking_names[0]} tracks batch statistics, which a device does not update"
        )


def _variable_axis_names_by_tensor(batches: list[TensorBatch]) -> Axes:
    """Return the variable axes: axis 0 is "batch"; others that differ in two batches, "length"."""
    (long, short), axes_by_name = batches[:2], Axes()
    for name, value in long.items():
        variable_axes = [
            axis for axis in range(1, value.dim()) if value.size(axis) != short[name].size(axis)
        ]
        axes_by_name[name] = (
            {0: "batch", **dict.fromkeys(variable_axes, "length")} if value.dim() else {}
        )
    return axes_by_name


def _sort_weights_into_trained_frozen_and_unused(
    module: ModelWithLoss, forward: ForwardGraph
) -> ForwardGraph:
    """Sort the graph's weights: trained ones require gradients and are used by the loss."""
    import onnx

    graph = onnx.load(str(forward.path)).graph
    used_values = _names_of_values_loss_depends_on(graph)
    initializer_shapes = {
        initializer.name: list(initializer.dims) for initializer in graph.initializer
    }
    forward.shapes.update(initializer_shapes)
    # A shared parameter has several names in the model, and one of them in the graph.
    aliases: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    for parameter in module.parameters():
        names = [name for name in aliases[id(parameter)] if name in initializer_shapes]
        if len(names) > 1:
            raise EngineError(
                f"--format ondevice: the exporter wrote one weight as {' and '.join(names)}"
            )
        if parameter.requires_grad and used_values.isdisjoint(names):
            forward.unused.append(aliases[id(parameter)][0])
        (
            forward.trained
            if parameter.requires_grad and used_values & {*names}
            else forward.frozen
        ).extend(names)
    if not forward.trained:
        raise InputError(
            "--format ondevice: the model has nothing to train; its loss uses no trained parameter"
        )
    return forward


def _names_of_values_loss_depends_on(graph: Any) -> set[str]:
    node_by_output = {name: node for node in graph.node for name in node.output}
    used_values = set[str]()
    # The first output is the loss.
    pending_values = [graph.output[0].name]
    while pending_values:
        name = pending_values.pop()
        if name not in used_values:
            used_values.add(name)
            pending_values += node_by_output[name].input if name in node_by_output else ()
    return used_values
