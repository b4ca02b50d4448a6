"""A run as it would be: what `plan` and `--dry-run` show. Starts, measures and writes nothing.

What a person waits for: what only a run takes (supervision, a bench) is not imported before it is asked for.
"""

from __future__ import annotations

from ortlaunch.run.folder import RunDir
from ortlaunch.run.prepare import request_of
from ortlaunch.run.resolve import ResolvedRun


def dry_run(resolved: ResolvedRun, run: RunDir) -> str:
    """Exactly what a real run would send."""
    return str(request_of(resolved.plan, run))


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
