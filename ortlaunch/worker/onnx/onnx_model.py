"""A model.onnx in place of a PyTorch model: logits by onnxruntime on the CPU, and a loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from ortlaunch.base.errors import InputError, MissingDependency, first_message_line
from ortlaunch.recipe.inputs import refuse_lfs_pointers_and_unreadable_files
from ortlaunch.tables.model_tasks import MODEL_TASKS
from ortlaunch.worker.data import IGNORED
from ortlaunch.worker.tensor_batch import TensorBatch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# The constant values of inputs that the data lack.
_OUTPUTS = {"embedding": ("sentence_embedding",)}
_ABSENT = {"attention_mask": 1, "token_type_ids": 0}


class OnnxModel(nn.Module):
    """A graph as a module: `forward(**batch)` -> logits by name, and with labels the loss."""

    def __init__(self, path: Path, task: str, config: PreTrainedConfig | None = None) -> None:
        """Load a graph.

        Args:
            path: the model.onnx.
            task: the model's task, which determines the loss.
            config: the transformers config in the same folder.

        Raises:
            InputError: onnxruntime cannot load the graph, or it has no logits.
        """
        super().__init__()
        self.session = _load_cpu_session_or_refuse(path)
        self.task = task
        self.config = config
        self.inputs = [graph_value.name for graph_value in self.session.get_inputs()]
        self.outputs = [graph_value.name for graph_value in self.session.get_outputs()]
        wanted = _OUTPUTS.get(MODEL_TASKS[task].compares, ("logits", "prediction_logits"))
        if not {*wanted} & {*self.outputs}:
            raise InputError(
                f"{path} has outputs {', '.join(self.outputs)}; none of them is called {wanted[0]}"
            )

    def forward(self, **batch: torch.Tensor) -> TensorBatch:
        output_arrays = self.session.run(self.outputs, graph_input_arrays(self.inputs, batch))
        output = {name: torch.from_numpy(value) for name, value in zip(self.outputs, output_arrays)}
        return (
            {"loss": loss_as_transformers_computes(self.task, output, batch), **output}
            if "labels" in batch
            else output
        )


class OnnxTextEncoder(nn.Module):
    """A graph as the encoder of a loss that compares texts."""

    def __init__(self, onnx_model: OnnxModel) -> None:
        super().__init__()
        self.onnx_model = onnx_model

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        output: TensorBatch = self.onnx_model(**inputs)
        vectors = output.get("sentence_embedding")
        return output["logits"][:, 0] if vectors is None else vectors


def graph_input_arrays(input_names: Sequence[str], batch: TensorBatch) -> dict[str, NDArray[Any]]:
    """Return the inputs of a graph as arrays for onnxruntime, from a batch.

    Raises:
        InputError: the batch lacks an input of the graph.
    """
    array_by_name = {}
    for name in input_names:
        if name not in batch and (name not in _ABSENT or "input_ids" not in batch):
            raise InputError(
                f"the graph needs {', '.join(input_names)}; a batch of the data lacks {name!r}: "
                f"{', '.join(batch)}"
            )
        value = batch[name] if name in batch else torch.full_like(batch["input_ids"], _ABSENT[name])
        array_by_name[name] = value.contiguous().numpy()
    return array_by_name


def _load_cpu_session_or_refuse(graph_path: Path) -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise MissingDependency(
            'model.onnx needs onnxruntime: pip install "ortlaunch[ort-cpu]"'
        ) from None
    refuse_lfs_pointers_and_unreadable_files([str(graph_path)])
    try:
        return onnxruntime.InferenceSession(str(graph_path), providers=["CPUExecutionProvider"])
    # onnxruntime has a class of its own for each type of error.
    except Exception as error:
        raise InputError(
            f"{graph_path}: onnxruntime cannot load it: {first_message_line(error)}"
        ) from None


def loss_as_transformers_computes(
    task: str, model_output: TensorBatch, batch: TensorBatch
) -> torch.Tensor:
    """Return the loss as transformers' models compute it.

    It is the mean cross entropy; for regression, the mean squared error.
    """
    if "start_logits" in model_output:
        spans = ((model_output[f"{side}_logits"], batch[f"{side}_positions"]) for side in ("start", "end"))  # fmt: skip
        return torch.stack([functional.cross_entropy(*span) for span in spans]).mean()
    logits = model_output.get("prediction_logits", model_output.get("logits"))
    labels = batch["labels"]
    assert logits is not None, "looked for when the model was loaded"
    # Position i predicts token i + 1; the last position predicts none.
    if MODEL_TASKS[task].predicts == "next":
        labels = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    # A single output is a regression.
    if logits.size(-1) == 1:
        return functional.mse_loss(logits.flatten(), labels.flatten().to(logits.dtype))
    # Multi-label classification: each class of a sample is true or false.
    if labels.is_floating_point():
        return functional.binary_cross_entropy_with_logits(logits, labels)
    token_loss = functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
    if "next_sentence_label" in batch:
        token_loss = token_loss + functional.cross_entropy(
            model_output["seq_relationship_logits"], batch["next_sentence_label"]
        )
    return token_loss
