"""Files of text, JSON lines and Parquet, row by row, each row with its place: an error names file and line.

Parquet and compressed files go through Hugging Face `datasets`, which tells rows, not lines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from ortlaunch.errors import InputError

_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")
_LOADER = {"text": "text", "jsonl": "json", "parquet": "parquet"}
_LETTERS_AT_ONCE = 1 << 20
_MARK = b"\xef\xbb\xbf"  # of UTF-8, at the begin of files from Windows


class DataError(InputError):
    """The data cannot be read, or does not hold what the recipe says."""


class Row(NamedTuple):
    """One row of a corpus."""

    values: dict[str, Any]
    place: str
    """`file:line`, or what else says where it is."""
    share: float = 0.0
    """How much of the file is read with it, from 0 to 1; 0 where nobody knows."""


def read_file(path: str, form: str, document: str = "paragraph") -> Iterator[Row]:
    """Rows of a file of format text, jsonl or parquet; `document` is what a row of text is.

    Raises:
        DataError: it cannot be read, or is not of this format, or is empty.
    """
    try:
        if os.path.getsize(path) == 0:
            raise DataError(f"{path}: is empty; leave it out")
        known = None if path.endswith(_COMPRESSED) else _READERS.get(document if form == "text" else form)
        yield from known(path) if known else _by_datasets(path, form, document)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{_line_without_text(path)}: is not UTF-8: {error.reason}") from None
    except StopIteration:  # `datasets` looks for a first row of JSON
        raise DataError(f"{path}: has no rows") from None
    except (OSError, ValueError) as error:  # pyarrow's are among these
        reason = getattr(error, "strerror", None) or (str(error) or repr(error)).splitlines()[0]
        raise DataError(f"{path}: cannot be read as {form}: {reason}") from error


def _paragraphs(path: str) -> Iterator[Row]:
    line, rest, size, read = 1, "", os.path.getsize(path), 0
    with open(path, encoding="utf-8") as file:
        while chunk := file.read(_LETTERS_AT_ONCE):
            read += len(chunk)
            *whole, rest = (rest + chunk).split("\n\n")
            for paragraph in whole:
                if paragraph:
                    yield Row({"text": paragraph}, f"{path}:{line}", min(1.0, read / size))
                line += paragraph.count("\n") + 2
    if rest:
        yield Row({"text": rest}, f"{path}:{line}", 1.0)


def _lines(path: str) -> Iterator[Row]:
    size, read = os.path.getsize(path), 0
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            read += len(line)
            if line.strip():
                yield Row({"text": line.rstrip("\n")}, f"{path}:{number}", min(1.0, read / size))


def _whole(path: str) -> Iterator[Row]:
    with open(path, encoding="utf-8") as file:
        yield Row({"text": file.read()}, f"{path}:1", 1.0)


def _jsonl(path: str) -> Iterator[Row]:
    size, read = os.path.getsize(path), 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            read += len(line)
            text = (line.removeprefix(_MARK) if number == 1 else line).decode("utf-8")
            if text.strip():
                yield Row(_object(text, f"{path}:{number}"), f"{path}:{number}", read / size)


def _object(text: str, place: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}:{error.colno}: is no JSON: {error.msg}") from None
    if not isinstance(found, dict):
        raise DataError(f'{place}: is a {type(found).__name__}; a line must be an object, as {{"text": "..."}}')
    return found


def _by_datasets(path: str, form: str, document: str) -> Iterator[Row]:
    import datasets

    by = "document" if document == "file" else document
    options: dict[str, Any] = {"sample_by": by} if form == "text" else {}
    found = datasets.load_dataset(_LOADER[form], data_files=[path], split="train", streaming=True, **options)
    yield from (Row(values, f"{path}: row {number}") for number, values in enumerate(found, 1))


def _line_without_text(path: str) -> int:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return number
    return 1


_READERS = {"paragraph": _paragraphs, "line": _lines, "file": _whole, "jsonl": _jsonl}
