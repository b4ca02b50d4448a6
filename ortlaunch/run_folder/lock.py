"""Allow one run at a time in a run folder: the command and its ranks hold the folder's lock.

The kernel frees the lock with the processes, also after kill -9. A command takes the lock
exclusively to begin and keeps it shared, as its ranks do. So a second command detects the first
one, or ranks that outlived it for a moment. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import time

from ortlaunch.base.errors import PlanError
from ortlaunch.base.json_types import Json, parse_json_or_raise_decode_error
from ortlaunch.base.process import Process, ids_of_processes_holding_flock
from ortlaunch.rank import GRACE_SECONDS
from ortlaunch.run_folder.folder import RunDir, write_json_atomically

_EXTRA_GRACE_SECONDS = 5.0  # in addition to the seconds in which ranks must end
# `flock` reports a lock that another process holds with either.
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

    def lock_and_record_holder_or_refuse(
        self, run: RunDir, survives_exec: bool = False, living_holder_wait_seconds: float = 0.0
    ) -> None:
        """Take the lock of a run folder; do nothing if this object already has it.

        Args:
            run: the run folder, created if it is absent.
            survives_exec: whether the lock survives an `exec` of this process.
            living_holder_wait_seconds: time in which a run of another host may end; it is requested to stop.

        Raises:
            PlanError: another run uses the folder; the message names its process.
        """
        if self._file is not None:
            return
        run.path.mkdir(parents=True, exist_ok=True)
        self._file = os.open(run.lock, os.O_RDWR | os.O_CREAT, 0o666)
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            raise PlanError(f"--run-dir {run}: {run.lock} is no regular file; remove it")
        if _take_exclusive_lock_or_refuse_if_supported(self._file, run, living_holder_wait_seconds):
            this_process = {
                **Process.identity_of_this_process()._asdict(),
                "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            }
            os.ftruncate(self._file, 0)
            # On a full disk the name cannot be written; the lock works without it.
            with contextlib.suppress(OSError):
                os.pwrite(self._file, json.dumps(this_process).encode(), 0)
            # Shared from now on, so that the ranks can hold it beside the command.
            # The kernel drops the lock and takes it again, so that another command can come between.
            try:
                fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PlanError(
                    f"--run-dir {run}: another command has just locked it; start again"
                ) from None
        os.set_inheritable(self._file, survives_exec)


def hold_shared_run_lock_until_exit(run: RunDir) -> None:
    """Hold a rank's share of the lock until this process and its forks have ended."""
    # The descriptor stays open on purpose: its closing would free the lock.
    with contextlib.suppress(OSError):
        fcntl.flock(os.open(run.lock, os.O_RDWR | os.O_CREAT, 0o666), fcntl.LOCK_SH | fcntl.LOCK_NB)


def _take_exclusive_lock_or_refuse_if_supported(
    lock_descriptor: int, run: RunDir, living_holder_wait_seconds: float
) -> bool:
    """Take the lock exclusively, after ranks of a killed command have ended.

    Args:
        lock_descriptor: the open lock file.
        run: the run folder.
        living_holder_wait_seconds: time in which a living holder may end.

    Returns:
        False if the disk has no file locks.
    """
    began = time.monotonic()
    deadline = began + GRACE_SECONDS + _EXTRA_GRACE_SECONDS
    is_reported = False
    while True:
        try:
            fcntl.flock(lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in _HELD:
                print(
                    (
                        f"{run}: no file locks here ({error.strerror}): a second run in it "
                        "cannot be detected"
                    ),
                    flush=True,
                )
                return False
        holder = _read_lock_holder_or_empty(lock_descriptor)
        # The holder may be on another host, where this one cannot check whether it is alive.
        if not _has_holder_ended(holder) and time.monotonic() < began + living_holder_wait_seconds:
            if not is_reported:
                write_json_atomically(run.stop_request, {"by": "a later turn of its job"})
                print(f"{run}: {_holder_text(holder)} trains there: requested to stop", flush=True)
            is_reported = True
            time.sleep(1.0)
            continue
        if not _has_holder_ended(holder):
            raise PlanError(
                f"--run-dir {run}: {_holder_text(holder)} trains there; wait for its end, or give "
                "another folder"
            )
        if time.monotonic() > deadline:
            raise PlanError(
                f"--run-dir {run}: {_holder_text(holder)} has ended, but some of its ranks are still "
                "alive; end them"
            )
        if not is_reported:
            print(
                f"{run}: waiting for the ranks of {_holder_text(holder)}, which was killed, to end",
                flush=True,
            )
            is_reported = True
        time.sleep(0.1)


def _read_lock_holder_or_empty(lock_descriptor: int) -> dict[str, object]:
    """Return the process that began the run, as written in the lock file.

    Empty while the command is writing it, or if the file has other contents.
    """
    # OSError: it is no regular file.
    with contextlib.suppress(ValueError, OSError):
        holder_record = parse_json_or_raise_decode_error(os.pread(lock_descriptor, 4096, 0))
        if isinstance(holder_record, dict) and isinstance(holder_record.get("pid"), int):
            return {name: holder_record.get(name, "") for name in (*Process._fields, "since")}
    return {}


def _holder_text(holder: dict[str, object]) -> str:
    if not holder:
        return "another run"
    return f"process {holder['pid']} on host {holder['host']} (since {holder['since']})"


def _has_holder_ended(holder: dict[str, object]) -> bool:
    """Return whether the holder was a process of this host that has ended."""
    process = _holder_process(holder)
    return process is not None and process.is_here and not process.is_alive()


def _holder_process(holder: Json) -> Process | None:
    return Process(**{name: holder[name] for name in Process._fields}) if holder else None


def process_that_last_locked_run(run: RunDir) -> Process | None:
    """Return the command that last locked the folder, alive or not; None if there was none."""
    with contextlib.suppress(FileNotFoundError):
        file = os.open(run.lock, os.O_RDONLY | os.O_NONBLOCK)
        try:
            return _holder_process(_read_lock_holder_or_empty(file))
        finally:
            os.close(file)
    return None


def living_process_ids(run: RunDir) -> list[int]:
    """Return the ids of living processes of the run on this host: all that hold its lock."""
    return sorted(ids_of_processes_holding_flock(run.lock) - {os.getpid()})
