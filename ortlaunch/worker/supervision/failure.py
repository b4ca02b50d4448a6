"""The record of a rank's end in errors/rank_N.json, with disk space reserved for it in advance."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

from ortlaunch import machine
from ortlaunch.cause import Cause
from ortlaunch.errors import BadStepError, DataWorkerError, FileError, OrtlaunchError, error_chain
from ortlaunch.json_types import Json
from ortlaunch.rank import EXIT_SAVED, Rank
from ortlaunch.run_folder.cause_text import CRASH_SIGNALS
from ortlaunch.run_folder.folder import (
    RunDir,
    is_disk_full,
    read_error_record,
    write_json_atomically,
)
from ortlaunch.run_folder.library_messages import (
    is_lost_peer_message,
    match_cause_in_text,
    native_crash_cause,
)
from ortlaunch.worker.supervision.pulse import Pulse
from ortlaunch.worker.supervision.user_frames import folded, raised_at

# Types of ends that only the supervisor saw. Their traceback is the end of the rank's own output.
SEEN = ("Signal", "Exit")
# Reserved space of one rank, and of all ranks together.
_MOST_SPARE_BYTES = 1 << 15
_ALL_SPARE_BYTES = 1 << 26
# The least reserved space: one block of usual file systems.
_PAGE = 1 << 12
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Account:
    """The record of one rank's end, written by the rank or by its supervisor."""

    def __init__(self, rank: Rank, run: RunDir, pulse: Pulse) -> None:
        self.rank = rank
        self.run = run
        self._pulse = pulse
        self._spare_bytes = max(_PAGE, min(_MOST_SPARE_BYTES, _ALL_SPARE_BYTES // rank.world_size))

    # Not constants: after a restart of the ranks they are in the folder of late records.
    @property
    def _path(self) -> Path:
        return self.run.rank_error_path(self.rank.rank)

    @property
    def _spare(self) -> Path:
        return self.run.reserved_space_path(self.rank.rank)

    def open(self) -> None:
        """Reserve disk space now, so that a full disk cannot hide why a rank failed."""
        with contextlib.suppress(OSError):
            self.run.errors.mkdir(parents=True, exist_ok=True)
            with open(self._spare, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, self._spare_bytes)

    def close(self) -> None:
        """Release the reserved space."""
        with contextlib.suppress(OSError):
            self._spare.unlink()

    @property
    def is_written(self) -> bool:
        """Whether the rank has recorded its end itself."""
        return self._path.exists()

    def read(self) -> Json:
        """Return the record."""
        return read_error_record(self._path)

    def of_exception(self, error: BaseException, log: int) -> int:
        """Record the rank's own exception, also in the descriptor `log`; return its exit status."""
        now = time.time()
        text = str(error) if isinstance(error, OrtlaunchError) else traceback.format_exc()
        message = str(error)
        # An error of ortmodule/ in a later export names fields of its Settings, not of the recipe.
        if "Settings." in text:
            # Imported late, because it needs pydantic, which is loaded by then.
            from ortlaunch.recipe.fields.ort_variables import in_recipes_words

            text = in_recipes_words(text)
            message = in_recipes_words(message)
        status = _status_of(error)
        secondary = isinstance(error, Exception) and is_lost_peer_message(text)
        kind = type(error).__name__
        no_space = self._no_space(error)
        cause, detail = _cause_of(error, text, no_space)
        what = f"failed with {kind}{no_space}"
        record = {"type": kind, "cause": cause, "detail": detail, "message": message, "traceback": text,
                  "secondary": secondary, "time": now}  # fmt: skip
        where = raised_at(error)
        if where is not None:
            record |= {"raised_at": where, "folded": folded(text)}
        self.write(os.getpid(), what, {"exit_status": status, "signal": None, **record})
        sys.stderr.flush()
        with os.fdopen(log, "w", errors="backslashreplace") as file:
            print(text, file=file)
        return status

    def of_end(self, pid: int, what: str, record: Json) -> None:
        """Record the end of a rank that recorded nothing itself."""
        log = self._log_end()
        words = "\n".join(log.splitlines()[-20:])
        no_space = self._no_space() if record["signal"] is None else ""
        cause, detail = _cause_of_end(record["signal"], words, no_space)
        if cause is Cause.CRASH:
            cause, detail = native_crash_cause(log)
        known = {"message": what, "traceback": words, "cause": cause, "detail": detail}
        self.write(pid, what + no_space, {**known, **record})

    def write(self, pid: int, what: str, record: Json) -> None:
        """Add the rank, host and progress to the record, and store it atomically."""
        host = socket.gethostname()
        rank = self.rank
        place = f"rank {rank.rank} on host {host} (local rank {rank.local_rank})"
        summary = (
            f"{place} {what}; exit status {record['exit_status']}; "
            f"log: {self.run.rank_log_path(rank.rank, 'err')}"
        )
        seen = self._pulse.read()
        where = {"rank": rank.rank, "local_rank": rank.local_rank, "host": host, "pid": pid, "summary": summary,
                 "step": seen.step, "phase": seen.phase}  # fmt: skip
        limit = machine.smallest_memory_limit()
        where["memory_limit"] = {"name": limit.name, "bytes": limit.total_bytes}
        where["after"] = self.run.count_error_record(rank.rank)
        self._store({**where, "time": time.time(), **record})

    def is_an_echo(self) -> None:
        """Mark the failure as secondary: it followed a request to end."""
        with contextlib.suppress(OSError):
            self._store({**self.read(), "secondary": True})

    def _store(self, record: Json) -> None:
        try:
            write_json_atomically(self._path, record)
        except OSError:
            # The disk is probably full: overwrite the space that open() reserved.
            with contextlib.suppress(OSError):
                _fill(self._spare, record, self._spare_bytes)
                os.replace(self._spare, self._path)

    def _no_space(self, error: BaseException | None = None) -> str:
        """Return the note for a full disk, which PyTorch's write errors do not mention, or ""."""
        for each in error_chain(error):
            if isinstance(each, OSError) and each.errno in _NO_SPACE:
                return f": no space left on device ({each.filename or self.run})"
        return f": no space left on device ({self.run})" if is_disk_full(self.run.path) else ""

    def _log_end(self) -> str:
        """Return the last 100 lines of the rank's error log, more than a stack has."""
        with contextlib.suppress(OSError):
            lines = (
                self.run.rank_log_path(self.rank.rank, "err")
                .read_text(errors="replace")
                .splitlines()
            )
            return "\n".join(lines[-100:])
        return ""


def _fill(spare: Path, record: Json, size: int) -> None:
    """Write the record into the reserved space; keep only the end of a long traceback."""
    if len(json.dumps(record)) > size:
        texts: Json = {
            name: record[name][:1000] for name in ("message", "detail") if name in record
        }
        record = {**record, **texts, "folded": "", "traceback": record["traceback"][-size:]}
        # A character takes up to six bytes in JSON.
        while record["traceback"] and (much := len(json.dumps(record)) - size) > 0:
            record["traceback"] = record["traceback"][max(1, much // 6) :]
    with open(spare, "r+b") as file:
        file.write(json.dumps(record).encode())
        file.truncate()


def of_own_exit(code: int) -> int:
    """Return the exit status for a rank whose own code exited with `code`.

    EXIT_SAVED (85) is reserved for a run that stopped on request and saved; 0 is no success here.
    """
    return 1 if code in (0, EXIT_SAVED) else code


def _cause_of(error: BaseException, text: str, no_space: str) -> tuple[Cause, str]:
    """Return the cause of a rank's own exception, and the line that shows it."""
    own = error.cause if isinstance(error, OrtlaunchError) else None
    if isinstance(error, (BadStepError, DataWorkerError)) and own is not None:
        return own, error.detail
    named = _memory_or_disk(match_cause_in_text(text), no_space)
    # A FileError has its own remedy.
    if named is None and not isinstance(error, FileError):
        named = match_cause_in_text(text)
    if named is not None:
        return named
    if isinstance(error, OrtlaunchError) and own is not None:
        return own, error.detail
    line = str(error).strip().partition("\n")[0]
    if isinstance(error, SystemExit):
        return Cause.LEFT_EARLY, line
    if _status_of(error) == 2 and line:
        return Cause.BAD_INPUT, line
    return Cause.RAISED, f"{type(error).__name__}: {line}"


def _cause_of_end(number: int | None, words: str, no_space: str) -> tuple[Cause, str]:
    """Return the cause of an end that only the supervisor saw, by the signal and the log's end."""
    named = match_cause_in_text(words)
    if found := _memory_or_disk(named, no_space):
        return found
    if number in CRASH_SIGNALS:
        return Cause.CRASH, ""
    if number:
        return Cause.KILLED if number == signal.SIGKILL else Cause.SIGNALLED, ""
    return named or (Cause.LEFT_EARLY, "")


def _memory_or_disk(named: tuple[Cause, str] | None, no_space: str) -> tuple[Cause, str] | None:
    """Return the causes that take precedence over a signal and over an error's own type."""
    if named is not None and named[0] in (Cause.OUT_OF_MEMORY, Cause.DISK_FULL):
        return named
    return (Cause.DISK_FULL, no_space.removeprefix(": ")) if no_space else None


def _status_of(error: BaseException) -> int:
    if isinstance(error, OrtlaunchError):
        return error.exit_status
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code:
        return of_own_exit(error.code & 0xFF)
    # Also for sys.exit(0): a rank that exits before the end has failed.
    return 1
