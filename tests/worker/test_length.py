"""train.epochs in steps: computed when the data are known, and kept by a resumed run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ortlaunch.base.errors import InputError
from ortlaunch.launch_plan import BatchPlan
from ortlaunch.rank import Rank
from ortlaunch.run_folder.folder import RunDir, read_json_or_raise_damaged, write_json_atomically
from ortlaunch.worker.checkpoint import CompleteCheckpoint
from ortlaunch.worker.data import Batches, UserSamples
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.run_length import resolve_max_steps_and_write_length, run_length_line
from tests.makers import recipe

# 16 samples a step.
BATCH = BatchPlan(16, 16, 1, 1, None)


def checkpoint(run: RunDir, step: int, samples: int) -> None:
    """Write a complete checkpoint."""
    write_json_atomically(
        run.checkpoint_folder(step) / "manifest.json", {"step": step, "samples": samples}
    )
    (run.checkpoint_folder(step) / "COMPLETE").touch()


def steps(run: RunDir, samples: int, **sections: Any) -> int:
    """Return the steps of a recipe with these sections."""
    group = DistributedContext(Rank(0, 1, 0, 1), torch.device("cpu"))
    there = run.newest_complete_checkpoint()
    return resolve_max_steps_and_write_length(
        recipe(**sections), BATCH, run, group, samples, there and CompleteCheckpoint(*there)
    ).train.steps


@pytest.mark.parametrize(
    ("epochs", "samples", "expected"),
    [(1, 160, 10), (3, 100, 19), (0.5, 160, 5), (0.01, 16, 1), (0.1 + 0.2, 160, 3)],
)
def test_epochs_are_as_many_steps_as_they_take(
    epochs: float, samples: int, expected: int, tmp_path: Path
) -> None:
    """Every sample is seen at least as often as requested; a part of a step is a whole one."""
    run = RunDir(tmp_path)
    assert steps(run, samples, train={"epochs": epochs}) == expected
    assert read_json_or_raise_damaged(run.steps) == {
        "epochs": epochs,
        "samples": samples,
        "max_steps": expected,
    }


def test_intervals_in_epochs_are_recorded_in_steps(tmp_path: Path) -> None:
    """steps.json and the line at the start have the steps of intervals in epochs."""
    run = RunDir(tmp_path)
    sections = {
        "train": {"max_steps": 9, "evaluate_every_epochs": 0.25},
        "checkpoint": {"every_epochs": 2},
    }
    assert steps(run, 160, **sections) == 9
    assert read_json_or_raise_damaged(run.steps) == {
        "epochs": None,
        "samples": 160,
        "max_steps": 9,
        "evaluated_every": 2.5,
        "saved_every": 20.0,
    }
    line = run_length_line(recipe(**sections), BATCH, 160)
    assert line.endswith("evaluated every 0.25 epochs: 2.5 steps; saved every 2 epochs: 20 steps")


@pytest.mark.parametrize(
    ("size", "samples", "every", "expected"),
    [(16, 160, 0.25, [3, 5, 8, 10, 13]), (16, 103, 1, [7, 13]), (20, 10, 0.1, [*range(1, 14)])],
)
def test_intervals_in_epochs_do_not_drift(
    size: int, samples: int, every: float, expected: list[int]
) -> None:
    """An interval ends with the step that completes its samples, also after a resume."""
    whole = Batches(
        UserSamples([{}] * samples, is_mapping=True), BatchPlan(size, size, 1, 1, None), 7
    )
    assert [
        step for step in range(1, 14) if whole.does_step_complete_interval(step, every)
    ] == expected
    whole.begin_step_after_positions(5, 5 * size)
    assert [step for step in range(6, 14) if whole.does_step_complete_interval(step, every)] == [
        step for step in expected if step > 5
    ]
    assert not whole.does_step_complete_interval(6, None)


def test_steps_that_were_given_are_taken(tmp_path: Path) -> None:
    """max_steps needs no data, and leaves no file in the folder."""
    assert steps(RunDir(tmp_path), 160, train={"max_steps": 7}) == 7
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_goes_on_keeps_its_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run keeps its steps if its data have grown, and reports that; more epochs count."""
    run = RunDir(tmp_path)
    three = {"train": {"epochs": 3}}
    # Without a checkpoint, the run starts from the beginning, with new steps.
    assert [steps(run, 160, **three), steps(run, 320, **three)] == [30, 60]
    checkpoint(run, 5, 80)
    assert capsys.readouterr().out == ""
    assert steps(run, 480, **three) == 60
    said = "the data has 480 samples, and had 320 when this run began; the run keeps its 60 steps\n"
    assert capsys.readouterr().out == said
    assert steps(run, 480, train={"epochs": 4}) == 120


def test_epochs_of_other_batches_are_taken_from_the_samples_that_are_left(tmp_path: Path) -> None:
    """After a change of the batch size, the remaining samples of the epochs are divided anew."""
    run = RunDir(tmp_path)
    three = {"train": {"epochs": 3}}
    # Three epochs of 160 samples: 80 of them in 10 steps of 8, the other 400 in 25 steps of 16.
    checkpoint(run, 10, 80)
    assert steps(run, 160, **three) == 35
    assert read_json_or_raise_damaged(run.steps)["max_steps"] == 35
    checkpoint(run, 20, 240)
    assert steps(run, 160, **three) == 35


def test_samples_that_a_rollback_left_out_take_no_steps(tmp_path: Path) -> None:
    """A run restarted after a rollback has as many steps as one without interruption."""
    run = RunDir(tmp_path)
    three = {"train": {"epochs": 3}}
    # One batch of 16 was left out.
    checkpoint(run, 10, 176)
    line = {"step": 4, "kind": "loss", "message": "", "samples": [], "parameter": None, "action": "rollback",
            "checkpoint": 2, "places": [48, 64]}  # fmt: skip
    run.bad_steps.write_text(json.dumps(line) + "\n")
    assert steps(run, 160, **three) == 30


def test_a_finished_run_keeps_its_steps_with_smaller_batches(tmp_path: Path) -> None:
    """A finished run keeps its steps with smaller batches: never fewer than those done."""
    run = RunDir(tmp_path)
    # The last step took more samples than were left.
    checkpoint(run, 4, 128)
    assert steps(run, 100, train={"epochs": 1}) == 4


def test_a_warm_up_longer_than_the_epochs(tmp_path: Path) -> None:
    """A warm-up longer than the epochs is an error that names both, once the data are known."""
    with pytest.raises(
        InputError, match=r"schedule.warmup_steps: got 11, and train.epochs: 1 are 10 steps"
    ):
        steps(RunDir(tmp_path), 160, train={"epochs": 1}, schedule={"warmup_steps": 11})


def test_a_warm_up_that_reaches_into_the_decay_of_the_epochs(tmp_path: Path) -> None:
    """A warm-up that reaches into the decay is an error, as in the recipe's rule for max_steps."""
    schedule = {"name": "wsd", "warmup_steps": 9, "decay_ratio": 0.2}
    with pytest.raises(
        InputError,
        match=r"warmup_steps: got 9, and .* are 10 steps, the last 2 of them wsd's decay",
    ):
        steps(RunDir(tmp_path), 160, train={"epochs": 1}, schedule=schedule)


def test_the_length_in_a_line() -> None:
    """The line has steps, samples and epochs, for any of them in the recipe."""
    line = run_length_line(recipe(train={"max_steps": 1000}), BATCH, 1234)
    assert line == "data: 1,234 samples; 1,000 steps of 16 are 16,000 samples, 13 epochs"
    line = run_length_line(recipe(train={"max_steps": 100_000}), BATCH, 762)
    assert line.endswith("1,600,000 samples, 2,100 epochs")
    # A resumed run with another batch: 13 steps of 16 and 17 of 32.
    line = run_length_line(
        recipe(train={"max_steps": 30}), BATCH._replace(global_samples=32), 919, 13, 208
    )
    assert line == (
        "data: 919 samples; 17 steps of 32 are 544 samples, 752 with those of the 13 steps before, "
        "0.818 epochs"
    )
    # Two epochs of 157 are 39.25 steps of 8. A longer length and whole steps fill nothing.
    eight = BATCH._replace(global_samples=8)
    epochs = recipe(train={"epochs": 2, "max_steps": None})
    for step_count, samples, resumed, end in (
        (40, 157, (), "2.04 epochs: 314 of train.epochs: 2, and 6 more that fill the last step"),
        (
            40,
            157,
            (10, 80),
            "2.04 epochs: 314 of train.epochs: 2, and 6 more that fill the last step",
        ),
        (40, 160, (), "2 epochs"),
        # The data had more samples when the run began.
        (40, 150, (), "2.13 epochs"),
    ):
        train = epochs.train.model_copy(update={"max_steps": step_count})
        line = run_length_line(epochs.model_copy(update={"train": train}), eight, samples, *resumed)
        assert line.endswith(end)
    # A checkpoint beyond the steps that the recipe has now.
    line = run_length_line(recipe(train={"max_steps": 30}), BATCH, 5, 50, 800)
    assert line == (
        "data: 5 samples; 0 steps of 16 are 0 samples, 800 with those of the 50 steps before, "
        "160 epochs (a step takes samples up to 4 times)"
    )
