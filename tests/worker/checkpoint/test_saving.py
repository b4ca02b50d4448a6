"""The schedule of checkpoints, those that are kept, failed saves, and background saves."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ortlaunch.base.errors import CheckpointError, LastSaveError
from ortlaunch.rank import Rank
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.worker import checkpoint
from ortlaunch.worker.checkpoint import saver as savings
from ortlaunch.worker.checkpoint.save_records import readable_save_records
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.supervision.requests import RankRequest
from tests.makers import recipe
from tests.worker.checkpoint.test_checkpoint import GROUP, Writer, writers

# A fixture of every test here.
__all__ = ["writers"]

STEPS = 100


def saving(run: RunDir, stepper: Any = None, **policy: Any) -> checkpoint.CheckpointSaver:
    """Return the saving of a training of a hundred steps."""
    run.path.mkdir(exist_ok=True)
    made = recipe(train={"max_steps": STEPS}, checkpoint={"every_minutes": None, **policy})
    return checkpoint.CheckpointSaver(run, made, GROUP, stepper or Writer(), {})


def save_all(saver: checkpoint.CheckpointSaver, steps: range) -> list[int]:
    """Save at the steps that are due, and return them."""
    due = [step for step in steps if saver.is_checkpoint_due_after(step)]
    for step in due:
        saver.wait_then_save_or_start_background_save(step, {"step": step, "samples": 8 * step})
    return due


def kept(run: RunDir) -> list[int]:
    return [step for step, _ in run.complete_checkpoints()]


@pytest.mark.parametrize(
    ("policy", "left"),
    [
        ({"keep": 1}, [100]),
        ({"keep": 2}, [75, 100]),
        ({"keep": None}, [25, 50, 75, 100]),
        ({"keep": 1, "keep_every": 50}, [50, 100]),
        # The first ones at or after 30, 60 and 90.
        ({"keep": 1, "keep_every": 30}, [50, 75, 100]),
    ],
)
def test_older_ones_go(policy: dict[str, Any], left: list[int], tmp_path: Path) -> None:
    """The newest `keep` stay, and one for each `keep_every` steps; the last step is saved."""
    run = RunDir(tmp_path)
    assert save_all(saving(run, every_steps=25, **policy), range(1, STEPS + 1)) == [25, 50, 75, 100]
    assert kept(run) == left
    assert len(list(run.checkpoints.iterdir())) == len(left)


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize(("minutes", "saved"), [(30, [30, 60, 90]), (45.5, [46, 92]), (None, [])])
def test_the_time_asks_for_one(
    minutes: float | None, saved: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rank 0's clock, which restarts at each save, requests checkpoints from all ranks."""
    monkeypatch.setattr(savings, "time", clock := Clock())
    saver = saving(RunDir(tmp_path), every_minutes=minutes)
    asked = []
    for step in range(1, 99):
        # A minute a step.
        clock.now += 60
        agreed = SimpleNamespace(add_request=lambda what, step=step: asked.append((step, what)))
        saver.request_due_save_and_record_ended_background_save(agreed)  # type: ignore[arg-type]
        if asked and asked[-1][0] == step:
            saver.wait_then_save_or_start_background_save(step, {"step": step, "samples": 8 * step})
    assert asked == [(step, RankRequest.SAVE) for step in saved]
    # Another rank's clock requests nothing.
    saver.group = DistributedContext(Rank(1, 2, 1, 2), torch.device("cpu"))
    clock.now = 1e9
    saver.request_due_save_and_record_ended_background_save(agreed)  # type: ignore[arg-type]
    assert len(asked) == len(saved)


class Slow(Writer):
    """A stepper whose writes wait for the test's permission."""

    def __init__(self) -> None:
        super().__init__()
        self.may = threading.Event()
        self.writing = 0

    def copy_to_host(self) -> Slow:
        return self

    def write_rank_file_and_index(self, folder: Path) -> dict[str, Any]:
        self.writing += 1
        assert self.may.wait(20)
        return super().write_rank_file_and_index(folder)


def test_training_goes_on_while_one_is_written(tmp_path: Path) -> None:
    """Training continues during a write, except for the next save and the last one."""
    run = RunDir(tmp_path)
    writer = Slow()
    saver = saving(run, stepper=writer, every_steps=40, **{"async": True})
    assert save_all(saver, range(1, 51)) == [40]
    saver.request_due_save_and_record_ended_background_save(None)  # type: ignore[arg-type]
    # A checkpoint exists only once it is complete.
    assert (kept(run), readable_save_records(run)) == ([], [])
    threading.Timer(0.3, writer.may.set).start()
    assert save_all(saver, range(51, 101)) == [80, 100]
    assert (kept(run), writer.writing) == ([40, 80, 100], 3)
    assert [line["step"] for line in readable_save_records(run)] == [40, 80, 100]


@pytest.mark.parametrize("asked", [RankRequest.SAVE, RankRequest.TERMINATE])
def test_what_is_asked_for_is_complete(asked: RankRequest, tmp_path: Path) -> None:
    """A save by a stop or a user's request is complete on return; one by the clock may wait."""
    run = RunDir(tmp_path)
    writer = Slow()
    clock = Agreed()
    saver = saving(run, stepper=writer, every_minutes=1, **{"async": True})
    # The last save seems to be a minute ago.
    saver.last_save_time -= 61
    saver.request_due_save_and_record_ended_background_save(clock)  # type: ignore[arg-type]
    saver.wait_then_save_or_start_background_save(3, {"step": 3, "samples": 24}, RankRequest.SAVE)
    assert kept(run) == []
    writer.may.set()
    saver.wait_then_save_or_start_background_save(5, {"step": 5, "samples": 40}, asked)
    assert kept(run) == [3, 5]


class Agreed:
    """An agreement that accepts a request to save."""

    def add_request(self, request: RankRequest) -> None:
        assert request is RankRequest.SAVE


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_one_written_beside_training_that_fails(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failed background save is reported at the next step, and with `stop` it ends the run."""
    run = RunDir(tmp_path)
    writer = Slow()
    saver = saving(run, stepper=writer, every_steps=40, on_failure=policy, **{"async": True})
    writer.fails = True
    writer.may.set()
    save_all(saver, range(1, 41))
    with (
        pytest.raises(CheckpointError, match="No space left")
        if policy == "stop"
        else contextlib.nullcontext()
    ):
        saver.wait_for_background_save_and_record_result()
    # It does not count as saved.
    assert kept(run) == []
    assert "No space left on device" in readable_save_records(run)[0]["error"]
    assert ("NOT SAVED" in capsys.readouterr().out) is (policy == "continue")


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_save_that_fails(policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A failed save ends the run with `stop`; `continue` reports it, counts it and tries again."""
    run = RunDir(tmp_path)
    writer = Writer()
    saver = saving(run, stepper=writer, every_steps=10, on_failure=policy)
    save_all(saver, range(1, 11))
    writer.fails = True
    if policy == "stop":
        with pytest.raises(CheckpointError, match=r"No space left on device; .*00010 is complete"):
            save_all(saver, range(11, 21))
        # A failed save at the last step is a failure with either policy.
        with pytest.raises(
            CheckpointError, match=r"No space left(.|\n)*the run ends without its export"
        ):
            save_all(saver, range(100, 101))
    else:
        assert save_all(saver, range(11, 31)) == [20, 30]
        writer.fails = False
        assert save_all(saver, range(31, 41)) == [40]
        assert kept(run) == [10, 40]
        said = capsys.readouterr().out.splitlines()
        assert [line[:10] for line in said] == ["NOT SAVED:", "NOT SAVED:"]
        assert said[0].endswith(
            "step_00000010 is complete; training continues (checkpoint.on_failure: continue)"
        )
        writer.fails = True
        with pytest.raises(LastSaveError, match="No space left"):
            save_all(saver, range(100, 101))
        assert checkpoint.failed_save_count(run) == 3
    assert not list(run.checkpoints.glob("*.partial"))


def test_a_save_that_nobody_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint whose writer died before recording it is reported once, by the next start."""
    run = RunDir(tmp_path)
    save_all(saving(run, every_steps=50), range(1, 51))
    # As if that start had died before it wrote these lines.
    run.saves.unlink()
    checkpoint.write_checkpoint_of_step(
        run, {}, GROUP, Writer(), 100, {"step": 100, "samples": 800}
    )  # type: ignore[arg-type]
    for _ in range(2):
        saving(run).wait_for_save_and_remove_old()
    told = [line["step"] for line in readable_save_records(run)]
    assert (told, capsys.readouterr().out.count("an earlier start could not record that")) == (
        [50, 100],
        2,
    )
