"""ONNX forms for scaled_dot_product_attention, and for the reshapes of nn.MultiheadAttention."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.onnx import symbolic_helper

from ortmodule._internal.base import repair_registry
from ortmodule._internal.base.repair_registry import repair
from ortmodule._internal.tracing.symbolics import (
    GraphWriter,
    dtype_of_graph_value,
    is_boolean_graph_value,
)


@repair(
    "export_sdpa_dropout",
    "operator form",
    10,
    fault="`scaled_dot_product_attention` with dropout ends the build of the gradient, and "
    "gradients behind a mask that leaves a row nothing are nan.",
    example="tracing/test_compat.py::test_each_check_passes[attention]",
    sources={
        "torch.onnx.symbolic_opset14:scaled_dot_product_attention": (
            'g.op(\n            "Dropout",\n',
        ),
    },
)
def attention(
    g: Any, query: Any, key: Any, value: Any, mask: Any, dropout: Any, *other_inputs: Any
) -> Any:
    """Write scaled_dot_product_attention with a dropout for training.

    Torch writes an ONNX Dropout without a mask, for which ORT cannot build a gradient, and without
    its training flag, so that it would drop nothing. If torch's source is unknown, dropout is
    refused.

    A row that a boolean mask excludes completely, such as padding, is nan in torch's form until the
    end, and its gradient stays nan. Here such a row first attends to everything and is then set to
    zero.
    """
    torch_form = importlib.import_module("torch.onnx.symbolic_opset14").scaled_dot_product_attention
    if "export_sdpa_dropout" not in repair_registry.applied_repair_names():
        _refuse_nonzero_dropout(dropout)
        return torch_form(g, query, key, value, mask, dropout, *other_inputs)
    replaced_operators: dict[str, Callable[..., Any]] = {
        "Dropout": functools.partial(_write_training_dropout, g),
        # Torch writes masks as float32. In a float16 model the exporter would then promote the
        # scores, and everything after them, to float32.
        "Where": functools.partial(_write_where_in_query_type, g, dtype_of_graph_value(query)),
    }
    if is_boolean_graph_value(mask):
        empty_rows = _write_mask_of_fully_masked_rows(g, mask)
        filled_mask = g.op("Or", mask, empty_rows)
        # Torch's form checks whether the mask's type is bool.
        filled_mask.setType(mask.type())
        mask = filled_mask
        replaced_operators["IsNaN"] = lambda weights: empty_rows
    attended = torch_form(
        GraphWriter(g, replaced_operators), query, key, value, mask, dropout, *other_inputs
    )
    # Torch 2.7 and later handle empty rows with IsNaN; the replaced IsNaN is already exact.
    if "IsNaN" not in replaced_operators or "IsNaN" in inspect.getsource(torch_form):
        return attended
    zero = g.op("Constant", value_t=torch.tensor(0.0, dtype=dtype_of_graph_value(query)))
    return g.op("Where", empty_rows, zero, attended)


def _refuse_nonzero_dropout(dropout_value: Any) -> None:
    if symbolic_helper._maybe_get_const(dropout_value, "f") != 0:
        raise RuntimeError(
            f"scaled_dot_product_attention with dropout: how torch {torch.__version__} exports it "
            "is not known here, and it may drop nothing; use attention without dropout, or write "
            "it out in the model (transformers: attn_implementation='eager')"
        )


def _write_mask_of_fully_masked_rows(g: Any, attention_mask: Any) -> Any:
    """Return the rows in which a mask leaves nothing, as a mask of one column."""
    mask_numbers = g.op("Cast", attention_mask, to_i=torch.onnx.TensorProtoDataType.FLOAT.value)
    kept_counts = symbolic_helper._reducesum_helper(g, mask_numbers, axes_i=[-1], keepdims_i=1)
    return g.op("Equal", kept_counts, g.op("Constant", value_t=torch.tensor(0.0)))


def _write_training_dropout(graph: Any, *dropout_inputs: Any) -> Any:
    """Write a Dropout with its training flag and its mask output."""
    training = graph.op("Constant", value_t=torch.tensor(True))
    return graph.op("Dropout", *dropout_inputs, training, outputs=2)[0]


def _write_where_in_query_type(
    g: Any, query_dtype: torch.dtype, condition: Any, *choice_values: Any
) -> Any:
    """Write a Where whose constant choices have the type of the attention's query.

    The choices are 0 and -inf of a mask, for example.
    """
    from torch.onnx._type_utils import JitScalarType

    target = JitScalarType.from_dtype(query_dtype)
    choice_types = [JitScalarType.from_value(choice, target) for choice in choice_values]
    typed = [
        choice if choice_type == target else g.op("Cast", choice, to_i=int(target.onnx_type()))
        for choice, choice_type in zip(choice_values, choice_types)
    ]
    return g.op("Where", condition, *typed)


def unflatten(g: Any, tensor: Any, dim: Any, sizes: Any) -> Any:
    """Write the operator with a new shape that consists of known dimensions.

    Torch computes the dimension's index with a Mod at run time. ORT's shape inference does not
    support that (`assert is_literal`).
    """
    rank = symbolic_helper._get_tensor_rank(tensor)
    axis = symbolic_helper._maybe_get_const(dim, "i")
    if rank is None or not isinstance(axis, int):
        return importlib.import_module("torch.onnx.symbolic_opset13").unflatten(
            g, tensor, dim, sizes
        )
    # A negative dimension counts from the end.
    axis %= rank
    shape = g.op("Shape", tensor)

    def write_shape_slice(start_axis: int, end_axis: int) -> list[Any]:
        bounds = [
            g.op("Constant", value_t=torch.tensor([bound])) for bound in (start_axis, end_axis)
        ]
        return [g.op("Slice", shape, *bounds)] if start_axis < end_axis else []

    parts = [*write_shape_slice(0, axis), sizes, *write_shape_slice(axis + 1, rank)]
    return symbolic_helper._reshape_helper(g, tensor, g.op("Concat", *parts, axis_i=0))
