"""A run as it would be: what `plan` and `--dry-run` show. Starts, measures and writes nothing.

What a person waits for: what only a run takes (supervision, a bench) is not imported before it is asked for.
"""

from __future__ import annotations

import os

from ortlaunch.errors import PlanError
from ortlaunch.planning.describe import describe
from ortlaunch.resolve.prepare import request_of
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.resolve.resume import ResumeOptions
from ortlaunch.run.preparation import check
from ortlaunch.run_folder.folder import RunDir


def dry_run(resolved: ResolvedRun, run: RunDir) -> str:
    """Exactly what a real run would send."""
    return str(request_of(resolved.plan, run))


def before_start(resolved: ResolvedRun, run: RunDir, options: ResumeOptions) -> list[str]:
    """The lines that `train` prints before it starts: where it begins, changes since the checkpoint, the plan.

    Raises:
        InputError, PlanError, MissingDependency: `train` would refuse it.
    """
    options = options.checked()
    beginning, done = check(resolved, run, options)
    above = next(
        path for path in (run.path.absolute(), *run.path.absolute().parents) if path.exists()
    )
    if not os.access(above, os.W_OK | os.X_OK):
        raise PlanError(
            f"{run}: cannot be written: no permission to write to {above}; give another --run-dir"
        )
    return [
        *beginning.lines,
        *([done] if done else []),
        *resolved.notes,
        describe(resolved.plan, resolved.file.recipe),
    ]


def preview(resolved: ResolvedRun) -> ResolvedRun:
    """For showing a plan: engine auto as it would be decided now, without measuring."""
    if resolved.file.recipe.engine.name != "auto":
        return resolved
    from ortlaunch.bench import auto

    return auto.preview(resolved)


def size_notes(resolved: ResolvedRun) -> list[str]:
    """What is to be said of a micro size that is not known yet."""
    if resolved.file.recipe.batch.micro_size != "auto":
        return []
    from ortlaunch.run import micro_size

    return micro_size.note(resolved.plan)
