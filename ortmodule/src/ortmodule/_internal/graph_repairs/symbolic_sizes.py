"""Sizes that are formulas, infinite constants and our operators, at which ORT's inference fails."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from ortmodule._internal.base.attached import InferenceRecord
from ortmodule._internal.base.graph import ShapeInferenceError
from ortmodule._internal.base.patching import replace_attribute_temporarily
from ortmodule._internal.base.repair_registry import SHAPES, repair
from ortmodule._internal.torch_in_graph import attention_operator, head_loss

if TYPE_CHECKING:
    import onnx

    from ortmodule._internal.base.ort_types import AnyFunction, ShapeInference


def _shape_inference_module() -> Any:
    return importlib.import_module("onnxruntime.tools.symbolic_shape_infer")


@repair(
    "infer_symbolic_sizes",
    "install",
    140,
    replaces=f"{SHAPES}.__init__",
    fault="Sizes that are formulas, as of half a picture or half a batch, end the export "
    "(`Invalid item in shape`), and where a size stays unknown the whole graph is written into "
    "the current folder.",
    example="graph_repairs/test_broadcasts.py::test_sizes_are_formulas[a part of it]",
    sources={
        f"{SHAPES}._infer_Slice": "321394f15641126c",
        f"{SHAPES}._infer_Split_Common": "c475321ced0d9214",
        f"{SHAPES}._infer_aten_upsample": "9eb5016911b439f2",
        f"{SHAPES}._get_int_or_float_values": "676b3db4154bcd1f",
    },
)
def _construct_inference_and_add_own_operators(
    original_init: AnyFunction, inference: ShapeInference, *args: object, **kwargs: object
) -> None:
    original_init(inference, *args, **kwargs)
    for name, infer in (
        (head_loss.OPERATOR, _infer_chunked_loss_types_and_shapes),
        (attention_operator.FORWARD, _infer_attention_types_and_shapes),
    ):
        inference.aten_op_dispatcher_[name] = functools.partial(infer, inference)


def _infer_chunked_loss_types_and_shapes(
    inference: ShapeInference, loss_node: onnx.NodeProto
) -> None:
    """Infer a chunked loss, of which only the gradient of `hidden` has the type of `hidden`."""
    own_type = _first_input_type_code(inference, loss_node)
    exact_type = _at_least_float32(own_type)
    hidden, weight = (inference._get_shape(loss_node, position) for position in (0, 1))
    # A gradient that is not wanted is empty.
    gradients = (
        shape if inference._try_get_value(loss_node, position) else [0]
        for position, shape in ((5, hidden), (6, weight), (7, weight[:1]))
    )
    _set_output_types_and_shapes(
        inference,
        loss_node,
        (exact_type, own_type, exact_type, exact_type, exact_type),
        [[], *gradients, []],
    )


def _infer_attention_types_and_shapes(
    inference: ShapeInference, attention_node: onnx.NodeProto
) -> None:
    """Infer attention, of shape (batch, length, heads, size), and its log-sum-exp of the scores."""
    own_type = _first_input_type_code(inference, attention_node)
    swapped_bits = int(inference._try_get_value(attention_node, 6))
    shapes = [inference._get_shape(attention_node, position) for position in range(3)]
    # The query, and likewise keys and values, may be shared by all samples.
    batch = next((shape[0] for shape in shapes if shape[0] != 1), 1)
    query, value = shapes[0], shapes[2]
    lengths = query[1:3] if swapped_bits & 1 else query[2:0:-1]
    sum_shape = [str(size) for size in inference._new_symbolic_shape(3, attention_node, 1)]
    _set_output_types_and_shapes(
        inference,
        attention_node,
        (own_type, _at_least_float32(own_type)),
        ([batch, *lengths, value[3]], sum_shape),
    )


def _first_input_type_code(inference: ShapeInference, onnx_node: onnx.NodeProto) -> int:
    return int(inference.known_vi_[onnx_node.input[0]].type.tensor_type.elem_type)


def _at_least_float32(type_code: int) -> int:
    tensor_types = importlib.import_module("onnx").TensorProto
    return type_code if type_code == tensor_types.DOUBLE else int(tensor_types.FLOAT)


def _set_output_types_and_shapes(
    inference: ShapeInference, onnx_node: onnx.NodeProto, type_codes: Any, output_shapes: Any
) -> None:
    make_info = importlib.import_module("onnx").helper.make_tensor_value_info
    for name, type_code, shape in zip(onnx_node.output, type_codes, output_shapes):
        inference.known_vi_[name].CopyFrom(make_info(name, type_code, shape))


@repair(
    "infer_symbolic_sizes",
    "install",
    140,
    replaces=f"{SHAPES}._infer_aten_upsample",
)
def _infer_upsample_to_computed_size(
    original_infer: AnyFunction, inference: ShapeInference, node: onnx.NodeProto
) -> None:
    """Infer an upsampled image whose new size follows from the input's, such as half of it."""
    sizes = inference._try_get_value(node, 1)
    shape_by_name = {}
    if isinstance(sizes, list):
        sizes = list(sizes)
        inference._update_computed_dims(sizes)
        shape_by_name[node.input[1]] = _shape_inference_module().get_shape_from_sympy_shape(sizes)
    with replace_attribute_temporarily(
        inference, "sympy_data_", {**inference.sympy_data_, **shape_by_name}
    ):
        original_infer(inference, node)


@repair(
    "infer_symbolic_sizes",
    "install",
    140,
    replaces=f"{SHAPES}._infer_Slice",
)
def _infer_slice_or_set_new_symbolic_sizes(
    original_infer: AnyFunction, inference: ShapeInference, node: onnx.NodeProto
) -> None:
    """Infer a slice up to a computed size, of which SymPy cannot determine the sign."""
    try:
        original_infer(inference, node)
    except AssertionError:
        _set_new_symbolic_sizes_on_axes(inference, node, 0, inference._try_get_value(node, 3))


@repair(
    "infer_symbolic_sizes",
    "install",
    140,
    replaces=f"{SHAPES}._infer_Split_Common",
)
def _infer_split_or_set_new_symbolic_sizes(
    original_infer: AnyFunction, inference: ShapeInference, node: onnx.NodeProto, *args: object
) -> None:
    """Infer the parts of a computed size, such as a batch in two."""
    try:
        original_infer(inference, node, *args)
    except TypeError:
        # SymPy raises TypeError because a formula is no integer.
        for output_index in range(len(node.output)):
            _set_new_symbolic_sizes_on_axes(
                inference,
                node,
                output_index,
                [attribute.i for attribute in node.attribute if attribute.name == "axis"],
            )


def _set_new_symbolic_sizes_on_axes(
    inference: ShapeInference, onnx_node: onnx.NodeProto, output_index: int, axes: Any
) -> None:
    """Give an output the first input's shape, with new unknown sizes along `axes`."""
    shape = inference._get_shape(onnx_node, 0)
    for axis in axes:
        shape[axis] = str(
            inference._new_symbolic_dim_from_output(onnx_node, output_index, int(axis) % len(shape))
        )
    output_info = inference.known_vi_[onnx_node.output[output_index]]
    type_code = inference.known_vi_[onnx_node.input[0]].type.tensor_type.elem_type
    output_info.CopyFrom(
        importlib.import_module("onnx").helper.make_tensor_value_info(
            output_info.name, type_code, shape
        )
    )


@repair(
    "infer_symbolic_sizes",
    "install",
    140,
    replaces=f"{SHAPES}._get_int_or_float_values",
)
def _constant_values_or_nones_if_not_finite(
    original_get_values: AnyFunction,
    inference: ShapeInference,
    node: onnx.NodeProto,
    *args: object,
    **kwargs: object,
) -> list[object]:
    """Return constants as numbers for computed sizes, with None for infinite ones and nan."""
    try:
        values: list[Any] = original_get_values(inference, node, *args, **kwargs)
    except (OverflowError, ValueError):
        return [None] * len(node.input)
    return values


@repair(
    "infer_symbolic_sizes",
    "install",
    140,
    replaces=f"{SHAPES}._onnx_infer_single_node",
)
def _record_node_and_infer_it(
    original_infer: AnyFunction, inference: ShapeInference, node: onnx.NodeProto
) -> None:
    """Record the node that is inferred next, for `_infer_or_raise_error_that_names_operator`."""
    InferenceRecord.attached_to(inference).node = node
    original_infer(inference, node)


@repair(
    "infer_symbolic_sizes",
    "install",
    140,
    replaces=f"{SHAPES}._infer_impl",
)
def _infer_or_raise_error_that_names_operator(
    original_infer: AnyFunction, inference: ShapeInference, *args: object
) -> Any:
    """Add the operator's name to an error of ORT's shape inference.

    The error is often an AssertionError without a text.
    """
    try:
        is_complete = original_infer(inference, *args)
        # Otherwise ORT would write the graph into the current folder, and raise without a name.
        if not (is_complete or inference.run_ or inference.prefix_):
            raise ValueError("its size is unknown")
        return is_complete
    # Inference of a subgraph has already named its operator.
    except ShapeInferenceError:
        raise
    except Exception as error:
        # Set by `_record_node_and_infer_it`; None if the error came before the first node.
        node = InferenceRecord.attached_to(inference).node
        if node is None:
            raise
        aten_names = [
            attribute.s.decode() for attribute in node.attribute if attribute.name == "operator"
        ]
        raise ShapeInferenceError(
            aten_names[0] if node.op_type == "ATen" and aten_names else node.op_type, error
        ) from error
