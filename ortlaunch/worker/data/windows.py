"""Samples that are windows of one long row of tokens: packed text for causal language models."""

from __future__ import annotations

import numpy as np
import torch

from ortlaunch.worker.data.samples import IGNORED, Sample
from ortlaunch.worker.data.shards import Tokens
from ortlaunch.worker.data.tokens import Documents


class Blocks:
    """Packed windows for causal language models; documents follow each other, an end mark between them."""

    def __init__(self, tokens: Tokens, length: int, with_mask: bool) -> None:
        self.tokens = tokens
        self.length = length
        # Without a mask transformers looks for packed sequences with an operator that ONNX has not.
        self.mask = {"attention_mask": torch.ones(length, dtype=torch.int64)} if with_mask else {}

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def size(self, index: int) -> int:
        """Tokens of a sample, which are all the same."""
        return self.length

    def sample(self, index: int, epoch: int) -> Sample:
        block = window(self.tokens, index * self.length, self.length)
        return {"input_ids": block, **self.mask, "labels": block}


class SeparateDocuments:
    """The same, but no document sees another (worker/model/packing.py makes the mask); each begins at position 0."""

    varies = True

    def __init__(self, documents: Documents, length: int) -> None:
        self.tokens, self.ends = documents
        self.length = length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def sample(self, index: int, epoch: int) -> Sample:
        first = index * self.length
        after = (index + 1) * self.length
        known, last = (
            int(np.searchsorted(self.ends, place, side="right")) for place in (first, after)
        )
        begins = [
            place for place in (self.ends[known:last] - first).tolist() if 0 < place < self.length
        ]
        places = torch.arange(self.length)
        begun = torch.zeros(self.length, dtype=torch.int64)
        begun[begins] = places[begins]
        block = window(self.tokens, first, self.length)
        labels = block.clone()
        labels[begins] = IGNORED  # the document before does not tell how this one begins
        return {
            "input_ids": block,
            "position_ids": places - begun.cummax(0).values,
            "document_ids": (begun > 0).cumsum(0),
            "labels": labels,
        }


def window(tokens: Tokens, start: int, length: int) -> torch.Tensor:
    """(length,) int64."""
    return torch.from_numpy(tokens[start : start + length].astype(np.int64))
