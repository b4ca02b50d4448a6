"""Every path of a folder of artifacts that `ortlaunch export --format ondevice` writes.

training_model.onnx eval_model.onnx optimizer_model.onnx
    graphs without weights, for onnxruntime.training.api
checkpoint
    weights; after a training also the optimizer's state
device.json recipe.yaml
    names and sizes; the run's recipe with one pass a step
evaluation.json
    metrics of the last `ortlaunch device evaluate`
config.json tokenizer.json ...
    as beside a transformers model

Standard library only.
"""

from __future__ import annotations

import os
from pathlib import Path


class DeviceFolder:
    """The paths of one folder of artifacts."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.training = self.path / "training_model.onnx"
        self.eval = self.path / "eval_model.onnx"
        self.optimizer = self.path / "optimizer_model.onnx"
        self.checkpoint = self.path / "checkpoint"
        self.description = self.path / "device.json"
        self.recipe = self.path / "recipe.yaml"
        self.evaluation = self.path / "evaluation.json"

    def __str__(self) -> str:
        return str(self.path)

    @property
    def has_tokenizer(self) -> bool:
        """Whether the folder has a tokenizer, so the data are texts."""
        return (self.path / "tokenizer_config.json").exists()

    def missing_files(self) -> list[str]:
        """Return the names of required files that are absent."""

        # evaluation.json is not required: only `ortlaunch device evaluate` writes it.
        required_paths = (self.training, self.eval, self.optimizer, self.description, self.recipe)
        return [path.name for path in required_paths if not path.exists()]
