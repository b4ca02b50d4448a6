"""The profile of whole runs: nodes of ONNX Runtime and kernels of inductor."""

from __future__ import annotations

import gzip
import json

import pytest

from ortlaunch.run_folder.folder import read_json_or_raise_damaged
from tests.e2e.runs import TOY, TWO_RANKS, Train, ended_well, merged
from tests.ort import needs_ort


@pytest.mark.slow
@pytest.mark.ci
@needs_ort
def test_two_ranks_on_ort(train: Train) -> None:
    """ONNX Runtime's nodes are on the timeline within the profiled steps."""
    run = ended_well(
        train("ort", merged(TOY, {"log": {"profile_steps": [3, 6]}}), *TWO_RANKS, timeout=300)
    )
    found = read_json_or_raise_damaged(run.folder / "profile.json")
    assert (found["engine"], found["steps"]) == ("ort", [3, 5])
    with gzip.open(run.folder / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    # The nodes ran within the profiled steps.
    steps = [(each["ts"], each["ts"] + each["dur"]) for each in events if each["name"] == "step"]
    nodes = [event for event in events if event["pid"] == 0 and event["ph"] == "X"]
    assert {"Gemm", "ATen"} <= {event["name"] for event in nodes}
    assert all(any(begin <= event["ts"] <= end for begin, end in steps) for event in nodes)
    # Passes in the profiled session count, and building it does not.
    ort = run.truth()["onnxruntime"]
    assert ort["forward_passes"] == 20
    assert "the profiler's own cost: " in run.out


@pytest.mark.slow
def test_inductor(train: Train) -> None:
    """Kernels that inductor compiled are named after the operators in them."""
    engine = {"name": "inductor", "parity_steps": 0}
    run = ended_well(
        train("inductor", merged(TOY, {"engine": engine, "log": {"profile_steps": [4, 6]}}))
    )
    found = read_json_or_raise_damaged(run.folder / "profile.json")
    assert (found["engine"], found["steps"]) == ("inductor", [4, 6])
    with gzip.open(run.folder / "trace.json.gz") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert any("cpp_fused" in name for name in names)
