"""`train.metric`: its inputs, its results on any number of ranks, and its errors."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ortlaunch.base.errors import HookError, InputError
from ortlaunch.worker.data import UserSamples, collate
from ortlaunch.worker.data.user_data import DataError
from ortlaunch.worker.evaluation.user_metric import UserMetric
from ortlaunch.worker.training import best_evaluation
from tests.training import session_here, train_here
from tests.worker.evaluation import test_evaluation
from tests.worker.tasks.test_train import ROWS, Line

SEEN: list[tuple[Any, Any]] = []


def spread(outputs: Any, batch: Any) -> dict[str, Any]:
    """Return a median and the last value."""
    # Neither is a mean over batches, and the second depends on the order of the samples.
    SEEN.append((outputs, batch))
    return {"median": np.median(outputs["found"] - batch["y"]), "last": outputs["found"][-1]}


def fails(outputs: Any, batch: Any) -> Any:
    raise KeyError("logits")


def wants_many(outputs: Any, batch: Any) -> Any:
    if len(batch["y"]) < 4:
        raise ValueError("few")
    return {"median": 1.0}


def answers(outputs: Any, batch: Any) -> Any:
    return 0.5


def takes(outputs: Any, batch: Any) -> Any:
    return {"loss": 1.0}


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    SEEN.clear()
    monkeypatch.setitem(sys.modules, "metrics_of_a_test", sys.modules[__name__])


class Told(Line):
    """A model that returns its predictions, too."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return SimpleNamespace(
            loss=super().forward(x, y), found=x @ self.weight, hidden=torch.ones(2)
        )


class Ranks(test_evaluation.Ranks):
    """A group whose ranks also exchange other values."""

    def gather(self, mine: Any) -> list[Any]:
        return self.gather_numbers(mine)

    def gather_arrays_on_rank_0(self, mine: Any) -> list[Any]:
        found = self.gather(mine)
        return found if self.rank == 0 else []


def test_one_number_on_any_ranks(tmp_path: Path) -> None:
    """The metric on 1, 2 and 4 ranks equals that of all samples at once."""
    # Seven samples, so that some last batches are short or empty.
    torch.manual_seed(0)
    model = Told()
    rows = ROWS[:7]
    nn.init.normal_(model.weight)
    train = {"max_steps": 1, "metric": "metrics_of_a_test:spread"}
    session: Any = session_here(tmp_path, model, rows, batch={"micro_size": 3}, train=train)
    whole = collate(rows)
    found = (whole["x"] @ model.weight).detach()
    expected = {"median": float((found - whole["y"]).median()), "last": float(found[-1])}
    for size in (1, 2, 4):
        session = replace(session, group=Ranks(size))
        for evaluated in session.group.evaluated(session, UserSamples(rows)):
            assert {name: evaluated[name] for name in expected} == pytest.approx(expected), size
    outputs, batch = SEEN[-1]
    assert (sorted(outputs), sorted(batch)) == (["found"], ["x", "y"])
    np.testing.assert_array_equal(batch["y"], whole["y"].numpy())


def test_rows_of_many_lengths() -> None:
    """Batches that were padded to different lengths give a list of rows."""
    metric = UserMetric("metrics_of_a_test:spread")
    for first, length in ((0, 3), (2, 4)):
        metric.keep_arrays_of_samples_if_metric_is_set(
            range(first, first + 2),
            {"found": torch.ones(2)},
            {"y": torch.zeros(2), "x": torch.ones(2, length)},
        )
    group: Any = SimpleNamespace(
        rank=0, gather_arrays_on_rank_0=lambda mine: [mine], gather=lambda mine: [mine]
    )
    group.data_parallel = group
    assert metric.call_on_rank_0_and_share_values(group, {}) == {"median": 1.0, "last": 1.0}
    assert [len(row) for row in SEEN[-1][1]["x"]] == [3, 3, 4, 4]


def test_it_chooses_the_best_and_ends_early(tmp_path: Path) -> None:
    """The user's metric can select the best checkpoint and end the training early."""
    name = "metrics_of_a_test:spread"
    train = {"max_steps": 9, "evaluate_every_steps": 1, "metric": name}
    train["stop_after"] = {"metric": "last", "mode": "max", "evaluations": 2}
    keep = {"keep_best": {"metric": "median", "mode": "max"}, "every_minutes": None, "keep": 1}
    found = train_here(tmp_path, Told(), ROWS, evaluation=ROWS[:4], train=train, checkpoint=keep)
    medians, lasts = (dict(found.values(f"evaluation_{each}")) for each in ("median", "last"))
    assert found.state.best[best_evaluation.KEEP]["step"] == max(medians, key=medians.__getitem__)
    assert found.state.step == min(9, max(lasts, key=lasts.__getitem__) + 2)


@pytest.mark.parametrize("wish", ["checkpoint.keep_best", "train.stop_after"])
def test_a_name_that_is_none_is_told_before_step_1(wish: str, tmp_path: Path) -> None:
    """An unknown name of a metric fails before step 1, with the known names."""
    # The function is called with the first samples to get its names.
    train: dict[str, Any] = {
        "max_steps": 3,
        "evaluate_every_steps": 3,
        "metric": "metrics_of_a_test:spread",
    }
    checkpoint = {}
    asked = {"metric": "medain", "mode": "max"}
    if wish == "train.stop_after":
        train["stop_after"] = {**asked, "evaluations": 2}
    else:
        checkpoint = {"keep_best": asked}
    with pytest.raises(
        InputError, match=rf"{wish}\.metric: got medain; an evaluation .* has loss, median, last"
    ):
        train_here(tmp_path, Told(), ROWS, evaluation=ROWS, train=train, checkpoint=checkpoint)
    assert [len(outputs["found"]) for outputs, _ in SEEN] == [2]


def test_a_function_that_cannot_be_tried(tmp_path: Path, capsys: Any) -> None:
    """A function that fails before step 1 is reported, and the training continues."""
    # It needs more samples than a micro batch has. A metric that evaluations lack is never the best.
    train = {"max_steps": 2, "evaluate_every_steps": 1, "metric": "metrics_of_a_test:wants_many"}
    keep = {"keep_best": {"metric": "medain", "mode": "max"}, "every_minutes": None, "keep": 1}
    found = train_here(tmp_path, Told(), ROWS, evaluation=ROWS[:4], train=train, checkpoint=keep)
    said = capsys.readouterr().out
    assert (
        "cannot be tested before step 1: train.metric: metrics_of_a_test:wants_many raised "
        "ValueError: few" in said
    )
    assert (
        "keep_best.metric: got medain; an evaluation of this run has loss, median: this one is "
        "not the best" in said
    )
    assert (found.state.step, found.state.best) == (2, {})


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        (
            "fails",
            HookError,
            r"metrics_of_a_test:fails raised KeyError: 'logits'\n.*line \d+, in fails",
        ),
        (
            "answers",
            HookError,
            r"metrics_of_a_test:answers returned 0.5; it returns numbers by name",
        ),
        (
            "takes",
            HookError,
            r"metrics_of_a_test:takes returned 'loss', a name that the evaluation already uses",
        ),
        (
            "nothing",
            DataError,
            r"train.metric: module 'metrics_of_a_test' has no function 'nothing'",
        ),
    ],
)
def test_what_is_no_metric(name: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    """Each invalid metric is an error that names the function."""
    train = {"max_steps": 1, "metric": f"metrics_of_a_test:{name}"}
    with pytest.raises(error, match=f"(?s){message}"):
        train_here(tmp_path, Told(), ROWS, evaluation=ROWS[:4], train=train)
