"""Several chats or prompts in one sample (`data.packing`), none of which attends to another.

The packs are a function of the lengths of the samples alone. Their order is that of any samples: a
function of seed and place, so that a resume in any number of ranks has nothing to replay.
worker/model/packing.py makes the attention mask of `document_ids`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from ortlaunch.base.cache import add_cache_note
from ortlaunch.recipe.fields.data import Data
from ortlaunch.worker.data.mixture import Mixture
from ortlaunch.worker.data.samples import IGNORED, Sample, Samples

_Ints = NDArray[np.int64]


class PackedSamples:
    """Samples that are packed whole, by first-fit decreasing, into samples of one length."""

    varies = True

    def __init__(self, samples: Any, length: int, recipe_key: str) -> None:
        """Pack samples: they have a size and an attention mask, and padding at their end."""
        self.samples = samples
        self.length = length
        sizes = np.array([samples.size(index) for index in range(len(samples))])
        packs = bin_by_item_of_first_fit_decreasing(sizes, length)
        # (samples,): the samples of the first pack, then those of the second one, and so on.
        self.members = np.argsort(packs, kind="stable")
        self.ends = np.cumsum(np.bincount(packs))
        # A window of a stream has no key.
        if recipe_key:
            filled = sizes.sum() / (len(self) * length)
            add_cache_note(
                f"{recipe_key}: {len(samples):,} chats are packed into {len(self):,} samples of {length} "
                f"tokens, {filled:.1%} of them filled"
            )

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def tokens(self) -> object:
        """The tokens of all samples, for the identity of the data."""
        return self.samples.tokens

    def sample(self, index: int, epoch: int) -> Sample:
        first_member = int(self.ends[index - 1]) if index else 0
        members = self.members[first_member : self.ends[index]].tolist()
        member_samples = [self.samples.sample(member, epoch) for member in members]
        sizes = [int(item["attention_mask"].sum()) for item in member_samples]
        labels = [item["labels"][:size].clone() for item, size in zip(member_samples, sizes)]
        for item in labels:
            # The first token of a document cannot be predicted from the document before.
            item[0] = IGNORED
        ids = torch.cat([item["input_ids"][:size] for item, size in zip(member_samples, sizes)])
        padding = (0, self.length - len(ids))
        # Padding is one more document, without labels.
        sizes.append(padding[1])
        return {
            "input_ids": functional.pad(ids, padding, value=self.samples.pad),
            "position_ids": torch.cat([torch.arange(size) for size in sizes]),
            "document_ids": torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)),
            "labels": functional.pad(torch.cat(labels), padding, value=IGNORED),
        }


def pack_chats_if_requested(samples: Samples, data_fields: Data, recipe_key: str) -> Samples:
    """Return the samples of chats packed, if the recipe requests it; other ones as they are."""
    if not data_fields.packing:
        return samples
    if not isinstance(samples, Mixture):
        # Samples of text are windows, which are full already.
        chats = hasattr(samples, "kept")
        return (
            PackedSamples(samples, data_fields.sequence_length or 0, recipe_key)
            if chats
            else samples
        )
    parts = [
        pack_chats_if_requested(part, data_fields, f"{recipe_key}[{part_index}]")
        for part_index, part in enumerate(samples.parts)
    ]
    by_size = data_fields.parts[0].weight is None
    return Mixture(parts, [len(part) for part in parts] if by_size else samples.weights)


def bin_by_item_of_first_fit_decreasing(
    size_by_item: Sequence[int] | _Ints, capacity: int
) -> _Ints:
    """Return the bin of each item: the first one with room, items from large to small.

    All items of one size are placed at once, which gives the same bins.

    Args:
        size_by_item: (items,) from 1 to `capacity`.
        capacity: the size of a bin.
    """
    items = np.asarray(size_by_item, np.int64)
    order = np.argsort(-items, kind="stable")
    starts = np.flatnonzero(np.diff(items[order], prepend=0))
    bin_of_item = np.empty(len(items), np.int64)
    room_by_bin = np.empty(0, np.int64)
    for group in np.split(order, starts[1:]):
        size = int(items[group[0]])
        used_bins = len(room_by_bin)
        new_bins = -(-len(group) // (capacity // size))
        room_by_bin = np.append(room_by_bin, np.full(new_bins, capacity))
        # The number of items of this size that have a place up to each bin.
        bins = np.searchsorted(np.cumsum(room_by_bin // size), np.arange(len(group)), side="right")
        bin_of_item[group] = bins
        room_by_bin -= np.bincount(bins, minlength=len(room_by_bin)) * size
        room_by_bin = room_by_bin[: max(used_bins, int(bins[-1]) + 1)]
    return bin_of_item
