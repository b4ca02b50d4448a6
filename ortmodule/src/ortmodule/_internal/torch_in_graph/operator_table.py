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

from ortmodule._internal.tracing import (
    aliases,
    attention_forms,
    cross_entropy,
    elementwise_forms,
    index_forms,
    norm_forms,
    part_forms,
)
from ortmodule._internal.tracing.symbolics import (
    ExportFunction,
    OperatorForm,
    known_numbers_of_constant_or_list,
    ort_form_by_operator,
    wrap_export_with_operator_forms,
)

TORCH = None
"""The value of `Operator.form` if torch computes the operator."""
_FLOATS = ("Float", "Double", "Half", "BFloat16")
_POOLS = ("avg_pool2d", "max_pool2d", "adaptive_avg_pool2d")
_UPSAMPLES = (
    "bicubic2d", "bilinear2d", "linear1d", "nearest1d", "nearest2d", "nearest3d", "trilinear3d"
)  # fmt: skip


def _is_any_call(traced_inputs: Sequence[Any]) -> bool:
    return True


def _are_first_two_floats(traced_inputs: Sequence[Any]) -> bool:
    return all(value.type().scalarType() in _FLOATS for value in traced_inputs[:2])


def _is_one_of_first_two_float(traced_inputs: Sequence[Any]) -> bool:
    return any(value.type().scalarType() in _FLOATS for value in traced_inputs[:2])


def _is_first_input_scalar(traced_inputs: Sequence[Any]) -> bool:
    return bool(traced_inputs[0].type().dim() == 0)


def _has_several_index_tensors_of_input_values(traced_inputs: Sequence[Any]) -> bool:
    """Return whether there are several index tensors, of values and not of sizes alone."""
    indices = list(traced_inputs[1].node().inputs())
    pending = [index for index in indices if not index.node().mustBeNone()]
    if len(pending) < 2:
        return False
    while pending:
        node = pending.pop().node()
        if node.kind() == "prim::Param":
            return True
        pending += [] if node.kind() == "aten::size" else node.inputs()
    return False


def _is_index_written_outside_this_package(traced_inputs: Sequence[Any]) -> bool:
    """Return whether an index is the model's, not one that this package has made."""
    stack = str(traced_inputs[2].node().sourceRange())
    own_code_pattern = (
        rf"{re.escape(cross_entropy.__file__)}|{re.escape(aliases.__file__)}\(\d+\): "
        "_apply_pending_changes"
    )
    return re.search(own_code_pattern, stack) is None


def _divides_integers_by_tensor_values(traced_inputs: Sequence[Any]) -> bool:
    """Return whether integers are divided by values of a tensor, which may be 0."""
    divisor = traced_inputs[1]
    is_number = divisor.type().dim() == 0 and traced_inputs[0].type().dim() == 0
    return (
        not _is_one_of_first_two_float(traced_inputs)
        and divisor.node().kind() != "prim::Constant"
        and not is_number
    )


def _may_have_unknown_strides(traced_inputs: Sequence[Any]) -> bool:
    """Return whether strides may be those of the first batch, or of a tensor not contiguous."""
    sizes, strides = traced_inputs[0].type().sizes(), traced_inputs[0].type().strides()
    if not sizes or not strides or None in sizes[1:]:
        return True
    return list(strides) != [math.prod(sizes[dim:]) for dim in range(1, len(sizes) + 1)]


class OperatorRemedy(NamedTuple):
    """A row of the table: an operator of torch and the reason for its remedy."""

    name: str
    """The operator's name without `aten::`."""
    form: OperatorForm | None
    """The function that writes the operator in ONNX, or TORCH."""
    fault: str
    """The fault of the exporter's form, or of ONNX Runtime's gradient of that form."""
    condition: Callable[[Sequence[Any]], bool] = _is_any_call
    """For TORCH: a condition on the inputs of a call in the traced graph."""


OPERATORS = (
    # Shapes and indices
    OperatorRemedy(
        "unflatten", attention_forms.unflatten, "ORT's shape inference ends (nn.MultiheadAttention)"
    ),
    OperatorRemedy(
        "index", index_forms.index, "several index tensors: negative ones, masks of more dimensions"
    ),
    OperatorRemedy(
        "index",
        TORCH,
        "several index tensors: one too large is of another row",
        _has_several_index_tensors_of_input_values,
    ),
    OperatorRemedy(
        "index_select",
        TORCH,
        "a negative index is from the end",
        _is_index_written_outside_this_package,
    ),
    OperatorRemedy("scatter", TORCH, "as `index_select`", _is_index_written_outside_this_package),
    OperatorRemedy("scatter_reduce", TORCH, "as `index_select`"),
    OperatorRemedy("one_hot", TORCH, "a class too many or a negative one is none"),
    OperatorRemedy(
        "index_put", index_forms.index_put, "no broadcast of values; keeps one of repeated places"
    ),
    OperatorRemedy("scatter_add", TORCH, "no gradient of what it adds to; as `index_select`"),
    OperatorRemedy("index_add", TORCH, "keeps one of repeated places"),
    OperatorRemedy("index_copy", TORCH, "ends at a negative dimension"),
    OperatorRemedy("index_fill", TORCH, "ends at a negative dimension"),
    OperatorRemedy("flip", TORCH, "a slice backwards, at which ORT's gradient ends"),
    OperatorRemedy("chunk", part_forms.chunk, "a sequence, where there are fewer parts"),
    OperatorRemedy("split", part_forms.split, "the last part is taken for a whole one"),
    OperatorRemedy("tensor_split", TORCH, "ORT's shape inference ends; sizes of the first batch"),
    OperatorRemedy("diff", index_forms.diff, "has no form"),
    OperatorRemedy(
        "as_strided",
        TORCH,
        "takes every tensor for contiguous (Longformer)",
        _may_have_unknown_strides,
    ),
    OperatorRemedy("roll", TORCH, "a shift beyond the size is none"),
    OperatorRemedy("cumsum", index_forms.cumsum, "of truths: ends the export"),
    # Types and gradients
    OperatorRemedy(
        "to",
        elementwise_forms.create_form_without_redundant_casts("to", 9),
        "a cast to the type that a tensor has: ORT fails to remove it",
    ),
    OperatorRemedy(
        "log_softmax",
        elementwise_forms.create_form_without_redundant_casts("log_softmax", 13),
        "as `to`",
    ),
    OperatorRemedy("detach", elementwise_forms.detach, "is left out: the gradient goes through"),
    # Functions of each element
    OperatorRemedy("floor_divide", index_forms.floor_divide, "rounds towards zero"),
    OperatorRemedy("floor_divide", TORCH, "rounds towards zero", _is_one_of_first_two_float),
    *(
        OperatorRemedy(name, TORCH, "by 0: ends the process", _divides_integers_by_tensor_values)
        for name in ("floor_divide", "fmod", "remainder")
    ),
    OperatorRemedy(
        "div",
        TORCH,
        "rounds a quotient that float32 has rounded up; of integers by 0: ends the process",
        lambda inputs: (
            len(inputs) > 2
            and (_is_one_of_first_two_float(inputs) or _divides_integers_by_tensor_values(inputs))
        ),
    ),
    OperatorRemedy(
        "pow",
        TORCH,
        "of integers by way of float64: not exact, not wrapped",
        lambda inputs: not _is_one_of_first_two_float(inputs),
    ),
    # The table has no underscores at the end of names.
    OperatorRemedy("__rshift", TORCH, "of a negative number: rounds towards zero"),
    OperatorRemedy("bitwise_right_shift", TORCH, "as `>>`"),
    OperatorRemedy("addcmul", TORCH, "of numbers: a dimension too many", _is_first_input_scalar),
    OperatorRemedy("log10", TORCH, "as `addcmul`", _is_first_input_scalar),
    OperatorRemedy("nan_to_num", TORCH, "as `addcmul`", _is_first_input_scalar),
    OperatorRemedy(
        "clamp", elementwise_forms.clamp, "its gradient is a product, in which infinity becomes nan"
    ),
    OperatorRemedy("clamp_min", elementwise_forms.clamp_min, "as `clamp`"),
    OperatorRemedy("clamp_max", elementwise_forms.clamp_max, "as `clamp`"),
    OperatorRemedy(
        "gelu", elementwise_forms.gelu, "of bfloat16: no kernel; its tanh form: ten operators"
    ),
    OperatorRemedy("relu6", TORCH, "has a gradient at its bounds"),
    OperatorRemedy("hardtanh", TORCH, "has a gradient at its bounds"),
    OperatorRemedy(
        "maximum",
        TORCH,
        "as `clamp`; of equal numbers each has the whole gradient",
        _are_first_two_floats,
    ),
    OperatorRemedy("minimum", TORCH, "as `maximum`", _are_first_two_floats),
    OperatorRemedy("log1p", TORCH, "log(1 + x): nothing of a small x"),
    OperatorRemedy("log_sigmoid", TORCH, "the logarithm of a sigmoid that is 0 from -88 on"),
    OperatorRemedy("bernoulli", TORCH, "is 1 with the probability of 0"),
    # Sums, norms, distances, losses
    OperatorRemedy(
        "std",
        norm_forms.create_form_with_zero_gradient_root("std"),
        "of equal numbers: a gradient of nan",
    ),
    OperatorRemedy(
        "std_mean", norm_forms.create_form_with_zero_gradient_root("std_mean"), "as `std`"
    ),
    OperatorRemedy(
        "frobenius_norm",
        norm_forms.create_form_with_zero_gradient_root("frobenius_norm"),
        "of zeros: a gradient of nan",
    ),
    OperatorRemedy("cdist", TORCH, "nan behind equal vectors"),
    OperatorRemedy(
        "cosine_similarity", TORCH, "nan behind vanishing vectors; a dimension too many"
    ),
    OperatorRemedy(
        "pairwise_distance", TORCH, "nan behind equal vectors; p = 1 and 3 without absolute values"
    ),
    OperatorRemedy(
        "cross_entropy_loss",
        TORCH,
        "takes labels that are no class",
        lambda inputs: inputs[0].type().dim() != 2,
    ),
    *(
        OperatorRemedy(name, TORCH, "takes labels that are no class")
        for name in ("nll_loss", "nll_loss2d", "nll_loss_nd")
    ),
    OperatorRemedy("binary_cross_entropy_with_logits", TORCH, "infinity from a score of 17 on"),
    # Layers
    OperatorRemedy(
        "scaled_dot_product_attention",
        attention_forms.attention,
        "dropout without a mask; rows of nan",
    ),
    OperatorRemedy("layer_norm", norm_forms.layer_norm, "without a bias: a wrong gradient"),
    OperatorRemedy("embedding_bag", TORCH, "other sums"),
    *(
        OperatorRemedy(
            name,
            TORCH,
            "without a batch: ORT's shape inference ends",
            lambda inputs: inputs[0].type().dim() == 3,
        )
        for name in _POOLS
    ),
    *(
        OperatorRemedy(
            f"upsample_{name}",
            TORCH,
            "ORT's gradient takes the sizes' quotient for the scale",
            lambda inputs: any(
                scale != int(scale) for scale in known_numbers_of_constant_or_list(inputs[-1])
            ),
        )
        for name in _UPSAMPLES
    ),
)
_TORCH_ROWS_BY_NAME: dict[str, list[OperatorRemedy]] = {}
for _row in OPERATORS:
    if _row.form is TORCH:
        _TORCH_ROWS_BY_NAME.setdefault(f"aten::{_row.name}", []).append(_row)
# Operators that draw random numbers. torch.manual_seed does not set ONNX Runtime's generator, so
# that torch draws them.
DRAWING_OPERATORS = {
    "aten::bernoulli", "aten::normal", "aten::rand", "aten::rand_like", "aten::randint", "aten::randint_like",
    "aten::randn", "aten::randn_like", "aten::randperm",
}  # fmt: skip


def table_lets_torch_compute_call(operator_name: str, traced_inputs: Sequence[Any]) -> bool:
    """Return whether torch computes a call, by the table.

    Args:
        operator_name: the operator's full name.
        traced_inputs: the call's inputs in the traced graph.
    """
    return any(row.condition(traced_inputs) for row in _TORCH_ROWS_BY_NAME.get(operator_name, ()))


def wrap_export_with_exact_forms_without_fast_path(
    torch_export: ExportFunction, *only_operator_names: str
) -> ExportFunction:
    """Wrap an export so that it uses the table's forms and ORT's, or only the table's of `only_operator_names`."""

    def active_forms() -> dict[str, OperatorForm]:
        rows = (
            row for row in OPERATORS if not only_operator_names or row.name in only_operator_names
        )
        table_forms = {f"aten::{row.name}": row.form for row in rows if row.form}
        return table_forms if only_operator_names else {**ort_form_by_operator(), **table_forms}

    export_with_forms = wrap_export_with_operator_forms(torch_export, active_forms)

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
