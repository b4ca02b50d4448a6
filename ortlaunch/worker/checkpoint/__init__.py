"""Checkpoints: written completely or not at all, verified by their manifest, found newest first.

saving decides when to write one, transaction writes it, and verify checks
it before it is loaded. snapshot is its content, and restore loads that into an engine of any world
size.
"""

from ortlaunch.worker.checkpoint.restore import load_checkpoint_print_notes_and_return_loop_state
from ortlaunch.worker.checkpoint.save_records import failed_save_count
from ortlaunch.worker.checkpoint.saver import (
    CheckpointSaver,
    SaverInputs,
    remove_old_checkpoints_and_exports,
)
from ortlaunch.worker.checkpoint.start_checkpoint import (
    CompleteCheckpoint,
    print_training_changes_and_refuse_unallowed,
    set_aside_damaged_and_choose_own_or_source_checkpoint,
)
from ortlaunch.worker.checkpoint.transaction import write_checkpoint_of_step
from ortlaunch.worker.checkpoint.verify import (
    newest_checkpoint_seen_by_rank_0,
    rename_damaged_until_newest_intact_or_refuse,
)

__all__ = [
    "CheckpointSaver",
    "CompleteCheckpoint",
    "SaverInputs",
    "failed_save_count",
    "load_checkpoint_print_notes_and_return_loop_state",
    "newest_checkpoint_seen_by_rank_0",
    "print_training_changes_and_refuse_unallowed",
    "remove_old_checkpoints_and_exports",
    "rename_damaged_until_newest_intact_or_refuse",
    "set_aside_damaged_and_choose_own_or_source_checkpoint",
    "write_checkpoint_of_step",
]
