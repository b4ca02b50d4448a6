"""Compare the columns that a recipe names with the first rows of its data files.

Only files of format csv and jsonl, and metadata in these formats: Parquet and the hub need
libraries that the control side does not import. What cannot be read here is left to the reader of
the ranks, which names the reason.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.data import Corpus, is_chat
from ortlaunch.recipe.text.place import Problem
from ortlaunch.recipe.text.words import closest

OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
"""Functions that open compressed files, by the ending of the name."""
SEPARATORS = ",;\t"
"""Separators of a CSV file's cells; the one that the first line has most often is the file's."""
# Bytes at the beginning of a file that are read.
_READ_BYTES = 1 << 20
# Names of columns that a recipe with a `prompt` may leave out.
_DEFAULT_COLUMNS = {"prompt_column": "instruction", "response_column": "output"}


def first_row_problems(recipe: Recipe, key: str, source: Corpus, path: str) -> Iterator[Problem]:
    """Yield columns that the first row of a file lacks, and a media file that does not exist.

    Args:
        recipe: the recipe.
        key: the source's key in the recipe.
        source: the source.
        path: one of its files, or of format folder one of its folders.
    """
    is_folder = source.format == "folder"
    path = _metadata(path, source.split) if is_folder else path
    form = path.rpartition(".")[2] if is_folder else source.format
    rows = [row for row in _first_rows(path, form) if isinstance(row, dict)]
    for field in _column_fields(recipe, source) if rows else ():
        column, names = getattr(source, field) or _DEFAULT_COLUMNS[field], sorted(rows[0])
        if column not in rows[0]:
            guess = closest(column, names)
            near = f"; did you mean {guess}?" if guess else ""
            yield (f"{key}.{field}",), f"got {column}; {path} has {', '.join(names)}{near}"
    # Names in metadata are relative to its folder.
    missing = [
        name
        for name in (row.get(source.file_column) for row in rows if is_folder)
        if isinstance(name, str) and not os.path.isfile(os.path.join(os.path.dirname(path), name))
    ]
    if missing:
        more = f", nor do {len(missing) - 1} more of its first rows" if missing[1:] else ""
        yield (f"{key}.path",), f"{path} names {missing[0]}, which does not exist{more}"


def _column_fields(recipe: Recipe, source: Corpus) -> Sequence[str]:
    """Return the fields of a source whose columns each row must have."""
    if is_chat(source):
        return ("messages_column",) if source.messages_column else tuple(_DEFAULT_COLUMNS)
    label = ("label_column",) if recipe.model.traits.label else ()
    text = ("text_column", *label)
    media = {"image": ("file_column", "label_column"), "sound": ("file_column", "text_column")}
    return media[recipe.model.traits.media] if recipe.model.traits.media else text


def _metadata(folder: str, split: str) -> str:
    """Return the metadata of a folder or of its split; "" if it has none that is read here."""
    paths = (
        os.path.join(folder, part, f"metadata.{form}")
        for part in ("", split)
        for form in ("csv", "jsonl")
    )
    return next(filter(os.path.isfile, paths), "")


def _first_rows(path: str, form: str) -> Iterator[Any]:
    """Yield the whole rows at the beginning of a file of format csv or jsonl, else nothing."""
    if form not in ("csv", "jsonl") or not path:
        return
    try:
        with OPENERS.get(os.path.splitext(path)[1], open)(path, "rb") as file:
            read = file.read(_READ_BYTES)
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(read)
        # The last row may go on after the bytes that were read.
        whole = text if len(read) < _READ_BYTES else text[: text.rfind("\n") + 1]
        if form == "csv":
            separator = max(SEPARATORS, key=whole.partition("\n")[0].count)
            table = csv.reader(io.StringIO(whole, newline=""), delimiter=separator, strict=True)
            names, *rows = [cells for cells in table if any(map(str.strip, cells))]
            yield from (dict(zip(names, cells)) for cells in rows if len(cells) == len(names))
        elif text.lstrip().startswith("["):
            yield json.JSONDecoder().raw_decode(text.lstrip()[1:].lstrip())[0]
        else:
            yield from (json.loads(line) for line in whole.split("\n") if line.strip())
    # The reader of the ranks names the reason, with its place.
    except (OSError, EOFError, ValueError, csv.Error, lzma.LZMAError, zlib.error):
        return
