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

from ortlaunch import die_with_parent, machine
from ortlaunch.errors import LaunchError
from ortlaunch.launch import JobState, Request
from ortlaunch.launch.failure import ranks_that_began
from ortlaunch.launch.orphans import Orphans, send
from ortlaunch.launch.private import make_private
from ortlaunch.launch.record import JobRecord
from ortlaunch.launch.stop import Stop
from ortlaunch.process import (
    Process,
    descendants_of,
    heeded,
    process_space,
    stopped_family,
    wait_until,
)
from ortlaunch.rank import GRACE_SECONDS, LAUNCHER_VARIABLE
from ortlaunch.run_folder.folder import COUNTED_BYTES, RunDir, is_full

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A scheduler sends these some time before the job's time limit.
_NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
# A rank's supervisor ends the rank after the grace and records that; it needs the time to do so.
_MORE_SECONDS = 2.0
# A killed process ends once the kernel has freed its memory: seconds for a large or a paged one.
KILLED_SECONDS = 30.0
_POLL_SECONDS = 0.5
# A stopped process is reported at the second look.
_LOOK_SECONDS = 4.0
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
        is_ended, is_killed: whether this process sent SIGTERM, or SIGKILL.
        ended_by: the signal that ended the command itself, if any.
        oom_kills: processes of this control group that the kernel's out-of-memory killer ended
            during the job; None if the kernel reports none.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        orphans: Orphans,
        request: Request,
    ) -> None:
        self.process = process
        self.orphans = orphans
        self.request = request
        self.is_quiet = False
        self.began = time.monotonic()
        self.has_all_ranks = False
        self.early: list[int] = []
        self.signal: int | None = None
        self.is_ended = self.is_killed = self.is_late = False
        self.ended_by: int | None = None
        self.oom_kills: int | None = None
        self._oom_kills_before = machine.oom_kills()

    def has_ended(self, status: int) -> None:
        """Record the foreign signal that ended the command, and the out-of-memory kills since its start."""
        self.ended_by = -status if status < 0 and not self.is_late else None
        after = machine.oom_kills()
        if after is not None and self._oom_kills_before is not None:
            self.oom_kills = after - self._oom_kills_before


def ending_with_this_process() -> list[str]:
    """Return the words before a command that gets SIGTERM when this process ends.

    Also after `kill -9`. The path of its program follows, then its arguments from the 0th.
    """
    program = die_with_parent.__file__
    here = (str(os.getpid()), LAUNCHER_VARIABLE, process_space())
    return [sys.executable, "-I", "-S", program, *here]


def submit(request: Request, output: Path | None = None) -> Job:
    """Write the request's files and start its command.

    Args:
        output: the file to which the command's output is appended; None: this process's own output.

    Raises:
        LaunchError: the program is not installed.
    """
    if request.private:
        make_private(Path(request.private))
    request.write_files()
    program = shutil.which(request.argv[0])
    if program is None:
        raise LaunchError(f"cannot start {request.argv[0]}: program not found")
    argv = [*ending_with_this_process(), program, *request.argv]
    # An outer torchrun's options, which an inner one would take from its environment.
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    environ = {**outer, **dict(request.env)}
    orphans = Orphans()
    with open(output, "ab") if output else contextlib.nullcontext() as sink:
        process = subprocess.Popen(
            argv, env=environ, start_new_session=True, stdout=sink, stderr=sink
        )
    orphans.belong_to(process.pid)
    return Job(process, orphans, request)


def state(job: Job | JobRecord) -> JobState:
    """Return the state of a job; one of another process has failed if its command left no record."""
    if isinstance(job, JobRecord):
        return job.state if job.state.is_end or job.process.lives() else JobState.FAILED
    status = job.process.poll()
    if status is None:
        return JobState.RUNNING
    return JobState.SUCCEEDED if status == 0 else JobState.FAILED


def wait(job: Job) -> int:
    """Wait until the job and all its processes on this host have ended.

    Signals to this process are forwarded to the job during that time.

    Returns:
        The exit status as a shell reports it: 128 + the signal's number after a signal.
    """
    with _forwarding(job):
        status = _wait_for_command(job)
        job.has_ended(status)
        _end_rest(job)
    if job.request.limits:
        RunDir(job.request.limits.folder).ended_ranks.unlink(missing_ok=True)
    # With status 0 the command completed in spite of the signal.
    if job.signal is not None and status:
        return 128 + job.signal
    return 128 - status if status < 0 else status


def _wait_for_command(job: Job) -> int:
    """Wait for the command, but only some seconds once the ranks gave up or have ended.

    Returns:
        Its status; 0 if it had to be ended after all ranks, whose own records then count.
    """
    # mpirun would wait for ever for its daemon on a lost host, and for whoever holds its port.
    looked = time.monotonic()
    stopped: dict[int, str] = {}
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return job.process.wait(_POLL_SECONDS)
        late = _lateness(job)
        if late is not None:
            return _end_late_command(job, late)
        if time.monotonic() - looked > _LOOK_SECONDS:
            looked = time.monotonic()
            stopped = _report_stopped(job, stopped)


class _Lateness(NamedTuple):
    """Why a command is to be ended, and the seconds that it still has to end by itself."""

    seconds: float
    message: str = ""
    is_over: bool = False
    """Whether all ranks have ended, so that the command's end is not the run's."""


def _lateness(job: Job) -> _Lateness | None:
    """Return why the command is to be ended; None if it may go on."""
    limits = job.request.limits
    if limits is None:
        return None
    run = RunDir(limits.folder)
    if limits.hosts > 1 and (run.lost.exists() or run.stall.exists()):
        return _Lateness(_LOST_SECONDS if run.lost.exists() else _STALL_SECONDS)
    ended = run.ended_ranks.stat().st_size if run.ended_ranks.exists() else 0
    if ended >= limits.ranks * COUNTED_BYTES:
        message = f"has not ended {_OUTLIVED_SECONDS:g} s after its last rank"
        return _Lateness(_OUTLIVED_SECONDS, message, is_over=True)
    if job.has_all_ranks or time.monotonic() - job.began < limits.start_seconds:
        return None
    began = len(ranks_that_began(run))
    # On a full disk, ranks leave no log.
    job.has_all_ranks = began == limits.ranks or is_full(run.path)
    message = f"has started {began} of {limits.ranks} ranks in {limits.start_seconds:g} s"
    return None if job.has_all_ranks else _Lateness(0.0, message)


def _end_late_command(job: Job, late: _Lateness) -> int:
    """Give the command its seconds, then end it; return its status, 0 if its ranks had ended."""
    for number, seconds in ((signal.SIGTERM, late.seconds), (signal.SIGKILL, _LOST_SECONDS)):
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = job.process.wait(seconds)
            return 0 if job.is_late and late.is_over else status
        if late.message and not job.is_late:
            _print_line(f"the launcher (process {job.process.pid}) {late.message}, and is ended")
        job.is_late = True
        _signal_group(job, number)
    status = job.process.wait()
    return 0 if late.is_over else status


def _report_stopped(job: Job, before: dict[int, str]) -> dict[int, str]:
    """Print the processes of the job that were stopped at the last look, too; return all stopped.

    A process that has been reported has no name in the result.
    """
    now = stopped_family(job.process.pid)
    for pid in now:
        if name := before.get(pid):
            _print_line(
                f"process {pid} ({name}) is stopped, and the run waits for it: kill -CONT {pid}"
            )
        now[pid] = "" if pid in before else now[pid]
    return now


def cancel(job: Job | JobRecord) -> None:
    """End the job with SIGTERM, and after a grace with SIGKILL, and all processes that it started.

    For a job of another process, end that process's command.
    """
    if isinstance(job, JobRecord):
        _end_command(job.process)
    else:
        _end_rest(job)
        job.process.wait()


def _end_command(command: Process) -> None:
    """Let a command end its ranks and itself within their grace; else kill it and its descendants.

    Raises:
        LaunchError: SIGKILL does not end one of them.
    """
    command.send(signal.SIGTERM)
    # A process that is suspended by SIGSTOP handles SIGTERM only after SIGCONT.
    command.send(signal.SIGCONT)
    if wait_until(lambda: not command.lives(), GRACE_SECONDS + 2 * _MORE_SECONDS):
        return
    # Collected before the kill: afterwards the descendants have another parent.
    family = [command, *(Process.of(pid) for pid in descendants_of(command.pid))]

    def left() -> list[str]:
        return [str(one.pid) for one in family if one.lives()]

    command.send(signal.SIGKILL)
    # The launcher and the ranks end with the command.
    if wait_until(lambda: not left(), GRACE_SECONDS + _MORE_SECONDS):
        return
    for one in family:
        one.send(signal.SIGKILL)
    if not wait_until(lambda: not left(), KILLED_SECONDS):
        raise LaunchError(f"SIGKILL did not end process {', '.join(left())}")


@contextlib.contextmanager
def _forwarding(job: Job) -> Iterator[None]:
    """Forward signals of this process to the job inside the `with` block."""
    handlers: dict[int, Callable[[int, FrameType | None], None]] = {}
    handlers.update(dict.fromkeys(heeded(_ENDING_SIGNALS), lambda number, frame: _end(job, number)))
    handlers.update(dict.fromkeys(_NOTICES, lambda number, frame: _notify(job, number)))
    if job.request.stop is not None or job.request.notice_ends:
        handlers[signal.SIGUSR1] = lambda number, frame: _end(job, number)
    if job.request.stop is not None:
        # The interval timer that `_request_stop` sets raises SIGALRM when the grace is over.
        handlers[signal.SIGALRM] = lambda number, frame: _kill(job)
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        for number in job.early:
            handlers[number](number, None)
        yield
    finally:
        if job.request.stop is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end(job: Job, number: int) -> None:
    """Handle a signal that requests the end: first let the ranks save, if the run saves at all."""
    asked = job.signal is not None
    job.signal = job.signal or number
    if job.request.stop is not None and not job.request.stop.is_cancelled:
        if not asked:
            _request_stop(job, job.request.stop, number)
        elif number == signal.SIGINT:
            _kill(job)
    elif job.is_ended:
        _kill(job)
    else:
        job.is_ended = True
        _signal_group(job, signal.SIGTERM)
        # A suspended process cannot end.
        _signal_group(job, signal.SIGCONT)


def _request_stop(job: Job, stop: Stop, number: int) -> None:
    """Request the ranks to save and stop; the timer kills all of them after their grace."""
    name = signal.Signals(number).name
    grace = stop.grace_seconds
    # `ortlaunch stop` and schedulers send SIGUSR1, which no user types.
    cause = f"stop requested ({name})" if number == signal.SIGUSR1 else name
    _print_line(
        f"{cause}: saves after this step, stops within {grace} s (launch.grace_seconds); Ctrl-C: now"
    )
    stop.write(name)
    _signal_group(job, signal.SIGCONT)
    _wake(job, signal.SIGUSR1)
    # Later than the supervisors, which kill their ranks after the grace and record that.
    signal.setitimer(signal.ITIMER_REAL, grace + 2 * _MORE_SECONDS)


def _kill(job: Job) -> None:
    """Kill the job and all its processes now."""
    job.is_killed = True
    for pid in (job.process.pid, *job.orphans.left()):
        send(pid, signal.SIGKILL)


def _notify(job: Job, number: int) -> None:
    """Forward a notice to the ranks."""
    saves = job.request.stop is not None and number == signal.SIGUSR2
    name = signal.Signals(number).name
    if not job.is_quiet:
        _print_line(f"checkpoint requested ({name}): the ranks save after this step" if saves else
             f"{name} is forwarded to the ranks, which continue unless they handle it")  # fmt: skip
    _wake(job, number)


def _wake(job: Job, number: int) -> None:
    """Send a signal to the ranks' supervisors, through the launcher if it forwards signals."""
    for pid in (
        [job.process.pid]
        if job.request.notifies_ranks
        else job.orphans.children_of(job.process.pid)
    ):
        send(pid, number)


def _print_line(line: str) -> None:
    # Called in signal handlers: print is not reentrant, os.write is.
    with contextlib.suppress(OSError):
        # Clear the line: the terminal's ^C follows the progress line.
        start = "\r\x1b[K" if os.isatty(2) else ""
        os.write(2, f"{start}ortlaunch: {line}\n".encode())


def _end_rest(job: Job) -> None:
    """End the job's remaining processes: SIGTERM to the topmost, and after a grace SIGKILL to all."""
    deadline = time.monotonic() + GRACE_SECONDS + _MORE_SECONDS
    asked = set[int]()
    while left := job.orphans.left():
        late = time.monotonic() > deadline or job.is_killed
        for pid in (
            left if late else [pid for pid, is_root in left.items() if is_root and pid not in asked]
        ):
            send(pid, signal.SIGKILL if late else signal.SIGTERM)
            send(pid, signal.SIGCONT)
            asked.add(pid)
        job.process.poll()
        time.sleep(0.05)
    job.orphans.done()
    if job.request.private:
        shutil.rmtree(job.request.private, ignore_errors=True)


def _signal_group(job: Job, number: int) -> None:
    send(-job.process.pid, number)
