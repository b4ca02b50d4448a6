"""Test the lock of a run folder: one run at a time, its holder, and the refusal of a second."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ortlaunch.base.errors import PlanError
from ortlaunch.run_folder import lock as run_lock
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.lock import RunLock

# A command that locks the folder given as its first argument, prints "begun" and sleeps. Second
# argument: "alone", "with a rank" (a fork that shares the lock) or "becomes another" (an `exec`,
# as with a launcher's rank).
COMMAND = """
import os, sys, time
from ortlaunch.run_folder.lock import RunLock, hold_shared_run_lock_until_exit
from ortlaunch.run_folder.folder import RunDir
run, how = RunDir(sys.argv[1]), sys.argv[2]
lock = RunLock()
lock.lock_and_record_holder_or_refuse(run, survives_exec=how == "becomes another")
rank = os.fork() if how == "with a rank" else 1
if not rank:
    hold_shared_run_lock_until_exit(run)
if how == "becomes another":
    os.execvp("sh", ["sh", "-c", "echo begun; exec sleep 60"])
if rank < 2:  # one of them says it, the rank once it holds its part
    print("begun", flush=True)
time.sleep(60)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run folder that does not exist yet."""
    return RunDir(tmp_path / "run")


@contextlib.contextmanager
def command(run: RunDir, how: str = "alone") -> Iterator[subprocess.Popen[str]]:
    """Start another command that holds the lock of the folder; kill it at the end."""
    words = [sys.executable, "-c", COMMAND, str(run), how]
    # A session of its own, so that `killpg` below also ends the fork.
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("how", ["alone", "becomes another"])
def test_a_second_run_is_refused(how: str, run: RunDir) -> None:
    """A second run is refused while the first one lives, and the message names the first one.

    The message has the process, the host and the start time. The lock also survives an `exec`.
    """
    with command(run, how) as first:
        begun = time.monotonic()
        with pytest.raises(PlanError) as caught, RunLock() as lock:
            lock.lock_and_record_holder_or_refuse(run)
        # Seconds: a living holder is refused at once, without the wait for ranks.
        assert time.monotonic() - begun < 1
        since = json.loads(run.lock.read_text())["since"]
        holder = f"process {first.pid} on host {socket.gethostname()} (since {since})"
        expected = (
            f"--run-dir {run}: {holder} trains there; wait for its end, or give another folder"
        )
        assert str(caught.value) == expected
        assert caught.value.exit_status == 2


def test_a_killed_command_frees_it(run: RunDir) -> None:
    """The lock is free after kill -9, although the file still names the killed process."""
    with command(run) as first:
        first.kill()
        first.wait()
        with RunLock() as lock:
            lock.lock_and_record_holder_or_refuse(run)
            assert json.loads(run.lock.read_text())["pid"] == os.getpid()


def test_ranks_hold_it_too(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new run waits for ranks of a killed command, and is refused if they stay alive."""
    # Seconds: without these two lines the test would wait for the real limits.
    monkeypatch.setattr(run_lock, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(run_lock, "_EXTRA_GRACE_SECONDS", 0.0)
    with command(run, "with a rank") as first:
        first.kill()
        first.wait()
        with pytest.raises(PlanError) as caught, RunLock() as lock:
            lock.lock_and_record_holder_or_refuse(run)
        assert "has ended, but some of its ranks are still alive; end them" in str(caught.value)
        assert f"waiting for the ranks of process {first.pid} on host" in capsys.readouterr().out
    # The rank has been killed with its process group, so the folder is free.
    with RunLock() as lock:
        lock.lock_and_record_holder_or_refuse(run)


def test_ranks_of_the_run_share_it(run: RunDir) -> None:
    """A rank shares its own command's lock, and the same process can lock a freed folder again."""
    for _ in range(2):
        with RunLock() as lock:
            lock.lock_and_record_holder_or_refuse(run)
            lock.lock_and_record_holder_or_refuse(run)
            run_lock.hold_shared_run_lock_until_exit(run)
            break
    file = os.open(run.lock, os.O_RDWR)
    with pytest.raises(BlockingIOError):  # the rank's part, which ends with this process
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(file)


def test_a_disk_without_locks_is_told(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a disk without file locks (some network disks) the run continues and prints a notice."""

    def flock(*_: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    with RunLock() as lock:
        lock.lock_and_record_holder_or_refuse(run)
    run_lock.hold_shared_run_lock_until_exit(run)
    said = (
        f"{run}: no file locks here (Operation not supported): a second run in it cannot be "
        "detected\n"
    )
    assert capsys.readouterr().out == said


def test_a_lock_that_is_lost_when_it_becomes_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another command that takes the lock between the two is reported, not overlooked."""
    real = fcntl.flock

    def flock(file: int, operation: int) -> None:
        if operation & fcntl.LOCK_SH:
            raise BlockingIOError(errno.EWOULDBLOCK, "taken")
        real(file, operation)

    monkeypatch.setattr(run_lock.fcntl, "flock", flock)
    with RunLock() as lock, pytest.raises(PlanError, match="another command has just locked it"):
        lock.lock_and_record_holder_or_refuse(RunDir(tmp_path / "run"))


def test_a_later_turn_waits_for_the_earlier_one(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that lives on a node that was taken for dead is requested to stop, and waited for."""
    with command(run) as first:

        def obey() -> None:
            while not run.stop_request.exists():
                time.sleep(0.01)
            first.kill()

        threading.Thread(target=obey, daemon=True).start()
        with RunLock() as lock:
            lock.lock_and_record_holder_or_refuse(run, living_holder_wait_seconds=20)
        assert f"process {first.pid} on host {socket.gethostname()}" in capsys.readouterr().out
    with command(run), pytest.raises(PlanError, match="trains there"), RunLock() as lock:
        lock.lock_and_record_holder_or_refuse(run, living_holder_wait_seconds=0.1)
