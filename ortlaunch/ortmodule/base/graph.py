"""What is in a graph that ONNX Runtime executes: its nodes by operator, forward and backward, and calls out of ORT.

Reads the graph as the session runs it, after every optimization, and sets nodes of one before. Knows nothing of
ORTModule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ortlaunch.json_types import Json

if TYPE_CHECKING:
    import onnx

_YIELD = "YieldOp"  # where the forward pass of a training graph ends
_MOST = 8


class ShapeInferenceError(RuntimeError):
    """ONNX Runtime's inference of shapes ended at `operator`, by its ONNX name or, of an ATen node, torch's."""

    def __init__(self, operator: str, cause: Exception) -> None:
        why = f"{type(cause).__name__} {cause}".strip()
        super().__init__(f"ONNX Runtime cannot infer the shape of {operator}'s result ({why})")
        self.operator = operator


@dataclass
class Graph:
    """Nodes of one graph by operator, and how often each half has run."""

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
    """Nodes on each execution provider."""
    forward_passes: int = field(default=0)
    backward_passes: int = field(default=0)

    @property
    def nodes_run(self) -> int:
        """Nodes executed so far."""
        return size(self.forward) * self.forward_passes + size(self.backward) * self.backward_passes

    def describe(self) -> Json:
        """For engine.json: totals, the most frequent operators, and every call out of ORT."""
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
        return {**nodes, **placed, **frequent, **self._calls()}

    def _calls(self) -> dict[str, dict[str, int]]:
        return {"aten": dict(self.aten), "python": dict(self.python), "triton": dict(self.triton)}


def size(operators: Counter[str]) -> int:
    """How many nodes; Counter.total came with Python 3.10."""
    return sum(operators.values())


def read_graph(model: onnx.ModelProto, training: bool, memory_efficient: bool) -> Graph:
    """Count the nodes of an executed graph.

    model: an onnx.ModelProto that a session saved; its nodes are in ORT's default order.
    memory_efficient: the session runs them in ORT's memory-efficient order, in which what only the backward pass needs
        comes after the forward pass.
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
    """`end`, nodes that it needs, and the shapes of what these make: ORT takes shapes as soon as it can."""
    maker = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    found: set[int] = set()
    waiting = [end]
    while waiting:
        i = waiting.pop()
        if i not in found:
            found.add(i)
            waiting.extend(maker[name] for name in nodes[i].input if name in maker)
    shapes = (i for i, node in enumerate(nodes) if node.op_type in ("Shape", "Size"))
    needed = found - {end}  # whose output is the gradient that the backward pass begins with
    return found | {i for i in shapes if all(maker.get(name) in needed for name in nodes[i].input)}


def _called(nodes: Sequence[onnx.NodeProto], attribute: str, *kinds: str) -> Counter[str]:
    return Counter(_attribute(node, attribute) for node in nodes if node.op_type in kinds)


def _attribute(node: onnx.NodeProto, name: str) -> str:
    return next(
        (str(attribute.s.decode()) for attribute in node.attribute if attribute.name == name),
        node.op_type,
    )


def replace_nodes(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Let an onnx.GraphProto have these nodes; they may be its own, which are freed with those that go."""
    from onnx import NodeProto

    copies = []
    for node in nodes:
        copies.append(NodeProto())
        copies[-1].CopyFrom(node)
    graph.ClearField("node")
    graph.node.extend(copies)
