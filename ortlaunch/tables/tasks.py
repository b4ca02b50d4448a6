"""The table of the worker's tasks, for ranks of a plan (`plan.task`) or one process with a request.

Standard library only, for both sides. Requests are sent to the worker as JSON on standard input.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ortlaunch.base import module_start
from ortlaunch.base.errors import RunError


class ExportRequest(NamedTuple):
    """A request to write a checkpoint as a model."""

    run: str
    """Run folder."""
    step: int
    folder: str
    """Folder of the model, a new one."""
    format: str
    lora: str = ""
    """`merged`, `alone`, or "": as the recipe sets it."""
    automatic: bool = False
    """Whether `checkpoint.export` requested it, so that it is deleted with its checkpoint."""


class PushRequest(NamedTuple):
    """A request to upload an export to the hub with a model card; without `run` only to check that
    an upload is possible."""

    repo: str
    run: str = ""
    step: int = 0
    folder: str = ""
    """Folder of the export."""


CheckpointStep = int | Literal["best"] | None
"""A checkpoint of a run: its step, `best` for that of keep_best, None for the newest."""


class GenerationRequest(NamedTuple):
    """A request to continue a prompt."""

    model: str
    """Folder of a run, or of a model."""
    prompt: str
    step: CheckpointStep
    """Step of the run's checkpoint; None for a model's folder."""
    tokens: int
    """Largest number of new tokens."""
    temperature: float
    """Sampling temperature; 0: the most probable token each time."""
    seed: int
    raw: bool
    """Whether the prompt is used without the chat template."""
    chats: bool | None = None
    """Whether the chat template formats the prompt; None: if the tokenizer has one."""


class ModelEvaluationRequest(NamedTuple):
    """A request to evaluate an exported model."""

    model: str
    """A model.onnx, or a folder of a transformers model."""
    recipe: str
    """The resolved recipe, as YAML."""
    modules: str
    """Folder that may have the user's own modules."""
    json: bool
    """Whether the metrics are printed as JSON."""


class DataRequest(NamedTuple):
    """A request to tokenize a recipe's data into the cache."""

    recipe: str
    """The resolved recipe, as YAML."""


class ShowDataRequest(NamedTuple):
    """A request to show samples of a recipe's data, and an audit of them."""

    recipe: str
    """The resolved recipe, as YAML."""
    samples: int
    """Number of samples of each part to show."""
    json: bool
    """Whether the result is printed as JSON."""
    modules: str
    """Folder that may have the user's own modules."""


class BatchBytesRequest(NamedTuple):
    """A request for the bytes of one micro batch."""

    recipe: str
    """The resolved recipe, as YAML."""
    modules: str
    """Folder that may have the user's own modules."""
    micro_samples: int


class PredictionRequest(NamedTuple):
    """A request to predict the seconds of a step and the memory of a rank, into the cache."""

    recipe: str
    """The resolved recipe, as YAML."""
    plan: str
    """Its plan, as JSON."""


class DeviceRequest(NamedTuple):
    """A request for a verb of `ortlaunch device`."""

    verb: str
    artifacts: str
    checkpoint: str | None = None
    """Initial checkpoint; None: the artifacts' own."""
    to: str | None = None
    """File of the result; None: the artifacts' own checkpoint."""
    steps: int | None = None
    """Steps of this training; None: all remaining ones."""
    checkpoints: tuple[str, ...] = ()
    """Checkpoints of clients, to average."""
    weights: tuple[float, ...] | None = None
    recipe: str | None = None
    """The resolved recipe, as YAML."""


class ImportRequest(NamedTuple):
    """A request for `ortlaunch device import`."""

    artifacts: str
    checkpoint: str
    """A device's checkpoint, or an average."""
    run: str
    step: int
    """The step of the run's checkpoint with everything that a device does not train."""
    to: str
    """A new folder."""


TaskRequest = (
    ExportRequest | PushRequest | GenerationRequest | ModelEvaluationRequest | DataRequest | ShowDataRequest
    | BatchBytesRequest | PredictionRequest | DeviceRequest | ImportRequest
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """One row of the table."""

    module: str
    """Module whose function `run`, imported on use, gets the rank's Session or the request, and
    returns an exit status, or None for 0."""
    request: type[TaskRequest] | None = None
    """Type of the request if one process does the task without a plan; None: ranks of a plan do."""
    saves: bool = False
    """Whether it trains to the end, writes checkpoints, and saves when it is stopped."""
    evaluates: bool = False
    """Whether it evaluates a checkpoint on data.evaluation, and needs no training data."""
    compares: bool = False
    """Whether it compares the engine with plain PyTorch, and writes only the records of that."""
    # Not for a bench, whose variants take turns: a waiting one makes no progress.
    watched: bool = False
    """Whether a rank without progress ends the task."""
    # A trial of `micro_size: auto` is expected to run out of memory.
    may_exhaust_memory: bool = False
    """Whether the kernel should end this task first if the host runs out of memory."""


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
    "show data": Task("ortlaunch.worker.tasks.show_data", ShowDataRequest),
    "batch bytes": Task("ortlaunch.worker.tasks.batch_bytes", BatchBytesRequest),
    "predict": Task("ortlaunch.worker.tasks.predict", PredictionRequest),
    "device": Task("ortlaunch.worker.device.verbs", DeviceRequest),
    "device_import": Task("ortlaunch.worker.export.import_checkpoint", ImportRequest),
}


def run_task_alone(request: TaskRequest) -> int:
    """Run the process of a task without a plan, and return its exit status."""
    return _run_task_with_request_as_input(request, None, None).returncode


def run_task_and_return_stdout_or_raise(
    task_request: TaskRequest, inherited_streams: Collection[str] = ()
) -> str:
    """Run the process of a task without a plan, and return its standard output.

    Args:
        inherited_streams: `stdout`, `stderr`: streams that are those of this process, and not returned.

    Raises:
        RunError: the process failed; the message is its standard error.
    """
    streams = (
        None if name in inherited_streams else subprocess.PIPE for name in ("stdout", "stderr")
    )
    ended = _run_task_with_request_as_input(task_request, *streams)
    if ended.returncode:
        raise RunError((ended.stderr or "").strip().removeprefix("ortlaunch: "), ended.returncode)
    return ended.stdout or ""


def _run_task_with_request_as_input(
    task_request: TaskRequest, stdout: int | None, stderr: int | None
) -> subprocess.CompletedProcess[str]:
    # On standard input, because a prompt may be longer than an argument list allows.
    text = json.dumps(task_request._asdict())
    return subprocess.run(
        task_command(task_request), input=text, text=True, check=False, stdout=stdout, stderr=stderr
    )


def task_command(request: TaskRequest) -> list[str]:
    """Return the command of a task without a plan; it reads the request as JSON."""
    name = next(name for name, task in TASKS.items() if task.request is type(request))
    return [*module_start.module_command("ortlaunch.worker.single_process"), name]
