"""BERT's pretraining samples: a segment, and its continuation or a segment of another document.

Segments that follow each other are from one document. A long document is cut into windows of the
full length of a sample; the last window is moved back so that it ends with the document. A short
document is one sample with padding.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ortlaunch.worker.data.file_rows import DataError
from ortlaunch.worker.data.masking import (
    IndexEpochPairs,
    MaskedSamples,
    Masking,
    random_values_of_samples,
)
from ortlaunch.worker.data.samples import IGNORED
from ortlaunch.worker.data.token_cache import Documents

_Ints = NDArray[np.int64]
# Attempts to draw another document that is long enough.
_ATTEMPTS = 32
_NAMES = ("input_ids", "labels", "attention_mask", "token_type_ids")


class SentencePairs(MaskedSamples):
    """Samples of task pretraining; half of the second segments, with label 1, are from elsewhere.

    Arrays with 8 bytes for each document are held in memory.
    """

    def __init__(
        self, documents: Documents, length: int, masking: Masking, padding_id: int, seed: int
    ) -> None:
        self.tokens, self.ends = documents
        self.length = length
        self.masking = masking
        self.pad = padding_id
        self.seed = seed
        # [CLS] and two [SEP] take three places.
        self.body = length - 3
        sizes = np.diff(self.ends, prepend=0)
        # A document needs two tokens, one for each segment.
        windows = np.where(sizes < 2, 0, -(-sizes // self.body))
        if np.count_nonzero(windows) < 2:
            raise DataError(
                "data.train: pretraining pairs sentences of two documents, and the corpus has "
                f"{np.count_nonzero(windows)} with two tokens or more; data.train.document sets "
                "the unit of a document"
            )
        # (documents,): the first sample after each document.
        self.until = np.cumsum(windows)
        self.varies = masking.settings.whole_words or bool((sizes[windows > 0] < self.body).any())

    def __len__(self) -> int:
        return int(self.until[-1])

    def batch(self, index_epoch_pairs: IndexEpochPairs) -> dict[str, torch.Tensor]:
        random_values = random_values_of_samples(
            self.seed, index_epoch_pairs, 2 + _ATTEMPTS + 2 * self.length
        )
        arrays: _Ints = np.zeros((4, len(index_epoch_pairs), self.length), dtype=np.int64)
        ids, labels, attention, segments = arrays
        labels[:] = IGNORED
        ends = []
        unrelated = []
        for row, ((index, _), random_row) in enumerate(
            zip(index_epoch_pairs, random_values[:, : 2 + _ATTEMPTS].tolist())
        ):
            document, start, size = self.document_start_and_token_count_of_sample(index)
            # The first segment has a quarter to three quarters of the tokens.
            low = max(1, size // 4)
            high = max(1, size * 3 // 4)
            cut = low + int(random_row[0] * (high + 1 - low))
            second_segment = start + cut, size - cut
            unrelated.append(int(random_row[1] < 0.5))
            if unrelated[-1]:
                second_segment = self._draw_start_and_token_count_in_other_document(
                    document, size - cut, random_row[2:]
                )
            end = self._write_marked_segments_and_count_tokens(
                ids[row], (start, cut), second_segment
            )
            ids[row, end:] = self.pad
            attention[row, :end], segments[row, cut + 2 : end] = 1, 1
            ends.append(end)
        self.masking.choose_and_mask_tokens_in_place(
            ids, labels, ends, random_values[:, 2 + _ATTEMPTS :]
        )
        return {
            **dict(zip(_NAMES, torch.from_numpy(arrays))),
            "next_sentence_label": torch.tensor(unrelated),
        }

    def _write_marked_segments_and_count_tokens(
        self, token_id_row: _Ints, *start_and_token_count_pairs: tuple[int, int]
    ) -> int:
        """Write [CLS] first [SEP] second [SEP] into `token_id_row`; return the number of tokens written.

        Args:
            token_id_row: (length,) a row of the batch.
            start_and_token_count_pairs: (first token in the corpus, number of tokens) of each segment.
        """
        token_id_row[0], token_place = self.masking.cls, 1
        for start, size in start_and_token_count_pairs:
            token_id_row[token_place : token_place + size] = self.tokens[start : start + size]
            token_id_row[token_place + size] = self.masking.sep
            token_place += size + 1
        return token_place

    def document_start_and_token_count_of_sample(self, sample_index: int) -> tuple[int, int, int]:
        """Return (document, first token, number of tokens) of a sample."""
        document = int(self.until.searchsorted(sample_index, side="right"))
        window_index = sample_index - (int(self.until[document - 1]) if document else 0)
        begin, end = self._document_range(document)
        start = max(begin, min(begin + window_index * self.body, end - self.body))
        return document, start, min(self.body, end - start)

    def _document_range(self, document: int) -> tuple[int, int]:
        return (int(self.ends[document - 1]) if document else 0), int(self.ends[document])

    def _draw_start_and_token_count_in_other_document(
        self, document: int, segment_tokens: int, random_values: list[float]
    ) -> tuple[int, int]:
        """Return (first token, number of tokens) of a segment of another document.

        Documents are drawn in proportion to their size. If no drawn one has `segment_tokens` tokens, the
        longest segment found is used.

        random_values: random values in [0, 1), one for each attempt.
        """
        best_segment = (0, 0)
        for random_value in random_values:
            token_index = int(random_value * len(self.tokens))
            other_document = int(self.ends.searchsorted(token_index, side="right"))
            if other_document != document:
                begin, end = self._document_range(other_document)
                start = max(begin, min(token_index, end - segment_tokens))
                best_segment = max(best_segment, (min(segment_tokens, end - start), start))
            if best_segment[0] == segment_tokens:
                break
        token_count, start = (
            best_segment
            if best_segment[0]
            else self._token_count_and_start_in_next_document(document, segment_tokens)
        )
        return start, token_count

    def _token_count_and_start_in_next_document(
        self, document: int, segment_tokens: int
    ) -> tuple[int, int]:
        """Return a segment of the next document that has tokens.

        Needed where one document is nearly the whole corpus, so that every draw gave that one.
        """
        others = ((document + step) % len(self.ends) for step in range(1, len(self.ends)))
        begin, end = next(span for span in map(self._document_range, others) if span[1] > span[0])
        return min(segment_tokens, end - begin), begin
