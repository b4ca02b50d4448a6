"""The processes that a job leaves on this host when its launcher ends.

This process becomes the reaper of its descendants: the kernel makes it the parent of every
descendant whose parent has ended. So none is missed, whatever session or group torchrun or mpirun
put it into.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

from ortlaunch.process import all_processes

# From <linux/prctl.h>.
_PR_SET_CHILD_SUBREAPER = 36


class Orphans:
    """The processes of one job; created before the job is started."""

    # Launchers of all jobs that this process has now: they are no orphans of each other.
    _launchers: set[int] = set()

    def __init__(self) -> None:
        self._launcher = 0
        _be_the_reaper(True)
        # Children from before the job do not belong to it and must not be ended with it.
        self._before = {one.pid for one in all_processes() if one.parent == os.getpid()}

    def belong_to(self, launcher: int) -> None:
        """Set the process with which the job began."""
        self._launcher = launcher
        self._launchers.add(launcher)

    def left(self) -> dict[int, bool]:
        """Reap the job's ended processes and return the living ones.

        Returns:
            Process id -> whether no other process of the job is an ancestor of it.
        """
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
        """Return the living processes that `parent` started."""
        return [one.pid for one in all_processes() if one.parent == parent and not one.has_ended]

    def done(self) -> None:
        """Forget the job, of which no process is left."""
        self._launchers.discard(self._launcher)
        if not self._launchers:
            _be_the_reaper(False)


def _be_the_reaper(wanted: bool) -> None:
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended, or to a group if `pid` is negative."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
