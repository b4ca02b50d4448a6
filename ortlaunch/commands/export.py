"""`ortlaunch export`: choose the checkpoint and the folder, and start the writing process."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple, TextIO

from ortlaunch import tasks
from ortlaunch.errors import InputError
from ortlaunch.run_folder.folder import RunDir, read_own_json
from ortlaunch.run_folder.held import hold_checkpoint
from ortlaunch.run_folder.lines import read_json_lines
from ortlaunch.tasks import CheckpointStep, ExportRequest, PushRequest

# Values of --format and of --lora.
FORMATS = ("huggingface", "onnx", "ondevice")
LORA = ("merged", "alone")


class ExportOptions(NamedTuple):
    """The options of `ortlaunch export`, with its defaults; None: the option is not given."""

    step: CheckpointStep = None
    to: Path | None = None
    form: str = "huggingface"
    push: str | None = None
    lora: str | None = None


def export(run: RunDir, options: ExportOptions, shown: Collection[str] = ()) -> Path:
    """Write a checkpoint as a model, upload it if requested, and return its folder.

    Args:
        shown: streams of the processes that go to the terminal: `stdout`, `stderr`.

    Raises:
        InputError: the run, checkpoint or format does not exist, or the folder exists already.
        RunError: the process that writes or uploads failed.
    """
    step, _, form, push, lora = options
    if lora not in (None, *LORA):
        raise InputError(f"--lora: got {lora!r}; one of {', '.join(LORA)}")
    if form not in FORMATS:
        raise InputError(f"--format: got {form!r}; one of {', '.join(FORMATS)}")
    if push and form == "ondevice":
        raise InputError(
            "--push uploads a model in --format huggingface or onnx; got --format ondevice"
        )
    # If the training still runs, it must not delete the checkpoint during the export.
    with hold_checkpoint(run, lambda: chosen_step(run, step)) as chosen:
        if shown:
            print_best(run, step, chosen, sys.stdout)
        return _export(run, options, chosen, shown)


def _export(run: RunDir, options: ExportOptions, step: int, shown: Collection[str]) -> Path:
    _, to, form, push, lora = options
    folder = to or run.export_folder(step, form)
    # An export takes long, so the access to the hub is checked first.
    if push:
        tasks.run_task_for_answer(PushRequest(push), shown)
    # For an upload the export of an earlier command is good enough.
    if not (push and lora is None and _is_written(run, step, folder, form)):
        if folder.exists():
            raise InputError(
                f"{folder} exists already; remove it, or give another folder with --to"
            )
        tasks.run_task_for_answer(
            ExportRequest(str(run), step, str(folder), form, lora or ""), shown
        )
    if push:
        tasks.run_task_for_answer(PushRequest(push, str(run), step, str(folder)), shown)
    return folder


def _is_written(run: RunDir, step: int, folder: Path, form: str) -> bool:
    """Whether an earlier command wrote the same export there."""
    if not folder.exists():
        return False
    lines = read_json_lines(run.exports, "step", "format", "folder").values
    return (step, form, str(folder.absolute())) in [
        (line["step"], line["format"], line["folder"]) for line in lines if not line.get("error")
    ]


def best_step(run: RunDir) -> int | None:
    """Return the step of the best checkpoint that is kept; None before the end of a training."""
    best = read_own_json(run.summary).get("best") if run.summary.exists() else None
    return best["step"] if best and best["step"] in dict(run.complete_checkpoints()) else None


def print_best(run: RunDir, step: CheckpointStep, newest: int, file: TextIO) -> None:
    """Print a line if no step is requested, and the best checkpoint is not the newest."""
    best = best_step(run)
    if step is None and best not in (None, newest):
        note = f"step {newest} is the newest checkpoint; the best is of step {best}: --step best"
        print(note, file=file, flush=True)


def chosen_step(run: RunDir, step: CheckpointStep) -> int:
    """Return the step of the requested checkpoint, or of the newest.

    Raises:
        InputError: the run or checkpoint does not exist.
    """
    if not (run.plan.exists() and run.recipe.exists()):
        raise InputError(f"{run} is not a run folder: it has no plan.json and recipe.yaml")
    steps = [found for found, _ in run.complete_checkpoints()]
    if not steps:
        raise InputError(f"{run.checkpoints} has no complete checkpoint")
    if step == "best" and (step := best_step(run)) is None:
        raise InputError(
            f"--step best: {run.summary} names no best checkpoint: checkpoint.keep_best is not "
            f"set, or the training has not ended; {run.checkpoints} has steps "
            f"{', '.join(map(str, steps))}"
        )
    if step is not None and step not in steps:
        raise InputError(
            f"--step: {run.checkpoints} has no complete checkpoint of step {step}; "
            f"it has steps {', '.join(map(str, steps))}"
        )
    return step or steps[-1]
