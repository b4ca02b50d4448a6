"""A checkpoint's manifest: its step, samples and ranks, with the size and CRC-32 of each file.

transaction.py writes it, and verify.py compares the files with it before a checkpoint is loaded.
The checksum detects accidents (a cut file, a flipped bit), but no attacks: docs/trust.md.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

from ortlaunch.run_folder.folder import MANIFEST, RunDir, read_json

# Bytes a read.
_BLOCK = 1 << 22
# Keys: bytes, crc32.
File = dict[str, int]


def manifest_of(step: int, samples: int, ranks: int, files: dict[str, File]) -> dict[str, object]:
    """Return the manifest of a checkpoint.

    Args:
        step: completed steps.
        samples: samples that these steps took.
        ranks: number of ranks that wrote it.
        files: size and checksum of each file, by its path in the folder.
    """
    return {"step": step, "samples": samples, "ranks": ranks, "files": files}


def joined(of_ranks: Iterable[str]) -> dict[str, File]:
    """Return the files of all ranks, each rank's given as JSON."""
    return {name: file for files in of_ranks for name, file in json.loads(files).items()}


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


def newest(run: RunDir) -> tuple[int, Path] | None:
    """Return (step, folder) of the newest checkpoint that was written completely."""
    found = run.complete_checkpoints()
    return found[-1] if found else None


def samples_seen(folder: Path) -> int:
    """Return how many samples the steps up to this checkpoint took, with any batch sizes."""
    seen: int = read_json(folder / MANIFEST)["samples"]
    return seen
