"""The execution provider of each node of a graph that ONNX Runtime executes.

No method of a session reports it, and the log that does is verbose in every pass. A model that a
session saves in ORT's own format names the provider of each node. The module does not depend on
ORTModule.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortmodule._internal.base.ort_types import OrtSession

# Ends the forward pass, and computes nothing.
_YIELD = b"YieldOp"


def count_nodes_by_execution_provider(
    graph_file: str, executed_session: OrtSession
) -> dict[str, int]:
    """Count the nodes of an executed graph on each execution provider of its session.

    Builds another session of the same graph, and runs nothing.

    Args:
        graph_file: file of the graph that the session saved.
        executed_session: an onnxruntime.InferenceSession, or its binding.
    """
    import onnxruntime
    from onnxruntime.tools.ort_format_model.ort_flatbuffers_py.fbs.InferenceSession import (
        InferenceSession as Saved,
    )

    options = onnxruntime.SessionOptions()
    providers = [
        # Of the provider's options, this session needs only the device.
        (name, {key: value for key, value in provider_options.items() if key == "device_id"})
        for name, provider_options in executed_session.get_provider_options().items()
    ]
    # The first session has already optimized the graph.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    # Errors only.
    options.log_severity_level = 3
    options.add_session_config_entry("session.save_model_format", "ORT")
    with tempfile.TemporaryDirectory(prefix="ortmodule-") as folder:
        options.optimized_model_filepath = str(Path(folder, "placed.ort"))
        onnxruntime.InferenceSession(graph_file, options, providers=providers)
        graph = Saved.GetRootAs(Path(options.optimized_model_filepath).read_bytes()).Model().Graph()
    nodes = [graph.Nodes(node_index) for node_index in range(graph.NodesLength())]
    return dict(
        Counter(node.ExecutionProviderType().decode() for node in nodes if node.OpType() != _YIELD)
    )
