"""Runs whose machine fails: killed as a whole again and again, and a rank that dies while a checkpoint is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import EAGER, ROOT, TOY, TWO_RANKS, Train, ended_well, merged
from tests.ort import build, needs_ort, share_extensions


def tool(name: str, *words: str, home: Path) -> str:
    """What a tool found, all well, with the built extensions in a cache of its own."""
    build()
    (home / "cache").mkdir()
    share_extensions(home / "cache")
    command = [sys.executable, str(ROOT / "tools" / name), f"--folder={home}", *words]
    environment = {**os.environ, "ORTLAUNCH_CACHE": str(home / "cache")}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    return ended.stdout


@needs_ort
@pytest.mark.slow
@pytest.mark.ci
def test_a_run_that_is_killed_again_and_again(tmp_path: Path) -> None:
    """SIGKILL to all processes while a checkpoint is written and between two: as if nothing had been.

    `python tools/kill_resume.py --kills 100` is the long form.
    """
    found = json.loads(tool("kill_resume.py", "--kills=2", home=tmp_path).splitlines()[-1])
    assert found["differ"] == []
    assert found["while a checkpoint was written"] >= 1


@needs_ort
@pytest.mark.slow
@pytest.mark.ci
def test_a_run_that_goes_on_in_other_worlds(tmp_path: Path) -> None:
    """2 ranks, 1 and 3, each with another engine and stage: every rank reads what it would have read of one run.

    `python tools/resume_matrix.py` is the long form.
    """
    found = tool("resume_matrix.py", "--only=ort none > eager 1 > ort 2", home=tmp_path)
    assert "288 sample ids" in found
    assert "1 of 1 go on" in found


DIES = '''
import os, signal
from pathlib import Path
from toys import data, net as plain

def net(folder):
    """Rank 1 dies when it has written its part of step 4's checkpoint, before it is on the disk; once."""
    sync, mark = os.fsync, Path(folder, "died")

    def die(handle):
        if Path(folder, "checkpoints/step_00000004.partial").exists() and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        sync(handle)

    if os.environ["RANK"] == "1":
        os.fsync = die
    return plain()
'''


@pytest.mark.slow
def test_a_save_whose_rank_dies(train: Train, home: Path) -> None:
    """The run ends, names the rank, and leaves the older checkpoint whole; the next start goes on from that."""
    (home / "dies.py").write_text(DIES)
    arguments = {"folder": str(home / "dies")}
    recipe = merged(TOY, {**EAGER, "zero": {"stage": 1}, "checkpoint": {"every_steps": 2}, "train": {"max_steps": 6}})
    recipe = {**recipe, "model": {"task": "custom", "factory": "dies:net", "arguments": arguments}}
    failed = train("dies", recipe, *TWO_RANKS)
    assert failed.status != 0
    assert "rank 1" in failed.err
    names = {path.name for path in (failed.folder / "checkpoints").iterdir()}
    assert names == {"step_00000002", "step_00000004.partial"}
    again = ended_well(train("dies", recipe, *TWO_RANKS))
    assert "step_00000004.partial: incomplete: its writing was cut off" in again.out
    assert "resumed after step 2 from" in again.out
    assert {path.name for path in (failed.folder / "checkpoints").iterdir()} == {
        f"step_0000000{step}" for step in (2, 4, 6)
    }
    assert len(again.losses()) == 6
