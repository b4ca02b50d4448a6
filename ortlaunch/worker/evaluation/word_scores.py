"""Predictions and losses of a language model at each label, and the metrics computed from them.

The metrics are perplexity and the accuracy of masked words and of sentence pairs. They are computed
batch by batch, because the logits of a whole evaluation are too large to keep. If the head runs in
chunks, even the logits of a batch never exist as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ortlaunch.worker.data import IGNORED
from ortlaunch.worker.evaluation.evaluated_model import EvaluatedModel
from ortlaunch.worker.evaluation.measure import SumOfCounts, logits_or_none
from ortlaunch.worker.model.chunked_head import ChunkedHead
from ortlaunch.worker.process_group.distributed import DistributedContext

# Rows of logits that are processed at a time. It bounds the memory of their float32 copies.
_ROWS = 1024
_PAIRS = "seq_relationship_logits"


class WordScores(NamedTuple):
    """The scores of one batch, each of the shape of the labels, (samples, length)."""

    predictions: Tensor
    """The most likely token id, int64; IGNORED at positions without a label."""
    losses: Tensor
    """Negative log likelihood of the label in nats, float32; nan at positions without a label."""


def predictions_and_losses_at_labels(
    logits_or_head_inputs: Tensor, labels: Tensor, loss_module: Any = None, is_shifted: bool = False
) -> WordScores:
    """Compute the scores of labels that are not IGNORED, a few rows of logits at a time.

    Args:
        logits_or_head_inputs: logits, (samples, length, vocabulary); if `loss_module` computes head and loss in chunks,
            the inputs of the head instead.
        labels: (samples, length).
        loss_module: the model's LossModule.
        is_shifted: whether the logits at a position predict the next label, as in causal models. The
            first label then has no score.
    """
    chunked_head: ChunkedHead | None = getattr(loss_module, "chunked", None)
    predictions = torch.full_like(labels, IGNORED)
    losses = torch.full(labels.shape, torch.nan, device=labels.device)
    label_offset = int(is_shifted)
    positions = (labels[:, label_offset:] != IGNORED).nonzero()
    for sample, position in (
        part.unbind(1) for part in positions.split(chunked_head.rows if chunked_head else _ROWS)
    ):
        rows = logits_or_head_inputs[sample, position]
        targets = labels[sample, position + label_offset]
        logits = (
            rows
            if chunked_head is None
            else chunked_head.logits_of_head_inputs(loss_module.model, rows)
        ).float()
        predictions[sample, position + label_offset] = logits.argmax(-1)
        losses[sample, position + label_offset] = functional.cross_entropy(
            logits, targets, reduction="none"
        )
    return WordScores(predictions, losses)


def language_model_metric_inputs(
    model_output: Any,
    labels: Mapping[str, Tensor],
    loss_module: Any = None,
    is_shifted: bool = False,
) -> dict[str, Tensor]:
    """Return the inputs of a language model's metrics for one batch, by name.

    They are the fields of `WordScores` and, if the model predicts sentence pairs,
    `seq_relationship_logits`. A model without logits of words gives none.

    Args:
        model_output: the model's output; if `loss_module` computes head and loss in chunks, it has the inputs
            of the head instead of logits.
        labels: the labels of the batch, by name.
        loss_module: the model's LossModule.
        is_shifted: see `word_scores`.
    """
    word_labels = labels.get("labels")
    states = logits_or_none(model_output)
    if word_labels is None or states is None or word_labels.dim() != 2 or states.dim() != 3:
        return {}
    pairs = {_PAIRS: model_output[_PAIRS]} if _PAIRS in model_output else {}
    return {
        **predictions_and_losses_at_labels(states, word_labels, loss_module, is_shifted)._asdict(),
        **pairs,
    }


class MaskedWords:
    """Perplexity and accuracy of masked words."""

    def __init__(self, evaluated_model: EvaluatedModel) -> None:
        # An argument of every MetricMeasure; these metrics do not need the model.
        del evaluated_model
        # Correct words, labelled words, and the sum of losses.
        self._sum = SumOfCounts(3)

    def count_micro_batch(
        self, output: Mapping[str, Tensor], labels: Mapping[str, Tensor], is_counted: bool
    ) -> None:
        if "predictions" in output:
            counted = output["predictions"] != IGNORED
            right = output["predictions"].eq(labels["labels"]) & counted
            losses = output["losses"].masked_fill(~counted, 0.0)
            batch_counts = torch.stack(
                [
                    counted_values.sum(dtype=torch.float64)
                    for counted_values in (right, counted, losses)
                ]
            )
            self._sum.add_batch_counts(batch_counts, is_counted)

    def metrics_over_ranks(self, group: DistributedContext, loss: float) -> dict[str, float]:
        right, word_count, loss_sum = self._sum.sums_over_ranks(group)
        return (
            {
                "perplexity": _exp_or_infinity(loss_sum / word_count),
                "masked_word_accuracy": right / word_count,
            }
            if word_count
            else {}
        )


class SentencePairScore:
    """Accuracy of the prediction of the next sentence."""

    def __init__(self, evaluated_model: EvaluatedModel) -> None:
        del evaluated_model
        # Correct pairs, and all pairs.
        self._sum = SumOfCounts(2)

    def count_micro_batch(
        self, output: Mapping[str, Tensor], labels: Mapping[str, Tensor], is_counted: bool
    ) -> None:
        if _PAIRS in output and "next_sentence_label" in labels:
            right = output[_PAIRS].argmax(-1) == labels["next_sentence_label"]
            batch_counts = torch.stack(
                [right.sum(), torch.tensor(right.numel(), device=right.device)]
            )
            self._sum.add_batch_counts(batch_counts, is_counted)

    def metrics_over_ranks(self, group: DistributedContext, loss: float) -> dict[str, float]:
        right, pairs = self._sum.sums_over_ranks(group)
        return {"next_sentence_accuracy": right / pairs} if pairs else {}


class LossPerplexity:
    """Perplexity of a causal model: exp(loss); none if the loss is not the mean over all tokens."""

    def __init__(self, evaluated_model: EvaluatedModel) -> None:
        self._is_mean_of_words = evaluated_model.loss_weight.by == "labels"

    def count_micro_batch(
        self, output: Mapping[str, Tensor], labels: Mapping[str, Tensor], is_counted: bool
    ) -> None:
        """Do nothing: the metrics need only the loss of the evaluation."""

    def metrics_over_ranks(self, group: DistributedContext, loss: float) -> dict[str, float]:
        return {"perplexity": _exp_or_infinity(loss)} if self._is_mean_of_words else {}


def _exp_or_infinity(loss: float) -> float:
    # math.exp raises OverflowError above 709.8.
    return math.exp(loss) if loss < 700 else math.inf
