"""The data of a recipe: tokenizer, training and evaluation samples, and batches of each rank."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import default_collate

from ortlaunch.base.cache import take_cache_notes
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.data import (
    Corpus,
    Data,
    HeldOut,
    MaskedLm,
    Part,
    SpanCorruption,
    StreamSettings,
    has_chat_rows,
    is_written_by_chat_template,
)
from ortlaunch.tables.tasks import Task
from ortlaunch.worker.data.batches import Batches
from ortlaunch.worker.data.chats.findings import findings_of_first_chats, load_or_find_row_findings
from ortlaunch.worker.data.chats.rows import Chat, chats_of_rows_with_fraction_of_corpus_read
from ortlaunch.worker.data.chats.samples import (
    ChatSamples,
    cache_key_text_and_encoder_of_chats,
    load_or_tokenize_chats_marking_trained_text,
)
from ortlaunch.worker.data.compared_texts import ComparedTexts
from ortlaunch.worker.data.corpus import corpus_name_for_errors, files_of_corpus_patterns
from ortlaunch.worker.data.file_rows import DataError, read_file_rows
from ortlaunch.worker.data.identity import data_identity_record
from ortlaunch.worker.data.labelled.samples_by_label import SAMPLES_BY_LABEL
from ortlaunch.worker.data.labelled_samples import (
    LabelledTexts,
    LabelSets,
    ScoredTexts,
    TaggedWords,
    class_and_rare_class_lines,
    class_names_of_integer_labels,
    renumber_labels_and_list_class_names,
    renumber_labels_by_class_names_or_numbers,
    set_class_count_of_label_sets,
)
from ortlaunch.worker.data.masked.masked_packs import MaskedPacks
from ortlaunch.worker.data.masked.masking import MaskedBlocks, Masking
from ortlaunch.worker.data.masked.sentence_pairs import SentencePairs
from ortlaunch.worker.data.masked.span_corruption import CorruptedSpans
from ortlaunch.worker.data.media.samples import MEDIA
from ortlaunch.worker.data.mixture import (
    Mixture,
    block_position_count_by_source,
    source_seed,
    split_held_out_samples,
)
from ortlaunch.worker.data.packed_samples import pack_chats_if_requested
from ortlaunch.worker.data.read_ahead import ReadAheadSettings
from ortlaunch.worker.data.samples import (
    IGNORED,
    Samples,
    Stack,
    collate,
    cut_padding_to_shortest_fitting_bucket,
)
from ortlaunch.worker.data.streams.samples import StreamedSamples
from ortlaunch.worker.data.streams.writer import ChatCounts, StreamedCorpus
from ortlaunch.worker.data.token_cache import (
    Documents,
    ShowProgress,
    begin_token_ids_added_to_text,
    cache_key_text_and_encoder_with_marks,
    ignore_progress,
    load_or_tokenize_documents,
)
from ortlaunch.worker.data.tokenizer import load_tokenizer_with_added_tokens_or_none
from ortlaunch.worker.data.user_data import (
    UserCollate,
    UserSamples,
    collate_to_named_tensors,
    import_user_function,
    seed_and_call_user_function,
)
from ortlaunch.worker.data.vocabulary import (
    Vocabulary,
    class_count_of_recipe_or_pretrained,
    class_number_by_label_of_recipe_or_pretrained,
)
from ortlaunch.worker.data.windows import SeparateDocuments, TokenWindows
from ortlaunch.worker.process_group.distributed import DistributedContext

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "IGNORED",
    "Batches",
    "ChatSamples",
    "LabelSets",
    "LabelledTexts",
    "LoadedData",
    "MaskedBlocks",
    "Masking",
    "Mixture",
    "Samples",
    "ScoredTexts",
    "SentencePairs",
    "TaggedWords",
    "TokenWindows",
    "UserSamples",
    "begin_token_ids_added_to_text",
    "collate",
    "collate_function_of_recipe",
    "cut_padding_to_shortest_fitting_bucket",
    "load_data_and_print_notes",
    "read_ahead_settings_of_recipe",
    "samples_of_source_for_task",
    "seed_and_call_user_function",
]  # fmt: skip


class LoadedData:
    """The tokenizer, the training and evaluation samples, and the class names of a recipe."""

    def __init__(
        self,
        recipe: Recipe,
        show_progress: ShowProgress = ignore_progress,
        vocabulary: Vocabulary | None = None,
        stream_folder: Path | None = None,
    ) -> None:
        """Read all samples now, or, if weights exist already, each part on its first access.

        Args:
            recipe: the recipe of the run.
            show_progress: called with progress messages for the user.
            vocabulary: the vocabulary of the existing weights; None: the model is new.
            stream_folder: the run's folder for streamed samples; None: a temporary one.
        """
        self.recipe = recipe
        self._streams = stream_folder
        self._show_progress = show_progress
        self._vocabulary = vocabulary
        self.tokenizer = load_tokenizer_with_added_tokens_or_none(
            _data_with_source_for_each_text_column(recipe),
            vocabulary.tokenizer if vocabulary else None,
        )
        # Numbering the labels of a new model reads the training and the evaluation samples.
        self.label_names = (
            []
            if vocabulary
            else renumber_labels_and_list_class_names(
                self.train, self.evaluation, class_number_by_label_of_recipe_or_pretrained(recipe)
            )
        )
        self.class_names = (
            self.label_names or class_names_of_integer_labels(self.train, self.evaluation)
            if vocabulary is None
            else sorted(vocabulary.labels, key=vocabulary.labels.__getitem__)
        )
        if vocabulary is None and recipe.model.traits.label == "classes":
            class_count = len(self.class_names) or max(
                self.classes, class_count_of_recipe_or_pretrained(recipe)
            )
            set_class_count_of_label_sets(class_count, self.train, self.evaluation)

    @functools.cached_property
    def _packed_samples_by_recipe_key(self) -> dict[str, Samples]:
        """The samples of `data.train`, and as `data.evaluation` those of them that are held out for evaluation."""
        all_samples = self._renumber_labels_by_trained_classes(
            _single_or_mixed_training_samples(
                self.recipe, self.tokenizer, self._show_progress, self._streams
            )
        )
        data = self.recipe.data
        held_out = data.evaluation
        samples_by_key = {"data.train": all_samples}
        # Rows are held out, not packs.
        if isinstance(held_out, HeldOut) and isinstance(all_samples, StreamedSamples):
            samples_by_key["data.evaluation"] = _held_out_chats_of_stream(
                all_samples.streamed, _padding_token_id(self.tokenizer)
            )
        elif isinstance(held_out, HeldOut):
            split = split_held_out_samples(all_samples, held_out, self.recipe.seed)
            samples_by_key = {"data.train": split.training, "data.evaluation": split.held_out}
        return {
            key: pack_chats_if_requested(samples, data, key)
            for key, samples in samples_by_key.items()
        }

    @functools.cached_property
    def train(self) -> Samples:
        """The training samples."""
        return self._packed_samples_by_recipe_key["data.train"]

    @functools.cached_property
    def evaluation(self) -> Samples | None:
        """The evaluation samples; None if the recipe has none."""
        source = self.recipe.data.evaluation
        show_progress = self._show_progress
        if source is None or isinstance(source, HeldOut):
            return self._packed_samples_by_recipe_key.get("data.evaluation") if source else None
        key = "data.evaluation"
        samples = samples_of_source_for_task(
            self.recipe, source, self.tokenizer, show_progress=show_progress, recipe_key=key
        )
        return pack_chats_if_requested(
            self._renumber_labels_by_trained_classes(samples), self.recipe.data, key
        )

    def _renumber_labels_by_trained_classes(self, samples: Samples) -> Samples:
        if self._vocabulary is not None:
            renumber_labels_by_class_names_or_numbers(
                samples, self._vocabulary.labels, self._vocabulary.classes
            )
            set_class_count_of_label_sets(self._vocabulary.classes, samples)
        return samples

    def read_samples_needed_by(self, task_traits: Task) -> None:
        """Read the samples that a task needs: an evaluation needs the evaluation samples alone."""
        if not task_traits.evaluates:
            # Fills the cache: the first identity of rows with labels reads the rows a second time.
            data_identity_record(self.train)
        _ = self.evaluation

    @property
    def parts(self) -> dict[str, Samples]:
        """The training and the evaluation samples, by their keys in the recipe."""
        parts = {"data.train": self.train, "data.evaluation": self.evaluation}
        return {key: samples for key, samples in parts.items() if samples is not None}

    @property
    def parts_read(self) -> list[Samples]:
        """The parts that have been read."""
        # A cached property is in the instance's dictionary only after its first access.
        cached_parts = (vars(self).get(name) for name in ("train", "evaluation"))
        return [samples for samples in cached_parts if samples is not None]

    @property
    def classes(self) -> int:
        """The number of classes of the model, as far as it is known; 0: no classes."""
        trained_classes = self._vocabulary.classes if self._vocabulary else 0
        return max(
            trained_classes, *(getattr(samples, "classes", 0) for samples in self.parts_read), 0
        )

    def class_lines(self) -> list[str]:
        """Return lines for the user: the classes, and those with at most one training row."""
        return [*class_and_rare_class_lines(self.train, self.class_names, self.classes)]


def load_data_and_print_notes(
    recipe: Recipe,
    group: DistributedContext,
    already_loaded_data: LoadedData | None = None,
    vocabulary: Vocabulary | None = None,
) -> LoadedData:
    """Return the data of a recipe, or `already_loaded_data` if given (collective).

    Rank 0 prints the notes of all ranks, for example about changed files of the cache.
    """
    already_loaded_data = already_loaded_data or LoadedData(recipe, vocabulary=vocabulary)
    group.print_lines_of_all_ranks(take_cache_notes())
    return already_loaded_data


def _names_in_field(value: str | Sequence[str]) -> Sequence[str]:
    return (value,) if isinstance(value, str) else value


def _data_with_source_for_each_text_column(recipe: Recipe) -> Data:
    """Return the recipe's data for its tokenizer, which is trained on `text_column` of each source."""
    fields = recipe.model.traits.text_fields
    if fields == ("text_column",) or recipe.data.is_custom:
        return recipe.data
    parts = tuple(
        Part(source=part.source.model_copy(update={"text_column": column}))
        for part in recipe.data.parts
        if isinstance(part.source, Corpus)
        for field in fields
        for column in _names_in_field(getattr(part.source, field))
    )
    return recipe.data.model_copy(update={"train": parts})


def collate_function_of_recipe(recipe: Recipe) -> Stack:
    """Return the function that makes a batch of samples."""
    if recipe.model.traits.wrapper:
        user_collate = (
            import_user_function("data.collate", recipe.data.collate)
            if recipe.data.collate
            else default_collate
        )
        return functools.partial(collate_to_named_tensors, user_collate)
    return UserCollate(recipe.data.collate) if recipe.data.collate else collate


def read_ahead_settings_of_recipe(recipe: Recipe, device_type: str) -> ReadAheadSettings:
    """Return how micro batches are read ahead; default: by a thread for text on a GPU, else not."""
    workers = recipe.data.workers
    if workers is None:
        # Custom data may draw random numbers, so they are read in the training's own thread.
        # On a CPU the reading thread takes a core from the training's threads, and all of these
        # wait for the slowest: a step of bert-large/tiny took 4 to 7 % longer with it,
        # 1 to 2 % without.
        return ReadAheadSettings(
            0 if device_type == "cuda" and not recipe.data.is_custom else None,
            device_type == "cuda",
        )
    return ReadAheadSettings(workers or None, device_type == "cuda")


def _single_or_mixed_training_samples(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    show_progress: ShowProgress,
    stream_folder: Path | None,
) -> Samples:
    def source_samples(key: str, source: str | Corpus, seed: int) -> Samples:
        if isinstance(source, Corpus) and source.stream:
            return _streamed_samples(recipe, source, tokenizer, stream_folder, show_progress, seed)
        return samples_of_source_for_task(recipe, source, tokenizer, seed, show_progress, key)

    parts = recipe.data.parts
    if not isinstance(recipe.data.train, tuple):
        return source_samples("data.train", recipe.data.train, recipe.seed)
    samples_by_part = [
        source_samples(f"data.train[{n}].source", part.source, source_seed(recipe.seed, n))
        for n, part in enumerate(parts)
    ]
    _refuse_unequal_text_counts(samples_by_part)
    mixture = Mixture(
        samples_by_part,
        [
            part.weight or len(source_samples)
            for part, source_samples in zip(parts, samples_by_part)
        ],
    )
    counts = block_position_count_by_source(mixture.weights)
    if not all(counts):
        part_index = [*counts].index(0)
        raise DataError(
            f"data.train[{part_index}]: has {len(samples_by_part[part_index]):,} of "
            f"{len(mixture):,} samples, less than "
            "one in 65,536; leave it out, or give weights"
        )
    return mixture


def _refuse_unequal_text_counts(samples_by_part: Sequence[Samples]) -> None:
    """Refuse sources whose samples have unequal numbers of texts, which make no common batch.

    Raises:
        DataError: the numbers differ.
    """
    if not all(isinstance(part, LabelledTexts) for part in samples_by_part):
        return
    ids_of_first = [part.sample(0, 0)["input_ids"] for part in samples_by_part]
    counts = [len(ids) if ids.dim() > 1 else 1 for ids in ids_of_first]
    for part_index, count in enumerate(counts):
        if count != counts[0]:
            raise DataError(
                f"data.train[{part_index}].source: a sample has {count} texts, and one of "
                f"data.train[0].source {counts[0]}; give all sources equally many columns or choices"
            )


def samples_of_source_for_task(
    recipe: Recipe,
    source: str | Corpus,
    tokenizer: PreTrainedTokenizerBase,
    seed: int | None = None,
    show_progress: ShowProgress = ignore_progress,
    recipe_key: str = "data.train",
) -> Samples:
    """Return the samples of one corpus for the recipe's task.

    Args:
        recipe: the recipe of the run.
        source: the corpus.
        tokenizer: the tokenizer of the run.
        seed: the seed of random values in the samples; None: the recipe's seed.
        show_progress: called with progress messages.
        recipe_key: the recipe's field of the corpus, for messages.

    Raises:
        DataError: the corpus cannot be read, or has fewer tokens than one sample.
    """
    if isinstance(source, Corpus) and source.format == "custom":
        recipe_key += ".factory"
        items = seed_and_call_user_function(
            recipe_key, str(source.factory), source.arguments, recipe.seed
        )
        return UserSamples(
            items, not (recipe.data.collate or recipe.model.traits.wrapper), recipe_key
        )
    seed = recipe.seed if seed is None else seed
    length = recipe.data.sequence_length or 0
    traits = recipe.model.traits
    if traits.media and isinstance(source, Corpus):
        return MEDIA[traits.media](source, recipe, tokenizer)
    if traits.compares:
        return ComparedTexts(source, recipe, tokenizer, show_progress)
    if traits.label:
        settings = {name: getattr(recipe.data, name) for name in traits.data_fields}
        return SAMPLES_BY_LABEL[traits.label](source, tokenizer, length, show_progress, **settings)
    if has_chat_rows(source):
        return ChatSamples(
            load_or_tokenize_chats_marking_trained_text(source, tokenizer, show_progress),
            length,
            _padding_token_id(tokenizer),
            recipe_key,
            load_or_find_row_findings(source, tokenizer),
        )
    end, begin = _end_mark_flag_and_begin_token_ids(recipe, tokenizer)
    documents = load_or_tokenize_documents(
        source, tokenizer, adds_end_mark=end, begin_token_ids=begin, show_progress=show_progress
    )
    samples: Samples = _text_samples_for_task(recipe, documents, tokenizer, seed)
    if len(samples) == 0:
        raise DataError(
            f"{corpus_name_for_errors(source)}: has {len(documents.tokens)} tokens, "
            f"fewer than one sample of {length}"
        )
    return samples


def _padding_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    token_ids = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((token_id for token_id in token_ids if token_id is not None), 0)


def _end_mark_flag_and_begin_token_ids(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> tuple[bool, list[int]]:
    # A pretrained model has seen no text without its begin mark; see `begin_of_text`. A trained
    # tokenizer is one of a folder when its run is evaluated or continued.
    predicts = recipe.model.traits.predicts
    begin = begin_token_ids_added_to_text(tokenizer) if predicts == "next" else []
    return predicts != "masked", begin


@functools.cache
def _stream_folder_until_exit() -> tempfile.TemporaryDirectory[str]:
    """Return a folder that is deleted when the process ends."""
    return tempfile.TemporaryDirectory(prefix="ortlaunch-stream-")


def _streamed_samples(
    recipe: Recipe,
    source: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    stream_folder: Path | None,
    show_progress: ShowProgress,
    seed: int,
) -> StreamedSamples:
    """Return the samples of a streamed corpus; without a run's folder, for a look at the first."""
    stream = source.stream or StreamSettings()
    length = recipe.data.sequence_length or 0
    has_chats = has_chat_rows(source)
    encode: Callable[[list[Any]], Iterable[Sequence[int]]]
    if has_chats:
        settings, encode = cache_key_text_and_encoder_of_chats(source, tokenizer)
        settings += " packed" if recipe.data.packing else ""
    else:
        settings, encode = cache_key_text_and_encoder_with_marks(
            tokenizer, *_end_mark_flag_and_begin_token_ids(recipe, tokenizer)
        )

    def window_samples(documents: Documents, window_seed: int) -> Samples:
        if not has_chats:
            return _text_samples_for_task(recipe, documents, tokenizer, window_seed)
        chats = ChatSamples(documents, length, _padding_token_id(tokenizer), "")
        return pack_chats_if_requested(chats, recipe.data, "") if len(chats) else chats

    files = files_of_corpus_patterns(source)

    def row_findings() -> dict[str, str]:
        template_text = str(tokenizer.chat_template) if is_written_by_chat_template(source) else ""
        return findings_of_first_chats(_chats_of_file(source, files[0]), source, template_text)

    counts = ChatCounts(
        lambda documents: ChatSamples(documents, length, 0, "").kept.tolist(),
        lambda documents: len(window_samples(documents, 0)),
        (recipe.data.evaluation.samples or 0) if isinstance(recipe.data.evaluation, HeldOut) else 0,
        row_findings,
    )
    streamed = StreamedCorpus(
        source,
        files,
        encode,
        length,
        stream.shuffle,
        seed,
        counts if has_chats else None,
    )
    return StreamedSamples(
        streamed,
        window_samples,
        settings,
        stream_folder or Path(_stream_folder_until_exit().name),
        stream.buffer_bytes if stream_folder else 0,
        show_progress,
    )


def _chats_of_file(source: Corpus, file_path: str) -> Iterator[tuple[Chat, float]]:
    rows = read_file_rows(file_path, source.format)
    return chats_of_rows_with_fraction_of_corpus_read(rows, source, set())


def _held_out_chats_of_stream(streamed: StreamedCorpus, padding_id: int) -> ChatSamples:
    """Return the first chats of the first file, which the stream leaves out."""
    chats = _chats_of_file(streamed.corpus, streamed.files[0])
    count = streamed.chats.held_out if streamed.chats else 0
    token_ids = [*streamed.encode([chat for chat, _ in itertools.islice(chats, count)])]
    documents = Documents(
        np.concatenate([np.array(ids, np.uint32) for ids in token_ids]),
        np.cumsum([*map(len, token_ids)]),
    )
    return ChatSamples(documents, streamed.length, padding_id, "data.evaluation")


def _text_samples_for_task(
    recipe: Recipe, documents: Documents, tokenizer: PreTrainedTokenizerBase, seed: int
) -> Samples:
    length = recipe.data.sequence_length or 0
    traits = recipe.model.traits
    if traits.leaves_spans_out:
        settings = recipe.data.span_corruption or SpanCorruption()
        return CorruptedSpans(documents.tokens, length, tokenizer, settings, seed)
    if traits.predicts != "masked":
        if not recipe.data.attend_across_documents:
            return SeparateDocuments(documents, length)
        return TokenWindows(documents.tokens, length, with_mask=traits.predicts == "next")
    masking = Masking(tokenizer, recipe.data.masked_lm or MaskedLm())
    if traits.pairs:
        return SentencePairs(documents, length, masking, tokenizer.pad_token_id or 0, seed)
    if not recipe.data.attend_across_documents:
        return MaskedPacks(documents, length, masking, tokenizer.pad_token_id or 0, seed)
    return MaskedBlocks(documents.tokens, length, masking, seed)
