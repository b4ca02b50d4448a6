"""A supervisor's view of the run folder: outside requests, and signs that the run ends.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from ortlaunch.base.cause import Cause
from ortlaunch.run_folder import lock
from ortlaunch.run_folder.error_record import read_error_record_or_describe_damage
from ortlaunch.run_folder.folder import RunDir


class RunFolderWatcher:
    """The run of one rank, as its supervisor reads it from the run folder."""

    def __init__(self, run: RunDir, rank: int) -> None:
        self.run = run
        self.rank = rank
        self._poll_count = 0
        self._passed_save_id = 0

    def signal_of_new_request_or_none(self, is_listening: bool) -> int | None:
        """Return the signal for a request that nobody has passed on yet.

        Rank 0 checks at each call; the others check once, when they start.
        """
        self._poll_count += 1
        if self._poll_count > 1 and self.rank > 0:
            return None
        if self.run.stop_request.exists():
            return signal.SIGUSR1
        save_request_id = self._save_request_time_or_0()
        return (
            signal.SIGUSR2
            if is_listening and save_request_id and save_request_id != self._passed_save_id
            else None
        )

    def remember_save_request_as_passed_on(self) -> None:
        """Mark the current request for a checkpoint as passed on."""
        self._passed_save_id = self._save_request_time_or_0()

    def is_run_ending(self) -> bool:
        """Return whether the run ends without this rank.

        That is so if another rank failed, or if the command has ended or was cancelled.
        """
        if self.run.cancelled.exists() or self.has_another_rank_recorded_end():
            return True
        command = lock.process_that_last_locked_run(self.run)
        return command is not None and command.is_here and not command.is_alive()

    def has_another_rank_recorded_end(self) -> bool:
        """Return whether another rank has recorded its end."""
        # One known file in place of a listing of errors/: thousands of supervisors read it at the
        # moment of a fault.
        if counted := self.run.first_failed_ranks():
            return any(rank != self.rank for rank in counted)
        return any(
            path != self.run.rank_error_path(self.rank) for path in self._error_record_paths()
        )

    def did_others_stop_unsaved(self) -> bool:
        """Return whether the others ended by a stop before they had anything to save."""
        with contextlib.suppress(OSError):
            others = [
                read_error_record_or_describe_damage(path)
                for path in self._error_record_paths()
                if path != self.run.rank_error_path(self.rank)
            ]
            return {record.cause for record in others if not record.secondary} == {Cause.STOPPED}
        return False

    def send_sigcont_to_run_processes(self) -> None:
        """Send SIGCONT to the run's processes, because a stopped process cannot end.

        A supervisor in SIGSTOP would delay the end of its rank, and of torchrun, for a minute.
        """
        for pid in lock.living_process_ids(self.run):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGCONT)

    def _error_record_paths(self) -> list[Path]:
        if not self.run.accounts.exists():
            return []
        return [*self.run.errors.glob("rank_*.json"), *self.run.errors.glob("lost.json")]

    def _save_request_time_or_0(self) -> int:
        """Return an id of the current request for a checkpoint; 0 if there is none."""
        with contextlib.suppress(OSError):
            return self.run.save_request.stat().st_mtime_ns
        return 0
