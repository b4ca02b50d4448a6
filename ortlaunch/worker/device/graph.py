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
from torch import nn

from ortlaunch.errors import EngineError, InputError, first_message_line
from ortlaunch.json_types import Json
from ortlaunch.ortmodule.torch_in_graph.operator_table import with_forms
from ortlaunch.recipe import Recipe
from ortlaunch.worker.data import LoadedData, stack_of
from ortlaunch.worker.data.mixture import at_hand
from ortlaunch.worker.model.chunked_head import LABELS
from ortlaunch.worker.model.model import LossModule, loss_of
from ortlaunch.worker.onnx.onnx_export import real_batches
from ortlaunch.worker.onnx.onnx_own import Exported

# From 17 on, a LayerNorm is one operator, exported without outputs that ONNX Runtime's gradient
# needs.
OPSET = 15
Batch = dict[str, torch.Tensor]
Axes = dict[str, dict[int, str]]


class WithLoss(Exported):
    """A model with its loss: the loss and all named outputs."""

    def outputs_by_name(self, *tensors: torch.Tensor) -> Batch:
        """Return the same tensors by name."""
        output = self.model(**dict(zip(self.inputs, tensors)))
        pairs = output.items() if isinstance(output, Mapping) else ()
        others = {
            name: value for name, value in pairs if isinstance(value, torch.Tensor) and value.dim()
        }
        return {"loss": loss_of(output), **others}


class Forward(NamedTuple):
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


def labelled_batches(recipe: Recipe, whole: LossModule, data: LoadedData) -> list[Batch]:
    """Return batches of the run's own data, in the order of the parameters of the model's forward.

    The first two batches differ in the number of samples and, for texts, in length.
    """
    samples = data.evaluation or data.train
    hand = at_hand(samples)
    chosen = [samples.sample(hand[index % len(hand)], epoch=0) for index in range(3)]
    few = stack_of(recipe)(chosen)
    model: Any = whole.model
    # The forward of a peft model has no named parameters.
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    taken = inspect.signature(model.forward).parameters
    if recipe.model.traits.is_own or "input_ids" not in few:
        # A forward with **kwargs accepts everything in the batch.
        wild = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
        whole_batch = {name: value for name, value in few.items() if wild or name in taken}
        smaller = {name: value[:2] for name, value in whole_batch.items()}
        if not recipe.model.traits.is_own and few["labels"].dim() > 1:
            # Transcripts are padded to the longest of their batch.
            smaller["labels"] = smaller["labels"][:, : few["labels"].size(1) // 2 + 1]
        return [whole_batch, smaller]
    found = []
    for batch in real_batches(model, data):
        rows, length = batch["input_ids"].shape
        labels = {
            name: _cut(few[name], rows, length, few["input_ids"].size(1))
            for name in LABELS
            if name in few
        }
        both = {**batch, **labels}
        found.append({name: both[name] for name in taken if name in both})
    return found


def _cut(labels: torch.Tensor, rows: int, length: int, whole: int) -> torch.Tensor:
    """Return the labels of a smaller batch; at least one label of each text counts."""
    labels = (
        labels[:rows, :length].clone()
        if labels.dim() > 1 and labels.size(1) == whole
        else labels[:rows].clone()
    )
    if labels.dim() > 1 and not labels.is_floating_point():
        # The mean loss over no label would be nan. Position 1, as nothing predicts position 0 of a
        # causal model.
        labels[:, 1] = 0
    return labels


def export(whole: LossModule, batches: list[Batch], path: Path) -> Forward:
    """Write the graph of a model in float32 on the CPU.

    Raises:
        InputError: the model keeps statistics of batches, or has nothing to train.
        EngineError: the exporter cannot write the model, or writes a shared weight twice.
    """
    module = WithLoss(whole.model, tuple(batches[0])).train()
    _require_no_statistics(module)
    inputs = _axes(batches)
    outputs = _axes([module.outputs_by_name(*batch.values()) for batch in batches])
    with warnings.catch_warnings(), torch.random.fork_rng():
        # Warnings about values that tracing fixes; the comparison with PyTorch shows whether they
        # matter.
        warnings.simplefilter("ignore")
        try:
            # Whisper needs these operators.
            with_forms(torch.onnx.export, "diff", "cumsum", "unflatten")(
                module, tuple(batches[0].values()), str(path), input_names=[*inputs], output_names=[*outputs],
                dynamic_axes={**inputs, **outputs}, opset_version=OPSET, dynamo=False, do_constant_folding=False,
                training=torch.onnx.TrainingMode.TRAINING,
            )  # fmt: skip
        # The exporter raises many classes of errors; each of them is reported.
        except Exception as error:
            raise EngineError(
                f"--format ondevice: the model does not export: {first_message_line(error)}"
            ) from error
    _write_sizes(path, batches)
    return _sorted(module, Forward(path, inputs, outputs, [], [], [], {}))


def _write_sizes(path: Path, batches: list[Batch]) -> None:
    """Write into the graph the shapes of its intermediate values, from two batches."""
    import onnx

    # ONNX Runtime's gradient treats unknown sizes as equal. A broadcast dimension of size 1, such
    # as the batch of BERT's positions, was not summed over, and the gradient was silently wrong.
    model = onnx.load(str(path))
    made = [name for node in model.graph.node for name in node.output if name]
    long, short = (_values(model, made, batch) for batch in batches[:2])
    known = {each.name for each in model.graph.output}
    words = _open_sizes(batches)
    for name in made:
        one = long[name]
        other = short[name]
        if name not in known and one.ndim == other.ndim:
            pairs = zip(one.shape, other.shape)
            # A size that is the same in both batches is fixed, another one gets a name.
            sizes = [a if a == b else words.get((a, b), f"size_{a}_{b}") for a, b in pairs]
            kind = onnx.helper.np_dtype_to_tensor_dtype(one.dtype)
            model.graph.value_info.append(onnx.helper.make_tensor_value_info(name, kind, sizes))
    onnx.save(model, str(path))


def _open_sizes(batches: list[Batch]) -> dict[tuple[int, int], str]:
    """Return the names of variable sizes: (size in batch 0, size in batch 1) -> name."""
    pairs = dict[tuple[int, int], str]()
    axes = _axes(batches)
    for name, value in batches[0].items():
        pairs.update(
            {
                (value.size(axis), batches[1][name].size(axis)): word
                for axis, word in axes[name].items()
            }
        )
    return pairs


def _values(model: Any, names: list[str], batch: Batch) -> Json:
    """Return all values that the graph computes for one batch, by name."""
    import onnx
    import onnxruntime

    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    given = {each.name for each in model.graph.output}
    whole.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in given)
    options = onnxruntime.SessionOptions()
    # An optimized graph would not have all values.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = onnxruntime.InferenceSession(
            whole.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    # onnxruntime has a class of its own for each type of error.
    except Exception as error:
        raise EngineError(
            f"--format ondevice: ONNX Runtime cannot run this model: {first_message_line(error)}"
        ) from error
    return dict(
        zip(names, session.run(names, {name: value.numpy() for name, value in batch.items()}))
    )


def _require_no_statistics(module: nn.Module) -> None:
    kept = [
        name for name, part in module.named_modules() if getattr(part, "track_running_stats", False)
    ]
    if kept:
        raise InputError(
            f"--format ondevice: {kept[0]} tracks batch statistics, which a device does not update"
        )


def _axes(batches: list[Batch]) -> Axes:
    """Return the variable axes: axis 0 is "batch"; others that differ in two batches, "length"."""
    (long, short), found = batches[:2], Axes()
    for name, value in long.items():
        open_ones = [
            axis for axis in range(1, value.dim()) if value.size(axis) != short[name].size(axis)
        ]
        found[name] = {0: "batch", **dict.fromkeys(open_ones, "length")} if value.dim() else {}
    return found


def _sorted(module: WithLoss, forward: Forward) -> Forward:
    """Sort the graph's weights: trained ones require gradients and are used by the loss."""
    import onnx

    graph = onnx.load(str(forward.path)).graph
    used = _used(graph)
    there = {each.name: list(each.dims) for each in graph.initializer}
    forward.shapes.update(there)
    # A shared parameter has several names in the model, and one of them in the graph.
    aliases: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    for parameter in module.parameters():
        names = [name for name in aliases[id(parameter)] if name in there]
        if len(names) > 1:
            raise EngineError(
                f"--format ondevice: the exporter wrote one weight as {' and '.join(names)}"
            )
        if parameter.requires_grad and used.isdisjoint(names):
            forward.unused.append(aliases[id(parameter)][0])
        (forward.trained if parameter.requires_grad and used & {*names} else forward.frozen).extend(
            names
        )
    if not forward.trained:
        raise InputError(
            "--format ondevice: the model has nothing to train; its loss uses no trained parameter"
        )
    return forward


def _used(graph: Any) -> set[str]:
    """Return the names of all values that the loss depends on."""
    makers = {name: node for node in graph.node for name in node.output}
    found = set[str]()
    # The first output is the loss.
    left = [graph.output[0].name]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += makers[name].input if name in makers else ()
    return found
