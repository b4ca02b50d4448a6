"""Sources of text (built-in corpus, files, hub), their documents one by one, and a fingerprint.

The formats of files are read by reading.py; the hub is read by Hugging Face `datasets`.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ortlaunch.recipe.fields.data import Corpus, has_chat_rows
from ortlaunch.recipe.fields.section import names_of_non_default_fields
from ortlaunch.recipe.inputs import (
    file_or_sorted_pattern_matches,
    refuse_lfs_pointers_and_unreadable_files,
)
from ortlaunch.worker.data.file_rows import (
    BLOCK,
    LONGEST_TEXT,
    SPLIT_ADVICE,
    DataError,
    MissingData,
    Row,
    class_names_by_column,
    hash_of_size_and_first_middle_last_blocks,
    read_file_rows,
)
from ortlaunch.worker.data.media.folders import (
    metadata_file_or_class_files,
    rows_of_metadata_or_class_files,
)
from ortlaunch.worker.data.streams.hub import hub_error_reason_and_remedy
from ortlaunch.worker.data.streams.remote import remote_files_of_url

# Bytes of a corpus that is hashed as a whole.
_WHOLE_BYTES = 64 << 20
# Characters of a query of python-pairs, and of its document.
_LEAST_CHARACTERS = 20


def read_texts_with_fraction_of_corpus_read(
    source: str | Corpus, joins_lists: bool = False
) -> Iterator[tuple[str, float]]:
    """Yield the texts of a corpus, each with the share (0 to 1) of the corpus read so far.

    Args:
        source: the corpus.
        joins_lists: whether lists of words are accepted, joined by spaces.

    Yields:
        Text and share; the share is 0 where it is unknown.

    Raises:
        DataError: a row has no text.
    """
    if isinstance(source, str):
        from pydoc_data.topics import topics

        yield from (
            (topics[name], topic_number / len(topics))
            for topic_number, name in enumerate(sorted(topics), 1)
        )
        return
    yield from non_empty_texts_of_rows_with_fraction_of_corpus_read(
        read_corpus_rows_up_to_limit(source), source, joins_lists
    )


def non_empty_texts_of_rows_with_fraction_of_corpus_read(
    corpus_rows: Iterable[Row], source: Corpus, joins_lists: bool = False
) -> Iterator[tuple[str, float]]:
    """Yield the texts of rows, each with its share.

    Arguments and errors as of `read_texts_with_fraction_of_corpus_read`.
    """
    columns = source.text_columns or (source.text_column if source.format != "text" else "text",)
    # Not itertools.product, which would read all rows first.
    for row, column in ((row, column) for row in corpus_rows for column in columns):
        text = require_column_value_of_allowed_length(row, column)
        if (joins_lists or source.text_columns) and isinstance(text, list):
            text = " ".join(map(str, text))
        # A null, as an empty text, is a row without a document.
        if not isinstance(text, (str, type(None))):
            raise DataError(
                f"{row.location}: column {column!r} holds {text!r:.80}; it must be text"
            )
        if text:
            yield text, row.share


def require_column_value_of_allowed_length(row: Row, column: str) -> Any:
    """Return the value of a row in a column.

    Raises:
        DataError: the row has no such column, or its text is longer than a tokenizer can process.
    """
    if column not in row.values:
        raise DataError(
            f"{row.location}: no column {column!r}; it has {', '.join(sorted(row.values))}"
        )
    cell = row.values[column]
    if isinstance(cell, str) and len(cell) > LONGEST_TEXT:
        problem = f"{column} has {len(cell):,} characters; the maximum is {LONGEST_TEXT:,}"
        raise DataError(f"{row.location}: {problem}; {SPLIT_ADVICE}")
    return cell


def read_corpus_rows_up_to_limit(source: str | Corpus) -> Iterator[Row]:
    """Return the rows of a corpus, streamed, up to `most_rows`; of a name those of `python-pairs`.

    Raises:
        DataError: the file or data set does not exist, or is not of the recipe's format.
    """
    if isinstance(source, str):
        return _sentences_with_rest_of_their_paragraph()
    return itertools.islice(_rows_of_hub_folder_or_files(source), source.most_rows)


def _sentences_with_rest_of_their_paragraph() -> Iterator[Row]:
    """Yield a row for each paragraph of the language reference: its first sentence is the query.

    The positive is the rest of the paragraph, the negative that of the paragraph before (an inverse
    cloze task).
    """
    # Several topics have the same paragraphs.
    rests = {
        sentence: (rest, share)
        for text, share in read_texts_with_fraction_of_corpus_read("python-docs")
        for paragraph in text.split("\n\n")
        for sentence, _, rest in [" ".join(paragraph.split()).partition(". ")]
        if len(sentence) >= _LEAST_CHARACTERS <= len(rest)
    }
    negative = [*rests.values()][-1][0]
    for row_number, (query, (positive, share)) in enumerate(rests.items(), 1):
        values = {"query": query, "positive": positive, "negative": negative}
        yield Row(values, f"python-pairs: row {row_number}", share)
        negative = positive


def _rows_of_hub_folder_or_files(source: Corpus) -> Iterator[Row]:
    if source.format == "hub":
        yield from _stream_rows_of_hub_data_set(source)
        return
    if source.format == "folder":
        yield from rows_of_metadata_or_class_files(files_of_corpus_patterns(source))
        return
    paths = files_of_corpus_patterns(source)
    sizes = [os.path.getsize(path) for path in paths]
    for path, bytes_before, size in zip(paths, itertools.accumulate([0, *sizes]), sizes):
        for row in read_file_rows(path, source.format, source.document):
            # From the share of the file to the share of all files, by bytes on the disk.
            yield row._replace(share=(bytes_before + row.share * size) / sum(sizes))


def _stream_rows_of_hub_data_set(source: Corpus) -> Iterator[Row]:
    import datasets

    try:
        dataset = datasets.load_dataset(
            source.name, source.subset, data_files=_files_of_hub(source), split=source.split,
            revision=source.revision, streaming=True,
        )  # fmt: skip
        names = class_names_by_column(dataset.features.to_dict() if dataset.features else {})
        yield from (
            Row(row, f"{corpus_name_for_errors(source)}: row {row_number}", 0.0, names)
            for row_number, row in enumerate(dataset, 1)
        )
    # `datasets` reads a first row of JSON to learn the columns.
    except StopIteration:
        raise DataError(f"{corpus_name_for_errors(source)}: has no rows") from None
    # The errors of pyarrow and of the hub are subclasses of these.
    except (OSError, ValueError) as error:
        raise DataError(
            f"{corpus_name_for_errors(source)}: cannot be read: {_hub_error_reason(error, source)}"
        ) from error


def _hub_error_reason(error: Exception, source: Corpus) -> str:
    name = f"{source.name}@{source.revision}" if source.revision else str(source.name)
    return hub_error_reason_and_remedy(error, name, "datasets/")


def _files_of_hub(source: Corpus) -> list[str] | None:
    return list(source.files) if source.files else None


def files_of_corpus_patterns(source: Corpus) -> list[str]:
    """Return the files of a corpus, sorted within each pattern.

    Raises:
        MissingData: a pattern matches no file.
    """
    paths: list[str] = []
    for pattern in source.path or ():
        if source.format == "folder":
            paths += metadata_file_or_class_files(pattern, source.split)
            continue
        matches: Sequence[str] = (
            remote_files_of_url(pattern)
            if "://" in pattern
            else file_or_sorted_pattern_matches(pattern)
        )
        if not matches:
            raise MissingData(
                f"{corpus_name_for_errors(source)}: {pattern!r} matches no file (current folder: {os.getcwd()})"
            )
        paths += matches
    return paths


def corpus_fingerprint(source: str | Corpus) -> str:
    """Return a text that changes when the corpus may have changed.

    Files count by path and contents, or, if they are large, by path, size, some blocks, dates and
    inode; the built-in corpus by Python's version; a hub data set by the commit that its name and
    revision refer to now.

    Raises:
        DataError: the commit of the hub data set cannot be determined.
    """
    if isinstance(source, str):
        parts = [source, sys.version]
    elif source.format == "hub":
        parts = [
            str(source.name),
            str(source.subset),
            source.split,
            column_and_changed_settings_text(source),
            _hub_commit_and_file_states_text(source),
        ]
    else:
        # The default is left out, so that a corpus without `document` keeps its fingerprint.
        format_text = (
            source.format
            if source.document == "paragraph"
            else f"{source.format} by {source.document}"
        )
        parts = [
            format_text,
            column_and_changed_settings_text(source),
            *_state_text_of_each_file(files_of_corpus_patterns(source)),
        ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _state_text_of_each_file(paths: Sequence[str]) -> Iterator[str]:
    """Yield a text for each file that changes with its contents."""
    stats = [os.stat(path) for path in paths]
    is_hashed_whole = sum(stat.st_size for stat in stats) <= _WHOLE_BYTES
    for path, stat in zip(paths, stats):
        # A program can set the modification time, as unpacking does, but not st_ctime.
        dates = "" if is_hashed_whole else f"{stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"
        yield (
            f"{path} {dates} "
            f"{hash_of_size_and_first_middle_last_blocks(path, _WHOLE_BYTES if is_hashed_whole else BLOCK)}"
        )


def column_and_changed_settings_text(source: Corpus) -> str:
    # What has its default is left out, so that a corpus without it keeps its fingerprint.
    optional_settings = ("files", "input_column", "system_column", "role_key", "content_key", "roles", "most_rows",
              "prompt", "train_on", "train_on_end", "train_key", "train_parts", "tools_column",
              "ignore_fields", "text_columns")  # fmt: skip
    changed_settings = [
        f" {key}: {getattr(source, key)}"
        for key in optional_settings
        if key in names_of_non_default_fields(source)
    ]
    if has_chat_rows(source):
        chat = f"{source.messages_column} {source.prompt_column} {source.response_column}"
        return "".join((chat, *changed_settings))
    return "".join((source.text_column, *changed_settings))


def _hub_commit_and_file_states_text(source: Corpus) -> str:
    """Return the commit of a hub data set; for a local folder, a hash of the state of its files."""
    # A full commit hash needs no network.
    if (
        source.revision
        and re.fullmatch(r"[0-9a-f]{40}", source.revision)
        and not os.path.isdir(str(source.name))
    ):
        return source.revision
    import datasets

    # `datasets` knows local files by their dates alone.
    paths_inside = glob.glob(f"{glob.escape(str(source.name))}/**", recursive=True)
    files = [path for path in sorted(paths_inside) if os.path.isfile(path)]
    refuse_lfs_pointers_and_unreadable_files(files)
    local = _state_text_of_each_file(files)
    try:
        commit: str = datasets.load_dataset_builder(
            source.name, source.subset, data_files=_files_of_hub(source), revision=source.revision
        ).hash
    except (OSError, ValueError) as error:
        raise DataError(
            f"{corpus_name_for_errors(source)}: cannot be read: {_hub_error_reason(error, source)}"
        ) from error
    return "\n".join((commit, *local))


def corpus_name_for_errors(source: str | Corpus) -> str:
    """Return the name of a corpus for an error message."""
    if isinstance(source, str):
        return source
    return f"data ({source.format} {source.name or ' '.join(source.path or ())})"
