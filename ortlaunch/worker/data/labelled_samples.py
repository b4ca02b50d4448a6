"""Samples of rows with labels: texts with a class or a number each, and words with a tag each.

They are tokenized once into the cache, as texts are. A row is one document there: its tokens, cut
to the length of a sample, followed by its labels as integers. The last document is the summary of
all rows.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ortlaunch.base.cache import add_cache_note
from ortlaunch.base.units import first_names_and_count_of_rest
from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.worker.data.corpus import corpus_fingerprint, corpus_name_for_errors
from ortlaunch.worker.data.file_rows import DataError
from ortlaunch.worker.data.label_rows import (
    LabelledRow,
    ReadLabelledRow,
    SourceSummary,
    labelled_rows_filling_summary,
    require_text_and_class_list_of_row,
    require_text_and_finite_number_of_row,
    require_words_and_tags_of_row,
    text_and_class_of_row,
)
from ortlaunch.worker.data.samples import IGNORED, Sample, Samples
from ortlaunch.worker.data.token_cache import (
    Documents,
    ShowProgress,
    TokenizeWork,
    backend_without_truncation_or_padding,
    ignore_progress,
    load_or_write_cached_tokens,
    token_range_of_document,
    tokenizer_text_for_cache_key,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Classes named in one line for the user.
_SHOWN = 6
# A whole number, as a class name; and the names that transformers gives to classes without names.
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_DEFAULT_NAME = re.compile(r"LABEL_[0-9]+")
# Rows that identify a data set; up to twice as many are used.
_IDENTITY_ROWS = 4096
_Ints = NDArray[np.uint32]


class LabelledTexts:
    """Samples of texts with a class each, cut or padded to one length."""

    task = "sequence-classification"
    read: ReadLabelledRow = staticmethod(text_and_class_of_row)
    behind = 1
    """Count of integers after the tokens of a row."""
    columns: tuple[str, ...] = ("label_column",)
    """Fields of the columns that `read` reads, beside the text."""
    key_settings = ""
    """Other settings that determine the stored integers."""

    def __init__(
        self,
        source: str | Corpus,
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        show_progress: ShowProgress = ignore_progress,
    ) -> None:
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if tokenizer.pad_token is None:
            raise DataError("data.tokenizer: has neither a padding token nor an end-of-text token")
        self.source = source
        self.length = length
        self._show_progress = show_progress
        self._pad = tokenizer.pad_token_id
        self._on_the_left = tokenizer.padding_side == "left"
        self._with_mask = "attention_mask" in tokenizer.model_input_names
        # The 4 is the version of this format.
        column_names = " ".join(
            str(getattr(source, field)) for field in self.columns if isinstance(source, Corpus)
        )
        self._key = f"{self.task} 4 {corpus_fingerprint(source)} {column_names}"
        key = f"{self._key}{self.key_settings} {length} {_tokenizer_state_text(tokenizer)}"
        self._documents = load_or_write_cached_tokens(
            TokenizeWork(
                key,
                self._rows_then_summary_json,
                self._function_encoding_labelled_rows_to_tokens(tokenizer),
            ),
            show_progress,
        )
        last_document = len(self._documents.ends) - 1
        summary = json.loads(_json_bytes_of_document(self._documents, last_document))
        # Each label once; labels that are names stay so until `renumber_labels_and_list_class_names`.
        self.labels: list[Any] = summary["labels"]
        # Rows, or words, of each label.
        self.counts: list[int] = summary["counts"]
        # The largest integer label, and its location.
        self.largest: tuple[int, str] = tuple(summary["largest"])
        # The number of rows without text, and the location of the first.
        self.empty: tuple[int, str] = tuple(summary["empty"])
        # Class names of integer labels.
        self.names = [tuple(names) for names in summary["names"]]

    def __len__(self) -> int:
        # The last document is the summary.
        return len(self._documents.ends) - 1

    def _rows_then_summary_json(self) -> Iterator[tuple[LabelledRow | str, float]]:
        summary = SourceSummary()
        for row in labelled_rows_filling_summary(self.source, self.read, summary):
            yield row, row.share
        yield json.dumps({**vars(summary), "labels": [*summary.labels]}), 1.0

    def _function_encoding_labelled_rows_to_tokens(
        self, tokenizer: PreTrainedTokenizerBase
    ) -> Callable[[list[Any]], Iterator[Sequence[int]]]:
        # A call with truncation changes a fast tokenizer's saved settings, so that a copy is used.
        own_tokenizer = functools.cache(
            lambda: copy.deepcopy(tokenizer) if tokenizer.is_fast else tokenizer
        )

        def encode(items: list[Any]) -> Iterator[Sequence[int]]:
            rows = [item for item in items if isinstance(item, LabelledRow)]
            if rows:
                yield from self._encode_rows(own_tokenizer(), rows)
            # The summary comes after all rows; one token for each of its bytes.
            yield from (item.encode() for item in items[len(rows) :])

        return encode

    def _encode_rows(
        self, tokenizer: PreTrainedTokenizerBase, rows: list[LabelledRow]
    ) -> Iterator[Sequence[int]]:
        token_ids = self._tokenize_and_cut_row_texts(tokenizer, rows)["input_ids"]
        return ([*ids, *row.label_integers] for ids, row in zip(token_ids, rows))

    def _tokenize_and_cut_row_texts(
        self, tokenizer: PreTrainedTokenizerBase, rows: list[LabelledRow], **options: Any
    ) -> Any:
        """Return the tokenizer's output for texts, cut but not padded."""
        # A text is one segment: token types would be zeros, and some models do not accept them.
        return tokenizer(
            [row.text for row in rows], truncation=True, max_length=self.length,
            return_token_type_ids=False,
            return_attention_mask=False,
            **options,
        )  # fmt: skip

    def distinct_labels(self) -> Iterable[Any]:
        """Return each label that a row has, once."""
        return self.labels

    def renumber_labels(self, class_numbers: Mapping[Any, int]) -> None:
        """Replace labels by these class numbers."""
        self.labels = [class_numbers[label] for label in self.labels]

    @property
    def classes(self) -> int:
        """Number of classes, from the largest label."""
        return int(max(self.labels, default=-1)) + 1

    def sample(self, index: int, epoch: int) -> Sample:
        document = document_tokens(self._documents, index)
        size = self.size(index)
        ids = document[:size]
        stored_labels = document[size:]
        tensors = {"input_ids": self._pad_on_tokenizer_side(ids, self._pad)}
        if self._with_mask:
            tensors["attention_mask"] = self._pad_on_tokenizer_side(np.ones_like(ids), 0)
        return {**tensors, "labels": self._label_tensor_of_stored(stored_labels)}

    def size(self, index: int) -> int:
        """Return the number of tokens of a sample before padding."""
        return len(token_range_of_document(self._documents.ends, index)) - self.behind

    def _label_tensor_of_stored(self, stored_labels: _Ints) -> torch.Tensor:
        """Return the labels as the model expects them, from a row's stored integers."""
        return torch.tensor(self._label_of_stored_numbers(stored_labels.tolist()))

    def _label_of_stored_numbers(self, stored_numbers: list[int]) -> Any:
        """Return the label of a row, with names as class numbers."""
        return self.labels[stored_numbers[0]]

    def _pad_on_tokenizer_side(self, values: _Ints, fill_value: int) -> torch.Tensor:
        """Return values padded to (length,), on the tokenizer's padding side."""
        padded: _Ints = np.full(self.length, fill_value, np.int64)
        count = len(values)
        padded[slice(self.length - count, None) if self._on_the_left else slice(count)] = values
        return torch.from_numpy(padded)

    def some(self) -> list[tuple[Any, Any]]:
        """Return some texts, evenly spread, with their labels.

        The first call reads the rows once more; later calls read the cache.
        """
        row_step = max(1, len(self) // _IDENTITY_ROWS)

        def items() -> Iterator[tuple[str, float]]:
            chosen_rows = itertools.islice(
                labelled_rows_filling_summary(self.source, self.read, SourceSummary()),
                0,
                None,
                row_step,
            )
            return ((json.dumps([row.text, row.label_integers]), row.share) for row in chosen_rows)

        stored_documents = load_or_write_cached_tokens(
            TokenizeWork(
                f"some {row_step} {self._key}", items, lambda texts: map(str.encode, texts)
            ),
            self._show_progress,
        )
        pairs = (
            json.loads(_json_bytes_of_document(stored_documents, row_index))
            for row_index in range(len(stored_documents.ends))
        )
        return [
            (text, self._label_of_stored_numbers(stored_numbers)) for text, stored_numbers in pairs
        ]


class ScoredTexts(LabelledTexts):
    """Samples of texts with a number each, for regression."""

    task = "sequence-regression"
    read: ReadLabelledRow = staticmethod(require_text_and_finite_number_of_row)
    behind = 2
    classes = 0

    def _label_of_stored_numbers(self, stored_numbers: list[int]) -> Any:
        # Two uint32 are the halves of a float64; see `SourceSummary.number`.
        return np.array(stored_numbers, np.uint32).view(np.float64).item()


class LabelSets(LabelledTexts):
    """Samples of texts with a set of classes each, as one float for each class of the model."""

    task = "multi-label-classification"
    read = staticmethod(require_text_and_class_list_of_row)
    model_classes = 0
    """Number of classes of the model; 0: it is not known yet."""

    def _encode_rows(
        self, tokenizer: PreTrainedTokenizerBase, rows: list[LabelledRow]
    ) -> Iterator[Sequence[int]]:
        """Yield token ids, followed by the labels and their number."""
        for encoded, row in zip(super()._encode_rows(tokenizer, rows), rows):
            yield [*encoded, len(row.label_integers)]

    @property
    def classes(self) -> int:
        return max(self.model_classes, super().classes)

    def size(self, index: int) -> int:
        return super().size(index) - int(document_tokens(self._documents, index)[-1])

    def _label_tensor_of_stored(self, stored_labels: _Ints) -> torch.Tensor:
        vector = torch.zeros(self.classes)
        vector[self._label_of_stored_numbers(stored_labels.tolist()[:-1])] = 1.0
        return vector

    def _label_of_stored_numbers(self, stored_numbers: list[int]) -> Any:
        return [self.labels[label_number] for label_number in stored_numbers]


class TaggedWords(LabelledTexts):
    """Samples of word lists with a tag for each word.

    The first token of a word has the word's tag. The other tokens have no label, or with
    `label_pieces` all the same tag, where I-TYPE follows B-TYPE.
    """

    task = "token-classification"
    read = staticmethod(require_words_and_tags_of_row)
    varies = True

    def __init__(
        self,
        source: str | Corpus,
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        show_progress: ShowProgress = ignore_progress,
        label_pieces: str = "first",
    ) -> None:
        self._labels_all_pieces = label_pieces == "all"
        self.key_settings = " all pieces" if self._labels_all_pieces else ""
        if not tokenizer.is_fast:
            raise DataError(
                "data.tokenizer: does not report the word of each token; use a fast tokenizer"
            )
        super().__init__(source, tokenizer, length, show_progress)
        # Class numbers of the tags of later pieces; labels that are names are numbered later.
        numbers = range(len(self.names[0])) if self.names else self.labels
        self._inner_labels = self._labels_of_later_pieces({number: number for number in numbers})

    def renumber_labels(self, class_numbers: Mapping[Any, int]) -> None:
        self._inner_labels = self._labels_of_later_pieces(class_numbers)
        super().renumber_labels(class_numbers)

    def _labels_of_later_pieces(self, class_numbers: Mapping[Any, int]) -> list[Any]:
        """Return for each label the class of a word's later pieces: of B-TYPE, that of I-TYPE."""
        names = dict(enumerate(self.names[0])) if self.names else {}
        number_by_name = {names.get(each, each): n for each, n in class_numbers.items()}
        words = [names.get(label, label) for label in self.labels]
        return [
            number_by_name.get(re.sub("^B-", "I-", str(word)), number_by_name.get(word))
            for word in words
        ]

    def _encode_rows(
        self, tokenizer: PreTrainedTokenizerBase, rows: list[LabelledRow]
    ) -> Iterator[Sequence[int]]:
        """Yield token ids, followed by an integer for each of them.

        The integer is 0 for a token without label, 1 + 2 x the index of the tag for the first token
        of a word, and one more for another token of it.
        """
        try:
            encoding = self._tokenize_and_cut_row_texts(tokenizer, rows, is_split_into_words=True)
        # For example byte-level tokenizers without add_prefix_space.
        except (AssertionError, ValueError) as error:
            raise DataError(
                f"data.tokenizer: does not accept lists of words: {' '.join(str(error).split())}"
            ) from None
        for row_index, row in enumerate(rows):
            word_indices = encoding.word_ids(row_index)
            tags = (
                0
                if word is None or (word == previous_word and not self._labels_all_pieces)
                else 1 + 2 * row.label_integers[word] + (word == previous_word)
                for previous_word, word in zip([None, *word_indices], word_indices)
            )
            yield [*encoding["input_ids"][row_index], *tags]

    def size(self, index: int) -> int:
        return len(token_range_of_document(self._documents.ends, index)) // 2

    def _label_tensor_of_stored(self, stored_labels: _Ints) -> torch.Tensor:
        tags = [IGNORED] * len(stored_labels)
        for position, stored in enumerate(stored_labels.tolist()):
            if stored:
                label_index, is_inner = divmod(stored - 1, 2)
                tags[position] = (self._inner_labels if is_inner else self.labels)[label_index]
        return self._pad_on_tokenizer_side(np.array(tags, np.int64), IGNORED)

    def _label_of_stored_numbers(self, stored_numbers: list[int]) -> Any:
        return [self.labels[label_number] for label_number in stored_numbers]


def _tokenizer_state_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return everything that determines the tokens of a text, except the length it is cut to."""
    if tokenizer.is_fast:
        # The tokenizer's own state also has the truncation and padding of its last call.
        state_text = backend_without_truncation_or_padding(tokenizer).to_str()
    else:
        settings_text = json.dumps(
            tokenizer.init_kwargs, sort_keys=True, default=lambda value: type(value).__name__
        )
        state_text = (
            f"{settings_text} {tokenizer.special_tokens_map} {tokenizer.added_tokens_decoder} "
            f"{tokenizer_text_for_cache_key(tokenizer)}"
        )
    special = getattr(tokenizer, "split_special_tokens", False)
    return f"{type(tokenizer).__name__} {tokenizer.truncation_side} {special} {state_text}"


def document_tokens(documents: Documents, index: int) -> _Ints:
    """Return the stored integers of a row."""
    token_range = token_range_of_document(documents.ends, index)
    return documents.tokens[token_range.start : token_range.stop]


def _json_bytes_of_document(documents: Documents, index: int) -> bytes:
    """Return a document that is JSON, stored as one byte in each token."""
    return document_tokens(documents, index).astype(np.uint8).tobytes()


def set_class_count_of_label_sets(class_count: int, *samples: Samples | None) -> None:
    """Give label sets the number of classes of the model, which may exceed those of a source.

    Raises:
        DataError: there are label sets, and no class.
    """
    for part in (part for item in samples for part in _labelled_parts(item)):
        if isinstance(part, LabelSets):
            part.model_classes = class_count
            if not part.classes:
                raise DataError(f"{corpus_name_for_errors(part.source)}: no row has a class")


def renumber_labels_and_list_class_names(
    train: Samples,
    evaluation: Samples | None,
    class_number_by_model_label: Mapping[str, int] = MappingProxyType({}),
) -> list[str]:
    """Replace label names by class numbers in all samples.

    Args:
        train: training samples.
        evaluation: evaluation samples.
        class_number_by_model_label: class numbers that the model has for label names already. They are used if they
            include all labels; otherwise labels are numbered by their value if all are whole
            numbers, else in alphabetical order.

    Returns:
        The label names by class number; [] if labels are integers.

    Raises:
        DataError: some sources have names and others integers, there is a single name, or a name of
            the evaluation samples is in no training row.
    """
    parts = _labelled_parts(train)
    # A part of the training samples is numbered with them.
    held_out = [part for part in _labelled_parts(evaluation) if part not in parts]
    are_words = _are_all_labels_names_or_refuse_mix(*parts, *held_out)
    word_by_label = _name_by_label([*parts, *held_out], [])
    # Integers that a data set gives names are class numbers.
    are_names = are_words or not class_names_of_integer_labels(train, evaluation)
    if (
        word_by_label
        and are_names
        and class_number_by_model_label.keys() >= {*word_by_label.values()}
    ):
        for part in (*parts, *held_out):
            part.renumber_labels(
                {label: class_number_by_model_label[word] for label, word in word_by_label.items()}
            )
        return sorted(class_number_by_model_label, key=class_number_by_model_label.__getitem__)
    if not are_words:
        return []
    label_words = sorted({word for part in parts for word in part.distinct_labels()})
    if all(map(_WHOLE.fullmatch, label_words)):
        label_words.sort(key=int)
    if len(label_words) == 1:
        raise DataError(
            f"data.train: every label is {label_words[0]!r}, so there is nothing to distinguish"
        )
    unknown = sorted(
        {word for part in held_out for word in part.distinct_labels()} - set(label_words)
    )
    if unknown:
        raise DataError(
            f"data.evaluation: label {unknown[0]!r} is in no row of data.train, "
            f"whose labels are {first_names_and_count_of_rest(label_words, _SHOWN)}"
        )
    number_by_word = {word: class_number for class_number, word in enumerate(label_words)}
    for part in (*parts, *held_out):
        part.renumber_labels(number_by_word)
    return label_words


def renumber_labels_by_class_names_or_numbers(
    samples: Samples, class_number_by_name: Mapping[str, int], class_count_or_zero: int
) -> None:
    """Replace labels by the class numbers of a trained model; some classes may not appear.

    A label is the name of a class, as a word or as a whole number. Whole numbers none of which is
    a name are class numbers.

    Args:
        samples: the samples.
        class_number_by_name: class name to class number; empty if classes have no names.
        class_count_or_zero: number of classes; 0: unknown.

    Raises:
        DataError: the model has no such class.
    """
    parts = _labelled_parts(samples)
    names = class_names_of_integer_labels(samples, None)
    word_by_label = _name_by_label(parts, names)
    number_by_label = {
        label: class_number_by_name[word]
        for label, word in word_by_label.items()
        if word in class_number_by_name
    }
    are_named = not all(map(_DEFAULT_NAME.fullmatch, class_number_by_name))
    are_numbers = not (names or any(isinstance(label, str) for label in word_by_label))
    if not number_by_label and (
        are_numbers if are_named else all(_WHOLE.fullmatch(str(label)) for label in word_by_label)
    ):
        number_by_label = {
            label: int(label)
            for label in word_by_label
            if not class_count_or_zero or int(label) < class_count_or_zero
        }
        if are_named and number_by_label:
            add_cache_note(f"data: labels are whole numbers and no class names; they are read as class numbers: "
                 f"0 is {min(class_number_by_name, key=class_number_by_name.__getitem__)!r}")  # fmt: skip
    if unknown := [label for label in word_by_label if label not in number_by_label]:
        locations = dict(part.largest for part in parts)
        label = max(unknown, key=lambda candidate: candidate in locations)
        limit = f" from 0 to {class_count_or_zero - 1:,}" if class_count_or_zero else ""
        shown = ", ".join(class_number_by_name) if are_named else f"it has only numbers{limit}"
        location = locations.get(label, "data")
        raise DataError(f"{location}: label {label!r} is none of the model's: {shown}")
    for part in parts:
        part.renumber_labels(number_by_label)


def _name_by_label(parts: Sequence[LabelledTexts], name_by_number: Sequence[str]) -> dict[Any, str]:
    """Return the word of each label; names: class names of integer labels, or []."""
    labels = {label: None for part in parts for label in part.distinct_labels()}
    word_by_number = dict(enumerate(name_by_number))
    return {label: word_by_number.get(label, str(label)) for label in labels}


def _labelled_parts(samples: Samples | None) -> list[LabelledTexts]:
    """Return the samples with labels: the parts of a mixture, or the samples themselves."""
    parts = [getattr(part, "whole", part) for part in getattr(samples, "parts", [samples])]
    return [part for part in parts if isinstance(part, LabelledTexts)]


def _are_all_labels_names_or_refuse_mix(*parts: LabelledTexts) -> bool:
    """Return whether all labels are names; raises DataError where sources differ."""
    label_types = {type(label) for part in parts for label in part.distinct_labels()}
    if len(label_types) > 1:
        raise DataError(
            "data: labels are names in one source and numbers in another; use only names, or "
            "only numbers"
        )
    return label_types == {str}


def class_and_rare_class_lines(
    training_samples: Samples, names_of_classes: Sequence[str], class_count: int
) -> Iterator[str]:
    """Yield lines for the user: the classes, and those with too few training rows to learn.

    Args:
        training_samples: training samples; without classes nothing is yielded.
        names_of_classes: class names by number; [] if classes have no names.
        class_count: number of classes of the model.
    """
    parts = [part for part in _labelled_parts(training_samples) if part.labels]
    if not parts:
        return
    counts = Counter[Any]()
    for part in parts:
        counts.update(dict(zip(part.labels, part.counts)))
    unit = "word" if isinstance(parts[0], TaggedWords) else "row"
    total = max(class_count, len(names_of_classes))
    yield f"classes: {total:,}" + (
        f" ({first_names_and_count_of_rest(names_of_classes, _SHOWN)})" if names_of_classes else ""
    )
    absent = [class_number for class_number in range(total) if class_number not in counts]
    single = [class_number for class_number, count in counts.items() if count == 1]
    for class_numbers, phrase in (
        (absent, f"no training {unit} has class"),
        (sorted(single), f"a single training {unit} has class"),
    ):
        if class_numbers:
            shown = first_names_and_count_of_rest(
                [names_of_classes[n] for n in class_numbers] if names_of_classes else class_numbers,
                _SHOWN,
            )
            yield f"classes: {phrase} {shown}; check data.train's labels"


def class_names_of_integer_labels(train: Samples, evaluation: Samples | None) -> list[str]:
    """Return the class names of integer labels by number; [] if the data set has no names.

    Raises:
        DataError: two sources have different names for the same numbers.
    """
    parts = [
        part
        for part in (*_labelled_parts(train), *_labelled_parts(evaluation))
        if not isinstance(part, ScoredTexts)
    ]
    distinct_names = list(dict.fromkeys(names for part in parts for names in part.names))
    if len(distinct_names) > 1:
        first_names, second_names = (", ".join(names) for names in distinct_names[:2])
        raise DataError(
            f"data: the numbers of labels mean {first_names} in one source and {second_names} in another; use "
            "names as labels"
        )
    return list(distinct_names[0]) if distinct_names else []
