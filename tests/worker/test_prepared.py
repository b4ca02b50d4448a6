"""When the fork of a prepared process can be a rank, and what is said where it cannot."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.base import module_start
from ortlaunch.launch import prepared as callers_side
from ortlaunch.launch_plan import Plan
from ortlaunch.recipe import dump_recipe_yaml
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.worker import prepared
from tests.makers import recipe
from tests.worker.guarded import write_plan


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """The folder of a run on this host."""
    run = RunDir(tmp_path / "run")
    write_plan(run, "local")
    run.recipe.write_text(dump_recipe_yaml(recipe()))
    return run


@pytest.mark.parametrize(
    ("variables", "override", "reason"),
    [
        ({"ORTLAUNCH_PROGRESS": "80", "CUDA_VISIBLE_DEVICES": "1"}, {}, ""),
        ({"OMP_NUM_THREADS": "7"}, {}, "the environment has another OMP_NUM_THREADS"),
        ({}, {"launch": {"binding": "none"}}, "launch.binding, device"),
        ({}, {"engine": {"name": "inductor"}}, ""),
        ({}, {"engine": {"name": "ort"}}, "engine, launch.binding"),
    ],
)
def test_a_rank_that_differs_is_executed(
    run: RunDir, variables: dict[str, str], override: dict[str, Any], reason: str
) -> None:
    """A rank is not forked where its variables or the settings of its libraries are others."""
    imported = prepared._Libraries()
    imported.settings = prepared._settings_of_libraries(recipe(), Plan.read(run.plan))
    run.recipe.write_text(dump_recipe_yaml(recipe(**override)))
    argv = [*module_start.module_command("ortlaunch.worker"), str(run)]
    given = imported._reason_against_fork_or_empty(argv, {**os.environ, **variables})
    assert reason in given
    assert bool(given) == bool(reason)
    assert "launcher" in imported._reason_against_fork_or_empty(["mpirun", *argv], os.environ)


def test_a_process_with_threads_forks_nothing(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that cannot be forked is ended, and each command that it should fork says why."""
    (tmp_path / "busy.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n"
    )
    monkeypatch.setattr(callers_side, "_COMMAND_MODULES", ("busy",))
    process = callers_side.PreparedProcess()
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    eager = dump_recipe_yaml(recipe(engine={"name": "eager"}))
    for _ in range(2):
        process.start_unless_running(variables, eager, Plan.read(run.plan))
        assert process.fork_command_or_record_refusal(["json.tool"], {}, run.output) is None
    line = "not forked from the sweep's prepared process: the imports have started 1 threads\n"
    assert run.output.read_text() == line * 2
    process.end()
    assert process._process is not None
    assert process._process.returncode == -15
