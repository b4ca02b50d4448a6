"""Sizes that are formulas, infinite constants and our operators, at which ORT's inference fails."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any
from unittest import mock

from ortlaunch.ortmodule.base import patching
from ortlaunch.ortmodule.base.graph import ShapeInferenceError
from ortlaunch.ortmodule.torch_in_graph import attention_operator, head_loss

if TYPE_CHECKING:
    import onnx

    from ortlaunch.ortmodule.base.ort_types import AnyFunction, ShapeInference


def infer_symbolic_sizes() -> None:
    """Let ORT's shape inference handle sizes that are formulas.

    It mistakes formulas for names, or queries properties that SymPy cannot determine. It also gives
    every output of an operator that it does not know the type of the first input.
    """
    inference = _module().SymbolicShapeInference
    patching.wrap_method(inference, "__init__", _with_own_operators)
    patching.wrap_method(inference, "_infer_aten_upsample", _upsampled)
    patching.wrap_method(inference, "_infer_Slice", _sliced)
    patching.wrap_method(inference, "_infer_Split_Common", _split)
    patching.wrap_method(inference, "_get_int_or_float_values", _valued)
    # The last two only name the operator in errors.
    patching.wrap_method(inference, "_onnx_infer_single_node", _noted)
    patching.wrap_method(inference, "_infer_impl", _named)


def _module() -> Any:
    return importlib.import_module("onnxruntime.tools.symbolic_shape_infer")


def _with_own_operators(
    original: AnyFunction, inference: ShapeInference, *args: object, **kwargs: object
) -> None:
    original(inference, *args, **kwargs)
    for name, infer in ((head_loss.OPERATOR, _head_loss), (attention_operator.FORWARD, _attention)):
        inference.aten_op_dispatcher_[name] = functools.partial(infer, inference)


def _head_loss(inference: ShapeInference, node: onnx.NodeProto) -> None:
    """Infer a chunked loss, of which only the gradient of `hidden` has the type of `hidden`."""
    own, exact = _kinds(inference, node)
    hidden, weight = (inference._get_shape(node, place) for place in (0, 1))
    # A gradient that is not wanted is empty.
    gradients = (
        shape if inference._try_get_value(node, place) else [0]
        for place, shape in ((5, hidden), (6, weight), (7, weight[:1]))
    )
    _set_types(inference, node, (exact, own, exact, exact, exact), [[], *gradients, []])


def _attention(inference: ShapeInference, node: onnx.NodeProto) -> None:
    """Infer attention, of shape (batch, length, heads, size), and its log-sum-exp of the scores."""
    swapped = int(inference._try_get_value(node, 6))
    shapes = [inference._get_shape(node, place) for place in range(3)]
    # The query, and likewise keys and values, may be shared by all samples.
    batch = next((shape[0] for shape in shapes if shape[0] != 1), 1)
    query, value = shapes[0], shapes[2]
    lengths = query[1:3] if swapped & 1 else query[2:0:-1]
    sums = [str(one) for one in inference._new_symbolic_shape(3, node, 1)]
    _set_types(inference, node, _kinds(inference, node), ([batch, *lengths, value[3]], sums))


def _kinds(inference: ShapeInference, node: onnx.NodeProto) -> tuple[int, int]:
    """Return the type of the first input, and the same in float32 or above."""
    types = importlib.import_module("onnx").TensorProto
    own = inference.known_vi_[node.input[0]].type.tensor_type.elem_type
    return own, own if own == types.DOUBLE else types.FLOAT


def _set_types(inference: ShapeInference, node: onnx.NodeProto, kinds: Any, shapes: Any) -> None:
    """Record the types and the shapes of a node's outputs."""
    make = importlib.import_module("onnx").helper.make_tensor_value_info
    for name, kind, shape in zip(node.output, kinds, shapes):
        inference.known_vi_[name].CopyFrom(make(name, kind, shape))


def _upsampled(original: AnyFunction, inference: ShapeInference, node: onnx.NodeProto) -> None:
    """Infer an upsampled image whose new size follows from the input's, such as half of it."""
    sizes = inference._try_get_value(node, 1)
    names = {}
    if isinstance(sizes, list):
        sizes = list(sizes)
        inference._update_computed_dims(sizes)
        names[node.input[1]] = _module().get_shape_from_sympy_shape(sizes)
    with mock.patch.dict(inference.sympy_data_, names):
        original(inference, node)


def _sliced(original: AnyFunction, inference: ShapeInference, node: onnx.NodeProto) -> None:
    """Infer a slice up to a computed size, of which SymPy cannot determine the sign."""
    try:
        original(inference, node)
    except AssertionError:
        _give_new_sizes(inference, node, 0, inference._try_get_value(node, 3))


def _split(
    original: AnyFunction, inference: ShapeInference, node: onnx.NodeProto, *args: object
) -> None:
    """Infer the parts of a computed size, such as a batch in two."""
    try:
        original(inference, node, *args)
    except TypeError:
        # SymPy raises TypeError because a formula is no integer.
        for output in range(len(node.output)):
            _give_new_sizes(
                inference, node, output, [one.i for one in node.attribute if one.name == "axis"]
            )


def _give_new_sizes(
    inference: ShapeInference, node: onnx.NodeProto, output: int, axes: Any
) -> None:
    """Give an output the first input's shape, with new unknown sizes along `axes`."""
    shape = inference._get_shape(node, 0)
    for axis in axes:
        shape[axis] = str(
            inference._new_symbolic_dim_from_output(node, output, int(axis) % len(shape))
        )
    made = inference.known_vi_[node.output[output]]
    kind = inference.known_vi_[node.input[0]].type.tensor_type.elem_type
    made.CopyFrom(
        importlib.import_module("onnx").helper.make_tensor_value_info(made.name, kind, shape)
    )


def _valued(
    original: AnyFunction,
    inference: ShapeInference,
    node: onnx.NodeProto,
    *args: object,
    **kwargs: object,
) -> list[object]:
    """Return constants as numbers for computed sizes, with None for infinite ones and nan."""
    try:
        found: list[Any] = original(inference, node, *args, **kwargs)
    except (OverflowError, ValueError):
        return [None] * len(node.input)
    return found


def _noted(original: AnyFunction, inference: ShapeInference, node: onnx.NodeProto) -> None:
    """Record the node that is inferred next, for `_named`."""
    inference._ortlaunch_node = node
    original(inference, node)


def _named(original: AnyFunction, inference: ShapeInference, *args: object) -> Any:
    """Add the operator's name to an error of ORT's shape inference.

    The error is often an AssertionError without a text.
    """
    try:
        complete = original(inference, *args)
        # Otherwise ORT would write the graph into the current folder, and raise without a name.
        if not (complete or inference.run_ or inference.prefix_):
            raise ValueError("its size is unknown")
        return complete
    # Inference of a subgraph has already named its operator.
    except ShapeInferenceError:
        raise
    except Exception as error:
        # Set by `_noted`; None if the error came before the first node.
        node = vars(inference).get("_ortlaunch_node")
        if node is None:
            raise
        torchs = [
            attribute.s.decode() for attribute in node.attribute if attribute.name == "operator"
        ]
        raise ShapeInferenceError(
            torchs[0] if node.op_type == "ATen" and torchs else node.op_type, error
        ) from error
