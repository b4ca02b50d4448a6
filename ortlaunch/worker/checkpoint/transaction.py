"""Writing of a checkpoint, completely or not at all.

The files are written into step_N.partial, flushed to the disk, and listed in a manifest
(manifest.py). Then the folder is renamed, and COMPLETE is written last.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import ChainMap
from collections.abc import Iterator
from pathlib import Path

from ortlaunch.errors import CheckpointError
from ortlaunch.json_types import Json
from ortlaunch.run_folder.file_sums import (
    SizeAndChecksum,
    flush_and_checksum_files,
    list_files_below,
)
from ortlaunch.run_folder.folder import (
    COMPLETE,
    MANIFEST,
    RunDir,
    read_own_json,
    write_json_atomically,
)
from ortlaunch.run_folder.origin import ORIGIN
from ortlaunch.units import human_bytes
from ortlaunch.worker.checkpoint.complete import complete
from ortlaunch.worker.checkpoint.manifest import manifest_of, newest
from ortlaunch.worker.checkpoint.snapshot import Snapshot, take
from ortlaunch.worker.engine.stepping import Stepper
from ortlaunch.worker.process_group.distributed import DistributedContext


def save(
    run: RunDir, made_by: Json, group: DistributedContext, stepper: Stepper, step: int, state: Json
) -> Path:
    """Write the checkpoint after `step` steps (collective).

    Args:
        run: the run folder.
        made_by: properties that a resuming run compares with its own (run_folder/origin.py); may be
            empty.
        group: all ranks.
        stepper: the training's weights and optimizer.
        step: completed steps.
        state: the training loop's state.

    Raises:
        CheckpointError: it could not be written; earlier checkpoints are unchanged.
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
    """Return the content of this step's checkpoint (collective).

    With `copied`, training may continue before the content is written.

    Raises:
        CheckpointError: it could not be made; all ranks raise the same.
    """
    found = []
    with _agreed(run, group, run.partial_checkpoint_folder(step)):
        taken = take(stepper.named_state(), dict(state), group)
        found.append(taken.copied() if copied else taken)
    return found[0]


def write(
    run: RunDir, made_by: Json, group: DistributedContext, taken: Snapshot, step: int, samples: int
) -> Path:
    """Write a snapshot completely or not at all (collective); arguments and errors as of `save`."""
    folder = run.checkpoint_folder(step)
    partial = run.partial_checkpoint_folder(step)
    with _agreed(run, group, partial):
        if group.rank == 0:
            _begin(run, partial)
            write_json_atomically(partial / ORIGIN, made_by) if made_by else None
    files: dict[str, SizeAndChecksum] = {}
    # Each rank writes its own file, and knows its checksum without reading it again.
    with _agreed(run, group, partial):
        files = taken.write(partial)
    written = dict(ChainMap(*group.gather(files)))
    # Rank 0 sums the files that no rank summed, such as the index.
    with _agreed(run, group, partial):
        if group.rank == 0:
            files_of_all = [str(path.relative_to(partial)) for path in list_files_below(partial)]
            others = [name for name in files_of_all if name not in written]
            files.update(flush_and_checksum_files(partial, others))
    files = dict(ChainMap(*group.gather(files)))
    with _agreed(run, group, partial):
        if group.rank == 0:
            complete(run, step, manifest_of(step, samples, group.size, files))
    return folder


@contextlib.contextmanager
def _agreed(run: RunDir, group: DistributedContext, partial: Path) -> Iterator[None]:
    """Context of a part of a save: if it fails on one rank, it fails on all.

    The files are then removed.

    Raises:
        CheckpointError: the first rank's error; all ranks raise the same.
    """
    wrong = ""
    try:
        yield
    except CheckpointError as error:
        wrong = str(error)
    # OSError comes from Python's writes, RuntimeError from torch's.
    except (OSError, RuntimeError) as error:
        wrong = f"{partial} could not be written: {type(error).__name__}: {error}"
    told = next(filter(None, group.gather(wrong)), "")
    if not told:
        return
    if group.rank == 0:
        # A partial folder would keep the disk full.
        shutil.rmtree(partial, ignore_errors=True)
    there = newest(run)
    raise CheckpointError(f"{told}; {there[1]} is complete" if there else told)


def _begin(run: RunDir, partial: Path) -> None:
    """Create an empty folder; remove incomplete ones of any step."""
    for left in run.checkpoints.glob("step_*"):
        if left.suffix == ".partial" or not (left.suffix or (left / COMPLETE).exists()):
            shutil.rmtree(left, ignore_errors=True)
    _require_room(run)
    partial.mkdir(parents=True)


def _require_room(run: RunDir) -> None:
    """Check that the disk has space for a checkpoint of the last one's size.

    Raises:
        CheckpointError: it has not.
    """
    there = newest(run)
    if there is None:
        return
    needed = sum(file["bytes"] for file in read_own_json(there[1] / MANIFEST)["files"].values())
    free = shutil.disk_usage(run.checkpoints).free
    if free < needed:
        raise CheckpointError(
            f"{run.checkpoints}: {human_bytes(free)} are free, and a checkpoint needs "
            f"{human_bytes(needed)}. Free disk space, or lower checkpoint.keep"
        )
