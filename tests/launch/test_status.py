"""Tests of `status` and `cancel` from another process than `train`, with real launchers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ortlaunch.launch import JobState
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.started_runs.status import Status, read_status
from tests.launch import light
from tests.launch.tiny import LAUNCHERS, RECIPE, ortlaunch, processes_of, write_recipe


def until(run: RunDir, come: Callable[[Status], bool]) -> Status:
    """Wait until the run's status meets a condition, and return that status."""
    deadline = time.monotonic() + 60
    while True:
        if run.job.exists() and come(found := read_status(run)):
            return found
        assert time.monotonic() < deadline, read_status(run)
        time.sleep(0.02)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("launcher", ["local", *LAUNCHERS])
def test_status_and_cancel(launcher: str, tmp_path: Path) -> None:
    """The status is right from the start to the cancelled end, and no process is left."""
    write_recipe(tmp_path, train={"max_steps": 1_000_000}, log={"every_steps": 1})
    run = RunDir(tmp_path / "run")
    ranks = 1 if launcher == "local" else 2
    words = [
        "train",
        RECIPE,
        "--launcher",
        launcher,
        "--nproc-per-node",
        str(ranks),
        "--run-dir",
        str(run),
    ]
    command = [sys.executable, light.__file__, *words]
    train = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        begun = until(run, lambda _: True)
        # The ranks may start before the first look.
        assert (begun.state in (JobState.PENDING, JobState.RUNNING), begun.step) == (True, None)
        going = until(run, lambda found: found.step is not None and found.ranks_begun == ranks)
        assert (going.state, going.ranks, going.ranks_begun) == (JobState.RUNNING, ranks, ranks)
        assert (going.job.backend, going.job.id, going.steps) == (
            launcher,
            str(train.pid),
            1_000_000,
        )
        # From another process, as a user does in another terminal.
        ended = ortlaunch(tmp_path, "cancel", str(run))
        assert (ended.returncode, ended.stdout.startswith(f"cancelled\n{run}: cancelled")) == (
            0,
            True,
        ), ended
        _, errors = train.communicate(timeout=10)
        found = read_status(run)
        assert (train.returncode, found.state, found.job.exit_status) == (
            143,
            JobState.CANCELLED,
            143,
        )
        # Both are the line that the command printed at its end.
        assert str(found.job.verdict).splitlines()[-1] == errors.splitlines()[-1]
        assert (processes_of(tmp_path), found.alive) == ([], ())
    finally:
        for pid in (
            [train.pid, *processes_of(tmp_path)] if train.poll() is None else processes_of(tmp_path)
        ):
            os.kill(pid, signal.SIGKILL)
