"""How a run ended: its first failing rank, the exit status and the command's sentence.

Everything is read from the run folder. conclude.py adds the explanation and the advice.
"""

from __future__ import annotations

import contextlib
import re
import signal
from dataclasses import replace

from ortlaunch.base.cause import Cause, Failure
from ortlaunch.base.errors import DamagedFile
from ortlaunch.base.json_types import read_regular_file_bytes_or_refuse
from ortlaunch.launch_plan import Plan
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.run_folder.cause_text import command_end_sentence
from ortlaunch.run_folder.error_record import (
    ErrorRecord,
    most_likely_cause,
    ranks_whose_supervisor_started,
    read_error_records,
)
from ortlaunch.run_folder.folder import RunDir, is_disk_nearly_full, read_json_or_raise_damaged
from ortlaunch.run_folder.library_messages import match_cause_in_text
from ortlaunch.run_folder.origin import planned_or_recorded_step_count_or_none
from ortlaunch.run_folder.verdict import Verdict


def verdict_on_end_of_launcher(
    run: RunDir,
    launcher_status: int,
    user_signal: int | None = None,
    launcher_signal: int | None = None,
    oom_kills: int | None = None,
    rank0_output_was_shown: bool = False,
) -> Verdict:
    """Return the verdict on a run whose launcher exited with `launcher_status`; the first case that fits counts.

    The arguments are those of `conclude_run`.
    """
    unrequested = user_signal is None and not run.stop_request.exists()
    if run.stopped.exists():
        # The ranks saved because their launcher was killed.
        return _end_of_run_that_saved_on_request(
            run, user_signal, launcher_signal == signal.SIGKILL and unrequested
        )
    records = read_error_records(run)
    first_record = most_likely_cause(records)
    on_request = first_record is not None and first_record.cause is Cause.STOPPED
    launcher_error = _torchrun_own_exception_line_or_empty(run)
    # A rank's stop or secondary failure is then the effect of the launcher's own failure.
    if (
        launcher_error
        and unrequested
        and (first_record is None or on_request or first_record.secondary)
    ):
        cause = (match_cause_in_text(launcher_error) or (None,))[0]
        cause = cause if cause is Cause.NO_LOCKS else Cause.LAUNCHER_FAILED
        failure = Failure(cause, launcher_error, who=Plan.read(run.plan).started_by.program)
        return Verdict.of_failure_detected_by_command(1, failure, f"; logs: {run.logs}")
    if (
        first_record is not None
        and on_request
        and not _ranks_without_record_that_may_be_cause(run, records, user_signal)
    ):
        return _end_of_stopped_run_with_nothing_to_save(run, first_record, user_signal)
    # A requested stop explains the end better than the errors that it caused in the ranks.
    if user_signal is not None and (launcher_status or first_record is not None):
        return _end_of_stopped_run_without_new_save(run, first_record, user_signal)
    if first_record is not None and not first_record.secondary and not on_request:
        return _end_from_error_record(first_record, rank0_output_was_shown)
    if first_record is None and launcher_status == 0:
        return Verdict(0, f"done: {run}")
    return _end_without_original_error_record(
        run, launcher_status, launcher_signal, oom_kills, records
    )


def _torchrun_own_exception_line_or_empty(run: RunDir) -> str:
    """Return the first line of torchrun's own exception.

    Empty if there is no exception, or if torchrun was ended by a signal.
    """
    with contextlib.suppress(OSError, DamagedFile):
        error_message = read_json_or_raise_damaged(run.launcher_error).get("message")
        text = str(
            error_message.get("message") if isinstance(error_message, dict) else error_message
        )
        # torchrun wraps the original exception, the cause, in one of its own.
        inner_exception = re.search(
            r"^[\w.]+(Error|Exception): .*", str(error_message).replace("\\n", "\n"), re.MULTILINE
        )
        return (
            ""
            if text.startswith("SignalException")
            else (inner_exception[0] if inner_exception else text.partition("\n")[0])[:300]
        )
    return ""


def _ranks_without_record_that_may_be_cause(
    run: RunDir, error_records: list[ErrorRecord], user_signal: int | None
) -> set[int]:
    """Return the ranks without a record whose end may be the reason why the others were stopped.

    These are ranks whose supervisor was killed: the disk space that it reserved for an error record
    is still reserved. If no user requested a stop, they are also the ranks that never began.
    """
    began = ranks_whose_supervisor_started(run)
    recorded = {record.rank for record in error_records} | set(
        _signal_and_arrival_time_by_rank(run)
    )
    killed = {rank for rank in began - recorded if run.reserved_space_path(rank).exists()}
    requested = user_signal is not None or run.stop_request.exists()
    return killed if requested else killed | set(range(Plan.read(run.plan).world_size)) - began


def _end_of_run_that_saved_on_request(
    run: RunDir, user_signal: int | None, launcher_killed: bool = False
) -> Verdict:
    stop_record = read_json_or_raise_damaged(run.stopped)
    program = Plan.read(run.plan).started_by.program if launcher_killed else None
    killed = Failure(Cause.LAUNCHER_KILLED, who=program, signal=signal.SIGKILL) if program else None
    end_text = f"{command_end_sentence(killed)}; " if killed else ""
    end_text += f"stopped by {stop_record['by']}, saved after step {stop_record['step']} of {stop_record['steps']}"
    status = 130 if user_signal == signal.SIGINT else stop_record["exit_status"]
    return Verdict(
        status,
        end_text,
        Failure(Cause.STOPPED, end_text),
        stopped_by=stop_record["by"],
        can_continue=True,
    )


def verdict_on_run_whose_command_vanished(run: RunDir, command_name: str) -> Verdict:
    """Return the end of a run whose command disappeared together with its ranks."""
    if run.stopped.exists():
        return _end_of_run_that_saved_on_request(run, None)
    first_record = most_likely_cause(read_error_records(run))
    if first_record is not None and not first_record.secondary:
        return _end_from_error_record(first_record)
    return Verdict.of_failure_detected_by_command(
        137, Failure(Cause.COMMAND_KILLED, who=command_name), f"\nlogs: {run.logs}"
    )


def _end_without_original_error_record(
    run: RunDir,
    launcher_status: int,
    launcher_signal: int | None,
    oom_kills: int | None,
    error_records: list[ErrorRecord],
) -> Verdict:
    plan = Plan.read(run.plan)
    exit_requests = _signal_and_arrival_time_by_rank(run)
    # EXIT_SAVED requests another start. Without stopped.json nothing proves that the run saved.
    launcher_status = 1 if launcher_status == EXIT_SAVED else launcher_status
    if launcher_signal is not None and plan.started_by.program:
        killed = Failure(
            Cause.LAUNCHER_KILLED,
            who=plan.started_by.program,
            signal=launcher_signal,
            memory_kills=oom_kills,
        )
        return Verdict.of_failure_detected_by_command(128 + launcher_signal, killed)
    began = ranks_whose_supervisor_started(run)
    silent = sorted(began - {record.rank for record in error_records} - set(exit_requests))
    # Ranks that ended in order removed the space reserved for their error record.
    killed_ranks = [rank for rank in silent if run.reserved_space_path(rank).exists()] or silent
    if launcher_status and not error_records and is_disk_nearly_full(run.path):
        return Verdict.of_failure_detected_by_command(
            launcher_status, Failure(Cause.DISK_FULL, str(run))
        )
    if killed_ranks and launcher_status:
        return _end_with_killed_ranks(run, plan, killed_ranks, oom_kills)
    absent = sorted(set(range(plan.world_size)) - began)
    if absent and launcher_status:
        return _end_with_absent_ranks_or_failed_launcher(
            run, launcher_status, oom_kills, _rank_and_host_names(plan, absent), len(began)
        )
    first_record = most_likely_cause(error_records)
    if (
        first_record is not None
        and first_record.signal is not None
        and first_record.cause is Cause.OUTLIVED
        and first_record.exit_status == EXIT_SAVED
    ):
        return _end_of_stopped_run_without_new_save(run, first_record, first_record.signal)
    if exit_requests:
        rank = min(exit_requests, key=lambda rank: exit_requests[rank][1])
        signal_number = exit_requests[rank][0]
        failure = Failure(
            Cause.SIGNALLED,
            plan.started_by.program,
            who=_rank_and_host_names(plan, [rank]),
            signal=signal_number,
        )
        return Verdict.of_failure_detected_by_command(
            128 + signal_number, failure, f"; logs: {run.logs}"
        )
    if first_record is None:
        return _end_with_absent_ranks_or_failed_launcher(run, launcher_status, oom_kills)
    return replace(
        _end_from_error_record(first_record),
        failure=Failure(Cause.LOST_PEERS, first_record.summary),
    )


def _end_with_absent_ranks_or_failed_launcher(
    run: RunDir,
    launcher_status: int,
    oom_kills: int | None,
    absent_rank_names: str = "",
    begun_rank_count: int = 0,
) -> Verdict:
    failure = Failure(
        Cause.NEVER_BEGAN,
        who=absent_rank_names,
        began=begun_rank_count,
        status=launcher_status,
        memory_kills=oom_kills,
    )
    return Verdict.of_failure_detected_by_command(
        launcher_status, failure, f"; see above, and {run.logs}"
    )


def _signal_and_arrival_time_by_rank(run: RunDir) -> dict[int, tuple[int, float]]:
    signals_by_rank = {}
    for path in run.errors.glob("asked_*"):
        signal_and_time = read_regular_file_bytes_or_refuse(path).decode(errors="replace").split()
        # The rank may have been killed while it wrote the file.
        if len(signal_and_time) == 2 and signal_and_time[0].isdecimal():
            signals_by_rank[int(path.name[len("asked_") :])] = (
                int(signal_and_time[0]),
                float(signal_and_time[1]),
            )
    return signals_by_rank


def _end_of_stopped_run_without_new_save(
    run: RunDir, first_record: ErrorRecord | None, signal_number: int
) -> Verdict:
    """Return the end of a run that was requested to stop and did not save.

    The exit status is EXIT_SAVED if the run can continue from an older checkpoint.
    """
    too_slow = first_record is None or first_record.cause is Cause.OUTLIVED
    stop_text = f"stopped by {signal.Signals(signal_number).name}"
    newest_checkpoint = run.newest_complete_checkpoint()
    all_steps = None
    with contextlib.suppress(DamagedFile, KeyError):
        all_steps = planned_or_recorded_step_count_or_none(run)
    can_continue = (
        too_slow
        and signal_number != signal.SIGINT
        and not run.cancelled.exists()
        and Plan.read(run.plan).traits.saves
    )
    if newest_checkpoint:
        lost_steps_text = ""
        if all_steps is not None and newest_checkpoint[0] >= all_steps:
            lost_steps_text = " after its last step"
        elif can_continue:
            lost_steps_text = " before it had saved; the steps after its newest checkpoint are lost"
        stop_text += (
            f"{lost_steps_text}; the newest checkpoint is after step {newest_checkpoint[0]}"
        )
    verdict = Verdict(
        EXIT_SAVED if newest_checkpoint and can_continue else 128 + signal_number,
        stop_text,
        Failure(Cause.STOPPED, stop_text, signal=signal_number),
        stopped_by=signal.Signals(signal_number).name,
        can_continue=newest_checkpoint is not None,
    )
    if first_record is None or (first_record.secondary and not too_slow):
        return verdict
    rank_end = _end_from_error_record(first_record)
    return replace(
        verdict, message=rank_end.message, traceback=rank_end.traceback, notes=(stop_text,)
    )


def _end_of_stopped_run_with_nothing_to_save(
    run: RunDir, first_record: ErrorRecord, user_signal: int | None
) -> Verdict:
    """Return the end of a run that was requested to stop when it had nothing to save.

    It names the sender of the request rather than the signal that the ranks received.
    """
    status = first_record.exit_status
    sender_name = None
    if user_signal is not None:
        status = 130 if user_signal == signal.SIGINT else status
        sender_name = signal.Signals(user_signal).name
    elif run.stop_request.exists():
        sender_name = read_json_or_raise_damaged(run.stop_request).get("by")
    if sender_name is None:
        return replace(_end_from_error_record(first_record), exit_status=status)
    newest = (
        f"; the newest checkpoint is after step {newest_checkpoint[0]}"
        if (newest_checkpoint := run.newest_complete_checkpoint())
        else ""
    )
    text = (
        f"stopped by {sender_name} before its first or after its last step: nothing to save{newest}"
    )
    return Verdict(
        status, text, Failure(Cause.STOPPED, text), stopped_by=sender_name, can_continue=True
    )


def _end_with_killed_ranks(
    run: RunDir, plan: Plan, killed_ranks: list[int], oom_kills: int | None
) -> Verdict:
    """Return the end for ranks that began and left no record: their supervisor was killed."""
    are_all_on_this_host = all(plan.node_of(rank).is_here for rank in killed_ranks)
    # The kernel counts the processes of this host only.
    kills = oom_kills if are_all_on_this_host else None
    failure = Failure(
        Cause.RANK_VANISHED, who=_rank_and_host_names(plan, killed_ranks), memory_kills=kills
    )
    return Verdict.of_failure_detected_by_command(
        137, failure, f"{_last_error_log_line_or_empty(run, killed_ranks)}\nlogs: {run.logs}"
    )


def _last_error_log_line_or_empty(run: RunDir, ranks: list[int]) -> str:
    """Return the last line of the first non-empty error log of these ranks."""
    # It may name the cause: MPI writes its reason there before it aborts.
    for rank in ranks:
        path = run.rank_log_path(rank, "err")
        lines = (
            read_regular_file_bytes_or_refuse(path).decode(errors="replace").split("\n")
            if path.exists()
            else []
        )
        last = next((line.strip() for line in reversed(lines) if line.strip("\0 ")), None)
        if last is not None:
            return f"\nlast line of {path.name}: {last[:300]}"
    return ""


def _rank_and_host_names(plan: Plan, ranks: list[int]) -> str:
    names = [f"rank {rank} on host {plan.node_of(rank).host}" for rank in ranks[:8]]
    return ", ".join([*names, *([f"{len(ranks) - 8} more"] if len(ranks) > 8 else [])])


def _end_from_error_record(
    error_record: ErrorRecord, rank0_output_was_shown: bool = False
) -> Verdict:
    """Return the end that a rank's record describes.

    Args:
        rank0_output_was_shown: whether rank 0's output went to the terminal.
    """
    was_shown = (
        rank0_output_was_shown
        and error_record.rank == 0
        and error_record.is_seen_by_supervisor_only
    )
    return Verdict(
        error_record.exit_status,
        error_record.summary,
        error_record.to_failure(),
        traceback="" if was_shown else (error_record.folded or error_record.traceback).rstrip(),
    )
