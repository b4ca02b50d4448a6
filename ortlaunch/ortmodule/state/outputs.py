"""Outputs of an ORTModule in the dtypes that the model returns, unchanged by the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ortlaunch.ortmodule.base.graph import replace_nodes
from ortlaunch.ortmodule.base.patching import wrap_method
from ortlaunch.ortmodule.base.source_guard import PROCESSED, TRAINING, owner

if TYPE_CHECKING:
    import onnx

    from ortlaunch.ortmodule.base.ort_types import AnyFunction, GraphInfo, Manager

_TYPES = "_ortlaunch_types"
# Operators that may return their first input's memory.
_SHARING = {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"}
# Operators whose results have memory of their own; other ones may write theirs into an input's.
_APART = {"ATen", "PythonOp", "Shape", "Size", "Gather", "Slice", "MatMul", "FusedMatMul"}


def restore_output_dtypes() -> None:
    """Cast outputs to the dtypes that the model returns.

    On a CPU ORT computes float16 in float32, and returned float32 where a model returns float16.
    """
    wrap_method(owner(PROCESSED), "restore_outputs", _typed)


def _typed(original: AnyFunction, info: GraphInfo, outputs: Sequence[torch.Tensor]) -> object:
    # Computed once for a graph: this runs in each pass.
    if not hasattr(info, _TYPES):
        setattr(info, _TYPES, _types(info._post_export_processed_model.graph))
    types = getattr(info, _TYPES)
    return original(
        info, [output.to(kind) if kind else output for output, kind in zip(outputs, types)]
    )


def _types(graph: onnx.GraphProto) -> list[torch.dtype | None]:
    """Return the dtype of each output; None where the exporter does not know it."""
    from onnxruntime.training.utils import onnx_dtype_to_pytorch_dtype

    kinds = [output.type.tensor_type.elem_type for output in graph.output]
    return [onnx_dtype_to_pytorch_dtype(kind) if kind else None for kind in kinds]


def keep_outputs() -> None:
    """Return a copy of each output whose memory the backward pass may use for something else.

    A value that only the caller reads has memory of its own. One that an operator reads too may
    share memory, which ORT frees or overwrites in the backward pass.
    """
    wrap_method(owner(TRAINING), "_build_graph", _building)


def _building(original: AnyFunction, manager: Manager, *args: object) -> None:
    original(manager, *args)
    _copy_outputs(manager._onnx_models.optimized_model.graph)


def _copy_outputs(graph: onnx.GraphProto) -> None:
    makers = {name: node for node in graph.node for name in node.output}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)

    def read_by(name: str, through: set[str]) -> set[str]:
        """Return the operators that read a value, or its memory through these operators."""
        found: set[str] = set()
        for reader in readers.get(name, ()):
            shares = reader.op_type in through
            found |= read_by(reader.output[0], through) if shares else {reader.op_type}
        return found - {"YieldOp"}

    def has_own_memory(name: str) -> bool:
        # ORT's optimizer removes each Identity.
        while (maker := makers.get(name)) and maker.op_type == "Identity":
            name = maker.input[0]
        own = maker is not None and maker.op_type in _APART
        return not read_by(name, {"Identity"}) or (own and read_by(name, _SHARING) <= _APART)

    nodes = []
    for node in graph.node:
        for place, name in enumerate(node.input if node.op_type == "YieldOp" else ()):
            if not has_own_memory(name):
                node.input[place] = f"{name}_ortlaunch_{place}"
                nodes += _copy(name, node.input[place])
        nodes.append(node)
    if len(nodes) > len(graph.node):
        replace_nodes(graph, nodes)


def _copy(name: str, made: str) -> list[onnx.NodeProto]:
    """Return nodes that copy a tensor of any type and rank: ORT would remove an Identity."""
    from onnx import TensorProto, helper

    axes, first = (helper.make_tensor("zero", TensorProto.INT64, shape, [0]) for shape in ([1], []))
    return [
        helper.make_node("Constant", [], [f"{made}_axes"], value=axes),
        helper.make_node("Constant", [], [f"{made}_first"], value=first),
        helper.make_node("Unsqueeze", [name, f"{made}_axes"], [f"{made}_list"]),
        helper.make_node("Gather", [f"{made}_list", f"{made}_first"], [made]),
    ]
