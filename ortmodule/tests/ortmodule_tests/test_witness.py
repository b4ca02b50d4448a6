"""The witness's counts equal those of ONNX Runtime's own profile."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ortmodule import ORTModuleError
from ortmodule._internal import pass_counters as witnesses
from ortmodule._internal.base.placement import count_nodes_by_execution_provider
from ortmodule._internal.native import cuda_libraries
from ortmodule._internal.pass_counters import PassAndGraphCounters
from ortmodule._internal.session_settings import (
    _create_agent_and_refuse_cpu_session_of_cuda_model,
)
from ortmodule_tests.modules import (
    IDS,
    Reverse,
    Words,
    executed,
    language_model,
    manager_of,
    stepped,
    wrapped,
)
from ortmodule_tests.ort import needs_ort

pytestmark = needs_ort


class Bert(nn.Module):
    """A two-layer BERT with dropout, whose only input is the words."""

    def __init__(self) -> None:
        super().__init__()
        self.model = language_model("bert", "eager", dropout=0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids)


class Reversed(nn.Module):
    """A custom autograd function, which ORT calls from its graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Reverse.apply(x)


@pytest.fixture
def profiling(
    witness: PassAndGraphCounters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let every session record each node that it runs."""
    from onnxruntime.training.ortmodule._graph_execution_manager import GraphExecutionManager

    configure = GraphExecutionManager._get_session_config

    def with_profile(manager: Any) -> Any:
        session_options, providers, provider_options = configure(manager)
        session_options.enable_profiling = True
        session_options.profile_file_prefix = str(tmp_path / "profile")
        return session_options, providers, provider_options

    monkeypatch.setattr(GraphExecutionManager, "_get_session_config", with_profile)


def profiled(module: Any, training: bool = True) -> Counter[str]:
    """Return the nodes that ORT ran, by operator, from its own profile."""
    session = manager_of(module, training)._execution_agent._inference_session
    events = json.loads(Path(session.end_profiling()).read_text())
    # ORT writes one such event for each run of a kernel.
    nodes = [
        event
        for event in events
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")
    ]
    return Counter(event["args"]["op_name"] for event in nodes)


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("model", [Words, Bert])
def test_counted_nodes_are_those_that_onnx_runtime_ran(
    model: type[nn.Module], level: int, witness: PassAndGraphCounters, profiling: None
) -> None:
    """Nodes by operator equal ORT's profile, for a forward pass alone and for both passes."""
    forward = wrapped(model(), memory_optimization=level)
    loss = forward(IDS)
    assert profiled(forward) == witness.graphs[-1].forward
    del loss
    both = wrapped(model(), memory_optimization=level)
    both(IDS).backward()
    graph = witness.graphs[-1]
    assert profiled(both) == graph.forward + graph.backward
    assert graph.executed_node_count == (graph.forward + graph.backward).total()


def test_evaluation_is_counted_with_its_own_graph(
    witness: PassAndGraphCounters, profiling: None
) -> None:
    """`nodes_run` is the sum over graphs of passes times nodes."""
    module = wrapped(Words())
    for _ in range(3):
        module(IDS).backward()
    module.eval()
    with torch.no_grad():
        module(IDS)
    counts = witness.pass_and_graph_counts_record()
    # One for training and one for evaluation.
    assert counts["graphs_built"] == 2
    assert profiled(module, training=False) == witness.graphs[-1].forward
    graph = counts["training_graph"]
    evaluation = counts["evaluation_graph"]
    run = 3 * (graph["forward_nodes"] + graph["backward_nodes"]) + evaluation["forward_nodes"]
    assert counts["nodes_run"] == run == profiled(module).total() + evaluation["forward_nodes"]


def test_calls_out_of_onnx_runtime_are_named(witness: PassAndGraphCounters) -> None:
    """Torch's operators inside the graph are counted by name."""
    graph = executed(witness, Words())
    assert graph.aten == Counter(
        embedding=1,
        embedding_backward=1,
        gelu=1,
        gelu_backward=1,
        native_layer_norm=1,
        native_layer_norm_backward=1,
    )
    assert graph.node_and_operator_counts_record()["python"] == {}


def test_a_restart_keeps_what_was_built(witness: PassAndGraphCounters) -> None:
    """A restart resets the passes and keeps the graphs."""
    module = stepped(Words())
    # As after the trial pass of a run, which is not a step.
    witness.reset_pass_fallback_and_torch_call_counts()
    counts = witness.pass_and_graph_counts_record()
    assert (counts["forward_passes"], counts["nodes_run"]) == (0, 0)
    module(IDS)
    assert (
        witness.pass_and_graph_counts_record()["nodes_run"]
        == counts["training_graph"]["forward_nodes"]
        > 0
    )


def test_each_node_is_counted_on_its_execution_provider(
    witness: PassAndGraphCounters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node has a provider, also in a graph with a Python function."""
    # The model must still run after ORT has written the graph in its own format.
    placed = []
    is_efficient = witnesses._uses_memory_efficient_order

    def place(options: Any) -> bool:
        # With one provider the witness would not read ORT's own format; this call does.
        session = SimpleNamespace(get_provider_options=lambda: {"CPUExecutionProvider": {}})
        placed.append(count_nodes_by_execution_provider(options.optimized_model_filepath, session))
        return is_efficient(options)

    # A function that the witness calls while the session's file still exists.
    monkeypatch.setattr(witnesses, "_uses_memory_efficient_order", place)
    module = wrapped(nn.Sequential(Words(), Reversed()))
    module(IDS).backward()
    graph = witness.pass_and_graph_counts_record()["training_graph"]
    assert graph["python"]
    assert graph["provider"] == "CPUExecutionProvider"
    nodes = {"CPUExecutionProvider": graph["forward_nodes"] + graph["backward_nodes"]}
    assert placed == [graph["nodes_by_provider"]] == [nodes]
    module(IDS).backward()
    assert witness.pass_and_graph_counts_record()["backward_passes"] == 2


def test_a_session_that_is_not_on_its_gpu_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA model's session on the CPU is an error with the missing library and the command."""
    monkeypatch.setattr(
        cuda_libraries,
        "gpu_failure_reason_or_empty",
        lambda: 'libcudnn.so.8. Type: pip install "ortmodule[cuda]"',
    )
    # In place of a session whose CUDA provider was not loaded.
    session = SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"])
    manager = SimpleNamespace(
        _device=torch.device("cuda", 0),
        _execution_agent=SimpleNamespace(_inference_session=session),
    )
    with pytest.raises(
        ORTModuleError,
        match=r"session runs on CPUExecutionProvider: libcudnn.so.8. Type: pip install",
    ):
        _create_agent_and_refuse_cpu_session_of_cuda_model(lambda manager: None, manager)
