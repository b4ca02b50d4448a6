"""What a language model says in the place of each label: the likeliest word, and the label's negative log likelihood.

Logits over a vocabulary are too large to keep of a whole evaluation; where the head runs in chunks they never exist.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ortlaunch.worker.data import IGNORED
from ortlaunch.worker.model.chunked_head import ChunkedHead

_ROWS = 1024  # of logits at a time


class WordScores(NamedTuple):
    """Of one batch, each of the labels' shape (samples, length)."""

    predictions: Tensor
    """int64; IGNORED where no label is predicted."""
    losses: Tensor
    """float32, nats; nan where no label is predicted."""


def word_scores(states: Tensor, labels: Tensor, plain: Any = None, shifted: bool = False) -> WordScores:
    """Of labels that are not IGNORED, some rows of logits at a time.

    Args:
        states: logits (samples, length, vocabulary); where `plain`, the model's LossModule, makes head and loss in
            chunks, what goes into the head in their place.
        shifted: scores of a place are for the label after it, as causal models'; the first label has none.
    """
    chunked: ChunkedHead | None = getattr(plain, "chunked", None)
    predictions, losses = torch.full_like(labels, IGNORED), torch.full(labels.shape, torch.nan, device=labels.device)
    first = int(shifted)
    places = (labels[:, first:] != IGNORED).nonzero()
    for sample, place in (each.unbind(1) for each in places.split(chunked.rows if chunked else _ROWS)):
        rows, wanted = states[sample, place], labels[sample, place + first]
        logits = (rows if chunked is None else chunked.logits(plain.model, rows)).float()
        predictions[sample, place + first] = logits.argmax(-1)
        losses[sample, place + first] = functional.cross_entropy(logits, wanted, reduction="none")
    return WordScores(predictions, losses)
