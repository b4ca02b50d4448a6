"""Tests of runs that are started and controlled through the public Python API."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import ortlaunch
from ortlaunch.base.errors import RunError
from ortlaunch.launch import JobState
from ortlaunch.run_folder.folder import RunDir
from tests.e2e.runs import EAGER, SLOW, TOY, environment, merged, reach

ROOT = Path(__file__).parents[2]
RECIPE: dict[str, Any] = merged(
    TOY, {**EAGER, "model": {"factory": "slow:net"}, "checkpoint": {"every_steps": 100}}
)
# A notebook's kernel: it starts a run, goes on to another cell, and is killed there.
KERNEL = """
import time, ortlaunch
ortlaunch.train("slow.yaml", run_dir="killed", wait=False)
time.sleep(600)
"""


@pytest.fixture
def here(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder as the current one, with a model that is slow while a file exists."""
    monkeypatch.chdir(home)
    for name, value in environment(home).items():
        monkeypatch.setenv(name, value)
    (home / "slow.py").write_text(SLOW)
    (home / "slow").touch()
    return home


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(180)
def test_a_killed_kernel(here: Path) -> None:
    """A run that Python started ends well although its kernel is killed in mid-training."""
    (here / "slow.yaml").write_text(yaml.safe_dump(RECIPE))
    kernel = subprocess.Popen(
        [sys.executable, "-c", KERNEL],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        reach(RunDir(here / "killed"), 2, kernel)
    finally:
        # Jupyter kills the whole process group of a kernel.
        os.killpg(kernel.pid, signal.SIGKILL)
        printed, _ = kernel.communicate()
        (here / "slow").unlink()
    last = ortlaunch.Run("killed").wait()
    assert (last.state, last.step, last.alive) == (JobState.SUCCEEDED, 10, ())
    assert [row["step"] for row in ortlaunch.Run("killed").metrics()] == list(range(1, 11))
    assert Path("killed/export/model.safetensors").exists()
    assert printed == ""


@pytest.mark.timeout(240)
def test_a_run_is_controlled(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A run saves on request, stops, continues at the next call, and prints nothing."""
    run = ortlaunch.train(RECIPE, run_dir="mine", wait=False)
    reach(RunDir(run.path), 2)
    saved = run.checkpoint()
    assert (saved / "COMPLETE").exists()
    stopped = run.stop()
    assert (stopped.exit_status, run.status().state) == (0, JobState.PREEMPTED), stopped.text
    (here / "slow").unlink()
    done = ortlaunch.train(RECIPE, run_dir="mine")
    assert (done.path, done.status().step) == (run.path, 10)
    assert list(done.frame()["step"]) == list(range(1, 11))
    assert "done" in (done.path / "output.txt").read_text().splitlines()[-2]
    assert "step 10/10" in "".join(done.logs())
    assert done.diagnose().kind == "ended-well"
    assert "&lt;figure" in done._repr_html_()
    assert ortlaunch.runs()[0].path.samefile(done.path)
    assert capfd.readouterr() == ("", "")


@pytest.mark.timeout(120)
def test_a_run_fails(here: Path) -> None:
    """A run that fails is an error with the run's verdict and exit status."""
    fails = {"factory": "toys:net", "arguments": {"fail_at": 2, "mark": "here.failed"}}
    with pytest.raises(RunError, match="as a machine that fails") as caught:
        ortlaunch.train(RECIPE, model=fails, run_dir="fails")
    assert caught.value.exit_status == 1
    assert ortlaunch.Run("fails").wait(check=False).state is JobState.FAILED


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(600)
def test_the_page(here: Path) -> None:
    """The examples of docs/reference/python.md run in their order."""
    own_model = (ROOT / "docs/start/own-model.md").read_text()
    page = (ROOT / "docs/reference/python.md").read_text()
    (here / "my_model.py").write_text(_blocks("python", own_model)[0])
    (here / "my_recipe.yaml").write_text(_blocks("yaml", own_model)[0])
    (here / "page.py").write_text("\n".join(_blocks("python", page)))
    ended = subprocess.run(
        [sys.executable, "page.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ended.returncode == 0, ended
    assert "40/40" in ended.stderr
    assert ended.stdout.startswith("recipe: valid (my-net)\n1\n")
    assert "JobState.PREEMPTED" in ended.stdout
    assert "RuntimeError" in ended.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(600)
def test_the_result_is_used(here: Path) -> None:
    """A finished causal model is evaluated, exported, and continues a text."""
    (here / "held.txt").write_text("the cats saw the dogs near the old houses\n\n" * 200)
    words = {"format": "text", "path": "held.txt"}
    run = ortlaunch.train(
        "llama2-7b/tiny",
        run_dir="llama",
        engine={"name": "eager"},
        optimizer={"name": "adamw"},
        data={"evaluation": words},
        train={"max_steps": 3},
    )
    found = run.evaluate(step=3, progress=True)
    assert found["step"] == 3
    assert found["loss"] > 0
    assert run.evaluate()["loss"] == found["loss"]
    assert (run.export(to="llama-model") / "config.json").exists()
    assert run.generate("The", tokens=3).startswith("The")


def _blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
