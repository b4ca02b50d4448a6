"""Counters of the passes, graphs and nodes that ONNX Runtime really ran, for the run's report.

The module owns the wrappers that count. It makes no decisions; the engine reads and judges.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ortmodule._internal.base import counters, torch_calls
from ortmodule._internal.base.attached import AgentRecord
from ortmodule._internal.base.counters import tally
from ortmodule._internal.base.graph import GraphNodeCounts, count_graph_nodes_by_pass_and_operator
from ortmodule._internal.base.json_types import Json
from ortmodule._internal.base.patching import (
    replace_attribute_temporarily,
)
from ortmodule._internal.base.placement import count_nodes_by_execution_provider
from ortmodule._internal.base.repair_registry import (
    EVALUATION,
    TRAINING,
    replace_ort_function,
)
from ortmodule._internal.import_ortmodule import import_ortmodule_with_repairs_and_export_steps

if TYPE_CHECKING:
    from ortmodule._internal.base.ort_types import (
        Agent,
        AnyFunction,
        Manager,
        OrtSession,
        SessionOptions,
    )


class PassAndGraphCounters:
    """Counters of ORT's completed passes and of batches that plain PyTorch computed.

    They are counted for the whole process.
    """

    def __init__(self) -> None:
        self.reset_counters_graphs_and_reasons()

    def reset_counters_graphs_and_reasons(self) -> None:
        """Set every counter to zero, and forget graphs and reasons."""
        self.graphs: list[GraphNodeCounts] = []
        self.reset_pass_fallback_and_torch_call_counts()

    def reset_pass_fallback_and_torch_call_counts(self) -> None:
        """Reset the counters of passes and fallbacks; keep the records of exports and graphs."""
        self.forward_passes = 0
        self.backward_passes = 0
        self.inference_passes = 0
        self.fallbacks = 0
        self.fallback_reasons: list[str] = []
        for graph in self.graphs:
            graph.forward_passes = graph.backward_passes = 0
        torch_calls.reset_call_and_pass_counts()

    def pass_and_graph_counts_record(self) -> Json:
        """Return the counters for engine.json.

        The graphs are the newest ones. `nodes_run` sums, over all graphs, the passes times the
        graph's nodes.
        """
        return {
            "forward_passes": self.forward_passes,
            "backward_passes": self.backward_passes,
            "evaluation_passes": self.inference_passes,
            "fallbacks": self.fallbacks,
            "fallback_reasons": self.fallback_reasons,
            "graphs_built": len(self.graphs),
            "nodes_run": sum(graph.executed_node_count for graph in self.graphs),
            "training_graph": self._newest_graph_record_or_none(is_training=True),
            "evaluation_graph": self._newest_graph_record_or_none(is_training=False),
        }

    def _newest_graph_record_or_none(self, is_training: bool) -> Json | None:
        matching_graphs = [graph for graph in self.graphs if graph.training == is_training]
        return matching_graphs[-1].node_and_operator_counts_record() if matching_graphs else None

    @contextlib.contextmanager
    def exclude_passes_from_counts(self) -> Iterator[None]:
        """Leave the passes inside the context out of the run's counters."""
        counters_before = {name: copy.copy(value) for name, value in vars(self).items()}
        call_counts = torch_calls.copy_call_and_pass_counts()
        passes = [(graph, graph.forward_passes, graph.backward_passes) for graph in self.graphs]
        try:
            yield
        finally:
            vars(self).update(counters_before)
            torch_calls.restore_call_and_pass_counts(call_counts)
            for graph, forward, backward in passes:
                graph.forward_passes = forward
                graph.backward_passes = backward

    def start_counting_in_this_process(self) -> None:
        """Start to count the passes of every ORTModule of this process, in this witness.

        ORTModules made before are counted too. Only the newest installed witness counts.
        """
        # ORT's classes exist once in a process, and so do the wrappers around their methods.
        global _counting_witness  # noqa: PLW0603
        _counting_witness = self
        _wrap_ort_methods_to_count_once()


_counting_witness = PassAndGraphCounters()


def get_or_start_pass_counters() -> PassAndGraphCounters:
    """Return the witness that counts; start to count if nothing counted before."""
    _wrap_ort_methods_to_count_once()
    return _counting_witness


@functools.cache
def _wrap_ort_methods_to_count_once() -> None:
    import_ortmodule_with_repairs_and_export_steps()

    for method, process_counter_name, graph_counter_name in (
        ("TrainingAgent.run_forward", "forward_passes", "forward_passes"),
        ("TrainingAgent.run_backward", "backward_passes", "backward_passes"),
        ("InferenceAgent.run_forward", "inference_passes", "forward_passes"),
    ):
        replace_ort_function(
            f"_execution_agent:{method}",
            functools.partial(_run_and_count_pass, process_counter_name, graph_counter_name),
        )
    replace_ort_function("_fallback:_FallbackManager.fallback", _record_and_run_fallback)
    for manager in (TRAINING, EVALUATION):
        replace_ort_function(f"{manager}._build_graph", _build_graph)
        replace_ort_function(
            f"{manager}._create_execution_agent",
            _create_agent_and_record_executed_graph_counts,
        )


def _run_and_count_pass(
    process_counter_name: str,
    graph_counter_name: str,
    original: AnyFunction,
    agent: Agent,
    *args: object,
    **kwargs: object,
) -> object:
    with torch_calls.measure_seconds_of_pass():
        result = original(agent, *args, **kwargs)
    # After the call, so that a failed pass is not counted.
    setattr(
        _counting_witness,
        process_counter_name,
        getattr(_counting_witness, process_counter_name) + 1,
    )
    graph = AgentRecord.attached_to(agent).node_counts
    if graph is not None:
        setattr(graph, graph_counter_name, getattr(graph, graph_counter_name) + 1)
    return result


def _build_graph(
    original: AnyFunction, manager: Manager, *args: object, **kwargs: object
) -> object:
    with counters.while_building():
        return original(manager, *args, **kwargs)


def _create_agent_and_record_executed_graph_counts(
    original_create_agent: AnyFunction, manager: Manager
) -> None:
    import onnx
    from torch.onnx import TrainingMode

    used_options: list[SessionOptions] = []
    with (
        counters.while_building(),
        tempfile.TemporaryDirectory(prefix="ortmodule-") as graph_folder,
    ):

        def create_config_saving_graph(create_config: AnyFunction) -> Any:
            """Make the session save its final graph, with fusions and recomputation."""
            config = create_config()
            # With engine.save_onnx ORT has set a path already.
            if not config[0].optimized_model_filepath:
                config[0].optimized_model_filepath = os.path.join(graph_folder, "executed.onnx")
            used_options.append(config[0])
            return config

        with replace_attribute_temporarily(
            manager,
            "_get_session_config",
            functools.partial(create_config_saving_graph, manager._get_session_config),
        ):
            original_create_agent(manager)
        session_options = used_options[-1]
        model = onnx.load(session_options.optimized_model_filepath, load_external_data=False)
        session = manager._execution_agent._inference_session
        graph = count_graph_nodes_by_pass_and_operator(
            model,
            manager._export_mode == TrainingMode.TRAINING,
            _uses_memory_efficient_order(session_options),
        )
        graph.provider, *other_providers = session.get_providers()
        node_counts = {graph.provider: (graph.forward + graph.backward).total()}
        graph.nodes_by_provider = (
            _node_count_by_provider_or_note_and_empty(
                session_options.optimized_model_filepath, session
            )
            if other_providers
            else node_counts
        )
    _counting_witness.graphs.append(graph)
    AgentRecord.attached_to(manager._execution_agent).node_counts = graph


def _uses_memory_efficient_order(session_options: SessionOptions) -> bool:
    from onnxruntime import ExecutionOrder

    return bool(session_options.execution_order == ExecutionOrder.MEMORY_EFFICIENT)


def _node_count_by_provider_or_note_and_empty(
    graph_file: str, session: OrtSession
) -> dict[str, int]:
    """Return the number of nodes on each provider.

    If ONNX Runtime fails to report it, note that and return an empty dictionary.
    """
    try:
        return count_nodes_by_execution_provider(graph_file, session)
    except Exception as error:
        tally.add_end_note_once(
            f"the execution provider of each node is not known: {type(error).__name__}: {error}"
        )
        return {}


def _record_and_run_fallback(
    original_fallback: AnyFunction, manager: Manager, *args: object, **kwargs: object
) -> object:
    # Read before the call: with retry on, ORT deletes the exception inside the call.
    reason = f"{type(manager._exception).__name__}: {manager._exception}"
    _counting_witness.fallbacks += 1
    if reason not in _counting_witness.fallback_reasons:
        _counting_witness.fallback_reasons.append(reason)
    return original_fallback(manager, *args, **kwargs)
