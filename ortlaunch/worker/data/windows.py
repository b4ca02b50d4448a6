"""Samples that are windows of one long sequence of tokens: packed text for causal models."""

from __future__ import annotations

import numpy as np
import torch

from ortlaunch.worker.data.samples import IGNORED, Sample
from ortlaunch.worker.data.shards import Tokens
from ortlaunch.worker.data.token_cache import Documents


class TokenWindows:
    """Packed windows for causal language models; documents are separated by an end mark alone."""

    def __init__(self, tokens: Tokens, length: int, with_mask: bool) -> None:
        self.tokens = tokens
        self.length = length
        # Without a mask transformers detects packed sequences by an operator that ONNX lacks.
        self.mask = {"attention_mask": torch.ones(length, dtype=torch.int64)} if with_mask else {}

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def size(self, index: int) -> int:
        """Return the number of tokens of a sample, equal for all."""
        return self.length

    def sample(self, index: int, epoch: int) -> Sample:
        # The model shifts the labels by one.
        block = window_token_ids(self.tokens, index * self.length, self.length)
        return {"input_ids": block, **self.mask, "labels": block}


class SeparateDocuments:
    """Packed windows whose documents do not attend to each other; each begins at position 0.

    worker/model/packing.py makes the attention mask of `document_ids`.
    """

    varies = True

    def __init__(self, documents: Documents, length: int) -> None:
        self.tokens, self.ends = documents
        self.length = length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def sample(self, index: int, epoch: int) -> Sample:
        start = index * self.length
        stop = (index + 1) * self.length
        first_document, last_document = (
            int(np.searchsorted(self.ends, token_place, side="right"))
            for token_place in (start, stop)
        )
        begins = [
            token_place
            for token_place in (self.ends[first_document:last_document] - start).tolist()
            if 0 < token_place < self.length
        ]
        places = torch.arange(self.length)
        document_starts = torch.zeros(self.length, dtype=torch.int64)
        document_starts[begins] = places[begins]
        block = window_token_ids(self.tokens, start, self.length)
        labels = block.clone()
        # The first token of a document cannot be predicted from the document before.
        labels[begins] = IGNORED
        return {
            "input_ids": block,
            "position_ids": places - document_starts.cummax(0).values,
            "document_ids": (document_starts > 0).cumsum(0),
            "labels": labels,
        }


def window_token_ids(tokens: Tokens, start: int, length: int) -> torch.Tensor:
    """Return the tokens from `start` on: (length,) int64."""
    return torch.from_numpy(tokens[start : start + length].astype(np.int64))
