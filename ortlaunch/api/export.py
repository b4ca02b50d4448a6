"""`ortlaunch export`: choose the checkpoint and the folder, and start the writing process."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple, TextIO

from ortlaunch.base.errors import InputError
from ortlaunch.run_folder.checkpoint_hold import lock_chosen_checkpoint_and_yield_step
from ortlaunch.run_folder.folder import RunDir, read_json_or_raise_damaged
from ortlaunch.run_folder.lines import read_json_lines_with_keys
from ortlaunch.tables import tasks
from ortlaunch.tables.tasks import CheckpointStep, ExportRequest, PushRequest

# Values of --format and of --lora.
EXPORT_FORMATS = ("huggingface", "onnx", "ondevice")
LORA_FORMS = ("merged", "alone")
# Folders from RUN/exports/step_N_onnx/model.onnx up to RUN.
_SEARCHED_PARENTS = 3


class ExportOptions(NamedTuple):
    """The options of `ortlaunch export`, with its defaults; None: the option is not given."""

    step: CheckpointStep = None
    target_folder: Path | None = None
    export_format: str = "huggingface"
    push_target: str | None = None
    lora_form: str | None = None


def export_checkpoint_and_push_if_requested(
    run: RunDir, export_options: ExportOptions, inherited_streams: Collection[str] = ()
) -> Path:
    """Write a checkpoint as a model, upload it if requested, and return its folder.

    Args:
        inherited_streams: streams of the processes that go to the terminal: `stdout`, `stderr`.

    Raises:
        InputError: the run, checkpoint or format does not exist, or the folder exists already.
        RunError: the process that writes or uploads failed.
    """
    export_format = export_options.export_format
    if export_options.lora_form not in (None, *LORA_FORMS):
        raise InputError(
            f"--lora: got {export_options.lora_form!r}; one of {', '.join(LORA_FORMS)}"
        )
    if export_format not in EXPORT_FORMATS:
        raise InputError(f"--format: got {export_format!r}; one of {', '.join(EXPORT_FORMATS)}")
    if export_options.push_target and export_format == "ondevice":
        raise InputError(
            "--push uploads a model in --format huggingface or onnx; got --format ondevice"
        )
    # If the training still runs, it must not delete the checkpoint during the export.
    with lock_chosen_checkpoint_and_yield_step(
        run, lambda: existing_requested_or_newest_step_or_refuse(run, export_options.step)
    ) as checkpoint_step:
        if inherited_streams:
            print_hint_if_best_is_not_newest(run, export_options.step, checkpoint_step, sys.stdout)
        return _write_export_or_reuse_recorded_if_pushing(
            run, export_options, checkpoint_step, inherited_streams
        )


def _write_export_or_reuse_recorded_if_pushing(
    run: RunDir,
    export_options: ExportOptions,
    checkpoint_step: int,
    inherited_streams: Collection[str],
) -> Path:
    export_format, push_target = export_options.export_format, export_options.push_target
    export_folder = export_options.target_folder or run.export_folder(
        checkpoint_step, export_format
    )
    # An export takes long, so the access to the hub is checked first.
    if push_target:
        tasks.run_task_and_return_stdout_or_raise(PushRequest(push_target), inherited_streams)
    # For an upload the export of an earlier command is good enough.
    if not (
        push_target
        and export_options.lora_form is None
        and _has_recorded_same_export(run, checkpoint_step, export_folder, export_format)
    ):
        if export_folder.exists():
            raise InputError(
                f"{export_folder} exists already; remove it, or give another folder with --to"
            )
        tasks.run_task_and_return_stdout_or_raise(
            ExportRequest(
                str(run),
                checkpoint_step,
                str(export_folder),
                export_format,
                export_options.lora_form or "",
            ),
            inherited_streams,
        )
    if push_target:
        tasks.run_task_and_return_stdout_or_raise(
            PushRequest(push_target, str(run), checkpoint_step, str(export_folder)),
            inherited_streams,
        )
    return export_folder


def _has_recorded_same_export(
    run: RunDir, checkpoint_step: int, export_folder: Path, export_format: str
) -> bool:
    """Whether an earlier command wrote the same export there."""
    if not export_folder.exists():
        return False
    export_lines = read_json_lines_with_keys(run.exports, "step", "format", "folder").values
    return (checkpoint_step, export_format, str(export_folder.absolute())) in [
        (line["step"], line["format"], line["folder"])
        for line in export_lines
        if not line.get("error")
    ]


def enclosing_run_or_none(model_path: Path) -> RunDir | None:
    """Return the run whose folder contains an exported model."""
    enclosing_runs = map(RunDir, model_path.absolute().parents[:_SEARCHED_PARENTS])
    return next((run for run in enclosing_runs if run.has_plan_and_recipe), None)


def kept_best_step_or_none(run: RunDir) -> int | None:
    """Return the step of the best checkpoint that is kept; None before the end of a training."""
    best_record = (
        read_json_or_raise_damaged(run.summary).get("best") if run.summary.exists() else None
    )
    return (
        best_record["step"]
        if best_record and best_record["step"] in dict(run.complete_checkpoints())
        else None
    )


def print_hint_if_best_is_not_newest(
    run: RunDir, requested_step: CheckpointStep, newest_step: int, output_file: TextIO
) -> None:
    """Print a line if no step is requested, and the best checkpoint is not the newest."""
    best_step_number = kept_best_step_or_none(run)
    if requested_step is None and best_step_number not in (None, newest_step):
        note = f"step {newest_step} is the newest checkpoint; the best is of step {best_step_number}: --step best"
        print(note, file=output_file, flush=True)


def existing_requested_or_newest_step_or_refuse(run: RunDir, requested_step: CheckpointStep) -> int:
    """Return the step of the requested checkpoint, or of the newest.

    Raises:
        InputError: the run or checkpoint does not exist.
    """
    if not run.has_plan_and_recipe:
        raise InputError(f"{run} is not a run folder: it has no plan.json and recipe.yaml")
    complete_steps = [complete_step for complete_step, _ in run.complete_checkpoints()]
    if not complete_steps:
        raise InputError(f"{run.checkpoints} has no complete checkpoint")
    if requested_step == "best" and (requested_step := kept_best_step_or_none(run)) is None:
        raise InputError(
            f"--step best: {run.summary} names no best checkpoint: checkpoint.keep_best is not "
            f"set, or the training has not ended; {run.checkpoints} has steps "
            f"{', '.join(map(str, complete_steps))}"
        )
    if requested_step is not None and requested_step not in complete_steps:
        raise InputError(
            f"--step: {run.checkpoints} has no complete checkpoint of step {requested_step}; "
            f"it has steps {', '.join(map(str, complete_steps))}"
        )
    return requested_step or complete_steps[-1]
