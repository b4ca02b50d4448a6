"""ONNX Runtime's own profile of the nodes of an ORTModule's training graphs."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ortmodule._internal.base.attached import AgentRecord
from ortmodule._internal.base.patching import replace_attribute_temporarily
from ortmodule._internal.graph_cache import TorchModuleRecord


class NodeRun(NamedTuple):
    """One run of a node."""

    operator: str
    node_name: str
    start_ns: int
    """Since 1970."""
    duration_ns: int


@dataclass
class ProfiledOrtSessions:
    """Sessions of an ORTModule's training graphs that profile their nodes.

    ONNX Runtime profiles a session from its first run to its end. Profiled steps therefore run in
    sessions of their own, which are built of the same graphs.
    """

    module: Any
    exclude_from_counts: Callable[[], contextlib.AbstractContextManager[None]]
    """Returns a context that leaves new sessions out of the run's counters."""
    agents: dict[Any, Any] = field(default_factory=dict)
    folder: tempfile.TemporaryDirectory[str] = field(default_factory=tempfile.TemporaryDirectory)

    def use_profiled_sessions(self) -> contextlib.ExitStack:
        """Return a context in which the graphs run in the profiled sessions."""
        context = contextlib.ExitStack()
        graphs = TorchModuleRecord.attached_to(self.module._torch_module).graphs
        for manager, _ in graphs.cached_graphs:
            if manager._export_mode == torch.onnx.TrainingMode.TRAINING:
                agent = self.agents.get(manager) or self._build_profiled_session(manager)
                context.enter_context(
                    replace_attribute_temporarily(manager, "_execution_agent", agent)
                )
        return context

    def _build_profiled_session(self, graph_manager: Any) -> Any:
        """Return a new session of a manager's graph, which profiles its nodes."""
        plain_agent = graph_manager._execution_agent

        def with_profile(configure: Any = graph_manager._get_session_config) -> Any:
            config = configure()
            config[0].enable_profiling = True
            config[0].profile_file_prefix = f"{self.folder.name}/{len(self.agents)}"
            return config

        with (
            replace_attribute_temporarily(graph_manager, "_get_session_config", with_profile),
            replace_attribute_temporarily(graph_manager, "_execution_agent", plain_agent),
            self.exclude_from_counts(),
        ):
            graph_manager._create_execution_agent()
            agent = self.agents[graph_manager] = graph_manager._execution_agent
        # Its passes count as those of the plain session's graph.
        AgentRecord.attached_to(agent).node_counts = AgentRecord.attached_to(
            plain_agent
        ).node_counts
        return agent

    def end_profiles_and_read_node_runs(self) -> Iterator[NodeRun]:
        """End the profiles, and yield all runs of nodes."""
        for agent in self.agents.values():
            session = agent._inference_session
            for event in json.loads(Path(session.end_profiling()).read_text(encoding="utf-8")):
                if event["name"].endswith("_kernel_time"):
                    yield NodeRun(
                        event["args"]["op_name"],
                        event["name"].removesuffix("_kernel_time"),
                        session.get_profiling_start_time_ns() + 1000 * event["ts"],
                        1000 * event["dur"],
                    )
        self.agents.clear()
