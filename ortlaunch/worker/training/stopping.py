"""The end of a run after a stop request: its record, once the checkpoint is complete."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ortlaunch.errors import CheckpointError, NotSaved
from ortlaunch.run_folder.folder import COMPLETE, read_own_json, write_json_atomically
from ortlaunch.run_folder.records import Stopped, as_json
from ortlaunch.worker.checkpoint import Saving
from ortlaunch.worker.session import Session
from ortlaunch.worker.supervision.requests import RankRequest


def stop(session: Session, asked: RankRequest, step: int) -> RankRequest:
    """Write stopped.json on rank 0, if a stop was requested and this step's checkpoint is complete.

    Raises:
        NotSaved: the checkpoint is not complete.
    """
    if not asked.stops:
        return asked
    steps = session.recipe.train.steps
    folder = session.run.checkpoint_folder(step)
    # Rank 0's answer counts: hosts may see a shared file system in different states.
    if not session.group.gather_numbers([(folder / COMPLETE).exists()])[0][0]:
        raise _not_saved(session, asked, "see NOT SAVED above")
    if session.group.rank == 0:
        how = Stopped(step, steps, _who(session, asked), asked.exit_status)
        write_json_atomically(session.run.stopped, as_json(how))
        print(f"stopped by {how.by} after step {step} of {steps}, saved: {folder}", flush=True)
    # No rank exits before stopped.json is written.
    session.group.barrier()
    return asked


@contextlib.contextmanager
def saved_for(session: Session, saving: Saving, asked: RankRequest) -> Iterator[None]:
    """Context of a checkpoint's save: answer its request, and end the run if a stop's save fails.

    Raises:
        NotSaved: there is nothing to continue from at this step.
    """
    try:
        yield
    except CheckpointError as error:
        if not asked.stops:
            raise
        raise _not_saved(session, asked, str(error)) from error
    if session.group.rank == 0 and saving.answers(asked):
        session.run.save_request.unlink(missing_ok=True)


def _not_saved(session: Session, asked: RankRequest, why: str) -> NotSaved:
    return NotSaved(
        # 128 + N is a shell's status for an end by signal N.
        f"stopped by {_who(session, asked)}, and nothing was saved: {why}",
        128 + asked.signal,
    )


def _who(session: Session, asked: RankRequest) -> str:
    """Return who requested it, as text."""
    # `ortlaunch stop` and a hook write this file; without it, a signal was the request.
    with contextlib.suppress(OSError, ValueError, KeyError):
        return str(read_own_json(session.run.stop_request)["by"])
    return asked.signal.name
