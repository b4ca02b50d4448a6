"""Separate sizes in ORT's shape inference, where one may be 1 and the other not.

Where two tensors meet in a sum or product and ORT does not know their sizes, ORT assumes that the
sizes are equal. If one of them is 1, such as a size of a pool's output, the gradient of the
broadcast tensor is not summed up, and later nodes read beyond its memory. Here sizes are equal only
if they were equal in the batch of the export, as far as they follow from the model's inputs.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ortlaunch.ortmodule.base import patching
from ortlaunch.ortmodule.base.export import Export
from ortlaunch.ortmodule.base.graph import replace_nodes
from ortlaunch.ortmodule.base.source_guard import TRANSITION, owner

if TYPE_CHECKING:
    import onnx

    from ortlaunch.ortmodule.base.ort_types import (
        AnyFunction,
        Args,
        GraphInfo,
        Kwargs,
        Manager,
        ShapeInference,
    )

# Key in the graph's metadata_props, which stay with the model through ORT's passes.
_SIZES = "ortlaunch.sizes"
# ONNX operators that broadcast all of their inputs.
_BROADCASTING = {
    "Add", "And", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Or",
    "Pow", "Sub", "Sum", "Where", "Xor",
}  # fmt: skip
Shapes = Mapping[str, Sequence[object] | None]


def keep_broadcast_sizes() -> None:
    """Let ORT treat sizes as equal only where they are known to be.

    ORT's gradient of a broadcast is that of equal sizes, unless the graph contains the size 1.
    """
    inference = importlib.import_module(
        "onnxruntime.tools.symbolic_shape_infer"
    ).SymbolicShapeInference
    patching.wrap_method(inference, "_broadcast_shapes", _broadcast)
    patching.wrap_method(inference, "_check_merged_dims", _merged_where_equal)
    patching.wrap_method(inference, "_onnx_infer_single_node", _with_broadcast_sizes)
    patching.wrap_method(inference, "_infer_PythonOp", _with_own_sizes)
    patching.wrap_method(owner(TRANSITION), "_infer_shapes", _with_hidden_shapes)


def note_sizes(export: Export, model: onnx.ModelProto) -> None:
    """Write the sizes of this batch into the graph, by the names of its inputs' dimensions."""
    names = export.info.onnx_graph_input_names
    given = {
        name: value for name, value in zip(names, export.inputs) if isinstance(value, torch.Tensor)
    }
    sizes = {
        # The names by which ORT exports dynamic axes.
        f"{name}_dim{i}": size
        for name, value in given.items()
        for i, size in enumerate(value.shape)
    }
    model.metadata_props.add(key=_SIZES, value=json.dumps(sizes))


def _broadcast(
    original: AnyFunction,
    inference: ShapeInference,
    first: Sequence[object],
    second: Sequence[object],
) -> list[object]:
    """Return the sizes of two broadcast shapes; sizes that may differ get a new name."""
    # Shapes are aligned at the last dimension, and missing sizes are 1.
    rank = max(len(first), len(second))
    pairs = zip([1] * (rank - len(first)) + list(first), [1] * (rank - len(second)) + list(second))
    return [
        original(inference, [one], [other])[0] if 1 in (one, other) or _are_equal(inference, (one, other))
        else _either(inference, one, other)
        for one, other in pairs
    ]  # fmt: skip


def _merged_where_equal(
    original: AnyFunction,
    inference: ShapeInference,
    dims: Sequence[object],
    allow_broadcast: bool = True,
) -> None:
    """Merge sizes in ORT's inference only if they are known to be equal."""
    if not allow_broadcast or _are_equal(inference, [dim for dim in dims if dim not in (0, 1)]):
        original(inference, dims, allow_broadcast=allow_broadcast)


def _with_broadcast_sizes(
    original: AnyFunction, inference: ShapeInference, node: onnx.NodeProto
) -> None:
    """Infer a node, then set the sizes that the single node's inference leaves open.

    ORT would set them by merging the sizes of the inputs.
    """
    original(inference, node)
    if node.op_type not in _BROADCASTING or node.output[0] not in inference.known_vi_:
        return
    found = inference.known_vi_[node.output[0]].type.tensor_type
    shapes = [inference._get_shape(node, place) for place in range(len(node.input))]
    if not found.HasField("shape") or any(shape is None or None in shape for shape in shapes):
        return
    sizes: list[object] = []
    for shape in shapes:
        sizes = inference._broadcast_shapes(sizes, shape)
    for dim, size in zip(found.shape.dim, sizes):
        if size is not None and not dim.dim_value and dim.dim_param not in inference.symbolic_dims_:
            dim.Clear()
            setattr(dim, "dim_param" if isinstance(size, str) else "dim_value", size)


def _with_own_sizes(original: AnyFunction, inference: ShapeInference, node: onnx.NodeProto) -> None:
    """Infer a function's outputs, and name the sizes of each: ORT names those of all alike."""
    original(inference, node)
    # The first output is the function's context.
    for output, name in enumerate(node.output[2:], 2):
        dims = inference.known_vi_[name].type.tensor_type.shape.dim
        for place, dim in enumerate(dims):
            if dim.dim_param == str(inference._new_symbolic_dim_from_output(node, 0, place)):
                new = inference._new_symbolic_dim_from_output(node, output, place)
                dim.dim_param = str(new)


def _are_equal(inference: ShapeInference, dims: Sequence[object]) -> bool:
    if len(set(dims)) < 2:
        return True
    values = [_value(inference, dim) for dim in dims]
    return None not in values and len(set(values)) == 1


def _value(inference: ShapeInference, dim: Any) -> int | None:
    """Return the value of a size in the batch of the export, or None if it is unknown."""
    if not isinstance(dim, str):
        return None if dim is None else int(dim)
    known = _sizes(inference)
    if dim in known:
        return known[dim]
    # A computed size is a SymPy formula; its symbols are sizes of inputs.
    form = inference.symbolic_dims_.get(dim)
    if form is None or any(str(symbol) not in known for symbol in form.free_symbols):
        return None
    return int(form.subs({symbol: known[str(symbol)] for symbol in form.free_symbols}))


def _sizes(inference: ShapeInference) -> dict[str, int]:
    known: dict[str, int] | None = vars(inference).get("_ortlaunch_sizes")
    if known is None:
        notes = {prop.key: prop.value for prop in inference.out_mp_.metadata_props}
        # Kept on the inference object, which is one for each graph.
        known = vars(inference)["_ortlaunch_sizes"] = json.loads(notes.get(_SIZES, "{}"))
    return known


def _either(inference: ShapeInference, one: object, other: object) -> str:
    """Return a symbolic size for a dimension that has one of two sizes."""
    sympy: Any = importlib.import_module("sympy")
    names: dict[Any, str] = vars(inference).setdefault("_ortlaunch_either", {})
    # The same two sizes always give the same name, or equal results would count as different.
    name = names.setdefault(frozenset((one, other)), f"broadcast_size_{len(names)}")
    inference.symbolic_dims_[name] = sympy.Symbol(name, integer=True, nonnegative=True)
    return name


# -------------------------------------------------------------------------------------------- in the graph


def _with_hidden_shapes(original: AnyFunction, model: onnx.ModelProto) -> object:
    """Hide shapes from ORT's gradient builder where sizes that may differ meet.

    If one of the shapes is unknown, ORT's gradient reads the sizes in each pass.
    """
    inferred = original(model)
    graph = inferred.graph
    nodes = []
    values = {value.name: value for value in (*graph.input, *graph.value_info, *graph.output)}
    known = {name: _dims(value) for name, value in values.items()}
    known.update({tensor.name: list(tensor.dims) for tensor in graph.initializer})
    fixed = {tensor.name for tensor in graph.initializer if tensor.name not in values}
    for node in graph.node:
        # Constants, shapes, and values computed from constants alone have no gradient.
        if node.op_type in ("Constant", "ConstantOfShape", "Shape") or (
            node.input and fixed.issuperset(node.input)
        ):
            fixed.update(node.output)
        for place in _unsure(node, known):
            nodes += hide(node, place)
        places = [place for place in _spread(node, known) if node.input[place] not in fixed]
        if places:
            nodes += _expand(node, places, known)
        nodes.append(node)
    if len(nodes) != len(graph.node):
        replace_nodes(graph, nodes)
    return inferred


def hide(node: onnx.NodeProto, place: int) -> list[onnx.NodeProto]:
    """Pass an input of a node through a Reshape to the shape that it has in each pass.

    The Reshape hides the shape from ORT, and changes no values.
    """
    from onnx import helper

    name = f"{node.output[0]}_ortlaunch_{place}"
    given, node.input[place] = node.input[place], name
    return [
        helper.make_node("Shape", [given], [f"{name}_shape"]),
        # Without allowzero, a size of 0 would mean "as in the input".
        helper.make_node("Reshape", [given, f"{name}_shape"], [name], allowzero=1),
    ]


def _spread(node: onnx.NodeProto, known: Shapes) -> list[int]:
    """Return the inputs that a Where broadcasts or may broadcast.

    ORT's gradient for such an input has the size of the result.
    """
    if node.op_type != "Where":
        return []
    size = known.get(node.output[0])
    return [
        place
        for place in (1, 2)
        if size is None or "" in size or known.get(node.input[place]) != size
    ]


def _expand(node: onnx.NodeProto, places: Sequence[int], known: Shapes) -> list[onnx.NodeProto]:
    """Broadcast these inputs of a Where before it, by a node whose gradient ORT sums up correctly."""
    from onnx import NodeProto, helper

    nodes = []
    shape = f"{node.output[0]}_ortlaunch_shape"
    size = known.get(node.output[0])
    whole = next(
        (name for name in node.input if size is not None and known.get(name) == size), None
    )
    if whole is None:
        # No input has the result's size, so a copy of the node computes the result for its shape.
        whole = f"{node.output[0]}_ortlaunch_whole"
        nodes.append(NodeProto())
        nodes[-1].CopyFrom(node)
        nodes[-1].output[0] = whole
        nodes[-1].name = whole
    nodes.append(helper.make_node("Shape", [whole], [shape]))
    for place in places:
        nodes += hide(node, place)
        name = f"{node.input[place]}_expanded"
        nodes.append(helper.make_node("Expand", [node.input[place], shape], [name]))
        node.input[place] = name
    return nodes


def _dims(value: onnx.ValueInfoProto) -> list[str | int] | None:
    """Return the sizes of a value by number or name, "" for an unknown one; None without a shape."""
    found = value.type.tensor_type
    return (
        [dim.dim_value or dim.dim_param for dim in found.shape.dim]
        if found.HasField("shape")
        else None
    )


def _unsure(node: onnx.NodeProto, known: Shapes) -> list[int]:
    """Return the inputs whose shapes must be hidden because they may be broadcast.

    For most operators it is enough to hide one of two inputs.
    """
    operator = node.op_type
    if operator not in (_BROADCASTING - {"Where"}) | {"Expand", "MatMul"}:
        return []
    # The result's shape is that of the Expand; the input may be smaller.
    names = [node.input[0], node.output[0]] if operator == "Expand" else [*node.input]
    shapes = [shape for name in names if (shape := known.get(name)) is not None]
    # The last two dimensions of a MatMul are not broadcast.
    batch = [shape[:-2] if operator == "MatMul" else shape for shape in shapes]
    if len(shapes) < len(names) or not _may_differ(*batch):
        return []
    if operator == "Expand":
        return [0]
    places = range(len(names))
    if operator in ("Max", "Min"):
        # Their gradient compares each input with the result.
        return [*places]
    # A shape of numbers alone cannot be hidden: ORT computes its Shape in advance.
    shown = next((at for at in places if all(isinstance(size, int) for size in batch[at])), 0)
    return [place for place in places if place != shown]


def _may_differ(*shapes: Sequence[object]) -> bool:
    """Return whether one size may be 1 where another is not, without a 1 in the graph."""
    rank = max(map(len, shapes))
    padded: list[list[object]] = [[1] * (rank - len(shape)) + list(shape) for shape in shapes]
    sizes = [set(column) - {1} for column in zip(*padded)]
    return any(len(column) > 1 for column in sizes)


# ------------------------------------------------------------------------------------------- in later batches


def apart(manager: Manager, args: Args, kwargs: Kwargs) -> bool:
    """Return whether this batch breaks an equality of sizes that the graph assumes.

    Sizes that were equal in the batch of the export differ in this batch, and one of them is 1. Both
    are sizes of inputs, or one is a number in the graph.
    """
    info = manager._graph_transition_manager._post_export_processed_model_info
    return any(_are_apart(info, group, args, kwargs) for group in _groups(info))


def _are_apart(
    info: GraphInfo, group: Sequence[tuple[str, int]], args: Args, kwargs: Kwargs
) -> bool:
    read = info.onnx_graph_input_data_accessor_user_defined
    # The accessors read the batch's arguments in the form in which the caller passed them.
    given = [(read[name](args, kwargs), axis) for name, axis in group]
    ones = [
        value.shape[axis] == 1
        for value, axis in given
        if isinstance(value, torch.Tensor) and value.dim() > axis
    ]
    # A dimension alone in its group was equal to a number above 1.
    return any(ones) and (len(group) == 1 or not all(ones))


def _groups(info: GraphInfo) -> list[list[tuple[str, int]]]:
    """Return the groups of dimensions of the model's inputs that its graph assumes to be equal.

    A dimension that it assumes to be equal to a number is a group of its own.
    """
    # Computed once for a graph: this runs before each pass.
    found: list[list[tuple[str, int]]] | None = vars(info).get("_ortlaunch_equal")
    if found is None:
        places: dict[str, list[tuple[str, int]]] = {}
        numbers: list[list[tuple[str, int]]] = []
        for value in info._post_export_processed_model.graph.input:
            for axis, dim in enumerate(value.type.tensor_type.shape.dim):
                if value.name not in info.onnx_graph_input_data_accessor_user_defined:
                    continue
                if dim.dim_param:
                    places.setdefault(dim.dim_param, []).append((value.name, axis))
                elif dim.dim_value > 1:
                    numbers.append([(value.name, axis)])
        equal = [group for group in places.values() if len(group) > 1]
        found = vars(info)["_ortlaunch_equal"] = [*equal, *numbers]
    return found
