"""The diagnosis of a run.

`ortlaunch diagnose` prints it. `train` prints a short form after a failure.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from ortlaunch.base.cause import Cause, Failure
from ortlaunch.base.units import human_bytes, number_or_none
from ortlaunch.diagnose import evidence
from ortlaunch.diagnose.causes import advice_by_run_evidence, failure_of_run_evidence
from ortlaunch.diagnose.evidence import Evidence
from ortlaunch.diagnose.memory import memory_table_and_smaller_setting_lines
from ortlaunch.launch.failure import RunEnd
from ortlaunch.run_folder.cause_text import (
    ADVICE_PREFIX,
    COMMAND_PREFIX,
    CONTINUE_PREFIX,
    VERDICT_PREFIX,
    diagnosis_verdict_line,
)
from ortlaunch.run_folder.folder import RunDir, json_text
from ortlaunch.started_runs import status

# Free disk space below this is listed as evidence, in bytes.
_FEW_BYTES = 1 << 30
# If fp16 skipped more than this share of the last steps, the evidence mentions its loss scale.
_SKIPPED_OFTEN = 0.5
_CAUSES_WITHOUT_VERDICT = (Cause.ENDED_WELL, Cause.STOPPED, Cause.RUNNING)  # nothing went wrong


@dataclass(frozen=True)
class Diagnosis:
    """Why a run ended, with the evidence and advice."""

    run: str
    state: str
    exit_status: int | None
    kind: str
    verdict: str
    advice: tuple[str, ...]
    evidence: tuple[str, ...]

    def to_json(self) -> str:
        """Return one JSON object."""
        return json_text(asdict(self), indent=2)

    def __str__(self) -> str:
        """Return verdict, evidence and advice as text."""
        lines = [
            f"{VERDICT_PREFIX}{self.verdict}",
            *(["", "evidence:"] if self.evidence else []),
            *self.evidence,
        ]
        return "\n".join(
            [
                *lines,
                *(["", "try:"] if self.advice else []),
                *(f"  {advice_text}" for advice_text in self.advice),
            ]
        )


def diagnose_run(run: RunDir) -> Diagnosis:
    """Diagnose a run, which may still be running.

    Raises:
        InputError: the folder is no run folder, or this user cannot read its files.
    """
    run_status = status.read_status(run)
    exit_status = run_status.job.exit_status if run_status.state.is_end else None
    run_evidence = evidence.read_run_evidence(
        run,
        run_status.state_name,
        exit_status,
        run_status.job.verdict or "",
        run_status.job.failure,
    )
    failure = failure_of_run_evidence(run_evidence)
    return Diagnosis(
        run=str(run),
        state=run_status.state_name,
        exit_status=exit_status,
        kind=failure.cause_or_out_of_memory_if_killed.value,
        verdict=diagnosis_verdict_line(failure),
        advice=()
        if run_status.state_name == "pruned"
        else advice_by_run_evidence(failure, run_evidence),
        evidence=(
            *_state_error_progress_and_memory_lines(run_evidence, failure),
            *filter(
                None,
                (
                    f"  {line}" if line else ""
                    for line in (run_status.fallback, run_status.best_line)
                ),
            ),
        ),
    )


def failed_run_text_with_verdict_memory_and_advice(run: RunDir, run_end: RunEnd) -> str:
    """Return the final output of a command whose run failed.

    Verdict and advice stand before its last line. If nothing went wrong, the text is unchanged.
    """
    run_evidence = evidence.read_run_evidence(
        run, "failed", run_end.status, run_end.text, run_end.failure
    )
    failure = failure_of_run_evidence(run_evidence)
    if failure.cause_or_out_of_memory_if_killed in _CAUSES_WITHOUT_VERDICT:
        return run_end.text
    verdict_text = diagnosis_verdict_line(failure)
    text_before = run_end.text_before.rstrip("\n")
    memory_lines = (
        memory_table_and_smaller_setting_lines(run_evidence)
        if failure.cause_or_out_of_memory_if_killed is Cause.OUT_OF_MEMORY
        else []
    )
    first_line = text_before.partition("\n")[0]
    # Where one text repeats the start of the other, `before` itself becomes the verdict.
    joined_text = " ".join(text_before.split())
    repeats_verdict = joined_text.startswith(
        verdict_text.removesuffix(" ...")
    ) or verdict_text.startswith(first_line)
    if first_line and (repeats_verdict or first_line in failure.detail):
        text_before, verdict_text = "", text_before
    lines = [
        f"{VERDICT_PREFIX}{verdict_text}",
        *memory_lines,
        *(
            f"{ADVICE_PREFIX}{advice_text}"
            for advice_text in advice_by_run_evidence(failure, run_evidence)
        ),
    ]
    return "\n".join(
        [
            *([text_before] if text_before.strip() else []),
            *lines,
            f"{COMMAND_PREFIX}{run_end.last_output}",
        ]
    )


def _state_error_progress_and_memory_lines(
    run_evidence: Evidence, failure: Failure
) -> Iterator[str]:
    exit_status = run_evidence.exit_status
    yield f"  {run_evidence.state}" + (
        f", exit status {exit_status}{_exit_status_meaning_or_empty(exit_status)}"
        if exit_status is not None
        else ""
    )
    # Original failures come first, then by time. The first record is most likely the cause.
    for record in run_evidence.records[:1]:
        yield f"  {record.summary}"
        # The command prints a traceback with the frames of packages left out.
        short_text = run_evidence.last_output.partition(f"\n{VERDICT_PREFIX}")[0]
        error_log_lines = evidence.last_error_lines(run_evidence.run, record.rank)
        shown_lines = (
            short_text.splitlines() if short_text.startswith("Traceback") else error_log_lines
        )
        yield from (f"    | {line}" for line in shown_lines)
    if other_ranks := [f"{record.rank}" for record in run_evidence.records[1:]]:
        yield f"  rank {', '.join(other_ranks[:16])} ended later: {len(other_ranks)} in all"
    if not run_evidence.records and run_evidence.last_output:
        output_lines = [
            line
            for line in run_evidence.last_output.strip().splitlines()
            if not line.startswith(CONTINUE_PREFIX)
        ]
        yield f"  last message of the command: {output_lines[-1] if exit_status else output_lines[0]}"
    yield from _step_bad_step_and_checkpoint_lines(run_evidence)
    yield from _failed_save_and_free_space_lines(run_evidence, failure)
    yield from (
        f"  {line}"
        for line in (
            memory_table_and_smaller_setting_lines(run_evidence)
            if failure.cause_or_out_of_memory_if_killed is Cause.OUT_OF_MEMORY
            else ()
        )
    )
    prefix = run_evidence.run.flight_recorder
    # An empty dump holds nothing to analyze.
    recorders = [path for path in prefix.parent.glob(f"{prefix.name}*") if path.stat().st_size]
    if recorders:
        yield (
            f"  NCCL's flight recorder: {len(recorders)} files; torchfrtrace "
            f"{prefix.parent} -p {prefix.name}"
        )


def _exit_status_meaning_or_empty(exit_status: int) -> str:
    """Return the meaning of an exit status: 85, or 128 + a signal's number; else ""."""
    if exit_status == 85:
        return " (saved; the same command continues the run)"
    try:
        return (
            f" (128 + {exit_status - 128}: {signal.Signals(exit_status - 128).name})"
            if exit_status > 128
            else ""
        )
    except ValueError:
        return ""


def _step_bad_step_and_checkpoint_lines(run_evidence: Evidence) -> Iterator[str]:
    """Yield the last logged step, skipped and bad steps, and the newest complete checkpoint."""
    if steps := evidence.json_lines_with_keys_in_file_tail(
        run_evidence.run.metrics, "step", "loss"
    ):
        loss = number_or_none(steps[-1]["loss"])
        first_line = steps[0]
        last_line = steps[-1]
        yield f"  the last logged step is {steps[-1]['step']}" + (
            "" if loss is None else f", loss {loss:.4g}"
        )
        skipped_steps = (number_or_none(last_line.get("skipped_steps")) or 0) - (
            number_or_none(first_line.get("skipped_steps")) or 0
        )
        step_count = steps[-1]["step"] - steps[0]["step"]
        if step_count and skipped_steps / step_count > _SKIPPED_OFTEN:
            yield (
                f"  fp16 skipped {skipped_steps:.0f} of the last {step_count} steps: no loss scale works"
            )
    for line in evidence.json_lines_with_keys_in_file_tail(
        run_evidence.run.bad_steps, "step", "action", "message"
    )[-3:]:
        message = str(line["message"]).partition("\n")[0]
        yield f"  bad step {line['step']} ({line['action']}): {message}"
    complete_checkpoints = run_evidence.run.complete_checkpoints()
    yield (
        f"  the newest complete checkpoint is after step {complete_checkpoints[-1][0]}"
        if complete_checkpoints
        else "  no complete checkpoint"
    )


def _failed_save_and_free_space_lines(run_evidence: Evidence, failure: Failure) -> Iterator[str]:
    for line in [
        line
        for line in evidence.json_lines_with_keys_in_file_tail(run_evidence.run.saves, "step")
        if line.get("error")
    ][-1:]:
        yield f"  the save after step {line['step']} failed: {line['error']}"
    free_bytes = shutil.disk_usage(run_evidence.run.path).free
    if free_bytes < _FEW_BYTES or failure.cause is Cause.DISK_FULL:
        yield f"  {human_bytes(free_bytes)} free now on the disk of {run_evidence.run}"
