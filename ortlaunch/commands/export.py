"""`ortlaunch export`: choose the checkpoint and the folder, and start the writing process."""

from __future__ import annotations

from pathlib import Path

from ortlaunch import tasks
from ortlaunch.errors import InputError
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.held import held
from ortlaunch.run_folder.lines import json_lines
from ortlaunch.tasks import ExportRequest, PushRequest

# Values of --format and of --lora.
FORMATS = ("huggingface", "onnx", "ondevice")
LORA = ("merged", "alone")


def export(
    run: RunDir,
    step: int | None,
    to: Path | None,
    form: str,
    push: str | None = None,
    lora: str | None = None,
) -> int:
    """Write a checkpoint as a model, upload it if requested, and return the exit status.

    Raises:
        InputError: the run, checkpoint or format does not exist, or the folder exists already.
    """
    if lora not in (None, *LORA):
        raise InputError(f"--lora: got {lora!r}; one of {', '.join(LORA)}")
    if form not in FORMATS:
        raise InputError(f"--format: got {form!r}; one of {', '.join(FORMATS)}")
    if push and form == "ondevice":
        raise InputError(
            "--push uploads models for transformers and ONNX; --format ondevice is for devices"
        )
    # A training may still run: the checkpoint must not be deleted meanwhile.
    with held(run, lambda: chosen_step(run, step)) as chosen:
        return _export(run, chosen, to, form, push, lora)


def _export(
    run: RunDir, chosen: int, to: Path | None, form: str, push: str | None, lora: str | None
) -> int:
    folder = to or run.exported(chosen, form)
    # Check the access to the hub first: an export takes long.
    if push and (refused := tasks.run_alone(PushRequest(push))):
        return refused
    # An export that exists already only has to be uploaded.
    if push and lora is None and _is_written(run, chosen, folder, form):
        return tasks.run_alone(PushRequest(push, str(run), chosen, str(folder)))
    if folder.exists():
        raise InputError(
            f"{folder} is there already; take it away, or give another folder with --to"
        )
    failed = tasks.run_alone(ExportRequest(str(run), chosen, str(folder), form, lora or ""))
    return (
        failed
        if failed or not push
        else tasks.run_alone(PushRequest(push, str(run), chosen, str(folder)))
    )


def _is_written(run: RunDir, step: int, folder: Path, form: str) -> bool:
    """Whether an earlier command wrote the same export there."""
    if not folder.exists():
        return False
    lines = json_lines(run.exports, "step", "format", "folder").found
    return (step, form, str(folder.absolute())) in [
        (line["step"], line["format"], line["folder"]) for line in lines
    ]


def chosen_step(run: RunDir, step: int | None) -> int:
    """Return the step of the requested checkpoint, or of the newest.

    Raises:
        InputError: the run or checkpoint does not exist.
    """
    if not (run.plan.exists() and run.recipe.exists()):
        raise InputError(f"{run} is no folder of a run: it has no plan.json and recipe.yaml")
    steps = [found for found, _ in run.complete_checkpoints()]
    if not steps:
        raise InputError(f"{run.checkpoints} has no complete checkpoint")
    if step is not None and step not in steps:
        raise InputError(
            f"--step: {run.checkpoints} has no complete checkpoint of step {step}; "
            f"of {_words(steps)}"
        )
    return step or steps[-1]


def _words(steps: list[int]) -> str:
    return ", ".join(map(str, steps))
