"""A stop that is asked for: its file in the run folder, which the ranks see by themselves, and the time that they have.

The signal that wakes them is SIGUSR1, because mpirun kills its ranks 0.2 s after it got SIGTERM or SIGINT itself.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import NamedTuple

from ortlaunch.run_folder.folder import write_json


class Stop(NamedTuple):
    """How the ranks of one run are asked."""

    file: str
    cancelled: str  # a file: they are to end at once all the same
    grace_seconds: int

    @property
    def is_cancelled(self) -> bool:
        """Whether `ortlaunch cancel` wants it gone."""
        return os.path.exists(self.cancelled)

    def ask(self, by: str) -> None:
        """Leave the request, unless there is one; a full disk leaves the signal alone."""
        if not os.path.exists(self.file):
            with contextlib.suppress(OSError):
                write_request(Path(self.file), by)


def write_request(path: Path, by: str) -> None:
    """A request in the run folder, whole or not at all."""
    write_json(path, {"by": by, "pid": os.getpid(), "host": socket.gethostname()})
