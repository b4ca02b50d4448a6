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

from ortlaunch.ortmodule.base.counters import tally
from ortlaunch.ortmodule.base.export import Export
from ortlaunch.ortmodule.base.ort_types import AnyFunction
from ortlaunch.ortmodule.base.source_guard import TRANSITION, owner

if TYPE_CHECKING:
    import onnx

    from ortlaunch.ortmodule.base.export import Facts

# torch's codes of the reductions.
_NONE = 0
_MEAN = 1
_SUM = 2
SPARSE = 0.9
"""The share of labels that are not ignored, below which rows are gathered; ORT's threshold."""
Loss = AnyFunction


def skip_ignored_labels() -> None:
    """Remove ORT's label sparsity hook; `ignored_labels_left_out` replaces it.

    In transformers' models ORT computed scores and loss for every label, also for ignored ones.
    """
    owner(TRANSITION)._add_check_label_sparsity_hook = staticmethod(lambda *args: [])


@contextlib.contextmanager
def ignored_labels_left_out(export: Export) -> Iterator[None]:
    """Let every cross entropy of an export gather the rows that are not ignored."""
    if not export.training or not export.options.enable_embedding_sparse_optimizer:
        yield
        return
    with _replaced(_gathered(export.facts, export.options.print_input_density)):
        yield


def report_density(export: Export) -> None:
    """Record the share of labels that are not ignored, for engine.json."""
    tally.label_density = export.facts.get("label_density", tally.label_density)


@contextlib.contextmanager
def _replaced(stand_in: Callable[[Loss], Loss]) -> Iterator[None]:
    """Replace the function behind cross entropy, whichever public name a model calls."""
    # torch.nn.functional.cross_entropy calls the function in this module.
    parts: Any = torch._C._nn
    plain = parts.cross_entropy_loss
    instead = stand_in(plain)

    @functools.wraps(plain)
    def loss(scores: torch.Tensor, labels: torch.Tensor, *options: object) -> object:
        # torch takes labels of one byte, too; ONNX Runtime does not.
        return instead(scores, labels.long() if labels.dtype == torch.uint8 else labels, *options)

    parts.cross_entropy_loss = loss
    try:
        yield
    finally:
        parts.cross_entropy_loss = plain


def _gathered(facts: Facts, printing: bool) -> Callable[[Loss], Loss]:
    """Return a cross entropy that skips ignored labels, if the current batch has enough of them."""

    def stand_in(plain: Loss) -> Loss:
        def loss(
            scores: torch.Tensor,
            labels: torch.Tensor,
            weight: torch.Tensor | None,
            reduction: int,
            ignore_index: int,
            smoothing: float,
        ) -> object:
            if scores.dim() == 2 and labels.dim() == 1 and reduction != _NONE:
                counts = labels != ignore_index
                density = float(counts.float().mean())
                if density < SPARSE:
                    facts["label_density"] = round(density, 3)
                    scores, labels = _without(scores, labels, counts, ignore_index, printing)
            return plain(scores, labels, weight, reduction, ignore_index, smoothing)

        return loss

    return stand_in


def _without(
    scores: torch.Tensor,
    labels: torch.Tensor,
    counts: torch.Tensor,
    ignore_index: int,
    printing: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    # ORT's operator prints in every step, and marks the place for ORT's own gather.
    if printing:
        from onnxruntime.training.ortmodule._runtime_inspector import FlagAndPrintDensity

        return scores, FlagAndPrintDensity.apply(labels, ignore_index, "label")
    # If every label is ignored, the first row is kept, because ORT's matmul fails for empty
    # matrices. The loss ignores its label anyway.
    first = torch.ones_like(labels).cumsum(0) == 1
    rows = (counts | (first & ~counts.any())).nonzero().squeeze(1)
    return scores.index_select(0, rows), labels.index_select(0, rows)


def shrink(export: Export, model: onnx.ModelProto) -> None:
    """Turn gathers of non-zero rows into ShrunkenGather, which ORT's compute optimizer moves up."""
    # The trace gathered no rows.
    if "label_density" not in export.facts:
        return
    makers = {name: node for node in model.graph.node for name in node.output}
    for node in model.graph.node:
        axis = [attribute.i for attribute in node.attribute if attribute.name == "axis"]
        if node.op_type == "Gather" and axis == [0] and _rows(node.input[1], makers):
            node.op_type = "ShrunkenGather"
            node.domain = "com.microsoft"
    if not any(item.domain == "com.microsoft" for item in model.opset_import):
        model.opset_import.add(domain="com.microsoft", version=1)


def _rows(name: str, makers: Mapping[str, onnx.NodeProto]) -> bool:
    # The exported form of `nonzero().squeeze(1)`, from its output back: one index a row.
    for kind in ("Squeeze", "Transpose", "NonZero"):
        if name not in makers or makers[name].op_type != kind:
            return False
        name = makers[name].input[0]
    return True


def written_out(export: Export) -> AbstractContextManager[None]:
    """Write out cross entropy with label probabilities or smoothing, for which ORT's form fails."""
    return _replaced(_written_out)


def _written_out(plain: Loss) -> Loss:
    """Return a cross entropy that uses sums of logarithms except for plain class labels.

    The sums are those of torch's own implementation.
    """

    def loss(
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
        likely = labels.is_floating_point()
        # One sample without a batch dimension: ONNX Runtime's form of it aborts the process.
        if scores.dim() == 1 and not likely:
            # Without a reduction the value is the same.
            reduction = reduction or _SUM
            return loss(
                scores.unsqueeze(0), labels.unsqueeze(0), weight, reduction, ignore_index, smoothing
            )
        if not (likely or smoothing):
            return plain(scores, labels, weight, reduction, ignore_index, smoothing)
        # The axis of the classes: 1, or 0 for one sample without a batch dimension.
        axis = min(scores.dim() - 1, 1)
        logs = scores.log_softmax(axis)
        # The share of the smoothing that each class gets.
        even = smoothing / scores.shape[axis]
        if weight is not None:
            logs = logs * weight.view([-1 if place == axis else 1 for place in range(scores.dim())])
        if likely:
            each = -(logs * (labels * (1 - smoothing) + even)).sum(axis)
            return each if reduction == _NONE else each.mean() if reduction == _MEAN else each.sum()
        ignored = labels == ignore_index
        each = -logs.sum(axis).masked_fill(ignored, 0.0)
        if reduction == _MEAN:
            # The denominator of the mean: the labels' weights, without those of ignored labels.
            counts = 1.0 if weight is None else weight[labels.masked_fill(ignored, 0)]
            each = each.sum() / (torch.ones_like(each) * counts).masked_fill(ignored, 0.0).sum()
        elif reduction != _NONE:
            each = each.sum()
        hard = plain(scores, labels, weight, reduction, ignore_index, 0.0)
        return (1 - smoothing) * hard + even * each

    return loss
