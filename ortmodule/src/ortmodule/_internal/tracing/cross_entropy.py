"""Cross entropy in exported graphs: without ignored labels, and with a form for every variant.

BERT needs only 15 % of its scores. ORT's own version of this optimization handles only
`nn.CrossEntropyLoss` modules, which the models of transformers do not have, and needs a Python
operator. Here a training export gathers the rows with a label that is not ignored, for every cross
entropy with one row of scores for each label and with reduction mean or sum. ORT's compute
optimizer then moves the gather up through the layers that produce the rows. The graph is correct
for any labels.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from ortmodule._internal.base.counters import tally
from ortmodule._internal.base.export import ExportContext
from ortmodule._internal.base.ort_types import AnyFunction
from ortmodule._internal.base.patching import replace_attribute_temporarily
from ortmodule._internal.base.repair_registry import EXPORT_SOURCES, TRANSITION, repair

if TYPE_CHECKING:
    import onnx

    from ortmodule._internal.base.trace_facts import TraceFacts

# torch's codes of the reductions.
_NONE = 0
_MEAN = 1
_SUM = 2
SPARSE_LABEL_SHARE = 0.9
"""The share of labels that are not ignored, below which rows are gathered; ORT's threshold."""
Loss = AnyFunction


@repair(
    "skip_ignored_labels",
    "install",
    100,
    replaces=f"{TRANSITION}._add_check_label_sparsity_hook",
    fault="BERT's masked-lm loss computes the scores of every token instead of the 15 % that "
    "count, and `compute_optimizer=False` ends in `'NoneType' object is not iterable`.",
    example="tracing/test_loss.py::test_ignored_labels_are_left_out",
    sources={
        **EXPORT_SOURCES,
        f"{TRANSITION}._add_check_label_sparsity_hook": "e99a910898fcadc0",
        f"{TRANSITION}.get_post_processed_model": "a766fd8849dbdd15",
        "torch.nn.functional:cross_entropy": ("torch._C._nn.cross_entropy_loss(",),
    },
)
def _add_no_label_sparsity_hook(original_add_hook: AnyFunction, *ort_arguments: object) -> object:
    """Leave ORT's hook out; `drop_ignored_rows_in_training_export_if_sparse` replaces it.

    In transformers' models ORT computed scores and loss for every label, also for ignored ones.
    """
    return []


@repair("skip_ignored_labels", "context", 30)
@contextlib.contextmanager
def drop_ignored_rows_in_training_export_if_sparse(export_context: ExportContext) -> Iterator[None]:
    """Let every cross entropy of an export gather the rows that are not ignored."""
    if not export_context.training or not export_context.options.enable_embedding_sparse_optimizer:
        yield
        return
    with _replace_torch_cross_entropy_temporarily(
        _create_loss_wrapper_dropping_rows_if_sparse(
            export_context.facts, export_context.options.print_input_density
        )
    ):
        yield


@repair("skip_ignored_labels", "verdict", 20)
def record_counted_label_fraction(export_context: ExportContext) -> None:
    """Record the share of labels that are not ignored, for engine.json."""
    if export_context.facts.label_density is not None:
        tally.label_density = export_context.facts.label_density


@contextlib.contextmanager
def _replace_torch_cross_entropy_temporarily(
    wrap_original_loss: Callable[[Loss], Loss],
) -> Iterator[None]:
    """Replace the function behind cross entropy, whichever public name a model calls."""
    # torch.nn.functional.cross_entropy calls the function in this module.
    torch_nn: Any = torch._C._nn
    original_loss = torch_nn.cross_entropy_loss
    wrapped_loss = wrap_original_loss(original_loss)

    @functools.wraps(original_loss)
    def call_wrapped_loss(scores: torch.Tensor, labels: torch.Tensor, *options: object) -> object:
        # torch takes labels of one byte, too; ONNX Runtime does not.
        return wrapped_loss(
            scores, labels.long() if labels.dtype == torch.uint8 else labels, *options
        )

    with replace_attribute_temporarily(torch_nn, "cross_entropy_loss", call_wrapped_loss):
        yield


def _create_loss_wrapper_dropping_rows_if_sparse(
    trace_facts: TraceFacts, prints_density: bool
) -> Callable[[Loss], Loss]:
    """Return a cross entropy that skips ignored labels, if the current batch has enough of them."""

    def wrap_loss(original_loss: Loss) -> Loss:
        def gathering_loss(
            scores: torch.Tensor,
            labels: torch.Tensor,
            weight: torch.Tensor | None,
            reduction: int,
            ignore_index: int,
            smoothing: float,
        ) -> object:
            if scores.dim() == 2 and labels.dim() == 1 and reduction != _NONE:
                is_counted = labels != ignore_index
                density = float(is_counted.float().mean())
                if density < SPARSE_LABEL_SHARE:
                    trace_facts.label_density = round(density, 3)
                    if prints_density:
                        labels = _print_density(labels, ignore_index)
                    else:
                        row_indices = _counted_row_indices(labels, is_counted)
                        scores = scores.index_select(0, row_indices)
                        labels = labels.index_select(0, row_indices)
            return original_loss(scores, labels, weight, reduction, ignore_index, smoothing)

        return gathering_loss

    return wrap_loss


def _print_density(labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    # ORT's operator prints in every step, and marks the place for ORT's own gather.
    from onnxruntime.training.ortmodule._runtime_inspector import FlagAndPrintDensity

    marked_labels: torch.Tensor = FlagAndPrintDensity.apply(labels, ignore_index, "label")
    return marked_labels


def _counted_row_indices(labels: torch.Tensor, is_counted_label: torch.Tensor) -> torch.Tensor:
    # If every label is ignored, the first row is kept, because ORT's matmul fails for empty
    # matrices. The loss ignores its label anyway.
    is_first_row = torch.ones_like(labels).cumsum(0) == 1
    return (is_counted_label | (is_first_row & ~is_counted_label.any())).nonzero().squeeze(1)


@repair("skip_ignored_labels", "graph pass", 20)
def change_label_gathers_to_shrunken_gathers(
    export_context: ExportContext, onnx_model: onnx.ModelProto
) -> None:
    """Turn gathers of non-zero rows into ShrunkenGather, which ORT's compute optimizer moves up."""
    # The trace gathered no rows.
    if export_context.facts.label_density is None:
        return
    node_by_output = {name: node for node in onnx_model.graph.node for name in node.output}
    for node in onnx_model.graph.node:
        gather_axes = [attribute.i for attribute in node.attribute if attribute.name == "axis"]
        if (
            node.op_type == "Gather"
            and gather_axes == [0]
            and _is_nonzero_row_index(node.input[1], node_by_output)
        ):
            node.op_type = "ShrunkenGather"
            node.domain = "com.microsoft"
    if not any(item.domain == "com.microsoft" for item in onnx_model.opset_import):
        onnx_model.opset_import.add(domain="com.microsoft", version=1)


def _is_nonzero_row_index(value_name: str, node_by_output: Mapping[str, onnx.NodeProto]) -> bool:
    # The exported form of `nonzero().squeeze(1)`, from its output back: one index a row.
    for operator_type in ("Squeeze", "Transpose", "NonZero"):
        if value_name not in node_by_output or node_by_output[value_name].op_type != operator_type:
            return False
        value_name = node_by_output[value_name].input[0]
    return True


@repair(
    "export_smoothed_cross_entropy",
    "context",
    20,
    fault="Label smoothing and probabilities for labels end the export; a loss of one sample, or "
    "of scores that are the batch or a weight, ends the process.",
    example="tracing/test_loss.py::test_loss_and_gradients_are_eagers[smoothed-0.2]",
    sources={
        **EXPORT_SOURCES,
        "torch.nn.functional:cross_entropy": ("torch._C._nn.cross_entropy_loss(",),
    },
)
def write_out_soft_or_smoothed_cross_entropy(
    export_context: ExportContext,
) -> AbstractContextManager[None]:
    """Write out cross entropy with label probabilities or smoothing, for which ORT's form fails."""
    return _replace_torch_cross_entropy_temporarily(_wrap_loss_for_probabilities_and_smoothing)


def _wrap_loss_for_probabilities_and_smoothing(original_loss: Loss) -> Loss:
    """Return a cross entropy that uses sums of logarithms except for plain class labels.

    The sums are those of torch's own implementation.
    """

    def written_out_loss(
        scores: torch.Tensor,
        labels: torch.Tensor,
        weight: torch.Tensor | None,
        reduction: int,
        ignore_index: int,
        smoothing: float,
    ) -> object:
        # CUDA's autocast computes the loss in float32 inside this operator, where a trace does not
        # see it: ONNX Runtime's loss would be in the scores' type, unlike eager's.
        if torch.is_autocast_enabled(scores.device.type):
            scores = scores.float()
        has_probabilities = labels.is_floating_point()
        # One sample without a batch dimension: ONNX Runtime's form of it aborts the process.
        if scores.dim() == 1 and not has_probabilities:
            # Without a reduction the value is the same.
            reduction = reduction or _SUM
            return written_out_loss(
                scores.unsqueeze(0), labels.unsqueeze(0), weight, reduction, ignore_index, smoothing
            )
        if not (has_probabilities or smoothing):
            return original_loss(scores, labels, weight, reduction, ignore_index, smoothing)
        # The axis of the classes: 1, or 0 for one sample without a batch dimension.
        axis = min(scores.dim() - 1, 1)
        log_scores = scores.log_softmax(axis)
        # The share of the smoothing that each class gets.
        smoothing_share = smoothing / scores.shape[axis]
        if weight is not None:
            log_scores = log_scores * weight.view(
                [-1 if dim == axis else 1 for dim in range(scores.dim())]
            )
        if has_probabilities:
            row_losses = -(log_scores * (labels * (1 - smoothing) + smoothing_share)).sum(axis)
            return (
                row_losses
                if reduction == _NONE
                else row_losses.mean()
                if reduction == _MEAN
                else row_losses.sum()
            )
        ignored = labels == ignore_index
        row_losses = -log_scores.sum(axis).masked_fill(ignored, 0.0)
        if reduction == _MEAN:
            # The denominator of the mean: the labels' weights, without those of ignored labels.
            label_weights = 1.0 if weight is None else weight[labels.masked_fill(ignored, 0)]
            row_losses = (
                row_losses.sum()
                / (torch.ones_like(row_losses) * label_weights).masked_fill(ignored, 0.0).sum()
            )
        elif reduction != _NONE:
            row_losses = row_losses.sum()
        hard_loss = original_loss(scores, labels, weight, reduction, ignore_index, 0.0)
        return (1 - smoothing) * hard_loss + smoothing_share * row_losses

    return written_out_loss
