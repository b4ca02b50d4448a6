"""Keeps apart, in ORT's inference of shapes, sizes of which one may be 1 where the other is not.

ORT takes the sizes of two tensors that meet in a sum or product for equal where it does not know them. Where one is 1,
such as those of a pool's output, the gradient of what was broadcast is not summed up, and later nodes read beyond it.
Here sizes are equal where they were so in the batch of the export, as far as they follow from the model's inputs.
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

_SIZES = "ortlaunch.sizes"
_BROADCASTING = {
    "Add", "And", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Or",
    "Pow", "Sub", "Sum", "Where", "Xor",
}  # fmt: skip
Shapes = Mapping[str, Sequence[object] | None]


def keep_broadcast_sizes() -> None:
    """ORT's gradient of a broadcast is that of equal sizes, unless a size of 1 is written in the graph."""
    inference = importlib.import_module(
        "onnxruntime.tools.symbolic_shape_infer"
    ).SymbolicShapeInference
    patching.wrap_method(inference, "_broadcast_shapes", _broadcast)
    patching.wrap_method(inference, "_check_merged_dims", _merged_where_equal)
    patching.wrap_method(inference, "_onnx_infer_single_node", _with_broadcast_sizes)
    patching.wrap_method(owner(TRANSITION), "_infer_shapes", _with_hidden_shapes)


def note_sizes(export: Export, model: onnx.ModelProto) -> None:
    """Write the sizes of this batch into the graph, under the names that its inputs' dimensions have."""
    names = export.info.onnx_graph_input_names
    given = {
        name: value for name, value in zip(names, export.inputs) if isinstance(value, torch.Tensor)
    }
    sizes = {
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
    if not allow_broadcast or _are_equal(inference, [dim for dim in dims if dim not in (0, 1)]):
        original(inference, dims, allow_broadcast=allow_broadcast)


def _with_broadcast_sizes(
    original: AnyFunction, inference: ShapeInference, node: onnx.NodeProto
) -> None:
    """What the single node's inference leaves open, which ORT would fill in by merging the sizes."""
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


def _are_equal(inference: ShapeInference, dims: Sequence[object]) -> bool:
    if len(set(dims)) < 2:
        return True
    values = [_value(inference, dim) for dim in dims]
    return None not in values and len(set(values)) == 1


def _value(inference: ShapeInference, dim: Any) -> int | None:
    """In the batch of the export."""
    if not isinstance(dim, str):
        return None if dim is None else int(dim)
    known = _sizes(inference)
    if dim in known:
        return known[dim]
    form = inference.symbolic_dims_.get(dim)
    if form is None or any(str(symbol) not in known for symbol in form.free_symbols):
        return None
    return int(form.subs({symbol: known[str(symbol)] for symbol in form.free_symbols}))


def _sizes(inference: ShapeInference) -> dict[str, int]:
    known: dict[str, int] | None = vars(inference).get("_ortlaunch_sizes")
    if known is None:
        notes = {prop.key: prop.value for prop in inference.out_mp_.metadata_props}
        known = vars(inference)["_ortlaunch_sizes"] = json.loads(notes.get(_SIZES, "{}"))
    return known


def _either(inference: ShapeInference, one: object, other: object) -> str:
    """A size of its own for what is one or the other of two."""
    sympy: Any = importlib.import_module("sympy")
    names: dict[Any, str] = vars(inference).setdefault("_ortlaunch_either", {})
    name = names.setdefault(frozenset((one, other)), f"broadcast_size_{len(names)}")
    inference.symbolic_dims_[name] = sympy.Symbol(name, integer=True, nonnegative=True)
    return name


# -------------------------------------------------------------------------------------------- in the graph


def _with_hidden_shapes(original: AnyFunction, model: onnx.ModelProto) -> object:
    """Where sizes meet that may differ, ORT's gradient asks for them in each pass, if one shape is not known to it."""
    inferred = original(model)
    graph = inferred.graph
    nodes = []
    values = {value.name: value for value in (*graph.input, *graph.value_info, *graph.output)}
    known = {name: _dims(value) for name, value in values.items()}
    known.update({tensor.name: list(tensor.dims) for tensor in graph.initializer})
    fixed = {tensor.name for tensor in graph.initializer if tensor.name not in values}
    for node in graph.node:
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
    """An input through a Reshape to what its shape is in each pass."""
    from onnx import helper

    name = f"{node.output[0]}_ortlaunch_{place}"
    given, node.input[place] = node.input[place], name
    return [
        helper.make_node("Shape", [given], [f"{name}_shape"]),
        helper.make_node("Reshape", [given, f"{name}_shape"], [name], allowzero=1),
    ]


def _spread(node: onnx.NodeProto, known: Shapes) -> list[int]:
    """What a Where broadcasts, or may: ORT's gradient of it has the size of the result."""
    if node.op_type != "Where":
        return []
    size = known.get(node.output[0])
    return [
        place
        for place in (1, 2)
        if size is None or "" in size or known.get(node.input[place]) != size
    ]


def _expand(node: onnx.NodeProto, places: Sequence[int], known: Shapes) -> list[onnx.NodeProto]:
    """Broadcast these inputs of a Where before it, in a node of which ORT's gradient sums up."""
    from onnx import NodeProto, helper

    nodes = []
    shape = f"{node.output[0]}_ortlaunch_shape"
    size = known.get(node.output[0])
    whole = next(
        (name for name in node.input if size is not None and known.get(name) == size), None
    )
    if whole is None:  # the result itself says what it is
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
    found = value.type.tensor_type
    return (
        [dim.dim_value or dim.dim_param for dim in found.shape.dim]
        if found.HasField("shape")
        else None
    )


def _unsure(node: onnx.NodeProto, known: Shapes) -> list[int]:
    """The inputs whose shapes are to be hidden, of those that may be broadcast: one of two is enough for most."""
    if node.op_type == "Expand":
        names = [node.input[0], node.output[0]]
        places = [0]
    elif node.op_type in ("Max", "Min"):  # each is compared with the result
        names = list(node.input)
        places = list(range(len(node.input)))
    elif node.op_type in (*_BROADCASTING, "MatMul") and node.op_type != "Where":
        names = list(node.input)
        places = list(range(1, len(node.input)))
    else:
        return []
    shapes = [shape for name in names if (shape := known.get(name)) is not None]
    if len(shapes) < len(names):
        return []
    batch = [shape[:-2] if node.op_type == "MatMul" else shape for shape in shapes]
    return places if _may_differ(*batch) else []


def _may_differ(*shapes: Sequence[object]) -> bool:
    """Whether sizes meet of which one may be 1 where the other is not, without being written so."""
    rank = max(map(len, shapes))
    padded: list[list[object]] = [[1] * (rank - len(shape)) + list(shape) for shape in shapes]
    sizes = [set(column) - {1} for column in zip(*padded)]
    return any(len(column) > 1 for column in sizes)


# ------------------------------------------------------------------------------------------- in later batches


def apart(manager: Manager, args: Args, kwargs: Kwargs) -> bool:
    """Whether of sizes of inputs that were equal in the batch of the export one is 1 in this batch, of equal form."""
    info = manager._graph_transition_manager._post_export_processed_model_info
    return any(_are_apart(info, group, args, kwargs) for group in _groups(info))


def _are_apart(
    info: GraphInfo, group: Sequence[tuple[str, int]], args: Args, kwargs: Kwargs
) -> bool:
    read = info.onnx_graph_input_data_accessor_user_defined
    given = [(read[name](args, kwargs), axis) for name, axis in group]
    ones = [
        value.shape[axis] == 1
        for value, axis in given
        if isinstance(value, torch.Tensor) and value.dim() > axis
    ]
    return any(ones) and not all(ones)


def _groups(info: GraphInfo) -> list[list[tuple[str, int]]]:
    """Dimensions of the model's inputs that its graph takes for equal."""
    found: list[list[tuple[str, int]]] | None = vars(info).get("_ortlaunch_equal")
    if found is None:
        places: dict[str, list[tuple[str, int]]] = {}
        for value in info._post_export_processed_model.graph.input:
            for axis, dim in enumerate(value.type.tensor_type.shape.dim):
                if dim.dim_param and value.name in info.onnx_graph_input_data_accessor_user_defined:
                    places.setdefault(dim.dim_param, []).append((value.name, axis))
        found = vars(info)["_ortlaunch_equal"] = [
            group for group in places.values() if len(group) > 1
        ]
    return found
