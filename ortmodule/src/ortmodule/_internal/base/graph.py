"""The contents of a graph that ONNX Runtime executes: its nodes by operator, and calls out of ORT.

Nodes are counted apart for the forward and the backward pass. The graph is read as the session runs
it, after every optimization; `replace_and_name_graph_nodes` also changes the nodes of a graph before that. The
module does not depend on ORTModule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ortmodule._internal.base.json_types import Json

if TYPE_CHECKING:
    import onnx

# Ends the forward pass of a training graph.
_YIELD = "YieldOp"
# Operators listed in engine.json for each half; more would hide the important ones.
_MAX_LISTED_OPERATORS = 8


class ShapeInferenceError(RuntimeError):
    """A failure of ONNX Runtime's shape inference at `operator`.

    The operator is an ONNX name or, of an ATen node, torch's.
    """

    def __init__(self, operator: str, cause: Exception) -> None:
        cause_text = f"{type(cause).__name__} {cause}".strip()
        super().__init__(
            f"ONNX Runtime cannot infer the shape of {operator}'s result ({cause_text})"
        )
        self.operator = operator


@dataclass
class GraphNodeCounts:
    """The nodes of one graph by operator, and the number of passes of each half."""

    training: bool
    forward: Counter[str]
    backward: Counter[str]
    aten: Counter[str]
    """Operators of torch that ORT calls, by name."""
    python: Counter[str]
    """Custom autograd functions that ORT calls, by name."""
    triton: Counter[str]
    """Triton kernels, by name."""
    provider: str = ""
    """The session's execution provider."""
    nodes_by_provider: dict[str, int] = field(default_factory=dict)
    """Number of nodes on each execution provider."""
    forward_passes: int = field(default=0)
    backward_passes: int = field(default=0)

    @property
    def executed_node_count(self) -> int:
        """The number of nodes executed so far."""
        return (
            self.forward.total() * self.forward_passes
            + self.backward.total() * self.backward_passes
        )

    def node_and_operator_counts_record(self) -> Json:
        """Return the entry for engine.json: totals, frequent operators, and every call out of ORT."""
        halves = (
            {"forward": self.forward, "backward": self.backward}
            if self.training
            else {"forward": self.forward}
        )
        nodes = {f"{half}_nodes": ops.total() for half, ops in halves.items()}
        frequent = {
            f"{half}_operators": dict(ops.most_common(_MAX_LISTED_OPERATORS))
            for half, ops in halves.items()
        }
        placement = {"provider": self.provider, "nodes_by_provider": self.nodes_by_provider}
        return {
            **nodes,
            **placement,
            **frequent,
            "aten": dict(self.aten),
            "python": dict(self.python),
            "triton": dict(self.triton),
        }


def count_graph_nodes_by_pass_and_operator(
    saved_onnx_model: onnx.ModelProto, is_training: bool, uses_memory_efficient_order: bool
) -> GraphNodeCounts:
    """Count the nodes of an executed graph.

    saved_onnx_model: an onnx.ModelProto that a session saved; its nodes are in ORT's default order.
    uses_memory_efficient_order: the session runs the nodes in ORT's memory-efficient order, in which nodes
        that only the backward pass needs come after the forward pass.
    """
    nodes = list(saved_onnx_model.graph.node)
    names = [node.op_type for node in nodes]
    forward_indices = set(range(len(nodes)))
    if is_training and uses_memory_efficient_order:
        forward_indices = _forward_node_indices_in_memory_efficient_order(
            nodes, names.index(_YIELD)
        )
    elif is_training:
        forward_indices = set(range(names.index(_YIELD)))
    backward_indices = set(range(len(nodes))) - forward_indices
    return GraphNodeCounts(
        is_training,
        Counter(names[i] for i in forward_indices if names[i] != _YIELD),
        Counter(names[i] for i in backward_indices if names[i] != _YIELD),
        aten=_count_calls_by_function_name(nodes, "operator", "ATen"),
        python=_count_calls_by_function_name(nodes, "func_name", "PythonOp", "PythonOpGrad"),
        triton=_count_calls_by_function_name(nodes, "func_name", "TritonOp"),
    )


def _forward_node_indices_in_memory_efficient_order(
    onnx_nodes: Sequence[onnx.NodeProto], yield_index: int
) -> set[int]:
    """Return `yield_index`, the nodes that it needs, and the nodes that read the shapes of their results.

    ORT reads shapes as soon as it can, so these run in the forward half.
    """
    index_by_output = {name: i for i, node in enumerate(onnx_nodes) for name in node.output if name}
    needed_indices: set[int] = set()
    pending = [yield_index]
    while pending:
        i = pending.pop()
        if i not in needed_indices:
            needed_indices.add(i)
            pending.extend(
                index_by_output[name] for name in onnx_nodes[i].input if name in index_by_output
            )
    shape_indices = (i for i, node in enumerate(onnx_nodes) if node.op_type in ("Shape", "Size"))
    # The output of the YieldOp is the gradient with which the backward pass begins.
    needed = needed_indices - {yield_index}
    return needed_indices | {
        i
        for i in shape_indices
        if all(index_by_output.get(name) in needed for name in onnx_nodes[i].input)
    }


def _count_calls_by_function_name(
    onnx_nodes: Sequence[onnx.NodeProto], name_attribute_name: str, *calling_operator_types: str
) -> Counter[str]:
    return Counter(
        _text_attribute_or_operator_type(node, name_attribute_name)
        for node in onnx_nodes
        if node.op_type in calling_operator_types
    )


def _text_attribute_or_operator_type(onnx_node: onnx.NodeProto, attribute_name: str) -> str:
    return next(
        (
            str(attribute.s.decode())
            for attribute in onnx_node.attribute
            if attribute.name == attribute_name
        ),
        onnx_node.op_type,
    )


def replace_and_name_graph_nodes(
    onnx_graph: onnx.GraphProto, new_nodes: Iterable[onnx.NodeProto]
) -> None:
    """Replace the nodes of an onnx.GraphProto.

    The new list may contain the graph's own nodes.
    """
    from onnx import NodeProto

    # Protobuf frees the old nodes with the list, including those that are used again.
    copies = []
    for node in new_nodes:
        copies.append(NodeProto())
        copies[-1].CopyFrom(node)
        # ORT names the copies that it makes for recomputation after the nodes.
        copies[-1].name = node.name or next(filter(None, node.output), "")
    onnx_graph.ClearField("node")
    onnx_graph.node.extend(copies)
