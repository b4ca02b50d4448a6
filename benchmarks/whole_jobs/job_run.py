"""Run one command, and measure all its processes: seconds, CPU seconds, peak memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_PAGE_BYTES = os.sysconf("SC_PAGESIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
# Both as samples: a shorter peak is not seen.
_RESIDENT_EVERY_SECONDS = 0.2
# It walks the page tables, which takes milliseconds.
_SHARED_EVERY_SECONDS = 1.0
# A process that ends with its parent, and keeps one core busy until then.
_SPIN = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


class Measured(NamedTuple):
    """The measures of one command."""

    exit_status: int
    wall_seconds: float
    user_seconds: float
    system_seconds: float
    peak_resident_bytes: int
    """Of all processes together; a page of two processes counts twice."""
    peak_proportional_bytes: int
    """The same, but a page of two processes counts half in each (PSS)."""
    processes: int
    """The most at a time."""
    orphans: int
    """Processes that were still there when the command had ended."""
    seconds_after_signal: float | None
    """From the signal to the end."""
    other_cpu_seconds: float
    """Of all other processes, but `other_process`: whether the machine was quiet."""


class Stop(NamedTuple):
    """A signal at a moment of the command's output."""

    log_pattern: str
    signal_number: int = signal.SIGTERM


def adopt_orphans() -> None:
    """Become the parent of orphans among the descendants, so that they are measured and ended."""
    # PR_SET_CHILD_SUBREAPER
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def run_and_measure(
    command: Sequence[str],
    log: Path,
    folder: Path,
    environ: Mapping[str, str],
    timeout_seconds: float,
    stop: Stop | None = None,
    other_process: int | None = None,
) -> Measured:
    """Run a command in a process group of its own, and end all its processes.

    Args:
        command, environ, folder: as of subprocess.Popen.
        log: gets its output.
        timeout_seconds: after them the command is killed, and its exit status is -9.
        stop: a signal to send once the output matches.
        other_process: a child that does not belong to the command.
    """
    usage_before = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy_before = _machine_busy_seconds() - _cpu_seconds(other_process)
    begun = time.monotonic()
    with log.open("w") as output:
        runner = subprocess.Popen(
            list(command), cwd=folder, env=dict(environ), stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    resident = proportional = processes = 0
    next_shared = begun
    signalled: float | None = None
    try:
        while runner.poll() is None:
            members = dict(_descendants_with_resident_bytes(other_process))
            resident = max(resident, sum(members.values()))
            processes = max(processes, _running_count(members))
            now = time.monotonic()
            if now >= next_shared:
                next_shared = now + _SHARED_EVERY_SECONDS
                proportional = max(proportional, sum(map(_proportional_bytes, members)))
            if stop and signalled is None and re.search(stop.log_pattern, log.read_text()):
                signalled = now
                runner.send_signal(stop.signal_number)
            if now - begun > timeout_seconds:
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                runner.wait(_RESIDENT_EVERY_SECONDS)
        ended = time.monotonic()
        members = dict(_descendants_with_resident_bytes(other_process))
        members.pop(runner.pid, None)
    finally:
        runner.kill()
        exit_status = runner.wait()
        _kill_and_reap_descendants(other_process)
    busy_after = _machine_busy_seconds() - _cpu_seconds(other_process)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    user = usage.ru_utime - usage_before.ru_utime
    system = usage.ru_stime - usage_before.ru_stime
    return Measured(
        exit_status,
        ended - begun,
        user,
        system,
        resident,
        proportional,
        processes,
        _running_count(members),
        None if signalled is None else ended - signalled,
        max(0.0, busy_after - busy_before - user - system),
    )


@contextlib.contextmanager
def busy_neighbour() -> Iterator[int]:
    """Keep one core busy, by a process whose id this yields."""
    neighbour = subprocess.Popen([sys.executable, "-c", _SPIN], start_new_session=True)
    try:
        yield neighbour.pid
    finally:
        neighbour.kill()
        neighbour.wait()


def _descendants_with_resident_bytes(other_process: int | None) -> Iterator[tuple[int, int]]:
    """Yield the descendants of this process, orphans included, with their resident memory.

    It is 0 for those that have ended and were not waited for.
    """
    children: dict[int, list[tuple[int, int]]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        # It may end at any moment.
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{entry}/stat").read_text()
            # The name of a process may have spaces and brackets.
            _state, parent, *others = text[text.rindex(")") + 2 :].split()
            resident = int(others[19]) * _PAGE_BYTES
            children.setdefault(int(parent), []).append((int(entry), resident))
    waiting = [child for child in children.get(os.getpid(), []) if child[0] != other_process]
    while waiting:
        process, resident = waiting.pop()
        yield process, resident
        waiting += children.get(process, [])


def _proportional_bytes(process: int) -> int:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
        return int(text.partition("\nPss:")[2].split()[0]) * 1024
    return 0


def _running_count(resident_bytes_by_process: Mapping[int, int]) -> int:
    return sum(resident > 0 for resident in resident_bytes_by_process.values())


def _kill_and_reap_descendants(other_process: int | None) -> None:
    """Kill all descendants and wait for them, for at most half a minute.

    Waiting adds their CPU seconds to those of this process's children.
    """
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        members = list(dict(_descendants_with_resident_bytes(other_process)))
        for process in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            # An orphan is a child of this process; others are their parents' to wait for.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, os.WNOHANG)
        if not members:
            return
        time.sleep(0.05)


def _cpu_seconds(process: int | None) -> float:
    if process is None:
        return 0.0
    text = Path(f"/proc/{process}/stat").read_text()
    user, system = text[text.rindex(")") + 2 :].split()[11:13]
    return (int(user) + int(system)) / _TICKS


def _machine_busy_seconds() -> float:
    """Return the seconds in which the machine's cores were not idle, nor waiting for a disk."""
    user, nice, system, _idle, _disk, *interrupts = (
        int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]
    )
    return (user + nice + system + sum(interrupts)) / _TICKS
