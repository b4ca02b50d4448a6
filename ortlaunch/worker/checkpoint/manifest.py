"""What a checkpoint's folder says of itself: its manifest (size and CRC-32 of each file), its mark, its samples.

The sum finds accidents (a cut file, a flipped bit), not people: docs/trust.md.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import IO

from ortlaunch.run_folder.folder import MANIFEST, RunDir, read_json

_BLOCK = 1 << 22
File = dict[str, int]  # bytes, crc32


def newest(run: RunDir) -> tuple[int, Path] | None:
    """(step, folder) of the newest checkpoint that was written to its end."""
    found = run.complete_checkpoints()
    return found[-1] if found else None


def sum_up(file: IO[bytes]) -> int:
    total = 0
    while block := file.read(_BLOCK):
        total = zlib.crc32(block, total)
    return total


def sum_of(path: Path) -> int:
    with open(path, "rb") as file:
        return sum_up(file)


def samples_seen(folder: Path) -> int:
    """How many samples the steps up to this checkpoint took, in whatever batches."""
    seen: int = read_json(folder / MANIFEST)["samples"]
    return seen
