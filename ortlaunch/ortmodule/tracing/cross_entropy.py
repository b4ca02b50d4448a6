"""The loss of an exported graph: ignored labels are left out, and every form of cross entropy has one.

BERT computes 15 % of its scores, not all. ORT's own form of it looks only at `nn.CrossEntropyLoss` modules, which the
models of transformers have not, and takes a Python operator. Here every cross entropy of a training export that has one
row of scores a label and a mean or a sum gathers the rows that count; ORT's compute optimizer then moves the gather up
through the layers that make them. The graph is right for any labels.
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

# torch's numbers of the reductions
_NONE = 0
_MEAN = 1
_SUM = 2
SPARSE = 0.9
"""Below this share of labels that count, the others are left out; ORT's threshold."""
Loss = AnyFunction


def skip_ignored_labels() -> None:
    """ORT computed scores and loss for every label, also those that do not count, in transformers' models."""
    owner(TRANSITION)._add_check_label_sparsity_hook = staticmethod(lambda *args: [])


@contextlib.contextmanager
def ignored_labels_left_out(export: Export) -> Iterator[None]:
    """While open, a cross entropy gathers what counts."""
    if not export.training or not export.options.enable_embedding_sparse_optimizer:
        yield
        return
    with _replaced(_gathered(export.seen, export.options.print_input_density)):
        yield


def tell_density(export: Export) -> None:
    """Keep the share of labels that count for engine.json."""
    tally.label_density = export.seen.get("label_density", tally.label_density)


@contextlib.contextmanager
def _replaced(stand_in: Callable[[Loss], Loss]) -> Iterator[None]:
    """While open, cross entropy is another function, by whatever name a model calls it."""
    parts: Any = torch._C._nn  # what torch.nn.functional.cross_entropy calls
    plain = parts.cross_entropy_loss
    parts.cross_entropy_loss = functools.wraps(plain)(stand_in(plain))
    try:
        yield
    finally:
        parts.cross_entropy_loss = plain


def _gathered(seen: Facts, printing: bool) -> Callable[[Loss], Loss]:
    """A cross entropy that leaves out what it ignores, if that is enough of the labels at hand."""

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
                    seen["label_density"] = round(density, 3)
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
    if printing:  # ORT's operator prints in every step, and is the sign for ORT to do the same
        from onnxruntime.training.ortmodule._runtime_inspector import FlagAndPrintDensity

        return scores, FlagAndPrintDensity.apply(labels, ignore_index, "label")
    # The first row where none counts: ORT multiplies no empty matrices, and its label is ignored all the same.
    first = torch.ones_like(labels).cumsum(0) == 1
    rows = (counts | (first & ~counts.any())).nonzero().squeeze(1)
    return scores.index_select(0, rows), labels.index_select(0, rows)


def shrink(export: Export, model: onnx.ModelProto) -> None:
    """Gathers of the rows where something is not zero become the operator that ORT's compute optimizer moves up."""
    if "label_density" not in export.seen:
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
    for kind in (
        "Squeeze",
        "Transpose",
        "NonZero",
    ):  # as `nonzero().squeeze(1)` is exported: one index a row
        if name not in makers or makers[name].op_type != kind:
            return False
        name = makers[name].input[0]
    return True


def written_out(export: Export) -> AbstractContextManager[None]:
    """While open, cross entropy has a form for labels that are probabilities, or smoothed, at which ORT's ends."""
    return _replaced(_written_out)


def _written_out(plain: Loss) -> Loss:
    """A cross entropy that is one for classes, and sums of logarithms for everything else, as torch's own."""

    def loss(
        scores: torch.Tensor,
        labels: torch.Tensor,
        weight: torch.Tensor | None,
        reduction: int,
        ignore_index: int,
        smoothing: float,
    ) -> object:
        likely = labels.is_floating_point()
        if (
            scores.dim() == 1 and not likely
        ):  # one sample: ONNX Runtime's form of it aborts the process
            reduction = reduction or _SUM  # without a reduction it is the same value
            return loss(
                scores.unsqueeze(0), labels.unsqueeze(0), weight, reduction, ignore_index, smoothing
            )
        if not (likely or smoothing):
            return plain(scores, labels, weight, reduction, ignore_index, smoothing)
        axis = min(scores.dim() - 1, 1)
        logs = scores.log_softmax(axis)
        even = smoothing / scores.shape[axis]
        if weight is not None:
            logs = logs * weight.view([-1 if place == axis else 1 for place in range(scores.dim())])
        if likely:
            each = -(logs * (labels * (1 - smoothing) + even)).sum(axis)
            return each if reduction == _NONE else each.mean() if reduction == _MEAN else each.sum()
        ignored = labels == ignore_index
        each = -logs.sum(axis).masked_fill(ignored, 0.0)
        if reduction == _MEAN:
            counts = 1.0 if weight is None else weight[labels.masked_fill(ignored, 0)]
            each = each.sum() / (torch.ones_like(each) * counts).masked_fill(ignored, 0.0).sum()
        elif reduction != _NONE:
            each = each.sum()
        hard = plain(scores, labels, weight, reduction, ignore_index, 0.0)
        return (1 - smoothing) * hard + even * each

    return loss
