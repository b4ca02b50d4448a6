"""Checkpoints: written completely or not at all, verified by their manifest, found newest first.

saving decides when to write one, transaction writes it, manifest describes it, and verify checks
it before it is loaded. snapshot is its content, and restore loads that into an engine of any world
size.
"""

from ortlaunch.worker.checkpoint.choose import CompleteCheckpoint, choose, explain
from ortlaunch.worker.checkpoint.manifest import newest, samples_seen
from ortlaunch.worker.checkpoint.restore import load
from ortlaunch.worker.checkpoint.saves import failures
from ortlaunch.worker.checkpoint.saving import Saving
from ortlaunch.worker.checkpoint.transaction import save
from ortlaunch.worker.checkpoint.verify import newest_of_all, set_aside_damaged

__all__ = [
    "CompleteCheckpoint",
    "Saving",
    "choose",
    "explain",
    "failures",
    "load",
    "newest",
    "newest_of_all",
    "samples_seen",
    "save",
    "set_aside_damaged",
]
