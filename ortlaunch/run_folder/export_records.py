"""Records of exports: exports.jsonl, and device.json of format ondevice. Standard library only.

The text under a field is its manual, as in records.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class OnnxCheck:
    """The comparison of a model.onnx, run by onnxruntime on the CPU, with PyTorch in float32.

    Both run on batches of the run's own data.
    """

    opset: int
    """Version of ONNX's operators."""
    inputs: list[str]
    """Names of the inputs, as the model's forward has them."""
    outputs: list[str]
    """Names of the outputs: the head's logits; for a custom model its outputs beside the loss."""
    largest_difference: float
    """Largest difference of any output from PyTorch's."""
    limit: float
    """Largest difference allowed; above it the export fails."""
    batches: list[list[int]]
    """Samples and, if that axis is dynamic, length of each compared batch; of texts the first two
    are padded."""
    # protobuf stores no message above 2 GB, so larger models need a second file.
    external_data: bool
    """Whether the weights, above 2 GB, are in model.onnx_data beside it."""
    open_axes: dict[str, list[int]] = field(default_factory=dict)
    """Dynamic axes of inputs and outputs; 0 is the batch."""
    python_decisions: list[str] = field(default_factory=list)
    """For a custom model: FILE:LINE where Python read a tensor's value; the graph keeps the traced
    batch's value."""


@dataclass
class ExportLine:
    """One `ortlaunch export`, or one export of `checkpoint.export`, a line each."""

    step: int
    """Optimizer step of the checkpoint."""
    format: str
    """huggingface, onnx or ondevice."""
    folder: str
    """Folder of the exported model."""
    onnx: OnnxCheck | None = None
    """For format onnx: the comparison with PyTorch."""
    automatic: bool = False
    """Whether `checkpoint.export` requested it; it is deleted with its checkpoint."""
    error: str | None = None
    """Why an automatic export failed; null: it is complete."""


@dataclass
class DeviceParameter:
    """A weight of the training graph, in the order of its inputs."""

    name: str
    """Name in the model, with the prefix `model.`."""
    shape: list[int]
    """Size of each dimension."""
    trained: bool
    """Whether a device trains it; with LoRA only the adapters."""


@dataclass
class DeviceArtifacts:
    """The description of an `ortlaunch export --format ondevice`, beside graphs and checkpoint."""

    opset: int
    """Version of ONNX's operators."""
    inputs: list[str]
    """Names of the graphs' inputs in their order, labels included; a batch must have all."""
    outputs: list[str]
    """Names of the graphs' outputs: the loss, then the logits."""
    parameters: list[DeviceParameter]
    """The weights; checkpoints are averaged only if these are equal."""
    optimizer: str
    """ONNX Runtime's operator: AdamWOptimizer or SGDOptimizerV2."""
    largest_difference: float
    """Largest difference of loss and logits from PyTorch's, without dropout, on batches of the
    run's own data."""
    limit: float
    """Largest difference allowed; above it the export fails."""
    notes: list[str]
    """Settings of the recipe that a device does not follow."""
