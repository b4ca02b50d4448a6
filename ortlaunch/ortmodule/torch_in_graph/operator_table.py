"""Torch operators that neither torch's exporter nor ONNX Runtime computes as torch does.

Each row decides between two remedies: the operator is written in an exact ONNX form here, or torch
itself computes it, called from ONNX Runtime's graph (torch_in_graph/operator_translation.py). All
other operators use the exporter's forms. If the exporter has no form, or ONNX Runtime no gradient
(base/differentiable.py), torch computes them too. A new row should use torch, unless a form is
measured to be faster.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ortlaunch.ortmodule.tracing import (
    aliases,
    attention_forms,
    cross_entropy,
    elementwise_forms,
    index_forms,
    norm_forms,
    part_forms,
)
from ortlaunch.ortmodule.tracing.symbolics import (
    Export,
    Form,
    constant_numbers,
    ort_forms,
    wrap_with_forms,
)

TORCH = None
"""The value of `Operator.form` if torch computes the operator."""
_FLOATS = ("Float", "Double", "Half", "BFloat16")
# Orders of norms whose exported forms are right.
_EXACT_NORM_ORDERS = (0.0, 1.0, 2.0, math.inf, -math.inf)
_POOLS = ("avg_pool2d", "max_pool2d", "adaptive_avg_pool2d")
_UPSAMPLES = (
    "bicubic2d", "bilinear2d", "linear1d", "nearest1d", "nearest2d", "nearest3d", "trilinear3d"
)  # fmt: skip


def _is_any_call(inputs: Sequence[Any]) -> bool:
    return True


def _are_floats(inputs: Sequence[Any]) -> bool:
    return all(value.type().scalarType() in _FLOATS for value in inputs[:2])


def _has_float(inputs: Sequence[Any]) -> bool:
    return any(value.type().scalarType() in _FLOATS for value in inputs[:2])


def _is_first_scalar(inputs: Sequence[Any]) -> bool:
    return bool(inputs[0].type().dim() == 0)


def _has_several_indices(inputs: Sequence[Any]) -> bool:
    """Return whether there are several index tensors, of values and not of sizes alone."""
    indices = list(inputs[1].node().inputs())
    pending = [index for index in indices if not index.node().mustBeNone()]
    if len(pending) < 2:
        return False
    while pending:
        node = pending.pop().node()
        if node.kind() == "prim::Param":
            return True
        pending += [] if node.kind() == "aten::size" else node.inputs()
    return False


def _may_be_negative(inputs: Sequence[Any]) -> bool:
    """Return whether an index is the model's, not one that this package has made."""
    stack = str(inputs[2].node().sourceRange())
    own_code_pattern = (
        rf"{re.escape(cross_entropy.__file__)}|{re.escape(aliases.__file__)}\(\d+\): _written"
    )
    return re.search(own_code_pattern, stack) is None


def _divides_by_values(inputs: Sequence[Any]) -> bool:
    """Return whether integers are divided by values of a tensor, which may be 0."""
    divisor = inputs[1]
    is_number = divisor.type().dim() == 0 and inputs[0].type().dim() == 0
    return not _has_float(inputs) and divisor.node().kind() != "prim::Constant" and not is_number


def _may_have_batch_strides(inputs: Sequence[Any]) -> bool:
    """Return whether strides may be those of the first batch, or of a tensor not contiguous."""
    sizes, strides = inputs[0].type().sizes(), inputs[0].type().strides()
    if not sizes or not strides or None in sizes[1:]:
        return True
    return list(strides) != [math.prod(sizes[dim:]) for dim in range(1, len(sizes) + 1)]


class Operator(NamedTuple):
    """A row of the table: an operator of torch and the reason for its remedy."""

    name: str
    """The operator's name without `aten::`."""
    form: Form | None
    """The function that writes the operator in ONNX, or TORCH."""
    fault: str
    """The fault of the exporter's form, or of ONNX Runtime's gradient of that form."""
    condition: Callable[[Sequence[Any]], bool] = _is_any_call
    """For TORCH: a condition on the inputs of a call in the traced graph."""


OPERATORS = (
    # Shapes and indices
    Operator(
        "unflatten", attention_forms.unflatten, "ORT's shape inference ends (nn.MultiheadAttention)"
    ),
    Operator(
        "index", index_forms.index, "several index tensors: negative ones, masks of more dimensions"
    ),
    Operator(
        "index",
        TORCH,
        "several index tensors: one too large is of another row",
        _has_several_indices,
    ),
    Operator("index_select", TORCH, "a negative index is from the end", _may_be_negative),
    Operator("scatter", TORCH, "as `index_select`", _may_be_negative),
    Operator("scatter_reduce", TORCH, "as `index_select`"),
    Operator("one_hot", TORCH, "a class too many or a negative one is none"),
    Operator(
        "index_put", index_forms.index_put, "no broadcast of values; keeps one of repeated places"
    ),
    Operator("scatter_add", TORCH, "no gradient of what it adds to; as `index_select`"),
    Operator("index_add", TORCH, "keeps one of repeated places"),
    Operator("index_copy", TORCH, "ends at a negative dimension"),
    Operator("index_fill", TORCH, "ends at a negative dimension"),
    Operator("flip", TORCH, "a slice backwards, at which ORT's gradient ends"),
    Operator("chunk", part_forms.chunk, "a sequence, where there are fewer parts"),
    Operator("split", part_forms.split, "the last part is taken for a whole one"),
    Operator("tensor_split", TORCH, "ORT's shape inference ends; sizes of the first batch"),
    Operator("diff", index_forms.diff, "has no form"),
    Operator(
        "as_strided",
        TORCH,
        "takes every tensor for contiguous (Longformer)",
        _may_have_batch_strides,
    ),
    Operator("roll", TORCH, "a shift beyond the size is none"),
    Operator("cumsum", index_forms.cumsum, "of truths: ends the export"),
    # Types and gradients
    Operator(
        "to",
        elementwise_forms.form_without_equal_casts("to", 9),
        "a cast to the type that a tensor has: ORT fails to remove it",
    ),
    Operator(
        "log_softmax", elementwise_forms.form_without_equal_casts("log_softmax", 13), "as `to`"
    ),
    Operator("detach", elementwise_forms.detach, "is left out: the gradient goes through"),
    # Functions of each element
    Operator("floor_divide", index_forms.floor_divide, "rounds towards zero"),
    Operator("floor_divide", TORCH, "rounds towards zero", _has_float),
    *(
        Operator(name, TORCH, "by 0: ends the process", _divides_by_values)
        for name in ("floor_divide", "fmod", "remainder")
    ),
    Operator(
        "div",
        TORCH,
        "rounds a quotient that float32 has rounded up; of integers by 0: ends the process",
        lambda inputs: len(inputs) > 2 and (_has_float(inputs) or _divides_by_values(inputs)),
    ),
    Operator(
        "pow",
        TORCH,
        "of integers by way of float64: not exact, not wrapped",
        lambda inputs: not _has_float(inputs),
    ),
    # The table has no underscores at the end of names.
    Operator("__rshift", TORCH, "of a negative number: rounds towards zero"),
    Operator("bitwise_right_shift", TORCH, "as `>>`"),
    Operator("addcmul", TORCH, "of numbers: a dimension too many", _is_first_scalar),
    Operator("log10", TORCH, "as `addcmul`", _is_first_scalar),
    Operator("nan_to_num", TORCH, "as `addcmul`", _is_first_scalar),
    Operator(
        "clamp", elementwise_forms.clamp, "its gradient is a product, in which infinity becomes nan"
    ),
    Operator("clamp_min", elementwise_forms.clamp_min, "as `clamp`"),
    Operator("clamp_max", elementwise_forms.clamp_max, "as `clamp`"),
    Operator(
        "gelu", elementwise_forms.gelu, "of bfloat16: no kernel; its tanh form: ten operators"
    ),
    Operator("relu6", TORCH, "has a gradient at its bounds"),
    Operator("hardtanh", TORCH, "has a gradient at its bounds"),
    Operator(
        "maximum", TORCH, "as `clamp`; of equal numbers each has the whole gradient", _are_floats
    ),
    Operator("minimum", TORCH, "as `maximum`", _are_floats),
    Operator("log1p", TORCH, "log(1 + x): nothing of a small x"),
    Operator("log_sigmoid", TORCH, "the logarithm of a sigmoid that is 0 from -88 on"),
    Operator("bernoulli", TORCH, "is 1 with the probability of 0"),
    # Sums, norms, distances, losses
    Operator("std", norm_forms.form_with_safe_root("std"), "of equal numbers: a gradient of nan"),
    Operator("std_mean", norm_forms.form_with_safe_root("std_mean"), "as `std`"),
    Operator(
        "frobenius_norm",
        norm_forms.form_with_safe_root("frobenius_norm"),
        "of zeros: a gradient of nan",
    ),
    Operator(
        "linalg_vector_norm",
        TORCH,
        "of other orders: nan at zero",
        lambda inputs: not set(constant_numbers(inputs[1])) <= set(_EXACT_NORM_ORDERS),
    ),
    Operator("cdist", TORCH, "nan behind equal vectors"),
    Operator("cosine_similarity", TORCH, "nan behind vanishing vectors; a dimension too many"),
    Operator(
        "pairwise_distance", TORCH, "nan behind equal vectors; p = 1 and 3 without absolute values"
    ),
    Operator(
        "cross_entropy_loss",
        TORCH,
        "takes labels that are no class",
        lambda inputs: inputs[0].type().dim() != 2,
    ),
    *(
        Operator(name, TORCH, "takes labels that are no class")
        for name in ("nll_loss", "nll_loss2d", "nll_loss_nd")
    ),
    Operator("binary_cross_entropy", TORCH, "infinity from a probability of 0; takes one above 1"),
    Operator("binary_cross_entropy_with_logits", TORCH, "infinity from a score of 17 on"),
    # Layers
    Operator(
        "scaled_dot_product_attention",
        attention_forms.attention,
        "dropout without a mask; rows of nan",
    ),
    Operator("layer_norm", norm_forms.layer_norm, "without a bias: a wrong gradient"),
    Operator("embedding_bag", TORCH, "other sums"),
    *(
        Operator(
            name,
            TORCH,
            "without a batch: ORT's shape inference ends",
            lambda inputs: inputs[0].type().dim() == 3,
        )
        for name in _POOLS
    ),
    *(
        Operator(
            f"upsample_{name}",
            TORCH,
            "ORT's gradient takes the sizes' quotient for the scale",
            lambda inputs: any(scale != int(scale) for scale in constant_numbers(inputs[-1])),
        )
        for name in _UPSAMPLES
    ),
)
_TORCH_ROWS_BY_NAME: dict[str, list[Operator]] = {}
for _row in OPERATORS:
    if _row.form is TORCH:
        _TORCH_ROWS_BY_NAME.setdefault(f"aten::{_row.name}", []).append(_row)
# Operators that draw random numbers. torch.manual_seed does not set ONNX Runtime's generator, so
# that torch draws them.
DRAWING_OPERATORS = {
    "aten::bernoulli", "aten::normal", "aten::rand", "aten::rand_like", "aten::randint", "aten::randint_like",
    "aten::randn", "aten::randn_like", "aten::randperm",
}  # fmt: skip


def is_computed_by_torch(operator_name: str, inputs: Sequence[Any]) -> bool:
    """Return whether torch computes a call, by the table.

    Args:
        operator_name: the operator's full name.
        inputs: the call's inputs in the traced graph.
    """
    return any(row.condition(inputs) for row in _TORCH_ROWS_BY_NAME.get(operator_name, ()))


def wrap_with_exact_forms(export: Export, *operator_names: str) -> Export:
    """Wrap an export so that it uses the table's forms and ORT's, or only the table's of `operator_names`."""

    def active_forms() -> dict[str, Form]:
        rows = (row for row in OPERATORS if not operator_names or row.name in operator_names)
        table_forms = {f"aten::{row.name}": row.form for row in rows if row.form}
        return table_forms if operator_names else {**ort_forms(), **table_forms}

    export_with_forms = wrap_with_forms(export, active_forms)

    def export_with_operators(*args: Any, **kwargs: Any) -> Any:
        # torch's fast path for attention in eval mode has no ONNX form, so it is off during the
        # export.
        is_fast_path_enabled = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            return export_with_forms(*args, **kwargs)
        finally:
            torch.backends.mha.set_fastpath_enabled(is_fast_path_enabled)

    return export_with_operators
