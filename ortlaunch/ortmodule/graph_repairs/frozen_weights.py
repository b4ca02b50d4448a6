"""Name the gradients of frozen inputs that a kernel computes in any case.

ORT leaves them out of a node's outputs. Its kernels of LSTMGrad and GRUGrad then write without
memory, which ends the process; a call of torch's operator fails at a missing name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortlaunch.ortmodule.base.patching import wrap_method
from ortlaunch.ortmodule.base.source_guard import TRAINING, owner
from ortlaunch.ortmodule.torch_in_graph import attention_operator

if TYPE_CHECKING:
    import onnx

    from ortlaunch.ortmodule.base.ort_types import AnyFunction, Manager

# Positions of the outputs, by operator of ORT or torch. ORT reads whether the others are wanted.
_COMPUTED = {
    "LSTMGrad": (1, 2),
    "GRUGrad": (1, 2),
    "native_group_norm_backward": (0, 1, 2),
    attention_operator.BACKWARD: (0, 1, 2),
}
# ONNX's codes of float32, float16, float64 and bfloat16.
_FLOATS = (1, 10, 11, 16)


def name_frozen_gradients() -> None:
    """From now on, complete the outputs of such nodes in each training graph that ORT builds."""
    wrap_method(owner(TRAINING), "_build_graph", _building)


def _building(original: AnyFunction, manager: Manager, *args: object) -> None:
    original(manager, *args)
    graph = manager._onnx_models.optimized_model.graph
    for node in graph.node:
        _complete(graph, node)


def _complete(graph: onnx.GraphProto, node: onnx.NodeProto) -> None:
    from onnx import helper

    called = (one.s.decode() for one in node.attribute if one.name == "operator")
    places = _COMPUTED.get(next(called, node.op_type), ())
    outputs = [*node.output, "", ""]
    missing = [place for place in places if not outputs[place]]
    if not missing:
        return
    values = (*graph.value_info, *graph.input)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    # All floating-point inputs have one type.
    kind = next((types[name] for name in node.input if types.get(name) in _FLOATS), _FLOATS[0])
    for place in missing:
        outputs[place] = f"{node.name}_{place}"
        graph.value_info.append(helper.make_tensor_value_info(outputs[place], kind, None))
    node.output[:] = outputs[: max(len(node.output), places[-1] + 1)]
