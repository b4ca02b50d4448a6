"""A run of two ranks that is requested to save and to stop saves at once and loses no step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from ortlaunch.cli import app
from ortlaunch.run_folder.folder import RunDir
from tests.e2e.runs import (
    COMMAND,
    EAGER,
    SLOW,
    TOY,
    TWO_RANKS,
    Run,
    Train,
    ended_well,
    environment,
    merged,
    reach,
    step_of,
)

RECIPE = merged(
    TOY,
    {
        **EAGER,
        "model": {"factory": "slow_toys:net", "arguments": {"dropout": 0.3}},
        "batch": {"micro_size": 8},
        "train": {"max_steps": 60},
        # Both requested checkpoints are kept.
        "checkpoint": {"keep": None},
    },
)
WEIGHTS = ("export/model.safetensors", "checkpoints/step_00000060/*.safetensors")


def asked(verb: str, run: RunDir) -> Result:
    """Run the verb in this process, which saves the second that a new process takes to start."""
    return CliRunner().invoke(app, [verb, str(run)])


def bits(run: Run) -> dict[str, bytes]:
    """Return the bytes of the exported weights and of the last checkpoint's tensors."""
    found = [path for pattern in WEIGHTS for path in run.folder.glob(pattern)]
    return {str(path.relative_to(run.folder)): path.read_bytes() for path in found}


def begun(home: Path, recipe: dict[str, Any]) -> subprocess.Popen[str]:
    """Start `ortlaunch train` into the folder `stopped`, in a process group of its own."""
    (home / "stopped.yaml").write_text(yaml.safe_dump(recipe))
    return subprocess.Popen(
        [str(COMMAND), "train", "stopped.yaml", *TWO_RANKS, "--run-dir=stopped"], cwd=home, env=environment(home),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.ci
def test_a_run_that_is_asked_to_save_and_to_stop(train: Train, home: Path) -> None:
    """A run saves on request, stops with status 85, and when resumed equals an undisturbed run."""
    (home / "slow_toys.py").write_text(SLOW)
    whole = ended_well(train("whole", RECIPE, *TWO_RANKS))
    # While this file exists, a pass takes 0.25 s more.
    (home / "slow").touch()
    run = RunDir(home / "stopped")
    command = begun(home, RECIPE)
    try:
        reach(run, 2, command)
        before = step_of(run)
        said = asked("checkpoint", run)
        assert said.exit_code == 0, said.output
        saved = run.complete_checkpoints()[-1][0]
        assert said.output == f"saved after step {saved}: {run.checkpoint_folder(saved)}\n"
        # The step that was logged last, the current one, and two more.
        assert before < saved <= before + 3
        reach(run, saved + 2, command)
        assert [step for step, _ in run.complete_checkpoints()] == [saved]

        said = asked("stop", run)
        out, _ = command.communicate(timeout=60)
        assert (said.exit_code, command.returncode) == (0, 85), said.output + out
    finally:
        if command.poll() is None:
            # A failed test must not leave ranks behind.
            os.killpg(command.pid, signal.SIGKILL)
    job = json.loads(run.job.read_text())
    stopped = step_of(run)
    assert (job["state"], job["exit_status"]) == ("preempted", 85)
    assert f"saved after step {stopped} of 60" in job["verdict"]["message"]
    assert [step for step, _ in run.complete_checkpoints()] == [saved, stopped]

    (home / "slow").unlink()
    again = ended_well(train("stopped", RECIPE, *TWO_RANKS))
    assert f"resumed after step {stopped} from" in again.out
    assert len(bits(whole)) >= 2
    assert bits(again) == bits(whole)
    assert again.losses() == whole.losses()
