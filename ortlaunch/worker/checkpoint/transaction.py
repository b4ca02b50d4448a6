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
from typing import Any

from ortlaunch.errors import CheckpointError
from ortlaunch.recipe import Recipe
from ortlaunch.run.folder import RunDir, read_json, write_json, write_text
from ortlaunch.units import human
from ortlaunch.worker.checkpoint.manifest import COMPLETE, MANIFEST, File, newest, size_of, sum_of, sum_up
from ortlaunch.worker.distributed import DistributedContext
from ortlaunch.worker.stepping import Stepper


def save(
    run: RunDir, recipe: Recipe, group: DistributedContext, stepper: Stepper, step: int, state: dict[str, Any]
) -> Path:
    """Write the checkpoint after `step` steps (collective); older ones beyond `checkpoint.keep` go.

    Raises:
        CheckpointError: it could not be written; what was there before is as it was.
    """
    folder, partial = run.checkpoint(step), run.partial(step)
    if group.rank == 0:
        _require_room(run)
        shutil.rmtree(partial, ignore_errors=True)  # one that was left half written
        partial.mkdir(parents=True)
    group.barrier()
    with _told(run, partial):
        stepper.save(partial, dict(state))
    group.barrier()
    listed = group.gather(json.dumps(_files_in(partial)))[0]  # hosts of a shared disk may see it later
    with _told(run, partial):
        files = _flushed(partial, json.loads(listed)[group.rank :: group.size])
    files = {name: file for found in group.gather(json.dumps(files)) for name, file in json.loads(found).items()}
    if group.rank == 0:
        with _told(run, partial):
            _complete(run, step, {"step": step, "samples": state["samples"], "ranks": group.size, "files": files})
        _prune(run, recipe.checkpoint.keep)
    return folder


@contextlib.contextmanager
def _told(run: RunDir, partial: Path) -> Iterator[None]:
    """A full disk and its like in words."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # either, by who writes
        there = newest(run)
        kept = f"; {there[1]} is whole" if there else ""
        raise CheckpointError(f"{partial} could not be written: {type(error).__name__}: {error}{kept}") from error


def _require_room(run: RunDir) -> None:
    """The disk has room for a checkpoint like the last one.

    Raises:
        CheckpointError: it has not.
    """
    there = newest(run)
    if there is None:
        return
    needed = sum(size_of(file) for file in read_json(there[1] / MANIFEST)["files"].values())
    free = shutil.disk_usage(run.path).free
    if free < needed:
        raise CheckpointError(
            f"{run.checkpoints}: {human(free)} are free, and a checkpoint takes {human(needed)}; {there[1]} is whole. "
            "Make room, or set checkpoint.keep lower"
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


def _complete(run: RunDir, step: int, manifest: dict[str, Any]) -> None:
    """Give the folder its name and its mark, in this order also on the disk."""
    folder, partial = run.checkpoint(step), run.partial(step)
    write_json(partial / MANIFEST, manifest)
    for inside in (partial, *(path for path in partial.rglob("*") if path.is_dir())):
        _flush_folder(inside)
    shutil.rmtree(folder, ignore_errors=True)  # one without its mark, of a version that wrote in place
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


def _prune(run: RunDir, keep: int | None) -> None:
    if keep is not None:
        for _, folder in run.complete_checkpoints()[:-keep]:
            (folder / COMPLETE).unlink()  # first, so that nobody takes it while it goes
            shutil.rmtree(folder)
