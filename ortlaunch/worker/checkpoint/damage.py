"""Reading checkpoints again before one is taken up: what is not as it was written is set aside, and told."""

from __future__ import annotations

import itertools
import json
import os
import re
from pathlib import Path

from ortlaunch.errors import CheckpointError
from ortlaunch.run_folder.folder import COMPLETE, MANIFEST, RunDir, read_json
from ortlaunch.worker.checkpoint.manifest import File, newest, sum_of, sum_up
from ortlaunch.worker.process_group.distributed import DistributedContext

_ABSENT = (
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
)  # other errors of reading say nothing of a file
_ASIDE = re.compile(r"step_(\d+)\.broken\d*")


def set_aside_damaged(run: RunDir, group: DistributedContext) -> None:
    """Read the newest checkpoint again, and the one before it where that is not as it was written (collective).

    A damaged one is renamed to step_N.broken, so that nobody takes it. Before the run gives up, each of those is read
    again: an earlier start may have renamed a whole one, whose disk failed for a moment.

    Raises:
        CheckpointError: none is whole, and to begin anew instead is for the user to say; or one could not be read.
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
        group.barrier()
    if _restored(run, group):
        return
    if broken := sorted(
        path.name for path in run.checkpoints.glob("step_*.broken*")
    ):  # also an earlier start's
        raise CheckpointError(
            "\n".join([*lines, f"No whole checkpoint is left in {run.checkpoints}, but {', '.join(broken)}; "
                                "give a new --run-dir to begin anew"])
        )  # fmt: skip


def newest_of_all(run: RunDir, group: DistributedContext) -> tuple[int, Path] | None:
    """(step, folder) of the newest that rank 0 sees, for hosts of a shared disk may see it later (collective)."""
    there = newest(run)
    name = group.gather(f"{there[0]} {there[1].name}" if there else "")[0]
    step, _, folder = name.partition(" ")
    return (int(step), run.checkpoints / folder) if name else None


def _restored(run: RunDir, group: DistributedContext) -> bool:
    """Give the newest whole one of those set aside its name back (collective); whether there was one."""
    paths = [
        (match, path)
        for path in run.checkpoints.glob("step_*")
        if (match := _ASIDE.fullmatch(path.name))
    ]
    names = [
        path.name for match, path in sorted(paths, key=lambda pair: (int(pair[0][1]), pair[1].name))
    ]
    for name in reversed(json.loads(group.gather(json.dumps(names))[0])):
        aside = run.checkpoints / name
        folder = run.checkpoints / name.partition(".")[0]
        if damage(aside, group):
            continue
        if group.rank == 0:
            os.replace(aside, folder)
            print(f"{aside} is whole when read again: renamed back to {folder.name}", flush=True)
        group.barrier()
        return True
    return False


def damage(folder: Path, group: DistributedContext) -> str:
    """What differs from the manifest, or nothing; ranks read a share each (collective).

    Raises:
        CheckpointError: a file could not be read, for which the disk may be at fault: nothing is known of the file.
    """
    mine = list[str]()
    unread = ""
    try:
        mine = (
            [wrong]
            if (wrong := _damage_of_manifest(folder))
            else _damage_of_files(folder, group.rank, group.size)
        )
    except OSError as error:
        unread = f"{error.filename or folder}: {error.strerror}"
    found = [json.loads(text) for text in group.gather(json.dumps([mine, unread]))]
    if errors := list(dict.fromkeys(unread for _, unread in found if unread)):
        raise CheckpointError(
            f"{folder} could not be read, and was left as it is: {'; '.join(errors)}\nRun the same command again once "
            "the disk works; if this file alone stays unreadable, --resume STEP takes an older checkpoint"
        )
    return "; ".join(dict.fromkeys(text for texts, _ in found for text in texts))


def _damage_of_files(folder: Path, rank: int, ranks: int) -> list[str]:
    files = sorted(read_json(folder / MANIFEST)["files"].items())
    return [
        wrong for name, file in files[rank::ranks] if (wrong := _difference(folder / name, file))
    ]


def _damage_of_manifest(folder: Path) -> str:
    try:
        whole = (folder / COMPLETE).read_text(encoding="utf-8").strip() == str(
            sum_of(folder / MANIFEST)
        )
    except (*_ABSENT, ValueError) as error:
        return f"{MANIFEST} or {COMPLETE} cannot be read: {error}"
    return "" if whole else f"{MANIFEST} is not as it was written"


def _difference(path: Path, file: File) -> str:
    try:
        with open(path, "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size != file["bytes"]:
                return f"{path.name} has {size:,} bytes of {file['bytes']:,}"
            return (
                "" if sum_up(opened) == file["crc32"] else f"{path.name} is not as it was written"
            )
    except _ABSENT as error:
        return f"{path.name}: {error.strerror}"


def _free_name(folder: Path) -> Path:
    names = (
        folder.with_name(f"{folder.name}.broken{number or ''}") for number in itertools.count()
    )
    return next(name for name in names if not name.exists())
