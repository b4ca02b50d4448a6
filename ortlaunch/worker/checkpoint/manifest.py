"""A checkpoint's manifest: its step, samples and ranks, with the size and CRC-32 of each file.

transaction.py writes it, and verify.py compares the files with it before a checkpoint is loaded.
"""

from __future__ import annotations

from pathlib import Path

from ortlaunch.run_folder.file_sums import SizeAndChecksum
from ortlaunch.run_folder.folder import MANIFEST, read_json_or_raise_damaged


def build_manifest(
    completed_steps: int,
    sample_count: int,
    rank_count: int,
    record_by_file_name: dict[str, SizeAndChecksum],
) -> dict[str, object]:
    """Return the manifest of a checkpoint.

    Args:
        completed_steps: completed steps.
        sample_count: samples that these steps took.
        rank_count: number of ranks that wrote it.
        record_by_file_name: size and checksum of each file, by its path in the folder.
    """
    return {
        "step": completed_steps,
        "samples": sample_count,
        "ranks": rank_count,
        "files": record_by_file_name,
    }


def samples_trained_until_checkpoint(checkpoint_folder: Path) -> int:
    """Return how many samples the steps up to this checkpoint took, with any batch sizes."""
    sample_count: int = read_json_or_raise_damaged(checkpoint_folder / MANIFEST)["samples"]
    return sample_count
