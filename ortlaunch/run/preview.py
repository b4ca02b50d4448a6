"""Show a run for `plan` and `--dry-run`. Starts, measures and writes nothing.

A person waits for the output, so modules that only a run needs (supervision, a bench) are imported
on use.
"""

from __future__ import annotations

import os

from ortlaunch.errors import PlanError
from ortlaunch.planning.describe import describe
from ortlaunch.resolve.prepare import request_of
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.resolve.resume import ResumeOptions
from ortlaunch.run.preparation import check
from ortlaunch.run_folder.folder import RunDir, read_json


def before_start(
    resolved: ResolvedRun, run: RunDir, options: ResumeOptions
) -> tuple[list[str], str]:
    """Return the lines that `train` prints before its start, and the command that would run.

    The lines give the beginning, the changes since the checkpoint, and the plan.

    Raises:
        InputError, PlanError, MissingDependency: `train` would refuse the run.
    """
    options = options.checked()
    resolved, beginning, done = check(resolved, run, options)
    resolved = preview(resolved)
    command = str(request_of(resolved.plan, run))
    # The nearest folder that exists; the folders below it would be created in it.
    above = next(
        path for path in (run.path.absolute(), *run.path.absolute().parents) if path.exists()
    )
    # A preview creates no folder, so the permission to create it is checked here.
    if not os.access(above, os.W_OK | os.X_OK):
        raise PlanError(
            f"{run}: cannot be created: no permission to write to {above}; give another --run-dir"
        )
    lines = [
        *beginning.lines,
        *([done] if done else []),
        *resolved.notes,
        describe(resolved.plan, resolved.file.recipe),
        *_lengths(run),
    ]
    return lines, command


def _lengths(run: RunDir) -> list[str]:
    """Return the steps that lengths in epochs came to, where the run began before."""
    if not run.steps.exists():
        return []
    found = (f"{name.replace('_', ' ')} {value}" for name, value in read_json(run.steps).items())
    return [f"as this run began ({run.steps.name}): {', '.join(found)}"]


def preview(resolved: ResolvedRun) -> ResolvedRun:
    """Return the run with the engine that `auto` would choose now, without measuring."""
    if resolved.file.recipe.engine.name != "auto":
        return resolved
    from ortlaunch.bench import auto

    return auto.preview(resolved)


def size_notes(resolved: ResolvedRun) -> list[str]:
    """Return notes on a micro size that is not known yet."""
    if resolved.file.recipe.batch.micro_size != "auto":
        return []
    from ortlaunch.run import micro_size

    return micro_size.note(resolved.plan)
