"""Checkpoints: written whole or not at all, read back against their manifest, found newest first.

The files are written into step_N.partial, flushed to the disk, listed in a manifest with size and CRC-32, and renamed;
COMPLETE comes last. A resume reads every file again: a damaged checkpoint is set aside, and the one before it taken.
The sum finds accidents (a cut file, a flipped bit), not people: docs/trust.md.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ortlaunch.errors import CheckpointError
from ortlaunch.plan import BatchPlan
from ortlaunch.recipe import Recipe
from ortlaunch.run.folder import RunDir, read_json, write_json, write_text
from ortlaunch.units import human
from ortlaunch.worker.distributed import DistributedContext
from ortlaunch.worker.stepping import Stepper

_COMPLETE, _MANIFEST = "COMPLETE", "manifest.json"
_BLOCK = 1 << 22
File = dict[str, int]  # bytes, crc32


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
    needed = sum(_size_of(file) for file in read_json(there[1] / _MANIFEST)["files"].values())
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
            found[name] = {"bytes": os.fstat(file.fileno()).st_size, "crc32": _sum(file)}
    return found


def _sum(file: IO[bytes]) -> int:
    total = 0
    while block := file.read(_BLOCK):
        total = zlib.crc32(block, total)
    return total


def _sum_of(path: Path) -> int:
    with open(path, "rb") as file:
        return _sum(file)


def _complete(run: RunDir, step: int, manifest: dict[str, Any]) -> None:
    """Give the folder its name and its mark, in this order also on the disk."""
    folder, partial = run.checkpoint(step), run.partial(step)
    write_json(partial / _MANIFEST, manifest)
    for inside in (partial, *(path for path in partial.rglob("*") if path.is_dir())):
        _flush_folder(inside)
    shutil.rmtree(folder, ignore_errors=True)  # one without its mark, of a version that wrote in place
    os.replace(partial, folder)
    write_text(folder / _COMPLETE, f"{_sum_of(folder / _MANIFEST)}\n")
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
            (folder / _COMPLETE).unlink()  # first, so that nobody takes it while it goes
            shutil.rmtree(folder)


def newest(run: RunDir) -> tuple[int, Path] | None:
    """(step, folder) of the newest checkpoint that was written to its end."""
    found = run.complete_checkpoints()
    return found[-1] if found else None


def set_aside_damaged(run: RunDir, group: DistributedContext) -> None:
    """Read the newest checkpoint again, and the one before it where that is not as it was written (collective).

    A damaged one is renamed to step_N.broken, so that nobody takes it.

    Raises:
        CheckpointError: none is whole; to begin anew instead is for the user to say.
    """
    lines = []
    while folder := _newest_of_all(run, group):
        wrong = _damage(folder, group)
        if not wrong:
            return
        lines.append(f"{folder} is damaged: {wrong}")
        if group.rank == 0:
            aside = _free_name(folder)
            os.replace(folder, aside)
            print(f"{lines[-1]}; set aside as {aside.name}", flush=True)
        group.barrier()
    if broken := sorted(path.name for path in run.checkpoints.glob("step_*.broken*")):  # also an earlier start's
        raise CheckpointError(
            "\n".join([*lines, f"No whole checkpoint is left in {run.checkpoints}, but {', '.join(broken)}; "
                                "give a new --run-dir to begin anew"])
        )  # fmt: skip


def _newest_of_all(run: RunDir, group: DistributedContext) -> Path | None:
    """The newest checkpoint that rank 0 sees, for hosts of a shared disk may see it later."""
    there = newest(run)
    name = group.gather(there[1].name if there else "")[0]
    return run.checkpoints / name if name else None


def _damage(folder: Path, group: DistributedContext) -> str:
    """What differs from the manifest, or nothing; ranks read a share each."""
    mine = [wrong] if (wrong := _damage_of_manifest(folder)) else _damage_of_files(folder, group.rank, group.size)
    found = [text for texts in group.gather(json.dumps(mine)) for text in json.loads(texts)]
    return "; ".join(dict.fromkeys(found))


def _damage_of_files(folder: Path, rank: int, ranks: int) -> list[str]:
    files = sorted(read_json(folder / _MANIFEST)["files"].items())
    return [wrong for name, file in files[rank::ranks] if (wrong := _difference(folder / name, file))]


def _damage_of_manifest(folder: Path) -> str:
    try:
        mark = (folder / _COMPLETE).read_text(encoding="utf-8").strip()
        whole = mark == str(_sum_of(folder / _MANIFEST)) or (not mark and _lists_sizes_alone(folder))
    except (OSError, ValueError) as error:
        return f"{_MANIFEST} or {_COMPLETE} cannot be read: {error}"
    return "" if whole else f"{_MANIFEST} is not as it was written"


def _lists_sizes_alone(folder: Path) -> bool:
    """Whether a version wrote it that had no sums."""
    return all(isinstance(file, int) for file in read_json(folder / _MANIFEST)["files"].values())


def _size_of(file: File | int) -> int:
    return file if isinstance(file, int) else file["bytes"]


def _difference(path: Path, file: File | int) -> str:
    try:
        with open(path, "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size != _size_of(file):
                return f"{path.name} has {size:,} bytes of {_size_of(file):,}"
            return (
                ""
                if isinstance(file, int) or _sum(opened) == file["crc32"]
                else f"{path.name} is not as it was written"
            )
    except OSError as error:
        return f"{path.name}: {error.strerror}"


def _free_name(folder: Path) -> Path:
    names = (folder.with_name(f"{folder.name}.broken{number or ''}") for number in itertools.count())
    return next(name for name in names if not name.exists())


def samples_seen(folder: Path, step: int, batch: BatchPlan) -> int:
    """How many samples the steps up to this checkpoint took, in whatever batches; old ones tell only their steps."""
    seen: int = read_json(folder / _MANIFEST).get("samples", step * batch.global_samples)
    return seen
