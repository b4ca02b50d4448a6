"""Read files that others may have written: regular files only, whatever JSON holds, and its types.

Standard library only.
"""

from __future__ import annotations

import json
import os
import stat
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Union, get_args, get_origin, get_type_hints

from ortlaunch.base.errors import DamagedFile

Json = dict[str, Any]
"""An object of a JSON or YAML document; the reader of a value knows its type."""

# A larger file is no record of a run.
_MOST_RECORD_BYTES = 1 << 30
# No record is nested more deeply, and functions that go through a value call themselves.
_MOST_LEVELS = 100
# Records have 64 bits for whole numbers; larger ones may exceed every float.
_LEAST_LARGE = 1 << 63


def open_regular_file_or_refuse(file_path: Path) -> BinaryIO:
    """Open a file for reading in bytes.

    Raises:
        DamagedFile: it is a pipe or a device, which may block or never end.
    """
    # Without O_NONBLOCK, a pipe would already block here.
    handle = os.open(file_path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    raise DamagedFile(
        f"{file_path}: is no regular file, but a folder, a pipe or a device; remove it"
    )


def read_regular_file_bytes_or_refuse(file_path: Path) -> bytes:
    """Return the contents of a file.

    Raises:
        DamagedFile: it is no regular file, or has more than 1 GiB.
    """
    with open_regular_file_or_refuse(file_path) as file:
        if os.fstat(file.fileno()).st_size > _MOST_RECORD_BYTES:
            raise DamagedFile(
                f"{file_path}: has more than {_MOST_RECORD_BYTES:,} bytes, too many for a record"
            )
        return file.read()


def parse_json_or_raise_decode_error(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        json.JSONDecodeError: it is no JSON, is nested too deeply, or is too large.
    """
    try:
        value = json.loads(text)
        # Counting is fast, and most texts have few brackets.
        opened = (
            text.count("[") + text.count("{")
            if isinstance(text, str)
            else text.count(b"[") + text.count(b"{")
        )
        if opened > _MOST_LEVELS:
            _raise_if_nested_too_deeply(value)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError, MemoryError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise json.JSONDecodeError(reason, "", 0) from None
    return value


def _raise_if_nested_too_deeply(value: object) -> None:
    """Raise RecursionError if a value has too many levels."""
    level: list[object] = [value]
    for _ in range(_MOST_LEVELS):
        level = [
            item
            for container in level
            if isinstance(container, (dict, list))
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return
    raise RecursionError


def value_fits_annotation_at_any_depth(annotation: Any, value: object) -> bool:
    """Return whether a value has the type of an annotation, at any depth."""
    inner = get_args(annotation)
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return any(value_fits_annotation_at_any_depth(member, value) for member in inner)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(
            value_fits_annotation_at_any_depth(inner[0], key)
            and value_fits_annotation_at_any_depth(inner[1], item)
            for key, item in value.items()
        )
    if isinstance(origin, type) and issubclass(origin, Sequence):
        # A tuple of fixed length names the type of each item.
        fixed = origin is tuple and inner[-1] is not ...
        item_annotations = (
            inner if fixed else inner[:1] * (len(value) if isinstance(value, Sequence) else 0)
        )
        return (
            isinstance(value, (list, tuple))
            and len(item_annotations) == len(value)
            and all(map(value_fits_annotation_at_any_depth, item_annotations, value))
        )
    if annotation in (Any, object) or not isinstance(annotation, type):
        return True
    if isinstance(value, annotation) and hasattr(annotation, "_fields"):
        hints = get_type_hints(annotation)
        return all(
            value_fits_annotation_at_any_depth(hints[name], getattr(value, name)) for name in hints
        )
    # JSON writers may drop the fraction of 1.0; Python's True is an int.
    if isinstance(value, int) and not isinstance(value, bool):
        return annotation in (int, float) and abs(value) < _LEAST_LARGE
    return isinstance(value, annotation) and (annotation is not int or not isinstance(value, bool))
