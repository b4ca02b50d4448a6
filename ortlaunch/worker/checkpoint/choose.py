"""The checkpoint that a run goes on from, read again before it is taken; and what has changed since, where it matters.

The control side said in resume.json where to begin; only ranks read whole files, and only they know the data.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ortlaunch.errors import CheckpointError
from ortlaunch.plan import Plan
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder import origin
from ortlaunch.run_folder.folder import MANIFEST, RunDir, read_json
from ortlaunch.run_folder.resume_record import ResumeRecord
from ortlaunch.worker.checkpoint.damage import damage, newest_of_all, set_aside_damaged
from ortlaunch.worker.checkpoint.manifest import samples_seen
from ortlaunch.worker.process_group.distributed import DistributedContext


class CompleteCheckpoint(NamedTuple):
    """A checkpoint that is whole."""

    step: int
    folder: Path

    @property
    def samples(self) -> int:
        """How many samples its steps took, in whatever batches."""
        return samples_seen(self.folder)


def choose(run: RunDir, group: DistributedContext) -> CompleteCheckpoint | None:
    """The newest whole one of this run, else of where it came from (collective); None: it begins.

    Raises:
        CheckpointError: what was asked for is damaged, or all are.
    """
    requested = ResumeRecord.read(run)
    set_aside_damaged(run, group)
    own = newest_of_all(run, group)
    if own is not None:
        if requested.exact and own[0] < requested.step:
            raise CheckpointError(
                f"the checkpoint of step {requested.step} was asked for (--resume), and it is damaged"
            )
        return CompleteCheckpoint(*own)
    return _elsewhere(requested, group) if requested.source else None


def _elsewhere(requested: ResumeRecord, group: DistributedContext) -> CompleteCheckpoint:
    """Another run's, which is left as it is, down to the last file."""
    folder = Path(requested.checkpoint or "")
    there = [folder, *(path for _, path in reversed(_older(folder)))]
    lines = []
    for path in there[:1] if requested.exact else there:
        wrong = damage(path, group)
        if not wrong:
            return CompleteCheckpoint(int(read_json(path / MANIFEST)["step"]), path)
        lines.append(f"{path} is damaged: {wrong}")
        if group.rank == 0:
            print(f"  skipped: {lines[-1]}", flush=True)
    raise CheckpointError(
        "\n".join([*lines, f"No whole checkpoint was found in {requested.source}"])
    )


def _older(folder: Path) -> list[tuple[int, Path]]:
    """Complete ones beside a checkpoint, older than that."""
    found = RunDir(folder.parents[1]).complete_checkpoints()
    return (
        found[: [path for _, path in found].index(folder)]
        if folder in [path for _, path in found]
        else []
    )


def explain(
    run: RunDir,
    recipe: Recipe,
    found: CompleteCheckpoint,
    identity: Mapping[str, Any],
    group: DistributedContext,
) -> None:
    """Say what the control side could not know: its data, and all of another checkpoint than it had looked at.

    Args:
        identity: what ranks alone know of this training (worker/model/identity.py).

    Raises:
        CheckpointError: it would be another training, and nobody has allowed that.
    """
    requested = ResumeRecord.read(run)
    made = origin.read(found.folder)
    if made is None or not run.plan.exists():
        return
    now = {**origin.of_run(run, recipe), **identity}
    changes = origin.differences(made, now)
    if Plan.read(run.plan).traits.evaluates:
        changes = origin.of_evaluation(found.folder, changes)
    if requested.checkpoint == os.path.abspath(found.folder):
        unknown = {f"{part}.{name}" for part, values in identity.items() for name in values}
        changes = [change for change in changes if change.field in unknown]
    allow = requested.allow
    if group.rank == 0:
        print(
            *(f"  changed: {change.line(allow)}" for change in changes),
            sep="\n",
            end="\n" if changes else "",
        )
    refused = [change.line(allow) for change in changes if change.is_refused(allow)]
    if refused:
        raise CheckpointError(
            "\n  ".join([f"{found.folder} was written by another training:", *refused])
        )
