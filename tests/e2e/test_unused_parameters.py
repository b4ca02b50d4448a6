"""Trained parameters that the loss does not use: two ranks train as one process does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.runs import TOY, TWO_RANKS, Run, Train, ended_well, merged
from tests.ort import needs_ort

SPARE = ["model.spare.weight", "model.spare.bias"]
CASES = [
    ("eager", 4),
    ("eager", 8),
    ("inductor", 4),
    ("inductor", 8),
    pytest.param("ort", 4, marks=[pytest.mark.ci, needs_ort]),
    pytest.param("ort", 8, marks=needs_ort),
]


def recipe(engine: str = "eager", micro: int = 4, **arguments: Any) -> dict[str, Any]:
    """Return the recipe of a model with unused parameters, with weight decay."""
    model = {"factory": "toys:partial", "arguments": arguments}
    # Decay would change an unused weight whose gradient is zeros in place of None.
    optimizer = {"weight_decay": 0.5}
    more = {
        "model": model,
        "engine": {"name": engine},
        "optimizer": optimizer,
        "batch": {"micro_size": micro},
    }
    return merged(TOY, {**more, "train": {"max_grad_norm": 1.0}})


def same(run: Run, expected: Run) -> None:
    """Check that losses and gradient norms are equal, and with them the weights."""
    for name in ("loss", "gradient_norm"):
        assert [v for _, v in run.values(name)] == pytest.approx(
            [v for _, v in expected.values(name)], rel=1e-4
        )


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "micro"), CASES)
def test_parameters_that_no_loss_uses(train: Train, engine: str, micro: int) -> None:
    """Two ranks train as one process does, and report unused parameters once."""
    settings = recipe(engine, micro)
    one = ended_well(train(f"one-{engine}-{micro}", settings))
    two = ended_well(train(f"two-{engine}-{micro}", settings, *TWO_RANKS))
    same(two, one)
    said = (
        "the loss does not use model.lonely, model.spare.weight, model.spare.bias: "
        "gradients are averaged after"
    )
    assert two.out.count(said) == 1
    assert sorted(two.truth()["unused_parameters"]) == sorted(["model.lonely", *SPARE])
    assert said not in one.out
    assert one.truth()["unused_parameters"] == []


@pytest.mark.slow
@pytest.mark.parametrize("micro", [2, 8])
def test_parameters_that_some_batches_use(train: Train, micro: int) -> None:
    """Parameters that only some micro batches use are averaged correctly."""
    settings = recipe(micro=micro, sometimes=True)
    one = ended_well(train(f"one-sometimes-{micro}", settings))
    two = ended_well(train(f"two-sometimes-{micro}", settings, *TWO_RANKS))
    same(two, one)
    assert set(SPARE) <= {*two.truth()["unused_parameters"]}


@pytest.mark.slow
def test_averaging_by_hand_is_that_of_distributed_data_parallel(train: Train) -> None:
    """The averaging for unused parameters equals that of DistributedDataParallel."""
    more = {"data": {"evaluation": TOY["data"]["train"]}, "train": {"evaluate_every_steps": 5}}
    by_hand = ended_well(train("by-hand", merged(recipe(), more), *TWO_RANKS))
    # Without unused parameters, DistributedDataParallel averages.
    by_torch = ended_well(train("by-torch", merged(recipe(freeze=True), more), *TWO_RANKS))
    assert (len(by_hand.truth()["unused_parameters"]), by_torch.truth()["unused_parameters"]) == (
        3,
        [],
    )
    for name in ("loss", "gradient_norm", "evaluation_loss"):
        assert by_hand.values(name) == by_torch.values(name)


@pytest.mark.slow
@pytest.mark.ci
def test_a_parameter_that_is_used_no_more_ends_the_run(train: Train) -> None:
    """The run ends in that step, before its weights change, with the parameter and advice."""
    ended = train("no-more", recipe(until=4), *TWO_RANKS)  # two passes a step
    assert ended.status == 1
    assert "EngineError" in ended.err
    assert (
        "the loss of this step does not use model.spare.weight, model.spare.bias on rank"
        in ended.err
    )
    assert "train with DeepSpeed: zero={stage: 0}" in ended.err
    assert [step for step, _ in ended.values("loss")] == [1, 2]
