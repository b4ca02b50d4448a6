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
from ortlaunch.recipe.fields.data import Corpus, has_chat_rows
from ortlaunch.recipe.text.closest_names import closest_or_translated_name_or_none
from ortlaunch.recipe.text.source_location import Problem

OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
"""Functions that open compressed files, by the ending of the name."""
SEPARATORS = ",;\t"
"""Separators of a CSV file's cells; the one that the first line has most often is the file's."""
# Bytes at the beginning of a file that are read.
_READ_BYTES = 1 << 20
# Names of columns that a recipe with a `prompt` may leave out.
_DEFAULT_COLUMNS = {"prompt_column": "instruction", "response_column": "output"}


def missing_column_and_media_file_problems(
    recipe: Recipe, source_key: str, corpus: Corpus, file_or_folder_path: str
) -> Iterator[Problem]:
    """Yield columns that the first row of a file lacks, and a media file that does not exist.

    Args:
        recipe: the recipe.
        source_key: the source's key in the recipe.
        corpus: the source.
        file_or_folder_path: one of its files, or of format folder one of its folders.
    """
    is_folder = corpus.format == "folder"
    file_or_folder_path = (
        _metadata_path_or_empty(file_or_folder_path, corpus.split)
        if is_folder
        else file_or_folder_path
    )
    file_format = file_or_folder_path.rpartition(".")[2] if is_folder else corpus.format
    rows = [
        row
        for row in _complete_rows_at_file_start(file_or_folder_path, file_format)
        if isinstance(row, dict)
    ]
    for field in _fields_naming_required_columns(recipe, corpus) if rows else ():
        column, names = getattr(corpus, field) or _DEFAULT_COLUMNS[field], sorted(rows[0])
        if column not in rows[0]:
            closest_column = closest_or_translated_name_or_none(column, names)
            guess_text = f"; did you mean {closest_column}?" if closest_column else ""
            yield (
                (f"{source_key}.{field}",),
                f"got {column}; {file_or_folder_path} has {', '.join(names)}{guess_text}",
            )
    # Names in metadata are relative to its folder.
    missing_files = [
        name
        for name in (row.get(corpus.file_column) for row in rows if is_folder)
        if isinstance(name, str)
        and not os.path.isfile(os.path.join(os.path.dirname(file_or_folder_path), name))
    ]
    if missing_files:
        further_missing_text = (
            f", nor do {len(missing_files) - 1} more of its first rows" if missing_files[1:] else ""
        )
        yield (
            (f"{source_key}.path",),
            f"{file_or_folder_path} names {missing_files[0]}, which does not exist{further_missing_text}",
        )


def _fields_naming_required_columns(recipe: Recipe, corpus: Corpus) -> Sequence[str]:
    """Return the fields of a source whose columns each row must have."""
    if has_chat_rows(corpus):
        return ("messages_column",) if corpus.messages_column else tuple(_DEFAULT_COLUMNS)
    if recipe.model.traits.compares:
        return ()
    media = {"image": ("file_column", "label_column"), "sound": ("file_column", "text_column")}
    traits = recipe.model.traits
    if traits.media:
        return media[traits.media]
    columns = traits.columns if traits.label else ("text_column",)
    return [field for field in columns if field.endswith("_column")]


def _metadata_path_or_empty(data_folder: str, split: str) -> str:
    """Return the metadata of a folder or of its split; "" if it has none that is read here."""
    paths = (
        os.path.join(data_folder, subfolder, f"metadata.{file_format}")
        for subfolder in ("", split)
        for file_format in ("csv", "jsonl")
    )
    return next(filter(os.path.isfile, paths), "")


def _complete_rows_at_file_start(file_path: str, file_format: str) -> Iterator[Any]:
    """Yield the whole rows at the beginning of a file of format csv or jsonl, else nothing."""
    if file_format not in ("csv", "jsonl") or not file_path:
        return
    try:
        with OPENERS.get(os.path.splitext(file_path)[1], open)(file_path, "rb") as file:
            data = file.read(_READ_BYTES)
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(data)
        # The last row may go on after the bytes that were read.
        complete_text = text if len(data) < _READ_BYTES else text[: text.rfind("\n") + 1]
        if file_format == "csv":
            separator = max(SEPARATORS, key=complete_text.partition("\n")[0].count)
            csv_rows = csv.reader(
                io.StringIO(complete_text, newline=""), delimiter=separator, strict=True
            )
            column_names, *rows = [cells for cells in csv_rows if any(map(str.strip, cells))]
            yield from (
                dict(zip(column_names, cells)) for cells in rows if len(cells) == len(column_names)
            )
        elif text.lstrip().startswith("["):
            yield json.JSONDecoder().raw_decode(text.lstrip()[1:].lstrip())[0]
        else:
            yield from (json.loads(line) for line in complete_text.split("\n") if line.strip())
    # The reader of the ranks names the reason, with its place.
    except (OSError, EOFError, ValueError, csv.Error, lzma.LZMAError, zlib.error):
        return
