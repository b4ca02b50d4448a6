"""Torch operators that neither torch's exporter nor ONNX Runtime computes as torch does.

Each row decides between two remedies: the operator is written in an exact ONNX form here, or torch
itself computes it, called from ONNX Runtime's graph (torch_in_graph/operator_translation.py). All
other operators use the exporter's forms. If the exporter has no form, or ONNX Runtime no gradient
(base/gradient_paths.py), torch computes them too. A new row should use torch, unless a form is
measured to be faster. A test runs each row's example with and without the row; one without effect
fails.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ortmodule._internal.base.repair_registry import repair
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

Example = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A use of an operator, `example(h, k)`.

`h` is a float tensor of (rows, 6) that depends on a weight, `k` an int64 tensor of (rows,). The
first batch has six rows, and its `k` has numbers from 1 to 5. The second has five rows, and its `k`
also has 0, -1 and 7.
"""
TORCH = None
"""The value of `OperatorRemedy.form` if torch computes the operator."""
_FLOATS = ("Float", "Double", "Half", "BFloat16")
_INTEGER_DIVISIONS: dict[str, Example] = {
    "floor_divide": lambda h, k: h * ((k + 9) // k)[:, None],
    "fmod": lambda h, k: h * torch.fmod(k + 9, k)[:, None],
    "remainder": lambda h, k: h * ((k + 9) % k)[:, None],
}
# The scores and labels have no gradient: with one, torch computes the loss in any case.
_LABEL_LOSSES: dict[str, Example] = {
    "nll_loss": lambda h, k: h * torch.ops.aten.nll_loss(torch.zeros_like(h), -(k < 0).long()),
    "nll_loss2d": lambda h, k: (
        h
        * torch.ops.aten.nll_loss2d(
            torch.zeros_like(h)[..., None, None], -(k < 0).long()[:, None, None]
        )
    ),
    "nll_loss_nd": lambda h, k: h * functional.nll_loss(torch.zeros_like(h), -(k < 0).long()),
}
_NORMS: dict[str, Example] = {
    "std": lambda h, k: (h * 0).std(-1),
    "std_mean": lambda h, k: torch.std_mean(h * 0, -1)[0],
    "frobenius_norm": lambda h, k: torch.frobenius_norm(h * 0, -1),
    "linalg_norm": lambda h, k: torch.linalg.norm(h * 0, "fro"),
    "linalg_matrix_norm": lambda h, k: torch.linalg.matrix_norm(h * 0),
}
_POOLS: dict[str, Example] = {
    "avg_pool2d": lambda h, k: functional.avg_pool2d(h[None], 2),
    "max_pool2d": lambda h, k: functional.max_pool2d(h[None], 2),
    "adaptive_avg_pool2d": lambda h, k: functional.adaptive_avg_pool2d(h[None], 2),
}
_UPSAMPLES = (
    ("bicubic", 2), ("bilinear", 2), ("linear", 1), ("nearest", 1), ("nearest", 2), ("nearest", 3), ("trilinear", 3)
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


def _create_upsample_example(mode: str, dimension_count: int) -> Example:
    return lambda h, k: functional.interpolate(
        h[(None,) * dimension_count], scale_factor=1.7, mode=mode
    )


class OperatorRemedy(NamedTuple):
    """A row of the table: an operator of torch and the reason for its remedy."""

    name: str
    """The operator's name without `aten::`."""
    form: OperatorForm | None
    """The function that writes the operator in ONNX, or TORCH."""
    fault: str
    """The fault without the row, of the exporter's form or of ORT's gradient of it."""
    example: Example
    """A use that shows the fault."""
    condition: Callable[[Sequence[Any]], bool] = _is_any_call
    """For TORCH: a condition on the inputs of a call in the traced graph."""
    is_for_speed: bool = False
    """Whether the row changes no value, but makes ORT's graph smaller."""


OPERATORS = (
    # Shapes and indices
    OperatorRemedy(
        "unflatten",
        attention_forms.unflatten,
        "ORT cannot infer the form's shapes, so the model is exported twice (nn.MultiheadAttention).",
        lambda h, k: h.unflatten(-1, (2, 3)),
    ),
    OperatorRemedy(
        "index",
        index_forms.index,
        "With several index tensors, a negative index reads another element.",
        lambda h, k: h[torch.tensor([0, 1]), torch.tensor([-1, -2])],
    ),
    OperatorRemedy(
        "index",
        TORCH,
        "With several index tensors, an index that is too large reads another row.",
        lambda h, k: h[k * 0, k.clamp(min=0)],
        _has_several_index_tensors_of_input_values,
    ),
    OperatorRemedy(
        "index_select",
        TORCH,
        "A negative index counts from the end; torch raises an error.",
        lambda h, k: h.index_select(1, k.clamp(max=5)),
        _is_index_written_outside_this_package,
    ),
    OperatorRemedy(
        "scatter",
        TORCH,
        "A negative index counts from the end; torch raises an error.",
        lambda h, k: h * torch.zeros_like(h).scatter(1, k[:, None].clamp(max=5), 1.0),
        _is_index_written_outside_this_package,
    ),
    OperatorRemedy(
        "scatter_reduce",
        TORCH,
        "The exporter's form ends the process.",
        lambda h, k: (
            h
            * torch.zeros_like(h).scatter_reduce(
                1, (k < 0).long()[:, None], torch.ones_like(h), "amax"
            )
        ),
    ),
    OperatorRemedy(
        "one_hot",
        TORCH,
        "A class that is too large gives a row of zeros; torch raises an error.",
        lambda h, k: h * functional.one_hot(k.clamp(min=0), 6),
    ),
    OperatorRemedy(
        "index_put",
        index_forms.index_put,
        "Of several values that are added at one index, ONNX keeps only one.",
        lambda h, k: h.index_put((torch.tensor([0, 0]),), h[1:3], accumulate=True),
    ),
    OperatorRemedy(
        "scatter_add",
        TORCH,
        "A negative index counts from the end; torch raises an error.",
        lambda h, k: h * h.detach().scatter_add(1, k[:, None].clamp(max=5), h.detach()),
    ),
    OperatorRemedy(
        "index_add",
        TORCH,
        "Of several values that are added at one index, ONNX keeps only one.",
        lambda h, k: h * h.detach().index_add(1, torch.tensor([0, 0]), h.detach()[:, 1:3]),
    ),
    OperatorRemedy(
        "index_copy",
        TORCH,
        "ORT cannot infer the form's shapes, so the model is exported twice.",
        lambda h, k: h.index_copy(-1, torch.tensor([0]), h[:, 1:2]),
    ),
    OperatorRemedy(
        "index_fill",
        TORCH,
        "ORT cannot infer the form's shapes, so the model is exported twice.",
        lambda h, k: h.index_fill(-1, torch.tensor([0, 2]), -1.5),
    ),
    OperatorRemedy(
        "flip",
        TORCH,
        "ONNX reads a slice backwards, and ORT's gradient of it ends the pass.",
        lambda h, k: h.flip(-1),
    ),
    OperatorRemedy(
        "chunk",
        part_forms.chunk,
        "ORT cannot infer the shapes where there are fewer parts than requested.",
        lambda h, k: torch.cat(h.chunk(4, -1)[::-1], -1),
    ),
    OperatorRemedy(
        "split",
        part_forms.split,
        "The last part is taken to be as large as the others, and the pass ends.",
        lambda h, k: h.split(4)[1],
    ),
    OperatorRemedy(
        "tensor_split",
        TORCH,
        "ORT cannot infer the form's shapes, so the model is exported twice.",
        lambda h, k: h * torch.ones_like(h).tensor_split(2)[1].sum(),
    ),
    OperatorRemedy(
        "diff",
        index_forms.diff,
        "The exporter has no ONNX form for differences.",
        lambda h, k: h.diff(dim=0),
    ),
    OperatorRemedy(
        "as_strided",
        TORCH,
        "The exporter reads every tensor as contiguous (Longformer); torch's call is refused.",
        lambda h, k: h.t().as_strided((6, 2), (1, 6)),
        _may_have_unknown_strides,
    ),
    OperatorRemedy(
        "roll",
        TORCH,
        "A shift that is larger than the dimension moves nothing.",
        lambda h, k: h.roll(7, -1),
    ),
    OperatorRemedy(
        "cumsum",
        index_forms.cumsum,
        "ONNX has no cumulative sum of booleans, so the export fails.",
        lambda h, k: h * (h > 0).cumsum(1),
    ),
    # Types and gradients
    OperatorRemedy(
        "to",
        elementwise_forms.create_form_without_redundant_casts("to", 9),
        "A cast to the type that a tensor has already makes ORT's graph optimizer fail.",
        lambda h, k: h.float().square(),
    ),
    OperatorRemedy(
        "log_softmax",
        elementwise_forms.create_form_without_redundant_casts("log_softmax", 13),
        "A cast to the type that a tensor has already makes ORT's graph optimizer fail.",
        lambda h, k: functional.log_softmax(h, -1, dtype=torch.float32).square(),
    ),
    OperatorRemedy(
        "detach",
        elementwise_forms.detach,
        "The exporter leaves detach out, so the gradient passes through it.",
        lambda h, k: h * h.detach(),
    ),
    # Functions of each element
    OperatorRemedy(
        "floor_divide",
        index_forms.floor_divide,
        "A negative quotient is rounded towards zero instead of down.",
        lambda h, k: h * ((h * 9).long() // 4),
    ),
    OperatorRemedy(
        "floor_divide",
        TORCH,
        "The form for integers uses ONNX's Mod, which takes no floats.",
        lambda h, k: h * (h.detach() // 0.3),
        _is_one_of_first_two_float,
    ),
    *(
        OperatorRemedy(
            name,
            TORCH,
            "An integer division by 0 ends the process or gives a number; torch raises an error.",
            example,
            _divides_integers_by_tensor_values,
        )
        for name, example in _INTEGER_DIVISIONS.items()
    ),
    OperatorRemedy(
        "div",
        TORCH,
        "A rounded quotient can be one too large; an integer division by 0 ends the process.",
        lambda h, k: h * torch.div(h.detach() * 0 + 1, 0.1, rounding_mode="floor"),
        lambda inputs: (
            len(inputs) > 2
            and (_is_one_of_first_two_float(inputs) or _divides_integers_by_tensor_values(inputs))
        ),
    ),
    OperatorRemedy(
        "pow",
        TORCH,
        "Powers of integers are computed in float64, so that large ones are not exact.",
        lambda h, k: h * ((k[:, None] + 30) ** 20 % 1009),
        lambda inputs: not _is_one_of_first_two_float(inputs),
    ),
    # The table has no underscores at the end of names.
    OperatorRemedy(
        "__rshift",
        TORCH,
        "A shift of a negative integer rounds towards zero instead of down.",
        lambda h, k: h * (-k >> 1)[:, None],
    ),
    OperatorRemedy(
        "bitwise_right_shift",
        TORCH,
        "A shift of a negative integer rounds towards zero instead of down.",
        lambda h, k: h * torch.bitwise_right_shift(-k, 1)[:, None],
    ),
    OperatorRemedy(
        "addcmul",
        TORCH,
        "Of tensors without dimensions the result has one dimension.",
        lambda h, k: torch.addcmul(h.sum(), h.mean(), h.mean()),
        _is_first_input_scalar,
    ),
    OperatorRemedy(
        "log10",
        TORCH,
        "Of a tensor without dimensions the result has one dimension.",
        lambda h, k: h.exp().sum().log10(),
        _is_first_input_scalar,
    ),
    OperatorRemedy(
        "nan_to_num",
        TORCH,
        "Of a tensor without dimensions the result has one dimension.",
        lambda h, k: h.sum().nan_to_num(),
        _is_first_input_scalar,
    ),
    OperatorRemedy(
        "clamp",
        elementwise_forms.clamp,
        "ORT's gradient is a product, in which an infinite gradient times 0 becomes nan.",
        lambda h, k: h.clamp(0, 9).sqrt(),
    ),
    OperatorRemedy(
        "clamp_min",
        elementwise_forms.clamp_min,
        "ORT's gradient is a product, in which an infinite gradient times 0 becomes nan.",
        lambda h, k: torch.clamp_min(h, 0).sqrt(),
    ),
    OperatorRemedy(
        "clamp_max",
        elementwise_forms.clamp_max,
        "ORT's gradient is a product, in which an infinite gradient times 0 becomes nan.",
        lambda h, k: torch.clamp_max(h, 0).neg().sqrt(),
    ),
    OperatorRemedy(
        "gelu",
        elementwise_forms.gelu,
        "The exporter writes the tanh form as ten operators that ORT does not fuse.",
        lambda h, k: functional.gelu(h, approximate="tanh"),
        is_for_speed=True,
    ),
    OperatorRemedy(
        "relu6",
        TORCH,
        "The gradient at the bounds 0 and 6 is 1; torch's is 0.",
        lambda h, k: functional.relu6(h - h.detach()),
    ),
    OperatorRemedy(
        "hardtanh",
        TORCH,
        "The gradient at the bounds is 1; torch's is 0.",
        lambda h, k: functional.hardtanh(h - h.detach() + 1),
    ),
    OperatorRemedy(
        "maximum",
        TORCH,
        "ORT's gradient is a product, in which an infinite gradient times 0 becomes nan.",
        lambda h, k: torch.maximum(h, torch.tensor(0.0)).sqrt(),
        _are_first_two_floats,
    ),
    OperatorRemedy(
        "minimum",
        TORCH,
        "ORT's gradient is a product, in which an infinite gradient times 0 becomes nan.",
        lambda h, k: torch.minimum(h, torch.tensor(0.0)).neg().sqrt(),
        _are_first_two_floats,
    ),
    OperatorRemedy(
        "log1p",
        TORCH,
        "It is computed as log(1 + x), which is 0 for a small x.",
        lambda h, k: (h * 1e-8).log1p() * 1e8,
    ),
    OperatorRemedy(
        "log_sigmoid",
        TORCH,
        "It is the logarithm of a sigmoid that is 0 below -88, so the result is -inf.",
        lambda h, k: functional.logsigmoid(h * 200),
    ),
    OperatorRemedy(
        "bernoulli",
        TORCH,
        "ORT draws 1 with the probability of 0.",
        lambda h, k: h * torch.bernoulli(torch.ones_like(h)),
    ),
    # Sums, norms, distances, losses
    *(
        OperatorRemedy(
            name,
            norm_forms.create_form_with_zero_gradient_root(name),
            "The gradient of a root of 0, as of equal numbers, is nan; torch's is 0.",
            example,
        )
        for name, example in _NORMS.items()
    ),
    OperatorRemedy(
        "cdist",
        TORCH,
        "The distance of equal vectors is not exactly 0, and its gradient is nan.",
        lambda h, k: torch.cdist(h, h),
    ),
    OperatorRemedy(
        "cosine_similarity",
        TORCH,
        "The gradient at a vector of zeros is nan.",
        lambda h, k: functional.cosine_similarity(h * 0, h.detach(), -1),
    ),
    OperatorRemedy(
        "pairwise_distance",
        TORCH,
        "The exporter takes no absolute values, so that the distance for an odd p is nan.",
        lambda h, k: (
            h
            * functional.pairwise_distance(torch.zeros_like(h), torch.ones_like(h), p=1.0)[:, None]
        ),
    ),
    OperatorRemedy(
        "cross_entropy_loss",
        TORCH,
        "A label outside the range of classes is accepted; torch raises an error.",
        lambda h, k: functional.cross_entropy(h[:, :, None], k[:, None]),
        lambda inputs: inputs[0].type().dim() != 2,
    ),
    *(
        OperatorRemedy(
            name,
            TORCH,
            "A label outside the range of classes is accepted, or the export fails.",
            example,
        )
        for name, example in _LABEL_LOSSES.items()
    ),
    OperatorRemedy(
        "binary_cross_entropy_with_logits",
        TORCH,
        "The loss of a score of 17 or more is infinite or nan.",
        lambda h, k: functional.binary_cross_entropy_with_logits(h * 200, torch.zeros_like(h)),
    ),
    # Layers
    OperatorRemedy(
        "scaled_dot_product_attention",
        attention_forms.attention,
        "ORT cannot derive its dropout; a row that attends to nothing has a gradient of nan.",
        lambda h, k: functional.scaled_dot_product_attention(
            h[None], h[None], h[None], k[:, None] > k
        ),
    ),
    OperatorRemedy(
        "layer_norm",
        norm_forms.layer_norm,
        "ORT's gradient of a LayerNorm without a bias is wrong, or ends the process.",
        lambda h, k: functional.layer_norm(h.unflatten(-1, (2, 3)), (2, 3), h[0].view(2, 3)),
    ),
    OperatorRemedy(
        "embedding_bag",
        TORCH,
        "The exporter's form, a loop over the bags, ends the process.",
        lambda h, k: h * functional.embedding_bag((k > 2).long()[None], torch.eye(6)),
    ),
    *(
        OperatorRemedy(
            name,
            TORCH,
            "Without a batch, ORT cannot infer shapes, so the model is exported twice.",
            example,
            lambda inputs: inputs[0].type().dim() == 3,
        )
        for name, example in _POOLS.items()
    ),
    *(
        OperatorRemedy(
            f"upsample_{mode}{dims}d",
            TORCH,
            "ORT's gradient takes the quotient of the sizes for the scale, or has no CPU kernel.",
            _create_upsample_example(mode, dims),
            lambda inputs: any(
                scale != int(scale) for scale in known_numbers_of_constant_or_list(inputs[-1])
            ),
        )
        for mode, dims in _UPSAMPLES
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


@repair(
    "export_exact_forms",
    "trace wrapper",
    30,
    fault="Forms of operators end the export (`nn.MultiheadAttention`, `torch.diff`, "
    "`tensor_split`) or compute other values and gradients: `index_add` keeps one of two rows, "
    "`bernoulli(0.3)` has a mean of 0.7, `h - h.detach()` a gradient of 0, and "
    "`logsigmoid(-200)` is -inf.",
    example="tracing/test_compat.py::test_each_check_passes[detach]",
)
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


@repair(
    "export_exact_forms",
    "after import",
    70,
    replaces="_custom_op_symbolic_registry:CustomOpSymbolicRegistry.register_all",
)
def _register_no_global_forms(original_register_all: ExportFunction, opset: int) -> None:
    """Do not let ORT register its forms of operators for all exports of the process (every torch).

    With them an export by the user has operators that only ONNX Runtime Training runs, such as ATen
    for an Embedding. ORT's own export uses them (`ort_form_by_operator`).
    """
