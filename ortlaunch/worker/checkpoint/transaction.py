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
from ortlaunch.worker.checkpoint.complete import complete_checkpoint
from ortlaunch.worker.checkpoint.manifest import build_manifest, newest_checkpoint
from ortlaunch.worker.checkpoint.snapshot import Snapshot, rank_snapshot
from ortlaunch.worker.engine.stepping import Stepper
from ortlaunch.worker.process_group.distributed import DistributedContext


def save_checkpoint(
    run: RunDir,
    made_by: Json,
    group: DistributedContext,
    stepper: Stepper,
    step: int,
    loop_state: Json,
) -> Path:
    """Write the checkpoint after `step` steps (collective).

    Args:
        run: the run folder.
        made_by: properties that a resuming run compares with its own (run_folder/origin.py); may be
            empty.
        group: all ranks.
        stepper: the training's weights and optimizer.
        step: completed steps.
        loop_state: the training loop's state.

    Raises:
        CheckpointError: it could not be written; earlier checkpoints are unchanged.
    """
    return write_snapshot(
        run,
        made_by,
        group,
        take_agreed_snapshot(run, group, stepper, step, loop_state),
        step,
        loop_state["samples"],
    )


def take_agreed_snapshot(
    run: RunDir,
    group: DistributedContext,
    stepper: Stepper,
    step: int,
    loop_state: dict[str, object],
    copies_to_host: bool = False,
) -> Snapshot:
    """Return the content of this step's checkpoint (collective).

    With `copies_to_host`, training may continue before the content is written.

    Raises:
        CheckpointError: it could not be made; all ranks raise the same.
    """
    snapshots = []
    with _fail_on_all_ranks(run, group, run.partial_checkpoint_folder(step)):
        step_snapshot = rank_snapshot(stepper.named_state(), dict(loop_state), group)
        snapshots.append(step_snapshot.copy_to_host() if copies_to_host else step_snapshot)
    return snapshots[0]


def write_snapshot(
    run: RunDir,
    made_by: Json,
    group: DistributedContext,
    step_snapshot: Snapshot,
    step: int,
    sample_count: int,
) -> Path:
    """Write a snapshot completely or not at all (collective); arguments and errors as of `save`."""
    folder = run.checkpoint_folder(step)
    partial = run.partial_checkpoint_folder(step)
    with _fail_on_all_ranks(run, group, partial):
        if group.rank == 0:
            _create_empty_partial(run, partial)
            write_json_atomically(partial / ORIGIN, made_by) if made_by else None
    files: dict[str, SizeAndChecksum] = {}
    # Each rank writes its own file, and knows its checksum without reading it again.
    with _fail_on_all_ranks(run, group, partial):
        files = step_snapshot.write_files(partial)
    file_by_name = dict(ChainMap(*group.gather(files)))
    # Rank 0 sums the files that no rank summed, such as the index.
    with _fail_on_all_ranks(run, group, partial):
        if group.rank == 0:
            files_of_all = [str(path.relative_to(partial)) for path in list_files_below(partial)]
            unsummed_files = [name for name in files_of_all if name not in file_by_name]
            files.update(flush_and_checksum_files(partial, unsummed_files))
    files = dict(ChainMap(*group.gather(files)))
    with _fail_on_all_ranks(run, group, partial):
        if group.rank == 0:
            complete_checkpoint(run, step, build_manifest(step, sample_count, group.size, files))
    return folder


@contextlib.contextmanager
def _fail_on_all_ranks(run: RunDir, group: DistributedContext, partial: Path) -> Iterator[None]:
    """Context of a part of a save: if it fails on one rank, it fails on all.

    The files are then removed.

    Raises:
        CheckpointError: the first rank's error; all ranks raise the same.
    """
    rank_error = ""
    try:
        yield
    except CheckpointError as error:
        rank_error = str(error)
    # OSError comes from Python's writes, RuntimeError from torch's.
    except (OSError, RuntimeError) as error:
        rank_error = f"{partial} could not be written: {type(error).__name__}: {error}"
    agreed_error = next(filter(None, group.gather(rank_error)), "")
    if not agreed_error:
        return
    if group.rank == 0:
        # A partial folder would keep the disk full.
        shutil.rmtree(partial, ignore_errors=True)
    last_checkpoint = newest_checkpoint(run)
    raise CheckpointError(
        f"{agreed_error}; {last_checkpoint[1]} is complete" if last_checkpoint else agreed_error
    )


def _create_empty_partial(run: RunDir, partial: Path) -> None:
    """Create an empty folder; remove incomplete ones of any step."""
    for incomplete_folder in run.checkpoints.glob("step_*"):
        if incomplete_folder.suffix == ".partial" or not (
            incomplete_folder.suffix or (incomplete_folder / COMPLETE).exists()
        ):
            shutil.rmtree(incomplete_folder, ignore_errors=True)
    _require_disk_space(run)
    partial.mkdir(parents=True)


def _require_disk_space(run: RunDir) -> None:
    """Check that the disk has space for a checkpoint of the last one's size.

    Raises:
        CheckpointError: it has not.
    """
    last_checkpoint = newest_checkpoint(run)
    if last_checkpoint is None:
        return
    needed_bytes = sum(
        file["bytes"] for file in read_own_json(last_checkpoint[1] / MANIFEST)["files"].values()
    )
    free_bytes = shutil.disk_usage(run.checkpoints).free
    if free_bytes < needed_bytes:
        raise CheckpointError(
            f"{run.checkpoints}: {human_bytes(free_bytes)} are free, and a checkpoint needs "
            f"{human_bytes(needed_bytes)}. Free disk space, or lower checkpoint.keep"
        )
