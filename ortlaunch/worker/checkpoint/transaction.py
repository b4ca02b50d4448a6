"""Writing of a checkpoint, completely or not at all.

The files are written into step_N.partial, flushed to the disk, and listed in a
manifest. Then the folder is renamed, and COMPLETE is written last.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import ChainMap
from collections.abc import Iterator, Mapping
from pathlib import Path

from ortlaunch.base.errors import CheckpointError
from ortlaunch.base.json_types import Json
from ortlaunch.base.units import human_bytes
from ortlaunch.run_folder.file_sums import (
    SizeAndChecksum,
    flush_and_checksum_files,
    list_files_below,
)
from ortlaunch.run_folder.folder import (
    COMPLETE,
    MANIFEST,
    RunDir,
    read_json_or_raise_damaged,
    write_json_atomically,
)
from ortlaunch.run_folder.origin import ORIGIN
from ortlaunch.worker.checkpoint.completion_mark import (
    write_manifest_rename_partial_and_mark_complete,
)
from ortlaunch.worker.checkpoint.snapshot import RankSnapshot, snapshot_of_this_rank
from ortlaunch.worker.engine.stepping import Stepper
from ortlaunch.worker.process_group.distributed import DistributedContext


def write_checkpoint_of_step(
    run: RunDir,
    origin_record: Mapping[str, object],
    group: DistributedContext,
    stepper: Stepper,
    completed_steps: int,
    loop_state: Json,
) -> Path:
    """Write the checkpoint after `completed_steps` steps (collective).

    Args:
        run: the run folder.
        origin_record: properties that a resuming run compares with its own (run_folder/origin.py); may be
            empty.
        group: all ranks.
        stepper: the training's weights and optimizer.
        completed_steps: completed steps.
        loop_state: the training loop's state.

    Raises:
        CheckpointError: it could not be written; earlier checkpoints are unchanged.
    """
    return write_snapshot_as_checkpoint(
        run,
        origin_record,
        group,
        take_snapshot_on_all_ranks(run, group, stepper, completed_steps, loop_state),
        completed_steps,
        loop_state["samples"],
    )


def take_snapshot_on_all_ranks(
    run: RunDir,
    group: DistributedContext,
    stepper: Stepper,
    completed_steps: int,
    loop_state: dict[str, object],
    copies_to_host: bool = False,
) -> RankSnapshot:
    """Return the content of this step's checkpoint (collective).

    With `copies_to_host`, training may continue before the content is written.

    Raises:
        CheckpointError: it could not be made; all ranks raise the same.
    """
    with _remove_files_and_raise_on_all_ranks_if_one_fails(
        run, group, run.partial_checkpoint_folder(completed_steps)
    ):
        step_snapshot = snapshot_of_this_rank(stepper.named_state(), dict(loop_state), group)
        return step_snapshot.copy_to_host() if copies_to_host else step_snapshot


def write_snapshot_as_checkpoint(
    run: RunDir,
    origin_record: Mapping[str, object],
    group: DistributedContext,
    step_snapshot: RankSnapshot,
    completed_steps: int,
    samples_trained: int,
) -> Path:
    """Write a snapshot completely or not at all (collective); arguments and errors as of `save`."""
    folder = run.checkpoint_folder(completed_steps)
    partial = run.partial_checkpoint_folder(completed_steps)
    with _remove_files_and_raise_on_all_ranks_if_one_fails(run, group, partial):
        if group.rank == 0:
            _remove_incomplete_check_space_and_create_partial(run, partial)
            if origin_record:
                write_json_atomically(partial / ORIGIN, origin_record)
    files: dict[str, SizeAndChecksum] = {}
    # Each rank writes its own file, and knows its checksum without reading it again.
    with _remove_files_and_raise_on_all_ranks_if_one_fails(run, group, partial):
        files = step_snapshot.write_rank_file_and_index(partial)
    file_by_name = dict(ChainMap(*group.gather(files)))
    # Rank 0 sums the files that no rank summed, such as the index.
    with _remove_files_and_raise_on_all_ranks_if_one_fails(run, group, partial):
        if group.rank == 0:
            files_of_all = [str(path.relative_to(partial)) for path in list_files_below(partial)]
            unsummed_files = [name for name in files_of_all if name not in file_by_name]
            files.update(flush_and_checksum_files(partial, unsummed_files))
    files = dict(ChainMap(*group.gather(files)))
    with _remove_files_and_raise_on_all_ranks_if_one_fails(run, group, partial):
        if group.rank == 0:
            write_manifest_rename_partial_and_mark_complete(
                run,
                completed_steps,
                {
                    "step": completed_steps,
                    "samples": samples_trained,
                    "ranks": group.size,
                    "files": files,
                },
            )
    return folder


@contextlib.contextmanager
def _remove_files_and_raise_on_all_ranks_if_one_fails(
    run: RunDir, group: DistributedContext, partial_folder: Path
) -> Iterator[None]:
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
        rank_error = f"{partial_folder} could not be written: {type(error).__name__}: {error}"
    agreed_error = next(filter(None, group.gather(rank_error)), "")
    if not agreed_error:
        return
    if group.rank == 0:
        # A partial folder would keep the disk full.
        shutil.rmtree(partial_folder, ignore_errors=True)
    last_checkpoint = run.newest_complete_checkpoint()
    raise CheckpointError(
        f"{agreed_error}; {last_checkpoint[1]} is complete" if last_checkpoint else agreed_error
    )


def _remove_incomplete_check_space_and_create_partial(run: RunDir, partial_folder: Path) -> None:
    for incomplete_folder in run.checkpoints.glob("step_*"):
        if incomplete_folder.suffix == ".partial" or not (
            incomplete_folder.suffix or (incomplete_folder / COMPLETE).exists()
        ):
            shutil.rmtree(incomplete_folder, ignore_errors=True)
    _require_disk_space_of_last_checkpoint_size(run)
    partial_folder.mkdir(parents=True)


def _require_disk_space_of_last_checkpoint_size(run: RunDir) -> None:
    """Check that the disk has space for a checkpoint of the last one's size.

    Raises:
        CheckpointError: it has not.
    """
    last_checkpoint = run.newest_complete_checkpoint()
    if last_checkpoint is None:
        return
    needed_bytes = sum(
        file["bytes"]
        for file in read_json_or_raise_damaged(last_checkpoint[1] / MANIFEST)["files"].values()
    )
    free_bytes = shutil.disk_usage(run.checkpoints).free
    if free_bytes < needed_bytes:
        raise CheckpointError(
            f"{run.checkpoints}: {human_bytes(free_bytes)} are free, and a checkpoint needs "
            f"{human_bytes(needed_bytes)}. Free disk space, or lower checkpoint.keep"
        )
