"""`ortlaunch train` typed in a terminal: which lines stay, what is drawn below them, what the logs have of it."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch.tiny import ORTLAUNCH, TORCHRUN_FIRST, write_recipe

ERASE = "\r\x1b[K"


def typed(folder: Path, *arguments: str, timeout: float = 60) -> str:
    """Everything that a command wrote to its terminal, of 90 columns, until its end."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "90"}
    command = subprocess.Popen(
        [ORTLAUNCH, *arguments], cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown, deadline = b"", time.monotonic() + timeout
    try:
        while time.monotonic() < deadline:
            if not select.select([ours], [], [], 0.2)[0]:
                continue
            try:
                shown += os.read(ours, 1 << 16)
            except OSError:  # nobody writes any more
                break
        assert command.wait(timeout=10) == 0, shown.decode()
    finally:
        command.kill()
        os.close(ours)
    return shown.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("launcher", TORCHRUN_FIRST)
def test_a_run_in_a_terminal(launcher: str, tmp_path: Path) -> None:
    """Each logged step stays, what is going on is drawn and erased, and the logs hold plain lines."""
    recipe = write_recipe(tmp_path, train={"max_steps": 6}, log={"every_steps": 2})
    shown = typed(tmp_path, "train", str(recipe), "--run-dir=run", f"--launcher={launcher}", "--nproc-per-node=2")
    drawn = [piece.split("\n")[0] for piece in shown.split(ERASE)[1:]]
    bars = [piece for piece in drawn if re.match(r"training +\d+%\|.*\| \d/6 \[", piece)]
    assert drawn[0] == "loading libraries ..."
    assert bars
    assert max(map(len, bars)) < 90
    stay = [line.rpartition(ERASE)[2] for line in shown.split("\n")]
    assert [line.split("  ")[0] for line in stay if line.startswith("step ")] == ["step 2/6", "step 4/6", "step 6/6"]
    assert stay[-3].startswith("done: run, in ")
    for log in (tmp_path / "run/logs").iterdir():
        assert re.findall(r"[\r\x1b]|training +\d|\.\.\.$", log.read_text(), re.MULTILINE) == []
