"""T5's pretraining: spans of a text are left out, and the model writes them (Raffel et al. 2020).

The rules are those of T5's own `random_spans_helper` and `random_spans_noise_mask`, as in
transformers' run_t5_mlm_flax.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ortlaunch.recipe.fields.data import SpanCorruption
from ortlaunch.worker.data.file_rows import DataError
from ortlaunch.worker.data.masked.masking import MaskedSamples, random_values_of_samples
from ortlaunch.worker.data.order import SampleEpoch
from ortlaunch.worker.data.shards import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SpanCounts(NamedTuple):
    """Counts of a window of text."""

    tokens: int
    noise_tokens: int
    """Tokens that are left out."""
    spans: int

    @property
    def input_length(self) -> int:
        """Tokens that are read: a mark for each span, and the end mark, are among them."""
        return self.tokens - self.noise_tokens + self.spans + 1


def counts_of_window(token_count: int, settings: SpanCorruption) -> SpanCounts:
    """Return how many tokens and spans of a window are left out."""
    noise_tokens = min(max(round(token_count * settings.noise_density), 1), token_count - 1)
    spans = round(min(noise_tokens, token_count - noise_tokens) / settings.mean_span_length)
    return SpanCounts(token_count, noise_tokens, max(spans, 1))


class CorruptedSpans(MaskedSamples):
    """Windows of the corpus; a window may span several documents.

    `input_ids` are the text with a mark in place of each span, `labels` the marks with the spans.
    Both end with the end mark, and all samples have the same lengths, so that there is no padding.
    """

    def __init__(
        self,
        tokens: Tokens,
        length: int,
        tokenizer: PreTrainedTokenizerBase,
        settings: SpanCorruption,
        seed: int,
    ) -> None:
        self.tokens = tokens
        self.seed = seed
        self.counts = counts_of_window(length - 1, settings)
        while (longer := counts_of_window(self.counts.tokens + 1, settings)).input_length <= length:
            self.counts = longer
        vocabulary = tokenizer.get_vocab()
        names = [f"<extra_id_{number}>" for number in range(self.counts.spans)]
        self._mark_ids = np.array([vocabulary.get(name, -1) for name in names])
        end_id = tokenizer.eos_token_id
        if end_id is None or -1 in self._mark_ids:
            missing = next(
                (name for name in names if name not in vocabulary), "end mark (eos_token)"
            )
            raise DataError(
                f"data.tokenizer: has no {missing}; a sample of {length} tokens needs {names[0]} to "
                f"{names[-1]} (data.added_tokens) and an end mark (data.special_tokens: {{eos_token: ...}})"
            )
        self._end_ids = np.array([end_id])

    def __len__(self) -> int:
        return len(self.tokens) // self.counts.tokens

    def batch(self, sample_epochs: Sequence[SampleEpoch]) -> dict[str, torch.Tensor]:
        token_count, noise_tokens, spans = self.counts
        random_values = random_values_of_samples(self.seed, sample_epochs, token_count - 2)
        rows = []
        for sample_epoch, values in zip(sample_epochs, random_values):
            start = sample_epoch.sample_index * token_count
            ids = self.tokens[start : start + token_count].astype(np.int64)
            lengths = np.empty(2 * spans, np.int64)
            lengths[::2] = _random_segment_lengths(values[noise_tokens - 1 :], spans)
            lengths[1::2] = _random_segment_lengths(values[: noise_tokens - 1], spans)
            parts = np.split(ids, lengths.cumsum()[:-1])
            marks = np.split(self._mark_ids, spans)
            rows.append(
                [
                    np.concatenate([part for pair in pairs for part in pair] + [self._end_ids])
                    for pairs in (zip(parts[::2], marks), zip(marks, parts[1::2]))
                ]
            )
        inputs, labels = (torch.from_numpy(np.stack(column)) for column in zip(*rows))
        return {"input_ids": inputs, "labels": labels}


def _random_segment_lengths(
    random_values: NDArray[np.float64], segment_count: int
) -> NDArray[np.int64]:
    """Divide items into segments of one item or more, all divisions being equally likely.

    Args:
        random_values: one less than there are items.
        segment_count: number of segments.

    Returns:
        (segment_count,), their lengths.
    """
    ends = np.sort(random_values.argsort()[: segment_count - 1]) + 1
    return np.diff(ends, prepend=0, append=len(random_values) + 1)
