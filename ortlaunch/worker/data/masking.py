"""BERT's masked words: which are predicted, and what stands in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ortlaunch.recipe.data import MaskedLm
from ortlaunch.worker.data.reading import DataError
from ortlaunch.worker.data.samples import IGNORED

_Ints = np.ndarray[Any, Any]


class Masking:
    """`data.masked_lm`, for a tokenizer."""

    def __init__(self, tokenizer: Any, settings: MaskedLm) -> None:
        missing = [name for name in ("cls_token", "sep_token", "mask_token") if getattr(tokenizer, name) is None]
        if missing:
            raise DataError(
                f"data.tokenizer has no {', '.join(missing)}, which masked language models need; train wordpiece"
            )
        self.words, self.settings = len(tokenizer), settings
        self.cls, self.sep, self.mask = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id
        self.goes_on = _pieces(tokenizer) if settings.whole_words else None

    def predictions(self, tokens: int) -> int:
        """Of a sequence with so many, [CLS] and [SEP] among them; as in BERT's create_pretraining_data.py."""
        wanted = max(1, round(tokens * self.settings.probability))
        return min(wanted, self.settings.max_predictions or wanted)

    def masked(self, ids: _Ints, random: np.random.Generator) -> dict[str, _Ints]:
        """Choose places; 80 % become [MASK], 10 % a random word, 10 % stay. ids: (tokens,) int64, without padding."""
        places = np.flatnonzero((ids != self.cls) & (ids != self.sep))
        places = self._chosen(ids, places, self.predictions(len(ids)), random)
        labels = np.full_like(ids, IGNORED)
        labels[places] = ids[places]
        fate = random.random(len(places))
        masked = ids.copy()
        masked[places[fate < 0.8]] = self.mask
        other = places[fate >= 0.9]
        masked[other] = random.integers(self.words, size=len(other))
        return {"input_ids": masked, "labels": labels}

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
        random = np.random.Generator(np.random.Philox([self.seed, epoch, index]))
        body = self.tokens[index * self.body : (index + 1) * self.body]
        ids = np.concatenate([[self.masking.cls], body, [self.masking.sep]], dtype=np.int64)
        return {name: torch.from_numpy(each) for name, each in self.masking.masked(ids, random).items()}
