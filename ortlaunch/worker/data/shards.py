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

    def __getitem__(self, place: slice, /) -> _Ints: ...


class _Joined:
    """Shards as one sequence; a slice that spans two shards is a copy."""

    def __init__(self, shards: Sequence[_Ints]) -> None:
        self.shards = shards
        self.size = len(shards[0])

    def __len__(self) -> int:
        return (len(self.shards) - 1) * self.size + len(self.shards[-1])

    def __getitem__(self, place: slice) -> _Ints:
        start, stop, _ = place.indices(len(self))
        stop = max(start, stop)
        numbers = range(start // self.size, max(start, stop - 1) // self.size + 1)
        parts = [
            self.shards[n][max(0, start - n * self.size) : stop - n * self.size] for n in numbers
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def joined(base: Path) -> Tokens:
    """Return the tokens of all shards with this base name."""
    shards = [mapped(path, np.uint32) for path in shard_paths(base)]
    return shards[0] if len(shards) == 1 else _Joined(shards)


def mapped(path: Path, dtype: type[_Scalar]) -> NDArray[_Scalar]:
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


def wrong(base: Path, tokens: int) -> str:
    """Return why the first `tokens` tokens of interrupted shards are not intact, or ""."""
    full, rest = divmod(tokens, SHARD)
    reasons = (
        reason_seal_is_invalid(single_file_seal_path(_path(base, number))) for number in range(full)
    )
    last = _path(base, full)
    # The last shard is not sealed yet; only its size can be checked.
    short = rest and (last.stat().st_size if last.exists() else 0) < rest * _BYTES
    return next(
        (why for why in reasons if why),
        f"{last}: is shorter than its recorded size" if short else "",
    )


class ShardWriter:
    """A writer that appends tokens to shards.

    It keeps the first `tokens` tokens, which `wrong` has found intact, and removes all after them.
    """

    def __init__(self, base: Path, tokens: int) -> None:
        # A rewritten shard is a new file, as another process may have mapped the earlier one.
        self.base = base
        self.number, rest = divmod(tokens, SHARD)
        self.room = SHARD - rest
        for path in shard_paths(base)[self.number + bool(rest) :]:
            path.unlink()
            single_file_seal_path(path).unlink(missing_ok=True)
        self.file: IO[bytes] = self._path.open("r+b" if rest else "wb")
        self.file.truncate(rest * _BYTES)
        self.file.seek(0, os.SEEK_END)
        single_file_seal_path(self._path).unlink(missing_ok=True)

    @property
    def _path(self) -> Path:
        return _path(self.base, self.number)

    def write(self, ids: _Ints) -> None:
        """Append tokens, (tokens,) uint32."""
        while len(ids) >= self.room:
            # NumPy's `tofile` does not report a full disk as such, only the amount written.
            self.file.write(ids[: self.room].data)
            self.file.close()
            seal_files(single_file_seal_path(self._path), [self._path])
            ids = ids[self.room :]
            self.room = SHARD
            self.number = self.number + 1
            self.file = self._path.open("wb")
        self.file.write(ids.data)
        self.room -= len(ids)

    def sync(self) -> None:
        """Force all written tokens to the disk."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        """Close the last shard, which may be partly filled or empty."""
        self.file.close()


def _path(base: Path, number: int) -> Path:
    return base.with_name(f"{base.name}.{number:05}.u32")
