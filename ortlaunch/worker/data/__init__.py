"""The data of a recipe: tokenizer, training and evaluation samples, and the batches that ranks take of them."""

from __future__ import annotations

from typing import Any

from ortlaunch.cache import take_notes
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.data import Corpus, MaskedLm
from ortlaunch.worker.data.batches import Batches
from ortlaunch.worker.data.labelled import LabelledTexts, number_labels
from ortlaunch.worker.data.mixture import Mixture, source_seed
from ortlaunch.worker.data.own import OwnSamples, call
from ortlaunch.worker.data.reading import DataError
from ortlaunch.worker.data.samples import IGNORED, Samples, collate
from ortlaunch.worker.data.tokenizer import load_tokenizer
from ortlaunch.worker.data.tokens import Tell, begin_of_text, silent, tokenized
from ortlaunch.worker.data.windows import Blocks, MaskedBlocks
from ortlaunch.worker.distributed import DistributedContext

__all__ = [
    "IGNORED", "Batches", "Blocks", "Data", "LabelledTexts", "MaskedBlocks", "Mixture", "OwnSamples", "Samples",
    "begin_of_text", "call", "collate", "load_data", "make_samples",
]  # fmt: skip


class Data:
    """The training and evaluation samples of a recipe, with their tokenizer."""

    def __init__(self, recipe: Recipe, tell: Tell = silent) -> None:
        """tell: for a person who waits, how far it is."""
        self.tokenizer = load_tokenizer(recipe.data) if recipe.data.tokenizer else None
        self.train = _training(recipe, self.tokenizer, tell)
        evaluation = recipe.data.evaluation
        self.evaluation = None if evaluation is None else make_samples(recipe, evaluation, self.tokenizer, tell=tell)
        self.label_names = number_labels(self.train, self.evaluation)


def load_data(recipe: Recipe, group: DistributedContext, data: Data | None = None) -> Data:
    """The data of a recipe, or `data` (collective); rank 0 says what any rank found changed in the cache."""
    data = data or Data(recipe)
    group.print_all(take_notes())
    return data


def _training(recipe: Recipe, tokenizer: Any, tell: Tell) -> Samples:
    parts = recipe.data.parts
    if not isinstance(recipe.data.train, tuple):
        return make_samples(recipe, recipe.data.train, tokenizer, tell=tell)
    made = [
        make_samples(recipe, part.source, tokenizer, source_seed(recipe.seed, number), tell)
        for number, part in enumerate(parts)
    ]
    return Mixture(made, [part.weight for part in parts])


def make_samples(
    recipe: Recipe, source: str | Corpus, tokenizer: Any, seed: int | None = None, tell: Tell = silent
) -> Samples:
    """The samples of one corpus for the recipe's task; what is drawn in them comes from `seed`, else the recipe's."""
    if isinstance(source, Corpus) and source.format == "custom":
        return OwnSamples(call("data.factory", str(source.factory), source.arguments))
    seed = recipe.seed if seed is None else seed
    length, task = recipe.data.sequence_length or 0, recipe.model.task
    if task == "sequence-classification":
        return LabelledTexts(source, tokenizer, length)
    pretrained = task == "causal-lm" and isinstance(recipe.data.tokenizer, str)
    begin = begin_of_text(tokenizer) if pretrained else []
    tokens = tokenized(source, tokenizer, end_of_text=task in ("causal-lm", "custom"), begin=begin, tell=tell)
    if task in ("causal-lm", "custom"):
        samples: Samples = Blocks(tokens, length, with_mask=task == "causal-lm")
    else:
        samples = MaskedBlocks(
            tokens, length, tokenizer, recipe.data.masked_lm or MaskedLm(), seed, task == "pretraining"
        )
    if len(samples) == 0:
        raise DataError(f"the corpus has {len(tokens)} tokens, fewer than one sample of {length}")
    return samples
