"""`ortlaunch device`: check the arguments for a folder of training artifacts, and start the work.

A process of its own does the work.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path

from ortlaunch.api.export import existing_requested_or_newest_step_or_refuse
from ortlaunch.base.errors import InputError
from ortlaunch.recipe import dump_recipe_yaml, load_recipe
from ortlaunch.run_folder.checkpoint_hold import lock_chosen_checkpoint_and_yield_step
from ortlaunch.run_folder.device_folder import DeviceFolder
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.tables import tasks
from ortlaunch.tables.tasks import DeviceRequest, ImportRequest

# Fields of the recipe that can change on a device; the others are fixed in the graphs.
_SETTABLE_KEYS = (
    "data",
    "batch.micro_size",
    "train.max_steps",
    "train.epochs",
    "optimizer.learning_rate",
    "schedule",
    "seed",
    "log.every_steps",
)
# Bytes 4 to 7 of onnxruntime's checkpoints.
_CHECKPOINT_MARK = b"ODTC"


def export_for_device(request: DeviceRequest) -> int:
    """Write a model for onnxruntime alone into a new folder; return the status as `run_device_verb_in_process` does."""
    _refuse_existing_path(request.to)
    return run_device_verb_in_process(request, None)


def import_device_checkpoint_into_run(
    artifacts_path: Path,
    device_checkpoint: Path | None,
    run_folder: Path,
    requested_step: int | None,
    new_folder: Path,
) -> int:
    """Write a device's weights as a checkpoint and an export of a run; return as `run_device_verb_in_process` does.

    Args:
        artifacts_path: the folder of the artifacts.
        device_checkpoint: a device's checkpoint, or an average; None: the artifacts' own.
        run_folder: the run's folder.
        requested_step: the run's checkpoint with everything that a device does not train; None: the newest.
        new_folder: a new folder.

    Raises:
        InputError: there are no artifacts, no run or no checkpoint, or `new_folder` exists.
    """
    _refuse_existing_path(str(new_folder))
    device_folder = _complete_artifacts_folder_or_refuse(str(artifacts_path))
    checkpoint_path = device_checkpoint or device_folder.checkpoint
    _refuse_missing_checkpoints([str(checkpoint_path)])
    run = RunDir(run_folder)
    # A training may still run: the checkpoint must not be deleted meanwhile.
    with lock_chosen_checkpoint_and_yield_step(
        run, lambda: existing_requested_or_newest_step_or_refuse(run, requested_step)
    ) as run_step:
        return tasks.run_task_alone(
            ImportRequest(
                str(device_folder), str(checkpoint_path), str(run), run_step, str(new_folder)
            )
        )


def _refuse_existing_path(target_path: str | None) -> None:
    if target_path and Path(target_path).exists():
        raise InputError(
            f"{target_path} exists already; remove it, or give another folder with --to"
        )


def average_client_checkpoints(device_request: DeviceRequest) -> int:
    """Write the mean of several clients' checkpoints; return the status as `run_device_verb_in_process` does."""
    if len(device_request.checkpoints) < 2:
        raise InputError(
            f"an average needs at least two checkpoints; got {len(device_request.checkpoints)}"
        )
    if device_request.weights is not None and len(device_request.weights) != len(
        device_request.checkpoints
    ):
        raise InputError(
            f"--weights: got {len(device_request.weights)} for {len(device_request.checkpoints)} checkpoints"
        )
    return run_device_verb_in_process(device_request, None)


def run_device_verb_in_process(
    device_request: DeviceRequest, recipe_overrides_or_none: tuple[str, ...] | None
) -> int:
    """Start the requested verb, and return the exit status of its process.

    Args:
        recipe_overrides_or_none: changes of the artifacts' recipe, to train or evaluate; None: the verb has none.

    Raises:
        InputError: there are no artifacts, no checkpoint or no folder for the result, or an
            override is not possible on a device.
    """
    device_folder = _complete_artifacts_folder_or_refuse(device_request.artifacts)
    # A training on the device continues its own checkpoint, unless the user gives another one.
    own_checkpoint = str(device_folder.checkpoint)
    start_checkpoint = device_request.checkpoint or own_checkpoint
    device_request = device_request._replace(
        checkpoint=start_checkpoint, to=device_request.to or own_checkpoint
    )
    _refuse_missing_checkpoints(device_request.checkpoints or (start_checkpoint,))
    if device_request.verb in ("train", "average"):
        _create_parent_of_result_file_or_refuse(Path(device_request.to or ""), own_checkpoint)
    if recipe_overrides_or_none is not None:
        device_request = device_request._replace(
            recipe=_recipe_text_with_tokenizer_and_allowed_overrides(
                device_folder, recipe_overrides_or_none
            )
        )
    return tasks.run_task_alone(device_request)


def _complete_artifacts_folder_or_refuse(artifacts_path: str) -> DeviceFolder:
    device_folder = DeviceFolder(artifacts_path)
    if missing := device_folder.missing_files():
        raise InputError(
            f"{device_folder} is not a folder of training artifacts: it lacks {', '.join(missing)}; "
            "ortlaunch export RUN --format ondevice writes one"
        )
    return device_folder


def _refuse_missing_checkpoints(checkpoint_paths: Iterable[str]) -> None:
    for path in checkpoint_paths:
        if not Path(path).is_file():
            raise InputError(f"no such checkpoint: {path}")


def _create_parent_of_result_file_or_refuse(result_path: Path, artifacts_checkpoint: str) -> None:
    """Create the folder of the result before any work: without one, the result would be lost.

    Raises:
        InputError: the file cannot be written, or exists and is no checkpoint.
    """
    if result_path.is_dir():
        raise InputError(
            f"--to: {result_path} is a folder; give the file of a checkpoint, as {result_path / 'checkpoint'}"
        )
    # Replacing a checkpoint is normal, replacing any other file would be a mistake.
    if (
        str(result_path) != artifacts_checkpoint
        and result_path.exists()
        and not _is_checkpoint(result_path)
    ):
        raise InputError(
            f"--to: {result_path} exists already, and is not a checkpoint of onnxruntime; give another file"
        )
    try:
        result_path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(result_path.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise InputError(
            f"--to: cannot write in {result_path.parent}: {error.strerror}; give another file"
        ) from None


def _is_checkpoint(file_path: Path) -> bool:
    with file_path.open("rb") as file:
        return file.read(8)[4:] == _CHECKPOINT_MARK


def _recipe_text_with_tokenizer_and_allowed_overrides(
    device_folder: DeviceFolder, overrides: tuple[str, ...]
) -> str:
    for override in overrides:
        # A leading `+` is no part of the name.
        key = override.partition("=")[0].lstrip("+")
        if not any(key == name or key.startswith(f"{name}.") for name in _SETTABLE_KEYS):
            raise InputError(
                f"{override}: is fixed in the artifacts; on a device these can be set: "
                f"{', '.join(_SETTABLE_KEYS)}"
            )
    tokenizer_override = (
        (f"data.tokenizer={json.dumps(str(device_folder.path.absolute()))}",)
        if device_folder.has_tokenizer
        else ()
    )
    return dump_recipe_yaml(
        load_recipe(device_folder.recipe, (*tokenizer_override, *overrides)).recipe
    )
