"""A process that was forked and not executed, with those methods of `subprocess.Popen` that callers use."""

from __future__ import annotations

import math
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

from ortlaunch.base.process import wait_until_true_or_timeout


class ForkedProcess:
    """A forked process; `poll` reads its end from its parent, which may be another process."""

    def __init__(self, pid: int, read_exit_status_or_none: Callable[[int], int | None]) -> None:
        """Watch a process.

        Args:
            pid: its process id, which stays its own until the end has been read.
            read_exit_status_or_none: returns the exit status of a process id; None while it is alive.
        """
        self.pid = pid
        self._read_exit_status_or_none = read_exit_status_or_none
        self._exit_status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative after a signal; None while the process is alive."""
        if self._exit_status is None:
            self._exit_status = self._read_exit_status_or_none(self.pid)
        return self._exit_status

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status once the process has ended.

        Raises:
            subprocess.TimeoutExpired: it is alive after `timeout` seconds.
        """
        seconds = math.inf if timeout is None else timeout
        wait_until_true_or_timeout(lambda: self.poll() is not None, seconds)
        if self._exit_status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", seconds)
        return self._exit_status

    def terminate(self) -> None:
        """Send SIGTERM, if the process is alive."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


def exit_status_of_child_or_none(pid: int) -> int | None:
    """Return the exit status of a child, negative after a signal; None while it is alive."""
    ended_pid, wait_status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(wait_status) if ended_pid else None


StartByFork = Callable[[Sequence[str], Mapping[str, str]], ForkedProcess | None]
"""Forks a child for a command and its environment; None: the command is to be executed."""
# Set in a process that has imported the libraries of its ranks.
start_by_fork: StartByFork | None = None
