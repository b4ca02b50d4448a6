"""The profile of whole runs: nodes of ONNX Runtime, kernels of inductor, and collectives."""

from __future__ import annotations

import gzip
import json

import pytest

from ortlaunch.run_folder.folder import read_json_or_raise_damaged
from tests.e2e.runs import TOY, TWO_RANKS, Train, ended_well, merged
from tests.ort import needs_ort
from tests.worker.training.test_profile import assert_nested


@pytest.mark.slow
@pytest.mark.ci
@needs_ort
def test_two_ranks_on_ort(train: Train) -> None:
    """Nodes of both passes have layer and line; collectives and waiting are apart."""
    run = ended_well(
        train("ort", merged(TOY, {"log": {"profile_steps": [3, 6]}}), *TWO_RANKS, timeout=300)
    )
    found = read_json_or_raise_damaged(run.folder / "profile.json")
    assert (found["engine"], found["steps"]) == ("ort", [3, 5])
    assert found["kinds"]["communication"] > 0
    assert found["kinds"]["waiting"] >= 0
    assert sum(found["kinds"].values()) == pytest.approx(1)
    with gzip.open(run.folder / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert_nested(events)
    nodes = {
        (event["name"], event["args"]["phase"], event["args"]["module"])
        for event in events
        if "toys.py" in event["args"].get("source", "")
    }
    assert {
        ("Gemm", "forward", "layers.0"),
        ("Gemm", "backward", "layers.0"),
        ("aten::gelu", "forward", "layers.1"),
        ("aten::gelu_backward", "backward", "layers.1"),
        ("Gemm", "backward", "layers.3"),
    } <= nodes
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
