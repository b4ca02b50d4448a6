"""Processes of this host: the identity of one, and the only readers of /proc/PID.

Why not psutil: a rank's supervisor reads processor time and traffic of its descendants once a
second. That takes 0.3 ms, and 2.6 ms with psutil among 100 processes (its `children` reads the stat
file of every process on the host). Importing psutil takes 17 ms and 3 MiB in each supervisor, and
its start time of a process changes when the clock is set. Standard library only.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple


class ProcessStat(NamedTuple):
    """The contents of `/proc/PID/stat`; times are in ticks of 1 / `os.sysconf("SC_CLK_TCK")` s."""

    pid: int
    name: str
    state: str
    """The kernel's letter: R running, S sleeping, D waiting for a disk, T stopped, t traced, Z
    ended, ..."""
    parent: int
    ticks: int
    """Processor time of the process."""
    children_ticks: int
    """Processor time of its children that it has waited for."""
    started: int
    """Start time, since the boot of the machine."""

    @property
    def has_ended(self) -> bool:
        """Whether the process is a zombie: it has ended, and its parent has not waited for it."""
        return self.state in "ZX"


def read_process_stat_or_none(pid: int) -> ProcessStat | None:
    """Return the state and times of a process; None if it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The last parenthesis, because a name may contain one.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    # man proc: after the name come state (0), parent (1), ... utime to cstime (11 to 14), start
    # (19).
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
    """Yield every process of this host that is visible to this one."""
    for name in filter(str.isdecimal, os.listdir("/proc")):
        if stat := read_process_stat_or_none(int(name)):
            yield stat


def living_descendant_pids(parent_pid: int) -> list[int]:
    """Return the living children of a process, and their descendants."""
    living = {process.pid: process.parent for process in all_processes() if not process.has_ended}
    pids = [parent_pid]
    # The list grows while it is read: a search by levels.
    for above in pids:
        pids += [pid for pid, its_parent in living.items() if its_parent == above]
    return pids[1:]


def name_by_stopped_process_id_in_tree(root_pid: int) -> dict[int, str]:
    """Return the names of a process and its descendants that are stopped, by their ids.

    SIGSTOP and Ctrl-Z stop a process until SIGCONT.
    """
    stats = (
        read_process_stat_or_none(pid) for pid in (root_pid, *living_descendant_pids(root_pid))
    )
    return {stat.pid: stat.name for stat in stats if stat and stat.state == "T"}


def iterate_process_and_descendant_ids(pid: int) -> Iterator[int]:
    """Yield a process and its descendants.

    Raises:
        OSError: one of them has ended meanwhile.
    """
    # The kernel's lists of children: the time does not depend on the number of other processes.
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            yield from iterate_process_and_descendant_ids(int(child))


def bytes_read_and_written_or_raise_if_ended(pid: int) -> int:
    """Return the bytes that a process has read and written, in files and sockets.

    Raises:
        OSError: the process has ended, or belongs to another user.
    """
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    # rchar and wchar, which count sockets and the page cache; read_bytes counts only the disk.
    return sum(int(line.split()[1]) for line in lines[:2])


def ids_of_processes_holding_flock(locked_file: Path) -> set[int]:
    """Return the ids of this user's processes that hold an flock on a file."""
    file = os.path.realpath(locked_file)
    holder_pids = set()
    for process_folder in Path("/proc").glob("[0-9]*"):
        # The process may be another user's, or may have ended.
        with contextlib.suppress(OSError):
            if any(
                _holds_flock(process_folder, descriptor, file)
                for descriptor in os.listdir(process_folder / "fd")
            ):
                holder_pids.add(int(process_folder.name))
    return holder_pids


def _holds_flock(process_folder: Path, descriptor: str, file: str) -> bool:
    # The descriptor may have been closed.
    with contextlib.suppress(OSError):
        opened = os.readlink(process_folder / "fd" / descriptor)
        return opened == file and "FLOCK" in (process_folder / "fdinfo" / descriptor).read_text()
    return False


def process_space() -> str:
    """Return the host and the namespace of process ids, within which a process id is unique."""
    return f"{os.uname().nodename} {os.readlink('/proc/self/ns/pid')}"


class Process(NamedTuple):
    """The identity of a process: its id and its start, because the kernel uses ids again."""

    pid: int
    host: str
    space: str
    """Host and namespace of the id, as `process_space` returns it."""
    began: str
    """Boot id of the machine, and start of the process in ticks since the boot."""

    @classmethod
    def identity_of_pid(cls, pid: int) -> Process:
        """Return the identity of the process with this id here."""
        return cls(
            pid, socket.gethostname(), process_space(), _boot_and_start_id(pid) or "it has ended"
        )

    @classmethod
    def identity_of_this_process(cls) -> Process:
        """Return the identity of this process."""
        return cls.identity_of_pid(os.getpid())

    @property
    def is_here(self) -> bool:
        """Whether its id is valid in this process's namespace."""
        return self.space == process_space()

    def is_alive(self) -> bool:
        """Return whether the process is alive here; a zombie is not."""
        return _boot_and_start_id(self.pid) == self.began

    def send_signal_if_alive(self, signal_number: int) -> None:
        """Send a signal to the process if it is alive.

        Raises:
            PermissionError: the process belongs to another user.
        """
        with contextlib.suppress(ProcessLookupError):
            # Checked first: the id may belong to another process by now.
            if self.is_alive():
                os.kill(self.pid, signal_number)


def _boot_and_start_id(pid: int) -> str | None:
    """Return boot id and start of a process; None if it has ended."""
    stat = read_process_stat_or_none(pid)
    if stat is None or stat.has_ended:
        return None
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {stat.started}"


def wait_until_true_or_timeout(is_reached: Callable[[], object], timeout_seconds: float) -> bool:
    """Wait until a call returns a true value; return whether one did within these seconds."""
    deadline = time.monotonic() + timeout_seconds
    while not is_reached():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def signals_to_handle(signal_numbers: Iterable[int]) -> tuple[int, ...]:
    """Return the signals to handle: all of them, except a SIGHUP that is ignored."""
    # `nohup` ignores SIGHUP, so that a run outlives its terminal.
    return tuple(
        n for n in signal_numbers if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN
    )


def user_name_or_number() -> str:
    """Return the name of this user; in a container that does not know it, the number."""
    try:
        return getpass.getuser()
    # Python 3.13 raises OSError.
    except (KeyError, OSError):
        return str(os.getuid())
