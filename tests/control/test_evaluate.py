"""`ortlaunch evaluate`: which checkpoint, on how many ranks, in what folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ortlaunch.errors import InputError
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.recipe import to_yaml
from ortlaunch.run import evaluate as evaluations
from ortlaunch.run.evaluate import Asked
from ortlaunch.run.folder import RunDir
from tests import makers

EVALUATION = ("data.evaluation.format=custom", "data.evaluation.factory=mine:data")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of one rank with a step of 8 samples, and a checkpoint of step 10."""
    (tmp_path / "mine.py").write_text(makers.OWN_MODULE)
    recipe = makers.recipe(batch={"global_size": 8, "micro_size": 2})
    found = RunDir(tmp_path / "run")
    found.checkpoint(10).mkdir(parents=True)
    (found.checkpoint(10) / "COMPLETE").touch()
    found.recipe.write_text(to_yaml(recipe))
    found.plan.write_text(makers.plan(recipe).to_json().replace('"here"', f'"{tmp_path}"'))
    return found


def test_what_is_started(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks, which the global batch could not be divided among; the user's module is where it was."""
    started: list[Any] = []
    monkeypatch.setattr(evaluations.control, "train", lambda *given: started.append(given) or 3)
    options = LaunchOptions("torchrun", 3)
    assert evaluations.evaluate(Asked(run, None, EVALUATION), options) == 3
    ((resolved, folder, resume),) = started
    assert (resolved.plan.task, resolved.plan.world_size, resolved.plan.batch.global_samples) == ("evaluate", 3, 6)
    assert resolved.plan.modules == str(run.path.parent)
    assert folder == run.path / "evaluations/step_00000010"
    assert resume.choice == str(run.checkpoint(10))


@pytest.mark.parametrize(
    ("step", "overrides", "message"),
    [(20, EVALUATION, "--step: .* has no complete checkpoint of step 20; of 10"),
     (None, (), "has no data.evaluation; give one")],
)  # fmt: skip
def test_refusals(step: int | None, overrides: tuple[str, ...], message: str, run: RunDir) -> None:
    """Another step, or no corpus to measure on, before a process is started."""
    with pytest.raises(InputError, match=message):
        evaluations.evaluate(Asked(run, step, overrides), LaunchOptions("local"))
