"""Tests of a started request: its files, its status, and its end with all processes of it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from ortlaunch.base.errors import LaunchError
from ortlaunch.base.process import read_process_stat_or_none
from ortlaunch.launch import JobState, LaunchLimits, LaunchRequest, processes
from ortlaunch.run_folder.folder import RunDir, write_text_atomically


def test_a_program_that_is_not_there() -> None:
    """A program that does not exist is named in the error."""
    with pytest.raises(LaunchError, match=r"^cannot start /nope/mpirun: program not found$"):
        processes.write_files_and_start_job(LaunchRequest(("/nope/mpirun", "-n", "2")))


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
    request = LaunchRequest(
        (sys.executable, "-c", check + code), (("A", "1"),), ((str(tmp_path / "f"), "text"),)
    )
    job = processes.write_files_and_start_job(request)
    assert processes.forward_signals_until_job_ends(job) == status
    assert (processes.job_state(job), job.user_signal) == (state, None)


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
    job = processes.write_files_and_start_job(LaunchRequest((sys.executable, "-c", code)))
    assert processes.job_state(job) is JobState.RUNNING
    # Before that, SIGTERM would end the child.
    while not here.exists():
        time.sleep(0.01)
    processes.end_job_and_its_processes(job)
    assert processes.job_state(job) is JobState.FAILED
    deadline = time.monotonic() + 2
    while in_group(job.process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert in_group(job.process.pid) == []


DEAF = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)"


def limited(folder: Path, hosts: int = 1, start_seconds: float = 60.0) -> processes.Job:
    """Start a launcher of 2 ranks that does not end by itself, and ignores SIGTERM."""
    limits = LaunchLimits(str(folder), 2, hosts, start_seconds)
    return processes.write_files_and_start_job(
        LaunchRequest((sys.executable, "-c", DEAF), limits=limits)
    )


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all limits of a launcher short."""
    for name in ("_LOST_SECONDS", "_STALL_SECONDS", "_OUTLIVED_SECONDS", "_POLL_SECONDS"):
        monkeypatch.setattr(processes, name, 0.2)


@pytest.mark.usefixtures("impatient")
def test_a_launcher_that_waits_for_a_lost_host(tmp_path: Path) -> None:
    """A launcher that waits for a lost host is ended, and killed if it ignores SIGTERM."""
    # mpirun would wait for ever for its daemon on that host.
    write_text_atomically(RunDir(tmp_path).stall, "{}")
    assert processes.forward_signals_until_job_ends(limited(tmp_path, hosts=2)) in (137, 143)


@pytest.mark.usefixtures("impatient")
def test_a_launcher_that_outlives_its_last_rank(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A launcher that does not end after its last rank is ended; the ranks' own records count."""
    # mpirun waits for as long as anybody holds a connection to its own port.
    run = RunDir(tmp_path)
    job = limited(tmp_path)
    run.count_ended_rank(1)
    assert processes._reason_to_end_launcher_noting_if_all_ranks_began(job) is None
    run.count_ended_rank(0)
    assert (processes.forward_signals_until_job_ends(job), job.foreign_signal) == (0, None)
    assert capfd.readouterr().err == (
        f"ortlaunch: the launcher (process {job.process.pid}) has not ended 0.2 s after its last "
        "rank, and is ended\n"
    )


@pytest.mark.usefixtures("impatient")
def test_a_launcher_that_starts_not_all_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A launcher that has not started all ranks in time is ended, with the number that it started."""
    run = RunDir(tmp_path)
    # A rank's log that is older than the request is of an earlier start.
    write_text_atomically(run.request, "")
    write_text_atomically(run.rank_log_path(1, "err"), "")
    job = limited(tmp_path, start_seconds=0.2)
    assert (processes.forward_signals_until_job_ends(job) in (137, 143), job.foreign_signal) == (
        True,
        None,
    )
    assert capfd.readouterr().err == (
        f"ortlaunch: the launcher (process {job.process.pid}) has started 1 of 2 ranks in 0.2 s, "
        "and is ended\n"
    )
    write_text_atomically(run.rank_log_path(0, "err"), "")
    assert processes._reason_to_end_launcher_noting_if_all_ranks_began(job) is None


def test_a_stopped_process_is_reported(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A launcher or supervisor that SIGSTOP has stopped is reported once, with the remedy."""
    monkeypatch.setattr(processes, "_STOPPED_CHECK_SECONDS", 0.1)
    monkeypatch.setattr(processes, "_POLL_SECONDS", 0.1)
    job = processes.write_files_and_start_job(LaunchRequest(("sleep", "60")))
    pid = job.process.pid
    while (stat := read_process_stat_or_none(pid)) is None or stat.name != "sleep":
        time.sleep(0.01)
    os.kill(pid, signal.SIGSTOP)
    # The default action of SIGTERM ends the process after SIGCONT.
    timer = threading.Timer(
        1.0, lambda: (os.kill(pid, signal.SIGCONT), os.kill(pid, signal.SIGTERM))
    )
    timer.start()
    assert processes.forward_signals_until_job_ends(job) == 143
    assert capfd.readouterr().err == (
        f"ortlaunch: process {pid} (sleep) is stopped, and the run waits for it: kill -CONT {pid}\n"
    )
