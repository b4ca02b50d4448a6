"""A supervisor's view of the run folder: outside requests, and signs that the run ends.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from ortlaunch.cause import Cause
from ortlaunch.run_folder import lock
from ortlaunch.run_folder.folder import RunDir, read_error_record


class Surroundings:
    """The run of one rank, as its supervisor reads it from the run folder."""

    def __init__(self, run: RunDir, rank: int) -> None:
        self.run = run
        self.rank = rank
        self._looks = 0
        self._save_seen = 0

    def request(self, listens: bool) -> int | None:
        """Return the signal for a request that nobody has passed on yet.

        Rank 0 checks at each call; the others check once, when they start.
        """
        self._looks += 1
        if self._looks > 1 and self.rank > 0:
            return None
        if self.run.stop_request.exists():
            return signal.SIGUSR1
        found = self._save()
        return signal.SIGUSR2 if listens and found and found != self._save_seen else None

    def mark_save_passed_on(self) -> None:
        """Mark the current request for a checkpoint as passed on."""
        self._save_seen = self._save()

    def are_gone(self) -> bool:
        """Return whether the run ends without this rank.

        That is so if another rank failed, or if the command has ended or was cancelled.
        """
        if self.run.cancelled.exists() or self.has_failed():
            return True
        command = lock.last_command_of_run(self.run)
        return command is not None and command.is_here and not command.is_alive()

    def has_failed(self) -> bool:
        """Return whether another rank has recorded its end."""
        # One known file in place of a listing of errors/: thousands of supervisors read it at the
        # moment of a fault.
        if counted := self.run.first_failed_ranks():
            return any(rank != self.rank for rank in counted)
        return any(path != self.run.rank_error_path(self.rank) for path in self._failures())

    def others_stopped(self) -> bool:
        """Return whether the others ended by a stop before they had anything to save."""
        with contextlib.suppress(OSError):
            others = [
                read_error_record(path)
                for path in self._failures()
                if path != self.run.rank_error_path(self.rank)
            ]
            return {one["cause"] for one in others if not one["secondary"]} == {Cause.STOPPED}
        return False

    def wake(self) -> None:
        """Send SIGCONT to the run's processes, because a stopped process cannot end.

        A supervisor in SIGSTOP would delay the end of its rank, and of torchrun, for a minute.
        """
        for pid in lock.living_process_ids(self.run):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGCONT)

    def _failures(self) -> list[Path]:
        if not self.run.accounts.exists():
            return []
        return [*self.run.errors.glob("rank_*.json"), *self.run.errors.glob("lost.json")]

    def _save(self) -> int:
        """Return an id of the current request for a checkpoint; 0 if there is none."""
        with contextlib.suppress(OSError):
            return self.run.save_request.stat().st_mtime_ns
        return 0
