"""The account of a rank's end in errors/rank_N.json: what it holds, and room for it where the disk is full."""

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
from ortlaunch.errors import BadStepError, FileError, OrtlaunchError
from ortlaunch.json_types import Json
from ortlaunch.rank import EXIT_SAVED, Rank
from ortlaunch.run_folder.cause_text import CRASHES
from ortlaunch.run_folder.folder import RunDir, account, is_full, write_json
from ortlaunch.run_folder.library_messages import cause_in, crash_line, lost_a_peer
from ortlaunch.worker.supervision.pulse import Pulse
from ortlaunch.worker.supervision.user_frames import folded, raised_at

SEEN = (
    "Signal",
    "Exit",
)  # ends that a guardian saw: their traceback is the end of the rank's own output
# of a rank, and of all ranks
_MOST_SPARE_BYTES = 1 << 15
_ALL_SPARE_BYTES = 1 << 26
_PAGE = 1 << 12
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Account:
    """What one rank's process and its guardian write of its end."""

    def __init__(self, rank: Rank, run: RunDir, pulse: Pulse) -> None:
        self.rank = rank
        self.run = run
        self._pulse = pulse
        self._path = run.error(rank.rank)
        self._spare = run.spare(rank.rank)
        self._spare_bytes = max(_PAGE, min(_MOST_SPARE_BYTES, _ALL_SPARE_BYTES // rank.world_size))

    def open(self) -> None:
        """Take room on the disk now, for a full disk must not hide why a rank failed."""
        with contextlib.suppress(OSError):
            self.run.errors.mkdir(parents=True, exist_ok=True)
            with open(self._spare, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, self._spare_bytes)

    def close(self) -> None:
        """There is nothing more to tell."""
        with contextlib.suppress(OSError):
            self._spare.unlink()

    @property
    def is_written(self) -> bool:
        """Whether the rank has told its end itself."""
        return self._path.exists()

    def read(self) -> Json:
        """The account."""
        return account(self._path)

    def of_exception(self, error: BaseException, log: int) -> int:
        """Write the rank's own account of its end, and to the descriptor `log`; returns its exit status."""
        now = time.time()
        text = str(error) if isinstance(error, OrtlaunchError) else traceback.format_exc()
        message = str(error)
        if "Settings." in text:  # of ortmodule/, in a later export
            from ortlaunch.recipe.fields.ort_variables import (
                in_recipes_words,
            )  # pydantic is loaded by then

            text = in_recipes_words(text)
            message = in_recipes_words(message)
        status = _status_of(error)
        secondary = isinstance(error, Exception) and lost_a_peer(text)
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
        """Write what the guardian saw of a rank that told nothing itself."""
        words = self._last_words()
        no_space = self._no_space() if record["signal"] is None else ""
        cause, detail = _cause_of_end(record["signal"], words, no_space)
        known = {"message": what, "traceback": words, "cause": cause, "detail": detail}
        self.write(pid, what + no_space, {**known, **record})

    def write(self, pid: int, what: str, record: Json) -> None:
        """Add who and where, and write it whole."""
        host = socket.gethostname()
        rank = self.rank
        place = f"rank {rank.rank} on host {host} (local rank {rank.local_rank})"
        summary = f"{place} {what}; exit status {record['exit_status']}; log: {self.run.log(rank.rank, 'err')}"
        seen = self._pulse.read()
        where = {"rank": rank.rank, "local_rank": rank.local_rank, "host": host, "pid": pid, "summary": summary,
                 "step": seen.step, "phase": seen.phase}  # fmt: skip
        limit = machine.tightest_limit()
        where["memory_limit"] = {"name": limit.name, "bytes": limit.size}
        where["after"] = self.run.count_account(rank.rank)
        self._store({**where, "time": time.time(), **record})

    def is_an_echo(self) -> None:
        """The rank failed after it was asked to end, so that the cause is elsewhere."""
        with contextlib.suppress(OSError):
            self._store({**self.read(), "secondary": True})

    def _store(self, record: Json) -> None:
        try:
            write_json(self._path, record)
        except OSError:
            with contextlib.suppress(OSError):
                _fill(self._spare, record, self._spare_bytes)
                os.replace(self._spare, self._path)

    def _no_space(self, error: BaseException | None = None) -> str:
        """What to add where the disk of the run is full: PyTorch's errors of writing do not say it."""
        while error is not None:
            if isinstance(error, OSError) and error.errno in _NO_SPACE:
                return f": no space left on device ({error.filename or self.run})"
            error = error.__cause__ or error.__context__
        return f": no space left on device ({self.run})" if is_full(self.run.path) else ""

    def _last_words(self) -> str:
        """The end of the rank's error log."""
        with contextlib.suppress(OSError):
            lines = self.run.log(self.rank.rank, "err").read_text(errors="replace").splitlines()
            return "\n".join(lines[-20:])
        return ""


def _fill(spare: Path, record: Json, size: int) -> None:
    """Write into room that is taken already; of a long traceback the end, which tells."""
    much = len(json.dumps(record)) - size
    if much > 0:
        record = {
            **record,
            "message": record["message"][:1000],
            "folded": "",
            "traceback": record["traceback"][much + 1000 :],
        }
    with open(spare, "r+b") as file:
        file.write(json.dumps(record).encode())
        file.truncate()


def of_own_exit(code: int) -> int:
    """The exit status of a rank whose own code left with this one: 85 is a stop's alone, which has saved."""
    return 1 if code in (0, EXIT_SAVED) else code


def _cause_of(error: BaseException, text: str, no_space: str) -> tuple[Cause, str]:
    """The cause of a rank's own exception, and the line that shows it."""
    own = error.cause if isinstance(error, OrtlaunchError) else None
    if isinstance(error, BadStepError) and own is not None:
        return own, error.detail
    named = _memory_or_disk(cause_in(text), no_space)
    if named is None and not isinstance(error, FileError):  # which has its own remedy
        named = cause_in(text)
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
    """The cause of an end that only the supervisor saw: by the signal, and by the last lines of the rank's log."""
    named = cause_in(words)
    if found := _memory_or_disk(named, no_space):
        return found
    if number in CRASHES:
        return Cause.CRASH, crash_line(words)
    if number:
        return Cause.KILLED if number == signal.SIGKILL else Cause.SIGNALLED, ""
    return named or (Cause.LEFT_EARLY, "")


def _memory_or_disk(named: tuple[Cause, str] | None, no_space: str) -> tuple[Cause, str] | None:
    """What counts more than a signal or an error's own type."""
    if named is not None and named[0] in (Cause.OUT_OF_MEMORY, Cause.DISK_FULL):
        return named
    return (Cause.DISK_FULL, no_space.removeprefix(": ")) if no_space else None


def _status_of(error: BaseException) -> int:
    if isinstance(error, OrtlaunchError):
        return error.exit_status
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code:
        return of_own_exit(error.code & 0xFF)
    return 1  # also sys.exit(0): a rank that leaves before the end has failed
