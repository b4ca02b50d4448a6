"""Size and CRC-32 of files that a resumed run trusts, recorded when their contents are on the disk.

The checksum detects accidents (a cut file, a flipped bit), but no attacks: docs/concepts/trust.md. Standard
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
SizeAndChecksum = dict[str, int]
# Errors of a file that is absent.
ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


def list_files_below(folder: Path) -> list[Path]:
    """Return all files in a folder and in the folders below it, in order."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flush_and_checksum_files(folder: Path, file_names: Sequence[str]) -> dict[str, SizeAndChecksum]:
    """Flush some of the files to the disk; return their sizes and checksums."""
    sums_by_name = {}
    for name in file_names:
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
            sums_by_name[name] = {
                "bytes": os.fstat(file.fileno()).st_size,
                "crc32": checksum_of_open_file(file),
            }
    return sums_by_name


def checksum_of_blocks(blocks: Iterable[bytes | memoryview]) -> int:
    """Return the CRC-32 of blocks in a row."""
    total = 0
    for block in blocks:
        total = zlib.crc32(block, total)
    return total


def checksum_of_open_file(file: IO[bytes]) -> int:
    """Return the CRC-32 of an open file, from its position on."""
    return checksum_of_blocks(iter(lambda: file.read(_BLOCK), b""))


def checksum_of_file(path: Path) -> int:
    """Return the CRC-32 of a file."""
    with open(path, "rb") as file:
        return checksum_of_open_file(file)


def file_difference_text_or_empty(
    file_path: Path, recorded_size_and_checksum: SizeAndChecksum
) -> str:
    """Return how a file differs from what was written; "" if it does not."""
    try:
        with open(file_path, "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            # The size first: a cut file is found without reading it.
            if size != recorded_size_and_checksum["bytes"]:
                return f"{file_path.name} has {size:,} bytes of {recorded_size_and_checksum['bytes']:,}"
            return (
                ""
                if checksum_of_open_file(opened) == recorded_size_and_checksum["crc32"]
                else f"{file_path.name} differs from the file that was saved"
            )
    except ABSENT as error:
        return f"{file_path.name}: {error.strerror}"
