"""A device: the graphs of a folder of artifacts and the state of one checkpoint, by onnxruntime.training.api."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from ortlaunch.errors import CheckpointError, InputError, MissingDependency
from ortlaunch.json_types import Json
from ortlaunch.ortmodule.tracing.compat import forget_failed_import
from ortlaunch.run_folder.device_folder import DeviceFolder
from ortlaunch.worker.model.packing import one_a_row
from ortlaunch.worker.onnx.onnx_model import Batch, arrays

Arrays = Json
STEPS = "ortlaunch.steps"
"""Property of a checkpoint: optimizer steps on devices."""
SAMPLES = "ortlaunch.samples"
"""Property of a checkpoint: samples trained on since weights were last averaged; of an average the sum of its parts."""
AVERAGED = "ortlaunch.averaged"
"""Property of a checkpoint: 1 for an average."""


class Device:
    """Trains and evaluates one checkpoint."""

    def __init__(self, place: DeviceFolder, checkpoint: Path, trains: bool = False) -> None:
        require()
        from onnxruntime.training.api import Module, Optimizer

        self.state = load_state(checkpoint)
        self.module = Module(place.training, self.state, place.eval)
        self.inputs: list[str] = self.module.input_names()
        self.outputs: list[str] = self.module.output_names()
        self.optimizer = Optimizer(place.optimizer, self.module) if trains else None

    def evaluate(self, batch: Batch) -> Arrays:
        """Loss and logits of a batch, without dropout."""
        return self._pass(self.module.eval(), batch)

    def step(self, batch: Batch, rate: float) -> float:
        """One pass forward and backward and a step of the optimizer; returns the loss. Packed documents go apart."""
        assert self.optimizer is not None, "made for training"
        self.optimizer.set_learning_rate(rate)
        loss = float(self._pass(self.module.train(), one_a_row(batch))["loss"])
        self.optimizer.step()
        self.module.lazy_reset_grad()
        return loss

    def _pass(self, module: Any, batch: Batch) -> Arrays:
        found = module(*arrays(self.inputs, batch).values())
        return dict(zip(self.outputs, found if isinstance(found, tuple) else (found,)))

    def save_for_inference(self, path: Path) -> list[str]:
        """Write the graph that gives everything but the loss; its outputs."""
        wanted = [name for name in self.outputs if name != "loss"]
        if not wanted:
            raise InputError(
                "the model returns its loss alone; let its forward return a mapping with its "
                "outputs, too"
            )
        self.module.export_model_for_inferencing(path, wanted)
        return wanted


def require() -> Any:
    """The module onnxruntime.training.artifacts.

    Raises:
        MissingDependency: there is no onnxruntime-training, or it is another release's.
    """
    try:
        import_module("onnxruntime").set_default_logger_severity(3)
        import_module("onnxruntime.training.api")
        return import_module("onnxruntime.training.artifacts")
    except ImportError as error:
        raise MissingDependency(
            f"training on a device needs onnxruntime-training ({error}): "
            'pip install "ortlaunch[ort-cpu]"'
        ) from None
    finally:
        forget_failed_import()


def load_state(path: Path) -> Any:
    """Weights, properties and what there is of the optimizer's state.

    Raises:
        CheckpointError: it is no checkpoint of onnxruntime.training's.
    """
    from onnxruntime.training.api import CheckpointState

    try:
        return CheckpointState.load_checkpoint(path)
    except Exception as error:  # onnxruntime has a class for each, all of them its own
        raise CheckpointError(
            f"{path} is no checkpoint of onnxruntime's: {str(error).splitlines()[-1]}"
        ) from None


def save_state(state: Any, path: Path, with_optimizer: bool) -> None:
    """Whole or not at all."""
    from onnxruntime.training.api import CheckpointState

    partial = path.with_name(f"{path.name}.partial")
    CheckpointState.save_checkpoint(state, partial, with_optimizer)
    os.replace(partial, path)


def number(state: Any, name: str) -> int:
    """A property; 0 where there is none."""
    return int(state.properties[name]) if name in state.properties else 0
