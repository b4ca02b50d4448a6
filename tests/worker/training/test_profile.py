"""The profile of steps: planted costs are its first row, and it has the profiler's own cost."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ortlaunch.run_folder.folder import read_json_or_raise_damaged
from ortlaunch.run_folder.profile_record import OperatorCost
from ortlaunch.worker.training import best_evaluation
from ortlaunch.worker.training.profile import operator_costs
from ortmodule.loops import NodeRun
from tests.training import Trained, train_here

SAMPLES = [{"x": torch.ones(8), "y": torch.ones(1)} for _ in range(8)]


class Slow(torch.autograd.Function):
    """An operator of the model's own, whose forward or backward pass takes long."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cost: str) -> torch.Tensor:
        """Return a copy of the input."""
        ctx.cost = cost
        time.sleep(0.2 * (cost == "function"))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradient as it is."""
        time.sleep(0.2 * (ctx.cost == "derivative"))
        return gradients[0], None


class Net(nn.Module):
    """A linear layer beside an operator that computes, or a copy that nothing needs."""

    def __init__(self, cost: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)
        self.planted = Planted(cost)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) - y).square().mean() + self.planted()


class Planted(nn.Module):
    """The planted cost, in a layer of its own."""

    many: torch.Tensor

    def __init__(self, cost: str) -> None:
        super().__init__()
        self.cost = cost
        self.register_buffer("many", torch.full((4_000_000,), 2.0))
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self) -> torch.Tensor:
        if self.cost == "operator":
            return torch.polygamma(3, self.many[:400_000]).sum() * 0
        if self.cost == "python":
            time.sleep(0.2)
        if self.cost in ("function", "derivative"):
            return Slow.apply(self.weight, self.cost) * 0
        if self.cost == "copy":
            return self.many.repeat(16).clone()[0] * 0
        return self.many[0] * 0


class SlowSamples(list[Any]):
    """Samples that take long to read."""

    def __getitem__(self, index: Any) -> Any:
        time.sleep(0.05)
        return super().__getitem__(index)


def profiled(
    folder: Path, cost: str, steps: tuple[int, int] = (2, 4), evaluation: Any = None
) -> Trained:
    """Return a training of five steps, of which some are profiled."""
    samples = SlowSamples(SAMPLES) if cost == "reader" else SAMPLES
    return train_here(
        folder,
        Net(cost),
        samples,
        evaluation=evaluation,
        batch={"global_size": 8, "micro_size": 8},
        train={"max_steps": 5, "evaluate_every_steps": 1},
        log={"profile_steps": steps},
    )


@pytest.mark.parametrize(
    ("cost", "operator"),
    [
        ("operator", "aten::polygamma"),
        ("function", "Slow"),
        ("derivative", "SlowBackward"),
        ("copy", "aten::copy_"),
        ("python", "step"),
        ("reader", "reading"),
    ],
)
def test_a_planted_cost_is_the_first_row(
    cost: str, operator: str, tmp_path: Path, alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slow operator, needless copy, slow reader or slow Python is the first row of the table."""
    run = profiled(tmp_path, cost).run
    profile = read_json_or_raise_damaged(run.profile)
    first = profile["operators"][0]
    assert (first["library"], first["operator"]) == ("torch", operator)
    assert 0.5 < first["share"] <= 1
    assert first["seconds"] == pytest.approx(first["share"] * profile["seconds"])
    assert profile["steps"] == [2, 4]
    calls = {row["operator"]: row["calls"] for row in profile["operators"]}
    assert calls.get("step", 1) == calls.get("reading", 1) == 1
    out = capsys.readouterr().out
    assert "the profiler's own cost: " in out
    rows = out[out.index("share ") :].splitlines()
    assert rows[1].endswith(f"torch    {operator}")
    with gzip.open(run.trace) as file:
        events = json.load(file)["traceEvents"]
    # Both profiled steps are on one line of time.
    starts = [event["ts"] for event in events if event["name"] == "step"]
    assert len(starts) == 2
    assert 0 < abs(starts[1] - starts[0]) < 60e6
    assert operator in {event["name"] for event in events}


def test_costs_of_both_libraries() -> None:
    """Rows are sums over all steps, divided by their number; the longest is first."""
    torch_rows = [
        SimpleNamespace(key="aten::mm", count=3, self_cpu_time_total=2e6),
        SimpleNamespace(key="step", count=1, self_cpu_time_total=1e6),
    ]
    profiles: Any = [SimpleNamespace(key_averages=lambda: torch_rows)] * 2
    node_runs = [NodeRun("Gemm", f"layer_{i}", 0, 6 * 10**9) for i in range(2)]
    assert operator_costs(profiles, node_runs, 8.0) == [
        OperatorCost("ONNX Runtime", "Gemm", 1, 6, 0.75),
        OperatorCost("torch", "aten::mm", 3, 2, 0.25),
        OperatorCost("torch", "step", 1, 1, 0.125),
    ]


def test_a_training_that_ends_before_the_last_profiled_step(
    tmp_path: Path, alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps past the end are left out, and a resume past the last one reports that it is."""
    assert read_json_or_raise_damaged(profiled(tmp_path / "a", "none", (4, 9)).run.profile)[
        "steps"
    ] == [4]
    profiled(tmp_path / "b", "none", (7, 9))
    expected = (
        "log.profile_steps: no step is profiled: the profile is of steps 7 to 9 on cpu, and this "
        "run has steps 1 to 5 on cpu\n"
    )
    assert expected in capsys.readouterr().out


def test_a_training_that_stops_early(
    tmp_path: Path, alone: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile is of the steps before the stop; if there is none, a line reports that."""
    monkeypatch.setattr(
        best_evaluation, "early_stop_reason_or_none", lambda made, step, memory: step == 3
    )
    assert read_json_or_raise_damaged(
        profiled(tmp_path / "a", "none", (2, 5), SAMPLES).run.profile
    )["steps"] == [2]
    assert not profiled(tmp_path / "b", "none", (4, 5), SAMPLES).run.profile.exists()
    assert "log.profile_steps: the training ended before step 4\n" in capsys.readouterr().out
