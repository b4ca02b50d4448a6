"""errors/lost.json: a host of the run that is gone, as its ranks' guardians tell it, or ssh. Standard library only."""

from __future__ import annotations

import contextlib
import time
from typing import NamedTuple

from ortlaunch.cause import Cause
from ortlaunch.run_folder.folder import RunDir, write_json

LOST = "LostHost"
"""The record's type."""
EXIT_STATUS = 1


class Lost(NamedTuple):
    """A host that is gone, by one of its ranks."""

    rank: int
    host: str
    why: str

    @property
    def summary(self) -> str:
        """One line for a person."""
        who = f"rank {self.rank} on host {self.host} is lost, and all others of that host"
        return f"{who}: {self.why}; exit status {EXIT_STATUS}"

    def write(self, run: RunDir) -> None:
        """Leave it as the run's cause, unless another host did."""
        record = {"type": LOST, "cause": Cause.HOST_LOST, "detail": self.why, "message": self.why,
                  "traceback": "", "secondary": False, "time": time.time(),
                  "signal": None, "exit_status": EXIT_STATUS, "rank": self.rank, "host": self.host,
                  "summary": self.summary, "step": None, "after": run.count_account()}  # fmt: skip
        with contextlib.suppress(OSError):  # a disk that went with the host
            if not run.lost.exists():
                write_json(run.lost, record)
