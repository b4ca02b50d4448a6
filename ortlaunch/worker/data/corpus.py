"""Where text comes from: the built-in corpus, files, the hub; documents one by one, and a fingerprint of the source.

Reading goes through Hugging Face `datasets`, except for the corpus that lies inside CPython.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

from ortlaunch.errors import InputError
from ortlaunch.recipe.data import Corpus

PYTHON_DOCS = "python-docs"
_LOADER = {"text": "text", "jsonl": "json", "parquet": "parquet"}


class DataError(InputError):
    """The data cannot be read, or does not hold what the recipe says."""


def documents(source: str | Corpus) -> Iterator[str]:
    """Texts of a corpus in a fixed order; of plain text files, paragraphs (a blank line ends one)."""
    if isinstance(source, str):
        from pydoc_data.topics import topics

        yield from (topics[name] for name in sorted(topics))
        return
    column = source.text_column
    for row in rows(source):
        if column not in row:
            raise DataError(f"{_named(source)}: no column {column!r}; it has {', '.join(sorted(row))}")
        if not isinstance(row[column], (str, type(None))):
            raise DataError(f"{_named(source)}: column {column!r} holds {row[column]!r:.80}; it must be text")
        if row[column]:
            yield row[column]


def rows(source: Corpus) -> Iterator[dict[str, Any]]:
    """Rows of a corpus, streamed.

    Raises:
        DataError: there is no such file or data set, or it is not of the format that the recipe says.
    """
    try:
        yield from _loaded(source)
    except StopIteration:  # `datasets` looks for a first row of JSON
        raise DataError(f"{_named(source)}: has no rows") from None
    except (OSError, ValueError) as error:  # pyarrow's and the hub's errors are among these
        raise DataError(f"{_named(source)}: cannot be read: {(str(error) or repr(error)).splitlines()[0]}") from error


def _loaded(source: Corpus) -> Any:
    import datasets

    if source.format == "hub":
        return datasets.load_dataset(
            source.name, source.subset, split=source.split, revision=source.revision, streaming=True
        )
    options: dict[str, Any] = {"sample_by": "paragraph"} if source.format == "text" else {}
    return datasets.load_dataset(
        _LOADER[source.format], data_files=files(source), split="train", streaming=True, **options
    )


def files(source: Corpus) -> list[str]:
    """The files of a corpus, sorted within each pattern.

    Raises:
        DataError: a pattern matches nothing.
    """
    found: list[str] = []
    for pattern in source.path or ():
        matches = sorted(path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path))
        if not matches:
            raise DataError(f"{_named(source)}: {pattern!r} matches no file (seen from {os.getcwd()})")
        found += matches
    return found


def fingerprint(source: str | Corpus) -> str:
    """Changes when the corpus may have changed.

    Files by path, size and time; the built-in one by Python's version; the hub's by the commit that its name and
    revision stand for now.

    Raises:
        DataError: the hub's commit cannot be found out.
    """
    if isinstance(source, str):
        parts = [source, sys.version]
    elif source.format == "hub":
        parts = [str(source.name), str(source.subset), source.split, source.text_column, _commit(source)]
    else:
        stats = ((path, os.stat(path)) for path in files(source))
        parts = [source.format, source.text_column, *(f"{path} {s.st_size} {s.st_mtime_ns}" for path, s in stats)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _commit(source: Corpus) -> str:
    """The commit of a hub data set; of a folder's, what its files were when they were last written."""
    if source.revision and re.fullmatch(r"[0-9a-f]{40}", source.revision) and not os.path.isdir(str(source.name)):
        return source.revision  # never another
    import datasets

    try:
        found: str = datasets.load_dataset_builder(source.name, source.subset, revision=source.revision).hash
    except (OSError, ValueError) as error:
        reason = (str(error) or repr(error)).splitlines()[0]
        mend = "to train offline, give the commit as data.*.revision"
        raise DataError(f"{_named(source)}: cannot be read: {reason}; {mend}") from error
    return found


def _named(source: Corpus) -> str:
    return f"data ({source.format} {source.name or ' '.join(source.path or ())})"
