"""`ortlaunch device`: what is done with a folder of training artifacts, checked, and the process that does it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

from ortlaunch import tasks
from ortlaunch.errors import InputError
from ortlaunch.recipe import load, to_yaml
from ortlaunch.run_folder.device_folder import DeviceFolder
from ortlaunch.tasks import DeviceRequest

# What a device can change of the recipe; the rest is in the graphs.
_OPEN = ("data", "batch.micro_size", "train.max_steps", "train.epochs", "optimizer.learning_rate", "schedule", "seed",
         "log.every_steps")  # fmt: skip
_MARK = b"ODTC"  # of onnxruntime's checkpoints, from byte 4 on


def export(request: DeviceRequest) -> int:
    """Write a model for onnxruntime alone, into a new folder; as `start`."""
    if request.to and Path(request.to).exists():
        raise InputError(
            f"{request.to} is there already; take it away, or give another folder with --to"
        )
    return start(request, None)


def average(request: DeviceRequest) -> int:
    """Write the mean of clients' checkpoints; as `start`."""
    if len(request.checkpoints) < 2:
        raise InputError(
            f"an average is of two checkpoints at least; got {len(request.checkpoints)}"
        )
    if request.weights is not None and len(request.weights) != len(request.checkpoints):
        raise InputError(
            f"--weights: got {len(request.weights)} for {len(request.checkpoints)} checkpoints"
        )
    return start(request, None)


def start(request: DeviceRequest, overrides: tuple[str, ...] | None) -> int:
    """Start the verb that was asked for; returns the exit status of the process that does it.

    Args:
        overrides: of the artifacts' recipe, to train or evaluate; None: the verb needs none.

    Raises:
        InputError: there are no artifacts, no checkpoint or no place for the result, or an override is none that a
            device takes.
    """
    place = DeviceFolder(request.artifacts)
    missing = place.missing()
    if missing:
        raise InputError(
            f"{place} is no folder of training artifacts: it lacks {', '.join(missing)}; "
            "ortlaunch export RUN --format ondevice writes one"
        )
    own = str(place.checkpoint)
    request = request._replace(checkpoint=request.checkpoint or own, to=request.to or own)
    for path in request.checkpoints or (request.checkpoint,):
        if not Path(path or "").is_file():
            raise InputError(f"there is no checkpoint {path}")
    if request.verb in ("train", "average"):
        _make_place(Path(request.to or ""), own)
    if overrides is not None:
        request = request._replace(recipe=_recipe(place, overrides))
    return tasks.run_alone(request)


def _make_place(to: Path, own: str) -> None:
    """The folder of the result, before any work: one without a place would be lost.

    Raises:
        InputError: it cannot be written there, or would replace what is no checkpoint.
    """
    if to.is_dir():
        raise InputError(
            f"--to: {to} is a folder; give the file of a checkpoint, as {to / 'checkpoint'}"
        )
    if str(to) != own and to.exists() and not _is_checkpoint(to):
        raise InputError(
            f"--to: {to} is there already, and is no checkpoint of onnxruntime's; give another file"
        )
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(to.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise InputError(
            f"--to: nothing can be written in {to.parent}: {error.strerror}; give another file"
        ) from None


def _is_checkpoint(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(8)[4:] == _MARK


def _recipe(place: DeviceFolder, overrides: tuple[str, ...]) -> str:
    """The artifacts' recipe with their tokenizer, and what was typed."""
    for word in overrides:
        key = word.partition("=")[0].lstrip("+")
        if not any(key == name or key.startswith(f"{name}.") for name in _OPEN):
            raise InputError(
                f"{word}: is settled in the artifacts; on a device can be set {', '.join(_OPEN)}"
            )
    own = (
        (f"data.tokenizer={json.dumps(str(place.path.absolute()))}",) if place.has_tokenizer else ()
    )
    return to_yaml(load(place.recipe, (*own, *overrides)).recipe)
