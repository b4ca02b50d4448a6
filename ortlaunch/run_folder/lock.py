"""One run at a time in a run folder: the command holds its lock, and so do its ranks until the last has ended.

The kernel frees the lock with the processes, also after kill -9. To begin takes it exclusively, to go on shared: a
second command finds the first, or ranks that outlived it for a moment. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time

from ortlaunch.errors import PlanError
from ortlaunch.json_types import Json
from ortlaunch.process import Process, flock_holders
from ortlaunch.rank import GRACE_SECONDS
from ortlaunch.run_folder.folder import RunDir

_MORE_SECONDS = 5.0  # than ranks have to end
_HELD = (errno.EWOULDBLOCK, errno.EACCES)


class RunLock:
    """A command's lock on its run folder."""

    def __init__(self) -> None:
        self._file: int | None = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            os.close(self._file)

    def take(self, run: RunDir, keep: bool = False) -> None:
        """Begin a run there, once. The lock goes with this process, through what it becomes where `keep` is true.

        Raises:
            PlanError: another run is going on there; it is named.
        """
        if self._file is not None:
            return
        run.path.mkdir(parents=True, exist_ok=True)
        self._file = os.open(run.lock, os.O_RDWR | os.O_CREAT, 0o666)
        if _begin(self._file, run):
            here = {**Process.this()._asdict(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            os.ftruncate(self._file, 0)
            with contextlib.suppress(OSError):  # a full disk: the lock holds without a name
                os.pwrite(self._file, json.dumps(here).encode(), 0)
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.set_inheritable(self._file, keep)


def share(run: RunDir) -> None:
    """Hold a rank's part of the lock until this process and what it forks have ended."""
    with contextlib.suppress(OSError):
        fcntl.flock(os.open(run.lock, os.O_RDWR | os.O_CREAT, 0o666), fcntl.LOCK_SH | fcntl.LOCK_NB)


def _begin(file: int, run: RunDir) -> bool:
    """Take the lock exclusively, once ranks that outlive a killed command have ended; False where there is none."""
    deadline = time.monotonic() + GRACE_SECONDS + _MORE_SECONDS
    told = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in _HELD:
                print(
                    (
                        f"{run}: no file locks here ({error.strerror}): a second run in it "
                        "would not be seen"
                    ),
                    flush=True,
                )
                return False
        holder = _holder(file)
        if not _has_gone(holder):
            raise PlanError(
                f"--run-dir {run}: {_named(holder)} trains there; wait for its end, or give "
                "another folder"
            )
        if time.monotonic() > deadline:
            raise PlanError(
                f"--run-dir {run}: {_named(holder)} has ended, but ranks of it are still "
                "alive; end them"
            )
        if not told:
            print(
                f"{run}: waiting for the ranks of {_named(holder)}, which was killed, to end",
                flush=True,
            )
            told = True
        time.sleep(0.1)


def _holder(file: int) -> dict[str, object]:
    """Who began the run there; nothing is known while it is being written, or where it is none of ours."""
    with contextlib.suppress(ValueError):
        found = json.loads(os.pread(file, 4096, 0))
        if isinstance(found, dict) and isinstance(found.get("pid"), int):
            return {name: found.get(name, "") for name in (*Process._fields, "since")}
    return {}


def _named(holder: Json) -> str:
    if not holder:
        return "another run"
    return f"process {holder['pid']} on host {holder['host']} (since {holder['since']})"


def _has_gone(holder: Json) -> bool:
    """Whether it was a process of this host, which has ended."""
    process = _process(holder)
    return process is not None and process.is_here and not process.lives()


def _process(holder: Json) -> Process | None:
    return Process(**{name: holder[name] for name in Process._fields}) if holder else None


def refuse_living(run: RunDir) -> None:
    """Nothing, where no command of this host trains there.

    Raises:
        PlanError: one does; it is named.
    """
    with contextlib.suppress(FileNotFoundError):
        file = os.open(run.lock, os.O_RDONLY)
        holder = _holder(file)
        os.close(file)
        if holder and not _has_gone(holder):
            raise PlanError(
                f"--run-dir {run}: {_named(holder)} trains there; wait for its end, or give "
                "another folder"
            )


def command_at(run: RunDir) -> Process | None:
    """The command that last took the folder, whether it lives or not."""
    with contextlib.suppress(FileNotFoundError):
        file = os.open(run.lock, os.O_RDONLY)
        try:
            return _process(_holder(file))
        finally:
            os.close(file)
    return None


def alive_at(run: RunDir) -> list[int]:
    """Living processes of the run on this host, command and ranks: those that hold a part of the lock."""
    return sorted(flock_holders(run.lock) - {os.getpid()})
