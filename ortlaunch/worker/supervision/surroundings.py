"""What a guardian sees in the run folder: requests from outside, and that its run ends. Standard library only."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from ortlaunch.cause import Cause
from ortlaunch.run_folder import lock
from ortlaunch.run_folder.folder import RunDir, account


class Surroundings:
    """The run of one rank, as its guardian finds it."""

    def __init__(self, run: RunDir, rank: int) -> None:
        self.run = run
        self.rank = rank
        self._looks = 0
        self._save_seen = 0

    def request(self, listens: bool) -> int | None:
        """The signal for a request that nobody has passed on; of all ranks 0 looks, and each when it begins."""
        self._looks += 1
        if self._looks > 1 and self.rank > 0:
            return None
        if self.run.stop_request.exists():
            return signal.SIGUSR1
        found = self._save()
        return signal.SIGUSR2 if listens and found and found != self._save_seen else None

    def save_is_asked(self) -> None:
        """The request that is there now was passed on."""
        self._save_seen = self._save()

    def are_gone(self) -> bool:
        """Whether the run ends without this rank: another one failed, or the command is gone or was told to cancel."""
        if self.run.cancelled.exists() or self.has_failed():
            return True
        command = lock.command_at(self.run)
        return command is not None and command.is_here and not command.lives()

    def has_failed(self) -> bool:
        """Whether another rank has told its end."""
        # One known file, not a listing of errors/: of thousands of guardians each looks, in the moment of a fault too.
        counted = self.run.first_counted()
        if counted:
            return any(rank != self.rank for rank in counted)
        return any(path != self.run.error(self.rank) for path in self._failures())

    def others_stopped(self) -> bool:
        """Whether what ended the others was a stop that came before they had something to save."""
        with contextlib.suppress(OSError):
            others = [
                account(path) for path in self._failures() if path != self.run.error(self.rank)
            ]
            return {one["cause"] for one in others if not one["secondary"]} == {Cause.STOPPED}
        return False

    def wake(self) -> None:
        """What is stopped here could not end: a guardian in SIGSTOP would hold its rank, and torchrun, for a minute."""
        for pid in lock.alive_at(self.run):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGCONT)

    def _failures(self) -> list[Path]:
        if not self.run.accounts.exists():
            return []
        return [*self.run.errors.glob("rank_*.json"), *self.run.errors.glob("lost.json")]

    def _save(self) -> int:
        """Which request for a checkpoint is there; 0: none."""
        with contextlib.suppress(OSError):
            return self.run.save_request.stat().st_mtime_ns
        return 0
