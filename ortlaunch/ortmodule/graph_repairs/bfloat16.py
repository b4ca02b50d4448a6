"""bfloat16 on CUDA: a node without a kernel in ONNX Runtime runs as torch's operator, or in float32 between casts.

The table of kernels (cuda_kernels.py) decides when a graph is built. For an operator with neither, the model is
exported again with a call of torch's (operator_translation.py); if that fails, the run ends before step 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ortlaunch.ortmodule.base.counters import tally
from ortlaunch.ortmodule.base.graph import replace_nodes
from ortlaunch.ortmodule.base.patching import wrap_method
from ortlaunch.ortmodule.base.source_guard import EVALUATION, TRAINING, owner
from ortlaunch.ortmodule.build import cuda_kernels
from ortlaunch.ortmodule.torch_in_graph.torch_kernels import Rewriting

if TYPE_CHECKING:
    import onnx

    from ortlaunch.ortmodule.base.ort_types import AnyFunction, Manager

_KIND = "bfloat16"
# ORT's operator: torch's operator, and the arguments after its inputs.
_ATEN: dict[str, tuple[str, tuple[object, ...]]] = {
    "Gelu": ("gelu", ("",)),
    "GeluGrad": ("gelu_backward", ("",)),
    "TanhGrad": ("tanh_backward", ()),
    "SigmoidGrad": ("sigmoid_backward", ()),
    "QuickGelu": ("silu", ()),
}


def install() -> None:
    """Complete each graph that is built for a GPU."""
    for manager in (TRAINING, EVALUATION):
        wrap_method(owner(manager), "_build_graph", _building)


def correct_casts(model: onnx.ModelProto) -> None:
    """Torch's exporter writes the type of its own casts to bfloat16 as 15, which is complex128; ORT has none of those.

    Source: scalarTypeToONNXTypeMap of torch/csrc/jit/passes/onnx/scalar_type_analysis.cpp.
    """
    from onnx import TensorProto

    for node in model.graph.node:
        for attribute in node.attribute if node.op_type == "Cast" else ():
            if attribute.i == TensorProto.COMPLEX128:
                attribute.i = TensorProto.BFLOAT16


def _building(original: AnyFunction, manager: Manager, *args: object) -> None:
    original(manager, *args)
    if manager._device.type == "cuda":
        complete(manager._onnx_models.optimized_model)


def complete(
    model: onnx.ModelProto, has_kernel: Callable[..., bool] = cuda_kernels.has_kernel
) -> None:
    """Give every node of an onnx.ModelProto that takes or makes bfloat16 a kernel.

    Raises:
        RuntimeError: a node has none in float32 either; it names the operator as ORT would.
    """
    opset = next(used.version for used in model.opset_import if used.domain in ("", "ai.onnx"))
    types = cuda_kernels.types_of(model.graph)
    rewriting = Rewriting(model.graph)
    replaced = set()
    for node in model.graph.node:
        halves = {name for name in (*node.input, *node.output) if types.get(name) == _KIND}
        if not halves or has_kernel(node, types, opset):
            rewriting.nodes.append(node)
            continue
        replaced.add(node.op_type)
        if node.op_type in _ATEN and (
            node.op_type != "QuickGelu" or [one.f for one in node.attribute] == [1]
        ):
            operator, rest = _ATEN[node.op_type]
            rewriting.call(operator, [*node.input, *rest], node.output)
        elif has_kernel(node, {**types, **dict.fromkeys(halves, "float")}, opset):
            _in_float32(rewriting, node, halves)
        else:
            raise RuntimeError(
                "Could not find an implementation for "
                f"{node.op_type}({', '.join(types.get(name) or 'unknown' for name in node.input if name)}), "
                f"node {node.name}: ONNX Runtime 1.19.2 has no CUDA kernel of it for bfloat16 or "
                "float32. Train in fp16 (precision: fp16), or with engine.name: eager"
            )
    if replaced:
        tally.note(
            "bfloat16: by torch or in float32, without a CUDA kernel in ONNX Runtime: "
            f"{', '.join(sorted(replaced))}"
        )
        replace_nodes(model.graph, rewriting.nodes)
        model.graph.value_info.extend(rewriting.unknown_values(16))


def _in_float32(rewriting: Rewriting, node: onnx.NodeProto, halves: set[str]) -> None:
    """Add a node with its bfloat16 tensors cast to float32 and back; each result is rounded once, as torch's is."""
    from onnx import TensorProto, helper

    after = []
    for place, name in enumerate(node.input):
        if name in halves:
            node.input[place] = f"{node.output[0]}_float_{place}"
            rewriting.nodes.append(
                helper.make_node("Cast", [name], [node.input[place]], to=TensorProto.FLOAT)
            )
    for place, name in enumerate(node.output):
        if name in halves:
            node.output[place] = f"{name}_float"
            after.append(
                helper.make_node("Cast", [node.output[place]], [name], to=TensorProto.BFLOAT16)
            )
    rewriting.nodes += [node, *after]
