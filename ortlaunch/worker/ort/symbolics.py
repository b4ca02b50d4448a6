"""ONNX forms that stand in for torch's during ORT's exports, where ORT cannot take torch's own.

Each is registered for the length of one export, so that `torch.onnx.export` as the user's code calls it stays as it is.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

Export = Callable[..., Any]


def unflattening(export: Export) -> Export:
    """An export in which unflatten's new shape is put together from known dimensions.

    Torch computes the place of the dimension with a Mod at run time, which ORT's shape inference does not follow:
    `assert is_literal` (nn.MultiheadAttention). Torch's fused attention of eval mode has no ONNX form: it is off.
    """

    @functools.wraps(export)
    def export_with_unflatten(*args: Any, **kwargs: Any) -> Any:
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            return _registered(export, "aten::unflatten", _unflatten, 13)(*args, **kwargs)
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)

    return export_with_unflatten


def with_attention_dropout(export: Export) -> Export | None:
    """An export in which scaled_dot_product_attention's dropout is one for training; None: torch's source is unknown.

    Torch writes an ONNX Dropout without a mask, for which ORT cannot build a gradient, and without its training flag,
    with which it would drop nothing. Where the source is another, `refusing_attention_dropout` takes the place of this.
    """
    attention = importlib.import_module("torch.onnx.symbolic_opset14").scaled_dot_product_attention
    if inspect.getsource(attention).count('g.op(\n            "Dropout",\n') != 1:
        return None

    def symbolic(g: Any, *args: Any) -> Any:
        return attention(_TrainingDropout(g), *args)

    return _registered(export, "aten::scaled_dot_product_attention", symbolic, 14)


def refusing_attention_dropout(export: Export) -> Export:
    """An export that ends where scaled_dot_product_attention has dropout: an unknown form of it may drop nothing."""
    attention = importlib.import_module("torch.onnx.symbolic_opset14").scaled_dot_product_attention

    def symbolic(g: Any, query: Any, key: Any, value: Any, mask: Any, dropout: Any, *rest: Any) -> Any:
        if _constant(dropout) != 0:
            raise RuntimeError(
                f"scaled_dot_product_attention with dropout: how torch {torch.__version__} exports it is not known "
                "here, and it may drop nothing; use model.attention=eager, or attention without dropout"
            )
        return attention(g, query, key, value, mask, dropout, *rest)

    return _registered(export, "aten::scaled_dot_product_attention", symbolic, 14)


def _constant(value: Any) -> Any:
    from torch.onnx import symbolic_helper

    return symbolic_helper._maybe_get_const(value, "f")


def stopping_at_detach(export: Export) -> Export:
    """An export in which `detach` ends the gradient, as a copy that ORT is told not to derive; torch leaves it out."""
    _c().register_custom_stop_gradient_edges("org.pytorch.aten::ATen::clone::", {0})

    def symbolic(g: Any, x: Any) -> Any:
        no_format = g.op("prim::Constant")
        no_format.setType(torch._C.OptionalType.ofTensor())
        copied = g.op("org.pytorch.aten::ATen", x, no_format, operator_s="clone", overload_name_s="")
        copied.setType(x.type())
        return copied

    return _registered(export, "aten::detach", symbolic, 9)


def _c() -> Any:
    return importlib.import_module("onnxruntime.capi._pybind_state")


class _TrainingDropout:
    """A graph being written, in which every Dropout has its training flag and its mask."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)

    def op(self, kind: str, *inputs: Any, **attributes: Any) -> Any:
        if kind != "Dropout":
            return self._graph.op(kind, *inputs, **attributes)
        training = self._graph.op("Constant", value_t=torch.tensor(True))
        return self._graph.op("Dropout", *inputs, training, outputs=2)[0]


def _unflatten(g: Any, tensor: Any, dim: Any, sizes: Any) -> Any:
    from torch.onnx import symbolic_helper

    rank = symbolic_helper._get_tensor_rank(tensor)
    place = symbolic_helper._maybe_get_const(dim, "i")
    if rank is None or not isinstance(place, int):
        return importlib.import_module("torch.onnx.symbolic_opset13").unflatten(g, tensor, dim, sizes)
    place %= rank
    shape = g.op("Shape", tensor)

    def dimensions(first: int, end: int) -> list[Any]:
        bounds = [g.op("Constant", value_t=torch.tensor([bound])) for bound in (first, end)]
        return [g.op("Slice", shape, *bounds)] if first < end else []

    parts = [*dimensions(0, place), sizes, *dimensions(place + 1, rank)]
    return symbolic_helper._reshape_helper(g, tensor, g.op("Concat", *parts, axis_i=0))


def _registered(export: Export, name: str, symbolic: Callable[..., Any], opset: int) -> Export:
    @functools.wraps(export)
    def export_with_symbolic(*args: Any, **kwargs: Any) -> Any:
        torch.onnx.register_custom_op_symbolic(name, symbolic, opset)
        try:
            return export(*args, **kwargs)
        finally:
            torch.onnx.unregister_custom_op_symbolic(name, opset)

    return export_with_symbolic
