"""Write job.json for `ortlaunch train`: while it prepares, when its ranks start, and at its end."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

from ortlaunch.cause import Cause, Failure
from ortlaunch.errors import OrtlaunchError
from ortlaunch.launch import JobState
from ortlaunch.launch.record import Attempt, JobRecord
from ortlaunch.other_runs import registry
from ortlaunch.process import heeded
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.run_folder.cause_text import OURS
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.library_messages import cause_in

_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_STOPPED = tuple(128 + number for number in (*_ENDING, signal.SIGINT))
# Statuses of a command that is stopped while it waits between two starts.
_NO_RANKS = (*_STOPPED, EXIT_SAVED)


class PreparationStopped(SystemExit):
    """Raised by a signal to a command that prepares."""

    def __init__(self, status: int, number: int) -> None:
        self.number = number
        super().__init__(status)


class JobFile:
    """The job.json of this process's run; an exception or a signal inside it ends the run."""

    def __init__(self, run: RunDir, backend: str, saves: bool = True) -> None:
        self.run = run
        self.saves = saves
        self.early: list[int] | None = None
        """Signals during a start of the ranks or after it; None: a signal ends this process."""
        self.record = JobRecord.begun(run, backend, JobState.PENDING)

    def __enter__(self) -> JobFile:
        self.record.write(self.run)
        registry.add(self.run)
        self._handlers = {
            number: signal.signal(number, self._leave)
            for number in heeded((*_ENDING, signal.SIGINT))
        }
        # A request for a checkpoint: no rank runs that could save.
        self._handlers[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, lambda *_: None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if error is not None and not self.record.state.is_end:
            status = _status_of(error)
            verdict = _verdict_of(error) + (
                " again" if self.record.attempts and status in _NO_RANKS else ""
            )
            self.end(
                status,
                f"{OURS}{verdict}",
                Failure(_cause_of(error, verdict), verdict),
                status in _STOPPED,
            )

    def starts(self) -> None:
        """Record that the ranks start now."""
        self._write(replace(self.record, state=JobState.RUNNING))

    def keep_signals(self) -> list[int]:
        """Collect signals for the ranks from now on until the ranks have failed.

        Returns:
            The list of the signals that this process received; it grows.
        """
        # Signals between two starts without a failure are kept for the next ranks.
        self.early = self.early or []
        return self.early

    def failed(self, attempts: Sequence[Attempt]) -> None:
        """Record the failed attempts; from now on a signal ends this process."""
        # The disk may be full.
        with contextlib.suppress(OSError):
            self._write(replace(self.record, attempts=tuple(attempts)))
        early = self.early
        self.early = None
        if early:
            self._leave(early[0], None)

    def end(
        self, status: int, verdict: str, failure: Failure | None = None, stopped: bool = False
    ) -> None:
        """Record the end of the run.

        Args:
            stopped: whether a signal or a request stopped it, as `ortlaunch cancel`.
        """
        state = (
            JobState.CANCELLED
            if stopped and status not in (0, EXIT_SAVED)
            else JobState.of_status(status)
        )
        try:
            self._write(self.record.at_end(state, status, verdict, failure))
        # On a full disk the verdict is printed in any case.
        except OSError as error:
            print(
                f"ortlaunch: {self.run.job} has no record of the run's end: {error.strerror}",
                file=sys.stderr,
                flush=True,
            )

    def _leave(self, number: int, frame: object) -> None:
        """Handle a signal: keep it for the ranks, or end the preparation."""
        if self.early is not None:
            self.early.append(number)
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        # Nothing has begun, so that nothing is lost and the job may start again. `ortlaunch cancel`
        # excludes that.
        raise PreparationStopped(
            EXIT_SAVED if self.saves and not self.run.cancelled.exists() else 128 + number, number
        )

    def _write(self, record: JobRecord) -> None:
        self.record = record
        record.write(self.run)


def _status_of(error: BaseException) -> int:
    if isinstance(error, OrtlaunchError):
        return error.exit_status
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _verdict_of(error: BaseException) -> str:
    if isinstance(error, OrtlaunchError):
        return str(error)
    status = _status_of(error)
    if isinstance(error, PreparationStopped) or status in _STOPPED:
        status = 128 + error.number if isinstance(error, PreparationStopped) else status
        return f"stopped by {signal.Signals(status - 128).name} before its ranks were started"
    return f"{type(error).__name__}: {error}"


def _cause_of(error: BaseException, verdict: str) -> Cause:
    if isinstance(error, PreparationStopped) or _status_of(error) in _STOPPED:
        return Cause.STOPPED
    found = cause_in(verdict)
    return found[0] if found and found[0] in (Cause.DISK_FULL, Cause.NO_LOCKS) else Cause.UNKNOWN
