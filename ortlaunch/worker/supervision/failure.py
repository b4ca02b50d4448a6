"""The account of a rank's end in errors/rank_N.json: what it holds, and room for it where the disk is full."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import time
import traceback
from pathlib import Path

from ortlaunch import machine
from ortlaunch.errors import OrtlaunchError
from ortlaunch.json_types import Json
from ortlaunch.rank import EXIT_SAVED, Rank
from ortlaunch.run_folder.folder import RunDir, account, is_full, write_json
from ortlaunch.worker.supervision.pulse import Pulse
from ortlaunch.worker.supervision.user_frames import folded, raised_at

# A rank that loses its peers fails too; these words tell that the cause is elsewhere.
_PEER_IS_GONE = ("Connection closed by peer", "Connection reset by peer", "remote process", "NCCL error", "Broken pipe",
                 "Timed out waiting", "Socket closed", "DistBackendError", "DistNetworkError")  # fmt: skip
SEEN = ("Signal", "Exit")  # ends that a guardian saw: their traceback is the end of the rank's own output
_MOST_SPARE_BYTES, _ALL_SPARE_BYTES = 1 << 15, 1 << 26  # of a rank, and of all ranks
_PAGE = 1 << 12
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Account:
    """What one rank's process and its guardian write of its end."""

    def __init__(self, rank: Rank, run: RunDir, pulse: Pulse) -> None:
        self.rank, self.run, self._pulse = rank, run, pulse
        self._path, self._spare = run.error(rank.rank), run.spare(rank.rank)
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
            from ortlaunch.recipe.fields.ort_variables import in_recipes_words  # pydantic is loaded by then

            text, message = in_recipes_words(text), in_recipes_words(message)
        status = _status_of(error)
        secondary = isinstance(error, Exception) and any(word in text for word in _PEER_IS_GONE)
        kind = type(error).__name__
        what = f"failed with {kind}{self._no_space(error)}"
        record = {"type": kind, "message": message, "traceback": text, "secondary": secondary, "time": now}
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
        record = {"message": what, "traceback": self._last_words(), **record}
        self.write(pid, what + (self._no_space() if record["signal"] is None else ""), record)

    def write(self, pid: int, what: str, record: Json) -> None:
        """Add who and where, and write it whole."""
        host, rank = socket.gethostname(), self.rank
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


def _status_of(error: BaseException) -> int:
    if isinstance(error, OrtlaunchError):
        return error.exit_status
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code:
        return of_own_exit(error.code & 0xFF)
    return 1  # also sys.exit(0): a rank that leaves before the end has failed
