"""The checkpoint that a run resumes from: its choice, verification and differences to this run.

The control side recorded in resume.json where to start. Only ranks read whole files, and only they
know the data.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ortlaunch.base.errors import CheckpointError, InputError
from ortlaunch.launch_plan import Plan
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder import origin
from ortlaunch.run_folder.folder import MANIFEST, RunDir, read_json_or_raise_damaged
from ortlaunch.run_folder.resume_record import ResumeRecord
from ortlaunch.worker.checkpoint.snapshot import INDEX
from ortlaunch.worker.checkpoint.verify import (
    gather_checkpoint_damage_or_empty,
    newest_checkpoint_seen_by_rank_0,
    rename_damaged_until_newest_intact_or_refuse,
)
from ortlaunch.worker.process_group.distributed import DistributedContext


class CompleteCheckpoint(NamedTuple):
    """A checkpoint that is complete."""

    step: int
    folder: Path

    @property
    def samples(self) -> int:
        """Samples that all steps so far took, with any batch sizes."""
        return int(read_json_or_raise_damaged(self.folder / MANIFEST)["samples"])

    @property
    def streams(self) -> list[list[int]]:
        """The positions of the streamed sources after these samples."""
        stream_positions: list[list[int]] = read_json_or_raise_damaged(self.folder / INDEX)[
            "state"
        ].get("streams", [])
        return stream_positions


def set_aside_damaged_and_choose_own_or_source_checkpoint(
    run: RunDir, group: DistributedContext
) -> CompleteCheckpoint | None:
    """Return the checkpoint to resume from; None if the run starts from the beginning (collective).

    It is the newest undamaged one of this run, else of the run that this one came from.

    Raises:
        CheckpointError: the requested checkpoint is damaged, or all are.
    """
    requested = ResumeRecord.read_or_from_the_beginning(run)
    rename_damaged_until_newest_intact_or_refuse(run, group)
    own_newest = newest_checkpoint_seen_by_rank_0(run, group)
    if own_newest is not None:
        # An exact request (--resume STEP) does not accept an older checkpoint.
        if requested.exact and own_newest[0] < requested.step:
            raise CheckpointError(
                f"the checkpoint of step {requested.step} was requested (--resume), and it is "
                "damaged"
            )
        return CompleteCheckpoint(*own_newest)
    return (
        _choose_intact_checkpoint_of_other_run_or_refuse(requested, group)
        if requested.source
        else None
    )


def _choose_intact_checkpoint_of_other_run_or_refuse(
    resume_record: ResumeRecord, group: DistributedContext
) -> CompleteCheckpoint:
    """Return a checkpoint of another run, whose folder is left unchanged."""
    folder = Path(resume_record.checkpoint or "")
    # Without an exact request it is RUN/checkpoints/step_N. The newest first.
    older_folders = (
        []
        if resume_record.exact
        else [
            path
            for step, path in reversed(RunDir(folder.parents[1]).complete_checkpoints())
            if step < resume_record.step
        ]
    )
    lines = []
    for path in (folder, *older_folders):
        damage_text = gather_checkpoint_damage_or_empty(path, group)
        if not damage_text:
            return CompleteCheckpoint(
                int(read_json_or_raise_damaged(path / MANIFEST)["step"]), path
            )
        lines.append(f"{path} is damaged: {damage_text}")
        group.print_on_rank_0(f"  skipped: {lines[-1]}")
    raise CheckpointError(
        "\n".join([*lines, f"No complete checkpoint was found in {resume_record.source}"])
    )


def print_training_changes_and_refuse_unallowed(
    run: RunDir,
    recipe: Recipe,
    start_checkpoint: CompleteCheckpoint,
    identity_by_part: Mapping[str, Any],
    group: DistributedContext,
) -> None:
    """Report the differences that the control side could not know, such as those of the data.

    If the ranks chose another checkpoint than the control side had read, all differences are
    reported.

    Args:
        run: the run folder.
        recipe: this run's recipe.
        start_checkpoint: the checkpoint to resume from.
        identity_by_part: properties of this training that only ranks know (worker/model/identity.py).
        group: all ranks.

    Raises:
        InputError: the checkpoint is of another training, and no option allows that.
    """
    requested = ResumeRecord.read_or_from_the_beginning(run)
    origin_record = origin.read_checkpoint_origin_or_none(start_checkpoint.folder)
    if origin_record is None or not run.plan.exists():
        return
    changes = origin.recipe_data_and_package_changes_between_origins(
        origin_record, {**origin.build_origin_of_started_run(run, recipe), **identity_by_part}
    )
    if Plan.read(run.plan).traits.evaluates:
        changes = origin.changes_affecting_evaluation(start_checkpoint.folder, changes)
    # The control side has reported all other fields of this checkpoint.
    if requested.checkpoint == os.path.abspath(start_checkpoint.folder):
        unknown = {f"{part}.{name}" for part, values in identity_by_part.items() for name in values}
        changes = [change for change in changes if change.field in unknown]
    allow = requested.allow
    group.print_on_rank_0(*(f"  changed: {change.summary_line(allow)}" for change in changes))
    if refused := [change.summary_line(allow) for change in changes if change.is_refused(allow)]:
        raise InputError(
            f"{start_checkpoint.folder} belongs to a different training: {'; '.join(refused)}"
        )
