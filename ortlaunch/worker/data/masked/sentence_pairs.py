"""BERT's pretraining samples: a segment, and its continuation or a segment of another document.

Segments that follow each other are from one document. A long document is cut into windows of the
full length of a sample; the last window is moved back so that it ends with the document. A short
document is one sample with padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ortlaunch.worker.data.file_rows import DataError
from ortlaunch.worker.data.masked.masking import (
    MaskedSamples,
    Masking,
    random_values_of_samples,
)
from ortlaunch.worker.data.order import SampleEpoch
from ortlaunch.worker.data.samples import IGNORED
from ortlaunch.worker.data.token_cache import Documents, token_range_of_document

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

    def batch(self, sample_epochs: Sequence[SampleEpoch]) -> dict[str, torch.Tensor]:
        random_values = random_values_of_samples(
            self.seed, sample_epochs, 2 + _ATTEMPTS + 2 * self.length
        )
        arrays: _Ints = np.zeros((4, len(sample_epochs), self.length), dtype=np.int64)
        ids, labels, attention, segments = arrays
        labels[:] = IGNORED
        ends = []
        unrelated = []
        for row, (sample_epoch, random_row) in enumerate(
            zip(sample_epochs, random_values[:, : 2 + _ATTEMPTS].tolist())
        ):
            document = int(self.until.searchsorted(sample_epoch.sample_index, side="right"))
            token_range = self._token_range_of_sample(sample_epoch.sample_index, document)
            # The first segment has a quarter to three quarters of the tokens.
            low = max(1, len(token_range) // 4)
            high = max(1, len(token_range) * 3 // 4)
            cut = low + int(random_row[0] * (high + 1 - low))
            second_segment = token_range[cut:]
            unrelated.append(int(random_row[1] < 0.5))
            if unrelated[-1]:
                second_segment = self._draw_segment_of_other_document(
                    document, len(second_segment), random_row[2:]
                )
            end = self._write_marked_segments_and_count_tokens(
                ids[row], token_range[:cut], second_segment
            )
            ids[row, end:] = self.pad
            attention[row, :end], segments[row, cut + 2 : end] = 1, 1
            ends.append(end)
        self.masking.choose_and_mask_tokens_in_place(
            ids, labels, ends, random_values[:, 2 + _ATTEMPTS :], sample_epochs
        )
        return {
            **dict(zip(_NAMES, torch.from_numpy(arrays))),
            "next_sentence_label": torch.tensor(unrelated),
        }

    def _write_marked_segments_and_count_tokens(
        self, token_id_row: _Ints, *token_ranges: range
    ) -> int:
        """Write [CLS] first [SEP] second [SEP] into `token_id_row`; return the number of tokens written.

        Args:
            token_id_row: (length,) a row of the batch.
            token_ranges: of the first and the second segment, in the corpus.
        """
        token_id_row[0], token_place = self.masking.cls, 1
        for token_range in token_ranges:
            end = token_place + len(token_range)
            token_id_row[token_place:end] = self.tokens[token_range.start : token_range.stop]
            token_id_row[end] = self.masking.sep
            token_place = end + 1
        return token_place

    def _token_range_of_sample(self, sample_index: int, document: int) -> range:
        """Return the positions of a sample's tokens, both segments together; `document` is the sample's."""
        window_index = sample_index - (int(self.until[document - 1]) if document else 0)
        document_range = token_range_of_document(self.ends, document)
        begin, end = document_range.start, document_range.stop
        start = max(begin, min(begin + window_index * self.body, end - self.body))
        return range(start, min(end, start + self.body))

    def _draw_segment_of_other_document(
        self, document: int, segment_tokens: int, random_values: list[float]
    ) -> range:
        """Return the positions of a segment of another document.

        Documents are drawn in proportion to their size. If no drawn one has `segment_tokens` tokens, the
        longest segment found is used.

        random_values: random values in [0, 1), one for each attempt.
        """
        best_segment = range(0)
        for random_value in random_values:
            token_index = int(random_value * len(self.tokens))
            other_document = int(self.ends.searchsorted(token_index, side="right"))
            if other_document != document:
                other_range = token_range_of_document(self.ends, other_document)
                start = max(other_range.start, min(token_index, other_range.stop - segment_tokens))
                segment = range(start, min(start + segment_tokens, other_range.stop))
                if len(segment) == segment_tokens:
                    return segment
                # Of equally long segments, the last one in the corpus.
                best_segment = max(best_segment, segment, key=lambda it: (len(it), it.start))
        return best_segment or self._start_of_following_nonempty_document(document, segment_tokens)

    def _start_of_following_nonempty_document(self, document: int, segment_tokens: int) -> range:
        """Return a segment of the next document that has tokens.

        Needed where one document is nearly the whole corpus, so that every draw gave that one.
        """
        others = ((document + step) % len(self.ends) for step in range(1, len(self.ends)))
        document_ranges = (token_range_of_document(self.ends, other) for other in others)
        return next(filter(None, document_ranges))[:segment_tokens]
