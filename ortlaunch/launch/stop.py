"""A stop request: a file in the run folder, which the ranks read, and the time that they have.

That time is `launch.grace_seconds` (recipe/fields/launch.py); where nothing is saved, GRACE_SECONDS
of rank.py. At its end worker/supervision/rank_process.py kills each rank, and seconds later processes.py
the whole run.
SIGUSR1 wakes the ranks, because mpirun kills its ranks 0.2 s after it received SIGTERM or SIGINT.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import NamedTuple

from ortlaunch.run_folder.folder import write_json_atomically

PRUNER = "the pruner of its sweep"
"""The sender of the request that ends a trial of a sweep."""


class StopRequest(NamedTuple):
    """How the ranks of one run are requested to stop."""

    request_path: str
    # A file; if it exists, the ranks end at once in any case.
    cancelled_path: str
    grace_seconds: int

    @property
    def is_cancelled(self) -> bool:
        """Whether `ortlaunch cancel` cancelled the run."""
        return os.path.exists(self.cancelled_path)

    def write_unless_present(self, sender: str) -> None:
        """Write the request, unless there is one."""
        # On a full disk the signal alone has to reach the ranks.
        if not os.path.exists(self.request_path):
            with contextlib.suppress(OSError):
                write_stop_request(Path(self.request_path), sender)


def write_stop_request(path: Path, sender: str) -> None:
    """Write a stop request into the run folder, completely or not at all."""
    write_json_atomically(path, {"by": sender, "pid": os.getpid(), "host": socket.gethostname()})
