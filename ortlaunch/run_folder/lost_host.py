"""errors/lost.json: a host of the run that is gone, as rank supervisors or ssh report it.

Standard library only.
"""

from __future__ import annotations

import contextlib
import time
from typing import NamedTuple

from ortlaunch.base.cause import Cause
from ortlaunch.run_folder.error_record import ErrorRecord
from ortlaunch.run_folder.folder import RunDir

LOST_HOST_TYPE = "LostHost"
"""The record's type."""
# The ranks of a lost host leave no status of their own.
EXIT_STATUS = 1


class LostHost(NamedTuple):
    """A host that is gone, identified by one of its ranks."""

    rank: int
    host: str
    reason: str

    @property
    def summary(self) -> str:
        """One line for the user."""
        who = f"rank {self.rank} on host {self.host} is lost, and all others of that host"
        return f"{who}: {self.reason}; exit status {EXIT_STATUS}"

    def write_as_cause_unless_recorded(self, run: RunDir) -> None:
        """Record this host as the cause of the run's end, unless another host is recorded."""
        record = ErrorRecord(
            LOST_HOST_TYPE,
            Cause.HOST_LOST,
            EXIT_STATUS,
            self.rank,
            self.host,
            detail=self.reason,
            message=self.reason,
            summary=self.summary,
            time=time.time(),
            after=run.append_rank_and_return_earlier_error_count(),
        )
        # The disk may have been on the lost host.
        with contextlib.suppress(OSError):
            # The first one is kept: the loss of more hosts may follow from it.
            if not run.lost.exists():
                record.write(run.lost)
