"""A model with all that an evaluation uses of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from ortlaunch.recipe import Recipe
from ortlaunch.worker.data import Batches, Samples
from ortlaunch.worker.model.loss_weight import LossWeight
from ortlaunch.worker.model.model import LossModule
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.tensor_batch import TensorBatch


@dataclass(frozen=True)
class EvaluatedModel:
    """A model with all that an evaluation uses of a run."""

    recipe: Recipe
    group: DistributedContext
    batches: Batches
    """Reads the samples, in micro batches of its size."""
    engine_name: str
    module: nn.Module
    """The engine's module, which returns the loss."""
    plain: LossModule
    """The model without an engine."""
    loss_weight: LossWeight
    to_device: Callable[[TensorBatch], TensorBatch]
    """Returns a batch as the module takes it."""
    samples: Samples
    """The evaluation corpus."""
    count_progress: Callable[[], None] = lambda: None
    """Is called before each micro batch."""
    confusion_path: Path | None = None
    """The file for the samples by class and predicted class; None: it is not written."""
