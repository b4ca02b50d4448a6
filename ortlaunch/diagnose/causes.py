"""Derive the cause of a run's end from the evidence: a rank's record first, else the command's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ortlaunch.cause import Cause, Failure
from ortlaunch.diagnose.evidence import Evidence
from ortlaunch.recipe import read_resolved
from ortlaunch.recipe.inputs import RATE, doubtful
from ortlaunch.run_folder.cause_text import advice_for_failure


def cause_of(found: Evidence) -> Failure:
    """Return why the run ended; `RUNNING` if it has not ended, `ENDED_WELL` for status 0."""
    if found.status is None:
        return Failure(Cause.RUNNING, found.state)
    if found.status == 0:
        return Failure(Cause.ENDED_WELL)
    # A rank's own record names the exception; the command only sees exit statuses and signals.
    if found.first:
        return _with_precision(Failure.from_error_record(found.first), found)
    if found.failure is None or (found.failure.cause is Cause.UNKNOWN and not found.failure.detail):
        return Failure(
            Cause.UNKNOWN, f"the run ended with status {found.status} and without an error record"
        )
    return found.failure


def _with_precision(failure: Failure, found: Evidence) -> Failure:
    """Return the failure, with a non-finite gradient attributed to its source.

    The loss scale in fp16, the values themselves in other precisions.
    """
    if failure.cause is not Cause.GRADIENT_NOT_FINITE:
        return failure
    # A start that failed early may have left no recipe.
    recipe = read_resolved(found.run.recipe) if found.run.recipe.exists() else None
    is_fp16 = recipe is not None and recipe.precision == "fp16"
    return replace(failure, cause=Cause.LOSS_SCALE_COLLAPSE if is_fp16 else Cause.NOT_FINITE)


def _rate_doubts(found: Evidence) -> Iterator[str]:
    """Yield advice on a learning rate that is most likely a mistake."""
    # A start that failed early may have left no recipe.
    if found.run.recipe.exists():
        for paths, text in doubtful(read_resolved(found.run.recipe)):
            if RATE in paths:
                yield f"a lower {RATE}: {text}"


def advice_for(failure: Failure, found: Evidence) -> tuple[str, ...]:
    """Return advice for a failure, first what depends on the run.

    For a hang these are the stack files of all ranks, for a crash in ONNX Runtime another engine.
    """
    if failure.cause is Cause.HANG:
        stacks = f"see the stack traces of all ranks: {found.run.errors}/stacks_*.txt"
        return (stacks, *advice_for_failure(failure))
    if failure.cause in (Cause.NOT_FINITE, Cause.LOSS_SPIKE, Cause.LOSS_SCALE_COLLAPSE):
        # At such a rate every batch fails: neither the samples nor a rollback matter.
        return tuple(_rate_doubts(found)) or advice_for_failure(failure)
    if failure.cause is not Cause.GRAPH_CRASH:
        return advice_for_failure(failure)
    saved = found.run.complete_checkpoints()
    begin = (
        f"goes on with --run-dir={found.run} after step {saved[-1][0]}, its newest checkpoint"
        if saved
        else "begins again: this run had no checkpoint yet (checkpoint.every_steps)"
    )
    return (
        f"engine.name=eager trains in PyTorch, without ONNX Runtime, and {begin}",
        *advice_for_failure(failure),
    )
