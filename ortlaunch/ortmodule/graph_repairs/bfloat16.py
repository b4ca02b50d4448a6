"""bfloat16 on CUDA: a node without a kernel in ONNX Runtime runs in torch or in float32.

In float32 the node runs between casts. The table of kernels (cuda_kernels.py) decides when a graph
is built. For an operator with neither, the model is exported again with a call of torch's operator
(operator_translation.py); if that fails, the run ends before step 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import onnx
from onnx import TensorProto, helper

from ortlaunch.ortmodule.base.counters import tally
from ortlaunch.ortmodule.base.graph import replace_nodes
from ortlaunch.ortmodule.base.patching import wrap_method
from ortlaunch.ortmodule.base.source_guard import EVALUATION, MANAGER, TRAINING, owner
from ortlaunch.ortmodule.build import cuda_kernels
from ortlaunch.ortmodule.torch_in_graph.torch_kernels import Rewriting

if TYPE_CHECKING:
    from ortlaunch.ortmodule.base.ort_types import AnyFunction, Manager

# As cuda_kernels names types.
_KIND = "bfloat16"
# By ORT's operator: torch's operator, and the arguments after its inputs.
_ATEN: dict[str, tuple[str, tuple[object, ...]]] = {
    "Gelu": ("gelu", ("",)),
    "GeluGrad": ("gelu_backward", ("",)),
    "TanhGrad": ("tanh_backward", ()),
    "SigmoidGrad": ("sigmoid_backward", ()),
    "QuickGelu": ("silu", ()),
}
# ORT's session fuses nodes after `complete` has run; these fusions make operators without a kernel.
_FUSIONS = "QuickGeluFusion;GeluFusion;BiasSoftmaxFusion;SkipLayerNormFusion"


def install() -> None:
    """Complete each graph that is built for a GPU."""
    for manager in (TRAINING, EVALUATION):
        wrap_method(owner(manager), "_build_graph", _building)
    wrap_method(owner(MANAGER), "_get_session_config", _without_fusions)


def correct_casts(model: onnx.ModelProto) -> None:
    """Correct the type of the casts to bfloat16 that torch's exporter writes.

    The exporter writes 15 for them, which is complex128; ORT has no such tensors. Source:
    scalarTypeToONNXTypeMap of torch/csrc/jit/passes/onnx/scalar_type_analysis.cpp.
    """
    for node in model.graph.node:
        for attribute in node.attribute if node.op_type == "Cast" else ():
            if attribute.i == TensorProto.COMPLEX128:
                attribute.i = TensorProto.BFLOAT16


def _building(original: AnyFunction, manager: Manager, *args: object) -> None:
    original(manager, *args)
    # Only after ORT has built the graph, because its gradient brings new nodes.
    if manager._device.type == "cuda":
        complete(manager._onnx_models.optimized_model)


def _without_fusions(original: AnyFunction, manager: Manager) -> object:
    config = original(manager)
    if (
        manager._device.type == "cuda"
        and _KIND in cuda_kernels.types_of(manager._onnx_models.optimized_model.graph).values()
    ):
        config[0].add_session_config_entry("optimization.disable_specified_optimizers", _FUSIONS)
    return config


def complete(
    model: onnx.ModelProto, has_kernel: Callable[..., bool] = cuda_kernels.has_kernel
) -> None:
    """Give every node of an onnx.ModelProto that reads or writes bfloat16 a kernel.

    Raises:
        RuntimeError: a node has no kernel in float32 either; the error names the operator as ORT
            would.
    """
    # Both strings are names of ONNX's default domain.
    opset = next(used.version for used in model.opset_import if used.domain in ("", "ai.onnx"))
    types = cuda_kernels.types_of(model.graph)
    rewriting = Rewriting(model.graph)
    replaced = set()
    for node in model.graph.node:
        halves = {name for name in (*node.input, *node.output) if types.get(name) == _KIND}
        if not halves or has_kernel(node, types, opset):
            rewriting.nodes.append(node)
            continue
        # First choice: torch's operator on bfloat16. Second: ORT's own in float32.
        replaced.add(node.op_type)
        # torch's silu is QuickGelu with an alpha of 1; other alphas run in float32.
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
                "float32. Train in fp16, or use the model without ORTModule"
            )
    if replaced:
        tally.note(
            "bfloat16: by torch or in float32, without a CUDA kernel in ONNX Runtime: "
            f"{', '.join(sorted(replaced))}"
        )
        replace_nodes(model.graph, rewriting.nodes)
        # 16 is onnx.TensorProto.BFLOAT16.
        model.graph.value_info.extend(rewriting.unknown_values(16))


def _in_float32(rewriting: Rewriting, node: onnx.NodeProto, halves: set[str]) -> None:
    """Add a node with its bfloat16 tensors cast to float32 and back.

    Each result is rounded once, as in torch.
    """
    # Casts back to bfloat16, which follow the node.
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
