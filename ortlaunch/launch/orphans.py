"""The processes that a job leaves on this host when its launcher ends.

This process becomes the reaper of its descendants: the kernel makes it the parent of every
descendant whose parent has ended. So none is missed, whatever session or group torchrun or mpirun
put it into.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

from ortlaunch.base.process import all_processes

# From <linux/prctl.h>.
_PR_SET_CHILD_SUBREAPER = 36


class DescendantReaper:
    """The processes of one job; created before the job is started."""

    # Launchers of all jobs that this process has now: they are no orphans of each other.
    _launchers: set[int] = set()

    def __init__(self) -> None:
        self._launcher = 0
        _set_reaper(True)
        # Children from before the job do not belong to it and must not be ended with it.
        self._before = {process.pid for process in all_processes() if process.parent == os.getpid()}

    def set_launcher(self, launcher_pid: int) -> None:
        """Set the process with which the job began."""
        self._launcher = launcher_pid
        # A fork that waited for its command is older than the job.
        self._before.discard(launcher_pid)
        self._launchers.add(launcher_pid)

    def reap_ended_and_map_is_root_by_living_pid(self) -> dict[int, bool]:
        """Reap the job's ended processes and return the living ones.

        Returns:
            Process id -> whether no other process of the job is an ancestor of it.
        """
        processes_by_pid = {process.pid: process for process in all_processes()}
        root_pids = {
            pid
            for pid, process in processes_by_pid.items()
            if process.parent == os.getpid()
            and pid not in self._before | self._launchers - {self._launcher}
        }
        for pid in [
            pid for pid in root_pids if processes_by_pid[pid].has_ended and pid != self._launcher
        ]:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        is_root_by_pid = dict.fromkeys(root_pids, True)
        while child_pids := {
            pid for pid, process in processes_by_pid.items() if process.parent in is_root_by_pid
        } - set(is_root_by_pid):
            is_root_by_pid.update(dict.fromkeys(child_pids, False))
        return {
            pid: is_root
            for pid, is_root in is_root_by_pid.items()
            if not processes_by_pid[pid].has_ended
        }

    def living_child_pids(self, parent_pid: int) -> list[int]:
        """Return the living processes that `parent_pid` started."""
        return [
            process.pid
            for process in all_processes()
            if process.parent == parent_pid and not process.has_ended
        ]

    def stop_reaping(self) -> None:
        """Forget the job, of which no process is left."""
        self._launchers.discard(self._launcher)
        if not self._launchers:
            _set_reaper(False)


def _set_reaper(is_reaper: bool) -> None:
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(is_reaper), 0, 0, 0)


def send_signal(pid: int, signal_number: int) -> None:
    """Send a signal to a process that may have ended, or to a group if `pid` is negative."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal_number)
