"""ONNX forms for scaled_dot_product_attention, and for the reshapes of nn.MultiheadAttention."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.onnx import symbolic_helper

from ortlaunch.ortmodule.base import registry
from ortlaunch.ortmodule.tracing.symbolics import GraphWriter, is_bool, type_of


def attention(g: Any, query: Any, key: Any, value: Any, mask: Any, dropout: Any, *rest: Any) -> Any:
    """Write scaled_dot_product_attention with a dropout for training.

    Torch writes an ONNX Dropout without a mask, for which ORT cannot build a gradient, and without
    its training flag, so that it would drop nothing. If torch's source is unknown, dropout is
    refused.

    A row that a boolean mask excludes completely, such as padding, is nan in torch's form until the
    end, and its gradient stays nan. Here such a row first attends to everything and is then set to
    zero.
    """
    form = importlib.import_module("torch.onnx.symbolic_opset14").scaled_dot_product_attention
    if "export_sdpa_dropout" not in registry.applied():
        _refuse_dropout(dropout)
        return form(g, query, key, value, mask, dropout, *rest)
    own: dict[str, Callable[..., Any]] = {
        "Dropout": functools.partial(_training_dropout, g),
        # Torch writes masks as float32. In a float16 model the exporter would then promote the
        # scores, and everything after them, to float32.
        "Where": functools.partial(_where_of_type, g, type_of(query)),
    }
    if is_bool(mask):
        empty = _empty_rows(g, mask)
        filled = g.op("Or", mask, empty)
        # Torch's form checks whether the mask's type is bool.
        filled.setType(mask.type())
        mask = filled
        own["IsNaN"] = lambda weights: empty
    attended = form(GraphWriter(g, own), query, key, value, mask, dropout, *rest)
    # Torch 2.7 and later handle empty rows with IsNaN; the replaced IsNaN is already exact.
    if "IsNaN" not in own or "IsNaN" in inspect.getsource(form):
        return attended
    zero = g.op("Constant", value_t=torch.tensor(0.0, dtype=type_of(query)))
    return g.op("Where", empty, zero, attended)


def _refuse_dropout(dropout: Any) -> None:
    if symbolic_helper._maybe_get_const(dropout, "f") != 0:
        raise RuntimeError(
            f"scaled_dot_product_attention with dropout: how torch {torch.__version__} exports it "
            "is not known here, and it may drop nothing; use attention without dropout, or write "
            "it out in the model (transformers: attn_implementation='eager')"
        )


def _empty_rows(g: Any, mask: Any) -> Any:
    """Return the rows in which a mask leaves nothing, as a mask of one column."""
    numbers = g.op("Cast", mask, to_i=torch.onnx.TensorProtoDataType.FLOAT.value)
    left = symbolic_helper._reducesum_helper(g, numbers, axes_i=[-1], keepdims_i=1)
    return g.op("Equal", left, g.op("Constant", value_t=torch.tensor(0.0)))


def _training_dropout(graph: Any, *inputs: Any) -> Any:
    """Write a Dropout with its training flag and its mask output."""
    training = graph.op("Constant", value_t=torch.tensor(True))
    return graph.op("Dropout", *inputs, training, outputs=2)[0]


def _where_of_type(g: Any, dtype: torch.dtype, condition: Any, *choices: Any) -> Any:
    """Write a Where whose constant choices have the type of the attention's query.

    The choices are 0 and -inf of a mask, for example.
    """
    from torch.onnx._type_utils import JitScalarType

    target = JitScalarType.from_dtype(dtype)
    known = [JitScalarType.from_value(choice, target) for choice in choices]
    typed = [
        choice if found == target else g.op("Cast", choice, to_i=int(target.onnx_type()))
        for choice, found in zip(choices, known)
    ]
    return g.op("Where", condition, *typed)


def unflatten(g: Any, tensor: Any, dim: Any, sizes: Any) -> Any:
    """Write the operator with a new shape that consists of known dimensions.

    Torch computes the dimension's index with a Mod at run time. ORT's shape inference does not
    support that (`assert is_literal`).
    """
    rank = symbolic_helper._get_tensor_rank(tensor)
    place = symbolic_helper._maybe_get_const(dim, "i")
    if rank is None or not isinstance(place, int):
        return importlib.import_module("torch.onnx.symbolic_opset13").unflatten(
            g, tensor, dim, sizes
        )
    # A negative dimension counts from the end.
    place %= rank
    shape = g.op("Shape", tensor)

    def dimensions(first: int, end: int) -> list[Any]:
        bounds = [g.op("Constant", value_t=torch.tensor([bound])) for bound in (first, end)]
        return [g.op("Slice", shape, *bounds)] if first < end else []

    parts = [*dimensions(0, place), sizes, *dimensions(place + 1, rank)]
    return symbolic_helper._reshape_helper(g, tensor, g.op("Concat", *parts, axis_i=0))
