"""BERT's masked words: which are predicted, and what stands in their place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

from ortlaunch.recipe.fields.data import MaskedLm
from ortlaunch.worker.data.reading import DataError
from ortlaunch.worker.data.samples import IGNORED, Sample
from ortlaunch.worker.data.shards import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]
_Bools = NDArray[np.bool_]
_NEVER = 2.0  # above all draws


Places = Sequence[tuple[int, int]]


def draws(seed: int, places: Places, count: int) -> _Floats:
    """(samples, count): what samples, (index, epoch) each, draw at random, from 0 to below 1.

    Philox ciphers with a key: another key is another stream (Salmon et al. 2011). The key is these numbers themselves:
    NumPy's hash of them would take four times as long.
    """
    found: _Floats = np.empty((len(places), count))
    for row, (index, epoch) in zip(found, places):
        np.random.Generator(np.random.Philox(_SampleSeed(seed, epoch, index))).random(out=row)  # type: ignore[arg-type]  # no ISeedSequence in its stub
    return found


class _SampleSeed(ISeedSequence):
    """No two samples of a data set have one, below 2^40 samples and 2^24 epochs."""

    def __init__(self, seed: int, epoch: int, index: int) -> None:
        self.words = (seed % (1 << 64), (epoch % (1 << 24) << 40) + index)

    def generate_state(self, n_words: int, dtype: object = np.uint32) -> NDArray[np.uint64]:
        """What Philox asks for: two words of 64 bits."""
        return np.array(self.words, dtype=np.uint64)


class Masking:
    """`data.masked_lm`, for a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: MaskedLm) -> None:
        missing = [
            name
            for name in ("cls_token", "sep_token", "mask_token")
            if getattr(tokenizer, name) is None
        ]
        if missing:
            raise DataError(
                f"data.tokenizer has no {', '.join(missing)}, which masked language models need; train wordpiece"
            )
        self.words = len(tokenizer)
        self.settings = settings
        self.cls = tokenizer.cls_token_id
        self.sep = tokenizer.sep_token_id
        self.mask_id = tokenizer.mask_token_id
        self.goes_on = _pieces(tokenizer) if settings.whole_words else None

    def predictions(self, tokens: int) -> int:
        """Of a sequence with so many, [CLS] and [SEP] among them; as in BERT's create_pretraining_data.py."""
        wanted = max(1, round(tokens * self.settings.probability))
        return min(wanted, self.settings.max_predictions or wanted)

    def mask(self, ids: _Ints, labels: _Ints, sizes: Sequence[int], random: _Floats) -> None:
        """Choose places, and give them their labels; 80 % become [MASK], 10 % a random word, 10 % stay.

        ids, labels: (samples, length) int64, both written to; sizes: what of each is no padding; random: (samples,
        2 * length), of `draws`.
        """
        length = ids.shape[1]
        turns = random[:, :length].copy()
        turns[
            (ids == self.cls) | (ids == self.sep) | (np.arange(length) >= np.array(sizes)[:, None])
        ] = _NEVER
        counts = [self.predictions(size) for size in sizes]
        chosen = (
            _lowest(turns, counts)
            if self.goes_on is None
            else self._whole_words(ids, turns, counts)
        )
        rows, places = chosen.nonzero()
        words = ids[rows, places]
        labels[rows, places] = words
        fate = random[rows, length + places]
        others = ((fate - 0.9) * (10 * self.words)).astype(
            np.int64
        )  # what is left of the number, rounded down
        ids[rows, places] = np.where(fate < 0.8, self.mask_id, np.where(fate < 0.9, words, others))

    def _whole_words(self, ids: _Ints, turns: _Floats, counts: list[int]) -> _Bools:
        """Of each sample the words that still fit, in the order of their first pieces' turns."""
        assert self.goes_on is not None
        chosen: _Bools = np.zeros(ids.shape, dtype=bool)
        for row, mine, turn, count in zip(chosen, ids, turns, counts):
            places = (turn < _NEVER).nonzero()[0]
            begins = ~self.goes_on[mine[places]]
            begins[1:] |= places[1:] != places[:-1] + 1
            begins[:1] = True
            firsts = begins.nonzero()[0]
            words = np.split(places, firsts[1:])
            left = count
            for number in turn[places[firsts]].argsort():
                if len(words[number]) <= left:
                    row[words[number]] = True
                    left -= len(words[number])
                if not left:
                    break
            if left == count:
                row[places[:1]] = True
        return chosen


def _lowest(turns: _Floats, counts: list[int]) -> _Bools:
    """(samples, length): so many of each sample whose turn comes first."""
    first = turns.argsort()[:, : max(counts)]
    taken = np.arange(first.shape[1]) < np.array(counts)[:, None]
    chosen: _Bools = np.zeros(turns.shape, dtype=bool)
    np.put_along_axis(chosen, first, taken, axis=1)
    chosen &= turns < _NEVER
    return chosen


def _pieces(tokenizer: PreTrainedTokenizerBase) -> _Bools:
    """(words,) bool: which pieces go on a word.

    Raises:
        DataError: none is marked.
    """
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    found: _Bools = np.array([name.startswith("##") for name in names])
    if not found.any():
        raise DataError(
            "data.masked_lm.whole_words: data.tokenizer marks no piece of a word by ##, as wordpiece does; leave it out"
        )
    return found


class MaskedSamples(ABC):
    """Samples that are made a micro batch at a time: NumPy's calls take as long for one."""

    @abstractmethod
    def batch(self, places: Places) -> dict[str, torch.Tensor]:
        """Samples (index, epoch): tensors are (samples, ...)."""

    def sample(self, index: int, epoch: int) -> Sample:
        return {name: values[0] for name, values in self.batch([(index, epoch)]).items()}


class MaskedBlocks(MaskedSamples):
    """Windows of the corpus with masked words; documents follow each other. Each has as many predictions."""

    def __init__(self, tokens: Tokens, length: int, masking: Masking, seed: int) -> None:
        self.tokens = tokens
        self.masking = masking
        self.seed = seed
        self.body = length - 2
        self.varies = masking.settings.whole_words

    def __len__(self) -> int:
        return len(self.tokens) // self.body

    def batch(self, places: Places) -> dict[str, torch.Tensor]:
        length = self.body + 2
        ids: _Ints = np.empty((len(places), length), dtype=np.int64)
        ids[:, 0], ids[:, -1] = self.masking.cls, self.masking.sep
        for row, (index, _) in zip(ids, places):
            row[1:-1] = self.tokens[index * self.body : (index + 1) * self.body]
        labels = np.full_like(ids, IGNORED)
        self.masking.mask(ids, labels, [length] * len(places), draws(self.seed, places, 2 * length))
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
