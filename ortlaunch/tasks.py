"""The table of tasks: what worker processes do, as ranks of a plan (`plan.task`) or, with a request, one alone.

Standard library only, for both sides. The requests cross to the worker as JSON on standard input.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from typing import NamedTuple

from ortlaunch import start


class ExportRequest(NamedTuple):
    """Write a checkpoint as a model."""

    run: str
    """Its folder."""
    step: int
    folder: str
    """A new one."""
    format: str
    lora: str = ""
    """`merged`, `alone`, or "": as the recipe has it."""


class PushRequest(NamedTuple):
    """Upload an export to the hub, with its card; without `run`: check that it could be done."""

    repo: str
    run: str = ""
    step: int = 0
    folder: str = ""
    """Of the export."""


class GenerationRequest(NamedTuple):
    """Continue a prompt."""

    model: str
    """Folder of a run, or of a model."""
    prompt: str
    step: int | None
    """Of the run's checkpoint; None: a model's folder."""
    tokens: int
    """At most so many more."""
    temperature: float
    """0: the likeliest token each time."""
    seed: int
    raw: bool
    """Without the chat template."""
    chats: bool | None = None
    """Whether the chat template writes the prompt; None: where the tokenizer has one."""


class ModelEvaluationRequest(NamedTuple):
    """Measure a model in its final form."""

    model: str
    """A model.onnx, or a folder of transformers'."""
    recipe: str
    """Resolved, as YAML."""
    modules: str
    """Folder where the user's own modules may be."""
    json: bool
    """Print the numbers as JSON."""


class DataRequest(NamedTuple):
    """Tokenize a recipe's data into the cache."""

    recipe: str
    """Resolved, as YAML."""


class DeviceRequest(NamedTuple):
    """A verb of `ortlaunch device`."""

    verb: str
    artifacts: str
    checkpoint: str | None = None
    """To begin with; None: the artifacts' own."""
    to: str | None = None
    """Where the result goes; None: the artifacts' own checkpoint."""
    steps: int | None = None
    """Of this training; None: all that are left."""
    checkpoints: tuple[str, ...] = ()
    """Of clients, to average."""
    weights: tuple[float, ...] | None = None
    recipe: str | None = None
    """Resolved, as YAML."""


Request = (
    ExportRequest | PushRequest | GenerationRequest | ModelEvaluationRequest | DataRequest | DeviceRequest
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """One row."""

    module: str
    """Its `run`, imported on use, takes the rank's Session, or the request; returns an exit status, or None for 0."""
    request: type[Request] | None = None
    """Of a task that one process does without a plan; None: ranks of a plan do it."""
    saves: bool = False
    """Whether it trains to the end: writes checkpoints, and has something to save when it is stopped."""
    evaluates: bool = False
    """Whether it measures a checkpoint on data.evaluation, and needs no training data."""
    compares: bool = False
    """Whether it compares the engine with plain PyTorch, leaves records of that alone and no summary."""
    watched: bool = False
    """Whether a rank that makes no progress ends it; variants of a bench take turns."""
    may_exhaust_memory: bool = False
    """Whether it is to be the first that a host without memory ends."""


TASKS = {
    "train": Task("ortlaunch.worker.tasks.train", saves=True, watched=True),
    "parity": Task("ortlaunch.worker.tasks.parity", compares=True, watched=True),
    "evaluate": Task("ortlaunch.worker.tasks.evaluate", evaluates=True, watched=True),
    "bench": Task("ortlaunch.worker.tasks.bench"),
    "fabric": Task("ortlaunch.worker.tasks.fabric"),
    "try": Task("ortlaunch.worker.tasks.trial", may_exhaust_memory=True),
    "export": Task("ortlaunch.worker.export.export_checkpoint", ExportRequest),
    "push": Task("ortlaunch.worker.export.push", PushRequest),
    "generate": Task("ortlaunch.worker.export.generate", GenerationRequest),
    "evaluate model": Task("ortlaunch.worker.evaluation.evaluate_model", ModelEvaluationRequest),
    "prepare data": Task("ortlaunch.worker.tasks.prepare_data", DataRequest),
    "device": Task("ortlaunch.worker.device.verbs", DeviceRequest),
}


def run_alone(request: Request) -> int:
    """Start the process that does a task without a plan; its exit status."""
    name = next(name for name, task in TASKS.items() if task.request is type(request))
    command = [*start.command("ortlaunch.worker.alone"), name]
    return subprocess.run(
        command, input=json.dumps(request._asdict()), text=True, check=False
    ).returncode
