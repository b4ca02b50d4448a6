"""`ortlaunch export`: which checkpoint goes where, and the process that writes it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from ortlaunch import start
from ortlaunch.errors import InputError
from ortlaunch.run.folder import RunDir

FORMATS = ("huggingface", "onnx")


def export(run: RunDir, step: int | None, to: Path | None, form: str) -> int:
    """Write a checkpoint as a model; returns the exit status of the process that does it.

    Raises:
        InputError: there is no such run, checkpoint or format, or the folder is there already.
    """
    if form not in FORMATS:
        raise InputError(f"--format: got {form!r}; one of {', '.join(FORMATS)}")
    chosen = chosen_step(run, step)
    folder = to or run.exported(chosen, form)
    if folder.exists():
        raise InputError(f"{folder} is there already; take it away, or give another folder with --to")
    words = start.command("ortlaunch.worker.export_checkpoint")
    return subprocess.run([*words, str(run), str(chosen), str(folder), form], check=False).returncode


def chosen_step(run: RunDir, step: int | None) -> int:
    """The checkpoint that was asked for, or the newest.

    Raises:
        InputError: there is no such run or checkpoint.
    """
    if not (run.plan.exists() and run.recipe.exists()):
        raise InputError(f"{run} is no folder of a run: it has no plan.json and recipe.yaml")
    steps = [found for found, _ in run.complete_checkpoints()]
    if not steps:
        raise InputError(f"{run.checkpoints} has no complete checkpoint")
    if step is not None and step not in steps:
        raise InputError(f"--step: {run.checkpoints} has no complete checkpoint of step {step}; of {_words(steps)}")
    return step or steps[-1]


def _words(steps: list[int]) -> str:
    return ", ".join(map(str, steps))
