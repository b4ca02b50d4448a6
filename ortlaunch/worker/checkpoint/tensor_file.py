"""Reading and writing of safetensors files piece by piece, without a second copy in memory.

Nothing is unpickled. The safetensors library is not used, because it accepts whole tensors only and
copies all of them first.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from ortlaunch.errors import CheckpointError, InputError
from ortlaunch.json_types import Json
from ortlaunch.run_folder.file_sums import SizeAndChecksum, checksum_of_blocks

# The dtypes' names in the safetensors format.
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_NAMED = {name: dtype for dtype, name in _DTYPES.items()}
# Bytes a write: 16 MiB.
_BLOCK = 1 << 24
# After so many bytes of a file, wait for the disk: many unwritten bytes on a slow disk look like a
# hang.
_FLUSHED_BYTES = 1 << 30
# A damaged length must not make the reader allocate all memory.
_LONGEST_HEADER = 1 << 30


class Entry(NamedTuple):
    """The location of a tensor in a file."""

    path: Path
    dtype: torch.dtype
    begin: int
    """Offset of its first byte in the file."""
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)


def write_tensors(
    path: Path, tensors: Sequence[tuple[str, Sequence[int], torch.Tensor]], metadata: dict[str, str]
) -> SizeAndChecksum:
    """Write (key, shape, flat tensor) in this order, and flush them to the disk.

    Returns:
        Size and checksum of the written bytes.
    """
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
    # The format aligns data to 8 bytes; spaces after the JSON text are allowed.
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    size = 8 + len(text) + end
    with open(path, "wb") as file:
        # Summed from memory, so that a later check detects faults of the disk.
        total = checksum_of_blocks(_written(file, head, [tensor for _, _, tensor in tensors]))
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "crc32": total}


def _written(
    file: IO[bytes], head: bytes, tensors: Iterable[torch.Tensor]
) -> Iterator[bytes | memoryview]:
    """Write the header and the flat tensors, and yield each block after it is written."""
    file.write(head)
    yield head
    waiting = 0
    for tensor in tensors:
        for block in _blocks(tensor):
            file.write(block)
            # Let the disk start to write, while this block is summed and the next one is copied.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            yield block
            waiting = waiting + len(block)
            if waiting >= _FLUSHED_BYTES:
                file.flush()
                os.fsync(file.fileno())
                waiting = 0


def require_storable(values: Iterable[tuple[str, object]]) -> None:
    """Refuse values that no checkpoint can store.

    Raises:
        InputError: a value is no tensor, or of a type that the files do not have.
    """
    for name, value in values:
        kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        if kind not in _DTYPES:
            raise InputError(
                f"model: {name.removeprefix('model.')} is {kind}, which a checkpoint cannot store; "
                "keep a complex tensor as torch.view_as_real of it, and other values in code or in "
                "a buffer that is not persistent"
            )


def _name_of(key: str, dtype: torch.dtype) -> str:
    if dtype not in _DTYPES:
        raise CheckpointError(f"{key} is of {dtype}, which a checkpoint cannot store")
    return _DTYPES[dtype]


def _blocks(tensor: torch.Tensor) -> Iterable[memoryview]:
    """Yield the bytes of a flat tensor, block by block."""
    if not tensor.numel():
        return
    for piece in tensor.detach().split(_BLOCK // tensor.element_size()):
        yield memoryview(piece.cpu().contiguous().view(torch.uint8).numpy())


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return (tensors by key, metadata) of a file.

    Raises:
        CheckpointError: it is no safetensors file.
    """
    try:
        with open(path, "rb") as file:
            # The format: 8 bytes of length (little endian), the header as JSON, then the data.
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
            f"{path} is not a safetensors file, the only supported format: {error}"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def _entry(path: Path, base: int, size: int, entry: Json) -> Entry:
    begin, end = entry["data_offsets"]
    dtype = _NAMED[entry["dtype"]]
    shape = tuple(entry["shape"])
    if not 0 <= begin <= end <= size - base or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor {shape} at {begin} to {end} of {size - base} bytes")
    return Entry(path, dtype, base + begin, shape)


def read_range(entry: Entry, start: int, count: int) -> torch.Tensor:
    """Return some elements of a tensor, flat, on the CPU."""
    values = torch.empty(count, dtype=entry.dtype)
    if count:
        with open(entry.path, "rb", buffering=0) as file:
            file.seek(entry.begin + start * entry.dtype.itemsize)
            _fill(file, values.view(torch.uint8).numpy().data, entry.path)
    return values


def _fill(file: Any, wanted: memoryview, path: Path) -> None:
    done = 0
    while done < len(wanted):
        # One call may read less than requested.
        read = file.readinto(wanted[done:])
        if not read:
            raise CheckpointError(f"{path} ends too early")
        done += read
