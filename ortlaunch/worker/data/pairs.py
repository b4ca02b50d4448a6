"""BERT's pretraining samples: two segments, of which the second follows the first or is from another document.

Both segments of a pair that follow each other are of one document. A document of several samples is cut into windows
that are as long as a sample can be, the last one moved back to end with it; a shorter one is a sample with padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ortlaunch.worker.data.masking import Masking
from ortlaunch.worker.data.reading import DataError
from ortlaunch.worker.data.samples import IGNORED
from ortlaunch.worker.data.tokens import Documents
from ortlaunch.worker.data.windows import window

_DRAWS = 32  # of another document that is long enough
_PADDING = {"attention_mask": 0, "token_type_ids": 0, "labels": IGNORED}


class SentencePairs:
    """Samples of task pretraining; half of the seconds, those with label 1, are from elsewhere.

    Numbers of 8 bytes a document are held in memory.
    """

    def __init__(self, documents: Documents, length: int, masking: Masking, pad: int, seed: int) -> None:
        self.tokens, self.ends = documents
        self.length, self.masking, self.pad, self.seed = length, masking, pad, seed
        self.body = length - 3
        sizes = np.diff(self.ends, prepend=0)
        windows = np.where(sizes < 2, 0, -(-sizes // self.body))
        if np.count_nonzero(windows) < 2:
            raise DataError(
                "data.train: pretraining takes the second sentence of a pair from another document, and the corpus has "
                f"{np.count_nonzero(windows)} of two tokens or more; data.train.document says what one is"
            )
        self.until = np.cumsum(windows)
        self.varies = masking.settings.whole_words or bool((sizes[windows > 0] < self.body).any())

    def __len__(self) -> int:
        return int(self.until[-1])

    def sample(self, index: int, epoch: int) -> Mapping[str, Any]:
        random = np.random.Generator(np.random.Philox([self.seed, epoch, index]))
        document, start, size = self.place(index)
        cut = int(random.integers(max(1, size // 4), max(1, size * 3 // 4) + 1))
        first, second = window(self.tokens, start, cut), window(self.tokens, start + cut, size - cut)
        unrelated = int(random.integers(2))
        if unrelated:
            second = self._from_another(document, size - cut, random)
        cls, sep = torch.tensor([self.masking.cls]), torch.tensor([self.masking.sep])
        ids = torch.cat([cls, first, sep, second, sep])
        segments = torch.zeros_like(ids)
        segments[cut + 2 :] = 1
        found = {"attention_mask": torch.ones_like(ids), "token_type_ids": segments, **self.masking.masked(ids, random)}
        return {**{name: self._padded(name, each) for name, each in found.items()},
                "next_sentence_label": torch.tensor(unrelated)}  # fmt: skip

    def place(self, index: int) -> tuple[int, int, int]:
        """Document of a sample, its first token and how many it has."""
        document = int(np.searchsorted(self.until, index, side="right"))
        number = index - (int(self.until[document - 1]) if document else 0)
        begin, end = self._span(document)
        start = max(begin, min(begin + number * self.body, end - self.body))
        return document, start, min(self.body, end - start)

    def _span(self, document: int) -> tuple[int, int]:
        return (int(self.ends[document - 1]) if document else 0), int(self.ends[document])

    def _from_another(self, document: int, size: int, random: np.random.Generator) -> torch.Tensor:
        """So many tokens of another document, which is drawn by its size; fewer where none is found that has them."""
        best = (0, 0)
        for _ in range(_DRAWS):
            place = int(random.integers(len(self.tokens)))
            other = int(np.searchsorted(self.ends, place, side="right"))
            if other != document:
                begin, end = self._span(other)
                start = max(begin, min(place, end - size))
                best = max(best, (min(size, end - start), start))
            if best[0] == size:
                break
        found, start = best if best[0] else self._neighbour(document, size)
        return window(self.tokens, start, found)

    def _neighbour(self, document: int, size: int) -> tuple[int, int]:
        """Of a corpus that is nearly one document, the next one that has tokens."""
        others = ((document + step) % len(self.ends) for step in range(1, len(self.ends)))
        begin, end = next(span for span in map(self._span, others) if span[1] > span[0])
        return min(size, end - begin), begin

    def _padded(self, name: str, values: torch.Tensor) -> torch.Tensor:
        return functional.pad(values, (0, self.length - len(values)), value=_PADDING.get(name, self.pad))
