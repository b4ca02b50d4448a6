"""Tests of `ortlaunch train` in a terminal: lines that stay, the progress line, and the logs."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch.tiny import ORTLAUNCH, needs_mpi, write_recipe

ERASE = "\r\x1b[K"


def typed(folder: Path, *arguments: str, timeout: float = 60, status: int = 0) -> str:
    """Run a command in a terminal of 90 columns, and return all its output."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "90"}
    command = subprocess.Popen(
        [ORTLAUNCH, *arguments],
        cwd=folder,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    deadline = time.monotonic() + timeout
    try:
        while time.monotonic() < deadline:
            if not select.select([ours], [], [], 0.2)[0]:
                continue
            try:
                shown += os.read(ours, 1 << 16)
            except OSError:
                # No process has the terminal open any more.
                break
        assert command.wait(timeout=10) == status, shown.decode()
    finally:
        command.kill()
        os.close(ours)
    return shown.decode().replace("\r\n", "\n")


@pytest.mark.parametrize(
    "launcher",
    [
        "local",
        pytest.param("torchrun", marks=pytest.mark.slow),
        pytest.param("mpi", marks=[needs_mpi, pytest.mark.slow]),
    ],
)
def test_a_run_in_a_terminal(launcher: str, tmp_path: Path) -> None:
    """Logged steps stay in the terminal, the progress line is erased, and logs have plain lines."""
    recipe = write_recipe(tmp_path, train={"max_steps": 6}, log={"every_steps": 2})
    words = (f"--launcher={launcher}", f"--nproc-per-node={1 if launcher == 'local' else 2}")
    shown = typed(tmp_path, "train", str(recipe), "--run-dir=run", *words)
    drawn = [piece.split("\n")[0] for piece in shown.split(ERASE)[1:]]
    bars = [piece for piece in drawn if re.match(r"training +\d+%\|.*\| \d/6 \[", piece)]
    assert drawn[0] == "loading libraries ..."
    assert bars
    assert max(map(len, bars)) < 90
    # A line may follow a progress line that was erased.
    stay = [line.rpartition(ERASE)[2] for line in shown.split("\n")]
    assert [line.split("  ")[0] for line in stay if line.startswith("step ")] == [
        "step 2/6",
        "step 4/6",
        "step 6/6",
    ]
    assert stay[-3].startswith("done: run, in ")
    for log in (tmp_path / "run/logs").iterdir():
        assert re.findall(r"[\r\x1b]|training +\d|\.\.\.$", log.read_text(), re.MULTILINE) == []


@pytest.mark.slow
@pytest.mark.ci
def test_the_live_line_of_a_killed_rank_is_erased(tmp_path: Path) -> None:
    """The progress line of a killed rank is erased before the verdict."""
    recipe = write_recipe(tmp_path, train={"max_steps": 400}, log={"every_steps": 2})
    text = (tmp_path / "mine.py").read_text()
    # The rank's supervisor is killed, and the rank ends with it.
    kill = "os.kill(os.getppid(), signal.SIGKILL), time.sleep(9)"
    counted = (
        f"        self.count = getattr(self, 'count', 0) + 1\n        self.count < 9 or ({kill})\n"
    )
    text = text.replace(
        "    def forward(self, x, y):\n", f"    def forward(self, x, y):\n{counted}"
    )
    (tmp_path / "mine.py").write_text(f"import time\n{text}")
    shown = typed(tmp_path, "train", str(recipe), "--run-dir=run", status=137)
    assert f"{ERASE}training " in shown
    assert [
        line for line in shown.split("\n") if line.rpartition(ERASE)[2].startswith("training ")
    ] == []
    assert "disappeared without an error record" in shown
