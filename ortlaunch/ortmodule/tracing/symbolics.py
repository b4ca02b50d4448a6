"""ONNX forms that stand in for torch's during ORT's exports, where ORT cannot take torch's own.

Each is registered for the length of one export, so that `torch.onnx.export` as the user's code calls it stays as it is.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
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
            return registered(export, "aten::unflatten", _unflatten, 13)(*args, **kwargs)
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)

    return export_with_unflatten


def with_attention_dropout(export: Export) -> Export:
    """An export in which scaled_dot_product_attention's dropout is one for training.

    Torch writes an ONNX Dropout without a mask, for which ORT cannot build a gradient, and without its training flag,
    with which it would drop nothing. Where the source is another, `refusing_attention_dropout` takes the place of this.
    A row that a boolean mask leaves nothing, such as that of padding, is nan in torch's form until its end, and the
    gradient stays so: here such a row attends to everything first, and is then set to zero. Torch writes masks as
    float32: in a float16 model the exporter would then lift the scores and all that follows them to float32.
    """
    attention = importlib.import_module("torch.onnx.symbolic_opset14").scaled_dot_product_attention
    source = inspect.getsource(attention)
    knows_nan = "IsNaN" in source  # of an empty row, from torch 2.7 on

    def symbolic(g: Any, query: Any, key: Any, value: Any, mask: Any, *rest: Any) -> Any:
        own: dict[str, Callable[..., Any]] = {
            "Dropout": functools.partial(_training_dropout, g),
            "Where": functools.partial(_where_of_type, g, type_of(query)),
        }
        if _is_bool(mask):
            empty = _empty_rows(g, mask)
            filled = g.op("Or", mask, empty)
            filled.setType(mask.type())
            mask, own["IsNaN"] = filled, lambda weights: empty
        attended = attention(Graph(g, own), query, key, value, mask, *rest)
        if not own.get("IsNaN") or knows_nan:
            return attended
        return g.op("Where", empty, g.op("Constant", value_t=torch.tensor(0.0, dtype=type_of(query))), attended)

    return registered(export, "aten::scaled_dot_product_attention", symbolic, 14)


def refusing_attention_dropout(export: Export) -> Export:
    """An export that ends where scaled_dot_product_attention has dropout: an unknown form of it may drop nothing."""
    attention = importlib.import_module("torch.onnx.symbolic_opset14").scaled_dot_product_attention

    def symbolic(g: Any, query: Any, key: Any, value: Any, mask: Any, dropout: Any, *rest: Any) -> Any:
        if _constant(dropout) != 0:
            raise RuntimeError(
                f"scaled_dot_product_attention with dropout: how torch {torch.__version__} exports it is not known "
                "here, and it may drop nothing; use attention without dropout, or write it out in the model "
                "(transformers: attn_implementation='eager')"
            )
        return attention(g, query, key, value, mask, dropout, *rest)

    return registered(export, "aten::scaled_dot_product_attention", symbolic, 14)


def _constant(value: Any) -> Any:
    from torch.onnx import symbolic_helper

    return symbolic_helper._maybe_get_const(value, "f")


def stopping_at_detach(export: Export) -> Export:
    """An export in which `detach` ends the gradient, as a copy that ORT is told not to derive; torch leaves it out."""
    clone = "org.pytorch.aten::ATen::clone::"
    _c().register_custom_stop_gradient_edges(clone, {0})
    _c().register_gradient_definition(clone, _no_gradient())  # which ORT wants of a weight's copy all the same

    def symbolic(g: Any, x: Any) -> Any:
        no_format = g.op("prim::Constant")
        no_format.setType(torch._C.OptionalType.ofTensor())
        copied = g.op("org.pytorch.aten::ATen", x, no_format, operator_s="clone", overload_name_s="")
        copied.setType(x.type())
        return copied

    return registered(export, "aten::detach", symbolic, 9)


def _no_gradient() -> Any:
    """Of a node with one input: zeros, as a gradient definition of ORT's."""
    from onnxruntime.training.ortmodule._custom_gradient_registry import _to_gradient_definition

    zero = {"value": 0.0, "dtype": "IElemType(0)", "is_tensor": True}
    nodes = [
        ("Constant", [], ["zero"], {"value": zero}),
        ("Shape", ["I(0)"], ["sizes"]),
        ("Expand", ["zero", "sizes"], ["GI(0)"]),
    ]
    return _to_gradient_definition(nodes)


def _c() -> Any:
    return importlib.import_module("onnxruntime.capi._pybind_state")


def _is_bool(value: Any) -> bool:
    from torch.onnx import symbolic_helper

    return bool(not symbolic_helper._is_none(value) and symbolic_helper._is_bool(value))


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


class Graph:
    """A graph being written, in which functions stand in for some operators."""

    def __init__(self, graph: Any, own: Mapping[str, Callable[..., Any]]) -> None:
        self._graph, self._own = graph, own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)

    def op(self, kind: str, *inputs: Any, **attributes: Any) -> Any:
        if kind in self._own:
            return self._own[kind](*inputs, **attributes)
        return self._graph.op(kind, *inputs, **attributes)


def drawing(export: Export) -> Export:
    """An export in which `bernoulli` is 1 with the probability that it is given; ONNX's own, as ORT has it, is 0."""
    draw = importlib.import_module("torch.onnx.symbolic_opset15").bernoulli

    def symbolic(g: Any, *args: Any) -> Any:
        def drawn(probability: Any, **_: Any) -> Any:
            lot = g.op("RandomUniformLike", probability)
            one, zero = (g.op("Constant", value_t=torch.tensor(n, dtype=type_of(probability))) for n in (1, 0))
            return g.op("Where", g.op("Less", lot, probability), one, zero)

        return draw(Graph(g, {"Bernoulli": drawn}), *args)

    return registered(export, "aten::bernoulli", symbolic, 15)


def casting(export: Export) -> Export:
    """An export without casts to the type that a tensor has: ORT fails to take out one that has two readers."""
    for name, opset in (("to", 9), ("log_softmax", 13)):
        form = getattr(importlib.import_module(f"torch.onnx.symbolic_opset{opset}"), name)
        export = registered(export, f"aten::{name}", _casting(form), opset)
    return export


def _casting(form: Callable[..., Any]) -> Callable[..., Any]:
    from torch.onnx._type_utils import JitScalarType

    def symbolic(g: Any, *args: Any) -> Any:
        def cast(value: Any, to_i: int) -> Any:
            known = JitScalarType.from_value(value, JitScalarType.UNDEFINED)
            same = known != JitScalarType.UNDEFINED and int(known.onnx_type()) == int(to_i)
            return value if same else g.op("Cast", value, to_i=to_i)

        return form(Graph(g, {"Cast": cast}), *args)

    return symbolic


def counting(export: Export) -> Export:
    """An export of `diff` and of a boolean tensor's `cumsum`, for which torch has no form or a wrong one."""
    cumsum = importlib.import_module("torch.onnx.symbolic_opset11").cumsum
    export = registered(export, "aten::diff", _diff, 10)
    return registered(export, "aten::cumsum", lambda g, *args: _cumsum(cumsum, g, *args), 11)


def accumulating(export: Export) -> Export:
    """An export in which `index_add`, and `index_put` that accumulates, add up where an index comes twice.

    Torch's forms keep the last of such values. What they, and `scatter_add`, are added to has a gradient: ORT's, of a
    Scatter that adds, leaves out the places that it adds to, so they are added up apart.
    """
    add = importlib.import_module("torch.onnx.symbolic_opset16").scatter_add
    put = importlib.import_module("torch.onnx.symbolic_opset11").index_put
    for name, symbolic in (
        ("scatter_add", _from_opset_16(lambda g, *args: _scatter_add(add, g, *args))),
        ("index_add", _from_opset_16(_index_add)),
        ("index_put", lambda g, *args: _index_put(put, g, *args)),  # torch 2.4 takes no functools.partial
    ):
        for opset in (14, 16):  # the oldest that can be asked for, and where torch has newer forms
            export = registered(export, f"aten::{name}", symbolic, opset)
    return export


def _from_opset_16(symbolic: Callable[..., Any]) -> Callable[..., Any]:
    """A form that needs a Scatter with a reduction; torch's own of before keeps one value of several."""

    def checked(g: Any, *args: Any) -> Any:
        if g.opset < 16:
            raise RuntimeError(f"sums at indices take Settings.opset 16 or newer, and this export is of {g.opset}")
        return symbolic(g, *args)

    return checked


def _index_put(put: Callable[..., Any], g: Any, into: Any, indices: Any, values: Any, accumulate: Any = None) -> Any:
    from torch.onnx import symbolic_helper

    if accumulate is None or not symbolic_helper._maybe_get_const(accumulate, "b"):
        return put(g, into, indices, values, accumulate)
    if any(symbolic_helper._is_bool(index) for index in symbolic_helper._unpack_list(indices)):
        raise RuntimeError("index_put with accumulate and a mask has no ONNX form that adds up")
    own = {"ScatterND": functools.partial(g.op, "ScatterND", reduction_s="add")}
    return _from_opset_16(put)(Graph(g, own), into, indices, values, accumulate)


def _index_add(g: Any, into: Any, dim: Any, index: Any, values: Any, alpha: Any = None) -> Any:
    from torch.onnx import symbolic_helper

    rank, place = symbolic_helper._get_tensor_rank(values), symbolic_helper._maybe_get_const(dim, "i")
    factor = 1 if alpha is None else symbolic_helper._maybe_get_const(alpha, "f")
    if rank is None or not isinstance(place, int) or factor != 1:
        raise RuntimeError("index_add with another alpha than 1, or of an unknown rank or dimension, has no ONNX form")
    place %= rank
    index = symbolic_helper._unsqueeze_helper(g, index, [axis for axis in range(rank) if axis != place])
    index = g.op("Expand", index, g.op("Shape", values))
    added = g.op("ScatterElements", _zeros(g, into), index, values, axis_i=place, reduction_s="add")
    return g.op("Add", into, added)


def _scatter_add(add: Callable[..., Any], g: Any, into: Any, *args: Any) -> Any:
    return g.op("Add", into, add(g, _zeros(g, into), *args))


def _zeros(g: Any, like: Any) -> Any:
    kind = type_of(like)
    zeros = g.op("ConstantOfShape", g.op("Shape", like), value_t=torch.zeros(1, dtype=kind))
    zeros.setType(like.type())
    return zeros


def type_of(value: Any) -> torch.dtype:
    from torch.onnx._type_utils import JitScalarType

    dtype: torch.dtype = JitScalarType.from_value(value).dtype()
    return dtype


def _diff(g: Any, x: Any, times: Any, dim: Any, before: Any, after: Any) -> Any:
    from torch.onnx import symbolic_helper

    axis = symbolic_helper._get_const(dim, "i", "dim")
    parts = [part for part in (before, x, after) if not symbolic_helper._is_none(part)]
    x = g.op("Concat", *parts, axis_i=axis) if len(parts) > 1 else x
    minus = "Xor" if _is_bool(x) else "Sub"
    for _ in range(symbolic_helper._get_const(times, "i", "n")):
        later = symbolic_helper._slice_helper(g, x, axes=[axis], starts=[1], ends=[sys.maxsize])
        x = g.op(minus, later, symbolic_helper._slice_helper(g, x, axes=[axis], starts=[0], ends=[-1]))
    return x


def _cumsum(cumsum: Callable[..., Any], g: Any, x: Any, dim: Any, dtype: Any = None) -> Any:
    if _is_bool(x):
        x = g.op("Cast", x, to_i=torch.onnx.TensorProtoDataType.INT64.value)
    return cumsum(g, x, dim, dtype)


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


def registered(export: Export, name: str, symbolic: Callable[..., Any], opset: int) -> Export:
    @functools.wraps(export)
    def export_with_symbolic(*args: Any, **kwargs: Any) -> Any:
        torch.onnx.register_custom_op_symbolic(name, symbolic, opset)
        try:
            return export(*args, **kwargs)
        finally:
            torch.onnx.unregister_custom_op_symbolic(name, opset)

    return export_with_symbolic
