"""Samples that are windows of one long row of tokens: packed text, and BERT's masked words and segments.

Every sample has the same length and the same number of predictions, so that the mean over micro batches is the mean
over the global batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ortlaunch.recipe.data import MaskedLm
from ortlaunch.worker.data.reading import DataError
from ortlaunch.worker.data.samples import IGNORED


class Blocks:
    """Packed windows for causal language models; documents follow each other, an end mark between them."""

    def __init__(self, tokens: np.ndarray[Any, Any], length: int, with_mask: bool) -> None:
        self.tokens, self.length = tokens, length
        # Without a mask transformers looks for packed sequences with an operator that ONNX has not.
        self.mask = {"attention_mask": torch.ones(length, dtype=torch.int64)} if with_mask else {}

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def sample(self, index: int, epoch: int) -> Mapping[str, Any]:
        block = _window(self.tokens, index * self.length, self.length)
        return {"input_ids": block, **self.mask, "labels": block}


class MaskedBlocks:
    """BERT's samples: masked words and, for pretraining, two segments that follow each other or do not."""

    def __init__(
        self, tokens: np.ndarray[Any, Any], length: int, tokenizer: Any, masking: MaskedLm, seed: int, pairs: bool
    ) -> None:
        missing = [name for name in ("cls_token", "sep_token", "mask_token") if getattr(tokenizer, name) is None]
        if missing:
            raise DataError(
                f"data.tokenizer has no {', '.join(missing)}, which masked language models need; train wordpiece"
            )
        self.tokens, self.length, self.tokenizer, self.seed, self.pairs = tokens, length, tokenizer, seed, pairs
        self.body = length - (3 if pairs else 2)
        wanted = max(1, round(length * masking.probability))
        self.predictions = min(wanted, masking.max_predictions or wanted, self.body)

    def __len__(self) -> int:
        return len(self.tokens) // self.body

    def sample(self, index: int, epoch: int) -> Mapping[str, Any]:
        random = np.random.Generator(np.random.Philox([self.seed, epoch, index]))
        return self._pair(index, random) if self.pairs else self._single(index, random)

    def _single(self, index: int, random: np.random.Generator) -> Mapping[str, Any]:
        cls, sep = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id
        body = _window(self.tokens, index * self.body, self.body)
        return self._masked(torch.cat([torch.tensor([cls]), body, torch.tensor([sep])]), random)

    def _pair(self, index: int, random: np.random.Generator) -> Mapping[str, Any]:
        cls, sep = torch.tensor([self.tokenizer.cls_token_id]), torch.tensor([self.tokenizer.sep_token_id])
        body = _window(self.tokens, index * self.body, self.body)
        cut = int(random.integers(self.body // 4, self.body * 3 // 4 + 1))
        first, second, unrelated = body[:cut], body[cut:], int(random.integers(2))
        if unrelated:
            second = _window(self.tokens, int(random.integers(len(self.tokens) - len(second) + 1)), len(second))
        ids = torch.cat([cls, first, sep, second, sep])
        segments = torch.zeros_like(ids)
        segments[cut + 2 :] = 1
        return {**self._masked(ids, random), "token_type_ids": segments, "next_sentence_label": torch.tensor(unrelated)}

    def _masked(self, ids: torch.Tensor, random: np.random.Generator) -> dict[str, torch.Tensor]:
        """Choose exactly `predictions` places; 80 % become [MASK], 10 % a random word, 10 % stay."""
        special = (ids == self.tokenizer.cls_token_id) | (ids == self.tokenizer.sep_token_id)
        places = random.permutation(torch.nonzero(~special).flatten().numpy())[: self.predictions]
        labels = torch.full_like(ids, IGNORED)
        labels[places] = ids[places]
        fate = random.random(len(places))
        masked = ids.clone()
        masked[places[fate < 0.8]] = self.tokenizer.mask_token_id
        other = places[fate >= 0.9]
        masked[other] = torch.from_numpy(random.integers(len(self.tokenizer), size=len(other)))
        return {"input_ids": masked, "labels": labels}


def _window(tokens: np.ndarray[Any, Any], start: int, length: int) -> torch.Tensor:
    return torch.from_numpy(tokens[start : start + length].astype(np.int64))
