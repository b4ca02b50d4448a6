"""Start a command in its own process group, wait for it, and leave nothing behind.

The command dies with this process, and every rank with its parent (see worker/shepherd.py), so ending either ends the
run, on this host and, through the launcher's own daemons, on the others.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ortlaunch.errors import LaunchError
from ortlaunch.launch import JobState, Request
from ortlaunch.rundir import write_text

GRACE_SECONDS = 10.0
_FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Becomes the command after asking the kernel for SIGTERM when the parent ends, as after `kill -9` of ortlaunch. Between
# fork and exec (preexec_fn) only async-signal-safe code is allowed, so that this takes a process image of its own.
_DIE_WITH_PARENT = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[3:])
"""


class Job:
    """A started command; its process group has the id of the command. `signal` is the one that stopped it, if any."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.signal: int | None = None


def submit(request: Request, output: Path | None = None) -> Job:
    """Write the request's files and start its command; what it says goes to the end of `output` if that is given."""
    for path, text in request.files:
        write_text(Path(path), text)
    program = shutil.which(request.argv[0])
    if program is None:
        raise LaunchError(f"cannot start {request.argv[0]}: there is no such program")
    argv = request.argv
    if sys.platform == "linux":
        argv = (sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), program, *argv)
    environ = {**os.environ, **dict(request.env)}
    with open(output, "ab") if output else contextlib.nullcontext() as sink:
        return Job(subprocess.Popen(argv, env=environ, start_new_session=True, stdout=sink, stderr=sink))


def state(job: Job) -> JobState:
    """Where the job is."""
    status = job.process.poll()
    if status is None:
        return JobState.RUNNING
    return JobState.SUCCEEDED if status == 0 else JobState.FAILED


def wait(job: Job) -> int:
    """Wait for the end; signals to this process go to the job first. Returns an exit status as a shell would."""
    with _forwarding(job):
        status = job.process.wait()
    _end_group(job)
    if job.signal is not None:
        return 128 + job.signal
    return 128 - status if status < 0 else status


def cancel(job: Job) -> None:
    """End the job: SIGTERM, and after a grace SIGKILL, to its whole group."""
    _end_group(job)
    job.process.wait()


@contextlib.contextmanager
def _forwarding(job: Job) -> Iterator[None]:
    def forward(number: int, frame: object) -> None:
        # A second signal means now.
        sent = signal.SIGTERM if job.signal is None else signal.SIGKILL
        job.signal = job.signal or number
        _signal_group(job, sent)

    previous = {number: signal.signal(number, forward) for number in _FORWARDED_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end_group(job: Job) -> None:
    if _signal_group(job, signal.SIGTERM):
        deadline = time.monotonic() + GRACE_SECONDS
        while _signal_group(job, 0) and time.monotonic() < deadline:
            job.process.poll()
            time.sleep(0.05)
        _signal_group(job, signal.SIGKILL)


def _signal_group(job: Job, number: int) -> bool:
    """Send to the group; False when nobody is left in it."""
    try:
        os.killpg(job.process.pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
