"""A language model's scores in the place of each label: the likeliest word, and the label's negative log likelihood.

Counts perplexity, masked words and sentence pairs. Logits over a vocabulary are too large to keep of a whole
evaluation; where the head runs in chunks they never exist.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ortlaunch.worker.data import IGNORED
from ortlaunch.worker.engine.engine import TrainingEngine
from ortlaunch.worker.evaluation.measure import SumOfCounts, logits_of
from ortlaunch.worker.model.chunked_head import ChunkedHead
from ortlaunch.worker.process_group.distributed import DistributedContext

_ROWS = 1024  # of logits at a time
_PAIRS = "seq_relationship_logits"


class WordScores(NamedTuple):
    """Of one batch, each of the labels' shape (samples, length)."""

    predictions: Tensor
    """int64; IGNORED where no label is predicted."""
    losses: Tensor
    """float32, nats; nan where no label is predicted."""


def word_scores(
    states: Tensor, labels: Tensor, plain: Any = None, shifted: bool = False
) -> WordScores:
    """Of labels that are not IGNORED, some rows of logits at a time.

    Args:
        states: logits (samples, length, vocabulary); where `plain`, the model's LossModule, makes head and loss in
            chunks, what goes into the head in their place.
        shifted: scores of a place are for the label after it, as causal models'; the first label has none.
    """
    chunked: ChunkedHead | None = getattr(plain, "chunked", None)
    predictions = torch.full_like(labels, IGNORED)
    losses = torch.full(labels.shape, torch.nan, device=labels.device)
    first = int(shifted)
    places = (labels[:, first:] != IGNORED).nonzero()
    for sample, place in (
        each.unbind(1) for each in places.split(chunked.rows if chunked else _ROWS)
    ):
        rows = states[sample, place]
        wanted = labels[sample, place + first]
        logits = (rows if chunked is None else chunked.logits(plain.model, rows)).float()
        predictions[sample, place + first] = logits.argmax(-1)
        losses[sample, place + first] = functional.cross_entropy(logits, wanted, reduction="none")
    return WordScores(predictions, losses)


def word_outputs(
    output: Any, labels: Mapping[str, Tensor], plain: Any = None, shifted: bool = False
) -> dict[str, Tensor]:
    """Of one batch of a language model, what metrics are made of: `WordScores` by name, and `seq_relationship_logits`.

    Args:
        output: of the model; where `plain`, its LossModule, makes head and loss in chunks, with what goes into the head
            in place of logits.
        labels: those of the batch.
        shifted: see `word_scores`.
    """
    words = labels.get("labels")
    states = logits_of(output)
    if words is None or states is None or words.dim() != 2 or states.dim() != 3:
        return {}
    pairs = {_PAIRS: output[_PAIRS]} if _PAIRS in output else {}
    return {**word_scores(states, words, plain, shifted)._asdict(), **pairs}


class MaskedWords:
    """Perplexity of masked words, and how many are right."""

    def __init__(self, engine: TrainingEngine) -> None:
        del engine
        self._sum = SumOfCounts(3)

    def add(self, output: Mapping[str, Tensor], labels: Mapping[str, Tensor], counts: bool) -> None:
        if "predictions" in output:
            counted = output["predictions"] != IGNORED
            right = output["predictions"].eq(labels["labels"]) & counted
            losses = output["losses"].masked_fill(~counted, 0.0)
            found = torch.stack(
                [each.sum(dtype=torch.float64) for each in (right, counted, losses)]
            )
            self._sum.add(found, counts)

    def read(self, group: DistributedContext, loss: float) -> dict[str, float]:
        right, words, lost = self._sum.read(group)
        return (
            {"perplexity": _exp(lost / words), "masked_word_accuracy": right / words}
            if words
            else {}
        )


class SentencePairScore:
    """How many pairs of sentences are told apart rightly."""

    def __init__(self, engine: TrainingEngine) -> None:
        del engine
        self._sum = SumOfCounts(2)

    def add(self, output: Mapping[str, Tensor], labels: Mapping[str, Tensor], counts: bool) -> None:
        if _PAIRS in output and "next_sentence_label" in labels:
            right = output[_PAIRS].argmax(-1) == labels["next_sentence_label"]
            found = torch.stack([right.sum(), torch.tensor(right.numel(), device=right.device)])
            self._sum.add(found, counts)

    def read(self, group: DistributedContext, loss: float) -> dict[str, float]:
        right, pairs = self._sum.read(group)
        return {"next_sentence_accuracy": right / pairs} if pairs else {}


class LossPerplexity:
    """e to the loss of a causal model, where it is the mean over words."""

    def __init__(self, engine: TrainingEngine) -> None:
        self._is_mean_of_words = engine.loss_weight.by == "labels"

    def add(self, output: Mapping[str, Tensor], labels: Mapping[str, Tensor], counts: bool) -> None:
        """Nothing: the engine has it in the loss."""

    def read(self, group: DistributedContext, loss: float) -> dict[str, float]:
        return {"perplexity": _exp(loss)} if self._is_mean_of_words else {}


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
