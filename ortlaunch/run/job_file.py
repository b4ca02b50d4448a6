"""Write job.json for `ortlaunch train`: while it prepares, when its ranks start, and at its end."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

from ortlaunch.base.cause import Cause, Failure
from ortlaunch.base.errors import OrtlaunchError
from ortlaunch.base.process import signals_to_handle
from ortlaunch.launch import JobState
from ortlaunch.launch.record import Attempt, JobRecord
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.run_folder.cause_text import advice_for_failure
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.library_messages import match_cause_in_text
from ortlaunch.run_folder.verdict import Verdict
from ortlaunch.started_runs import registry

_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_STOPPED_STATUSES = tuple(128 + number for number in (*_ENDING_SIGNALS, signal.SIGINT))
# Statuses of a command that is stopped while it waits between two starts.
_STATUSES_WITHOUT_RANKS = (*_STOPPED_STATUSES, EXIT_SAVED)


class PreparationStopped(SystemExit):
    """Raised by a signal to a command that prepares."""

    def __init__(self, status: int, signal_number: int) -> None:
        self.signal_number = signal_number
        super().__init__(status)


class JobFile:
    """The job.json of this process's run; an exception or a signal inside it ends the run."""

    def __init__(self, run: RunDir, backend: str, saves_checkpoints: bool = True) -> None:
        self.run = run
        self.saves_checkpoints = saves_checkpoints
        self.early_signals: list[int] | None = None
        """Signals during a start of the ranks or after it; None: a signal ends this process."""
        self.record = JobRecord.for_this_process_or_its_queued_job(run, backend, JobState.PENDING)

    def __enter__(self) -> JobFile:
        self.record.write(self.run)
        registry.register_run_or_print_error(self.run)
        self._handlers = {
            signal_number: signal.signal(
                signal_number, self._keep_signal_for_ranks_or_end_preparation
            )
            for signal_number in signals_to_handle((*_ENDING_SIGNALS, signal.SIGINT))
        }
        # A request for a checkpoint: no rank runs that could save.
        self._handlers[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, lambda *_: None)
        return self

    def __exit__(
        self,
        _error_type: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        for signal_number, handler in self._handlers.items():
            signal.signal(signal_number, handler)
        if error is not None and not self.record.state.is_end:
            status = _exit_status_of_error(error)
            message = _message_of_exception(error) + (
                " again" if self.record.attempts and status in _STATUSES_WITHOUT_RANKS else ""
            )
            failure = Failure(_failure_cause_of_exception(error, message), message)
            verdict = Verdict.of_failure_detected_by_command(status, failure)
            self.record_end_or_print_disk_error(
                replace(verdict, message=message, advice=advice_for_failure(failure)),
                status in _STOPPED_STATUSES,
            )

    def record_start_of_ranks(self) -> None:
        """Record that the ranks start now."""
        self._write_record(replace(self.record, state=JobState.RUNNING))

    def start_collecting_signals_for_ranks(self) -> list[int]:
        """Collect signals for the ranks from now on until the ranks have failed.

        Returns:
            The list of the signals that this process received; it grows.
        """
        # Signals between two starts without a failure are kept for the next ranks.
        self.early_signals = self.early_signals or []
        return self.early_signals

    def record_attempts_and_stop_collecting_signals(self, attempts: Sequence[Attempt]) -> None:
        """Record the failed attempts; from now on a signal ends this process."""
        # The disk may be full.
        with contextlib.suppress(OSError):
            self._write_record(replace(self.record, attempts=tuple(attempts)))
        early_signals = self.early_signals
        self.early_signals = None
        if early_signals:
            self._keep_signal_for_ranks_or_end_preparation(early_signals[0], None)

    def record_end_or_print_disk_error(
        self, verdict: Verdict, stopped_on_request: bool = False
    ) -> None:
        """Record the end of the run.

        Args:
            stopped_on_request: whether a signal or a request stopped it, as `ortlaunch cancel`.
        """
        state = (
            JobState.CANCELLED
            if stopped_on_request and verdict.exit_status not in (0, EXIT_SAVED)
            else JobState.state_of_exit_status(verdict.exit_status)
        )
        try:
            self._write_record(self.record.copy_ended_now(state, verdict))
        # On a full disk the verdict is printed in any case.
        except OSError as error:
            print(
                f"ortlaunch: {self.run.job} has no record of the run's end: {error.strerror}",
                file=sys.stderr,
                flush=True,
            )

    def _keep_signal_for_ranks_or_end_preparation(self, signal_number: int, _frame: object) -> None:
        if self.early_signals is not None:
            self.early_signals.append(signal_number)
            return
        if signal_number == signal.SIGINT:
            raise KeyboardInterrupt
        # Nothing has begun, so that nothing is lost and the job may start again. `ortlaunch cancel`
        # excludes that.
        raise PreparationStopped(
            EXIT_SAVED
            if self.saves_checkpoints and not self.run.cancelled.exists()
            else 128 + signal_number,
            signal_number,
        )

    def _write_record(self, record: JobRecord) -> None:
        self.record = record
        record.write(self.run)


def _exit_status_of_error(error: BaseException) -> int:
    if isinstance(error, OrtlaunchError):
        return error.exit_status
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _message_of_exception(error: BaseException) -> str:
    if isinstance(error, OrtlaunchError):
        return str(error)
    status = _exit_status_of_error(error)
    if isinstance(error, PreparationStopped) or status in _STOPPED_STATUSES:
        status = 128 + error.signal_number if isinstance(error, PreparationStopped) else status
        return f"stopped by {signal.Signals(status - 128).name} before its ranks were started"
    return f"{type(error).__name__}: {error}"


def _failure_cause_of_exception(error: BaseException, verdict_text: str) -> Cause:
    if isinstance(error, PreparationStopped) or _exit_status_of_error(error) in _STOPPED_STATUSES:
        return Cause.STOPPED
    cause_match = match_cause_in_text(verdict_text)
    return (
        cause_match[0]
        if cause_match and cause_match[0] in (Cause.DISK_FULL, Cause.NO_LOCKS)
        else Cause.UNKNOWN
    )
