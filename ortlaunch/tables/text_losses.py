"""The table of losses that compare the texts of a sample, for tasks embedding and reranker.

Standard library only, for every side. The worker's modules of the two tasks have a function for
each name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class TextLoss:
    """One row of the table."""

    least_documents: int = 1
    """Smallest number of texts after the first."""
    most_documents: int = 1_000
    """Largest number of texts after the first."""
    label: str = ""
    """Numbers of a row's `label_column`: one `score`; `margins`, for each negative; `relevance`, for
    each document; "": it is not read."""
    is_over_batch: bool = False
    """Whether a sample is compared with the others of the batch."""
    label_limits: tuple[float, float] = (-math.inf, math.inf)
    """Smallest and largest of the numbers."""


EMBEDDING_LOSSES = {
    "multiple-negatives-ranking": TextLoss(is_over_batch=True),
    "cosent": TextLoss(most_documents=1, label="score", is_over_batch=True),
    "cosine-mse": TextLoss(most_documents=1, label="score", label_limits=(-1, 1)),
    "triplet": TextLoss(least_documents=2, most_documents=2),
    "margin-mse": TextLoss(least_documents=2, label="margins"),
}
RERANKER_LOSSES = {
    "binary-cross-entropy": TextLoss(label="relevance", label_limits=(0, 1)),
    "mse": TextLoss(label="relevance"),
    "listnet": TextLoss(least_documents=2, label="relevance"),
    "margin-mse": TextLoss(least_documents=2, label="margins"),
}
