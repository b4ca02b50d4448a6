"""Processes of this host: the identity of one, and the only readers of /proc/PID. Standard library only.

Why not psutil: a rank's supervisor reads processor time and traffic of its family once a second. That takes 0.3 ms, and
2.6 ms with psutil among 100 processes (its `children` reads the stat file of every process on the host). Importing
psutil takes 17 ms and 3 MiB in each supervisor, and its start time of a process moves when the clock is set.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple


class ProcessStat(NamedTuple):
    """`/proc/PID/stat` at one moment; times are in ticks, of which a second has `os.sysconf("SC_CLK_TCK")`."""

    pid: int
    name: str
    state: str
    """The kernel's letter: R running, S sleeping, D waiting for a disk, T stopped, t traced, Z ended, ..."""
    parent: int
    ticks: int
    """Processor time."""
    children_ticks: int
    """Processor time of its children that were waited for."""
    started: int
    """Since the machine was booted."""

    @property
    def has_ended(self) -> bool:
        """Whether it has ended and nobody has waited for it yet."""
        return self.state in "ZX"


def read_stat(pid: int) -> ProcessStat | None:
    """The state and times of a process; None: there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    head, _, tail = text.rpartition(")")  # a name may hold a parenthesis
    fields = tail.split()
    user, system, children_user, children_system = map(int, fields[11:15])
    return ProcessStat(
        pid=pid,
        name=head.partition(" (")[2],
        state=fields[0],
        parent=int(fields[1]),
        ticks=user + system,
        children_ticks=children_user + children_system,
        started=int(fields[19]),
    )


def all_processes() -> Iterator[ProcessStat]:
    """Every process of this host, as far as this one sees them."""
    for name in filter(str.isdecimal, os.listdir("/proc")):
        if stat := read_stat(int(name)):
            yield stat


def descendants_of(parent: int) -> list[int]:
    """Living processes that this one started, and those that they did."""
    living = {one.pid: one.parent for one in all_processes() if not one.has_ended}
    found = [parent]
    for above in found:
        found += [pid for pid, its_parent in living.items() if its_parent == above]
    return found[1:]


def family(pid: int) -> Iterator[int]:
    """A process and its descendants, by the kernel's lists of children: what other processes there are costs nothing.

    Raises:
        OSError: one of them has ended meanwhile.
    """
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            yield from family(int(child))


def bytes_moved(pid: int) -> int:
    """Bytes that a process has read from and written to files and sockets.

    Raises:
        OSError: it has ended, or is another user's.
    """
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines[:2])


def flock_holders(path: Path) -> set[int]:
    """Processes of this user that hold an flock on a file."""
    file = os.path.realpath(path)
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's, or it has ended meanwhile
            if any(_holds(process, descriptor, file) for descriptor in os.listdir(process / "fd")):
                found.add(int(process.name))
    return found


def _holds(process: Path, descriptor: str, file: str) -> bool:
    with contextlib.suppress(OSError):  # it was closed meanwhile
        opened = os.readlink(process / "fd" / descriptor)
        return opened == file and "FLOCK" in (process / "fdinfo" / descriptor).read_text()
    return False


def process_space() -> str:
    """Where a process id means one process: the host and the namespace of process ids."""
    return f"{os.uname().nodename} {os.readlink('/proc/self/ns/pid')}"


class Process(NamedTuple):
    """The identity of a process: an id is given again, and the same id with another start is another process."""

    pid: int
    host: str
    space: str
    """Where the id means it."""
    began: str
    """The machine's boot, and its start in ticks since then."""

    @classmethod
    def of(cls, pid: int) -> Process:
        """The one that has this id here now."""
        return cls(pid, socket.gethostname(), process_space(), _began(pid) or "it has ended")

    @classmethod
    def this(cls) -> Process:
        """The one that runs this."""
        return cls.of(os.getpid())

    @property
    def is_here(self) -> bool:
        """Whether its id can be looked up in this process's own space."""
        return self.space == process_space()

    def lives(self) -> bool:
        """Whether it is running here; one that has ended and was not waited for is not."""
        return _began(self.pid) == self.began

    def send(self, number: int) -> None:
        """Send it a signal, if it still lives.

        Raises:
            PermissionError: it is another user's.
        """
        with contextlib.suppress(ProcessLookupError):
            if self.lives():
                os.kill(self.pid, number)


def _began(pid: int) -> str | None:
    """When it began, since which start of the machine; None once it has ended."""
    stat = read_stat(pid)
    if stat is None or stat.has_ended:
        return None
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {stat.started}"


def heeded(numbers: Iterable[int]) -> tuple[int, ...]:
    """Signals to handle: not a hang-up that is ignored, as `nohup` has it, whose run outlives its terminal."""
    return tuple(n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN)
