"""Operators that ONNX Runtime 1.19.2 derives, and a check that a gradient passes an exported graph.

ORT's registry has no interface for a query, so the names are listed here. Where the list names an
operator too many, ORT finds that when it builds the gradient (operator_translation.py handles it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

# ONNX operators for which ORT 1.19.2 registers a gradient builder.
_NAMES = """
    ATen Abs Add AveragePool BatchNormalization BiasGelu Cast Clip Concat Constant Conv ConvTranspose Cos Div Dropout
    Erf Exp Expand FastGelu Flatten GRU Gather GatherElements GatherND Gelu Gemm GlobalAveragePool Identity LSTM
    LayerNormalization LeakyRelu Log LogSoftmax MatMul MatMulBnb4 Max MaxPool Min Mul Neg Pad Pow PythonOp QuickGelu
    Reciprocal ReduceL2 ReduceLogSumExp ReduceMean ReduceSum Relu Reshape Resize ScatterElements ScatterND Sigmoid
    SimplifiedLayerNormalization Sin Slice Softmax SoftmaxCrossEntropyLoss SoftmaxCrossEntropyLossInternal Split Sqrt
    Squeeze Sub Tanh Tile TopK Transpose Trilu Unsqueeze Where
"""
_DERIVED_OPERATORS = frozenset(_NAMES.split())
# No operator has as many inputs: stands for "all of them".
_ALL_POSITIONS = range(99)
# Inputs, by position, that get no gradient, such as indices, shapes and masks.
INPUTS_WITHOUT_GRADIENT: dict[str, Sequence[int]] = {
    "Pow": (1,),
    "Gather": (1,),
    "GatherElements": (1,),
    "GatherND": (1,),
    "Reshape": (1,),
    "Expand": (1,),
    "Dropout": (1, 2),
    "Slice": (1, 2, 3, 4),
    "SoftmaxCrossEntropyLoss": (1, 2),
    "SoftmaxCrossEntropyLossInternal": (1, 2, 3),
    "ScatterElements": (1,),
    "ScatterND": (1,),
    "Where": (0,),
    "BatchNormalization": (3, 4),
    "Clip": (1, 2),
    "Pad": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Resize": (1, 2, 3),
    "Split": (1,),
    "Squeeze": (1,),
    "Unsqueeze": (1,),
    "ReduceSum": (1,),
    "Trilu": (1,),
    **dict.fromkeys(
        (
            "And", "ArgMax", "ArgMin", "ConstantOfShape", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN",
            "Less", "LessOrEqual", "NonZero", "Not", "OneHot", "Or", "RandomNormalLike", "RandomUniformLike", "Range",
            "Shape", "Size", "Xor",
        ),
        _ALL_POSITIONS,
    ),
}  # fmt: skip
# Inputs for which torch computes a gradient and ORT does not: the exponent, the bounds.
_WRONG_INPUTS: dict[str, Sequence[int]] = {"Pow": (1,), "Clip": (1, 2)}
# Gradients of a scatter are right or wrong by its `reduction` (see
# GradientPaths._inputs_whose_ort_gradient_is_missing_or_wrong).
_PARTLY_CORRECT = {*_WRONG_INPUTS, "ScatterElements", "ScatterND"}
SILENTLY_WRONG = {*_PARTLY_CORRECT, "LeakyRelu"}
"""Operators whose gradient may be wrong without an error from ORT."""
_FLOATS = ("Float", "Double", "Half", "BFloat16")


class GradientPaths:
    """The paths of gradients of the model's weights and inputs in a graph that is being written.

    is_trained: whether an input of the graph, by name, gets a gradient.
    device: cpu or cuda; their kernels differ.
    """

    def __init__(self, is_trained_input_name: Callable[[str], bool], device_type: str) -> None:
        self._is_trained = is_trained_input_name
        self._device = device_type
        self._reached_by_id: dict[int, bool] = {}

    def depends_on_trained_input(self, graph_value: torch.Value) -> bool:
        """Return whether a value of the graph depends, with a gradient, on a trained input."""
        pending = [graph_value]
        while pending:
            current_value = pending[-1]
            unresolved_inputs = (
                []
                if current_value.unique() in self._reached_by_id
                else [
                    i
                    for i in _inputs_that_gradient_passes_to(current_value)
                    if i.unique() not in self._reached_by_id
                ]
            )
            if unresolved_inputs:
                pending += unresolved_inputs
                continue
            pending.pop()
            if current_value.unique() not in self._reached_by_id:
                self._reached_by_id[current_value.unique()] = self._depends_by_resolved_inputs(
                    current_value
                )
        return self._reached_by_id[graph_value.unique()]

    def _depends_by_resolved_inputs(self, graph_value: torch.Value) -> bool:
        """Return whether a value with known inputs depends on a trained input."""
        if graph_value.node().kind() == "prim::Param":
            return self._is_trained(graph_value.debugName())
        return any(
            self._reached_by_id[input_value.unique()]
            for input_value in _inputs_that_gradient_passes_to(graph_value)
        )

    def name_of_operator_blocking_gradient_or_empty(
        self, new_graph_nodes: Sequence[torch.Node], output_values: Iterable[torch.Value | None]
    ) -> str:
        """Return the first ONNX operator among new nodes that blocks ORT's gradient, or "".

        new_graph_nodes: nodes that the exporter has just written.
        output_values: results of these nodes.
        """
        if all(
            _ort_computes_correct_gradient(node, self._device)
            and _operator_name(node) not in _PARTLY_CORRECT
            for node in new_graph_nodes
        ):
            return ""
        # The search ends at the new nodes: older ones were checked when they were written.
        new_value_ids = {value.unique() for node in new_graph_nodes for value in node.outputs()}
        pending = [
            value
            for value in output_values
            if value is not None and _is_float_or_unknown_type(value)
        ]
        visited_ids: set[int] = set()
        while pending:
            value = pending.pop()
            if value.unique() in visited_ids or value.unique() not in new_value_ids:
                continue
            visited_ids.add(value.unique())
            input_values = list(_inputs_that_gradient_passes_to(value))
            lost_inputs = (
                self._inputs_whose_ort_gradient_is_missing_or_wrong(value.node())
                if _ort_computes_correct_gradient(value.node(), self._device)
                else input_values
            )
            if any(map(self.depends_on_trained_input, lost_inputs)):
                return _operator_name(value.node())
            pending += input_values
        return ""

    def _inputs_whose_ort_gradient_is_missing_or_wrong(
        self, graph_node: torch.Node
    ) -> list[torch.Value]:
        """Return the inputs of a derived operator whose gradient ORT omits or computes wrongly."""
        name = _operator_name(graph_node)
        inputs = list(graph_node.inputs())
        # ORT does not sum up the gradient of a broadcast exponent or base.
        if name == "Pow" and not _is_single_nonzero_constant(inputs[1]):
            return inputs
        if name in ("ScatterElements", "ScatterND") and "reduction" in graph_node.attributeNames():
            # Other reductions (mul, min, max) have no correct gradient at all.
            return {"none": [], "add": inputs[:1]}.get(
                _text_attribute_or_default(graph_node, "reduction", "none"), inputs
            )
        return [
            inputs[position] for position in _WRONG_INPUTS.get(name, ()) if position < len(inputs)
        ]


def is_valid_if_transpose_or_layer_norm(graph_node: torch.Node) -> bool:
    """Return whether a node that the exporter wrote is valid ONNX.

    The exporter also writes a LayerNormalization without weights, and negative dimensions.
    """
    if _operator_name(graph_node) == "Transpose" and "perm" in graph_node.attributeNames():
        return min(getattr(graph_node, "is")("perm"), default=0) >= 0
    return _operator_name(graph_node) != "LayerNormalization" or not any(
        input_value.node().mustBeNone() for input_value in graph_node.inputs()
    )


def _ort_computes_correct_gradient(graph_node: torch.Node, device_type: str) -> bool:
    """Return whether ORT derives a node correctly, by its operator, attributes and rank.

    ORT's gradient builders and kernels ignore some attributes of their operators.
    """
    name = _operator_name(graph_node)
    if (
        # ORT's gradient takes the sign of the output, which equals the input's only for alpha >= 0.
        name == "LeakyRelu" and "alpha" in graph_node.attributeNames()
    ):
        return bool(graph_node.f("alpha") >= 0)
    if name in ("GRU", "LSTM"):
        return _text_attribute_or_default(graph_node, "direction", "forward") == "forward"
    # Without a bias the gradient node has two outputs of one name.
    if name == "LayerNormalization":
        return len(list(graph_node.inputs())) > 2 and is_valid_if_transpose_or_layer_norm(
            graph_node
        )
    # Without keepdims their gradient uses an Unsqueeze of an older opset.
    if name in ("ReduceL2", "ReduceLogSumExp"):
        return "keepdims" not in graph_node.attributeNames() or bool(graph_node.i("keepdims"))
    if name == "Pad":
        return _text_attribute_or_default(graph_node, "mode", "constant") == "constant"
    if name in (
        "AveragePool",
        "MaxPool",
    ):
        # For other ranks, or with the positions as second output, ORT gives a wrong shape or
        # crashes.
        return _first_input_rank_or_none(graph_node) == 4 and graph_node.outputsSize() == 1
    if name == "ConvTranspose":
        return device_type != "cpu"
    if name == "Conv" and "group" in graph_node.attributeNames() and int(graph_node.i("group")) > 1:
        # On the CPU, the gradient of a grouped Conv3d overwrites other tensors.
        return device_type != "cpu" or _first_input_rank_or_none(graph_node) != 5
    return name in _DERIVED_OPERATORS


def _text_attribute_or_default(
    graph_node: torch.Node, attribute_name: str, default_text: str
) -> str:
    return (
        str(graph_node.s(attribute_name))
        if attribute_name in graph_node.attributeNames()
        else default_text
    )


def _first_input_rank_or_none(graph_node: torch.Node) -> int | None:
    value_type = next(graph_node.inputs()).type()
    rank: int | None = value_type.dim() if isinstance(value_type, torch._C.TensorType) else None
    return rank


def _inputs_that_gradient_passes_to(graph_value: torch.Value) -> list[torch.Value]:
    """Return the values that a value is computed from, where a gradient can pass."""
    node = graph_value.node()
    # An If has no data inputs: its branches use values of the surrounding graph.
    if any(True for _ in node.blocks()):
        return [
            input_value
            for block in node.blocks()
            for inner in block.nodes()
            for input_value in inner.inputs()
        ]
    stopped_positions = (
        _ALL_POSITIONS
        if _is_cast_to_non_float(node) or _is_detached(node)
        else INPUTS_WITHOUT_GRADIENT.get(_operator_name(node), ())
    )
    return [
        input_value
        for position, input_value in enumerate(node.inputs())
        if position not in stopped_positions
    ]


def _is_single_nonzero_constant(graph_value: torch.Value) -> bool:
    """Return whether a value is one known number other than 0."""
    node = graph_value.node()
    while node.kind() == "onnx::Cast":
        node = node.input().node()
    constant = (
        node.t("value")
        if node.kind() == "onnx::Constant" and "value" in node.attributeNames()
        else torch.zeros(0)
    )
    return bool(constant.numel() == 1 and constant.item() != 0)


def _is_cast_to_non_float(graph_node: torch.Node) -> bool:
    # ONNX's types 1, 10, 11 and 16 are float, float16, double and bfloat16.
    """Return whether a node casts to a type other than floating point."""
    return bool(graph_node.kind() == "onnx::Cast" and graph_node.i("to") not in (1, 10, 11, 16))


def _is_detached(node: torch.Node) -> bool:
    """Return whether a node is one that elementwise_forms.detach writes."""
    return (
        _operator_name(node) == "ATen"
        and _text_attribute_or_default(node, "operator", "") == "clone"
    )


def _is_float_or_unknown_type(graph_value: torch.Value) -> bool:
    scalar_type = (
        graph_value.type().scalarType()
        if isinstance(graph_value.type(), torch._C.TensorType)
        else None
    )
    return scalar_type is None or scalar_type in _FLOATS


def _operator_name(node: torch.Node) -> str:
    return str(node.kind()).rpartition("::")[2]
