"""A run whose loss is not finite on one of two ranks: it ends with the step, the samples and the parameter."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ortlaunch.plan import BatchPlan
from ortlaunch.worker.data import Batches, OwnSamples
from tests.e2e.runs import TOY, TWO_RANKS, Train, merged
from tests.ort import needs_ort

ZERO = {"zero": {"stage": 2}}
WAYS = [
    ("eager", {}),
    pytest.param("eager", ZERO, marks=pytest.mark.slow),
    pytest.param("ort", ZERO, marks=[pytest.mark.slow, needs_ort]),
    pytest.param("inductor", {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("engine", "zero"), WAYS)
def test_a_loss_that_is_not_finite_ends_the_run(engine: str, zero: dict[str, Any], train: Train) -> None:
    """Status 1 and one error with the rank whose sample is bad; no export, and metrics that are JSON."""
    order = Batches(OwnSamples(range(256)), BatchPlan(16, 4, 2, 2, None), 42)
    samples = order.indices(2, 1, 1)
    data = {"train": {"format": "custom", "factory": "toys:data", "arguments": {"nan_at": samples[2]}}}
    recipe = merged(TOY, {"data": data, "engine": {"name": engine}, "checkpoint": {"every_steps": 1}, **zero})
    run = train(f"nan-{engine}-{len(zero)}", recipe, *TWO_RANKS)
    assert run.status == 1
    said = f"step 3: the loss is nan on rank 1, samples {', '.join(map(str, samples))} of data.train"
    assert said in run.err
    assert "the first parameter whose gradient is not finite: layers.0.weight" in run.err
    assert not (run.folder / "export").exists()
    assert sorted(path.name for path in (run.folder / "checkpoints").glob("step_*"))[-1] == "step_00000002"
    for line in (run.folder / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
