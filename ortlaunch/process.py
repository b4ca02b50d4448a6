"""A process as others can ask for it: its id, the host and space where that id means it, and when it began.

A process id is given again; the same id with another beginning is another process. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ortlaunch.rank import process_space


class Process(NamedTuple):
    """One process, this or another: of this host only where `is_here`."""

    pid: int
    host: str
    space: str
    began: str  # "" where the system does not say

    @classmethod
    def of(cls, pid: int) -> Process:
        """The one that has this id here now."""
        began = _began(pid)
        return cls(pid, socket.gethostname(), process_space(), "it has ended" if began is None else began)

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
        if self.began:
            return _began(self.pid) == self.began
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def send(self, number: int) -> None:
        """Send it a signal, if it still lives.

        Raises:
            PermissionError: it is another user's.
        """
        with contextlib.suppress(ProcessLookupError):
            if self.lives():
                os.kill(self.pid, number)


def _began(pid: int) -> str | None:
    """When it began, since which start of the machine; "" where the system does not say, None once it has ended."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{boot} {fields[19]}"


def heeded(numbers: Iterable[int]) -> tuple[int, ...]:
    """Signals to handle: not a hang-up that is ignored, as `nohup` has it, whose run outlives its terminal."""
    return tuple(n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN)
