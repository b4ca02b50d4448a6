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

from ortlaunch.recipe.fields.data import Corpus, is_chat
from ortlaunch.recipe.fields.section import chosen
from ortlaunch.recipe.inputs import matching_files, require_no_pointers
from ortlaunch.worker.data.media.folders import folder_files, folder_rows
from ortlaunch.worker.data.reading import (
    BLOCK,
    LONGEST_TEXT,
    SPLIT,
    DataError,
    MissingData,
    Row,
    blocks_hash,
    names_of_numbers,
    read_file,
)
from ortlaunch.worker.data.streams.hub import hub_reason
from ortlaunch.worker.data.streams.remote import remote_files

# Bytes of a corpus that is hashed as a whole.
_WHOLE_BYTES = 64 << 20


def documents(source: str | Corpus) -> Iterator[str]:
    """Return the texts of a corpus in a fixed order; `document` sets how plain text is split."""
    return (text for text, _ in documents_read(source))


def documents_read(source: str | Corpus, lists: bool = False) -> Iterator[tuple[str, float]]:
    """Yield the texts of a corpus, each with the share (0 to 1) of the corpus read so far.

    Args:
        source: the corpus.
        lists: whether lists of words are accepted, joined by spaces.

    Yields:
        Text and share; the share is 0 where it is unknown.

    Raises:
        DataError: a row has no text.
    """
    if isinstance(source, str):
        from pydoc_data.topics import topics

        yield from (
            (topics[name], number / len(topics)) for number, name in enumerate(sorted(topics), 1)
        )
        return
    yield from texts_of(rows(source), source, lists)


def texts_of(
    found: Iterable[Row], source: Corpus, lists: bool = False
) -> Iterator[tuple[str, float]]:
    """Yield the texts of rows, each with its share; arguments and errors as of `documents_read`."""
    column = source.text_column if source.format != "text" else "text"
    for row in found:
        text = value(row, column)
        if lists and isinstance(text, list):
            text = " ".join(map(str, text))
        # A null, as an empty text, is a row without a document.
        if not isinstance(text, (str, type(None))):
            raise DataError(f"{row.place}: column {column!r} holds {text!r:.80}; it must be text")
        if text:
            yield text, row.share


def value(row: Row, column: str) -> Any:
    """Return the value of a row in a column.

    Raises:
        DataError: the row has no such column, or its text is longer than a tokenizer can process.
    """
    if column not in row.values:
        raise DataError(
            f"{row.place}: no column {column!r}; it has {', '.join(sorted(row.values))}"
        )
    found = row.values[column]
    if isinstance(found, str) and len(found) > LONGEST_TEXT:
        told = f"{column} has {len(found):,} characters; the maximum is {LONGEST_TEXT:,}"
        raise DataError(f"{row.place}: {told}; {SPLIT}")
    return found


def rows(source: Corpus) -> Iterator[Row]:
    """Return the rows of a corpus, streamed, up to `most_rows`.

    Raises:
        DataError: the file or data set does not exist, or is not of the recipe's format.
    """
    return itertools.islice(_all_rows(source), source.most_rows)


def _all_rows(source: Corpus) -> Iterator[Row]:
    if source.format == "hub":
        yield from _of_the_hub(source)
        return
    if source.format == "folder":
        yield from folder_rows(files(source))
        return
    found = files(source)
    sizes = [os.path.getsize(path) for path in found]
    for path, before, size in zip(found, itertools.accumulate([0, *sizes]), sizes):
        for row in read_file(path, source.format, source.document):
            # From the share of the file to the share of all files, by bytes on the disk.
            yield row._replace(share=(before + row.share * size) / sum(sizes))


def _of_the_hub(source: Corpus) -> Iterator[Row]:
    import datasets

    try:
        found = datasets.load_dataset(
            source.name, source.subset, data_files=_files_of_hub(source), split=source.split,
            revision=source.revision, streaming=True,
        )  # fmt: skip
        names = names_of_numbers(found.features.to_dict() if found.features else {})
        yield from (
            Row(row, f"{corpus_name(source)}: row {number}", 0.0, names)
            for number, row in enumerate(found, 1)
        )
    # `datasets` reads a first row of JSON to learn the columns.
    except StopIteration:
        raise DataError(f"{corpus_name(source)}: has no rows") from None
    # The errors of pyarrow and of the hub are subclasses of these.
    except (OSError, ValueError) as error:
        raise DataError(
            f"{corpus_name(source)}: cannot be read: {_reason(error, source)}"
        ) from error


def _reason(error: Exception, source: Corpus) -> str:
    name = f"{source.name}@{source.revision}" if source.revision else str(source.name)
    return hub_reason(error, name, "datasets/")


def _files_of_hub(source: Corpus) -> list[str] | None:
    return list(source.files) if source.files else None


def files(source: Corpus) -> list[str]:
    """Return the files of a corpus, sorted within each pattern.

    Raises:
        MissingData: a pattern matches no file.
    """
    found: list[str] = []
    for pattern in source.path or ():
        if source.format == "folder":
            found += folder_files(pattern, source.split)
            continue
        matches: Sequence[str] = (
            remote_files(pattern) if "://" in pattern else matching_files(pattern)
        )
        if not matches:
            raise MissingData(
                f"{corpus_name(source)}: {pattern!r} matches no file (current folder: {os.getcwd()})"
            )
        found += matches
    return found


def fingerprint(source: str | Corpus) -> str:
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
            columns(source),
            _commit(source),
        ]
    else:
        # The default is left out, so that a corpus without `document` keeps its fingerprint.
        kind = (
            source.format
            if source.document == "paragraph"
            else f"{source.format} by {source.document}"
        )
        parts = [
            kind,
            columns(source),
            *_states(files(source)),
        ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _states(paths: Sequence[str]) -> Iterator[str]:
    """Yield a text for each file that changes with its contents."""
    stats = [os.stat(path) for path in paths]
    whole = sum(stat.st_size for stat in stats) <= _WHOLE_BYTES
    for path, stat in zip(paths, stats):
        # A program can set the modification time, as unpacking does, but not st_ctime.
        dates = "" if whole else f"{stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"
        yield f"{path} {dates} {blocks_hash(path, _WHOLE_BYTES if whole else BLOCK)}"


def columns(source: Corpus) -> str:
    # What has its default is left out, so that a corpus without it keeps its fingerprint.
    others = ("files", "input_column", "system_column", "role_key", "content_key", "roles", "most_rows",
              "prompt", "train_on", "train_on_end", "train_key")  # fmt: skip
    given = [f" {key}: {getattr(source, key)}" for key in others if key in chosen(source)]
    if is_chat(source):
        chat = f"{source.messages_column} {source.prompt_column} {source.response_column}"
        return "".join((chat, *given))
    return "".join((source.text_column, *given))


def _commit(source: Corpus) -> str:
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
    inner = glob.glob(f"{glob.escape(str(source.name))}/**", recursive=True)
    files = [path for path in sorted(inner) if os.path.isfile(path)]
    require_no_pointers(files)
    local = _states(files)
    try:
        found: str = datasets.load_dataset_builder(
            source.name, source.subset, data_files=_files_of_hub(source), revision=source.revision
        ).hash
    except (OSError, ValueError) as error:
        raise DataError(
            f"{corpus_name(source)}: cannot be read: {_reason(error, source)}"
        ) from error
    return "\n".join((found, *local))


def corpus_name(source: str | Corpus) -> str:
    """Return the name of a corpus for an error message."""
    if isinstance(source, str):
        return source
    return f"data ({source.format} {source.name or ' '.join(source.path or ())})"
