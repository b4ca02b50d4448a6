"""The best checkpoint, early stops, and their memory in a resumed run."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ortlaunch.run_folder.records import BestEvaluation
from ortlaunch.worker.checkpoint.restore import load_weights_and_buffers_into_unsharded_model
from ortlaunch.worker.model.model import LossModule
from ortlaunch.worker.tasks import train as training
from ortlaunch.worker.training import best_evaluation
from ortlaunch.worker.training.final_results import (
    _load_best_if_exported_and_return_its_record,
    write_export_and_print_summary,
)
from tests.makers import recipe
from tests.training import Trained, train_here
from tests.worker.tasks.test_train import ROWS, Line

BEST = {"keep_best": {"metric": "loss"}, "keep": 1, "every_minutes": None}
STEPS = {"max_steps": 8, "evaluate_every_steps": 1}


def trained(
    folder: Path, losses: Sequence[float], monkeypatch: pytest.MonkeyPatch, **sections: Any
) -> Trained:
    """Return a training whose evaluations have these losses, one a step."""
    take = best_evaluation.update_best_evaluations

    def note(made: Any, memory: Any, step: int, evaluated: dict[str, float]) -> None:
        evaluated["loss"] = losses[step - 1]
        take(made, memory, step, evaluated)

    monkeypatch.setattr(best_evaluation, "update_best_evaluations", note)
    sections = {"train": STEPS, "checkpoint": BEST, **sections}
    found = train_here(folder, Line(), ROWS, evaluation=ROWS[:4], **sections)
    monkeypatch.setattr(best_evaluation, "update_best_evaluations", take)
    return found


def kept(found: Trained) -> list[int]:
    return [step for step, _ in found.run.complete_checkpoints()]


def test_the_best_checkpoint_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best checkpoint (step 3) and the last one are kept; earlier best ones are removed."""
    found = trained(tmp_path, [5, 4, 1, 2, 3, 4, 5, 1], monkeypatch)
    assert kept(found) == [3, 8]
    assert found.state.best[best_evaluation.KEEP] == {
        "metric": "loss",
        "mode": "min",
        "value": 1,
        "step": 3,
        "since": 5,
    }


def test_training_ends_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two evaluations that are not better end training; a second start has nothing to train."""
    early = {
        "train": {**STEPS, "stop_after": {"evaluations": 2}},
        "checkpoint": {"every_minutes": None},
    }
    found = trained(tmp_path, [5, 4, 4, 3, 3, 6, 0, 0], monkeypatch, **early)
    assert (found.state.step, kept(found)) == (6, [6])
    assert (
        "stopped early after step 6 of 8 (train.stop_after): loss was best, 3, after step 4"
        in str(best_evaluation.early_stop_reason_or_none(recipe(**early), 6, found.state.best))
    )
    again = train_here(tmp_path, Line(), ROWS, evaluation=ROWS[:4], **early)
    assert (again.state.step, kept(again)) == (6, [6])
    # With more patience, a third start continues.
    longer = {**early, "train": {**STEPS, "stop_after": {"evaluations": 3}}}
    assert trained(tmp_path, [5, 4, 4, 3, 3, 6, 7, 0], monkeypatch, **longer).state.step == 7


def test_a_resumed_run_remembers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations before a checkpoint count in a resumed run, but not in another folder."""
    half = {"train": {**STEPS, "max_steps": 4}}
    trained(tmp_path / "one", [5, 1, 4, 3], monkeypatch, **half)
    # A copy of the last checkpoint alone, without the best one.
    (tmp_path / "other").mkdir()
    shutil.copytree(
        tmp_path / "one/checkpoints/step_00000004", tmp_path / "other/checkpoints/step_00000004"
    )
    assert kept(trained(tmp_path / "one", [0] * 4 + [2, 3, 4, 5], monkeypatch)) == [2, 8]
    assert kept(trained(tmp_path / "other", [0] * 4 + [2, 3, 4, 5], monkeypatch)) == [5, 8]
    # Another direction also starts without a best one.
    most = {
        "checkpoint": {**BEST, "keep_best": {"metric": "loss", "mode": "max"}},
        "train": {**STEPS, "max_steps": 10},
    }
    assert kept(trained(tmp_path / "one", [0] * 8 + [0.5, 0.4], monkeypatch, **most)) == [9, 10]


def test_the_last_checkpoint_as_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the last step is the best, export/ has the best checkpoint without a request."""
    sessions: list[Any] = []
    monkeypatch.setattr(
        training,
        "_load_newest_checkpoint_or_fresh_state",
        lambda s, old=training._load_newest_checkpoint_or_fresh_state: sessions.append(s) or old(s),
    )
    found = trained(tmp_path / "run", [8, 7, 6, 5, 4, 3, 2, 1], monkeypatch)
    kept_best = _load_best_if_exported_and_return_its_record(
        sessions[-1], found.state.step, found.state.best
    )
    assert kept_best == BestEvaluation("loss", 1, 8, exported=True)


def test_the_export_is_of_the_best_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export has the best checkpoint's weights, if requested."""
    best_of = {"checkpoint": {**BEST, "keep_best": {"metric": "loss", "export": True}}}
    sessions: list[Any] = []
    monkeypatch.setattr(
        training,
        "_load_newest_checkpoint_or_fresh_state",
        lambda s, old=training._load_newest_checkpoint_or_fresh_state: sessions.append(s) or old(s),
    )
    found = trained(tmp_path / "run", [5, 1, 4, 3, 3, 3, 3, 3], monkeypatch, **best_of)
    last = found.model.weight.detach().clone()
    there = LossModule(Line())
    write_export_and_print_summary(sessions[-1], found.state.step, found.state.best)
    load_weights_and_buffers_into_unsharded_model(found.run.checkpoint_folder(2), there)
    assert torch.equal(found.model.weight, there.model.weight)
    assert not torch.equal(found.model.weight, last)


def test_a_metric_that_an_evaluation_has_not() -> None:
    """A metric that the evaluation lacks is reported with those that exist."""
    asked = SimpleNamespace(
        checkpoint=recipe(checkpoint={"keep_best": {"metric": "perplexity"}}).checkpoint,
        train=recipe().train,
    )
    (said,) = best_evaluation.missing_metric_messages(asked, {"loss": 1.0})
    assert said == "checkpoint.keep_best.metric: got perplexity; an evaluation of this run has loss"
    memory: best_evaluation.BestEvaluations = {}
    best_evaluation.update_best_evaluations(asked, memory, 0, {"loss": 1.0})
    # A value that is not finite is never the best.
    for step, value in enumerate((float("nan"), float("inf"), 7.0, float("nan")), 1):
        best_evaluation.update_best_evaluations(
            asked, memory, step, {"loss": 1.0, "perplexity": value}
        )
    assert memory[best_evaluation.KEEP]["step"] == 3
