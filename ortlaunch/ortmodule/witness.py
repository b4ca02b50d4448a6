"""What ONNX Runtime really ran, counted, so that a run can report it.

Owns the wrappers that count passes, graphs and nodes. Must not decide anything: the engine reads and judges.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ortlaunch.json_types import Json
from ortlaunch.ortmodule.base import counters, torch_calls
from ortlaunch.ortmodule.base.counters import tally
from ortlaunch.ortmodule.base.graph import Graph, read_graph, size
from ortlaunch.ortmodule.base.patching import wrap_method
from ortlaunch.ortmodule.base.placement import nodes_by_provider
from ortlaunch.ortmodule.repaired import import_ortmodule

if TYPE_CHECKING:
    from ortlaunch.ortmodule.base.ort_types import AnyFunction, Manager, OrtSession, SessionOptions

_GRAPH = "_ortlaunch_graph"


class Witness:
    """Counts ORT's completed graph runs, and the times a batch was handed to plain PyTorch, in this process."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Set every counter to zero, and forget graphs and reasons."""
        self.graphs: list[Graph] = []
        self.restart()

    def restart(self) -> None:
        """Set the counters of passes and fallbacks to zero; what was exported and built so far stays."""
        self.forward_passes = 0
        self.backward_passes = 0
        self.inference_passes = 0
        self.fallbacks = 0
        self.fallback_reasons: list[str] = []
        for graph in self.graphs:
            graph.forward_passes = graph.backward_passes = 0
        torch_calls.restart()

    def counts(self) -> Json:
        """For engine.json. Graphs are the newest ones; `nodes_run` counts the passes of each graph by its own nodes."""
        return {
            "forward_passes": self.forward_passes,
            "backward_passes": self.backward_passes,
            "evaluation_passes": self.inference_passes,
            "fallbacks": self.fallbacks,
            "fallback_reasons": self.fallback_reasons,
            "graphs_built": len(self.graphs),
            "nodes_run": sum(graph.nodes_run for graph in self.graphs),
            "training_graph": self._newest(training=True),
            "evaluation_graph": self._newest(training=False),
        }

    def _newest(self, training: bool) -> Json | None:
        found = [graph for graph in self.graphs if graph.training == training]
        return found[-1].describe() if found else None

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """While open, passes are not of the run: afterwards the counters are what they were."""
        before = {name: copy.copy(value) for name, value in vars(self).items()}
        calls = torch_calls.snapshot()
        passes = [(graph, graph.forward_passes, graph.backward_passes) for graph in self.graphs]
        try:
            yield
        finally:
            vars(self).update(before)
            torch_calls.restore(calls)
            for graph, forward, backward in passes:
                graph.forward_passes = forward
                graph.backward_passes = backward

    def install(self) -> None:
        """Start to count; every ORTModule of this process is counted, whenever it was made, by the newest witness."""
        global _current  # noqa: PLW0603  (ORT's classes are the process's, and so are the wrappers around them)
        _current = self
        _install()


_current = Witness()


@functools.cache
def _install() -> None:
    import_ortmodule()
    from onnxruntime.training.ortmodule import _execution_agent, _fallback, _graph_execution_manager
    from onnxruntime.training.ortmodule._inference_manager import InferenceManager
    from onnxruntime.training.ortmodule._training_manager import TrainingManager

    _count(_execution_agent.TrainingAgent, "run_forward", "forward_passes", "forward_passes")
    _count(_execution_agent.TrainingAgent, "run_backward", "backward_passes", "backward_passes")
    _count(_execution_agent.InferenceAgent, "run_forward", "inference_passes", "forward_passes")
    wrap_method(_fallback._FallbackManager, "fallback", _record_fallback)
    wrap_method(
        _graph_execution_manager.GraphExecutionManager, "_get_session_config", _save_what_runs
    )
    for manager in (TrainingManager, InferenceManager):
        wrap_method(manager, "_build_graph", _build_graph)
        wrap_method(manager, "_create_execution_agent", _record_graph)


def _count(owner: object, method: str, counter: str, of_graph: str) -> None:
    def counted(original: AnyFunction, agent: object, *args: object, **kwargs: object) -> object:
        with torch_calls.timed_pass():
            result = original(agent, *args, **kwargs)
        setattr(_current, counter, getattr(_current, counter) + 1)
        graph = getattr(agent, _GRAPH, None)
        if graph is not None:
            setattr(graph, of_graph, getattr(graph, of_graph) + 1)
        return result

    wrap_method(owner, method, counted)


def _save_what_runs(original: AnyFunction, manager: Manager) -> object:
    """Let the session save the graph that it makes of ORTModule's: fused, recomputing, as it will run."""
    session_options, providers, provider_options = original(manager)
    if not session_options.optimized_model_filepath:  # engine.save_onnx has a place for it
        session_options.optimized_model_filepath = os.path.join(
            manager._ortlaunch_folder, "executed.onnx"
        )
    manager._ortlaunch_session_options = session_options
    return session_options, providers, provider_options


def _build_graph(
    original: AnyFunction, manager: Manager, *args: object, **kwargs: object
) -> object:
    with counters.while_building():
        return original(manager, *args, **kwargs)


def _record_graph(original: AnyFunction, manager: Manager) -> None:
    import onnx
    from torch.onnx import TrainingMode

    with (
        counters.while_building(),
        tempfile.TemporaryDirectory(prefix="ortlaunch-") as manager._ortlaunch_folder,
    ):
        original(manager)
        options = vars(manager).pop(
            "_ortlaunch_session_options"
        )  # ORT pickles its managers, and cannot these
        model = onnx.load(options.optimized_model_filepath, load_external_data=False)
        session = manager._execution_agent._inference_session
        graph = read_graph(
            model, manager._export_mode == TrainingMode.TRAINING, _is_memory_efficient(options)
        )
        graph.provider, *others = session.get_providers()
        nodes = {graph.provider: size(graph.forward + graph.backward)}
        graph.nodes_by_provider = (
            _placed(options.optimized_model_filepath, session) if others else nodes
        )
    _current.graphs.append(graph)
    setattr(manager._execution_agent, _GRAPH, graph)


def _is_memory_efficient(options: SessionOptions) -> bool:
    from onnxruntime import ExecutionOrder

    return bool(options.execution_order == ExecutionOrder.MEMORY_EFFICIENT)


def _placed(model: str, session: OrtSession) -> dict[str, int]:
    """Nodes on each provider; empty, with a note, where ONNX Runtime fails to report it."""
    try:
        return nodes_by_provider(model, session)
    except Exception as error:
        tally.note(
            f"the execution provider of each node is not known: {type(error).__name__}: {error}"
        )
        return {}


def _record_fallback(
    original: AnyFunction, manager: Manager, *args: object, **kwargs: object
) -> object:
    # With retry on, ORT forgets the exception inside the call: read it first.
    reason = f"{type(manager._exception).__name__}: {manager._exception}"
    _current.fallbacks += 1
    if reason not in _current.fallback_reasons:
        _current.fallback_reasons.append(reason)
    return original(manager, *args, **kwargs)
