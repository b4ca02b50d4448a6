"""Name the gradients of frozen weights that a kernel computes in any case.

ORT gives such an output of a node no name. Its kernels of LSTMGrad and GRUGrad then write to a null
pointer, and the process crashes; a call of torch's operator fails.

ORT's definition of GroupNorm's gradient begins with a constant, which ORT leaves out where the
first input has no gradient. It is replaced by one without the constant.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ortmodule._internal.base.repair_registry import TRAINING, repair
from ortmodule._internal.torch_in_graph import attention_operator, own_operators

if TYPE_CHECKING:
    import onnx

    from ortmodule._internal.base.ort_types import AnyFunction, Manager

# Positions of the outputs that the kernel always computes, by operator of ORT or torch.
_COMPUTED_OUTPUTS = {
    "LSTMGrad": (1, 2),
    "GRUGrad": (1, 2),
    own_operators.GROUP_NORM_BACKWARD: (0, 1, 2),
    attention_operator.BACKWARD: (0, 1, 2),
}
# ONNX's codes of float32, float16, float64 and bfloat16.
_FLOATS = (1, 10, 11, 16)


@repair("name_frozen_gradients", "install", 150)
def register_group_norm_gradient() -> None:
    """Replace ORT's definition of GroupNorm's gradient."""
    own_operators.define_gelu_gather_conv_norm_operators_once()
    module: Any = importlib.import_module(
        "onnxruntime.training.ortmodule._custom_gradient_registry"
    )
    operator = "org.pytorch.aten", "ATen", ("native_group_norm", "")
    module.CustomGradientRegistry.register(*operator, _create_group_norm_gradient_definition)


def _create_group_norm_gradient_definition() -> list[tuple[Any, ...]]:
    """Return the definition of GroupNorm's gradient, in the form of ORT's registry."""
    # GO is the gradient of an output, GI that of an input, I an input, O an output.
    inputs = [
        "GO(0)",
        "I(0)",
        "O(1)",
        "O(2)",
        "I(1)",
        *(f"I({input_index})" for input_index in range(3, 7)),
    ]
    attributes = {"operator": {"value": own_operators.GROUP_NORM_BACKWARD, "dtype": "string"}}
    return [(("ATen", "org.pytorch.aten"), inputs, ["GI(0)", "GI(1)", "GI(2)"], attributes)]


@repair(
    "name_frozen_gradients",
    "install",
    150,
    replaces=f"{TRAINING}._build_graph",
    fault="A gradient through an `nn.LSTM` or `nn.GRU` with a frozen weight ends the process on "
    "a CPU (SIGSEGV), and one through an `nn.GroupNorm` with a frozen weight ends the pass "
    "(`invalid index -1`).",
    example="graph_repairs/test_frozen_weights.py::test_a_gradient_passes_a_frozen_layer[GroupNorm-layer]",
    sources={
        f"{TRAINING}._build_graph": "f83f91604f964faf",
    },
)
def _build_graph_and_name_computed_gradients(
    original_build: AnyFunction, manager: Manager, *args: object
) -> None:
    original_build(manager, *args)
    graph = manager._onnx_models.optimized_model.graph
    for node in graph.node:
        _name_and_declare_unnamed_computed_outputs(graph, node)


def _name_and_declare_unnamed_computed_outputs(
    onnx_graph: onnx.GraphProto, gradient_node: onnx.NodeProto
) -> None:
    from onnx import helper

    aten_names = (
        attribute.s.decode()
        for attribute in gradient_node.attribute
        if attribute.name == "operator"
    )
    positions = _COMPUTED_OUTPUTS.get(next(aten_names, gradient_node.op_type), ())
    outputs = [*gradient_node.output, "", ""]
    unnamed_positions = [position for position in positions if not outputs[position]]
    if not unnamed_positions:
        return
    values = (*onnx_graph.value_info, *onnx_graph.input)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    # All floating-point inputs have one type.
    float_type = next(
        (types[name] for name in gradient_node.input if types.get(name) in _FLOATS), _FLOATS[0]
    )
    for position in unnamed_positions:
        outputs[position] = f"{gradient_node.name}_{position}"
        onnx_graph.value_info.append(
            helper.make_tensor_value_info(outputs[position], float_type, None)
        )
    gradient_node.output[:] = outputs[: max(len(gradient_node.output), positions[-1] + 1)]
