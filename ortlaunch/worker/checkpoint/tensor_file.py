"""Files in the safetensors format, written and read piece by piece: no second copy in memory, and nothing unpickled.

Written here and not by the library because it takes whole tensors only and copies all of them first.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from ortlaunch.errors import CheckpointError
from ortlaunch.json_types import Json
from ortlaunch.worker.checkpoint.manifest import File

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_NAMED = {name: dtype for dtype, name in _DTYPES.items()}
_BLOCK = 1 << 24
_FLUSHED_BYTES = (
    1 << 30
)  # of a file, then the next are written: many at once on a slow disk look like a hang
_LONGEST_HEADER = 1 << 30


class Entry(NamedTuple):
    """Where a tensor lies in a file."""

    path: Path
    dtype: torch.dtype
    begin: int
    """Of its bytes in the file."""
    elements: int
    """How many."""


def write_tensors(
    path: Path, tensors: Sequence[tuple[str, Sequence[int], torch.Tensor]], metadata: dict[str, str]
) -> File:
    """Write (key, shape, flat tensor) in this order, onto the disk; size and sum of what was written."""
    header = {"__metadata__": metadata} if metadata else {}
    end = 0
    described: dict[str, object] = dict(header)
    for key, shape, tensor in tensors:
        begin = end
        end = end + tensor.numel() * tensor.element_size()
        described[key] = {
            "dtype": _name_of(key, tensor.dtype),
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    size = 8 + len(text) + end
    with open(path, "wb") as file:
        file.write(head)
        total = zlib.crc32(head)
        waiting = 0
        for _, _, tensor in tensors:
            for block in _blocks(tensor):
                file.write(block)
                _start_writing(file)
                total = zlib.crc32(block, total)
                waiting = waiting + len(block)
                if waiting >= _FLUSHED_BYTES:
                    file.flush()
                    os.fsync(file.fileno())
                    waiting = 0
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "crc32": total}


def _start_writing(file: BinaryIO) -> None:
    """The disk begins with what the file has, while the next block is copied and summed."""
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _name_of(key: str, dtype: torch.dtype) -> str:
    if dtype not in _DTYPES:
        raise CheckpointError(f"{key} is of {dtype}, which a checkpoint cannot hold")
    return _DTYPES[dtype]


def _blocks(tensor: torch.Tensor) -> Iterable[memoryview]:
    """The bytes of a flat tensor, some at a time."""
    if not tensor.numel():
        return
    step = _BLOCK // tensor.element_size()
    for piece in tensor.detach().split(step):
        yield memoryview(piece.cpu().contiguous().view(torch.uint8).numpy())


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """(tensors by key, metadata) of a file.

    Raises:
        CheckpointError: it is no safetensors file.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = struct.unpack("<Q", file.read(8))[0]
            header = json.loads(file.read(length)) if length < min(size, _LONGEST_HEADER) else None
        if not isinstance(header, dict):
            raise ValueError("the header is not a JSON object")
        metadata = header.pop("__metadata__", {})
        return {
            key: _entry(path, 8 + length, size, entry) for key, entry in header.items()
        }, metadata
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise CheckpointError(
            f"{path} is no safetensors file, and nothing else is read: {error}"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def _entry(path: Path, base: int, size: int, entry: Json) -> Entry:
    begin, end = entry["data_offsets"]
    dtype = _NAMED[entry["dtype"]]
    if not 0 <= begin <= end <= size - base:
        raise ValueError(f"a tensor at {begin} to {end} of {size - base} bytes")
    return Entry(path, dtype, base + begin, (end - begin) // dtype.itemsize)


def read_range(entry: Entry, start: int, count: int) -> torch.Tensor:
    """Some elements of a tensor, flat, on the CPU."""
    values = torch.empty(count, dtype=entry.dtype)
    if count:
        with open(entry.path, "rb", buffering=0) as file:
            file.seek(entry.begin + start * entry.dtype.itemsize)
            _fill(file, values.view(torch.uint8).numpy().data, entry.path)
    return values


def _fill(file: Any, wanted: memoryview, path: Path) -> None:
    done = 0
    while done < len(wanted):
        read = file.readinto(wanted[done:])
        if not read:
            raise CheckpointError(f"{path} ends too early")
        done += read
