"""Cross entropy of a training graph on the CPU by torch's kernels, called from inside the graph.

ORT's own CPU kernels do most of it on one thread: a sixth of a step of a small Llama. The operators here are torch's
(ATen nodes), with the same inputs and outputs; whatever does not look as expected is left to ORT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ortlaunch.worker.ort.compat import wrap_method
from ortlaunch.worker.ort.known import TRAINING, owner

_FORWARD, _BACKWARD = "SoftmaxCrossEntropyLossInternal", "SoftmaxCrossEntropyLossInternalGrad"
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}  # torch's numbers
_FLOAT = 6  # torch's number of the type
_CLASSES = 1  # the dimension


def compute_cross_entropy_in_torch() -> None:
    """ORT's cross entropy on the CPU is slow, and takes a label that is no class for whatever lies in memory there."""
    wrap_method(owner(TRAINING), "_build_graph", _building)


def _building(original: Callable[..., Any], manager: Any, *args: Any) -> None:
    original(manager, *args)
    if manager._device.type == "cpu":
        replace(manager._onnx_models.optimized_model.graph)


def replace(graph: Any) -> None:
    """Put torch's operators in place of ORT's, in an onnx.GraphProto with a forward and a backward pass."""
    from onnx import NodeProto

    types = {value.name: value.type.tensor_type for value in (*graph.value_info, *graph.input, *graph.output)}
    losses = {node.output[1]: node for node in graph.node if node.op_type == _FORWARD and _fits(node, types)}
    nodes: list[Any] = []
    made: dict[str, tuple[int, ...] | None] = {}
    for node in graph.node:
        found = [node]
        if node.op_type == _FORWARD and node.output[1] in losses:
            found = list(_forward(node))
            made[_total(node)] = ()
        elif node.op_type == _BACKWARD and node.input[1] in losses:
            found = list(_backward(node, losses[node.input[1]]))
            made[_picked(node)] = None
        for each in found:  # a node that stays in the graph is freed with it
            kept = NodeProto()
            kept.CopyFrom(each)
            nodes.append(kept)
    graph.ClearField("node")
    graph.node.extend(nodes)
    graph.value_info.extend(_value(name, shape) for name, shape in made.items())


def _fits(node: Any, types: Mapping[str, Any]) -> bool:
    """Scores of one row a label, in float32, unweighted."""
    from onnx import TensorProto

    scores, probabilities = (types.get(name) for name in (node.input[0], node.output[1]))
    known = scores or probabilities
    weighted = len(node.input) > 2 and node.input[2]
    if known is None or weighted or not known.HasField("shape"):
        return False
    return bool(known.elem_type == TensorProto.FLOAT and len(known.shape.dim) == 2)


def _forward(node: Any) -> Iterator[Any]:
    """Loss, and logarithms of the probabilities, which the backward pass takes."""
    loss, logs = node.output
    given = _Constants(loss)
    yield _aten("_log_softmax", [node.input[0], given(_CLASSES), given(False)], [logs])
    inputs = [logs, node.input[1], "", given(_reduction(node)), _ignored(node, 3, given)]
    yield _aten("nll_loss_forward", inputs, [loss, _total(node)])
    yield from given.nodes


def _backward(node: Any, forward: Any) -> Iterator[Any]:
    gradient, logs, labels = node.input[:3]
    given = _Constants(node.output[0])
    ignored = _ignored(node, 4, given)
    inputs = [gradient, logs, labels, "", given(_reduction(forward)), ignored, _total(forward)]
    yield _aten("nll_loss_backward", inputs, [_picked(node)])
    inputs = [_picked(node), logs, given(_CLASSES), given(_FLOAT)]
    yield _aten("_log_softmax_backward_data", inputs, [node.output[0]])
    yield from given.nodes


def _total(forward: Any) -> str:
    return f"{forward.output[0]}_total_weight"


def _picked(backward: Any) -> str:
    return f"{backward.output[0]}_of_the_labels"


def _reduction(node: Any) -> int:
    named = [attribute.s.decode() for attribute in node.attribute if attribute.name == "reduction"]
    return _REDUCTIONS[named[0] if named else "mean"]


def _ignored(node: Any, place: int, given: _Constants) -> str:
    return str(node.input[place]) if len(node.input) > place and node.input[place] else given(-100)


class _Constants:
    """Scalars that become nodes of the graph."""

    def __init__(self, prefix: str) -> None:
        self.nodes: list[Any] = []
        self._prefix = prefix

    def __call__(self, value: int) -> str:
        from onnx import TensorProto, helper

        name = f"{self._prefix}_constant_{len(self.nodes)}"
        kind = TensorProto.BOOL if isinstance(value, bool) else TensorProto.INT64
        self.nodes.append(helper.make_node("Constant", [], [name], value=helper.make_tensor(name, kind, [], [value])))
        return name


def _aten(operator: str, inputs: list[str], outputs: list[str]) -> Any:
    from onnx import helper

    name = f"{outputs[0]}_{operator}"
    return helper.make_node("ATen", inputs, outputs, name, None, "org.pytorch.aten", operator=operator)


def _value(name: str, shape: tuple[int, ...] | None) -> Any:
    from onnx import TensorProto, helper

    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
