"""A checkpoint's manifest: its step, samples and ranks, with the size and CRC-32 of each file.

transaction.py writes it, and verify.py compares the files with it before a checkpoint is loaded.
"""

from __future__ import annotations

from pathlib import Path

from ortlaunch.run_folder.file_sums import SizeAndChecksum
from ortlaunch.run_folder.folder import MANIFEST, RunDir, read_own_json


def manifest_of(
    step: int, samples: int, ranks: int, files: dict[str, SizeAndChecksum]
) -> dict[str, object]:
    """Return the manifest of a checkpoint.

    Args:
        step: completed steps.
        samples: samples that these steps took.
        ranks: number of ranks that wrote it.
        files: size and checksum of each file, by its path in the folder.
    """
    return {"step": step, "samples": samples, "ranks": ranks, "files": files}


def newest(run: RunDir) -> tuple[int, Path] | None:
    """Return (step, folder) of the newest checkpoint that was written completely."""
    found = run.complete_checkpoints()
    return found[-1] if found else None


def samples_seen(folder: Path) -> int:
    """Return how many samples the steps up to this checkpoint took, with any batch sizes."""
    seen: int = read_own_json(folder / MANIFEST)["samples"]
    return seen
