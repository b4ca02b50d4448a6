"""Training and evaluation of artifacts with the state of one checkpoint, as on a device."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

from numpy.typing import NDArray

import ortmodule
from ortlaunch.base.errors import CheckpointError, InputError, MissingDependency
from ortlaunch.run_folder.device_folder import DeviceFolder
from ortlaunch.worker.model.packing import split_packed_documents_into_rows_or_copy_unpacked
from ortlaunch.worker.onnx.onnx_model import graph_input_arrays
from ortlaunch.worker.tensor_batch import TensorBatch
from ortmodule.loops import import_ort_training_artifacts

NamedArrays = dict[str, NDArray[Any]]
STEPS = "ortlaunch.steps"
"""Property of a checkpoint: optimizer steps on devices."""
SAMPLES = "ortlaunch.samples"
"""Property of a checkpoint: samples since the last average; for an average, the clients' sum."""
WEIGHTS = ".f32"
"""Suffix of a file of weights that a browser sent."""
AVERAGED = "ortlaunch.averaged"
"""Property of a checkpoint: 1 for an average."""


class Device:
    """The artifacts' graphs with one checkpoint, run by onnxruntime.training.api."""

    def __init__(
        self, device_folder: DeviceFolder, checkpoint: Path, is_training: bool = False
    ) -> None:
        import_ort_training_artifacts_or_refuse()
        from onnxruntime.training.api import Module, Optimizer

        self.state = load_ort_checkpoint_state_or_refuse(checkpoint)
        self.module = Module(device_folder.training, self.state, device_folder.eval)
        self.inputs: list[str] = self.module.input_names()
        self.outputs: list[str] = self.module.output_names()
        self.optimizer = Optimizer(device_folder.optimizer, self.module) if is_training else None

    def evaluate_batch(self, batch: TensorBatch) -> NamedArrays:
        """Return loss and logits of a batch, without dropout."""
        return self._run_module_and_name_outputs(self.module.eval(), batch)

    def train_on_batch(self, batch: TensorBatch, learning_rate: float) -> float:
        """Run one forward and backward pass and an optimizer step; return the loss.

        Args:
            batch: a micro batch; packed documents are put in rows of their own.
            learning_rate: the learning rate.
        """
        assert self.optimizer is not None, "made for training"
        self.optimizer.set_learning_rate(learning_rate)
        loss = float(
            self._run_module_and_name_outputs(
                self.module.train(), split_packed_documents_into_rows_or_copy_unpacked(batch)
            )["loss"]
        )
        self.optimizer.step()
        # The gradients are reset at the beginning of the next pass.
        self.module.lazy_reset_grad()
        return loss

    def _run_module_and_name_outputs(self, module: Any, batch: TensorBatch) -> NamedArrays:
        output_arrays = module(*graph_input_arrays(self.inputs, batch).values())
        return dict(
            zip(
                self.outputs,
                output_arrays if isinstance(output_arrays, tuple) else (output_arrays,),
            )
        )

    def write_inference_graph_and_list_outputs(self, graph_path: Path) -> list[str]:
        """Write a graph that computes all outputs but the loss; return their names.

        Raises:
            InputError: the model returns its loss alone.
        """
        output_names = [name for name in self.outputs if name != "loss"]
        if not output_names:
            raise InputError(
                "the model returns only its loss; its forward must return a mapping that also "
                "has its outputs"
            )
        self.module.export_model_for_inferencing(graph_path, output_names)
        return output_names


def import_ort_training_artifacts_or_refuse() -> ModuleType:
    """Return the module onnxruntime.training.artifacts.

    Raises:
        MissingDependency: onnxruntime-training is not installed, or is of another release.
    """
    try:
        return import_ort_training_artifacts()
    except ortmodule.MissingDependency as error:
        raise MissingDependency(f"training on a device: {error}") from None


def load_ort_checkpoint_state_or_refuse(checkpoint_path: Path) -> Any:
    """Return the state of a checkpoint: weights, properties and, if present, optimizer state.

    Raises:
        CheckpointError: the file is no checkpoint of onnxruntime.training.
    """
    from onnxruntime.training.api import CheckpointState

    try:
        return CheckpointState.load_checkpoint(checkpoint_path)
    # onnxruntime has a class of its own for each type of error.
    except Exception as error:
        raise CheckpointError(
            f"{checkpoint_path} is no checkpoint of onnxruntime's: {str(error).splitlines()[-1]}"
        ) from None


def load_ort_checkpoint_or_browser_weights(
    device_folder: DeviceFolder, checkpoint_path: Path
) -> Any:
    """Return the state of a checkpoint, or of a file of weights that a browser sent.

    Such a file, NAME.f32, has the trained weights in one row, little-endian float32, in the order
    of onnxruntime's `getContiguousParameters(true)`; NAME.samples beside it has the number of
    samples.

    Raises:
        CheckpointError: the file is no checkpoint, or has another number of weights.
    """
    if checkpoint_path.suffix != WEIGHTS:
        return load_ort_checkpoint_state_or_refuse(checkpoint_path)
    import numpy as np
    from onnxruntime import OrtValue

    device = Device(device_folder, device_folder.checkpoint)
    values = np.fromfile(checkpoint_path, "<f4")
    size = device.module.get_parameters_size(True)
    if checkpoint_path.stat().st_size != 4 * size:
        raise CheckpointError(
            f"{checkpoint_path} has {checkpoint_path.stat().st_size:,} bytes; the {size:,} "
            f"trained weights take {4 * size:,}"
        )
    # The module takes the value inside of the Python class.
    device.module.copy_buffer_to_parameters(OrtValue.ortvalue_from_numpy(values)._ortvalue, True)
    samples_path = checkpoint_path.with_suffix(".samples")
    try:
        device.state.properties[SAMPLES] = (
            int(samples_path.read_text()) if samples_path.exists() else 0
        )
    except ValueError:
        raise CheckpointError(f"{samples_path} is not a number of samples") from None
    return device.state


def write_checkpoint_state_atomically(
    checkpoint_state: Any, checkpoint_path: Path, with_optimizer: bool
) -> None:
    """Write a checkpoint under a temporary name first, so that it is never incomplete."""
    from onnxruntime.training.api import CheckpointState

    partial = checkpoint_path.with_name(f"{checkpoint_path.name}.partial")
    CheckpointState.save_checkpoint(checkpoint_state, partial, with_optimizer)
    os.replace(partial, checkpoint_path)


def int_property_or_0(checkpoint_state: Any, property_name: str) -> int:
    """Return an integer property of a checkpoint; 0 if absent."""
    return (
        int(checkpoint_state.properties[property_name])
        if property_name in checkpoint_state.properties
        else 0
    )
