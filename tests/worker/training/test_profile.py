"""The profile of steps: planted costs are its first row, and it has the profiler's own cost."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ortlaunch.run_folder.folder import read_json_or_raise_damaged
from ortlaunch.worker.training import best_evaluation
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
    ("cost", "operator", "kind", "line"),
    [
        ("operator", "aten::polygamma", "operators", "torch.polygamma(3"),
        ("function", "Slow", "operators", "Slow.apply("),
        ("derivative", "SlowBackward", "operators", "Slow.apply("),
        ("copy", "aten::copy_", "copying", "self.many.repeat(16).clone()"),
        ("reader", "reading", "reading", ""),
    ],
)
def test_a_planted_cost_is_the_first_row(
    cost: str,
    operator: str,
    kind: str,
    line: str,
    tmp_path: Path,
    alone: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A slow operator, a needless copy and a slow reader are each the first row of the table."""
    run = profiled(tmp_path, cost).run
    found = read_json_or_raise_damaged(run.profile)
    first = found["costs"][0]
    assert (first["operator"], first["kind"]) == (operator, kind)
    assert first["share"] > 0.5
    if line:
        assert first["module"] == "planted"
        file, _, number = first["source"].rpartition(":")
        assert file.endswith("test_profile.py")
        assert line in Path(__file__).read_text().splitlines()[int(number) - 1]
        assert first["bandwidth_share"] > 0 or cost == "derivative"
    assert found["steps"] == [2, 4]
    assert sum(found["kinds"].values()) == pytest.approx(1)
    assert found["kinds"][kind] >= first["share"]
    assert found["matrix_rate"] > 0
    assert found["bandwidth"] > 0
    out = capsys.readouterr().out
    assert "the profiler's own cost: " in out
    rows = out[out.index("of matmul rate") :].splitlines()
    assert operator in rows[1]
    with gzip.open(run.trace) as file:
        events = json.load(file)["traceEvents"]
    assert operator in {event["name"] for event in events}
    assert_nested(events)


def assert_nested(events: list[dict[str, Any]]) -> None:
    """Check that the events of a track are apart or inside each other, as Perfetto requires."""
    tracks: dict[int, list[tuple[int, int]]] = {}
    for event in (each for each in events if each["ph"] == "X"):
        # In nanoseconds; the longest event of those that begin together is first.
        start = round(event["ts"] * 1000)
        tracks.setdefault(event["tid"], []).append((start, -start - round(event["dur"] * 1000)))
    assert {event["tid"] for event in events if event["ph"] == "M"} == tracks.keys()
    for spans in tracks.values():
        ends: list[int] = []
        for start, end in sorted(spans):
            while ends and ends[-1] <= start:
                ends.pop()
            assert not ends or -end <= ends[-1]
            ends.append(-end)


def test_a_matmul_has_its_share_of_the_measured_rate(tmp_path: Path, alone: None) -> None:
    """Forward and backward passes of a layer have the layer's line; a matmul has its rate."""
    model = Net("none")
    model.linear = nn.Linear(1024, 1024, bias=False)
    samples = [{"x": torch.ones(1024), "y": torch.ones(1024)} for _ in range(256)]
    run = train_here(
        tmp_path,
        model,
        samples,
        batch={"global_size": 256, "micro_size": 256},
        train={"max_steps": 3},
        log={"profile_steps": (2, 3)},
    ).run
    profile = read_json_or_raise_damaged(run.profile)
    costs = {(cost["phase"], cost["operator"]): cost for cost in profile["costs"]}
    for found in (costs["forward", "aten::mm"], costs["backward", "aten::mm"]):
        assert found["module"] == "linear"
        assert "test_profile.py:" in found["source"]
        # Not of a bound: the rate is measured at another time than the step, on a busy machine.
        rate = 2 * 256 * 1024**2 * found["calls"] / found["seconds"]
        assert found["matrix_share"] == pytest.approx(rate / profile["matrix_rate"], rel=0.01)


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
