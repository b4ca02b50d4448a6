"""Samples of masked language models that hold several documents, none of which attends to another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ortlaunch.worker.data.masked.masking import MaskedSamples, Masking, random_values_of_samples
from ortlaunch.worker.data.order import SampleEpoch
from ortlaunch.worker.data.packed_samples import bin_by_item_of_first_fit_decreasing
from ortlaunch.worker.data.samples import IGNORED
from ortlaunch.worker.data.token_cache import Documents

_Ints = NDArray[np.int64]
_NAMES = ("input_ids", "labels", "position_ids", "document_ids")


class MaskedPacks(MaskedSamples):
    """Documents as `[CLS] document [SEP]`, packed whole by first-fit decreasing.

    A document that is longer than a sample is cut into pieces, each with its own marks. Arrays with
    24 bytes for each piece are held in memory. worker/model/packing.py keeps the pieces apart.
    """

    varies = True

    def __init__(
        self, documents: Documents, length: int, masking: Masking, padding_id: int, seed: int
    ) -> None:
        self.tokens, ends = documents
        self.length = length
        self.masking = masking
        self.pad = padding_id
        self.seed = seed
        # [CLS] and [SEP] take two places.
        body = length - 2
        document_sizes = np.diff(ends, prepend=0)
        pieces_by_document = -(-document_sizes // body)
        document_by_piece = np.repeat(np.arange(len(document_sizes)), pieces_by_document)
        first_pieces = np.cumsum(pieces_by_document) - pieces_by_document
        index_in_document = np.arange(len(document_by_piece)) - first_pieces[document_by_piece]
        # (pieces,): each one's first token, and the one after its last.
        self.begins = (ends - document_sizes)[document_by_piece] + index_in_document * body
        self.stops = np.minimum(self.begins + body, np.asarray(ends)[document_by_piece])
        packs = bin_by_item_of_first_fit_decreasing(self.stops - self.begins + 2, length)
        # (pieces,): those of the first pack, then those of the second one, and so on.
        self.piece_by_pack_place = np.argsort(packs, kind="stable")
        self.pack_ends = np.cumsum(np.bincount(packs))

    def __len__(self) -> int:
        return len(self.pack_ends)

    def batch(self, sample_epochs: Sequence[SampleEpoch]) -> dict[str, torch.Tensor]:
        arrays: _Ints = np.zeros((4, len(sample_epochs), self.length), dtype=np.int64)
        ids, labels, positions, document_ids = arrays
        labels[:] = IGNORED
        token_counts = []
        for row, sample_epoch in enumerate(sample_epochs):
            sample_index = sample_epoch.sample_index
            first_place = int(self.pack_ends[sample_index - 1]) if sample_index else 0
            pieces = self.piece_by_pack_place[first_place : self.pack_ends[sample_index]]
            filled_length = 0
            for document_id, piece in enumerate(pieces):
                body = self.tokens[self.begins[piece] : self.stops[piece]]
                columns = slice(filled_length, filled_length + len(body) + 2)
                ids[row, columns] = [self.masking.cls, *body, self.masking.sep]
                positions[row, columns] = np.arange(len(body) + 2)
                document_ids[row, columns] = document_id
                filled_length = columns.stop
            # Padding is one more document, without labels.
            ids[row, filled_length:] = self.pad
            positions[row, filled_length:] = np.arange(self.length - filled_length)
            document_ids[row, filled_length:] = len(pieces)
            token_counts.append(filled_length)
        random_values = random_values_of_samples(self.seed, sample_epochs, 2 * self.length)
        self.masking.choose_and_mask_tokens_in_place(
            ids, labels, token_counts, random_values, sample_epochs
        )
        return dict(zip(_NAMES, torch.from_numpy(arrays)))
