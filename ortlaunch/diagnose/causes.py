"""Derive the cause of a run's end from the evidence: a rank's record first, else the command's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ortlaunch.base.cause import Cause, Failure
from ortlaunch.diagnose.evidence import Evidence
from ortlaunch.recipe import read_resolved_recipe_of_run
from ortlaunch.recipe.inputs import LEARNING_RATE_KEY, repeated_file_and_high_learning_rate_problems
from ortlaunch.run_folder.cause_text import advice_for_failure


def failure_of_run_evidence(evidence: Evidence) -> Failure:
    """Return why the run ended; `RUNNING` if it has not ended, `ENDED_WELL` for status 0."""
    if evidence.exit_status is None:
        return Failure(Cause.RUNNING, evidence.state)
    if evidence.exit_status == 0:
        return Failure(Cause.ENDED_WELL)
    # A rank's own record names the exception; the command only sees exit statuses and signals.
    if evidence.causing_error_record_or_none is not None:
        return _failure_with_gradient_cause_by_precision(
            evidence.causing_error_record_or_none.to_failure(), evidence
        )
    if evidence.failure is None or (
        evidence.failure.cause is Cause.UNKNOWN and not evidence.failure.detail
    ):
        return Failure(
            Cause.UNKNOWN,
            f"the run ended with status {evidence.exit_status} and without an error record",
        )
    return evidence.failure


def _failure_with_gradient_cause_by_precision(failure: Failure, evidence: Evidence) -> Failure:
    """Return the failure, with a non-finite gradient attributed to its source.

    The loss scale in fp16, the values themselves in other precisions.
    """
    if failure.cause is not Cause.GRADIENT_NOT_FINITE:
        return failure
    # A start that failed early may have left no recipe.
    recipe = (
        read_resolved_recipe_of_run(evidence.run.recipe) if evidence.run.recipe.exists() else None
    )
    is_fp16 = recipe is not None and recipe.precision == "fp16"
    return replace(failure, cause=Cause.LOSS_SCALE_COLLAPSE if is_fp16 else Cause.NOT_FINITE)


def _advice_if_learning_rate_is_doubtful(evidence: Evidence) -> Iterator[str]:
    """Yield advice on a learning rate that is most likely a mistake."""
    # A start that failed early may have left no recipe.
    if evidence.run.recipe.exists():
        for key_paths, text in repeated_file_and_high_learning_rate_problems(
            read_resolved_recipe_of_run(evidence.run.recipe)
        ):
            if LEARNING_RATE_KEY in key_paths:
                yield f"a lower {LEARNING_RATE_KEY}: {text}"


def advice_by_run_evidence(failure: Failure, evidence: Evidence) -> tuple[str, ...]:
    """Return advice for a failure, first what depends on the run.

    For a hang these are the stack files of all ranks, for a crash in ONNX Runtime another engine.
    """
    if failure.cause is Cause.HANG:
        stack_files_advice = (
            f"see the stack traces of all ranks: {evidence.run.errors}/stacks_*.txt"
        )
        return (stack_files_advice, *advice_for_failure(failure))
    if failure.cause in (Cause.NOT_FINITE, Cause.LOSS_SPIKE, Cause.LOSS_SCALE_COLLAPSE):
        # At such a rate every batch fails: neither the samples nor a rollback matter.
        return tuple(_advice_if_learning_rate_is_doubtful(evidence)) or advice_for_failure(failure)
    if failure.cause is not Cause.GRAPH_CRASH:
        return advice_for_failure(failure)
    complete_checkpoints = evidence.run.complete_checkpoints()
    continuation_text = (
        f"goes on with --run-dir={evidence.run} after step {complete_checkpoints[-1][0]}, its newest checkpoint"
        if complete_checkpoints
        else "begins again: this run had no checkpoint yet (checkpoint.every_steps)"
    )
    return (
        f"engine.name=eager trains in PyTorch, without ONNX Runtime, and {continuation_text}",
        *advice_for_failure(failure),
    )
