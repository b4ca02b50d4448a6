"""Tests of runs that ended: whether another start trains anything, and the command to train on."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.launch import JobState
from ortlaunch.launch.record import JobRecord
from ortlaunch.recipe import load_recipe
from ortlaunch.run.preparation import record_success_unless_recorded
from ortlaunch.run.run_completion import (
    continue_command_if_train_was_typed,
    nothing_to_train_text_if_readable,
)
from ortlaunch.run_folder.folder import RunDir, write_json_atomically
from ortlaunch.run_folder.verdict import Verdict
from tests.makers import OWN_MODULE, recipe


@pytest.fixture
def ended(tmp_path: Path) -> RunDir:
    """A run of two epochs, which were 10 steps, that ended and was exported."""
    run = RunDir(tmp_path)
    write_json_atomically(run.summary, {"steps": 10})
    write_json_atomically(run.steps, {"epochs": 2.0, "samples": 80, "max_steps": 10})
    run.export.mkdir()
    for step in (5, 10):
        run.checkpoint_folder(step).mkdir(parents=True)
        (run.checkpoint_folder(step) / "COMPLETE").touch()
    return run


@pytest.mark.parametrize("state", list(JobState))
def test_a_complete_run_has_succeeded(state: JobState, ended: RunDir) -> None:
    """A start with nothing left to train records the success, whatever the start before recorded."""
    before = JobRecord.for_this_process("local", JobState.RUNNING)
    (before.copy_ended_now(state, Verdict(137, "killed")) if state.is_end else before).write(ended)
    record_success_unless_recorded(ended)
    found = JobRecord.read_or_none_refusing_damaged(ended)
    assert found is not None
    assert (found.state, found.exit_status in (0, 137)) == (JobState.SUCCEEDED, True)
    assert found.exit_status == (137 if state is JobState.SUCCEEDED else 0)


@pytest.mark.parametrize(
    ("train", "said"),
    # The run of the fixture has done 10 steps.
    [
        ({"max_steps": 10}, "nothing to train: 10 of 10 steps are done"),
        ({"max_steps": 6}, "nothing to train: 10 of 6 steps are done"),
        ({"epochs": 2}, "nothing to train: 10 of 10 steps are done"),
        ({"max_steps": 11}, None),
        ({"epochs": 3}, None),
    ],
)
def test_what_is_left(train: dict[str, Any], said: str | None, ended: RunDir) -> None:
    """Steps up to those already done need no start; more steps or more epochs do."""
    assert nothing_to_train_text_if_readable(recipe(train=train), ended) == said


@pytest.mark.parametrize("lost", ["summary", "export"])
def test_a_run_that_was_cut_off_is_not_finished(lost: str, ended: RunDir) -> None:
    """A run without its summary or its export still has something to do."""
    path = getattr(ended, lost)
    path.rmdir() if path.is_dir() else path.unlink()
    assert nothing_to_train_text_if_readable(recipe(), ended) is None


def test_an_export_of_fewer_steps_is_not_this_ones(ended: RunDir) -> None:
    """The export of an earlier, shorter training does not make a longer run finished."""
    # The longer run ended after its last checkpoint and before its own export.
    write_json_atomically(ended.summary, {"steps": 8})
    assert nothing_to_train_text_if_readable(recipe(train={"max_steps": 10}), ended) is None


def test_an_earlier_checkpoint_is_gone_on_from(ended: RunDir) -> None:
    """A run without its last checkpoint trains its last steps again."""
    # A user deletes it to continue from the checkpoint before it.
    (ended.checkpoint_folder(10) / "COMPLETE").unlink()
    assert nothing_to_train_text_if_readable(recipe(train={"max_steps": 10}), ended) is None


@pytest.mark.parametrize(
    ("typed", "train", "expected"),
    [
        (
            ["train", "a b.yaml", "zero.stage=1"],
            {"max_steps": 10},
            "train 'a b.yaml' zero.stage=1 {} train.max_steps=20",
        ),
        (
            # Only the last of several values is in effect, so the older one is dropped.
            ["train", "r", "--run-dir", "old", "train.max_steps=5"],
            {"max_steps": 5},
            "train r {} train.max_steps=20",
        ),
        (["train", "r", "--run-dir=old", "-n"], {"epochs": 1.5}, "train r -n {} train.epochs=3"),
        (["train", "--resume", "never", "r"], {"max_steps": 10}, "train r {} train.max_steps=20"),
        (["train", "r", "--resume=400"], {"max_steps": 10}, "train r {} train.max_steps=20"),
        (["train", "r", "--dry-run"], {"max_steps": 10}, "train r {} train.max_steps=20"),
        (["train", "r", "--continue"], {"max_steps": 10}, "train r {} train.max_steps=20"),
    ],
)
def test_the_command_that_trains_further(
    typed: list[str], train: dict[str, Any], expected: str, ended: RunDir
) -> None:
    """The command has the typed arguments but --resume, this run's folder, and twice the length."""
    command = expected.format(f"--run-dir={ended}")
    assert (
        continue_command_if_train_was_typed(typed, recipe(train=train), ended)
        == f"ortlaunch {command}"
    )


RECIPE = """\
name: x
model: {task: custom, factory: "mine:model"}
data: {train: {format: custom, factory: "mine:data"}}
batch: {micro_size: 2, accumulation_steps: 1}
optimizer: {name: sgd, learning_rate: 0.1}
engine: {name: eager}
"""


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize(
    ("train", "typed", "expected"),
    [
        # Twice the 2 epochs, or twice the 10 steps that the summary gives.
        ("{epochs: 2}", [], "train.epochs=4"),
        (
            "{epochs: 2}",
            ["train.max_steps=26", "train.epochs=null"],
            "train.epochs=null train.max_steps=20",
        ),
        (
            "{max_steps: 26}",
            ["train.max_steps=null", "train.epochs=1.5"],
            "train.max_steps=null train.epochs=3",
        ),
        # A whole section cannot be edited, so the new length follows it.
        ("{epochs: 2}", ["train={max_steps: 10}"], "'train={max_steps: 10}' train.max_steps=20"),
        (
            "{max_steps: 5}",
            ["train.max_steps=7", "train.max_steps=10", "seed=3"],
            "seed=3 train.max_steps=20",
        ),
        # --resume would choose another checkpoint than the newest.
        (
            "{epochs: 1}",
            ["--resume", "last", "optimizer.learning_rate=0.2"],
            "optimizer.learning_rate=0.2",
        ),
    ],
)
def test_the_command_that_continues_is_a_valid_one(
    train: str, typed: list[str], expected: str, stopped: bool, ended: RunDir, tmp_path: Path
) -> None:
    """The printed command is valid, and has the run's folder and each override in effect."""
    path = tmp_path / "x.yaml"
    path.write_text(RECIPE + f"train: {train}\n")
    (tmp_path / "mine.py").write_text(OWN_MODULE)
    overrides = [word for word in typed if "=" in word]
    before = load_recipe(path, overrides).recipe
    said = continue_command_if_train_was_typed(["train", str(path), *typed], before, ended, stopped)
    words = shlex.split(said or "")
    folder = f"--run-dir={ended}"
    assert words[:3] == ["ortlaunch", "train", str(path)]
    assert folder in words
    after = load_recipe(path, [word for word in words[3:] if word != folder]).recipe
    # A run that stopped continues with the same recipe, a finished one with twice the length.
    if stopped:
        assert after == before
    else:
        assert all(word in words for word in shlex.split(expected))
        assert (after.train.max_steps, after.train.epochs) in (
            (20, None),
            (None, 2 * (before.train.epochs or 0)),
        )


def test_another_verb_has_no_next_command(ended: RunDir) -> None:
    """Verbs other than `train` get no command to continue."""
    assert continue_command_if_train_was_typed(["parity", "r"], recipe(), ended) is None


def test_a_run_that_stopped_early_is_finished(ended: RunDir) -> None:
    """A run that stopped early is finished until train.stop_after changes."""
    early = {"metric": "loss", "mode": "min", "evaluations": 2, "value": 1.0, "step": 8}
    write_json_atomically(ended.summary, {"steps": 10, "stopped_early": early})
    said = nothing_to_train_text_if_readable(
        recipe(train={"max_steps": 20, "stop_after": {"evaluations": 2}}), ended
    )
    assert said == "nothing to train: stopped early after step 10 of 20 (train.stop_after)"
    assert (
        nothing_to_train_text_if_readable(
            recipe(train={"max_steps": 20, "stop_after": {"evaluations": 3}}), ended
        )
        is None
    )
    assert nothing_to_train_text_if_readable(recipe(train={"max_steps": 20}), ended) is None
    typed = ["train", "r.yaml", "train.stop_after.evaluations=2"]
    command = f"ortlaunch train r.yaml --run-dir={ended} train.stop_after=null"
    assert continue_command_if_train_was_typed(typed, recipe(), ended) == command
