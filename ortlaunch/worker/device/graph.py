"""A model with its loss as one ONNX graph that can be trained, for batches and texts of any size.

Written by torch's TorchScript exporter in training mode: dropout stays, and nothing is folded into the weights.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ortlaunch.errors import EngineError, InputError
from ortlaunch.json_types import Json
from ortlaunch.recipe import Recipe
from ortlaunch.worker.data import LoadedData, stack_of
from ortlaunch.worker.model.chunked_head import LABELS
from ortlaunch.worker.model.model import LossModule, loss_of
from ortlaunch.worker.onnx.onnx_export import real_batches

OPSET = 15  # from 17 on a LayerNorm is one operator, written without the outputs that ONNX Runtime's gradient needs
Batch = dict[str, torch.Tensor]
Axes = dict[str, dict[int, str]]


class WithLoss(nn.Module):
    """`forward(*inputs)` -> the loss, then logits and whatever else the model returns by name, a tuple."""

    def __init__(self, whole: LossModule, inputs: tuple[str, ...]) -> None:
        super().__init__()
        self.model = whole.model
        self.inputs = inputs

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.named(*tensors).values())

    def named(self, *tensors: torch.Tensor) -> Batch:
        """The same, each under its name."""
        output = self.model(**dict(zip(self.inputs, tensors)))
        pairs = output.items() if isinstance(output, Mapping) else ()
        others = {
            name: value for name, value in pairs if isinstance(value, torch.Tensor) and value.dim()
        }
        return {"loss": loss_of(output), **others}


class Forward(NamedTuple):
    """What was exported."""

    path: Path
    inputs: Axes
    """Each with its axes whose size is open."""
    outputs: Axes
    trained: list[str]
    """Parameters that the loss can change, by their names in the graph."""
    frozen: list[str]
    unused: list[str]
    """Parameters that training would change, and this loss does not use."""
    shapes: dict[str, list[int]]
    """Sizes of everything in the graph that is no input."""


def labelled_batches(recipe: Recipe, whole: LossModule, data: LoadedData) -> list[Batch]:
    """Batches of the run's own data, in the order of the model's forward; the first two differ in both sizes."""
    samples = data.evaluation or data.train
    few = stack_of(recipe)([samples.sample(index % len(samples), epoch=0) for index in range(3)])
    model: Any = whole.model
    model = (
        model.get_base_model() if hasattr(model, "get_base_model") else model
    )  # peft's has no names
    taken = inspect.signature(model.forward).parameters
    if recipe.model.traits.is_own:
        wild = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
        whole_batch = {name: value for name, value in few.items() if wild or name in taken}
        return [whole_batch, {name: value[:2] for name, value in whole_batch.items()}]
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
    """Labels of a smaller batch, one of each text counted: the mean over none is no number."""
    labels = (
        labels[:rows, :length].clone()
        if labels.dim() > 1 and labels.size(1) == whole
        else labels[:rows].clone()
    )
    if labels.dim() > 1 and not labels.is_floating_point():
        labels[:, 1] = 0
    return labels


def export(whole: LossModule, batches: list[Batch], path: Path) -> Forward:
    """Write the graph of a model in float32 on the CPU.

    Raises:
        InputError: it keeps statistics of batches, or has nothing to train.
        EngineError: the exporter cannot write it, or writes weights that the model shares as two.
    """
    module = WithLoss(whole, tuple(batches[0])).train()
    _require_no_statistics(module)
    inputs = _axes(batches)
    outputs = _axes([module.named(*batch.values()) for batch in batches])
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter(
            "ignore"
        )  # of what tracing cannot see; the comparison shows whether it mattered
        try:
            torch.onnx.export(
                module, tuple(batches[0].values()), str(path), input_names=[*inputs], output_names=[*outputs],
                dynamic_axes={**inputs, **outputs}, opset_version=OPSET, dynamo=False, do_constant_folding=False,
                training=torch.onnx.TrainingMode.TRAINING,
            )  # fmt: skip
        except Exception as error:  # whatever the exporter raises is a reason
            raise EngineError(
                f"--format ondevice: the model does not export: {str(error).splitlines()[0]}"
            ) from error
    _write_sizes(path, batches)
    return _sorted(module, Forward(path, inputs, outputs, [], [], [], {}))


def _write_sizes(path: Path, batches: list[Batch]) -> None:
    """Write into the graph the sizes that its values have in two batches.

    ONNX Runtime's gradient takes sizes that it does not know for equal: a 1 that is broadcast, as the batch of BERT's
    positions, was not summed over, and the gradient was wrong without a word.
    """
    import onnx

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
            sizes = [a if a == b else words.get((a, b), f"size_{a}_{b}") for a, b in pairs]
            kind = onnx.helper.np_dtype_to_tensor_dtype(one.dtype)
            model.graph.value_info.append(onnx.helper.make_tensor_value_info(name, kind, sizes))
    onnx.save(model, str(path))


def _open_sizes(batches: list[Batch]) -> dict[tuple[int, int], str]:
    """The names of the sizes that differ between two batches, as the graph's inputs have them."""
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
    """Everything that the graph computes, for one batch."""
    import onnx
    import onnxruntime

    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    given = {each.name for each in model.graph.output}
    whole.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in given)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        whole.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return dict(
        zip(names, session.run(names, {name: value.numpy() for name, value in batch.items()}))
    )


def _require_no_statistics(module: nn.Module) -> None:
    kept = [
        name for name, part in module.named_modules() if getattr(part, "track_running_stats", False)
    ]
    if kept:
        raise InputError(
            f"--format ondevice: {kept[0]} keeps statistics of batches, "
            "which a device does not update"
        )


def _axes(batches: list[Batch]) -> Axes:
    """Axis 0 is the batch; others whose size differs between the first two batches follow the text's length."""
    (long, short), found = batches[:2], Axes()
    for name, value in long.items():
        open_ones = [
            axis for axis in range(1, value.dim()) if value.size(axis) != short[name].size(axis)
        ]
        found[name] = {0: "batch", **dict.fromkeys(open_ones, "length")} if value.dim() else {}
    return found


def _sorted(module: WithLoss, forward: Forward) -> Forward:
    """Which of the graph's weights are trained: those that the model trains and the loss uses."""
    import onnx

    graph = onnx.load(str(forward.path)).graph
    used = _used(graph)
    there = {each.name: list(each.dims) for each in graph.initializer}
    forward.shapes.update(there)
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
    """Names that the loss is computed from."""
    makers = {name: node for node in graph.node for name in node.output}
    found = set[str]()
    left = [graph.output[0].name]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += makers[name].input if name in makers else ()
    return found
