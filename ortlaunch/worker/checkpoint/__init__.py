"""Checkpoints: written completely or not at all, verified by their manifest, found newest first.

saving decides when to write one, transaction writes it, manifest describes it, and verify checks
it before it is loaded. snapshot is its content, and restore loads that into an engine of any world
size.
"""

from ortlaunch.worker.checkpoint.choose import (
    CompleteCheckpoint,
    choose_start_checkpoint,
    report_and_check_changes,
)
from ortlaunch.worker.checkpoint.manifest import newest_checkpoint, samples_seen
from ortlaunch.worker.checkpoint.restore import load_checkpoint
from ortlaunch.worker.checkpoint.saves import failed_save_count
from ortlaunch.worker.checkpoint.saving import CheckpointSaver
from ortlaunch.worker.checkpoint.transaction import save_checkpoint
from ortlaunch.worker.checkpoint.verify import agreed_newest_checkpoint, ensure_newest_intact

__all__ = [
    "CheckpointSaver",
    "CompleteCheckpoint",
    "agreed_newest_checkpoint",
    "choose_start_checkpoint",
    "ensure_newest_intact",
    "failed_save_count",
    "load_checkpoint",
    "newest_checkpoint",
    "report_and_check_changes",
    "samples_seen",
    "save_checkpoint",
]
