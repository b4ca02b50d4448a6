"""`ortlaunch diagnose`: the verdict on a run, with the evidence in its folder and the advice."""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ortlaunch.base.cause import Cause, Failure
from ortlaunch.base.json_types import Json, open_regular_file_or_refuse
from ortlaunch.base.units import human_bytes, number_or_none
from ortlaunch.run_folder.cause_text import VERDICT_PREFIX, diagnosis_verdict_line
from ortlaunch.run_folder.error_record import read_error_records
from ortlaunch.run_folder.folder import RunDir, json_text
from ortlaunch.run_folder.lines import read_json_lines_in_tail_or_whole_if_damaged
from ortlaunch.run_folder.verdict import Verdict
from ortlaunch.started_runs.status import Status, read_status

_LAST_LINES = 12  # enough for the end of a traceback
# A log may be gigabytes; only its end is read.
_TAIL_BYTES = 1 << 14
# Free disk space below this is listed as evidence, in bytes.
_FEW_BYTES = 1 << 30
# If fp16 skipped more than this share of the last steps, the evidence mentions its loss scale.
_SKIPPED_OFTEN = 0.5


@dataclass(frozen=True)
class Diagnosis:
    """Why a run ended, with the evidence and advice."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}

    run: str
    """The run folder."""
    state: str
    """As in `status`, or `pruned` for a trial that its sweep ended."""
    exit_status: int | None
    """Exit status of the run's command; null before its end."""
    kind: str
    """The cause by name, such as `out-of-memory`."""
    verdict: str
    """Why the run ended, for a person."""
    advice: tuple[str, ...]
    """Remedies to try, the most useful first."""
    evidence: tuple[str, ...]
    """Lines of logs and records that show it."""

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
    run_status = read_status(run)
    verdict = run_status.job.verdict if run_status.state.is_end else None
    failure = _failure_of_run(run_status, verdict)
    explanation = verdict.explanation if verdict is not None else ""
    return Diagnosis(
        run=str(run),
        state=run_status.state_name,
        exit_status=verdict.exit_status if verdict is not None else None,
        kind=failure.cause_or_out_of_memory_if_killed.value,
        verdict=explanation or diagnosis_verdict_line(failure),
        advice=() if verdict is None or run_status.is_pruned else verdict.advice,
        evidence=(
            *_state_error_progress_and_memory_lines(run, run_status, verdict),
            *(
                f"  {line}"
                for line in (run_status.fallback, run_status.early_stop_and_best_line)
                if line
            ),
        ),
    )


def _failure_of_run(run_status: Status, verdict: Verdict | None) -> Failure:
    """Return the cause of the run's end; `RUNNING` if it has not ended, `ENDED_WELL` for status 0."""
    if verdict is None:
        return Failure(Cause.RUNNING, run_status.state_name)
    return verdict.failure or Failure(verdict.cause, verdict.message)


def _state_error_progress_and_memory_lines(
    run: RunDir, run_status: Status, verdict: Verdict | None
) -> Iterator[str]:
    status_text = (
        ""
        if verdict is None
        else f", exit status {verdict.exit_status}{_exit_status_meaning_or_empty(verdict.exit_status)}"
    )
    yield f"  {run_status.state_name}{status_text}"
    # Original failures come first, then by time. The first record is most likely the cause.
    records = sorted(
        read_error_records(run), key=lambda record: record.likeliest_cause_first_sort_key
    )
    for record in records[:1]:
        yield f"  {record.summary}"
        # The verdict has the traceback without the frames of packages.
        shown_lines = verdict.traceback.splitlines() if verdict is not None else []
        # The verdict is the message of an error of ortlaunch's own.
        if not record.is_own_error:
            log_end = _tail_lines(run.rank_log_path(record.rank, "err"))[-_LAST_LINES:]
            yield from (f"    | {line}" for line in shown_lines or log_end)
    if other_ranks := [f"{record.rank}" for record in records[1:]]:
        yield f"  rank {', '.join(other_ranks[:16])} ended later: {len(other_ranks)} in all"
    if not records and verdict is not None:
        yield f"  last message of the command: {(verdict.message, *verdict.notes)[-1]}"
    yield from _step_bad_step_and_checkpoint_lines(run)
    yield from _failed_save_and_free_space_lines(run, verdict)
    yield from (f"  {line}" for line in (verdict.memory_table if verdict is not None else ()))
    prefix = run.flight_recorder
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
    name = next((one.name for one in signal.Signals if one == exit_status - 128), "")
    return f" (128 + {exit_status - 128}: {name})" if name else ""


def _step_bad_step_and_checkpoint_lines(run: RunDir) -> Iterator[str]:
    """Yield the last logged step, skipped and bad steps, and the newest complete checkpoint."""
    if steps := _json_lines_with_keys_in_file_tail(run.metrics, "step", "loss"):
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
    for line in _json_lines_with_keys_in_file_tail(run.bad_steps, "step", "action", "message")[-3:]:
        message = str(line["message"]).partition("\n")[0]
        yield f"  bad step {line['step']} ({line['action']}): {message}"
    yield (
        f"  the newest complete checkpoint is after step {newest_checkpoint[0]}"
        if (newest_checkpoint := run.newest_complete_checkpoint())
        else "  no complete checkpoint"
    )


def _failed_save_and_free_space_lines(run: RunDir, verdict: Verdict | None) -> Iterator[str]:
    for line in [
        line for line in _json_lines_with_keys_in_file_tail(run.saves, "step") if line.get("error")
    ][-1:]:
        yield f"  the save after step {line['step']} failed: {line['error']}"
    free_bytes = shutil.disk_usage(run.path).free
    if free_bytes < _FEW_BYTES or (verdict is not None and verdict.cause is Cause.DISK_FULL):
        yield f"  {human_bytes(free_bytes)} free now on the disk of {run}"


def _json_lines_with_keys_in_file_tail(file_path: Path, *required_keys: str) -> list[Json]:
    return read_json_lines_in_tail_or_whole_if_damaged(
        file_path, _TAIL_BYTES, *required_keys
    ).values


def _tail_lines(file_path: Path) -> list[str]:
    with contextlib.suppress(OSError), open_regular_file_or_refuse(file_path) as file:
        file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()
    return []
