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
from unittest import mock

import torch
from torch import nn

from ortlaunch.ortmodule.base.export import Export
from ortlaunch.ortmodule.torch_in_graph import attention_operator
from ortlaunch.ortmodule.tracing import grad_mode
from ortlaunch.ortmodule.tracing.symbolics import constants, integers, is_bool, type_of

if TYPE_CHECKING:
    import onnx
    from torch.onnx._internal.torchscript_exporter.jit_utils import GraphContext

NAME = "aten::scaled_dot_product_attention"
# Any: the functions that read and pause a trace have no stubs.
_TRACER: Any = torch._C
_MASKS = "transformers.masking_utils"
# From (batch, heads, length, size) to (batch, length, heads, size), and back.
_SWAPPED = [0, 2, 1, 3]
_PACKED = "find_packed_sequence_indices"
# Operators that keep positions 0, 1, 2, ... consecutive.
_COUNTING = {
    "aten::arange", "aten::add", "aten::unsqueeze", "aten::expand", "aten::to", "aten::view", "aten::reshape",
    "prim::NumToTensor", "aten::Int", "aten::ScalarImplicit", "prim::ListConstruct", "prim::Constant", "aten::size",
}  # fmt: skip


def written(g: GraphContext, given: Sequence[Any], inputs: Sequence[Any]) -> Any:
    """Write an attention as a call of torch's kernel for CPUs, with the kernel's own gradient.

    Args:
        g: the graph.
        given: the inputs of the traced call, for which `attention_choice.is_fused` is true.
        inputs: their values in the graph.
    """
    attention_operator.define_operators()
    _register_gradient()
    causal, scale = (setting.toIValue() for setting in given[5:7])
    if given[3].node().mustBeNone():
        mask = _none(g)
        masked = integers(
            g, attention_operator.LATER_KEYS if causal else attention_operator.NOTHING
        )
    else:
        mask = _additive(g, inputs[3], inputs[0])
        masked = _call(g, attention_operator.MASKED, [mask])
    # Where the model swapped the dimensions only for attention, the kernel swaps strides instead.
    swapped = [_before_swap(one) for one in inputs[:3]]
    arguments = (
        *(before or one for before, one in zip(swapped, inputs)),
        mask,
        masked,
        _none(g) if scale is None else g.op("Constant", value_t=torch.tensor(float(scale))),
        integers(g, sum(1 << place for place, before in enumerate(swapped) if before)),
    )
    attended, _ = _call(g, attention_operator.FORWARD, arguments, 2)
    attended.setType(inputs[0].type().with_sizes([None] * 4))
    return g.op("Transpose", attended, perm_i=_SWAPPED)


def _call(g: GraphContext, operator: str, inputs: Sequence[Any], outputs: int = 1) -> Any:
    return g.op(
        "org.pytorch.aten::ATen",
        *inputs,
        operator_s=operator,
        overload_name_s="",
        outputs=outputs,
    )


def _before_swap(value: torch.Value) -> torch.Value | None:
    """Return the input of the Transpose node that swaps dimensions 1 and 2 into a value."""
    from torch.onnx import symbolic_helper

    node = value.node()
    if node.kind() != "onnx::Transpose" or symbolic_helper._node_get(node, "perm") != _SWAPPED:
        return None
    return node.inputsAt(0)


def keeps_shape(node: torch.Node) -> bool:
    """Return whether a traced reshape gives the result of attention the sizes that it has.

    transformers writes one after each attention, for a case of generation. Its sizes are those of
    the result's batch, -1, of the query's length and of the value's size.
    """
    if node.kind() != "aten::reshape":
        return False
    attended, shape = node.inputs()
    if attended.node().kind() != NAME or shape.node().kind() != "prim::ListConstruct":
        return False
    query, _, value = list(attended.node().inputs())[:3]
    sizes = list(shape.node().inputs())
    return (
        len(sizes) == 4
        and _is_size(sizes[0], attended, 0)
        and constants(sizes[1]) == [-1]
        and _is_size(sizes[2], query, 2)
        and _is_size(sizes[3], value, 3)
    )


def _is_size(value: torch.Value, of: torch.Value, dimension: int) -> bool:
    """Return whether a number in the trace is the size of a tensor of four dimensions."""
    while value.node().kind() in ("prim::NumToTensor", "aten::Int"):
        value = value.node().inputsAt(0)
    node = value.node()
    if node.kind() != "aten::size" or node.inputsAt(0).debugName() != of.debugName():
        return False
    return constants(node.inputsAt(1)) in ([dimension], [dimension - 4])


def _additive(g: GraphContext, mask: torch.Value, query: torch.Value) -> torch.Value:
    """Write a boolean mask as numbers to add to the scores; return any other mask as it is.

    Layers with the same mask write equal nodes, of which ORT keeps one.
    """
    if not is_bool(mask):
        return mask
    numbers = (torch.tensor(number, dtype=type_of(query)) for number in (0.0, -math.inf))
    return g.op("Where", mask, *(g.op("Constant", value_t=number) for number in numbers))


def _none(g: GraphContext) -> torch.Value:
    none = g.op("prim::Constant")
    none.setType(torch._C.OptionalType.ofTensor())
    return none


@functools.cache
def _register_gradient() -> None:
    """Register the gradient of the operator with ORT, once in a process."""
    from onnxruntime.training.ortmodule._custom_gradient_registry import _to_gradient_definition

    # GO is the gradient of an output, GI that of an input, I an input, O an output.
    node = (
        ("ATen", "org.pytorch.aten"),
        ["GO(0)", *(f"I({place})" for place in range(7)), "O(0)", "O(1)"],
        ["GI(0)", "GI(1)", "GI(2)"],
        {"operator": {"value": attention_operator.BACKWARD, "dtype": "string"}},
    )
    module: Any = importlib.import_module("onnxruntime.capi._pybind_state")
    key = f"org.pytorch.aten::ATen::{attention_operator.FORWARD}::"
    module.register_gradient_definition(key, _to_gradient_definition([node]))


# Any: a Rewriting of torch_kernels.py, which imports this module.
def share_masks(rewriting: Any, node: onnx.NodeProto) -> bool:
    """Let layers with one mask examine it once; return whether the node is left out."""
    if not _calls(node, attention_operator.MASKED):
        return False
    users = rewriting.users[node.input[0]]
    first = next(user for user in users if _calls(user, attention_operator.MASKED))
    for user in rewriting.users[node.output[0]] if first is not node else ():
        user.input[list(user.input).index(node.output[0])] = first.output[0]
    return first is not node


def _calls(node: onnx.NodeProto, operator: str) -> bool:
    return any(one.s == operator.encode() for one in node.attribute)


@contextlib.contextmanager
def without_causal_masks(export: Export) -> Iterator[None]:
    """Let transformers leave out causal masks in an export, as it does in eager mode.

    Under a trace transformers always searches the position ids for packed documents, so it
    materializes the mask. The fused kernel then computes both halves of the scores instead of one.
    """
    masks = sys.modules.get(_MASKS)
    original: Callable[[torch.Tensor], torch.Tensor | None] | None = getattr(masks, _PACKED, None)
    if original is None:
        yield
        return

    def find(positions: torch.Tensor) -> torch.Tensor | None:
        if torch.jit.is_tracing() and _count_on(positions):
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

    with mock.patch.object(masks, _PACKED, find):
        yield


@contextlib.contextmanager
def padded_with_zeros() -> Iterator[None]:
    """Let a TransformerEncoder in evaluation put zeros in place of padding, as in eager mode.

    There torch computes without padding, in nested tensors, which an export cannot hold.
    """
    plain = nn.TransformerEncoder.forward
    fast = torch.backends.mha.get_fastpath_enabled()

    @functools.wraps(plain)
    def forward(
        encoder: Any,
        src: torch.Tensor,
        mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool | None = None,
    ) -> torch.Tensor:
        output = plain(encoder, src, mask, src_key_padding_mask, is_causal)
        # torch's own conditions; under a trace it sees that its fast path is off.
        nested = (
            fast
            and getattr(encoder, "use_nested_tensor", False)
            and not encoder.layers[0].training
            and not torch.is_autocast_enabled(src.device.type)
            and not (
                grad_mode.at_start(True)
                and any(weight.requires_grad for weight in encoder.layers[0].parameters())
            )
        )
        if (
            not (nested and torch.jit.is_tracing())
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

    with mock.patch.object(nn.TransformerEncoder, "forward", forward):
        yield


def _count_on(positions: torch.Tensor) -> bool:
    """Return whether the model itself counted the positions, from sizes and constants alone.

    Such positions are consecutive for every batch.
    """
    remaining = [_TRACER._get_value_trace(positions)]
    while remaining:
        node = remaining.pop().node()
        if node.kind() not in _COUNTING:
            return False
        if node.kind() != "aten::size":
            remaining += node.inputs()
    return True
