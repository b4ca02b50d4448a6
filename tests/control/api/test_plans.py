"""Tests of plan, and of train and submit before anything starts."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import ortlaunch
from ortlaunch.api.detached import (
    launch_options_as_command_arguments,
    start_detached_and_await_job_file_or_raise,
)
from ortlaunch.base.errors import InputError, PlanError, RecipeError, RunError
from ortlaunch.run_folder.folder import RunDir
from tests.makers import CUSTOM

pytestmark = pytest.mark.usefixtures("workbench")


def test_a_plan() -> None:
    """A plan has the ranks of the options, and creates no file."""
    options = ortlaunch.LaunchOptions(launcher="torchrun", processes_per_node=2)
    planned = ortlaunch.plan(CUSTOM, options=options, batch={"micro_size": 4})
    assert (planned.world_size, planned.launcher) == (2, "torchrun")
    assert planned.batch.global_samples == 8
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("source", "more", "kind", "message"),
    [
        ({**CUSTOM, "seed": "x"}, {}, RecipeError, "recipe: seed: got"),
        (CUSTOM, {"launch": {"nodes": 2}}, PlanError, "launch.nodes is 2, and there is no --host"),
        (CUSTOM, {"run_dir": "mine.py"}, PlanError, "--run-dir mine.py: is a file"),
        (CUSTOM, {"resume": "7"}, InputError, "7"),
        (
            CUSTOM,
            {"options": ortlaunch.LaunchOptions(launcher="slurm")},
            PlanError,
            "launcher: got slurm; that is a scheduler",
        ),
        (
            CUSTOM,
            {"options": ortlaunch.LaunchOptions(processes_per_node=0)},
            PlanError,
            "processes_per_node: got 0; give 1 or more",
        ),
        (
            CUSTOM,
            {"resume": ortlaunch.ResumeOptions(allow=("x",))},
            InputError,
            "--allow: got x; one of",
        ),
        (
            CUSTOM,
            {"model": {"factory": "nothing:model"}},
            RecipeError,
            "no module nothing beside the recipe",
        ),
    ],
)
def test_errors_before_a_start(
    source: Any, more: Any, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong recipe, host, folder or option is raised in the caller, and no process starts."""
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(kind, match=message):
        ortlaunch.train(source, **more)
    assert not Path("runs").exists()


def test_a_rank_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank of a launcher would start a run of its own, so that `train` refuses it."""
    for name, value in (("RANK", 0), ("WORLD_SIZE", 2), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1234")
    with pytest.raises(PlanError, match="this process is a rank of a launcher"):
        ortlaunch.train(CUSTOM)


def test_options_as_words() -> None:
    """The options of a run are those of the command that is started."""
    options = ortlaunch.LaunchOptions("mpi", 2, "hosts", include="a", exclude="b")
    assert launch_options_as_command_arguments(options) == [
        "--launcher=mpi",
        "--nproc-per-node=2",
        "--hostfile=hosts",
        "--include=a",
        "--exclude=b",
    ]
    assert launch_options_as_command_arguments(ortlaunch.LaunchOptions()) == []


def test_a_command_that_ends_at_once() -> None:
    """A command that ends before its job.json is an error with its last output."""
    Path("bad.yaml").write_text(yaml.safe_dump({**CUSTOM, "seed": "x"}))
    run = RunDir("run")
    with pytest.raises(RunError, match=r"bad\.yaml:\d+:\d+: seed: got") as caught:
        start_detached_and_await_job_file_or_raise(["train", "bad.yaml", "--run-dir=run"], run, {})
    assert caught.value.exit_status == 2


def test_a_scheduler_of_no_name() -> None:
    """An unknown scheduler is refused with the known ones."""
    with pytest.raises(InputError, match="scheduler: got pbs; one of slurm, kubernetes, azureml"):
        ortlaunch.submit(CUSTOM, scheduler="pbs")
