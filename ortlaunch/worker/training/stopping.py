"""The end of a run that was asked to stop: what all ranks leave once their checkpoint is complete."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ortlaunch.errors import CheckpointError, NotSaved
from ortlaunch.run_folder.folder import COMPLETE, read_json, write_json
from ortlaunch.run_folder.records import Stopped, as_json
from ortlaunch.worker.checkpoint import Saving
from ortlaunch.worker.session import Session
from ortlaunch.worker.supervision.requests import Ask


def stop(session: Session, asked: Ask, step: int) -> Ask:
    """Where a stop is asked for, rank 0 leaves stopped.json, for the checkpoint of this step is complete.

    Raises:
        NotSaved: it is not.
    """
    if not asked.stops:
        return asked
    run = session.run
    steps = session.recipe.train.steps
    folder = session.run.checkpoint(step)
    if not session.group.gather_numbers([(folder / COMPLETE).exists()])[0][0]:
        raise _not_saved(session, asked, "see NOT SAVED above")
    if session.group.rank == 0:
        how = Stopped(step, steps, _who(session, asked), asked.exit_status)
        write_json(run.stopped, as_json(how))
        print(f"stopped by {how.by} after step {step} of {steps}, saved: {folder}", flush=True)
    session.group.barrier()
    return asked


@contextlib.contextmanager
def saved_for(session: Session, saving: Saving, asked: Ask) -> Iterator[None]:
    """While a checkpoint is written: the request for it is answered; one that a stop needs and fails is its end.

    Raises:
        NotSaved: nothing to go on from at this step.
    """
    try:
        yield
    except CheckpointError as error:
        if not asked.stops:
            raise
        raise _not_saved(session, asked, str(error)) from error
    if session.group.rank == 0 and saving.answers(asked):
        session.run.save_request.unlink(missing_ok=True)


def _not_saved(session: Session, asked: Ask, why: str) -> NotSaved:
    return NotSaved(
        f"stopped by {_who(session, asked)}, and nothing was saved: {why}", 128 + asked.signal
    )


def _who(session: Session, asked: Ask) -> str:
    """Who asked, in words."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return str(read_json(session.run.stop_request)["by"])
    return asked.signal.name
