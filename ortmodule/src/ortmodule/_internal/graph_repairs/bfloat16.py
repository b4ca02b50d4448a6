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

from ortmodule._internal.base.counters import tally
from ortmodule._internal.base.graph import replace_and_name_graph_nodes
from ortmodule._internal.base.repair_registry import (
    EVALUATION,
    MANAGER,
    TRAINING,
    replace_ort_function,
)
from ortmodule._internal.native import cuda_kernels
from ortmodule._internal.torch_in_graph.torch_kernels import Rewriting

if TYPE_CHECKING:
    from ortmodule._internal.base.ort_types import AnyFunction, Manager

# As cuda_kernels names types.
_TYPE_NAME = "bfloat16"
# By ORT's operator: torch's operator, and the arguments after its inputs.
_ATEN_CALLS: dict[str, tuple[str, tuple[object, ...]]] = {
    "Gelu": ("gelu", ("",)),
    "GeluGrad": ("gelu_backward", ("",)),
    "TanhGrad": ("tanh_backward", ()),
    "SigmoidGrad": ("sigmoid_backward", ()),
    "QuickGelu": ("silu", ()),
}
# ORT's session fuses nodes after `replace_bfloat16_nodes_without_kernel_or_refuse` has run; these fusions make
# operators without a kernel.
_FUSIONS = "QuickGeluFusion;GeluFusion;BiasSoftmaxFusion;SkipLayerNormFusion"


def install_bfloat16_repairs_for_gpu_graphs() -> None:
    """Complete each graph that is built for a GPU."""
    for manager in (TRAINING, EVALUATION):
        replace_ort_function(
            f"{manager}._build_graph", _build_graph_and_repair_bfloat16_nodes_on_gpu
        )
    replace_ort_function(
        f"{MANAGER}._get_session_config", _session_config_without_bfloat16_fusions_on_gpu
    )


def correct_type_code_of_bfloat16_casts(exported_model: onnx.ModelProto) -> None:
    """Correct the type of the casts to bfloat16 that torch's exporter writes.

    The exporter writes 15 for them, which is complex128; ORT has no such tensors. Source:
    scalarTypeToONNXTypeMap of torch/csrc/jit/passes/onnx/scalar_type_analysis.cpp.
    """
    for node in exported_model.graph.node:
        if node.op_type == "Cast":
            for attribute in node.attribute:
                if attribute.i == TensorProto.COMPLEX128:
                    attribute.i = TensorProto.BFLOAT16


def _build_graph_and_repair_bfloat16_nodes_on_gpu(
    original_build: AnyFunction, manager: Manager, *args: object
) -> None:
    original_build(manager, *args)
    # Only after ORT has built the graph, because its gradient brings new nodes.
    if manager._device.type == "cuda":
        replace_bfloat16_nodes_without_kernel_or_refuse(manager._onnx_models.optimized_model)


def _session_config_without_bfloat16_fusions_on_gpu(
    original_get_config: AnyFunction, manager: Manager
) -> object:
    config = original_get_config(manager)
    if (
        manager._device.type == "cuda"
        and _TYPE_NAME
        in cuda_kernels.declared_or_inferred_type_by_tensor_name(
            manager._onnx_models.optimized_model.graph
        ).values()
    ):
        config[0].add_session_config_entry("optimization.disable_specified_optimizers", _FUSIONS)
    return config


def replace_bfloat16_nodes_without_kernel_or_refuse(
    onnx_model: onnx.ModelProto,
    has_cuda_kernel: Callable[..., bool] = cuda_kernels.has_cuda_kernel_for_types,
) -> None:
    """Give every node of an onnx.ModelProto that reads or writes bfloat16 a kernel.

    Raises:
        RuntimeError: a node has no kernel in float32 either; the error names the operator as ORT
            would.
    """
    # Both strings are names of ONNX's default domain.
    opset = next(
        opset_entry.version
        for opset_entry in onnx_model.opset_import
        if opset_entry.domain in ("", "ai.onnx")
    )
    type_by_name = cuda_kernels.declared_or_inferred_type_by_tensor_name(onnx_model.graph)
    rewriting = Rewriting(onnx_model.graph)
    replaced_operators = set()
    for node in onnx_model.graph.node:
        bfloat16_names = {
            name for name in (*node.input, *node.output) if type_by_name.get(name) == _TYPE_NAME
        }
        if not bfloat16_names or has_cuda_kernel(node, type_by_name, opset):
            rewriting.nodes.append(node)
            continue
        # First choice: torch's operator on bfloat16. Second: ORT's own in float32.
        replaced_operators.add(node.op_type)
        # torch's silu is QuickGelu with an alpha of 1; other alphas run in float32.
        if node.op_type in _ATEN_CALLS and (
            node.op_type != "QuickGelu" or [attribute.f for attribute in node.attribute] == [1]
        ):
            operator, other_arguments = _ATEN_CALLS[node.op_type]
            rewriting.add_torch_call(operator, [*node.input, *other_arguments], node.output)
        elif has_cuda_kernel(
            node, {**type_by_name, **dict.fromkeys(bfloat16_names, "float")}, opset
        ):
            _add_node_between_float32_casts(rewriting, node, bfloat16_names)
        else:
            raise RuntimeError(
                "Could not find an implementation for "
                f"{node.op_type}({', '.join(type_by_name.get(name) or 'unknown' for name in node.input if name)}), "
                f"node {node.name}: ONNX Runtime 1.19.2 has no CUDA kernel of it for bfloat16 or "
                "float32. Train in fp16, or use the model without ORTModule"
            )
    if replaced_operators:
        tally.add_end_note_once(
            "bfloat16: by torch or in float32, without a CUDA kernel in ONNX Runtime: "
            f"{', '.join(sorted(replaced_operators))}"
        )
        replace_and_name_graph_nodes(onnx_model.graph, rewriting.nodes)
        # 16 is onnx.TensorProto.BFLOAT16.
        onnx_model.graph.value_info.extend(rewriting.type_infos_of_untyped_torch_outputs(16))


def _add_node_between_float32_casts(
    graph_rewriting: Rewriting, bfloat16_node: onnx.NodeProto, bfloat16_names: set[str]
) -> None:
    """Add a node with its bfloat16 tensors cast to float32 and back.

    Each result is rounded once, as in torch.
    """
    # Casts back to bfloat16, which follow the node.
    casts_after = []
    for position, name in enumerate(bfloat16_node.input):
        if name in bfloat16_names:
            bfloat16_node.input[position] = f"{bfloat16_node.output[0]}_float_{position}"
            graph_rewriting.nodes.append(
                helper.make_node(
                    "Cast", [name], [bfloat16_node.input[position]], to=TensorProto.FLOAT
                )
            )
    for position, name in enumerate(bfloat16_node.output):
        if name in bfloat16_names:
            bfloat16_node.output[position] = f"{name}_float"
            casts_after.append(
                helper.make_node(
                    "Cast", [bfloat16_node.output[position]], [name], to=TensorProto.BFLOAT16
                )
            )
    graph_rewriting.nodes += [bfloat16_node, *casts_after]
