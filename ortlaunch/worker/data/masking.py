"""BERT's masked words: which are predicted, and what stands in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence

from ortlaunch.recipe.data import MaskedLm
from ortlaunch.worker.data.reading import DataError
from ortlaunch.worker.data.samples import IGNORED

_Ints = np.ndarray[Any, Any]


def draws(seed: int, epoch: int, index: int) -> np.random.Generator:
    """What a sample draws at random. Philox ciphers with a key: another key is another stream (Salmon et al. 2011).

    The key is these numbers themselves: NumPy's hash of them would take four times as long.
    """
    return np.random.Generator(np.random.Philox(_Key(seed, epoch, index)))


class _Key(ISeedSequence):
    """No two samples of a data set have one, below 2^40 samples and 2^24 epochs."""

    def __init__(self, seed: int, epoch: int, index: int) -> None:
        self.words = (seed % (1 << 64), (epoch % (1 << 24) << 40) + index)

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> _Ints:
        """What Philox asks for: two words of 64 bits."""
        words: _Ints = np.array(self.words, dtype=np.uint64)
        return words


class Masking:
    """`data.masked_lm`, for a tokenizer."""

    def __init__(self, tokenizer: Any, settings: MaskedLm) -> None:
        missing = [name for name in ("cls_token", "sep_token", "mask_token") if getattr(tokenizer, name) is None]
        if missing:
            raise DataError(
                f"data.tokenizer has no {', '.join(missing)}, which masked language models need; train wordpiece"
            )
        self.words, self.settings = len(tokenizer), settings
        self.cls, self.sep, self.mask_id = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id
        self.goes_on = _pieces(tokenizer) if settings.whole_words else None

    def predictions(self, tokens: int) -> int:
        """Of a sequence with so many, [CLS] and [SEP] among them; as in BERT's create_pretraining_data.py."""
        wanted = max(1, round(tokens * self.settings.probability))
        return min(wanted, self.settings.max_predictions or wanted)

    def mask(self, ids: _Ints, labels: _Ints, random: np.random.Generator) -> None:
        """Choose places, and give them their labels; 80 % become [MASK], 10 % a random word, 10 % stay.

        ids, labels: (tokens,) int64, without padding; both are written to.
        """
        places = ((ids != self.cls) & (ids != self.sep)).nonzero()[0]
        places = self._chosen(ids, places, self.predictions(len(ids)), random)
        labels[places] = ids[places]
        fate = random.random(len(places))
        ids[places[fate < 0.8]] = self.mask_id
        other = places[fate >= 0.9]
        ids[other] = random.random(len(other)) * self.words  # rounded down

    def _chosen(self, ids: _Ints, places: _Ints, count: int, random: np.random.Generator) -> _Ints:
        """`count` of the places; with whole words, those of words in random order that still fit."""
        if self.goes_on is None:
            some: _Ints = random.permutation(places)[:count]
            return some
        begins = ~self.goes_on[ids[places]]
        begins[1:] |= places[1:] != places[:-1] + 1
        words = np.split(places, np.flatnonzero(begins[1:]) + 1)
        taken: list[_Ints] = []
        for number in random.permutation(len(words)):
            if len(words[number]) <= count:
                taken.append(words[number])
                count -= len(words[number])
            if not count:
                break
        return np.concatenate(taken) if taken else places[:1]


def _pieces(tokenizer: Any) -> np.ndarray[Any, Any]:
    """(words,) bool: which pieces go on a word.

    Raises:
        DataError: none is marked.
    """
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    found: _Ints = np.array([name.startswith("##") for name in names])
    if not found.any():
        raise DataError(
            "data.masked_lm.whole_words: data.tokenizer marks no piece of a word by ##, as wordpiece does; leave it out"
        )
    return found


class MaskedBlocks:
    """Windows of the corpus with masked words; documents follow each other. Each has as many predictions."""

    def __init__(self, tokens: np.ndarray[Any, Any], length: int, masking: Masking, seed: int) -> None:
        self.tokens, self.masking, self.seed = tokens, masking, seed
        self.body = length - 2
        self.varies = masking.settings.whole_words

    def __len__(self) -> int:
        return len(self.tokens) // self.body

    def sample(self, index: int, epoch: int) -> Mapping[str, Any]:
        found: _Ints = np.full((2, self.body + 2), IGNORED, dtype=np.int64)
        ids, labels = found
        ids[0], ids[-1] = self.masking.cls, self.masking.sep
        ids[1:-1] = self.tokens[index * self.body : (index + 1) * self.body]
        self.masking.mask(ids, labels, draws(self.seed, epoch, index))
        return dict(zip(("input_ids", "labels"), torch.from_numpy(found)))
