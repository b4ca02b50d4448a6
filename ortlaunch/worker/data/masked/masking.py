"""BERT's masked language modeling: the choice of predicted tokens, and their replacements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

from ortlaunch.recipe.fields.data import MaskedLm
from ortlaunch.worker.data.file_rows import DataError
from ortlaunch.worker.data.order import SampleEpoch
from ortlaunch.worker.data.samples import IGNORED, Sample
from ortlaunch.worker.data.shards import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]
_Bools = NDArray[np.bool_]
# The turn of a token that is never chosen: above all draws.
_NEVER = 2.0


def random_values_of_samples(
    seed: int, sample_epochs: Sequence[SampleEpoch], values_per_sample: int
) -> _Floats:
    """Return the random values of samples, float64 in [0, 1).

    Args:
        seed: seed of the data set.
        sample_epochs: index and epoch of each sample.
        values_per_sample: values of each sample.

    Returns:
        (samples, count); a row depends on seed, index and epoch alone.
    """
    random_values: _Floats = np.empty((len(sample_epochs), values_per_sample))
    for row, sample_epoch in zip(random_values, sample_epochs):
        # Philox encrypts a counter with a key: another key gives another stream (Salmon et al.
        # 2011). The key is made of these integers directly, as NumPy's hash of them takes four
        # times as long. The stub of Philox does not have ISeedSequence.
        np.random.Generator(
            np.random.Philox(_SampleSeed(seed, sample_epoch.epoch, sample_epoch.sample_index))  # type: ignore[arg-type]
        ).random(out=row)
    return random_values


class _SampleSeed(ISeedSequence):
    """The Philox key of one sample and epoch, unique below 2^40 samples and 2^24 epochs."""

    def __init__(self, seed: int, epoch: int, index: int) -> None:
        self.words = (seed % (1 << 64), (epoch % (1 << 24) << 40) + index)

    def generate_state(self, n_words: int, dtype: object = np.uint32) -> NDArray[np.uint64]:
        """Return the two 64-bit words that Philox requests as its key."""
        return np.array(self.words, dtype=np.uint64)


class Masking:
    """The masking of `data.masked_lm` for a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: MaskedLm) -> None:
        missing = [
            name
            for name in ("cls_token", "sep_token", "mask_token")
            if getattr(tokenizer, name) is None
        ]
        if missing:
            raise DataError(
                f"data.tokenizer has no {', '.join(missing)}, which masked language models "
                "need; train a wordpiece tokenizer"
            )
        self.vocabulary_size = len(tokenizer)
        self.settings = settings
        self.cls = tokenizer.cls_token_id
        self.sep = tokenizer.sep_token_id
        self.mask_id = tokenizer.mask_token_id
        self.is_continuation = (
            _is_word_continuation_by_token_id(tokenizer) if settings.whole_words else None
        )

    def _masked_token_count(self, token_count: int, step: int | None) -> int:
        """Return the number of predictions in a sequence of `token_count`, [CLS] and [SEP] included.

        step: the step that trains on it, from 0; None: none does.
        """
        settings = self.settings
        probability = settings.probability
        if settings.final_probability is not None and settings.final_step is not None:
            share = 1.0 if step is None else min(step / settings.final_step, 1.0)
            probability += (settings.final_probability - probability) * share
        # As in BERT's create_pretraining_data.py.
        requested_count = max(1, round(token_count * probability))
        return min(requested_count, self.settings.max_predictions or requested_count)

    def choose_and_mask_tokens_in_place(
        self,
        token_ids: _Ints,
        labels: _Ints,
        token_counts: Sequence[int],
        random_values: _Floats,
        sample_epochs: Sequence[SampleEpoch],
    ) -> None:
        """Choose tokens to predict, and write their labels and replacements.

        80 % of them become [MASK], 10 % a random token, and 10 % stay.

        Args:
            token_ids: (samples, length) int64, changed in place.
            labels: (samples, length) int64, changed in place.
            token_counts: tokens of each sample before padding.
            random_values: (samples, 2 * length), from `draws`: the order of choice, then the replacements.
            sample_epochs: the samples, with the steps that train on them.
        """
        length = token_ids.shape[1]
        turns = random_values[:, :length].copy()
        turns[
            (token_ids == self.cls)
            | (token_ids == self.sep)
            | (np.arange(length) >= np.array(token_counts)[:, None])
        ] = _NEVER
        counts = [
            self._masked_token_count(size, sample_epoch.step)
            for size, sample_epoch in zip(token_counts, sample_epochs)
        ]
        chosen_tokens = (
            _choose_tokens_with_lowest_draws(turns, counts)
            if self.is_continuation is None
            else self._choose_whole_words_by_lowest_draws(token_ids, turns, counts)
        )
        rows, places = chosen_tokens.nonzero()
        original_ids = token_ids[rows, places]
        labels[rows, places] = original_ids
        fate = random_values[rows, length + places]
        # From 0.9 on, the rest of the random value is spread over the vocabulary, rounded down.
        random_ids = ((fate - 0.9) * (10 * self.vocabulary_size)).astype(np.int64)
        token_ids[rows, places] = np.where(
            fate < 0.8, self.mask_id, np.where(fate < 0.9, original_ids, random_ids)
        )

    def _choose_whole_words_by_lowest_draws(
        self, token_ids: _Ints, draw_by_token: _Floats, max_tokens_by_sample: list[int]
    ) -> _Bools:
        """Choose whole words in the order of their first tokens' turns, within the counts."""
        assert self.is_continuation is not None
        chosen_tokens: _Bools = np.zeros(token_ids.shape, dtype=bool)
        for row, row_ids, turn, count in zip(
            chosen_tokens, token_ids, draw_by_token, max_tokens_by_sample
        ):
            places = (turn < _NEVER).nonzero()[0]
            # A word begins at a token that is no continuation, or after a gap (a special token).
            begins = ~self.is_continuation[row_ids[places]]
            begins[1:] |= places[1:] != places[:-1] + 1
            begins[:1] = True
            firsts = begins.nonzero()[0]
            word_places = np.split(places, firsts[1:])
            tokens_left = count
            for word_index in turn[places[firsts]].argsort():
                if len(word_places[word_index]) <= tokens_left:
                    row[word_places[word_index]] = True
                    tokens_left -= len(word_places[word_index])
                if not tokens_left:
                    break
            # Every word is longer than the count: one token is chosen, so that the sample has a
            # label.
            if tokens_left == count:
                row[places[:1]] = True
        return chosen_tokens


def _choose_tokens_with_lowest_draws(
    draw_by_token: _Floats, token_count_by_sample: list[int]
) -> _Bools:
    """Choose the tokens with the lowest turns: (samples, length) bool, `token_count_by_sample` in each sample."""
    lowest_indices = draw_by_token.argsort()[:, : max(token_count_by_sample)]
    is_within_count = np.arange(lowest_indices.shape[1]) < np.array(token_count_by_sample)[:, None]
    chosen_tokens: _Bools = np.zeros(draw_by_token.shape, dtype=bool)
    np.put_along_axis(chosen_tokens, lowest_indices, is_within_count, axis=1)
    # A sample may have fewer tokens to choose from than its count.
    chosen_tokens &= draw_by_token < _NEVER
    return chosen_tokens


def _is_word_continuation_by_token_id(tokenizer: PreTrainedTokenizerBase) -> _Bools:
    """Return which tokens of the vocabulary continue a word: (words,) bool.

    Raises:
        DataError: the vocabulary marks none.
    """
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    is_continuation: _Bools = np.array([name.startswith("##") for name in names])
    if not is_continuation.any():
        raise DataError(
            "data.masked_lm.whole_words: data.tokenizer does not mark pieces of words with ##, "
            "as wordpiece does; leave it out"
        )
    return is_continuation


class MaskedSamples(ABC):
    """Samples that are made for a whole micro batch: NumPy's calls take as long for one sample."""

    @abstractmethod
    def batch(self, sample_epochs: Sequence[SampleEpoch]) -> dict[str, torch.Tensor]:
        """Return these samples as a batch; tensors are (samples, ...)."""

    def sample(self, index: int, epoch: int) -> Sample:
        return {name: values[0] for name, values in self.batch([SampleEpoch(index, epoch)]).items()}


class MaskedBlocks(MaskedSamples):
    """Windows of the corpus with masked tokens; a window may span several documents.

    All windows have equally many predictions, except with whole words.
    """

    def __init__(self, tokens: Tokens, length: int, masking: Masking, seed: int) -> None:
        self.tokens = tokens
        self.masking = masking
        self.seed = seed
        # [CLS] and [SEP] take two places.
        self.body = length - 2
        # With whole words, the last word that fits may leave some of the count unused.
        self.varies = masking.settings.whole_words

    def __len__(self) -> int:
        return len(self.tokens) // self.body

    def batch(self, sample_epochs: Sequence[SampleEpoch]) -> dict[str, torch.Tensor]:
        length = self.body + 2
        ids: _Ints = np.empty((len(sample_epochs), length), dtype=np.int64)
        ids[:, 0], ids[:, -1] = self.masking.cls, self.masking.sep
        for row, sample_epoch in zip(ids, sample_epochs):
            row[1:-1] = self.tokens[
                sample_epoch.sample_index * self.body : (sample_epoch.sample_index + 1) * self.body
            ]
        labels = np.full_like(ids, IGNORED)
        self.masking.choose_and_mask_tokens_in_place(
            ids,
            labels,
            [length] * len(sample_epochs),
            random_values_of_samples(self.seed, sample_epochs, 2 * length),
            sample_epochs,
        )
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
