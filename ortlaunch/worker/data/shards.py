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

from ortlaunch.cache import reason_seal_is_invalid, seal_files, single_file_seal_path

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


def join_shards(base: Path) -> Tokens:
    """Return the tokens of all shards with this base name."""
    shards = [map_file(path, np.uint32) for path in shard_paths(base)]
    return shards[0] if len(shards) == 1 else _JoinedShards(shards)


def map_file(path: Path, dtype: type[_Scalar]) -> NDArray[_Scalar]:
    """Return a file as an array that is mapped into memory."""
    # A plain array, as slices of np.memmap take five times as long; an empty file cannot be mapped.
    return (
        np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)
        if path.stat().st_size
        else np.zeros(0, dtype)
    )


def shard_paths(base: Path) -> list[Path]:
    """Return the shard files in order; a corpus has at least one."""
    return sorted(base.parent.glob(f"{base.name}.*.u32"))


def shard_damage(base_path: Path, token_count: int) -> str:
    """Return why the first `token_count` tokens of interrupted shards are not intact, or ""."""
    full_shards, last_shard_tokens = divmod(token_count, SHARD)
    reasons = (
        reason_seal_is_invalid(single_file_seal_path(_shard_path(base_path, shard_index)))
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
        for path in shard_paths(base)[self.shard_index + bool(last_shard_tokens) :]:
            path.unlink()
            single_file_seal_path(path).unlink(missing_ok=True)
        self.file: IO[bytes] = self._current_path.open("r+b" if last_shard_tokens else "wb")
        self.file.truncate(last_shard_tokens * _BYTES)
        self.file.seek(0, os.SEEK_END)
        single_file_seal_path(self._current_path).unlink(missing_ok=True)

    @property
    def _current_path(self) -> Path:
        return _shard_path(self.base, self.shard_index)

    def append_tokens(self, ids: _Ints) -> None:
        """Append tokens, (tokens,) uint32."""
        while len(ids) >= self.room_left:
            # NumPy's `tofile` does not report a full disk as such, only the amount written.
            self.file.write(ids[: self.room_left].data)
            self.file.close()
            seal_files(single_file_seal_path(self._current_path), [self._current_path])
            ids = ids[self.room_left :]
            self.room_left = SHARD
            self.shard_index = self.shard_index + 1
            self.file = self._current_path.open("wb")
        self.file.write(ids.data)
        self.room_left -= len(ids)

    def flush_to_disk(self) -> None:
        """Force all written tokens to the disk."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        """Close the last shard, which may be partly filled or empty."""
        self.file.close()


def _shard_path(base: Path, shard_index: int) -> Path:
    return base.with_name(f"{base.name}.{shard_index:05}.u32")
