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

from ortlaunch.base.errors import CheckpointError, InputError
from ortlaunch.base.json_types import Json
from ortlaunch.run_folder.file_sums import SizeAndChecksum, checksum_of_blocks

# The dtypes' names in the safetensors format.
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_DTYPE_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}
# Bytes a write: 16 MiB.
_BLOCK_BYTES = 1 << 24
# After so many bytes of a file, wait for the disk: many unwritten bytes on a slow disk look like a
# hang.
_FLUSHED_BYTES = 1 << 30
# A damaged length must not make the reader allocate all memory.
_LONGEST_HEADER = 1 << 30


class TensorLocation(NamedTuple):
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


def write_safetensors_and_checksum(
    file_path: Path,
    keys_shapes_and_flat_tensors: Sequence[tuple[str, Sequence[int], torch.Tensor]],
    metadata: dict[str, str],
) -> SizeAndChecksum:
    """Write (key, shape, flat tensor) in this order, and flush them to the disk.

    Returns:
        Size and checksum of the written bytes.
    """
    header = {"__metadata__": metadata} if metadata else {}
    end = 0
    tensor_records: dict[str, object] = dict(header)
    for key, shape, tensor in keys_shapes_and_flat_tensors:
        begin = end
        end = end + tensor.numel() * tensor.element_size()
        tensor_records[key] = {
            "dtype": _safetensors_dtype_name(key, tensor.dtype),
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(tensor_records).encode()
    # The format aligns data to 8 bytes; spaces after the JSON text are allowed.
    text += b" " * (-len(text) % 8)
    header_bytes = struct.pack("<Q", len(text)) + text
    size = 8 + len(text) + end
    with open(file_path, "wb") as file:
        # Summed from memory, so that a later check detects faults of the disk.
        checksum = checksum_of_blocks(
            _write_flush_and_yield_blocks(
                file, header_bytes, [tensor for _, _, tensor in keys_shapes_and_flat_tensors]
            )
        )
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "crc32": checksum}


def _write_flush_and_yield_blocks(
    file: IO[bytes], header_bytes: bytes, flat_tensors: Iterable[torch.Tensor]
) -> Iterator[bytes | memoryview]:
    file.write(header_bytes)
    yield header_bytes
    unflushed_bytes = 0
    for tensor in flat_tensors:
        for block in _byte_blocks(tensor):
            file.write(block)
            # Let the disk start to write, while this block is summed and the next one is copied.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            yield block
            unflushed_bytes = unflushed_bytes + len(block)
            if unflushed_bytes >= _FLUSHED_BYTES:
                file.flush()
                os.fsync(file.fileno())
                unflushed_bytes = 0


def require_storable_in_checkpoint(named_values: Iterable[tuple[str, object]]) -> None:
    """Refuse values that no checkpoint can store.

    Raises:
        InputError: a value is no tensor, or of a type that the files do not have.
    """
    for name, value in named_values:
        value_type = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        if value_type not in _DTYPES:
            raise InputError(
                f"model: {name.removeprefix('model.')} is {value_type}, which a checkpoint cannot store; "
                "keep a complex tensor as torch.view_as_real of it, and other values in code or in "
                "a buffer that is not persistent"
            )


def _safetensors_dtype_name(key: str, dtype: torch.dtype) -> str:
    if dtype not in _DTYPES:
        raise CheckpointError(f"{key} is of {dtype}, which a checkpoint cannot store")
    return _DTYPES[dtype]


def _byte_blocks(flat_tensor: torch.Tensor) -> Iterable[memoryview]:
    if not flat_tensor.numel():
        return
    for piece in flat_tensor.detach().split(_BLOCK_BYTES // flat_tensor.element_size()):
        yield memoryview(piece.cpu().contiguous().view(torch.uint8).numpy())


def read_tensor_locations_and_metadata(
    file_path: Path,
) -> tuple[dict[str, TensorLocation], dict[str, str]]:
    """Return (tensors by key, metadata) of a file.

    Raises:
        CheckpointError: it is no safetensors file.
    """
    try:
        with open(file_path, "rb") as file:
            # The format: 8 bytes of length (little endian), the header as JSON, then the data.
            size = os.fstat(file.fileno()).st_size
            length = struct.unpack("<Q", file.read(8))[0]
            header = json.loads(file.read(length)) if length < min(size, _LONGEST_HEADER) else None
        if not isinstance(header, dict):
            raise ValueError("the header is not a JSON object")
        metadata = header.pop("__metadata__", {})
        return {
            key: _checked_tensor_location_within_file(file_path, 8 + length, size, entry)
            for key, entry in header.items()
        }, metadata
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise CheckpointError(
            f"{file_path} is not a safetensors file, the only supported format: {error}"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{file_path} cannot be read: {error.strerror}") from None


def _checked_tensor_location_within_file(
    file_path: Path, data_offset: int, file_size: int, tensor_record: Json
) -> TensorLocation:
    begin, end = tensor_record["data_offsets"]
    dtype = _DTYPE_BY_NAME[tensor_record["dtype"]]
    shape = tuple(tensor_record["shape"])
    if (
        not 0 <= begin <= end <= file_size - data_offset
        or end - begin != math.prod(shape) * dtype.itemsize
    ):
        raise ValueError(f"a tensor {shape} at {begin} to {end} of {file_size - data_offset} bytes")
    return TensorLocation(file_path, dtype, data_offset + begin, shape)


def read_flat_elements(
    location: TensorLocation, first_element: int, element_count: int
) -> torch.Tensor:
    """Return some elements of a tensor, flat, on the CPU."""
    values = torch.empty(element_count, dtype=location.dtype)
    if element_count:
        with open(location.path, "rb", buffering=0) as file:
            file.seek(location.begin + first_element * location.dtype.itemsize)
            _read_until_target_is_full(file, values.view(torch.uint8).numpy().data, location.path)
    return values


def _read_until_target_is_full(file: Any, target: memoryview, file_path: Path) -> None:
    bytes_read = 0
    while bytes_read < len(target):
        # One call may read less than requested.
        read_count = file.readinto(target[bytes_read:])
        if not read_count:
            raise CheckpointError(f"{file_path} ends too early")
        bytes_read += read_count
