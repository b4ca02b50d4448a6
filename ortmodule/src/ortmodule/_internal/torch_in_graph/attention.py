"""Attention as torch's fused kernel inside ORT's graph, without materialized causal masks.

attention_choice.py decides where the kernel is used; attention_operator.py defines the operator on
CPUs. The module does not import transformers. It patches transformers' mask module only if the
model has imported it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ortmodule._internal.base.export import ExportContext
from ortmodule._internal.base.patching import replace_attribute_temporarily
from ortmodule._internal.torch_in_graph import attention_operator
from ortmodule._internal.tracing import grad_mode
from ortmodule._internal.tracing.symbolics import (
    dtype_of_graph_value,
    is_boolean_graph_value,
    known_numbers_of_constant_or_list,
    write_int64_constant,
)

if TYPE_CHECKING:
    import onnx
    from torch.onnx._internal.torchscript_exporter.jit_utils import GraphContext

OPERATOR_NAME = "aten::scaled_dot_product_attention"
# Any: the functions that read and pause a trace have no stubs.
_TRACER: Any = torch._C
_MASKS_MODULE = "transformers.masking_utils"
# From (batch, heads, length, size) to (batch, length, heads, size), and back.
_SWAPPED_DIMS = [0, 2, 1, 3]
_PACKED_FUNCTION = "find_packed_sequence_indices"
# Operators that keep positions 0, 1, 2, ... consecutive.
_COUNTING_OPERATORS = {
    "aten::arange", "aten::add", "aten::unsqueeze", "aten::expand", "aten::to", "aten::view", "aten::reshape",
    "prim::NumToTensor", "aten::Int", "aten::ScalarImplicit", "prim::ListConstruct", "prim::Constant", "aten::size",
}  # fmt: skip


def write_fused_cpu_attention_call(
    g: GraphContext, traced_inputs: Sequence[Any], graph_inputs: Sequence[Any]
) -> Any:
    """Write an attention as a call of torch's kernel for CPUs, with the kernel's own gradient.

    Args:
        g: the graph.
        traced_inputs: the inputs of the traced call, for which
            `attention_choice.stays_fused_if_listed_or_large_and_note_why_not` is true.
        graph_inputs: their values in the graph.
    """
    attention_operator.define_cpu_attention_operators_once()
    _register_attention_gradient_once()
    is_causal, scale = (traced_value.toIValue() for traced_value in traced_inputs[5:7])
    if traced_inputs[3].node().mustBeNone():
        mask = _write_none(g)
        excluded_keys = write_int64_constant(
            g, attention_operator.LATER_KEYS if is_causal else attention_operator.NOTHING
        )
    else:
        mask = _write_mask_as_additive_if_boolean(g, graph_inputs[3], graph_inputs[0])
        excluded_keys = _write_aten_call(g, attention_operator.MASKED, [mask])
    # Where the model swapped the dimensions only for attention, the kernel swaps strides instead.
    swapped_inputs = [_input_of_head_and_length_swap_or_none(value) for value in graph_inputs[:3]]
    arguments = (
        *(swapped_input or value for swapped_input, value in zip(swapped_inputs, graph_inputs)),
        mask,
        excluded_keys,
        _write_none(g) if scale is None else g.op("Constant", value_t=torch.tensor(float(scale))),
        write_int64_constant(
            g,
            sum(
                1 << position
                for position, swapped_input in enumerate(swapped_inputs)
                if swapped_input
            ),
        ),
    )
    attended, _ = _write_aten_call(g, attention_operator.FORWARD, arguments, 2)
    attended.setType(graph_inputs[0].type().with_sizes([None] * 4))
    return g.op("Transpose", attended, perm_i=_SWAPPED_DIMS)


def _write_aten_call(
    g: GraphContext, torch_operator: str, input_values: Sequence[Any], output_count: int = 1
) -> Any:
    return g.op(
        "org.pytorch.aten::ATen",
        *input_values,
        operator_s=torch_operator,
        overload_name_s="",
        outputs=output_count,
    )


def _input_of_head_and_length_swap_or_none(graph_value: torch.Value) -> torch.Value | None:
    """Return the input of the Transpose node that swaps dimensions 1 and 2 into a value."""
    from torch.onnx import symbolic_helper

    node = graph_value.node()
    if node.kind() != "onnx::Transpose" or symbolic_helper._node_get(node, "perm") != _SWAPPED_DIMS:
        return None
    return node.inputsAt(0)


def is_reshape_of_attention_to_same_shape(traced_node: torch.Node) -> bool:
    """Return whether a traced reshape gives the result of attention the sizes that it has.

    transformers writes one after each attention, for a case of generation. Its sizes are those of
    the result's batch, -1, of the query's length and of the value's size.
    """
    if traced_node.kind() != "aten::reshape":
        return False
    attended, shape = traced_node.inputs()
    if attended.node().kind() != OPERATOR_NAME or shape.node().kind() != "prim::ListConstruct":
        return False
    query, _, value = list(attended.node().inputs())[:3]
    sizes = list(shape.node().inputs())
    return (
        len(sizes) == 4
        and _is_size_of_traced_dimension(sizes[0], attended, 0)
        and known_numbers_of_constant_or_list(sizes[1]) == [-1]
        and _is_size_of_traced_dimension(sizes[2], query, 2)
        and _is_size_of_traced_dimension(sizes[3], value, 3)
    )


def _is_size_of_traced_dimension(
    traced_number: torch.Value, tensor_value: torch.Value, dimension: int
) -> bool:
    """Return whether a number in the trace is the size of a tensor of four dimensions."""
    while traced_number.node().kind() in ("prim::NumToTensor", "aten::Int"):
        traced_number = traced_number.node().inputsAt(0)
    node = traced_number.node()
    if node.kind() != "aten::size" or node.inputsAt(0).debugName() != tensor_value.debugName():
        return False
    return known_numbers_of_constant_or_list(node.inputsAt(1)) in ([dimension], [dimension - 4])


def _write_mask_as_additive_if_boolean(
    g: GraphContext, mask_value: torch.Value, query_value: torch.Value
) -> torch.Value:
    """Write a boolean mask as numbers to add to the scores; return any other mask as it is.

    Layers with the same mask write equal nodes, of which ORT keeps one.
    """
    if not is_boolean_graph_value(mask_value):
        return mask_value
    mask_numbers = (
        torch.tensor(mask_number, dtype=dtype_of_graph_value(query_value))
        for mask_number in (0.0, -math.inf)
    )
    return g.op(
        "Where",
        mask_value,
        *(g.op("Constant", value_t=mask_number) for mask_number in mask_numbers),
    )


def _write_none(g: GraphContext) -> torch.Value:
    none_value = g.op("prim::Constant")
    none_value.setType(torch._C.OptionalType.ofTensor())
    return none_value


@functools.cache
def _register_attention_gradient_once() -> None:
    """Register the gradient of the operator with ORT, once in a process."""
    from onnxruntime.training.ortmodule._custom_gradient_registry import _to_gradient_definition

    # GO is the gradient of an output, GI that of an input, I an input, O an output.
    node = (
        ("ATen", "org.pytorch.aten"),
        ["GO(0)", *(f"I({input_index})" for input_index in range(7)), "O(0)", "O(1)"],
        ["GI(0)", "GI(1)", "GI(2)"],
        {"operator": {"value": attention_operator.BACKWARD, "dtype": "string"}},
    )
    module: Any = importlib.import_module("onnxruntime.capi._pybind_state")
    key = f"org.pytorch.aten::ATen::{attention_operator.FORWARD}::"
    module.register_gradient_definition(key, _to_gradient_definition([node]))


# Any: a Rewriting of torch_kernels.py, which imports this module.
def merge_later_mask_examination_into_first(
    graph_rewriting: Any, examination_node: onnx.NodeProto
) -> bool:
    """Let layers with one mask examine it once; return whether the node is left out."""
    if not _is_call_of_torch_operator(examination_node, attention_operator.MASKED):
        return False
    users = graph_rewriting.users_by_name[examination_node.input[0]]
    first_call = next(
        user for user in users if _is_call_of_torch_operator(user, attention_operator.MASKED)
    )
    if first_call is not examination_node:
        for user in graph_rewriting.users_by_name[examination_node.output[0]]:
            user.input[list(user.input).index(examination_node.output[0])] = first_call.output[0]
    return first_call is not examination_node


def _is_call_of_torch_operator(node: onnx.NodeProto, torch_operator: str) -> bool:
    return any(attribute.s == torch_operator.encode() for attribute in node.attribute)


@contextlib.contextmanager
def let_transformers_leave_out_causal_masks(export_context: ExportContext) -> Iterator[None]:
    """Let transformers leave out causal masks in an export, as it does in eager mode.

    Under a trace transformers always searches the position ids for packed documents, so it
    materializes the mask. The fused kernel then computes both halves of the scores instead of one.
    """
    masks = sys.modules.get(_MASKS_MODULE)
    original: Callable[[torch.Tensor], torch.Tensor | None] | None = getattr(
        masks, _PACKED_FUNCTION, None
    )
    if original is None:
        yield
        return

    def find_unless_counted(positions: torch.Tensor) -> torch.Tensor | None:
        if torch.jit.is_tracing() and _are_position_ids_computed_from_sizes_only(positions):
            # Pause the trace: only outside a trace does transformers compare the values of the
            # position ids, and return None if there is one document.
            state = _TRACER._get_tracing_state()
            _TRACER._set_tracing_state(None)
            try:
                if original(positions) is None:
                    return None
            finally:
                _TRACER._set_tracing_state(state)
        return original(positions)

    with replace_attribute_temporarily(masks, _PACKED_FUNCTION, find_unless_counted):
        yield


@contextlib.contextmanager
def zero_padding_in_transformer_encoder_outputs() -> Iterator[None]:
    """Let a TransformerEncoder in evaluation put zeros in place of padding, as in eager mode.

    There torch computes without padding, in nested tensors, which an export cannot hold.
    """
    original_forward = nn.TransformerEncoder.forward
    is_fast_path_enabled = torch.backends.mha.get_fastpath_enabled()

    @functools.wraps(original_forward)
    def forward(
        encoder: Any,
        src: torch.Tensor,
        mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool | None = None,
    ) -> torch.Tensor:
        output = original_forward(encoder, src, mask, src_key_padding_mask, is_causal)
        # torch's own conditions; under a trace it sees that its fast path is off.
        would_be_nested = (
            is_fast_path_enabled
            and getattr(encoder, "use_nested_tensor", False)
            and not encoder.layers[0].training
            and not torch.is_autocast_enabled(src.device.type)
            and not (
                grad_mode.starting_grad_mode_or_default(True)
                and any(weight.requires_grad for weight in encoder.layers[0].parameters())
            )
        )
        if (
            not (would_be_nested and torch.jit.is_tracing())
            or src_key_padding_mask is None
            or mask is not None
            or src.dim() != 3
        ):
            return output
        padding = src_key_padding_mask.bool()
        if getattr(encoder, "mask_check", True):
            # Only where all padding is at the end.
            padding = padding & (padding[:, 1:] | ~padding[:, :-1]).all()
        zeros = torch.zeros_like(output)
        filling = zeros if encoder.norm is None else encoder.norm(zeros)
        return torch.where(padding.unsqueeze(-1), filling, output)

    with replace_attribute_temporarily(nn.TransformerEncoder, "forward", forward):
        yield


def _are_position_ids_computed_from_sizes_only(position_ids: torch.Tensor) -> bool:
    """Return whether the model itself counted the positions, from sizes and constants alone.

    Such positions are consecutive for every batch.
    """
    remaining = [_TRACER._get_value_trace(position_ids)]
    while remaining:
        node = remaining.pop().node()
        if node.kind() not in _COUNTING_OPERATORS:
            return False
        if node.kind() != "aten::size":
            remaining += node.inputs()
    return True
