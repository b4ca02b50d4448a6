"""Writing a checkpoint: whole or not at all.

The files are written into step_N.partial, flushed to the disk, listed in a manifest with size and CRC-32, and renamed;
COMPLETE comes last.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ortlaunch.errors import CheckpointError
from ortlaunch.json_types import Json
from ortlaunch.run_folder.folder import (
    COMPLETE,
    MANIFEST,
    RunDir,
    read_json,
    write_json,
    write_text,
)
from ortlaunch.run_folder.origin import ORIGIN
from ortlaunch.units import human
from ortlaunch.worker.checkpoint.manifest import File, newest, sum_of, sum_up
from ortlaunch.worker.checkpoint.snapshot import Snapshot, take
from ortlaunch.worker.engine.stepping import Stepper
from ortlaunch.worker.process_group.distributed import DistributedContext


def save(
    run: RunDir, made_by: Json, group: DistributedContext, stepper: Stepper, step: int, state: Json
) -> Path:
    """Write the checkpoint after `step` steps (collective).

    Args:
        made_by: what a run that goes on from it compares itself with (run_folder/origin.py); may be empty.

    Raises:
        CheckpointError: it could not be written; what was there before is as it was.
    """
    return write(
        run, made_by, group, snapshot(run, group, stepper, step, state), step, state["samples"]
    )


def snapshot(
    run: RunDir,
    group: DistributedContext,
    stepper: Stepper,
    step: int,
    state: dict[str, object],
    copied: bool = False,
) -> Snapshot:
    """What the checkpoint of this step will hold (collective); `copied`: training may go on before it is written.

    Raises:
        CheckpointError: on all ranks the same.
    """
    found = []
    with _agreed(run, group, run.partial(step)):
        taken = take(stepper.named_state(), dict(state), group)
        found.append(taken.copied() if copied else taken)
    return found[0]


def write(
    run: RunDir, made_by: Json, group: DistributedContext, taken: Snapshot, step: int, samples: int
) -> Path:
    """Write what was taken, whole or not at all (collective); arguments and errors as of `save`."""
    folder = run.checkpoint(step)
    partial = run.partial(step)
    with _agreed(run, group, partial):
        if group.rank == 0:
            _begin(run, partial)
            write_json(partial / ORIGIN, made_by) if made_by else None
    files: dict[str, File] = {}
    with _agreed(run, group, partial):
        files = taken.write(partial)
    written = {name for found in group.gather(json.dumps(files)) for name in json.loads(found)}
    with _agreed(run, group, partial):
        if group.rank == 0:
            files.update(
                _flushed(partial, [name for name in _files_in(partial) if name not in written])
            )
    files = {
        name: file
        for found in group.gather(json.dumps(files))
        for name, file in json.loads(found).items()
    }
    with _agreed(run, group, partial):
        if group.rank == 0:
            _complete(
                run, step, {"step": step, "samples": samples, "ranks": group.size, "files": files}
            )
    return folder


@contextlib.contextmanager
def _agreed(run: RunDir, group: DistributedContext, partial: Path) -> Iterator[None]:
    """A part of a save: where it fails on one rank it has failed on all, and what was written is taken away.

    Raises:
        CheckpointError: on all ranks the same, in words.
    """
    wrong = ""
    try:
        yield
    except CheckpointError as error:
        wrong = str(error)
    except (OSError, RuntimeError) as error:  # either, by who writes
        wrong = f"{partial} could not be written: {type(error).__name__}: {error}"
    told = next(filter(None, group.gather(wrong)), "")
    if not told:
        return
    if group.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)  # it would fill the disk that it did not fit on
    there = newest(run)
    raise CheckpointError(f"{told}; {there[1]} is whole" if there else told)


def _begin(run: RunDir, partial: Path) -> None:
    """An empty folder; what was left half written goes, whatever its step."""
    for left in run.checkpoints.glob("step_*"):
        if left.suffix == ".partial" or not (left.suffix or (left / COMPLETE).exists()):
            shutil.rmtree(left, ignore_errors=True)
    _require_room(run)
    partial.mkdir(parents=True)


def _require_room(run: RunDir) -> None:
    """The disk has room for a checkpoint like the last one.

    Raises:
        CheckpointError: it has not.
    """
    there = newest(run)
    if there is None:
        return
    needed = sum(file["bytes"] for file in read_json(there[1] / MANIFEST)["files"].values())
    free = shutil.disk_usage(run.checkpoints).free
    if free < needed:
        raise CheckpointError(
            f"{run.checkpoints}: {human(free)} are free, and a checkpoint takes {human(needed)}. Make room, or set "
            "checkpoint.keep lower"
        )


def _files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _flushed(folder: Path, names: list[str]) -> dict[str, File]:
    """Size and sum of some of the files; they are on the disk, not in its cache alone."""
    found = {}
    for name in names:
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
            found[name] = {"bytes": os.fstat(file.fileno()).st_size, "crc32": sum_up(file)}
    return found


def _complete(run: RunDir, step: int, manifest: dict[str, object]) -> None:
    """Give the folder its name and its mark, in this order also on the disk."""
    folder = run.checkpoint(step)
    partial = run.partial(step)
    write_json(partial / MANIFEST, manifest)
    for inside in (partial, *(path for path in partial.rglob("*") if path.is_dir())):
        _flush_folder(inside)
    os.replace(partial, folder)
    write_text(folder / COMPLETE, f"{sum_of(folder / MANIFEST)}\n")
    _flush_folder(folder)
    _flush_folder(run.checkpoints)


def _flush_folder(folder: Path) -> None:
    """Names, too, are on the disk; not all file systems can be asked for it."""
    handle = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):
        os.fsync(handle)
    os.close(handle)
