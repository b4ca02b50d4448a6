"""The witness is exact: what it counts is what ONNX Runtime itself says it has run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ortlaunch.ortmodule.counters import Witness
from ortlaunch.ortmodule.graph import size
from tests.ort import needs_ort
from tests.ortmodule.modules import IDS, Words, executed, language_model, manager_of, stepped, wrapped

pytestmark = needs_ort


class Bert(nn.Module):
    """A two-layer BERT with dropout, given its words alone."""

    def __init__(self) -> None:
        super().__init__()
        self.model = language_model("bert", "eager", dropout=0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids)


@pytest.fixture
def profiling(witness: Witness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every session write down each node that it runs."""
    from onnxruntime.training.ortmodule._graph_execution_manager import GraphExecutionManager

    configure = GraphExecutionManager._get_session_config

    def with_profile(manager: Any) -> Any:
        session_options, providers, provider_options = configure(manager)
        session_options.enable_profiling, session_options.profile_file_prefix = True, str(tmp_path / "profile")
        return session_options, providers, provider_options

    monkeypatch.setattr(GraphExecutionManager, "_get_session_config", with_profile)


def profiled(module: Any, training: bool = True) -> Counter[str]:
    """Nodes by operator that ORT itself says it has run."""
    session = manager_of(module, training)._execution_agent._inference_session
    events = json.loads(Path(session.end_profiling()).read_text())
    nodes = [event for event in events if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")]
    return Counter(event["args"]["op_name"] for event in nodes)


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("model", [Words, Bert])
def test_counted_nodes_are_those_that_onnx_runtime_ran(
    model: type[nn.Module], level: int, witness: Witness, profiling: None
) -> None:
    """By operator, for a forward pass alone and for both, against ORT's own profile."""
    forward = wrapped(model(), memory_optimization=level)
    loss = forward(IDS)
    assert profiled(forward) == witness.graphs[-1].forward
    del loss
    both = wrapped(model(), memory_optimization=level)
    both(IDS).backward()
    graph = witness.graphs[-1]
    assert profiled(both) == graph.forward + graph.backward
    assert graph.nodes_run == size(graph.forward + graph.backward)


def test_evaluation_is_counted_with_its_own_graph(witness: Witness, profiling: None) -> None:
    """Nodes run are passes times nodes, each graph by its own."""
    module = wrapped(Words())
    for _ in range(3):
        module(IDS).backward()
    module.eval()
    with torch.no_grad():
        module(IDS)
    counts = witness.counts()
    assert counts["graphs_built"] == 2
    assert profiled(module, training=False) == witness.graphs[-1].forward
    graph, evaluation = counts["training_graph"], counts["evaluation_graph"]
    run = 3 * (graph["forward_nodes"] + graph["backward_nodes"]) + evaluation["forward_nodes"]
    assert counts["nodes_run"] == run == size(profiled(module)) + evaluation["forward_nodes"]


def test_calls_out_of_onnx_runtime_are_named(witness: Witness) -> None:
    """Torch's operators inside the graph, by name."""
    graph = executed(witness, Words())
    assert graph.aten == Counter(
        embedding=1, embedding_backward=1, gelu=1, gelu_backward=1, native_layer_norm_backward=1
    )
    assert graph.describe()["python"] == {}


def test_a_restart_keeps_what_was_built(witness: Witness) -> None:
    """The pass that tries the model out is not a step; its export and its graph are the run's."""
    module = stepped(Words())
    witness.restart()
    counts = witness.counts()
    assert (counts["forward_passes"], counts["nodes_run"]) == (0, 0)
    module(IDS)
    assert witness.counts()["nodes_run"] == counts["training_graph"]["forward_nodes"] > 0
