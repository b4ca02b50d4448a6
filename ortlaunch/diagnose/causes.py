"""Evidence -> the cause of an end: as a rank recorded it, else as the command did."""

from __future__ import annotations

from dataclasses import replace

from ortlaunch.cause import Cause, Failure
from ortlaunch.diagnose.evidence import Evidence
from ortlaunch.recipe import read_resolved
from ortlaunch.run_folder.cause_text import advice


def cause_of(found: Evidence) -> Failure:
    """Why the run ended, or that it has not, or that it ended well."""
    if found.status is None:
        return Failure(Cause.RUNNING, found.state)
    if found.status == 0:
        return Failure(Cause.ENDED_WELL)
    if found.first:
        return _with_precision(Failure.of_record(found.first), found)
    if found.failure is None or (found.failure.cause is Cause.UNKNOWN and not found.failure.detail):
        return Failure(
            Cause.UNKNOWN, f"the run ended with status {found.status}, without an error record"
        )
    return found.failure


def _with_precision(failure: Failure, found: Evidence) -> Failure:
    """A gradient that is not finite beside finite losses: in fp16 it is the loss scale."""
    if failure.cause is not Cause.GRADIENT_NOT_FINITE:
        return failure
    recipe = read_resolved(found.run.recipe) if found.run.recipe.exists() else None
    is_fp16 = recipe is not None and recipe.precision == "fp16"
    return replace(failure, cause=Cause.LOSS_SCALE_COLLAPSE if is_fp16 else Cause.NOT_FINITE)


def advice_for(failure: Failure, found: Evidence) -> tuple[str, ...]:
    """What to try; of a run that stood still its stacks, too."""
    stacks = (f"read the stacks of all ranks: {found.run.errors}/stacks_*.txt",)
    return (*(stacks if failure.cause is Cause.HANG else ()), *advice(failure))
