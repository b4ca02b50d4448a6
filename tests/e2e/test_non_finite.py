"""Runs whose loss is not finite on one of two ranks: they end, or continue without the batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ortlaunch.launch_plan import BatchPlan
from ortlaunch.worker.data import Batches, UserSamples, collate
from tests.e2e.runs import TOY, TWO_RANKS, Train, merged
from tests.ort import needs_ort

ZERO = {"zero": {"stage": 2}}
WAYS = [
    pytest.param("eager", {}, marks=[pytest.mark.slow, pytest.mark.ci]),
    pytest.param("eager", ZERO, marks=pytest.mark.slow),
    pytest.param("ort", ZERO, marks=[pytest.mark.slow, needs_ort]),
    pytest.param("inductor", {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("engine", "zero"), WAYS)
def test_a_loss_that_is_not_finite_ends_the_run(
    engine: str, zero: dict[str, Any], train: Train
) -> None:
    """A run whose loss is nan ends with status 1 and names rank, samples and parameter."""
    order = Batches(UserSamples(range(256)), BatchPlan(16, 4, 2, 2, None), 42)
    # Step 3 (index 2), rank 1, second pass (index 1).
    samples = order.sample_indices_of_micro_batch(2, 1, 1)
    data = {
        "train": {"format": "custom", "factory": "toys:data", "arguments": {"nan_at": samples[2]}}
    }
    recipe = merged(
        TOY, {"data": data, "engine": {"name": engine}, "checkpoint": {"every_steps": 1}, **zero}
    )
    run = train(f"nan-{engine}-{len(zero)}", recipe, *TWO_RANKS)
    assert run.status == 1
    said = (
        f"step 3: the loss is nan on rank 1, samples {', '.join(map(str, samples))} of data.train"
    )
    assert said in run.err
    assert "first parameter with a gradient that is not finite: layers.0.weight" in run.err
    assert not (run.folder / "export").exists()
    assert (
        sorted(path.name for path in (run.folder / "checkpoints").glob("step_*"))[-1]
        == "step_00000002"
    )
    # JSON has no NaN, though Python's parser accepts it.
    for line in (run.folder / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


ANSWERS = [
    pytest.param("eager", None, "rollback", marks=[pytest.mark.slow, pytest.mark.ci]),
    *(
        pytest.param(
            engine,
            stage,
            action,
            marks=[pytest.mark.slow, *([needs_ort] if engine == "ort" else [])],
        )
        for engine, stages in (("eager", (None, 0, 1, 2, 3)), ("ort", (None, 0, 1, 2)))
        for stage in stages
        for action in ("skip", "rollback")
        if (engine, stage, action) != ("eager", None, "rollback")
    ),
]
ORDER = Batches(UserSamples(range(256)), BatchPlan(16, 4, 2, 2, None), 42)


@pytest.mark.parametrize(("engine", "stage", "action"), ANSWERS)
def test_training_without_the_bad_batch(
    engine: str,
    stage: int | None,
    action: str,
    train: Train,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run that leaves a bad batch out ends with plain PyTorch's weights without that batch."""
    bad = ORDER.sample_indices_of_micro_batch(2, 1, 1)[2]
    data = {"train": {"format": "custom", "factory": "toys:data", "arguments": {"nan_at": bad}}}
    sections = {
        "data": data, "engine": {"name": engine}, "train": {"max_steps": 5, "on_nonfinite": action},
        "checkpoint": {"every_steps": 2}, "zero": None if stage is None else {"stage": stage},
        "schedule": {"name": "constant"},
    }  # fmt: skip
    run = train(f"{action}-{engine}-{stage}", merged(TOY, sections), *TWO_RANKS)
    assert run.status == 0, run.err
    (line,) = [
        json.loads(text) for text in (run.folder / "bad_steps.jsonl").read_text().splitlines()
    ]
    assert (line["step"], line["action"], line["parameter"]) == (3, action, "layers.0.weight")
    assert (
        f"the loss is nan on rank 1, samples {', '.join(map(str, ORDER.sample_indices_of_micro_batch(2, 1, 1)))}"
        in run.out
    )
    assert json.loads((run.folder / "summary.json").read_text())["bad_steps"] == {action: 1}
    # `skip` omits the step; `rollback` uses the next batch in its place.
    taken = [0, 1, None, 3, 4] if action == "skip" else [0, 1, 3, 4, 5]
    expected = _plain(taken, home, monkeypatch)
    for name, value in load_file(run.folder / "export" / "model.safetensors").items():
        torch.testing.assert_close(value, expected[name], rtol=2e-4, atol=2e-5, msg=name)


def _plain(
    steps: list[int | None], home: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, torch.Tensor]:
    """Return plain PyTorch's weights after these steps; None is a step without a batch."""
    monkeypatch.syspath_prepend(str(home))
    import toys

    torch.manual_seed(42)
    net: nn.Module = toys.net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.0)
    samples = toys.data()
    for step in steps:
        if step is not None:
            batch = collate([samples[i] for i in ORDER.sample_indices_of_step(step)])
            net(**batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return net.state_dict()
