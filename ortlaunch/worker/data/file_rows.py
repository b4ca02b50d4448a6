"""Reading of text, JSON lines, CSV and Parquet files, row by row.

Each row has its location. An error names the file, and the line or the row. Text, JSON lines and CSV in
.gz, .bz2 or .xz are read directly. Hugging Face `datasets` reads .zst, .lz4 and .zip.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

from ortlaunch.base.cause import Cause
from ortlaunch.base.errors import InputError, first_message_line
from ortlaunch.base.json_types import Json, parse_json_or_raise_decode_error
from ortlaunch.recipe.first_rows import OPENERS, SEPARATORS
from ortlaunch.recipe.inputs import refuse_lfs_pointers_and_unreadable_files

_BY_DATASETS = (".zst", ".lz4", ".zip")
_LOADER = {"text": "text", "jsonl": "json"}
# Characters of a text file, and rows of a Parquet file, that are read at once.
_LETTERS_AT_ONCE = 1 << 20
_ROWS_AT_ONCE = 1000
# In characters. A paragraph is held in memory as a whole, so it needs a limit.
_LONGEST_PARAGRAPH = 16_000_000
# A line of blanks, such as tabs or U+00A0, is an empty line.
_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")
# Bytes of a JSON file that show whether it is one array.
_BEGIN_BYTES = 4096
# Bytes of each block that shows whether a file is another one.
BLOCK = 1 << 16
# Bytes, all of them in memory.
_LONGEST_ROW = 64_000_000
# Characters. A tokenizer needs some hundred bytes for each.
LONGEST_TEXT = _LONGEST_PARAGRAPH
SPLIT_ADVICE = "split its text into several rows; no sample is that long"
# The byte order mark of UTF-8, at the beginning of files from Windows.
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_MARKS_OF_UTF16 = (b"\xff\xfe", b"\xfe\xff")


class DataError(InputError):
    """The data cannot be read, or does not match the recipe."""


class NoRows(DataError):
    """A file has no rows."""


class MissingData(DataError):
    """A pattern matches no file."""

    cause = Cause.MISSING_FILE


class MissingCode(DataError):
    """A module that the recipe names cannot be found."""

    cause = Cause.MISSING_MODULE


class Row(NamedTuple):
    """One row of a corpus."""

    values: Json
    location: str
    """Location for errors: `file:line`, or the file's or data set's name with the row's number."""
    share: float = 0.0
    """Share (0 to 1) of the file read when the row is yielded, with read-ahead; 0 if unknown."""
    names: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """For each column of classes: the class names, in the order of the class numbers."""


def read_file_rows(
    file_path: str, file_format: str, document_unit: str = "paragraph"
) -> Iterator[Row]:
    """Yield the rows of a file.

    Args:
        file_path: the file.
        file_format: text, jsonl, csv or parquet.
        document_unit: for text, the unit of a row: paragraph, line or file.

    Raises:
        DataError: the file cannot be read, is not of this format, or has no rows.
    """
    try:
        if local_or_remote_file_bytes(file_path) == 0:
            raise NoRows(f"{file_path}: is empty; leave it out")
        refuse_lfs_pointers_and_unreadable_files([file_path])
        reader_name = document_unit if file_format == "text" else file_format
        rows = (
            _rows_of_zst_lz4_or_zip(file_path, file_format, document_unit)
            if file_path.endswith(_BY_DATASETS)
            else _READERS[reader_name](file_path)
        )
        first_row = next(rows, None)
        if first_row is None:
            raise NoRows(f"{file_path}: has no rows; leave it out")
        yield first_row
        yield from rows
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file_path}:{_first_undecodable_line(file_path)}: is not UTF-8: "
            f"{error.reason}{_utf16_hint_or_empty(file_path)}"
        ) from None
    except (InputError, ImportError, MemoryError):
        raise
    # Only the readers' own code runs here, and each library has errors of its own for bad files.
    except Exception as error:
        reason = getattr(error, "strerror", None) or first_message_line(error)
        raise DataError(f"{file_path}: cannot be read as {file_format}: {reason}") from error


class RemoteFile(str):
    """The URL of a file that is read over a network, and its size in bytes."""

    size: int
    open: Callable[[], BinaryIO]


def local_or_remote_file_bytes(path: str) -> int:
    """Return the bytes of a file."""
    return path.size if isinstance(path, RemoteFile) else os.path.getsize(path)


def hash_of_size_and_first_middle_last_blocks(file_path: str, block_bytes: int = BLOCK) -> str:
    """Return a hash of a file's size and its first, middle and last block of so many bytes.

    Of a file that is not larger than a block, it is of the whole contents.
    """
    size = local_or_remote_file_bytes(file_path)
    file_hash = hashlib.blake2b(str(size).encode(), digest_size=16)
    with _open_local_or_remote_file(file_path) as file:
        for start in sorted({0, max(0, size - block_bytes) // 2, max(0, size - block_bytes)}):
            file.seek(start)
            file_hash.update(file.read(block_bytes))
    return file_hash.hexdigest()


def _open_local_or_remote_file(local_or_remote_path: str) -> BinaryIO:
    if isinstance(local_or_remote_path, RemoteFile):
        return local_or_remote_path.open()
    try:
        return open(local_or_remote_path, "rb")
    except PermissionError:
        refuse_lfs_pointers_and_unreadable_files([local_or_remote_path])
        raise


class _TextFile:
    """A file, compressed or not, and the share of it that has been read."""

    def __init__(self, path: str) -> None:
        # Closed by `__exit__`.
        self._raw, self._size = _open_local_or_remote_file(path), local_or_remote_file_bytes(path)
        opened = OPENERS.get(os.path.splitext(path)[1])
        self.bytes: BinaryIO = opened(self._raw) if opened else self._raw

    def __enter__(self) -> _TextFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes.close()
        self._raw.close()

    @property
    def share(self) -> float:
        """Share (0 to 1) of the bytes on disk that read; if compressed, of compressed bytes."""
        return min(1.0, self._raw.tell() / self._size)


def _paragraph_rows(file_path: str) -> Iterator[Row]:
    line = 1
    incomplete_text = ""
    with (
        _TextFile(file_path) as file,
        io.TextIOWrapper(file.bytes, encoding="utf-8-sig") as text_file,
    ):
        while chunk := text_file.read(_LETTERS_AT_ONCE):
            # The last part may go on in the next chunk.
            *paragraphs, incomplete_text = _BLANK_LINE.split(incomplete_text + chunk)
            for paragraph in paragraphs:
                if paragraph.strip():
                    yield Row({"text": paragraph}, f"{file_path}:{line}", file.share)
                # Two more line ends separate it from the next paragraph.
                line += paragraph.count("\n") + 2
            if len(incomplete_text) > _LONGEST_PARAGRAPH:
                remedy = (
                    "`document: line` makes a document of each line, "
                    "`document: file` of the whole file"
                )
                raise DataError(
                    f"{file_path}:{line}: no blank line ends this paragraph of {len(incomplete_text):,} "
                    f"characters; {remedy}"
                )
    if incomplete_text.strip():
        yield Row({"text": incomplete_text}, f"{file_path}:{line}", 1.0)


def _line_rows(path: str) -> Iterator[Row]:
    with _TextFile(path) as file, io.TextIOWrapper(file.bytes, encoding="utf-8-sig") as text_file:
        for line_number, line in enumerate(text_file, 1):
            if line.strip():
                yield Row({"text": line.rstrip("\n")}, f"{path}:{line_number}", file.share)


def _whole_file_row(path: str) -> Iterator[Row]:
    with _TextFile(path) as file:
        yield Row({"text": file.bytes.read().decode("utf-8-sig")}, f"{path}:1", 1.0)


def _json_rows(path: str) -> Iterator[Row]:
    with _TextFile(path) as file:
        begin = file.bytes.read(_BEGIN_BYTES).removeprefix(_BYTE_ORDER_MARK).lstrip()[:1]
    return _json_array_rows(path) if begin == b"[" else _json_line_rows(path)


def _json_array_rows(file_path: str) -> Iterator[Row]:
    """Yield the rows of a file that is one JSON array, which is held in memory."""
    with _TextFile(file_path) as file:
        text = file.bytes.read().decode("utf-8-sig")
    try:
        items = parse_json_or_raise_decode_error(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{file_path}:{error.lineno}:{error.colno}: is no JSON: {error.msg}"
        ) from None
    may_have_half_pairs = _may_have_half_surrogate_pairs(text)
    for row_number, values in enumerate(items, 1):
        location = f"{file_path}: row {row_number}"
        if not isinstance(values, dict):
            raise DataError(f"{location}: is a {type(values).__name__}; it must be an object")
        if may_have_half_pairs:
            _refuse_half_surrogate_pairs(values, location)
        yield Row(values, location, row_number / len(items))


def _json_line_rows(file_path: str) -> Iterator[Row]:
    with _TextFile(file_path) as file:
        for line_number, line in enumerate(
            iter(functools.partial(file.bytes.readline, _LONGEST_ROW + 1), b""), 1
        ):
            # `readline` stops after one byte more than the limit.
            if len(line) > _LONGEST_ROW:
                raise DataError(
                    f"{file_path}:{line_number}: this row is longer than {_LONGEST_ROW:,} bytes; {SPLIT_ADVICE}"
                )
            text = (
                (line.removeprefix(_BYTE_ORDER_MARK) if line_number == 1 else line)
                .decode("utf-8")
                .rstrip()
            )
            if text:
                yield Row(
                    _parse_json_object_or_refuse(text, f"{file_path}:{line_number}"),
                    f"{file_path}:{line_number}",
                    file.share,
                )


def _parse_json_object_or_refuse(json_text: str, location: str) -> dict[str, object]:
    try:
        parsed = parse_json_or_raise_decode_error(json_text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{location}:{error.colno}: is no JSON: {error.msg}; a line must be a whole object"
        ) from None
    if not isinstance(parsed, dict):
        raise DataError(
            f'{location}: is a {type(parsed).__name__}; a line must be an object, as {{"text": "..."}}'
        )
    if _may_have_half_surrogate_pairs(json_text):
        _refuse_half_surrogate_pairs(parsed, location)
    return parsed


def _may_have_half_surrogate_pairs(text: str) -> bool:
    """Return whether JSON may hold half of a surrogate pair, which only an escape can make."""
    return "\\ud" in text or "\\uD" in text


def _refuse_half_surrogate_pairs(value_by_column: dict[str, object], location: str) -> None:
    """Raise DataError where a text has half of a surrogate pair, which no tokenizer accepts.

    Only JSON's escapes can express it.
    """
    for column, value in value_by_column.items():
        try:
            json.dumps({column: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])[1:-1]
            remedy = "give its other half, too, or \\ufffd in its place"
            raise DataError(
                f"{location}: {column!r} has {half}, half of a surrogate pair, which is no character; "
                f"{remedy}"
            ) from None


def _csv_rows(file_path: str) -> Iterator[Row]:
    """Yield the rows of a table whose first line names its columns; a cell is text."""
    csv.field_size_limit(_LONGEST_ROW)
    line = 1
    names: list[str] = []
    with (
        _TextFile(file_path) as file,
        io.TextIOWrapper(file.bytes, encoding="utf-8-sig", newline="") as text_file,
    ):
        header_line = text_file.readline(_LONGEST_ROW)
        separator = max(SEPARATORS, key=header_line.count)
        table = csv.reader(
            itertools.chain([header_line], text_file), delimiter=separator, strict=True
        )
        try:
            for cells in table:
                location = f"{file_path}:{line}"
                line = table.line_num + 1
                # An empty line; a table of one column has no other form of an empty cell.
                if not any(map(str.strip, cells)) and len(cells) < 2:
                    continue
                if not names:
                    names = cells
                    if repeated_names := [name for name in names if names.count(name) > 1]:
                        raise DataError(f"{location}: two columns are named {repeated_names[0]!r}")
                elif len(cells) != len(names):
                    remedy = f"put a cell with a {separator!r} or a line end in double quotes"
                    problem = f"has {len(cells)} cells, and the first line {len(names)}"
                    raise DataError(f"{location}: {problem}; {remedy}")
                else:
                    yield Row(dict(zip(names, cells)), location, file.share)
        except csv.Error as error:
            remedy = 'a cell in double quotes ends with one, and has "" for each within'
            raise DataError(f"{file_path}:{line}: is no CSV: {error}; {remedy}") from None


def _parquet_rows(file_path: str) -> Iterator[Row]:
    from pyarrow import parquet

    with _open_local_or_remote_file(file_path) as opened, parquet.ParquetFile(opened) as file:
        row_number = 0
        rows = max(1, file.metadata.num_rows)
        description = json.loads((file.schema_arrow.metadata or {}).get(b"huggingface", b"{}"))
        names = class_names_by_column((description.get("info") or {}).get("features") or {})
        for batch in file.iter_batches(_ROWS_AT_ONCE):
            for values in batch.to_pylist():
                row_number += 1
                yield Row(values, f"{file_path}: row {row_number}", row_number / rows, names)


def class_names_by_column(hub_feature_by_column: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the class names of each column of classes, or of lists of classes.

    hub_feature_by_column: Hugging Face's description of a data set's columns.
    """
    names_by_column = {}
    for column, feature in hub_feature_by_column.items():
        inner = feature
        # The description of a list keeps that of its elements under "feature".
        while isinstance(inner, Mapping) and isinstance(inner.get("feature"), Mapping):
            inner = inner["feature"]
        if isinstance(inner, Mapping) and inner.get("_type") == "ClassLabel":
            names_by_column[column] = tuple(inner.get("names") or ())
    return names_by_column


def _rows_of_zst_lz4_or_zip(file_path: str, file_format: str, document_unit: str) -> Iterator[Row]:
    import datasets

    if isinstance(file_path, RemoteFile):
        raise DataError(
            f"{file_path}: .zst, .lz4 and .zip cannot be streamed; use .gz, or unpack it"
        )
    if file_format not in _LOADER:
        raise DataError(
            f"{file_path}: {file_format} is not read from .zst, .lz4 and .zip; unpack this file"
        )
    sample_unit = "document" if document_unit == "file" else document_unit
    options: dict[str, str] = {"sample_by": sample_unit} if file_format == "text" else {}
    try:
        dataset = datasets.load_dataset(
            _LOADER[file_format], data_files=[file_path], split="train", streaming=True, **options
        )
        for row_number, values in enumerate(dataset, 1):
            location = f"{file_path}: row {row_number}"
            if file_format == "text" and sample_unit == "paragraph":
                parts = _BLANK_LINE.split(values["text"])
                yield from (Row({"text": part}, location) for part in parts if part.strip())
            else:
                yield Row(values, location)
    # For an empty file, `datasets` lets StopIteration out of a generator. Python makes it
    # RuntimeError.
    except RuntimeError as error:
        if not isinstance(error.__cause__, StopIteration):
            raise DataError(
                f"{file_path}: cannot be read as {file_format}: {first_message_line(error)}"
            ) from error
        raise DataError(f"{file_path}: has no rows") from error


def _first_undecodable_line(file_path: str) -> int:
    with _TextFile(file_path) as file:
        for line_number, line in enumerate(file.bytes, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return line_number
    return 1


def _utf16_hint_or_empty(path: str) -> str:
    with _TextFile(path) as file:
        return "; it begins as UTF-16 does" if file.bytes.read(2) in _MARKS_OF_UTF16 else ""


_READERS: dict[str, Callable[[str], Iterator[Row]]] = {
    "paragraph": _paragraph_rows, "line": _line_rows, "file": _whole_file_row, "jsonl": _json_rows, "csv": _csv_rows,
    "parquet": _parquet_rows,
}  # fmt: skip
