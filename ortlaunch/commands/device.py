"""`ortlaunch device`: check the arguments for a folder of training artifacts, and start the work.

A process of its own does the work.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path

from ortlaunch import tasks
from ortlaunch.commands.export import chosen_step
from ortlaunch.errors import InputError
from ortlaunch.recipe import load, to_yaml
from ortlaunch.run_folder.device_folder import DeviceFolder
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.held import hold_checkpoint
from ortlaunch.tasks import DeviceRequest, ImportRequest

# Fields of the recipe that can change on a device; the others are fixed in the graphs.
_OPEN = ("data", "batch.micro_size", "train.max_steps", "train.epochs", "optimizer.learning_rate", "schedule", "seed",
         "log.every_steps")  # fmt: skip
# Bytes 4 to 7 of onnxruntime's checkpoints.
_MARK = b"ODTC"


def export(request: DeviceRequest) -> int:
    """Write a model for onnxruntime alone into a new folder; return the status as `start` does."""
    _require_new(request.to)
    return start(request, None)


def import_checkpoint(
    artifacts: Path, checkpoint: Path | None, folder: Path, step: int | None, to: Path
) -> int:
    """Write a device's weights as a checkpoint and an export of a run; return as `start` does.

    Args:
        artifacts: the folder of the artifacts.
        checkpoint: a device's checkpoint, or an average; None: the artifacts' own.
        folder: the run's folder.
        step: the run's checkpoint with everything that a device does not train; None: the newest.
        to: a new folder.

    Raises:
        InputError: there are no artifacts, no run or no checkpoint, or `to` exists.
    """
    _require_new(str(to))
    place = _artifacts(str(artifacts))
    chosen = checkpoint or place.checkpoint
    _require_checkpoints([str(chosen)])
    run = RunDir(folder)
    # A training may still run: the checkpoint must not be deleted meanwhile.
    with hold_checkpoint(run, lambda: chosen_step(run, step)) as found:
        return tasks.run_task_alone(
            ImportRequest(str(place), str(chosen), str(run), found, str(to))
        )


def _require_new(to: str | None) -> None:
    if to and Path(to).exists():
        raise InputError(f"{to} exists already; remove it, or give another folder with --to")


def average(request: DeviceRequest) -> int:
    """Write the mean of several clients' checkpoints; return the status as `start` does."""
    if len(request.checkpoints) < 2:
        raise InputError(
            f"an average needs at least two checkpoints; got {len(request.checkpoints)}"
        )
    if request.weights is not None and len(request.weights) != len(request.checkpoints):
        raise InputError(
            f"--weights: got {len(request.weights)} for {len(request.checkpoints)} checkpoints"
        )
    return start(request, None)


def start(request: DeviceRequest, overrides: tuple[str, ...] | None) -> int:
    """Start the requested verb, and return the exit status of its process.

    Args:
        overrides: changes of the artifacts' recipe, to train or evaluate; None: the verb has none.

    Raises:
        InputError: there are no artifacts, no checkpoint or no folder for the result, or an
            override is not possible on a device.
    """
    place = _artifacts(request.artifacts)
    # A training on the device continues its own checkpoint, unless the user gives another one.
    own = str(place.checkpoint)
    start_from = request.checkpoint or own
    request = request._replace(checkpoint=start_from, to=request.to or own)
    _require_checkpoints(request.checkpoints or (start_from,))
    if request.verb in ("train", "average"):
        _make_place(Path(request.to or ""), own)
    if overrides is not None:
        request = request._replace(recipe=_recipe(place, overrides))
    return tasks.run_task_alone(request)


def _artifacts(folder: str) -> DeviceFolder:
    place = DeviceFolder(folder)
    if missing := place.missing_files():
        raise InputError(
            f"{place} is not a folder of training artifacts: it lacks {', '.join(missing)}; "
            "ortlaunch export RUN --format ondevice writes one"
        )
    return place


def _require_checkpoints(paths: Iterable[str]) -> None:
    for path in paths:
        if not Path(path).is_file():
            raise InputError(f"no such checkpoint: {path}")


def _make_place(to: Path, own: str) -> None:
    """Create the folder of the result before any work: without one, the result would be lost.

    Raises:
        InputError: the file cannot be written, or exists and is no checkpoint.
    """
    if to.is_dir():
        raise InputError(
            f"--to: {to} is a folder; give the file of a checkpoint, as {to / 'checkpoint'}"
        )
    # Replacing a checkpoint is normal, replacing any other file would be a mistake.
    if str(to) != own and to.exists() and not _is_checkpoint(to):
        raise InputError(
            f"--to: {to} exists already, and is not a checkpoint of onnxruntime; give another file"
        )
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(to.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise InputError(
            f"--to: cannot write in {to.parent}: {error.strerror}; give another file"
        ) from None


def _is_checkpoint(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(8)[4:] == _MARK


def _recipe(place: DeviceFolder, overrides: tuple[str, ...]) -> str:
    """Return the artifacts' recipe with their tokenizer and the typed overrides."""
    for word in overrides:
        # A leading `+` is no part of the name.
        key = word.partition("=")[0].lstrip("+")
        if not any(key == name or key.startswith(f"{name}.") for name in _OPEN):
            raise InputError(
                f"{word}: is fixed in the artifacts; on a device these can be set: "
                f"{', '.join(_OPEN)}"
            )
    own = (
        (f"data.tokenizer={json.dumps(str(place.path.absolute()))}",) if place.has_tokenizer else ()
    )
    return to_yaml(load(place.recipe, (*own, *overrides)).recipe)
