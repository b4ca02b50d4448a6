"""A long sequence of token ids in shards: files of equal size, mapped into memory.

Each shard is sealed with a checksum as soon as it is full. A single checksum of all shards would
take hours at trillions of tokens, and would be lost with the process that computes it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ortlaunch.base.cache import (
    merge_into_checksum_record_and_protect_files,
    reason_checksums_differ_refreshing_times_if_same,
    single_file_checksum_record_path,
)

SHARD = 1 << 28
"""Tokens of a shard: 1 GiB."""

_Ints = NDArray[np.uint32]
_Scalar = TypeVar("_Scalar", bound=np.generic)
# Bytes of a token.
_BYTES = 4


class Tokens(Protocol):
    """Token ids, uint32: one array, or shards that behave as one."""

    def __len__(self) -> int: ...

    def __getitem__(self, token_slice: slice, /) -> _Ints: ...


class _JoinedShards:
    """Shards as one sequence; a slice that spans two shards is a copy."""

    def __init__(self, shards: Sequence[_Ints]) -> None:
        self.shards = shards
        self.size = len(shards[0])

    def __len__(self) -> int:
        return (len(self.shards) - 1) * self.size + len(self.shards[-1])

    def __getitem__(self, token_slice: slice) -> _Ints:
        start, stop, _ = token_slice.indices(len(self))
        stop = max(start, stop)
        shard_indices = range(start // self.size, max(start, stop - 1) // self.size + 1)
        parts = [
            self.shards[shard_index][
                max(0, start - shard_index * self.size) : stop - shard_index * self.size
            ]
            for shard_index in shard_indices
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def map_shards_as_one_sequence(base_path: Path) -> Tokens:
    """Return the tokens of all shards with this base name."""
    shards = [map_file_as_array(path, np.uint32) for path in sorted_shard_paths(base_path)]
    return shards[0] if len(shards) == 1 else _JoinedShards(shards)


def map_file_as_array(file_path: Path, dtype: type[_Scalar]) -> NDArray[_Scalar]:
    """Return a file as an array that is mapped into memory."""
    # A plain array, as slices of np.memmap take five times as long; an empty file cannot be mapped.
    return (
        np.memmap(file_path, dtype=dtype, mode="r").view(np.ndarray)
        if file_path.stat().st_size
        else np.zeros(0, dtype)
    )


def sorted_shard_paths(base_path: Path) -> list[Path]:
    """Return the shard files in order; a corpus has at least one."""
    return sorted(base_path.parent.glob(f"{base_path.name}.*.u32"))


def shard_damage_or_empty(base_path: Path, token_count: int) -> str:
    """Return why the first `token_count` tokens of interrupted shards are not intact, or ""."""
    full_shards, last_shard_tokens = divmod(token_count, SHARD)
    reasons = (
        reason_checksums_differ_refreshing_times_if_same(
            single_file_checksum_record_path(_shard_path(base_path, shard_index))
        )
        for shard_index in range(full_shards)
    )
    last_path = _shard_path(base_path, full_shards)
    # The last shard is not sealed yet; only its size can be checked.
    is_short = (
        last_shard_tokens
        and (last_path.stat().st_size if last_path.exists() else 0) < last_shard_tokens * _BYTES
    )
    return next(
        (reason for reason in reasons if reason),
        f"{last_path}: is shorter than its recorded size" if is_short else "",
    )


class ShardWriter:
    """A writer that appends tokens to shards.

    It keeps the first `tokens` tokens, which `wrong` has found intact, and removes all after them.
    """

    def __init__(self, base: Path, token_count: int) -> None:
        # A rewritten shard is a new file, as another process may have mapped the earlier one.
        self.base = base
        self.shard_index, last_shard_tokens = divmod(token_count, SHARD)
        self.room_left = SHARD - last_shard_tokens
        for path in sorted_shard_paths(base)[self.shard_index + bool(last_shard_tokens) :]:
            path.unlink()
            single_file_checksum_record_path(path).unlink(missing_ok=True)
        self.file: IO[bytes] = self._current_path.open("r+b" if last_shard_tokens else "wb")
        self.file.truncate(last_shard_tokens * _BYTES)
        self.file.seek(0, os.SEEK_END)
        single_file_checksum_record_path(self._current_path).unlink(missing_ok=True)

    @property
    def _current_path(self) -> Path:
        return _shard_path(self.base, self.shard_index)

    def append_tokens_and_checksum_full_shards(self, token_ids: _Ints) -> None:
        """Append tokens, (tokens,) uint32."""
        while len(token_ids) >= self.room_left:
            # NumPy's `tofile` does not report a full disk as such, only the amount written.
            self.file.write(token_ids[: self.room_left].data)
            self.file.close()
            merge_into_checksum_record_and_protect_files(
                single_file_checksum_record_path(self._current_path), [self._current_path]
            )
            token_ids = token_ids[self.room_left :]
            self.room_left = SHARD
            self.shard_index = self.shard_index + 1
            self.file = self._current_path.open("wb")
        self.file.write(token_ids.data)
        self.room_left -= len(token_ids)

    def flush_to_disk(self) -> None:
        """Force all written tokens to the disk."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        """Close the last shard, which may be partly filled or empty."""
        self.file.close()


def _shard_path(base: Path, shard_index: int) -> Path:
    return base.with_name(f"{base.name}.{shard_index:05}.u32")
