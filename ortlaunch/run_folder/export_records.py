"""What exports tell, as types: exports.jsonl, and device.json of format ondevice. Standard library only.

The text under a field is its manual, as in records.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class OnnxCheck:
    """A model.onnx, run back by onnxruntime on the CPU on batches of the run's own data, beside PyTorch in float32."""

    opset: int
    """Version of ONNX's operators."""
    inputs: list[str]
    """Names of the inputs, as the model's forward has them."""
    outputs: list[str]
    """Names of the outputs: the head's logits; of a model of your own what it returns beside its loss."""
    largest_difference: float
    """Of any output from PyTorch's."""
    limit: float
    """Above which the export is an error."""
    batches: list[list[int]]
    """Samples and, where it is open, length of each batch that was compared; of texts the first two are padded."""
    external_data: bool
    """Whether the weights, above 2 GB, are in model.onnx_data beside it."""
    open_axes: dict[str, list[int]] = field(default_factory=dict)
    """Of inputs and outputs, those whose size may be any: 0 is the batch."""
    python_decisions: list[str] = field(default_factory=list)
    """Of a model of your own, FILE:LINE where Python took a tensor's value, which is the traced batch's for ever."""


@dataclass
class ExportLine:
    """What `ortlaunch export` wrote, a line each time."""

    step: int
    """Of the checkpoint."""
    format: str
    """huggingface, onnx or ondevice."""
    folder: str
    """Where it lies."""
    onnx: OnnxCheck | None = None
    """Of format onnx: how it was compared."""


@dataclass
class DeviceParameter:
    """A weight of the training graph, in the order of its inputs."""

    name: str
    """As in the model, with `model.` before it."""
    shape: list[int]
    """Its sizes."""
    trained: bool
    """Whether a device trains it; under LoRA the adapters alone."""


@dataclass
class DeviceArtifacts:
    """What `ortlaunch export --format ondevice` wrote, beside the graphs and the checkpoint."""

    opset: int
    """Version of ONNX's operators."""
    inputs: list[str]
    """Names of what a batch must have, in the order in which the graphs take it; the labels among them."""
    outputs: list[str]
    """Names of what the graphs give: the loss, then the logits."""
    parameters: list[DeviceParameter]
    """The weights; checkpoints are averaged only where all of this is equal."""
    optimizer: str
    """ONNX Runtime's operator: AdamWOptimizer or SGDOptimizerV2."""
    largest_difference: float
    """Of loss and logits from PyTorch's, without dropout, on batches of the run's own data."""
    limit: float
    """Above which the export is an error."""
    notes: list[str]
    """What a device does not do as the recipe says."""
