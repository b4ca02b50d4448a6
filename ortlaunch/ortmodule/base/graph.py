"""The contents of a graph that ONNX Runtime executes: its nodes by operator, and calls out of ORT.

Nodes are counted apart for the forward and the backward pass. The graph is read as the session runs
it, after every optimization; `replace_nodes` also changes the nodes of a graph before that. The
module does not depend on ORTModule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ortlaunch.json_types import Json

if TYPE_CHECKING:
    import onnx

# Ends the forward pass of a training graph.
_YIELD = "YieldOp"
# Operators listed in engine.json for each half; more would hide the important ones.
_MOST = 8


class ShapeInferenceError(RuntimeError):
    """A failure of ONNX Runtime's shape inference at `operator`.

    The operator is an ONNX name or, of an ATen node, torch's.
    """

    def __init__(self, operator: str, cause: Exception) -> None:
        why = f"{type(cause).__name__} {cause}".strip()
        super().__init__(f"ONNX Runtime cannot infer the shape of {operator}'s result ({why})")
        self.operator = operator


@dataclass
class Graph:
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
    def nodes_run(self) -> int:
        """The number of nodes executed so far."""
        return size(self.forward) * self.forward_passes + size(self.backward) * self.backward_passes

    def describe(self) -> Json:
        """Return the entry for engine.json: totals, frequent operators, and every call out of ORT."""
        halves = (
            {"forward": self.forward, "backward": self.backward}
            if self.training
            else {"forward": self.forward}
        )
        nodes = {f"{half}_nodes": size(ops) for half, ops in halves.items()}
        frequent = {
            f"{half}_operators": dict(ops.most_common(_MOST)) for half, ops in halves.items()
        }
        placed = {"provider": self.provider, "nodes_by_provider": self.nodes_by_provider}
        return {
            **nodes,
            **placed,
            **frequent,
            "aten": dict(self.aten),
            "python": dict(self.python),
            "triton": dict(self.triton),
        }


def size(operators: Counter[str]) -> int:
    """Return the number of nodes; Counter.total came with Python 3.10."""
    return sum(operators.values())


def read_graph(model: onnx.ModelProto, training: bool, memory_efficient: bool) -> Graph:
    """Count the nodes of an executed graph.

    model: an onnx.ModelProto that a session saved; its nodes are in ORT's default order.
    memory_efficient: the session runs the nodes in ORT's memory-efficient order, in which nodes
        that only the backward pass needs come after the forward pass.
    """
    nodes = list(model.graph.node)
    names = [node.op_type for node in nodes]
    first = set(range(len(nodes)))
    if training and memory_efficient:
        first = _needed(nodes, names.index(_YIELD))
    elif training:
        first = set(range(names.index(_YIELD)))
    rest = set(range(len(nodes))) - first
    return Graph(
        training,
        Counter(names[i] for i in first if names[i] != _YIELD),
        Counter(names[i] for i in rest if names[i] != _YIELD),
        aten=_called(nodes, "operator", "ATen"),
        python=_called(nodes, "func_name", "PythonOp", "PythonOpGrad"),
        triton=_called(nodes, "func_name", "TritonOp"),
    )


def _needed(nodes: Sequence[onnx.NodeProto], end: int) -> set[int]:
    """Return `end`, the nodes that it needs, and the nodes that read the shapes of their results.

    ORT reads shapes as soon as it can, so these run in the forward half.
    """
    maker = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    found: set[int] = set()
    waiting = [end]
    while waiting:
        i = waiting.pop()
        if i not in found:
            found.add(i)
            waiting.extend(maker[name] for name in nodes[i].input if name in maker)
    shapes = (i for i, node in enumerate(nodes) if node.op_type in ("Shape", "Size"))
    # The output of `end` is the gradient with which the backward pass begins.
    needed = found - {end}
    return found | {i for i in shapes if all(maker.get(name) in needed for name in nodes[i].input)}


def _called(nodes: Sequence[onnx.NodeProto], attribute: str, *kinds: str) -> Counter[str]:
    return Counter(_attribute(node, attribute) for node in nodes if node.op_type in kinds)


def _attribute(node: onnx.NodeProto, name: str) -> str:
    return next(
        (str(attribute.s.decode()) for attribute in node.attribute if attribute.name == name),
        node.op_type,
    )


def replace_nodes(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Replace the nodes of an onnx.GraphProto.

    The new list may contain the graph's own nodes.
    """
    from onnx import NodeProto

    # Protobuf frees the old nodes with the list, including those that are used again.
    copies = []
    for node in nodes:
        copies.append(NodeProto())
        copies[-1].CopyFrom(node)
        # ORT names the copies that it makes for recomputation after the nodes.
        copies[-1].name = node.name or next(filter(None, node.output), "")
    graph.ClearField("node")
    graph.node.extend(copies)
