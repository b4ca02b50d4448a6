"""Start a command in its own process group, wait for it and its descendants, and end all of them.

The command ends with this process, and every rank ends with its parent (see
worker/supervision/rank_supervisor.py). So ending either ends the run: on this host, and through the
launcher's own daemons on the others.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from ortlaunch.base import die_with_parent, forked_process, machine
from ortlaunch.base.errors import LaunchError
from ortlaunch.base.forked_process import ForkedProcess
from ortlaunch.base.process import (
    Process,
    living_descendant_pids,
    name_by_stopped_process_id_in_tree,
    process_space,
    signals_to_handle,
    wait_until_true_or_timeout,
)
from ortlaunch.launch import JobState, LaunchRequest
from ortlaunch.launch.orphans import DescendantReaper, send_signal
from ortlaunch.launch.private import recreate_empty_private_folder_or_refuse_unsafe
from ortlaunch.launch.record import JobRecord
from ortlaunch.launch.stop import StopRequest
from ortlaunch.rank import GRACE_SECONDS, LAUNCHER_VARIABLE
from ortlaunch.run_folder.error_record import ranks_whose_supervisor_started
from ortlaunch.run_folder.folder import RANK_LINE_BYTES, RunDir, is_disk_nearly_full

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A scheduler sends these some time before the job's time limit.
_NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
# A rank's supervisor ends the rank after the grace and records that; it needs the time to do so.
_EXTRA_GRACE_SECONDS = 2.0
# A killed process ends once the kernel has freed its memory: seconds for a large or a paged one.
KILLED_SECONDS = 30.0
_POLL_SECONDS = 0.5
# A stopped process is reported at the second look.
_STOPPED_CHECK_SECONDS = 4.0
# Seconds for a launcher to end by itself: after a lost host, a stall, and the end of all ranks.
_LOST_SECONDS = 2.0
_STALL_SECONDS = 15.0
_OUTLIVED_SECONDS = 10.0


class Job:
    """A started command; its process group has the id of the command.

    Attributes:
        request: the request that started it.
        is_quiet: another process prints the effect of a notice.
        early: signals that came while it was started; they count once `wait` is called.
        signal: the signal by which the user stopped it, sent to this process, if any.
        has_all_ranks: whether all ranks have begun, as far as this process has looked.
        is_late: whether it was ended because it had not ended in time.
        sent_sigterm, sent_sigkill: whether this process sent SIGTERM, or SIGKILL.
        foreign_signal: the signal that ended the command itself, if any.
        memory_kill_count_of_control_group: processes of this control group that the kernel's out-of-memory killer ended
            during the job; None if the kernel reports none.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes] | ForkedProcess,
        orphans: DescendantReaper,
        request: LaunchRequest,
    ) -> None:
        self.process = process
        self.orphans = orphans
        self.request = request
        self.is_quiet = False
        self.start_seconds = time.monotonic()
        self.has_all_ranks = False
        self.early_signals: list[int] = []
        self.user_signal: int | None = None
        self.sent_sigterm = self.sent_sigkill = self.is_late = False
        self.foreign_signal: int | None = None
        self.oom_kills: int | None = None
        self._oom_kills_before = machine.memory_kill_count_of_control_group()

    def keep_end_signal_and_memory_kills(self, returncode: int) -> None:
        """Record the foreign signal that ended the command, and the out-of-memory kills since its start."""
        self.foreign_signal = -returncode if returncode < 0 and not self.is_late else None
        kills_now = machine.memory_kill_count_of_control_group()
        if kills_now is not None and self._oom_kills_before is not None:
            self.oom_kills = kills_now - self._oom_kills_before


def command_prefix_to_end_with_parent() -> list[str]:
    """Return the words before a command that gets SIGTERM when this process ends.

    Also after `kill -9`. The path of its program follows, then its arguments from the 0th.
    """
    arguments = (str(os.getpid()), LAUNCHER_VARIABLE, process_space())
    return [sys.executable, "-I", "-S", die_with_parent.__file__, *arguments]


def write_files_and_start_job(request: LaunchRequest, output_path: Path | None = None) -> Job:
    """Write the request's files and start its command.

    Args:
        output_path: the file to which the command's output is appended; None: this process's own output.

    Raises:
        LaunchError: the program is not installed.
    """
    if request.private_folder:
        recreate_empty_private_folder_or_refuse_unsafe(Path(request.private_folder))
    request.write_files()
    program = shutil.which(request.argv[0])
    if program is None:
        raise LaunchError(f"cannot start {request.argv[0]}: program not found")
    argv = [*command_prefix_to_end_with_parent(), program, *request.argv]
    # An outer torchrun's options, which an inner one would take from its environment.
    outer_variables = {
        name: value for name, value in os.environ.items() if not name.startswith("PET_")
    }
    environ = {**outer_variables, **dict(request.env)}
    orphans = DescendantReaper()
    fork = None if output_path else forked_process.start_by_fork
    process: subprocess.Popen[bytes] | ForkedProcess | None = fork and fork(request.argv, environ)
    if process is None:
        with open(output_path, "ab") if output_path else contextlib.nullcontext() as sink:
            process = subprocess.Popen(
                argv, env=environ, start_new_session=True, stdout=sink, stderr=sink
            )
    orphans.set_launcher(process.pid)
    return Job(process, orphans, request)


def job_state(job: Job | JobRecord) -> JobState:
    """Return the state of a job; one of another process has failed if its command left no record."""
    if isinstance(job, JobRecord):
        return job.state if job.state.is_end or job.process.is_alive() else JobState.FAILED
    status = job.process.poll()
    if status is None:
        return JobState.RUNNING
    return JobState.SUCCEEDED if status == 0 else JobState.FAILED


def forward_signals_until_job_ends(job: Job) -> int:
    """Wait until the job and all its processes on this host have ended.

    Signals to this process are forwarded to the job during that time.

    Returns:
        The exit status as a shell reports it: 128 + the signal's number after a signal.
    """
    with _handle_signals_for_job_within_block(job):
        status = _wait_for_command_or_end_late_one(job)
        job.keep_end_signal_and_memory_kills(status)
        _end_remaining_processes_and_private_folder(job)
    if job.request.limits:
        RunDir(job.request.limits.folder).ended_ranks.unlink(missing_ok=True)
    # With status 0 the command completed in spite of the signal.
    if job.user_signal is not None and status:
        return 128 + job.user_signal
    return 128 - status if status < 0 else status


def _wait_for_command_or_end_late_one(job: Job) -> int:
    """Wait for the command, but only some seconds once the ranks gave up or have ended.

    Returns:
        Its status; 0 if it had to be ended after all ranks, whose own records then count.
    """
    # mpirun would wait for ever for its daemon on a lost host, and for whoever holds its port.
    last_look_seconds = time.monotonic()
    names_by_stopped_pid: dict[int, str] = {}
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return job.process.wait(_POLL_SECONDS)
        late = _reason_to_end_launcher_noting_if_all_ranks_began(job)
        if late is not None:
            return _wait_then_end_launcher_and_return_status_or_0(job, late)
        if time.monotonic() - last_look_seconds > _STOPPED_CHECK_SECONDS:
            last_look_seconds = time.monotonic()
            names_by_stopped_pid = _print_repeatedly_stopped_and_return_all_stopped(
                job, names_by_stopped_pid
            )


class _LauncherEndReason(NamedTuple):
    """Why a command is to be ended, and the seconds that it still has to end by itself."""

    seconds_left: float
    message: str = ""
    have_all_ranks_ended: bool = False
    """Whether all ranks have ended, so that the command's end is not the run's."""


def _reason_to_end_launcher_noting_if_all_ranks_began(job: Job) -> _LauncherEndReason | None:
    """Return why the command is to be ended; None if it may go on."""
    limits = job.request.limits
    if limits is None:
        return None
    run = RunDir(limits.folder)
    if limits.hosts > 1 and (run.lost.exists() or run.stall.exists()):
        return _LauncherEndReason(_LOST_SECONDS if run.lost.exists() else _STALL_SECONDS)
    ended_bytes = run.ended_ranks.stat().st_size if run.ended_ranks.exists() else 0
    if ended_bytes >= limits.ranks * RANK_LINE_BYTES:
        message = f"has not ended {_OUTLIVED_SECONDS:g} s after its last rank"
        return _LauncherEndReason(_OUTLIVED_SECONDS, message, have_all_ranks_ended=True)
    if job.has_all_ranks or time.monotonic() - job.start_seconds < limits.start_seconds:
        return None
    begun_rank_count = len(ranks_whose_supervisor_started(run))
    # On a full disk, ranks leave no log.
    job.has_all_ranks = begun_rank_count == limits.ranks or is_disk_nearly_full(run.path)
    message = (
        f"has started {begun_rank_count} of {limits.ranks} ranks in {limits.start_seconds:g} s"
    )
    return None if job.has_all_ranks else _LauncherEndReason(0.0, message)


def _wait_then_end_launcher_and_return_status_or_0(job: Job, end_reason: _LauncherEndReason) -> int:
    """Give the command its seconds, then end it; return its status, 0 if its ranks had ended."""
    for signal_number, seconds in (
        (signal.SIGTERM, end_reason.seconds_left),
        (signal.SIGKILL, _LOST_SECONDS),
    ):
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = job.process.wait(seconds)
            return 0 if job.is_late and end_reason.have_all_ranks_ended else status
        if end_reason.message and not job.is_late:
            _print_line(
                f"the launcher (process {job.process.pid}) {end_reason.message}, and is ended"
            )
        job.is_late = True
        _signal_process_group(job, signal_number)
    status = job.process.wait()
    return 0 if end_reason.have_all_ranks_ended else status


def _print_repeatedly_stopped_and_return_all_stopped(
    job: Job, name_by_pid_at_last_poll: dict[int, str]
) -> dict[int, str]:
    """Print the processes of the job that were stopped at the last look, too; return all stopped.

    A process that has been reported has no name in the result.
    """
    names_by_pid = name_by_stopped_process_id_in_tree(job.process.pid)
    for pid in names_by_pid:
        if name := name_by_pid_at_last_poll.get(pid):
            _print_line(
                f"process {pid} ({name}) is stopped, and the run waits for it: kill -CONT {pid}"
            )
        names_by_pid[pid] = "" if pid in name_by_pid_at_last_poll else names_by_pid[pid]
    return names_by_pid


def end_job_and_its_processes(job: Job | JobRecord) -> None:
    """End the job with SIGTERM, and after a grace with SIGKILL, and all processes that it started.

    For a job of another process, end that process's command.
    """
    if isinstance(job, JobRecord):
        _end_process_or_kill_with_descendants(job.process)
    else:
        _end_remaining_processes_and_private_folder(job)
        job.process.wait()


def _end_process_or_kill_with_descendants(command_process: Process) -> None:
    """Let a command end its ranks and itself within their grace; else kill it and its descendants.

    Raises:
        LaunchError: SIGKILL does not end one of them.
    """
    command_process.send_signal_if_alive(signal.SIGTERM)
    # A process that is suspended by SIGSTOP handles SIGTERM only after SIGCONT.
    command_process.send_signal_if_alive(signal.SIGCONT)
    if wait_until_true_or_timeout(
        lambda: not command_process.is_alive(), GRACE_SECONDS + 2 * _EXTRA_GRACE_SECONDS
    ):
        return
    # Collected before the kill: afterwards the descendants have another parent.
    family = [
        command_process,
        *(Process.identity_of_pid(pid) for pid in living_descendant_pids(command_process.pid)),
    ]

    def living_pids() -> list[str]:
        return [str(process.pid) for process in family if process.is_alive()]

    command_process.send_signal_if_alive(signal.SIGKILL)
    # The launcher and the ranks end with the command.
    if wait_until_true_or_timeout(lambda: not living_pids(), GRACE_SECONDS + _EXTRA_GRACE_SECONDS):
        return
    for process in family:
        process.send_signal_if_alive(signal.SIGKILL)
    if not wait_until_true_or_timeout(lambda: not living_pids(), KILLED_SECONDS):
        raise LaunchError(f"SIGKILL did not end process {', '.join(living_pids())}")


@contextlib.contextmanager
def _handle_signals_for_job_within_block(job: Job) -> Iterator[None]:
    handlers: dict[int, Callable[[int, FrameType | None], None]] = {}
    handlers.update(
        dict.fromkeys(
            signals_to_handle(_ENDING_SIGNALS),
            lambda signal_number, frame: _request_stop_or_end_job_on_signal(job, signal_number),
        )
    )
    handlers.update(
        dict.fromkeys(
            _NOTICES,
            lambda signal_number, frame: _announce_and_forward_notice_signal(job, signal_number),
        )
    )
    if job.request.stop is not None or job.request.notice_ends:
        handlers[signal.SIGUSR1] = lambda signal_number, frame: _request_stop_or_end_job_on_signal(
            job, signal_number
        )
    if job.request.stop is not None:
        # The interval timer that `_request_save_and_start_kill_timer` sets raises SIGALRM when the grace is over.
        handlers[signal.SIGALRM] = lambda signal_number, frame: _kill_job(job)
    previous = {
        signal_number: signal.signal(signal_number, handler)
        for signal_number, handler in handlers.items()
    }
    try:
        for signal_number in job.early_signals:
            handlers[signal_number](signal_number, None)
        yield
    finally:
        if job.request.stop is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for signal_number, handler in previous.items():
            signal.signal(signal_number, handler)


def _request_stop_or_end_job_on_signal(job: Job, signal_number: int) -> None:
    """Handle a signal that requests the end: first let the ranks save, if the run saves at all."""
    was_signalled = job.user_signal is not None
    job.user_signal = job.user_signal or signal_number
    if job.request.stop is not None and not job.request.stop.is_cancelled:
        if not was_signalled:
            _request_save_and_start_kill_timer(job, job.request.stop, signal_number)
        elif signal_number == signal.SIGINT:
            _kill_job(job)
    elif job.sent_sigterm:
        _kill_job(job)
    else:
        job.sent_sigterm = True
        _signal_process_group(job, signal.SIGTERM)
        # A suspended process cannot end.
        _signal_process_group(job, signal.SIGCONT)


def _request_save_and_start_kill_timer(
    job: Job, stop_request: StopRequest, signal_number: int
) -> None:
    """Request the ranks to save and stop; the timer kills all of them after their grace."""
    name = signal.Signals(signal_number).name
    grace = stop_request.grace_seconds
    # `ortlaunch stop` and schedulers send SIGUSR1, which no user types.
    cause = f"stop requested ({name})" if signal_number == signal.SIGUSR1 else name
    _print_line(
        f"{cause}: saves after this step, stops within {grace} s (launch.grace_seconds); Ctrl-C: now"
    )
    stop_request.write_unless_present(name)
    _signal_process_group(job, signal.SIGCONT)
    _signal_launcher_or_rank_supervisors(job, signal.SIGUSR1)
    # Later than the supervisors, which kill their ranks after the grace and record that.
    signal.setitimer(signal.ITIMER_REAL, grace + 2 * _EXTRA_GRACE_SECONDS)


def _kill_job(job: Job) -> None:
    job.sent_sigkill = True
    for pid in (job.process.pid, *job.orphans.reap_ended_and_map_is_root_by_living_pid()):
        send_signal(pid, signal.SIGKILL)


def _announce_and_forward_notice_signal(job: Job, signal_number: int) -> None:
    saves = job.request.stop is not None and signal_number == signal.SIGUSR2
    name = signal.Signals(signal_number).name
    if not job.is_quiet:
        _print_line(f"checkpoint requested ({name}): the ranks save after this step" if saves else
             f"{name} is forwarded to the ranks, which continue unless they handle it")  # fmt: skip
    _signal_launcher_or_rank_supervisors(job, signal_number)


def _signal_launcher_or_rank_supervisors(job: Job, signal_number: int) -> None:
    """Send a signal to the ranks' supervisors, through the launcher if it forwards signals."""
    for pid in (
        [job.process.pid]
        if job.request.notifies_ranks
        else job.orphans.living_child_pids(job.process.pid)
    ):
        send_signal(pid, signal_number)


def _print_line(line: str) -> None:
    # Called in signal handlers: print is not reentrant, os.write is.
    with contextlib.suppress(OSError):
        # Clear the line: the terminal's ^C follows the progress line.
        start = "\r\x1b[K" if os.isatty(2) else ""
        os.write(2, f"{start}ortlaunch: {line}\n".encode())


def _end_remaining_processes_and_private_folder(job: Job) -> None:
    """End the job's remaining processes: SIGTERM to the topmost, and after a grace SIGKILL to all."""
    deadline = time.monotonic() + GRACE_SECONDS + _EXTRA_GRACE_SECONDS
    signalled_pids = set[int]()
    while is_root_by_pid := job.orphans.reap_ended_and_map_is_root_by_living_pid():
        should_kill = time.monotonic() > deadline or job.sent_sigkill
        for pid in (
            is_root_by_pid
            if should_kill
            else [
                pid
                for pid, is_root in is_root_by_pid.items()
                if is_root and pid not in signalled_pids
            ]
        ):
            send_signal(pid, signal.SIGKILL if should_kill else signal.SIGTERM)
            send_signal(pid, signal.SIGCONT)
            signalled_pids.add(pid)
        job.process.poll()
        time.sleep(0.05)
    job.orphans.stop_reaping()
    if job.request.private_folder:
        shutil.rmtree(job.request.private_folder, ignore_errors=True)


def _signal_process_group(job: Job, signal_number: int) -> None:
    send_signal(-job.process.pid, signal_number)
