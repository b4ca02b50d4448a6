"""Verification of checkpoints before one is loaded; damaged ones are set aside and reported."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

from ortlaunch.errors import CheckpointError
from ortlaunch.run_folder.file_sums import difference_from_record
from ortlaunch.run_folder.folder import MANIFEST, RunDir, read_own_json
from ortlaunch.worker.checkpoint.complete import damage_of_mark
from ortlaunch.worker.checkpoint.manifest import newest
from ortlaunch.worker.process_group.distributed import DistributedContext

# Set aside as step_N.broken, step_N.broken1 and so on.
_ASIDE = re.compile(r"step_(\d+)\.broken\d*")


def set_aside_damaged(run: RunDir, group: DistributedContext) -> None:
    """Verify the newest checkpoint, and older ones until one is undamaged (collective).

    A damaged one is renamed to step_N.broken, so that nobody loads it. Before the run gives up,
    each of those is verified again: an earlier start may have renamed an undamaged one whose disk
    failed for a moment.

    Raises:
        CheckpointError: none is undamaged, and only the user can decide to start anew; or
            one could not be read.
    """
    lines = []
    while there := newest_of_all(run, group):
        folder = there[1]
        wrong = damage(folder, group)
        if not wrong:
            return
        lines.append(f"{folder} is damaged: {wrong}")
        if group.rank == 0:
            aside = _free_name(folder)
            os.replace(folder, aside)
            print(f"{lines[-1]}; set aside as {aside.name}", flush=True)
        # No rank lists the folder before it is renamed.
        group.barrier()
    if _restored(run, group):
        return
    # Also those of earlier starts.
    if broken := sorted(path.name for path in run.checkpoints.glob("step_*.broken*")):
        raise CheckpointError(
            "\n".join([*lines, f"No complete checkpoint is left in {run.checkpoints}, but {', '.join(broken)}; "
                "give a new --run-dir to start again"])
        )  # fmt: skip


def newest_of_all(run: RunDir, group: DistributedContext) -> tuple[int, Path] | None:
    """Return (step, folder) of the newest checkpoint that rank 0 sees (collective).

    Rank 0 decides, because other hosts may see it later on a shared disk.
    """
    there = newest(run)
    step, name = group.gather((there[0], there[1].name) if there else (0, ""))[0]
    return (step, run.checkpoints / name) if name else None


def _restored(run: RunDir, group: DistributedContext) -> bool:
    """Rename the newest undamaged checkpoint among those set aside (collective).

    Returns:
        Whether there was one.
    """
    paths = [
        (match, path)
        for path in run.checkpoints.glob("step_*")
        if (match := _ASIDE.fullmatch(path.name))
    ]
    names = [
        path.name for match, path in sorted(paths, key=lambda pair: (int(pair[0][1]), pair[1].name))
    ]
    # Rank 0's list counts, as in newest_of_all. The newest comes first.
    for name in reversed(group.gather(names)[0]):
        aside = run.checkpoints / name
        folder = run.checkpoints / name.partition(".")[0]
        if damage(aside, group):
            continue
        if group.rank == 0:
            os.replace(aside, folder)
            print(f"{aside} is intact when read again: renamed back to {folder.name}", flush=True)
        group.barrier()
        return True
    return False


def damage(folder: Path, group: DistributedContext) -> str:
    """Return the differences from the manifest, or ""; each rank reads a share (collective).

    Raises:
        CheckpointError: a file could not be read. The file may be intact, and the disk at fault.
    """
    mine = list[str]()
    unread = ""
    try:
        mine = (
            [wrong]
            if (wrong := damage_of_mark(folder))
            else _damage_of_files(folder, group.rank, group.size)
        )
    except OSError as error:
        unread = f"{error.filename or folder}: {error.strerror}"
    found = group.gather([mine, unread])
    if errors := list(dict.fromkeys(unread for _, unread in found if unread)):
        raise CheckpointError(
            f"{folder} could not be read, and was not changed: {'; '.join(errors)}\nRun the "
            "same command again once the disk works; if this file alone stays unreadable, "
            "--resume STEP uses an older checkpoint"
        )
    # All ranks check the manifest, so its damage comes several times.
    return "; ".join(dict.fromkeys(text for texts, _ in found for text in texts))


def _damage_of_files(folder: Path, rank: int, ranks: int) -> list[str]:
    files = sorted(read_own_json(folder / MANIFEST)["files"].items())
    # Every `ranks`-th file, so that all ranks have about as many.
    return [
        wrong
        for name, file in files[rank::ranks]
        if (wrong := difference_from_record(folder / name, file))
    ]


def _free_name(folder: Path) -> Path:
    names = (
        folder.with_name(f"{folder.name}.broken{number or ''}") for number in itertools.count()
    )
    return next(name for name in names if not name.exists())
