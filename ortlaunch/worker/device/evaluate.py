"""`ortlaunch device evaluate`: the usual evaluation, for a checkpoint run by eval_model.onnx."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ortlaunch.base.errors import InputError
from ortlaunch.rank import Rank
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.hints.missing_evaluation import missing_evaluation_message_with_example
from ortlaunch.run_folder.device_folder import DeviceFolder
from ortlaunch.run_folder.folder import write_json_atomically
from ortlaunch.run_folder.records import Evaluation
from ortlaunch.worker.data import LoadedData
from ortlaunch.worker.device.device import STEPS, Device, int_property_or_0
from ortlaunch.worker.evaluation.evaluate_model import evaluate_loss_module
from ortlaunch.worker.evaluation.record import evaluation_lines
from ortlaunch.worker.model.model import LossModule
from ortlaunch.worker.process_group.distributed import DistributedContext


class _OnDevice(nn.Module):
    """A module around a device: `forward(**batch)` -> loss and logits by name."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def forward(self, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            name: torch.as_tensor(value)
            for name, value in self.device.evaluate_batch(batch).items()
        }


def evaluate_device_checkpoint_write_and_print(
    device_folder: DeviceFolder, recipe: Recipe, data: LoadedData, checkpoint: Path
) -> Evaluation:
    """Evaluate a checkpoint, write evaluation.json, and print the results.

    Raises:
        InputError: the recipe has no evaluation data.
    """
    if data.evaluation is None:
        raise InputError(missing_evaluation_message_with_example(device_folder.recipe, recipe.data))
    device = Device(device_folder, checkpoint)
    group = DistributedContext(Rank(0, 1, 0, 1), torch.device("cpu"))
    loss_module = LossModule(_OnDevice(device))
    evaluation = evaluate_loss_module(
        recipe, loss_module, data.evaluation, group, int_property_or_0(device.state, STEPS)
    )
    write_json_atomically(device_folder.evaluation, evaluation.to_json())
    print(*evaluation_lines(evaluation), f"written to {device_folder.evaluation}", sep="\n")
    return evaluation
