"""What a job leaves on this host when its launcher ends: found, waited for and ended.

This process is made the reaper of its descendants: the kernel gives it every process whose parent has ended, whatever
session or group torchrun or mpirun put it into, so that none can be missed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

from ortlaunch.process import all_processes

_PR_SET_CHILD_SUBREAPER = 36


class Orphans:
    """The processes of one job; made before the job is started."""

    _launchers: set[int] = set()  # of all jobs that this process has now

    def __init__(self) -> None:
        self._launcher = 0
        _be_the_reaper(True)
        self._before = {one.pid for one in all_processes() if one.parent == os.getpid()}

    def belong_to(self, launcher: int) -> None:
        """Say which process the job began with."""
        self._launcher = launcher
        self._launchers.add(launcher)

    def left(self) -> dict[int, bool]:
        """pid -> whether nothing of the job stands above it, of all that are alive; those that ended are reaped."""
        everything = {one.pid: one for one in all_processes()}
        roots = {
            pid
            for pid, one in everything.items()
            if one.parent == os.getpid()
            and pid not in self._before | self._launchers - {self._launcher}
        }
        for pid in [pid for pid in roots if everything[pid].has_ended and pid != self._launcher]:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        found = dict.fromkeys(roots, True)
        while more := {pid for pid, one in everything.items() if one.parent in found} - set(found):
            found.update(dict.fromkeys(more, False))
        return {pid: is_root for pid, is_root in found.items() if not everything[pid].has_ended}

    def children_of(self, parent: int) -> list[int]:
        """Living processes that this one started."""
        return [one.pid for one in all_processes() if one.parent == parent and not one.has_ended]

    def done(self) -> None:
        """Nothing is left of the job."""
        self._launchers.discard(self._launcher)
        if not self._launchers:
            _be_the_reaper(False)


def _be_the_reaper(wanted: bool) -> None:
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)


def send(pid: int, number: int) -> None:
    """Send a signal to a process, or with a negative number to a group, that may have ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
