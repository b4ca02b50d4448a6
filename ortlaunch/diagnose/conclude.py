"""Conclude how a run ended: classify the end, then add the cause, its explanation and advice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ortlaunch.base.cause import Cause, Failure
from ortlaunch.base.errors import DamagedFile
from ortlaunch.diagnose.memory import memory_table_and_smaller_setting_lines
from ortlaunch.diagnose.run_end import (
    verdict_on_end_of_launcher,
    verdict_on_run_whose_command_vanished,
)
from ortlaunch.recipe import read_resolved_recipe_of_run
from ortlaunch.recipe.inputs import LEARNING_RATE_KEY, repeated_file_and_high_learning_rate_problems
from ortlaunch.run_folder.cause_text import advice_for_failure, diagnosis_verdict_line
from ortlaunch.run_folder.error_record import ErrorRecord, first_error_record
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.verdict import Verdict


def conclude_run(
    run: RunDir,
    launcher_status: int,
    user_signal: int | None = None,
    launcher_signal: int | None = None,
    oom_kills: int | None = None,
    rank0_output_was_shown: bool = False,
) -> Verdict:
    """Return the verdict on a run, or a start of its ranks, whose launcher ended.

    Args:
        launcher_status: exit status of the launcher.
        user_signal: the signal that the user sent to the command, if any.
        launcher_signal: the signal that ended the launcher itself, if any.
        oom_kills: processes of this control group that the kernel's out-of-memory killer ended
            during the run; None if unknown.
        rank0_output_was_shown: whether rank 0's output went to the terminal, so that its end is not printed again.
    """
    return add_cause_explanation_and_advice(
        run,
        verdict_on_end_of_launcher(
            run, launcher_status, user_signal, launcher_signal, oom_kills, rank0_output_was_shown
        ),
    )


def conclude_run_whose_command_vanished(run: RunDir, command_name: str) -> Verdict:
    """Return the verdict on a run whose command disappeared together with its ranks."""
    return add_cause_explanation_and_advice(
        run, verdict_on_run_whose_command_vanished(run, command_name)
    )


def add_cause_explanation_and_advice(run: RunDir, verdict: Verdict) -> Verdict:
    """Return the verdict with the cause that the ranks recorded, its explanation and advice."""
    if verdict.exit_status == 0:
        return verdict
    record = _causing_error_record_or_none(run, verdict)
    # A rank's own record names the exception; the command only sees exit statuses and signals.
    failure = record.to_failure() if record is not None else verdict.failure
    if failure is None:
        failure = Failure(
            Cause.UNKNOWN,
            f"the run ended with status {verdict.exit_status} and without an error record",
        )
    verdict = replace(verdict, failure=failure)
    # A damaged recipe or plan takes the advice that reads it, not the verdict.
    try:
        failure = _name_source_of_bad_gradient(run, failure)
        verdict = replace(verdict, failure=failure)
        verdict = replace(
            verdict,
            advice=_advice_for_run(run, failure),
            memory_table=tuple(memory_table_and_smaller_setting_lines(run, record))
            if verdict.cause is Cause.OUT_OF_MEMORY
            else (),
        )
    except DamagedFile as error:
        verdict = replace(verdict, advice=advice_for_failure(failure)).with_note(
            f"without the advice that reads it: {error}"
        )
    return _add_explanation(verdict, record) if verdict.is_failure else verdict


def _causing_error_record_or_none(run: RunDir, verdict: Verdict) -> ErrorRecord | None:
    """Return the error record of the cause; None if no rank wrote one of its own."""
    record = first_error_record(run)
    # A secondary record is an error that another rank's failure caused.
    if record is None or record.secondary:
        return None
    # Launchers, too, request a stop of ranks. So the record of a stopped rank counts only if
    # the command attributes the end to that rank.
    is_blamed = (
        verdict.failure is not None
        and verdict.failure.cause is Cause.STOPPED
        and verdict.failure.rank is not None
    )
    return None if record.cause is Cause.STOPPED and not is_blamed else record


def _add_explanation(verdict: Verdict, record: ErrorRecord | None) -> Verdict:
    """Add the cause for a person: an error of ortlaunch's own explains itself."""
    assert verdict.failure is not None
    own_message = record.message.rstrip() if record is not None and record.is_own_error else ""
    first_line = own_message.partition("\n")[0]
    detail = verdict.failure.detail
    if first_line and (first_line in detail or (detail and detail in first_line)):
        return replace(verdict, explanation=own_message, traceback="")
    return replace(verdict, explanation=diagnosis_verdict_line(verdict.failure))


def _name_source_of_bad_gradient(run: RunDir, failure: Failure) -> Failure:
    """Return the failure, with a non-finite gradient attributed to its source.

    The loss scale in fp16, the values themselves in other precisions.
    """
    if failure.cause is not Cause.GRADIENT_NOT_FINITE:
        return failure
    # A start that failed early may have left no recipe.
    is_fp16 = run.recipe.exists() and read_resolved_recipe_of_run(run.recipe).precision == "fp16"
    return replace(failure, cause=Cause.LOSS_SCALE_COLLAPSE if is_fp16 else Cause.NOT_FINITE)


def _advice_for_run(run: RunDir, failure: Failure) -> tuple[str, ...]:
    """Return advice for a failure, first what depends on the run.

    For a hang these are the stack files of all ranks, for a crash in ONNX Runtime another engine.
    """
    if failure.cause is Cause.HANG:
        stack_files_advice = f"see the stack traces of all ranks: {run.errors}/stacks_*.txt"
        return (stack_files_advice, *advice_for_failure(failure))
    if failure.cause in (Cause.NOT_FINITE, Cause.LOSS_SPIKE, Cause.LOSS_SCALE_COLLAPSE):
        # At such a rate every batch fails: neither the samples nor a rollback matter.
        return tuple(_advice_if_learning_rate_is_doubtful(run)) or advice_for_failure(failure)
    if failure.cause is not Cause.GRAPH_CRASH:
        return advice_for_failure(failure)
    continuation_text = (
        f"goes on with --run-dir={run} after step {newest_checkpoint[0]}, its newest checkpoint"
        if (newest_checkpoint := run.newest_complete_checkpoint())
        else "begins again: this run had no checkpoint yet (checkpoint.every_steps)"
    )
    return (
        f"engine.name=eager trains in PyTorch, without ONNX Runtime, and {continuation_text}",
        *advice_for_failure(failure),
    )


def _advice_if_learning_rate_is_doubtful(run: RunDir) -> Iterator[str]:
    # A start that failed early may have left no recipe.
    if run.recipe.exists():
        for key_paths, text in repeated_file_and_high_learning_rate_problems(
            read_resolved_recipe_of_run(run.recipe)
        ):
            if LEARNING_RATE_KEY in key_paths:
                yield f"a lower {LEARNING_RATE_KEY}: {text}"
