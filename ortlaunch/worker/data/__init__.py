"""Samples and batches: what a rank sees at a step, as a function of seed and step, never of the number of ranks.

A corpus becomes one long row of token ids, cached by content; samples are windows of it. Every sample has the same
length and the same number of predictions, so that the mean over micro batches is the mean over the global batch.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from filelock import FileLock

from ortlaunch.cache import cache_folder, renew, take_notes
from ortlaunch.plan import BatchPlan
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.models import Corpus, MaskedLm
from ortlaunch.worker.data.corpus import DataError, documents, fingerprint, rows
from ortlaunch.worker.data.left_out import LeftOut
from ortlaunch.worker.data.order import Order
from ortlaunch.worker.data.tokenizer import load_tokenizer
from ortlaunch.worker.distributed import DistributedContext

IGNORED = -100  # the label that cross entropy leaves out
_DOCUMENTS_AT_ONCE = 1000


class Samples(Protocol):
    """A data set; the epoch lets masking differ from one pass over the data to the next."""

    def __len__(self) -> int: ...
    def sample(self, index: int, epoch: int) -> Mapping[str, Any]: ...


class Data:
    """The training and evaluation samples of a recipe, with their tokenizer."""

    def __init__(self, recipe: Recipe) -> None:
        self.tokenizer = load_tokenizer(recipe.data) if recipe.data.tokenizer else None
        self.train = make_samples(recipe, recipe.data.train, self.tokenizer)
        evaluation = recipe.data.evaluation
        self.evaluation = None if evaluation is None else make_samples(recipe, evaluation, self.tokenizer)


def load_data(recipe: Recipe, group: DistributedContext) -> Data:
    """The data of a recipe (collective); rank 0 says what any rank found changed in the cache."""
    data = Data(recipe)
    group.print_all(take_notes())
    return data


def make_samples(recipe: Recipe, source: str | Corpus, tokenizer: Any) -> Samples:
    """The samples of one corpus for the recipe's task."""
    if isinstance(source, Corpus) and source.format == "custom":
        return OwnSamples(call("data.factory", str(source.factory), source.arguments))
    length, task = recipe.data.sequence_length or 0, recipe.model.task
    if task == "sequence-classification":
        return LabelledTexts(source, tokenizer, length)
    pretrained = task == "causal-lm" and isinstance(recipe.data.tokenizer, str)
    begin = begin_of_text(tokenizer) if pretrained else []
    tokens = _tokenized(source, tokenizer, end_of_text=task in ("causal-lm", "custom"), begin=begin)
    if task in ("causal-lm", "custom"):
        samples: Samples = Blocks(tokens, length, with_mask=task == "causal-lm")
    else:
        samples = MaskedBlocks(
            tokens, length, tokenizer, recipe.data.masked_lm or MaskedLm(), recipe.seed, task == "pretraining"
        )
    if len(samples) == 0:
        raise DataError(f"the corpus has {len(tokens)} tokens, fewer than one sample of {length}")
    return samples


def call(key: str, target: str, arguments: dict[str, Any]) -> Any:
    """What the user's own `module:function` returns.

    Raises:
        DataError: there is no such module or function, or it takes other arguments.
    """
    module, _, function = target.partition(":")
    try:
        found = getattr(import_module(module), function, None)
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            raise DataError(f"{key}: no module {module!r} beside the recipe, in this folder or installed") from None
        raise
    if not callable(found):
        raise DataError(f"{key}: module {module!r} has no function {function!r}")
    try:
        inspect.signature(found).bind(**arguments)
    except TypeError as error:
        raise DataError(f"{key}: {target}{inspect.signature(found)} and its `arguments` differ: {error}") from None
    return found(**arguments)


class OwnSamples:
    """The user's own data set: any object with `__len__` and `__getitem__`."""

    def __init__(self, items: Any) -> None:
        if not hasattr(items, "__len__") or not hasattr(items, "__getitem__") or len(items) == 0:
            raise DataError(
                f"data.factory returned {type(items).__name__}; it must have samples, __len__ and __getitem__"
            )
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def sample(self, index: int, epoch: int) -> Mapping[str, Any]:
        item = self.items[index]
        if not isinstance(item, Mapping):
            raise DataError(
                f"sample {index} of data.factory is a {type(item).__name__}; it must be a mapping of names to tensors"
            )
        return item


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


class LabelledTexts:
    """Texts with a class each, cut or padded to one length."""

    def __init__(self, source: str | Corpus, tokenizer: Any, length: int) -> None:
        assert isinstance(source, Corpus)
        self.texts: list[str] = []
        self.labels: list[int] = []
        for number, row in enumerate(rows(source), 1):
            text, label = _labelled(row, number, source)
            self.texts.append(text)
            self.labels.append(label)
        if not self.texts:
            raise DataError("data: the corpus for sequence-classification has no rows")
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        self.tokenizer, self.length = tokenizer, length

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def classes(self) -> int:
        return max(self.labels) + 1

    def sample(self, index: int, epoch: int) -> Mapping[str, Any]:
        encoded = self.tokenizer(
            self.texts[index], truncation=True, max_length=self.length, padding="max_length", return_tensors="pt",
            return_token_type_ids=False,  # one segment: zeros for those models that have them, an error for the others
        )  # fmt: skip
        return {**{name: value[0] for name, value in encoded.items()}, "labels": torch.tensor(self.labels[index])}


def _labelled(row: Mapping[str, Any], number: int, source: Corpus) -> tuple[str, int]:
    """Text and class of a row."""
    for column in (source.text_column, source.label_column):
        if column not in row:
            raise DataError(f"data: no column {column!r} in row {number}; it has {', '.join(sorted(row))}")
    text, label = row[source.text_column], row[source.label_column]
    if type(label) is not int or label < 0:  # a bool is an int, and no class
        raise DataError(f"data: row {number}: {source.label_column} is {label!r}; a class is an integer from 0")
    if not isinstance(text, str):
        raise DataError(f"data: row {number}: {source.text_column} is {text!r:.80}; it must be text")
    return text, label


def _window(tokens: np.ndarray[Any, Any], start: int, length: int) -> torch.Tensor:
    return torch.from_numpy(tokens[start : start + length].astype(np.int64))


def begin_of_text(tokenizer: Any) -> list[int]:
    """What the tokenizer itself puts before a text, as Llama's <s>; its models have seen no text without."""
    whole, alone = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    starts = (start for start in range(len(whole)) if whole[start : start + len(alone)] == alone)
    begin: list[int] = whole[: next(starts, 0)]
    return begin


def _tokenized(
    source: str | Corpus, tokenizer: Any, end_of_text: bool, begin: Sequence[int] = ()
) -> np.ndarray[Any, Any]:
    """Token ids of a corpus, (tokens,) uint32 on disk; written by whoever comes first on this machine."""
    end = [tokenizer.eos_token_id] if end_of_text and tokenizer.eos_token_id is not None else []
    vocabulary = (
        tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else str(sorted(tokenizer.get_vocab().items()))
    )
    marks = f"{[*begin]} {end}" if begin else f"{end}"  # tokens cached before there were begin marks stay good
    key = hashlib.sha256(f"{fingerprint(source)} {marks} {vocabulary}".encode()).hexdigest()[:16]
    path = cache_folder("tokens") / f"{key}.u32"
    # A lock, not a barrier: tokenizing may outlast any collective's timeout.
    with FileLock(f"{path}.lock"):
        renew(path.with_suffix(".seal"), lambda: _write_tokens(path, source, tokenizer, (begin, end)))
    return np.memmap(path, dtype=np.uint32, mode="r") if path.stat().st_size else np.zeros(0, np.uint32)


def _write_tokens(
    path: Path, source: str | Corpus, tokenizer: Any, marks: tuple[Sequence[int], Sequence[int]]
) -> list[Path]:
    """Every document between its begin and end marks; the file."""
    begin, end = marks
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        for texts in _chunks(documents(source)):
            for ids in tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)[
                "input_ids"
            ]:
                np.asarray([*begin, *ids, *end], dtype=np.uint32).tofile(file)
    partial.replace(path)
    return [path]


def _chunks(texts: Iterator[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    for text in texts:
        chunk.append(text)
        if len(chunk) == _DOCUMENTS_AT_ONCE:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


class Batches:
    """Micro batches by step; the order of samples depends on the seed alone."""

    def __init__(self, samples: Samples, batch: BatchPlan, seed: int) -> None:
        self.samples, self.batch, self.seed = samples, batch, seed
        self.left_out = LeftOut()
        self._step, self._seen = 0, 0
        self.order = Order(len(samples), seed)

    def go_on(self, step: int, seen: int) -> None:
        """Step `step` follows on `seen` samples, whatever the global batch was before it."""
        self._step, self._seen = step, seen

    def seen(self, step: int) -> int:
        """Samples that the steps before `step` (from 0) took, with those that were left out before one they took."""
        taken = (step - self._step) * self.batch.global_samples
        return self.left_out.place(self._seen, taken - 1) + 1 if taken else self._seen

    def stretch(self, step: int) -> tuple[int, int]:
        """Where the samples of step `step` (from 0) are in the order of all epochs: first, and after the last."""
        return self.left_out.place(self._seen, (step - self._step) * self.batch.global_samples), self.seen(step + 1)

    def micro_batch(self, step: int, accumulation: int, rank: int) -> dict[str, torch.Tensor]:
        """What `rank` takes in pass `accumulation` of step `step` (both from 0); tensors are (micro_samples, ...)."""
        places = self._places(step, accumulation, rank)
        return collate([self.samples.sample(index, epoch) for index, epoch in places])

    def indices(self, step: int, accumulation: int, rank: int) -> list[int]:
        """Which samples of the data set `micro_batch` takes."""
        return [index for index, _ in self._places(step, accumulation, rank)]

    def indices_of_step(self, step: int) -> list[int]:
        """Those of all passes and ranks."""
        passes = itertools.product(range(self.batch.accumulation_steps), range(self.batch.data_parallel_ranks))
        return [index for number, rank in passes for index in self.indices(step, number, rank)]

    def _places(self, step: int, accumulation: int, rank: int) -> list[tuple[int, int]]:
        """(index, epoch) of each sample."""
        b = self.batch
        first = (step - self._step) * b.global_samples + (accumulation * b.data_parallel_ranks + rank) * b.micro_samples
        numbers = range(first, first + b.micro_samples)
        return self.order.at([self.left_out.place(self._seen, number) for number in numbers])


def collate(samples: list[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Stack samples of one shape into a batch."""
    batch = {}
    for name in samples[0]:
        try:
            values = [torch.as_tensor(sample[name]) for sample in samples]
        except KeyError:
            raise DataError(f"samples of one batch differ in their names: not all have {name!r}") from None
        except (TypeError, ValueError, RuntimeError) as error:  # all three are torch's
            raise DataError(f"{name!r} of a sample is no tensor, nor what becomes one: {error}") from None
        shapes = sorted({tuple(value.shape) for value in values})
        if len(shapes) > 1:
            raise DataError(f"samples of one batch differ in the shape of {name!r}: {shapes}; pad them in data.factory")
        batch[name] = torch.stack(values)
    return batch
