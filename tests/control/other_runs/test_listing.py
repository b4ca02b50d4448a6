"""Tests of `ortlaunch list` with filters, and of `ortlaunch compare`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from ortlaunch.api.runs import Run, listed, runs
from ortlaunch.errors import InputError
from ortlaunch.launch import JobState
from ortlaunch.launch.record import JobRecord
from ortlaunch.other_runs import registry
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.resolve.prepare import prepare
from ortlaunch.resolve.resolve import resolve
from ortlaunch.run_folder.folder import RunDir, write_text
from tests.makers import CUSTOM, OWN_MODULE


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Run, Run]:
    """A failed and a successful run, of another rate and another module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    for name, state, loss, more in (
        ("bad", JobState.FAILED, '"nan"', ""),
        ("good", JobState.SUCCEEDED, 0.5, "# faster\n"),
    ):
        Path("mine.py").write_text(OWN_MODULE + more)
        optimizer = {"name": "adamw", "learning_rate": 1.0 if name == "bad" else 0.1}
        Path("recipe.yaml").write_text(yaml.safe_dump({**CUSTOM, "optimizer": optimizer}))
        run = RunDir(tmp_path / "runs" / name)
        prepare(resolve(Path("recipe.yaml"), (), LaunchOptions(), os.environ), run)
        record = JobRecord.of_this_process("local", JobState.RUNNING)
        record.at_end(state, int(name == "bad"), "the end", None).write(run)
        run.metrics.write_text(f'{{"step": 3, "loss": {loss}}}\n')
        # Rank 0 copies the modules.
        write_text(run.modules / "mine.py", OWN_MODULE + more)
        registry.add(run)
    return Run("bad"), Run("good")


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        ({}, {"good", "bad"}),
        ({"name": "runs/g*d"}, {"good"}),
        ({"name": "nowhere"}, set()),
        ({"state": "failed"}, {"bad"}),
        # A loss that is no number is within no limit.
        ({"metric": "loss <= 0.5"}, {"good"}),
        ({"metric": "loss>-1e9"}, {"good"}),
        ({"metric": "accuracy>0"}, set()),
        ({"state": "failed", "metric": "loss<9"}, set()),
    ],
)
def test_filters(two: Any, filters: dict[str, str], names: set[str]) -> None:
    """Runs are listed by a part of their path, their state and a limit of a metric."""
    assert {run.path.name for run in runs(**filters)} == names
    assert len(runs(1)) == 1


def test_wrong_filters(two: Any) -> None:
    """A state that does not exist and a limit that is none are refused with their form."""
    with pytest.raises(InputError, match="state: got fine; one of pending, running"):
        runs(state="fine")
    for metric in ("loss", "loss=1", "loss<low"):
        with pytest.raises(InputError, match=f"metric: got {metric}; give a limit, as 'evaluation"):
            runs(metric=metric)
    assert listed([]) == "no runs"


def test_compare(two: tuple[Run, Run], tmp_path: Path) -> None:
    """Each difference is a line: recipe, code, state, metrics; a queued run has nothing yet."""
    bad, good = two
    assert bad.compare(good) == [
        "optimizer.learning_rate: 1.0 -> 0.1",
        "modules/mine.py: other content",
        'state: "failed" -> "succeeded"',
        'loss: "nan" -> 0.5',
    ]
    assert good.compare(good) == []
    JobRecord.of_this_process("local", JobState.PENDING).write(RunDir(tmp_path / "queued"))
    with pytest.raises(InputError, match="queued: has not begun, so it has no record to compare"):
        bad.compare(Run(tmp_path / "queued"))
