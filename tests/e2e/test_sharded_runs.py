"""Runs with ZeRO on two ranks: resumed, evaluated and exported as if there were one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import (
    BERT,
    EAGER,
    FULL,
    TWO_RANKS,
    Run,
    Train,
    ended_well,
    exported_again,
    exported_evaluation,
    interrupted,
    merged,
)

SHARDED = merged(FULL, {"zero": {"stage": 1}, "log": {"trackers": []}})


@pytest.fixture(scope="module")
def sharded(train: Train) -> Run:
    """The recipe FULL with ZeRO 1 on two ranks."""
    return ended_well(train("sharded", SHARDED, *TWO_RANKS))


@pytest.mark.slow
def test_a_resumed_sharded_run_is_the_same_run(sharded: Run, train: Train, home: Path) -> None:
    """A resumed run with ZeRO 1, which shards the optimizer state, equals an undisturbed one."""
    resumed = interrupted(train, home, "sharded-resumed", SHARDED, *TWO_RANKS)
    assert "resumed after step 5 from" in resumed.out
    assert resumed.losses() == sharded.losses()
    assert resumed.values("evaluation_loss") == sharded.values("evaluation_loss")
    assert resumed.values("gradient_norm") == sharded.values("gradient_norm")
    assert (
        json.loads((resumed.folder / "checkpoints/step_00000010/manifest.json").read_text())[
            "ranks"
        ]
        == 2
    )


@pytest.mark.slow
@pytest.mark.ci
def test_shards_are_whole_in_evaluation_and_export(sharded: Run, train: Train, home: Path) -> None:
    """Export and evaluation agree with ZeRO 1 and 3."""
    assert {
        f"logs/rank_0000{rank}.{stream}" for rank in (0, 1) for stream in ("out", "err")
    } <= sharded.files()
    assert json.loads((sharded.folder / "deepspeed.json").read_text())["zero_optimization"] == {
        "stage": 1
    }
    assert sharded.truth()["fp16_optimizer"] == {"applied": True, "why": ""}
    weights = ended_well(
        train("sharded-weights", merged(SHARDED, {"zero": {"stage": 3}}), *TWO_RANKS)
    )
    for name in ("parameters", "trained_parameters"):  # of the whole model, not of a rank's pieces
        assert weights.truth()[name] == sharded.truth()[name]
    assert weights.losses() == pytest.approx(sharded.losses(), rel=1e-4)
    # 17 evaluation samples: in the last pass only one rank has one.
    for run in (sharded, weights):
        expected = exported_evaluation(run, home)
        assert run.values("evaluation_loss")[-1][1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.ci
def test_a_sharded_checkpoint_as_a_model(train: Train, home: Path) -> None:
    """A bf16 checkpoint of ZeRO 3 on two ranks is exported as the run's own export."""
    changes = {**EAGER, "precision": "bf16", "zero": {"stage": 3}, "train": {"max_steps": 3}}
    assert exported_again(
        ended_well(train("bf16-sharded", merged(BERT, changes), *TWO_RANKS)), home
    )
