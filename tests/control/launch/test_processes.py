"""Tests of a launcher's processes: all that it leaves on this host is ended. Without torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ortlaunch.launch import LaunchRequest, processes
from ortlaunch.launch.stop import StopRequest

# Behaves as a launcher may: its child is in a session of its own, and may ignore SIGTERM. The
# launcher ends before the child.
LEAVES = """
import os, pathlib, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if sys.argv[2] == "ignores":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0 and sys.argv[2] == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    pathlib.Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(60)
while len(os.listdir(sys.argv[1])) < (1 if sys.argv[2] == "stopped" else 2):
    time.sleep(0.01)
os.kill(os.getpid(), int(sys.argv[3]))
"""


@pytest.fixture(autouse=True)
def _little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(processes, "_EXTRA_GRACE_SECONDS", 0.0)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("how", ["plain", "ignores", "stopped"])
def test_what_a_launcher_leaves_is_ended(how: str, tmp_path: Path) -> None:
    """The wait ends after every descendant has, also in other sessions and with SIGTERM ignored."""
    job = processes.write_files_and_start_job(
        LaunchRequest((sys.executable, "-c", LEAVES, str(tmp_path), how, "9"))
    )
    # The launcher ends itself with SIGKILL.
    assert processes.forward_signals_until_job_ends(job) == 137
    assert (job.foreign_signal, job.user_signal) == (signal.SIGKILL, None)
    assert [pid for pid in os.listdir(tmp_path) if Path("/proc", pid).exists()] == []


def test_others_of_this_process_live_on(tmp_path: Path) -> None:
    """Other processes of this process, from before the job or of another job, live on."""
    # Neither a child from before the job nor another job's process may be reaped or ended.
    mine = subprocess.Popen(["sleep", "60"])
    other = processes.write_files_and_start_job(LaunchRequest(("sleep", "60")))
    try:
        job = processes.write_files_and_start_job(
            LaunchRequest((sys.executable, "-c", LEAVES, str(tmp_path), "plain", "9"))
        )
        assert processes.forward_signals_until_job_ends(job) == 137
        assert (mine.poll(), other.process.poll()) == (None, None)
    finally:
        mine.kill()
        mine.wait()
        processes.end_job_and_its_processes(other)
    assert other.process.poll() == -signal.SIGTERM


@pytest.mark.timeout(20)
@pytest.mark.parametrize("tells", [True, False])
def test_a_notice_goes_to_the_ranks(
    tells: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """SIGUSR1 reaches the launcher, or its children if the launcher does not forward it."""
    command = (
        "import os, pathlib, signal, sys, time\n"
        "pid = os.fork()\n"
        "signal.signal(10, lambda *_: "
        "pathlib.Path(sys.argv[1], 'child' if not pid else 'launcher').touch())\n"
        "time.sleep(0.5)\n"
        "os.kill(int(sys.argv[2]), 10) if pid else None\n"
        "time.sleep(0.5)\n"
        "os.waitpid(pid, 0) if pid else None\n"
    )
    words = (sys.executable, "-c", command, str(tmp_path), str(os.getpid()))
    assert (
        processes.forward_signals_until_job_ends(
            processes.write_files_and_start_job(LaunchRequest(words, notifies_ranks=tells))
        )
        == 0
    )
    assert [path.name for path in tmp_path.iterdir()] == ["launcher" if tells else "child"]
    assert "ortlaunch: SIGUSR1 is forwarded to the ranks" in capfd.readouterr().err


def test_a_launcher_ignores_notices_that_it_does_not_handle() -> None:
    """A launcher without handlers for SIGUSR1 and SIGUSR2 ignores them."""
    # torchrun has none, and would end by their default action.
    job = processes.write_files_and_start_job(
        LaunchRequest(("sh", "-c", "kill -USR1 $$; kill -USR2 $$; exit 5"))
    )
    assert processes.forward_signals_until_job_ends(job) == 5


@pytest.mark.timeout(20)
def test_a_second_signal_means_now(tmp_path: Path) -> None:
    """A second SIGTERM to the command ends, without a grace, processes that ignore the first."""
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(15, signal.SIG_IGN)\n"
        "for _ in range(2): os.kill(int(sys.argv[1]), 15); time.sleep(0.3)\n"
        "time.sleep(60)\n"
    )
    begun = time.monotonic()
    job = processes.write_files_and_start_job(
        LaunchRequest((sys.executable, "-c", code, str(os.getpid())))
    )
    assert processes.forward_signals_until_job_ends(job) == 143
    assert time.monotonic() - begun < 5


# Ignores SIGHUP, SIGINT, SIGUSR1, SIGUSR2 and SIGTERM.
DEAF = (
    "import os, signal, sys, time\nfor n in (1, 2, 10, 12, 15): signal.signal(n, signal.SIG_IGN)\n"
)


@pytest.mark.timeout(20)
def test_the_grace_is_over(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The command itself kills ranks and supervisors that do not end within the grace."""
    stop = StopRequest(str(tmp_path / "stop.json"), str(tmp_path / "cancel"), 1)
    code = f"{DEAF}os.kill(int(sys.argv[1]), 15); time.sleep(60)"
    begun = time.monotonic()
    job = processes.write_files_and_start_job(
        LaunchRequest((sys.executable, "-c", code, str(os.getpid())), stop=stop)
    )
    assert processes.forward_signals_until_job_ends(job) == 143
    assert (job.sent_sigkill, time.monotonic() - begun < 8) == (True, True)
    assert "SIGTERM: saves after this step, stops within 1 s" in capfd.readouterr().err
    assert json.loads((tmp_path / "stop.json").read_text())["by"] == "SIGTERM"


def test_a_signals_line_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A line on a signal replaces the progress line of a terminal, and fits 100 columns."""
    # The terminal adds ^C to the progress line.
    monkeypatch.setattr(processes.os, "isatty", lambda end: True)
    monkeypatch.setattr(processes, "_signal_launcher_or_rank_supervisors", lambda job, number: None)
    monkeypatch.setattr(processes, "_signal_process_group", lambda job, number: None)
    monkeypatch.setattr(processes.signal, "setitimer", lambda *_: None)
    stop: Any = SimpleNamespace(grace_seconds=120, write_unless_present=lambda name: None)
    job: Any = SimpleNamespace()
    processes._request_save_and_start_kill_timer(job, stop, signal.SIGTERM)
    erased, line = capfd.readouterr().err.split("\x1b[K")
    assert (erased, line[:20]) == ("\r", "ortlaunch: SIGTERM: ")
    assert len(line) < 100


@pytest.mark.timeout(20)
def test_a_signal_that_came_while_it_was_started() -> None:
    """A signal from before the wait counts once `wait` is called."""
    job = processes.write_files_and_start_job(LaunchRequest(("sleep", "60")))
    job.early_signals.append(signal.SIGTERM)
    assert processes.forward_signals_until_job_ends(job) == 143


def test_a_good_end_in_spite_of_a_signal() -> None:
    """A job that ends with status 0 in spite of a signal returns 0, not 128 + the signal."""
    job = processes.write_files_and_start_job(
        LaunchRequest(("sh", "-c", f"trap 'exit 0' TERM; kill -TERM {os.getpid()}; sleep 9 & wait"))
    )
    assert processes.forward_signals_until_job_ends(job) == 0
    assert job.user_signal == signal.SIGTERM
