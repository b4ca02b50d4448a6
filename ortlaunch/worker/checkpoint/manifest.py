"""The description in a checkpoint's folder: manifest (size and CRC-32 of each file) and samples.

verify.py compares them before a checkpoint is loaded.
The checksum detects accidents (a cut file, a flipped bit), but no attacks: docs/trust.md.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import IO

from ortlaunch.run_folder.folder import MANIFEST, RunDir, read_json

# Bytes a read.
_BLOCK = 1 << 22
# Keys: bytes, crc32.
File = dict[str, int]


def newest(run: RunDir) -> tuple[int, Path] | None:
    """Return (step, folder) of the newest checkpoint that was written completely."""
    found = run.complete_checkpoints()
    return found[-1] if found else None


def sum_up(file: IO[bytes]) -> int:
    """Return the CRC-32 of an open file, from its position on."""
    total = 0
    while block := file.read(_BLOCK):
        total = zlib.crc32(block, total)
    return total


def sum_of(path: Path) -> int:
    """Return the CRC-32 of a file."""
    with open(path, "rb") as file:
        return sum_up(file)


def samples_seen(folder: Path) -> int:
    """Return how many samples the steps up to this checkpoint took, with any batch sizes."""
    seen: int = read_json(folder / MANIFEST)["samples"]
    return seen
