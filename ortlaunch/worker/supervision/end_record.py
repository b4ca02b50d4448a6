"""The record of a rank's end in errors/rank_N.json, with disk space reserved for it in advance."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ortlaunch.base import machine
from ortlaunch.base.cause import Cause
from ortlaunch.base.errors import (
    BadStepError,
    DataWorkerError,
    FileError,
    OrtlaunchError,
    error_chain,
)
from ortlaunch.rank import EXIT_SAVED, Rank
from ortlaunch.run_folder.cause_text import CRASH_SIGNALS
from ortlaunch.run_folder.error_record import ErrorRecord, read_error_record_or_describe_damage
from ortlaunch.run_folder.folder import RunDir, is_disk_nearly_full, json_text
from ortlaunch.run_folder.library_messages import (
    is_lost_peer_message,
    last_lines_and_whole_crash_stack_text,
    match_cause_in_text,
    native_crash_cause_and_detail,
)
from ortlaunch.worker.supervision.pulse import SharedProgress
from ortlaunch.worker.supervision.user_frames import (
    last_user_source_location_or_none,
    traceback_with_foreign_frames_counted,
)
from ortmodule import ORTModuleError

# Reserved space of one rank, and of all ranks together.
_MAX_SPARE_BYTES = 1 << 15
_ALL_SPARE_BYTES = 1 << 26
# The least reserved space: one block of usual file systems.
_PAGE = 1 << 12
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class ObservedEnd(NamedTuple):
    """The end of a rank that recorded nothing itself, as its supervisor saw it."""

    type: str
    exit_status: int
    signal: int | None = None
    is_secondary: bool = False
    """Whether another rank's end, or a request to end, caused it."""
    cause: Cause | None = None
    """None: the signal and the end of the log show it."""
    detail: str | None = None
    """None: the decisive line of the log."""
    memory_kills: int | None = None
    has_traceback: bool = True
    """Whether the end of the log is of interest."""


class RankEndRecorder:
    """The record of one rank's end, written by the rank or by its supervisor."""

    def __init__(self, rank: Rank, run: RunDir, pulse: SharedProgress) -> None:
        self.rank = rank
        self.run = run
        self._pulse = pulse
        self._spare_bytes = max(_PAGE, min(_MAX_SPARE_BYTES, _ALL_SPARE_BYTES // rank.world_size))

    # Not constants: after a restart of the ranks they are in the folder of late records.
    @property
    def _record_path(self) -> Path:
        return self.run.rank_error_path(self.rank.rank)

    @property
    def _spare_path(self) -> Path:
        return self.run.reserved_space_path(self.rank.rank)

    def reserve_disk_space(self) -> None:
        """Reserve disk space now, so that a full disk cannot hide why a rank failed."""
        with contextlib.suppress(OSError):
            self.run.errors.mkdir(parents=True, exist_ok=True)
            with open(self._spare_path, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, self._spare_bytes)

    def release_disk_space(self) -> None:
        """Release the reserved space."""
        with contextlib.suppress(OSError):
            self._spare_path.unlink()

    @property
    def is_written(self) -> bool:
        """Whether the rank has recorded its end itself."""
        return self._record_path.exists()

    def read_record(self) -> ErrorRecord:
        """Return the record."""
        return read_error_record_or_describe_damage(self._record_path)

    def write_exception_record_and_log(self, error: BaseException, log_descriptor: int) -> int:
        """Record the rank's own exception, also in the descriptor `log_descriptor`; return its exit status."""
        end_time = time.time()
        # ortmodule's errors, as of a later export, are written for the user, too.
        is_for_user = isinstance(error, (OrtlaunchError, ORTModuleError))
        text = str(error) if is_for_user else traceback.format_exc()
        status = _exit_status_of_exception(error)
        is_secondary = isinstance(error, Exception) and is_lost_peer_message(text)
        error_type = type(error).__name__
        full_disk_note = self._full_disk_note_or_empty(error)
        cause, detail = _cause_and_line_of_exception(error, text, full_disk_note)
        user_location = last_user_source_location_or_none(error)
        record = ErrorRecord(
            error_type,
            cause,
            status,
            detail=detail,
            message=str(error),
            traceback=text,
            folded=None if user_location is None else traceback_with_foreign_frames_counted(text),
            raised_at=user_location,
            secondary=is_secondary,
            time=end_time,
        )
        self.add_rank_count_error_and_store_record(
            os.getpid(), f"failed with {error_type}{full_disk_note}", record
        )
        sys.stderr.flush()
        with os.fdopen(log_descriptor, "w", errors="backslashreplace") as file:
            print(text, file=file)
        return status

    def write_record_of_silent_end(self, pid: int, description: str, end: ObservedEnd) -> None:
        """Record the end of a rank that recorded nothing itself."""
        log_end = self._last_100_error_log_lines_text_or_empty()
        last_lines = last_lines_and_whole_crash_stack_text(log_end, 20)
        full_disk_note = self._full_disk_note_or_empty() if end.signal is None else ""
        cause, detail = _cause_and_line_of_unrecorded_end(end.signal, last_lines, full_disk_note)
        if cause is Cause.CRASH:
            cause, detail = native_crash_cause_and_detail(log_end)
        record = ErrorRecord(
            end.type,
            end.cause or cause,
            end.exit_status,
            detail=detail if end.detail is None else end.detail,
            message=description,
            traceback=last_lines if end.has_traceback else "",
            secondary=end.is_secondary,
            signal=end.signal,
            memory_kills=end.memory_kills,
            time=time.time(),
        )
        self.add_rank_count_error_and_store_record(pid, description + full_disk_note, record)

    def add_rank_count_error_and_store_record(
        self, pid: int, description: str, record: ErrorRecord
    ) -> None:
        """Add the rank, host and progress to the record, and store it atomically."""
        host = socket.gethostname()
        rank = self.rank
        rank_and_host = f"rank {rank.rank} on host {host} (local rank {rank.local_rank})"
        progress = self._pulse.read_rank_progress()
        limit = machine.smallest_memory_limit()
        self._store_record_in_reserved_space_if_disk_is_full(
            replace(
                record,
                rank=rank.rank,
                local_rank=rank.local_rank,
                host=host,
                pid=pid,
                summary=f"{rank_and_host} {description}; exit status {record.exit_status}; "
                f"log: {self.run.rank_log_path(rank.rank, 'err')}",
                step=progress.step,
                phase=progress.phase,
                memory_limit={"name": limit.name, "bytes": limit.total_bytes},
                after=self.run.append_rank_and_return_earlier_error_count(rank.rank),
            )
        )

    def mark_record_as_secondary(self) -> None:
        """Mark the failure as secondary: it followed a request to end."""
        with contextlib.suppress(OSError):
            self._store_record_in_reserved_space_if_disk_is_full(
                replace(self.read_record(), secondary=True)
            )

    def _store_record_in_reserved_space_if_disk_is_full(self, record: ErrorRecord) -> None:
        try:
            record.write(self._record_path)
        except OSError:
            # The disk is probably full: overwrite the space that open() reserved.
            with contextlib.suppress(OSError):
                _overwrite_reserved_file_with_record(self._spare_path, record, self._spare_bytes)
                os.replace(self._spare_path, self._record_path)

    def _full_disk_note_or_empty(self, error: BaseException | None = None) -> str:
        """Return the note for a full disk, which PyTorch's write errors do not mention, or ""."""
        for chained_error in error_chain(error):
            if isinstance(chained_error, OSError) and chained_error.errno in _NO_SPACE:
                return f": no space left on device ({chained_error.filename or self.run})"
        return (
            f": no space left on device ({self.run})" if is_disk_nearly_full(self.run.path) else ""
        )

    def _last_100_error_log_lines_text_or_empty(self) -> str:
        """Return the last 100 lines of the rank's error log, more than a stack has."""
        with contextlib.suppress(OSError):
            lines = (
                self.run.rank_log_path(self.rank.rank, "err")
                .read_text(errors="replace")
                .splitlines()
            )
            return "\n".join(lines[-100:])
        return ""


def _overwrite_reserved_file_with_record(
    spare_path: Path, record: ErrorRecord, reserved_bytes: int
) -> None:
    """Write the record into the reserved space; keep only the end of a long traceback."""
    if len(json_text(record.to_json())) > reserved_bytes:
        record = replace(
            record,
            message=record.message[:1000],
            detail=record.detail[:1000],
            folded="",
            traceback=record.traceback[-reserved_bytes:],
        )
        # A character takes up to six bytes in JSON.
        while (
            record.traceback and (excess := len(json_text(record.to_json())) - reserved_bytes) > 0
        ):
            record = replace(record, traceback=record.traceback[max(1, excess // 6) :])
    with open(spare_path, "r+b") as file:
        file.write(json_text(record.to_json()).encode())
        file.truncate()


def failure_exit_status(own_exit_code: int) -> int:
    """Return the exit status for a rank whose own code exited with `own_exit_code`.

    EXIT_SAVED (85) is reserved for a run that stopped on request and saved; 0 is no success here.
    """
    return 1 if own_exit_code in (0, EXIT_SAVED) else own_exit_code


def _cause_and_line_of_exception(
    error: BaseException, traceback_text: str, full_disk_note: str
) -> tuple[Cause, str]:
    """Return the cause of a rank's own exception, and the line that shows it."""
    error_cause = error.cause if isinstance(error, OrtlaunchError) else None
    if isinstance(error, (BadStepError, DataWorkerError)) and error_cause is not None:
        return error_cause, error.detail
    cause_in_text = _memory_or_disk_cause_or_none(
        match_cause_in_text(traceback_text), full_disk_note
    )
    # A FileError has its own remedy.
    if cause_in_text is None and not isinstance(error, FileError):
        cause_in_text = match_cause_in_text(traceback_text)
    if cause_in_text is not None:
        return cause_in_text
    if isinstance(error, OrtlaunchError) and error_cause is not None:
        return error_cause, error.detail
    line = str(error).strip().partition("\n")[0]
    if isinstance(error, SystemExit):
        return Cause.LEFT_EARLY, line
    if _exit_status_of_exception(error) == 2 and line:
        return Cause.BAD_INPUT, line
    return Cause.RAISED, f"{type(error).__name__}: {line}"


def _cause_and_line_of_unrecorded_end(
    signal_number: int | None, log_end: str, full_disk_note: str
) -> tuple[Cause, str]:
    """Return the cause of an end that only the supervisor saw, by the signal and the log's end."""
    cause_in_log = match_cause_in_text(log_end)
    if urgent_cause := _memory_or_disk_cause_or_none(cause_in_log, full_disk_note):
        return urgent_cause
    if signal_number in CRASH_SIGNALS:
        return Cause.CRASH, ""
    if signal_number:
        return Cause.KILLED if signal_number == signal.SIGKILL else Cause.SIGNALLED, ""
    return cause_in_log or (Cause.LEFT_EARLY, "")


def _memory_or_disk_cause_or_none(
    cause_in_text: tuple[Cause, str] | None, full_disk_note: str
) -> tuple[Cause, str] | None:
    """Return the causes that take precedence over a signal and over an error's own type."""
    if cause_in_text is not None and cause_in_text[0] in (Cause.OUT_OF_MEMORY, Cause.DISK_FULL):
        return cause_in_text
    return (Cause.DISK_FULL, full_disk_note.removeprefix(": ")) if full_disk_note else None


def _exit_status_of_exception(error: BaseException) -> int:
    if isinstance(error, OrtlaunchError):
        return error.exit_status
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code:
        return failure_exit_status(error.code & 0xFF)
    # Also for sys.exit(0): a rank that exits before the end has failed.
    return 1
