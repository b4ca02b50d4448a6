"""Verification of checkpoints before one is loaded; damaged ones are set aside and reported."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ortlaunch.base.errors import CheckpointError
from ortlaunch.run_folder.file_sums import file_difference_text_or_empty
from ortlaunch.run_folder.folder import (
    MANIFEST,
    RunDir,
    first_absent_path,
    read_json_or_raise_damaged,
)
from ortlaunch.worker.checkpoint.completion_mark import manifest_damage_or_empty
from ortlaunch.worker.process_group.distributed import DistributedContext

# Set aside as step_N.broken, step_N.broken1 and so on.
_BROKEN_NAME = re.compile(r"step_(\d+)\.broken\d*")


def rename_damaged_until_newest_intact_or_refuse(run: RunDir, group: DistributedContext) -> None:
    """Verify the newest checkpoint, and older ones until one is undamaged (collective).

    A damaged one is renamed to step_N.broken, so that nobody loads it. Before the run gives up,
    each of those is verified again: an earlier start may have renamed an undamaged one whose disk
    failed for a moment.

    Raises:
        CheckpointError: none is undamaged, and only the user can decide to start anew; or
            one could not be read.
    """
    lines = []
    while newest_complete := newest_checkpoint_seen_by_rank_0(run, group):
        folder = newest_complete[1]
        damage_text = gather_checkpoint_damage_or_empty(folder, group)
        if not damage_text:
            return
        lines.append(f"{folder} is damaged: {damage_text}")
        if group.rank == 0:
            broken_folder = first_absent_path(folder.with_name(f"{folder.name}.broken"))
            os.replace(folder, broken_folder)
            print(f"{lines[-1]}; set aside as {broken_folder.name}", flush=True)
        # No rank lists the folder before it is renamed.
        group.barrier()
    if _rename_back_newest_intact_of_broken(run, group):
        return
    # Also those of earlier starts.
    if broken_names := sorted(path.name for path in run.checkpoints.glob("step_*.broken*")):
        raise CheckpointError(
            "\n".join([*lines, f"No complete checkpoint is left in {run.checkpoints}, but {', '.join(broken_names)}; "
                "give a new --run-dir to start again"])
        )  # fmt: skip


def newest_checkpoint_seen_by_rank_0(
    run: RunDir, group: DistributedContext
) -> tuple[int, Path] | None:
    """Return (step, folder) of the newest checkpoint that rank 0 sees (collective).

    Rank 0 decides, because other hosts may see it later on a shared disk.
    """
    rank_newest = run.newest_complete_checkpoint()
    step, name = group.gather((rank_newest[0], rank_newest[1].name) if rank_newest else (0, ""))[0]
    return (step, run.checkpoints / name) if name else None


def _rename_back_newest_intact_of_broken(run: RunDir, group: DistributedContext) -> bool:
    """Rename the newest undamaged checkpoint among those set aside (collective).

    Returns:
        Whether there was one.
    """
    paths = [
        (match, path)
        for path in run.checkpoints.glob("step_*")
        if (match := _BROKEN_NAME.fullmatch(path.name))
    ]
    names = [
        path.name for match, path in sorted(paths, key=lambda pair: (int(pair[0][1]), pair[1].name))
    ]
    # Rank 0's list counts, as in newest_of_all. The newest comes first.
    for name in reversed(group.gather(names)[0]):
        broken_folder = run.checkpoints / name
        folder = run.checkpoints / name.partition(".")[0]
        if gather_checkpoint_damage_or_empty(broken_folder, group):
            continue
        if group.rank == 0:
            os.replace(broken_folder, folder)
            print(
                f"{broken_folder} is intact when read again: renamed back to {folder.name}",
                flush=True,
            )
        group.barrier()
        return True
    return False


def gather_checkpoint_damage_or_empty(checkpoint_folder: Path, group: DistributedContext) -> str:
    """Return the differences from the manifest, or ""; each rank reads a share (collective).

    Raises:
        CheckpointError: a file could not be read. The file may be intact, and the disk at fault.
    """
    rank_damage = list[str]()
    read_error = ""
    try:
        rank_damage = (
            [damage_text]
            if (damage_text := manifest_damage_or_empty(checkpoint_folder))
            else _damage_texts_of_every_nth_file(checkpoint_folder, group.rank, group.size)
        )
    except OSError as error:
        read_error = f"{error.filename or checkpoint_folder}: {error.strerror}"
    rank_results = group.gather([rank_damage, read_error])
    if errors := list(dict.fromkeys(read_error for _, read_error in rank_results if read_error)):
        raise CheckpointError(
            f"{checkpoint_folder} could not be read, and was not changed: {'; '.join(errors)}\nRun the "
            "same command again once the disk works; if this file alone stays unreadable, "
            "--resume STEP uses an older checkpoint"
        )
    # All ranks check the manifest, so its damage comes several times.
    return "; ".join(dict.fromkeys(text for texts, _ in rank_results for text in texts))


def _damage_texts_of_every_nth_file(
    checkpoint_folder: Path, rank: int, rank_count: int
) -> list[str]:
    files = sorted(read_json_or_raise_damaged(checkpoint_folder / MANIFEST)["files"].items())
    # Every `ranks`-th file, so that all ranks have about as many.
    return [
        damage_text
        for name, file in files[rank::rank_count]
        if (damage_text := file_difference_text_or_empty(checkpoint_folder / name, file))
    ]
