"""The mark of a complete checkpoint: the file COMPLETE, which is written last, and its check.

It holds the checksum of the manifest, which has those of all other files.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ortlaunch.run_folder.file_sums import ABSENT, checksum_of_file
from ortlaunch.run_folder.folder import (
    COMPLETE,
    MANIFEST,
    RunDir,
    write_json_atomically,
    write_text_atomically,
)

# Errors that prove a file missing. Other read errors prove nothing about the file.


def write_manifest_rename_partial_and_mark_complete(
    run: RunDir, completed_steps: int, manifest: dict[str, object]
) -> None:
    """Rename the folder and write its mark, in this order also on the disk."""
    folder = run.checkpoint_folder(completed_steps)
    partial = run.partial_checkpoint_folder(completed_steps)
    write_json_atomically(partial / MANIFEST, manifest)
    # The names in a folder are flushed apart from the files' contents.
    for subfolder in (partial, *(path for path in partial.rglob("*") if path.is_dir())):
        _flush_folder_entries_to_disk(subfolder)
    os.replace(partial, folder)
    write_text_atomically(folder / COMPLETE, f"{checksum_of_file(folder / MANIFEST)}\n")
    _flush_folder_entries_to_disk(folder)
    _flush_folder_entries_to_disk(run.checkpoints)


def _flush_folder_entries_to_disk(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    # Not all file systems support this.
    with contextlib.suppress(OSError):
        os.fsync(handle)
    os.close(handle)


def manifest_damage_or_empty(checkpoint_folder: Path) -> str:
    """Return what is wrong with the mark or the manifest, or ""."""
    try:
        # COMPLETE holds the manifest's checksum, so it also protects the manifest.
        is_intact = (checkpoint_folder / COMPLETE).read_text(encoding="utf-8").strip() == str(
            checksum_of_file(checkpoint_folder / MANIFEST)
        )
    except (*ABSENT, ValueError) as error:
        return f"{MANIFEST} or {COMPLETE} cannot be read: {error}"
    return "" if is_intact else f"{MANIFEST} differs from the file that was saved"
