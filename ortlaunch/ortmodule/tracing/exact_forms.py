"""ONNX forms of torch's exporter that are another function than torch's: far out, at zero, and at a bound.

A sigmoid that is 1 in float32 gave BCEWithLogitsLoss infinity or nan; the standard deviation of equal numbers had a
gradient of nan; relu6 had one where it is zero. What has no such form here, and stays torch's, is in `is_torchs`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ortlaunch.ortmodule.tracing.symbolics import Export, Graph, registered, type_of

# cosine_similarity, pairwise_distance and cdist: nan behind equal or vanishing vectors, p = 1 and 3 without absolute
# values, a dimension too many. log1p: log(1 + x), nothing of a small x. embedding_bag: other sums. flip: a slice
# backwards, which ends ORT's gradient. index_copy, index_fill: an empty AssertionError where the dimension is negative.
_TORCHS = {
    f"aten::{name}"
    for name in ("cdist", "cosine_similarity", "embedding_bag", "flip", "index_copy", "index_fill", "log1p",
                 "pairwise_distance")
}  # fmt: skip
_NORMS = (0.0, 1.0, 2.0, math.inf, -math.inf)
_MASKS = (torch.bool, torch.uint8)
_OLDEST = 14  # of the opsets that can be asked for


def is_torchs(name: str, inputs: Sequence[Any]) -> bool:
    """Whether the exporter's form of a call, or ORT's gradient of it, is not what torch computes."""
    if name.startswith("aten::upsample_"):  # ORT's gradient takes the sizes' quotient for the scale
        return any(scale != int(scale) for scale in _numbers(inputs[-1]))
    if name == "aten::linalg_vector_norm":
        return not set(_numbers(inputs[1])) <= set(_NORMS)
    return name in _TORCHS


# Of ONNX Runtime's own ones torch.manual_seed repeats none.
DRAWING = {
    "aten::bernoulli", "aten::normal", "aten::rand", "aten::rand_like", "aten::randint", "aten::randint_like",
    "aten::randn", "aten::randn_like", "aten::randperm",
}  # fmt: skip


def _numbers(value: Any) -> list[float]:
    """Of a constant or a list of constants; none where it is computed."""
    parts = list(value.node().inputs()) if value.node().kind() == "prim::ListConstruct" else [value]
    found = [part.toIValue() if part.node().kind() == "prim::Constant" else None for part in parts]
    found = [one.tolist() if isinstance(one, torch.Tensor) else one for one in found]
    flat = [number for one in found for number in (one if isinstance(one, (list, tuple)) else [one])]
    return [float(number) for number in flat if isinstance(number, (int, float))]


def exactly(export: Export) -> Export:
    """An export with these forms."""
    forms: dict[str, Callable[..., Any]] = {
        "log_sigmoid": _log_sigmoid,
        "binary_cross_entropy_with_logits": _cross_entropy,
        "relu6": lambda g, x: _between(g, x, 0.0, 6.0),
        "hardtanh": _hardtanh,
        "maximum": lambda g, x, y: _chosen(g, "Greater", x, y),
        "minimum": lambda g, x, y: _chosen(g, "Less", x, y),
        "index": _index,
        "chunk": _chunk,
        "split": _split,
        "clamp": _clamp,
        "gelu": _gelu,
        "clamp_min": lambda g, x, low: _clamp(g, x, low, None),
        "clamp_max": lambda g, x, high: _clamp(g, x, None, high),
    }
    for name in ("std", "std_mean", "frobenius_norm"):
        forms[name] = _rooted(getattr(importlib.import_module("torch.onnx.symbolic_opset9"), name))
    for name, form in forms.items():
        export = registered(export, f"aten::{name}", form, _OLDEST)
    return export


def _index(g: Any, x: Any, indices: Any) -> Any:
    """Torch's form of several index tensors does not wrap negative values, and takes masks of one dimension only."""
    from torch.onnx import symbolic_helper

    given: list[Any] = []
    for one in symbolic_helper._unpack_list(indices):
        given += [one] if symbolic_helper._is_none(one) or type_of(one) not in _MASKS else _places(g, one)
    tensors = [dim for dim, one in enumerate(given) if not symbolic_helper._is_none(one)]
    for dim in tensors if len(tensors) > 1 else ():
        place = g.op("Cast", given[dim], to_i=torch.onnx.TensorProtoDataType.INT64.value)
        from_end = g.op("Add", place, g.op("Gather", g.op("Shape", x), _integers(g, dim)))
        given[dim] = g.op("Where", g.op("Less", place, _integers(g, 0)), from_end, place)
        indices = g.op("prim::ListConstruct", *given)
    return importlib.import_module("torch.onnx.symbolic_opset11").index(g, x, indices)


def _places(g: Any, mask: Any) -> list[Any]:
    """The places of a mask's true values: an index tensor for each dimension."""
    found = g.op("NonZero", mask)
    return [g.op("Gather", found, _integers(g, dim)) for dim in range(mask.type().dim())]


def _integers(g: Any, values: int | list[int]) -> Any:
    return g.op("Constant", value_t=torch.tensor(values))


def _chunk(g: Any, x: Any, chunks: Any, dim: Any) -> Any:
    """Fewer parts than requested, such as 3 of a size of 5 in 4: torch's form is a sequence, which ORT cannot infer."""
    from torch.onnx import symbolic_helper

    count, axis = (symbolic_helper._get_const(value, "i", "chunk") for value in (chunks, dim))
    number = next(use.user for use in g.original_node.output().uses()).outputsSize()
    return g.op("prim::ListConstruct", *chunk(g, x, count, axis, number))


def _split(g: Any, x: Any, sizes: Any, dim: Any, _outputs: Any = None) -> Any:
    """Parts of one size: where a dimension's size is unknown, torch's form takes the last one for a whole one."""
    from torch.onnx import symbolic_helper

    size, axis = (symbolic_helper._maybe_get_const(value, "i") for value in (sizes, dim))
    number = symbolic_helper._maybe_get_const(_outputs, "i")
    unknown = symbolic_helper._get_tensor_dim_size(x, axis) is None
    if unknown and isinstance(size, int) and isinstance(number, int):
        return _parts(g, x, _integers(g, [size]), axis, number)
    return importlib.import_module("torch.onnx.symbolic_opset13").split(g, x, sizes, dim, _outputs)


def chunk(g: Any, x: Any, chunks: int, dim: int, number: int = 0) -> list[Any]:
    """Parts of a size that follows from the dimension's.

    number: of parts, where it is not `chunks`.
    """
    size = g.op("Gather", g.op("Shape", x), _integers(g, [dim]))
    each = g.op("Div", g.op("Add", size, _integers(g, [chunks - 1])), _integers(g, [chunks]))
    return _parts(g, x, each, dim, number or chunks)


def _parts(g: Any, x: Any, each: Any, dim: int, number: int) -> list[Any]:
    """A Split into as many parts as were traced, which fails in a pass where there are more or fewer.

    Their sizes are unknown to the exporter, which would take the traced ones for constants.

    each: the size of all parts but the last, which may be smaller.
    """
    size = g.op("Gather", g.op("Shape", x), _integers(g, [dim]))
    rest = g.op("Sub", size, g.op("Mul", each, _integers(g, [number - 1])))
    last = g.op("Min", each, rest)
    if number > 1:  # fewer parts: a whole last one is too much for the dimension, so that Split fails
        last = g.op("Where", g.op("Less", rest, _integers(g, [1])), each, last)
    split = g.op("Split", x, g.op("Concat", *[each] * (number - 1), last, axis_i=0), axis_i=dim, outputs=number)
    made: list[Any] = list(split) if number > 1 else [split]
    for part in made:
        part.setType(x.type().with_sizes([None] * x.type().dim()))
    return made


def _constant(g: Any, number: float, like: Any) -> Any:
    return g.op("Constant", value_t=torch.tensor(number, dtype=type_of(like)))


def _log_sigmoid(g: Any, x: Any) -> Any:
    """min(x, 0) - log(1 + exp(-|x|)): torch's form was the logarithm of a sigmoid that is 0 from -88 on."""
    tail = g.op("Exp", g.op("Neg", g.op("Abs", x)))
    low = g.op("Min", x, _constant(g, 0.0, x))
    return g.op("Sub", low, g.op("Log", g.op("Add", _constant(g, 1.0, x), tail)))


def _cross_entropy(g: Any, x: Any, y: Any, weight: Any, pos_weight: Any, reduction: Any) -> Any:
    """(1 - y) x - (1 + (pos_weight - 1) y) log_sigmoid(x), as torch computes it."""
    from torch.onnx import symbolic_helper

    one = _constant(g, 1.0, x)
    loss = _log_sigmoid(g, x)
    if not symbolic_helper._is_none(pos_weight):
        loss = g.op("Mul", loss, g.op("Add", one, g.op("Mul", g.op("Sub", pos_weight, one), y)))
    loss = g.op("Sub", g.op("Mul", g.op("Sub", one, y), x), loss)
    if not symbolic_helper._is_none(weight):
        loss = g.op("Mul", loss, weight)
    how = symbolic_helper._get_const(reduction, "i", "reduction")
    if how == 1:
        return g.op("ReduceMean", loss, keepdims_i=0)
    return symbolic_helper._reducesum_helper(g, loss, keepdims_i=0) if how == 2 else loss


def _gelu(g: Any, x: Any, approximate: Any) -> Any:
    """In bfloat16 ORT's own, as its fusion makes it of torch's form in other types; bfloat16.py hands it to torch."""
    if type_of(x) == torch.bfloat16 and approximate.node().s("value") == "none":
        return g.op("com.microsoft::Gelu", x)
    return importlib.import_module("torch.onnx.symbolic_opset9").gelu(g, x, approximate)


def _hardtanh(g: Any, x: Any, low: Any, high: Any) -> Any:
    from torch.onnx import symbolic_helper

    return _between(g, x, *(symbolic_helper._get_const(bound, "f", "bound") for bound in (low, high)))


def _between(g: Any, x: Any, low: float, high: float) -> Any:
    """Without a gradient at the bounds, where ONNX's Clip has one."""
    least, most = _constant(g, low, x), _constant(g, high, x)
    under = g.op("Where", g.op("GreaterOrEqual", x, most), most, x)
    return g.op("Where", g.op("LessOrEqual", x, least), least, under)


def _clamp(g: Any, x: Any, low: Any, high: Any) -> Any:
    """By choice: the gradient of ONNX's Clip is a product, in which infinity, as of a root of zero, becomes nan."""
    from torch.onnx import symbolic_helper
    from torch.onnx._type_utils import JitScalarType

    kind = int(JitScalarType.from_value(x, JitScalarType.FLOAT).onnx_type())
    for given, beyond in ((low, "Less"), (high, "Greater")):
        if given is not None and not symbolic_helper._is_none(given):
            bound = g.op("Cast", given, to_i=kind)
            x = g.op("Where", g.op(beyond, x, bound), bound, x)
    return x


def _chosen(g: Any, before: str, x: Any, y: Any) -> Any:
    """The greater or less of two, by choice as `_clamp`; of equal numbers each has half the gradient."""
    from torch.onnx._type_utils import JitScalarType

    kinds = [JitScalarType.from_value(value, JitScalarType.UNDEFINED) for value in (x, y)]
    if kinds[0] != kinds[1] or kinds[0] not in (JitScalarType.FLOAT, JitScalarType.DOUBLE):
        return g.op("Max" if before == "Greater" else "Min", x, y)
    mean = g.op("Mul", g.op("Add", x, y), _constant(g, 0.5, x))
    return g.op("Where", g.op(before, x, y), x, g.op("Where", g.op(before, y, x), y, mean))


def _rooted(form: Callable[..., Any]) -> Callable[..., Any]:
    """A form whose square root has a gradient of zero at zero."""

    def symbolic(g: Any, *args: Any) -> Any:
        def root(square: Any) -> Any:
            zero = _constant(g, 0.0, square)
            nothing = g.op("Equal", square, zero)
            safe = g.op("Where", nothing, _constant(g, 1.0, square), square)
            return g.op("Where", nothing, zero, g.op("Sqrt", safe))

        return form(Graph(g, {"Sqrt": root}), *args)

    return symbolic
