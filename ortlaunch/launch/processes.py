"""Start a command in its own process group, wait for it and for all that it started here, and leave nothing behind.

The command dies with this process, and every rank with its parent (see worker/supervision/rank_supervisor.py), so
ending either ends the run, on this host and, through the launcher's own daemons, on the others.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from ortlaunch import die_with_parent, machine
from ortlaunch.errors import LaunchError
from ortlaunch.launch import JobState, Request
from ortlaunch.launch.orphans import Orphans, send
from ortlaunch.launch.private import make_private
from ortlaunch.launch.record import JobRecord
from ortlaunch.launch.stop import Stop
from ortlaunch.process import Process, descendants_of, heeded, process_space
from ortlaunch.rank import GRACE_SECONDS, LAUNCHER_VARIABLE
from ortlaunch.run_folder.folder import write_text

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NOTICES = (signal.SIGUSR1, signal.SIGUSR2)  # a scheduler's, to be told before the time is over
_MORE_SECONDS = 2.0  # a rank's guardian ends it after the grace, and says so, before the guardian itself is ended
_LOOK_SECONDS = 0.5
_LOST_SECONDS = 2.0


class Job:
    """A started command; its process group has the id of the command.

    early: signals that came while it was started; they count once somebody waits for it.
    signal: the one that stopped it, if any, sent to this process by the user.
    ended_by: the one that the command itself died of, if any.
    oom_kills: how many processes of this control group the kernel ended for memory meanwhile; None where it is silent.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        orphans: Orphans,
        tells_ranks: bool,
        stop: Stop | None = None,
    ) -> None:
        self.process = process
        self.orphans = orphans
        self.tells_ranks = tells_ranks
        self.stop = stop
        self.notice_ends = False
        self.is_quiet = False  # another process prints what becomes of a notice
        self.private: str | None = None
        self.given_up: tuple[tuple[str, float], ...] = ()
        self.early: list[int] = []
        self.signal: int | None = None
        self.is_ended = self.is_killed = False  # by SIGTERM, by SIGKILL from here
        self.ended_by: int | None = None
        self.oom_kills: int | None = None
        self._oom_kills_before = machine.oom_kills()

    def has_ended(self, status: int) -> None:
        """Keep what can be seen of the end."""
        self.ended_by = -status if status < 0 else None
        after = machine.oom_kills()
        if after is not None and self._oom_kills_before is not None:
            self.oom_kills = after - self._oom_kills_before


def submit(request: Request, output: Path | None = None) -> Job:
    """Write the request's files and start its command; what it says goes to the end of `output` if that is given."""
    if request.private:
        make_private(Path(request.private))
    for path, text in request.files:
        write_text(Path(path), text)
    program = shutil.which(request.argv[0])
    if program is None:
        raise LaunchError(f"cannot start {request.argv[0]}: there is no such program")
    # The command gets SIGTERM when this process ends, also after `kill -9`.
    dying = [
        sys.executable,
        "-I",
        "-S",
        die_with_parent.__file__,
        str(os.getpid()),
        LAUNCHER_VARIABLE,
        process_space(),
    ]
    argv = [*dying, program, *request.argv]
    environ = {**os.environ, **dict(request.env)}
    orphans = Orphans()
    with open(output, "ab") if output else contextlib.nullcontext() as sink:
        process = subprocess.Popen(
            argv, env=environ, start_new_session=True, stdout=sink, stderr=sink
        )
    orphans.belong_to(process.pid)
    job = Job(process, orphans, request.tells_ranks, request.stop)
    job.notice_ends = request.notice_ends
    job.given_up = request.given_up
    job.private = request.private
    return job


def state(job: Job | JobRecord) -> JobState:
    """Where the job is; another process's has failed where its command went without a word."""
    if isinstance(job, JobRecord):
        return job.state if job.state.is_end or job.process.lives() else JobState.FAILED
    status = job.process.poll()
    if status is None:
        return JobState.RUNNING
    return JobState.SUCCEEDED if status == 0 else JobState.FAILED


def wait(job: Job) -> int:
    """Wait for the end of the job and of all that it started here; signals to this process go to the job first.

    Returns an exit status as a shell would.
    """
    with _forwarding(job):
        status = _wait_for_command(job)
        job.has_ended(status)
        _end_rest(job)
    if job.signal is not None and status:  # 0: it came to its end all the same
        return 128 + job.signal
    return 128 - status if status < 0 else status


def _wait_for_command(job: Job) -> int:
    """Wait for it, but only seconds after the ranks gave up: mpirun waits for its daemon on a lost host."""
    while job.given_up and job.process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return job.process.wait(_LOOK_SECONDS)
        grace = next((seconds for path, seconds in job.given_up if os.path.exists(path)), None)
        if grace is not None:
            for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, _LOST_SECONDS)):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return job.process.wait(seconds)
                _signal_group(job, number)
            break
    return job.process.wait()


def cancel(job: Job | JobRecord) -> None:
    """End the job: SIGTERM, and after a grace SIGKILL, to all that it started; its command, where another has it."""
    if isinstance(job, JobRecord):
        _end_command(job.process)
    else:
        _end_rest(job)
        job.process.wait()


def _end_command(command: Process) -> None:
    """Ask a command to end its ranks and itself, which takes their grace; else kill it, and what it started.

    Raises:
        LaunchError: SIGKILL does not end one of them.
    """
    command.send(signal.SIGTERM)
    command.send(signal.SIGCONT)  # what is stopped could not end
    if _gone([command], GRACE_SECONDS + 2 * _MORE_SECONDS):
        return
    family = [command, *(Process.of(pid) for pid in descendants_of(command.pid))]
    command.send(signal.SIGKILL)
    if _gone(family, GRACE_SECONDS + _MORE_SECONDS):  # launcher and ranks die with it
        return
    for one in family:
        one.send(signal.SIGKILL)
    if not _gone(family, _MORE_SECONDS):
        left = ", ".join(str(one.pid) for one in family if one.lives())
        raise LaunchError(f"SIGKILL did not end process {left}")


def _gone(family: Sequence[Process], seconds: float) -> bool:
    """Whether all of them have ended within so long."""
    deadline = time.monotonic() + seconds
    while any(one.lives() for one in family):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@contextlib.contextmanager
def _forwarding(job: Job) -> Iterator[None]:
    """While open, signals to this process are for the job."""
    handlers: dict[int, Callable[[int, FrameType | None], None]] = {}
    handlers.update(dict.fromkeys(heeded(_ENDING_SIGNALS), lambda number, frame: _end(job, number)))
    handlers.update(dict.fromkeys(_NOTICES, lambda number, frame: _notify(job, number)))
    if job.stop is not None or job.notice_ends:
        handlers[signal.SIGUSR1] = lambda number, frame: _end(job, number)
    if job.stop is not None:
        handlers[signal.SIGALRM] = lambda number, frame: _kill(job)
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        for number in job.early:
            handlers[number](number, None)
        yield
    finally:
        if job.stop is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end(job: Job, number: int) -> None:
    """A signal that asks for the end: first a wish to save and stop, where there is something to save."""
    asked = job.signal is not None
    job.signal = job.signal or number
    if job.stop is not None and not job.stop.is_cancelled:
        if not asked:
            _ask(job, job.stop, number)
        elif number == signal.SIGINT:
            _kill(job)
    elif job.is_ended:
        _kill(job)
    else:
        job.is_ended = True
        _signal_group(job, signal.SIGTERM)
        _signal_group(job, signal.SIGCONT)  # what is stopped could not end


def _ask(job: Job, stop: Stop, number: int) -> None:
    """Ask the ranks to save and stop; after their grace all is killed."""
    name = signal.Signals(number).name
    grace = stop.grace_seconds
    _say(
        f"{name}: saves after this step, stops within {grace} s (launch.grace_seconds); Ctrl-C: now"
    )
    stop.ask(name)
    _signal_group(job, signal.SIGCONT)
    _wake(job, signal.SIGUSR1)
    signal.setitimer(
        signal.ITIMER_REAL, grace + 2 * _MORE_SECONDS
    )  # guardians kill, and say so, before that


def _kill(job: Job) -> None:
    """End all of it now."""
    job.is_killed = True
    for pid in (job.process.pid, *job.orphans.left()):
        send(pid, signal.SIGKILL)


def _notify(job: Job, number: int) -> None:
    """Pass a notice on."""
    saves = job.stop is not None and number == signal.SIGUSR2
    name = signal.Signals(number).name
    if not job.is_quiet:
        _say(f"checkpoint requested ({name}): the ranks save after this step" if saves else
             f"{name} is forwarded to the ranks, which continue unless they handle it")  # fmt: skip
    _wake(job, number)


def _wake(job: Job, number: int) -> None:
    """Send the ranks' guardians a signal, through the launcher where that hands it on."""
    for pid in [job.process.pid] if job.tells_ranks else job.orphans.children_of(job.process.pid):
        send(pid, number)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        start = "\r\x1b[K" if os.isatty(2) else ""  # the terminal's ^C stands behind the live line
        os.write(2, f"{start}ortlaunch: {line}\n".encode())  # print is not reentrant


def _end_rest(job: Job) -> None:
    """End what is left of the job: SIGTERM to what nothing stands above, and after a grace SIGKILL to all."""
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
    if job.private:
        shutil.rmtree(job.private, ignore_errors=True)


def _signal_group(job: Job, number: int) -> None:
    send(-job.process.pid, number)
