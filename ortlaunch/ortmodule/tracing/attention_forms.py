"""ONNX forms for attention: scaled_dot_product_attention, and the reshapes of nn.MultiheadAttention."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from ortlaunch.ortmodule.base import registry
from ortlaunch.ortmodule.tracing.symbolics import GraphWriter, is_bool, type_of


def attention(g: Any, query: Any, key: Any, value: Any, mask: Any, dropout: Any, *rest: Any) -> Any:
    """scaled_dot_product_attention, with a dropout for training.

    Torch writes an ONNX Dropout without a mask, for which ORT cannot build a gradient, and without its training flag,
    with which it would drop nothing. Where torch's source is another, dropout is refused.
    A row that a boolean mask leaves nothing, such as that of padding, is nan in torch's form until its end, and the
    gradient stays so: here such a row attends to everything first, and is then set to zero. Torch writes masks as
    float32: in a float16 model the exporter would then lift the scores and all that follows them to float32.
    """
    form = importlib.import_module("torch.onnx.symbolic_opset14").scaled_dot_product_attention
    if "export_sdpa_dropout" not in registry.applied():
        _refuse_dropout(dropout)
        return form(g, query, key, value, mask, dropout, *rest)
    own: dict[str, Callable[..., Any]] = {
        "Dropout": functools.partial(_training_dropout, g),
        "Where": functools.partial(_where_of_type, g, type_of(query)),
    }
    if is_bool(mask):
        empty = _empty_rows(g, mask)
        filled = g.op("Or", mask, empty)
        filled.setType(mask.type())
        mask = filled
        own["IsNaN"] = lambda weights: empty
    attended = form(GraphWriter(g, own), query, key, value, mask, dropout, *rest)
    if "IsNaN" not in own or "IsNaN" in inspect.getsource(
        form
    ):  # torch 2.7 and later look for empty rows
        return attended
    zero = g.op("Constant", value_t=torch.tensor(0.0, dtype=type_of(query)))
    return g.op("Where", empty, zero, attended)


def _refuse_dropout(dropout: Any) -> None:
    from torch.onnx import symbolic_helper

    if symbolic_helper._maybe_get_const(dropout, "f") != 0:
        raise RuntimeError(
            f"scaled_dot_product_attention with dropout: how torch {torch.__version__} exports it is not known "
            "here, and it may drop nothing; use attention without dropout, or write it out in the model "
            "(transformers: attn_implementation='eager')"
        )


def _empty_rows(g: Any, mask: Any) -> Any:
    """The rows, as a mask of one column, of which a mask leaves nothing."""
    from torch.onnx import symbolic_helper

    numbers = g.op("Cast", mask, to_i=torch.onnx.TensorProtoDataType.FLOAT.value)
    left = symbolic_helper._reducesum_helper(g, numbers, axes_i=[-1], keepdims_i=1)
    return g.op("Equal", left, g.op("Constant", value_t=torch.tensor(0.0)))


def _training_dropout(graph: Any, *inputs: Any) -> Any:
    """With its training flag and its mask."""
    training = graph.op("Constant", value_t=torch.tensor(True))
    return graph.op("Dropout", *inputs, training, outputs=2)[0]


def _where_of_type(g: Any, dtype: torch.dtype, condition: Any, *choices: Any) -> Any:
    """A Where whose constant choices, such as 0 and -inf of a mask, have the type of the attention's query."""
    from torch.onnx._type_utils import JitScalarType

    target = JitScalarType.from_dtype(dtype)
    known = [JitScalarType.from_value(choice, target) for choice in choices]
    typed = [
        choice if found == target else g.op("Cast", choice, to_i=int(target.onnx_type()))
        for choice, found in zip(choices, known)
    ]
    return g.op("Where", condition, *typed)


def unflatten(g: Any, tensor: Any, dim: Any, sizes: Any) -> Any:
    """With a new shape that is put together from known dimensions.

    Torch computes the place of the dimension with a Mod at run time, which ORT's shape inference does not follow:
    `assert is_literal`.
    """
    from torch.onnx import symbolic_helper

    rank = symbolic_helper._get_tensor_rank(tensor)
    place = symbolic_helper._maybe_get_const(dim, "i")
    if rank is None or not isinstance(place, int):
        return importlib.import_module("torch.onnx.symbolic_opset13").unflatten(
            g, tensor, dim, sizes
        )
    place %= rank
    shape = g.op("Shape", tensor)

    def dimensions(first: int, end: int) -> list[Any]:
        bounds = [g.op("Constant", value_t=torch.tensor([bound])) for bound in (first, end)]
        return [g.op("Slice", shape, *bounds)] if first < end else []

    parts = [*dimensions(0, place), sizes, *dimensions(place + 1, rank)]
    return symbolic_helper._reshape_helper(g, tensor, g.op("Concat", *parts, axis_i=0))
