"""Where text comes from: the built-in corpus, files, the hub; documents one by one, and a fingerprint of the source.

Reading goes through Hugging Face `datasets`, except for the corpus that lies inside CPython.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from ortlaunch.errors import InputError
from ortlaunch.recipe.models import Corpus

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
    for row in rows(source):
        if source.text_column not in row:
            raise DataError(f"{_named(source)}: no column {source.text_column!r}; it has {', '.join(sorted(row))}")
        if row[source.text_column]:
            yield row[source.text_column]


def rows(source: Corpus) -> Iterator[dict[str, Any]]:
    """Rows of a corpus, streamed."""
    import datasets

    if source.format == "hub":
        loaded = datasets.load_dataset(source.name, source.subset, split=source.split, streaming=True)
    else:
        options: dict[str, Any] = {"sample_by": "paragraph"} if source.format == "text" else {}
        loaded = datasets.load_dataset(
            _LOADER[source.format], data_files=files(source), split="train", streaming=True, **options
        )
    yield from loaded


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
    """Changes when the corpus may have changed: files by path, size and time; the built-in one by Python's version."""
    if isinstance(source, str):
        parts = [source, sys.version]
    elif source.format == "hub":
        parts = [str(source.name), str(source.subset), source.split, source.text_column]
    else:
        stats = ((path, os.stat(path)) for path in files(source))
        parts = [source.format, source.text_column, *(f"{path} {s.st_size} {s.st_mtime_ns}" for path, s in stats)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _named(source: Corpus) -> str:
    return f"data ({source.format} {source.name or ' '.join(source.path or ())})"
