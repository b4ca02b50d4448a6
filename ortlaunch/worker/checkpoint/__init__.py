"""Checkpoints: written whole or not at all, read back against their manifest, found newest first.

saving decides when, transaction writes one, manifest is what it says of itself, damage reads it again before it is
taken up; snapshot is what is inside, restore puts it into an engine of any world.
"""

from ortlaunch.worker.checkpoint.choose import CompleteCheckpoint, choose, explain
from ortlaunch.worker.checkpoint.damage import newest_of_all, set_aside_damaged
from ortlaunch.worker.checkpoint.manifest import newest, samples_seen
from ortlaunch.worker.checkpoint.restore import load
from ortlaunch.worker.checkpoint.saves import failures
from ortlaunch.worker.checkpoint.saving import Saving
from ortlaunch.worker.checkpoint.transaction import save

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
