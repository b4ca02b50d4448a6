"""Tests of a started request: its files, its status, and its end with all processes of it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from ortlaunch.errors import LaunchError
from ortlaunch.launch import GivenUp, JobState, Request, processes
from ortlaunch.process import read_stat
from ortlaunch.run_folder.folder import COUNTED_BYTES, RunDir


def test_a_program_that_is_not_there() -> None:
    """A program that does not exist is named in the error."""
    with pytest.raises(LaunchError, match=r"^cannot start /nope/mpirun: program not found$"):
        processes.submit(Request(("/nope/mpirun", "-n", "2")))


@pytest.mark.parametrize(
    ("code", "status", "state"),
    [
        ("", 0, JobState.SUCCEEDED),
        ("raise SystemExit(7)", 7, JobState.FAILED),
        ("import os; os.kill(os.getpid(), 9)", 137, JobState.FAILED),
        ("import os; os.kill(os.getpid(), 15)", 143, JobState.FAILED),
    ],
)
def test_the_status_is_the_commands_own(
    code: str, status: int, state: JobState, tmp_path: Path
) -> None:
    """Files are written before the command starts, and its status is reported as by a shell."""
    check = (
        "import os; "
        f"assert (os.environ['A'], open({str(tmp_path / 'f')!r}).read()) == ('1', 'text')\n"
    )
    request = Request(
        (sys.executable, "-c", check + code), (("A", "1"),), ((str(tmp_path / "f"), "text"),)
    )
    job = processes.submit(request)
    assert processes.wait(job) == status
    assert (processes.state(job), job.signal) == (state, None)


def in_group(group: int) -> list[str]:
    """Return the living processes of a process group."""
    stats = [stat_of(path) for path in Path("/proc").glob("[0-9]*/stat")]
    # Zombies (Z) have ended.
    return [stat[0] for stat in stats if stat[1:] and stat[1] != "Z" and stat[3] == str(group)]


def stat_of(path: Path) -> list[str]:
    """Return the id, state, parent and group of a process; nothing if it has gone."""
    try:
        text = path.read_text()
    except OSError:
        return []
    return [path.parent.name, *text.rpartition(")")[2].split()]


def test_cancel_ends_the_whole_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelling a job ends all its processes, also those that ignore SIGTERM."""
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.3)
    here = tmp_path / "deaf"
    deaf = (
        "import pathlib, signal, time; signal.signal(15, signal.SIG_IGN); "
        f"pathlib.Path({str(here)!r}).touch()\n"
    )
    child = f"{deaf}time.sleep(600)"
    code = (
        "import subprocess, sys, time; "
        f"subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
    )
    job = processes.submit(Request((sys.executable, "-c", code)))
    assert processes.state(job) is JobState.RUNNING
    # Before that, SIGTERM would end the child.
    while not here.exists():
        time.sleep(0.01)
    processes.cancel(job)
    assert processes.state(job) is JobState.FAILED
    deadline = time.monotonic() + 2
    while in_group(job.process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert in_group(job.process.pid) == []


def test_a_launcher_that_waits_for_a_lost_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher that waits for a lost host is ended, and killed if it ignores SIGTERM."""
    # mpirun would wait for ever for its daemon on that host.
    monkeypatch.setattr(processes, "_LOST_SECONDS", 0.3)
    deaf = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)"
    (tmp_path / "stall.json").touch()
    # Only stall.json exists, so its seconds count.
    given_up = (
        GivenUp(str(tmp_path / "lost.json"), 60.0),
        GivenUp(str(tmp_path / "stall.json"), 0.3),
    )
    began = time.monotonic()
    status = processes.wait(
        processes.submit(Request((sys.executable, "-c", deaf), given_up=given_up))
    )
    assert (status in (137, 143), time.monotonic() - began < 20) == (True, True)


def test_a_launcher_that_outlives_its_last_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A launcher that does not end after its last rank is ended; the ranks' own records count."""
    # mpirun waits for as long as anybody holds a connection to its own port.
    monkeypatch.setattr(processes, "_LOST_SECONDS", 0.3)
    deaf = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)"
    run = RunDir(tmp_path)
    limit = GivenUp(str(run.ended_ranks), 0.3, 2 * COUNTED_BYTES)
    job = processes.submit(Request((sys.executable, "-c", deaf), given_up=(limit,)))
    run.count_end(1)
    assert not limit.exists()
    run.count_end(0)
    assert (processes.wait(job), limit.exists()) == (0, True)
    assert capfd.readouterr().err == (
        f"ortlaunch: the launcher (process {job.process.pid}) has not ended 0.3 s after its last "
        "rank, and is ended\n"
    )


def test_a_stopped_process_is_reported(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A launcher or supervisor that SIGSTOP has stopped is reported once, with the remedy."""
    monkeypatch.setattr(processes, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(processes, "_POLL_SECONDS", 0.1)
    job = processes.submit(Request(("sleep", "60")))
    pid = job.process.pid
    while (stat := read_stat(pid)) is None or stat.name != "sleep":
        time.sleep(0.01)
    os.kill(pid, signal.SIGSTOP)
    # The default action of SIGTERM ends the process after SIGCONT.
    timer = threading.Timer(
        1.0, lambda: (os.kill(pid, signal.SIGCONT), os.kill(pid, signal.SIGTERM))
    )
    timer.start()
    assert processes.wait(job) == 143
    assert capfd.readouterr().err == (
        f"ortlaunch: process {pid} (sleep) is stopped, and the run waits for it: kill -CONT {pid}\n"
    )
