"""Cancel a run from another process: end its command, and kill its remaining processes here."""

from __future__ import annotations

import signal

from ortlaunch.base.errors import InputError, LaunchError
from ortlaunch.base.process import Process, wait_until_true_or_timeout
from ortlaunch.launch import JobState
from ortlaunch.launch.orphans import send_signal
from ortlaunch.launch.processes import KILLED_SECONDS, end_job_and_its_processes
from ortlaunch.launch.record import JobRecord
from ortlaunch.rank import GRACE_SECONDS
from ortlaunch.run_folder import lock
from ortlaunch.run_folder.folder import RunDir, write_text_atomically
from ortlaunch.run_folder.verdict import Verdict
from ortlaunch.started_runs.queued import cancel_queued_job_and_wait as cancel_queued
from ortlaunch.started_runs.queued import is_queued
from ortlaunch.started_runs.requests import explain_refused_permission
from ortlaunch.started_runs.status import Status, advice_for_other_host, read_status
from ortlaunch.tables.launchers import LAUNCHERS

# Added to the ranks' grace, once their command was killed.
_EXTRA_GRACE_SECONDS = 4.0


def cancel_run_and_wait_for_its_end(run: RunDir) -> str:
    """Cancel a run, and return a text with the result once none of its processes here is alive.

    Raises:
        InputError: it is no run, or this user cannot end it from this host.
        LaunchError: one of its processes cannot be ended.
    """
    status = read_status(run)
    if is_queued(status.job):
        return _cancel_queued_run_and_describe_result(run, status)
    if not status.state.is_end or status.alive:
        _refuse_run_not_controlled_from_here(run, status)
    with explain_refused_permission(run):
        if not status.state.is_end:
            # Without this file, SIGTERM would request the ranks to save first.
            write_text_atomically(run.cancelled, "")
            end_job_and_its_processes(status.job)
        killed_count = _wait_for_ranks_or_kill_and_count(run, status.job.process)
    if status.state.is_end:
        return f"nothing to cancel: it has ended{_killed_text(killed_count)}\n{read_status(run)}"
    _record_cancellation_if_unrecorded(run, status.job, killed_count)
    return f"{_recorded_cancellation_text(run, status.job)}{_killed_text(killed_count)}\n{read_status(run)}"


def _cancel_queued_run_and_describe_result(run: RunDir, run_status: Status) -> str:
    if run_status.state.is_end:
        return f"nothing to cancel: it has ended\n{run_status}"
    job = cancel_queued(run, run_status.job)
    result_text = (
        "cancelled" if job.state is JobState.CANCELLED else "it ended before it was cancelled"
    )
    return f"{result_text}\n{read_status(run)}"


def _refuse_run_not_controlled_from_here(run: RunDir, run_status: Status) -> None:
    if not run_status.certain:
        raise InputError(advice_for_other_host(run_status.job, run, "cancel"))
    if run_status.job.backend not in LAUNCHERS:
        raise InputError(
            f"{run}: its ranks were started by your own launcher; end that (scancel, kill)"
        )


def _wait_for_ranks_or_kill_and_count(run: RunDir, command_process: Process) -> int:
    if wait_until_true_or_timeout(
        lambda: not _living_processes_of_command(run, command_process),
        GRACE_SECONDS + _EXTRA_GRACE_SECONDS,
    ):
        return 0
    living_process_ids = _living_processes_of_command(run, command_process)
    for pid in living_process_ids:
        send_signal(pid, signal.SIGKILL)
    if not wait_until_true_or_timeout(
        lambda: not _living_processes_of_command(run, command_process), KILLED_SECONDS
    ):
        raise LaunchError(
            f"{run}: SIGKILL did not end process "
            f"{', '.join(map(str, _living_processes_of_command(run, command_process)))}"
        )
    return len(living_process_ids)


def _living_processes_of_command(run: RunDir, command_process: Process) -> list[int]:
    # Another command may have started a run in the folder meanwhile.
    return (
        lock.living_process_ids(run)
        if lock.process_that_last_locked_run(run) == command_process
        else []
    )


def _record_cancellation_if_unrecorded(run: RunDir, job: JobRecord, killed_count: int) -> None:
    """Record in job.json that the run was cancelled, if its command could not do so."""
    recorded_job = JobRecord.read_or_none_refusing_damaged(run)
    if (
        recorded_job is not None
        and recorded_job.process == job.process
        and not recorded_job.state.is_end
    ):
        verdict = Verdict(
            128 + signal.SIGKILL,
            f"cancelled; the command had to be killed{_killed_text(killed_count)}",
        )
        recorded_job.copy_ended_now(JobState.CANCELLED, verdict).write(run)


def _recorded_cancellation_text(run: RunDir, job: JobRecord) -> str:
    recorded_job = JobRecord.read_or_none_refusing_damaged(run)
    if recorded_job is None or recorded_job.process != job.process:
        return f"ended process {job.id}, which had not started a run here"
    return (
        "cancelled"
        if recorded_job.state is JobState.CANCELLED
        else "it ended before it was cancelled"
    )


def _killed_text(killed_count: int) -> str:
    return f"; {killed_count} of its processes had to be killed" if killed_count else ""
