"""The end of a run after a stop request: its record, once the checkpoint is complete."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ortlaunch.base.errors import CheckpointError, NotSaved
from ortlaunch.run_folder.folder import COMPLETE, read_json_or_raise_damaged, write_json_atomically
from ortlaunch.run_folder.records import Stopped, json_values_of_record
from ortlaunch.worker.checkpoint import CheckpointSaver
from ortlaunch.worker.session import Session
from ortlaunch.worker.supervision.requests import RankRequest


def write_and_print_stop_record_if_stopped(
    session: Session, rank_request: RankRequest, completed_steps: int
) -> RankRequest:
    """Write stopped.json on rank 0, if a stop was requested and this step's checkpoint is complete.

    Raises:
        NotSaved: the checkpoint is not complete.
    """
    if not rank_request.stops:
        return rank_request
    steps = session.recipe.train.steps
    folder = session.run.checkpoint_folder(completed_steps)
    # Rank 0's answer counts: hosts may see a shared file system in different states.
    if not session.group.gather_numbers([(folder / COMPLETE).exists()])[0][0]:
        raise _not_saved_error(session, rank_request, "see NOT SAVED above")
    if session.group.rank == 0:
        stop_record = Stopped(
            completed_steps,
            steps,
            _stop_requester_text(session, rank_request),
            rank_request.exit_status,
        )
        write_json_atomically(session.run.stopped, json_values_of_record(stop_record))
        print(
            f"stopped by {stop_record.by} after step {completed_steps} of {steps}, saved: {folder}",
            flush=True,
        )
    # No rank exits before stopped.json is written.
    session.group.barrier()
    return rank_request


@contextlib.contextmanager
def remove_save_request_after_save(
    session: Session, saving: CheckpointSaver, rank_request: RankRequest
) -> Iterator[None]:
    """Context of a checkpoint's save: answer its request, and end the run if a stop's save fails.

    Raises:
        NotSaved: there is nothing to continue from at this step.
    """
    try:
        yield
    except CheckpointError as error:
        if not rank_request.stops:
            raise
        raise _not_saved_error(session, rank_request, str(error)) from error
    if session.group.rank == 0 and saving.does_save_answer_request(rank_request):
        session.run.save_request.unlink(missing_ok=True)


def _not_saved_error(session: Session, rank_request: RankRequest, reason: str) -> NotSaved:
    return NotSaved(
        # 128 + N is a shell's status for an end by signal N.
        f"stopped by {_stop_requester_text(session, rank_request)}, and nothing was saved: {reason}",
        128 + rank_request.signal,
    )


def _stop_requester_text(session: Session, rank_request: RankRequest) -> str:
    # `ortlaunch stop` and a hook write this file; without it, a signal was the request.
    with contextlib.suppress(OSError, ValueError, KeyError):
        return str(read_json_or_raise_damaged(session.run.stop_request)["by"])
    return rank_request.signal.name
