"""Size and CRC-32 of files that a resumed run trusts, recorded when their contents are on the disk.

The checksum detects accidents (a cut file, a flipped bit), but no attacks: docs/trust.md. Standard
library only.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

# Bytes a read.
_BLOCK = 1 << 22
# Keys: bytes, crc32.
File = dict[str, int]
# Errors of a file that is absent.
ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


def files_below(folder: Path) -> list[Path]:
    """Return all files in a folder and in the folders below it, in order."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flushed(folder: Path, names: Sequence[str]) -> dict[str, File]:
    """Flush some of the files to the disk; return their sizes and checksums."""
    found = {}
    for name in names:
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
            found[name] = {"bytes": os.fstat(file.fileno()).st_size, "crc32": sum_up(file)}
    return found


def sum_of_blocks(blocks: Iterable[bytes | memoryview]) -> int:
    """Return the CRC-32 of blocks in a row."""
    total = 0
    for block in blocks:
        total = zlib.crc32(block, total)
    return total


def sum_up(file: IO[bytes]) -> int:
    """Return the CRC-32 of an open file, from its position on."""
    return sum_of_blocks(iter(lambda: file.read(_BLOCK), b""))


def sum_of(path: Path) -> int:
    """Return the CRC-32 of a file."""
    with open(path, "rb") as file:
        return sum_up(file)


def difference(path: Path, file: File) -> str:
    """Return how a file differs from what was written; "" if it does not."""
    try:
        with open(path, "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            # The size first: a cut file is found without reading it.
            if size != file["bytes"]:
                return f"{path.name} has {size:,} bytes of {file['bytes']:,}"
            return (
                ""
                if sum_up(opened) == file["crc32"]
                else f"{path.name} differs from the file that was saved"
            )
    except ABSENT as error:
        return f"{path.name}: {error.strerror}"
