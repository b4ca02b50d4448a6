"""Protect a checkpoint from pruning while a command reads it and its run continues to train.

The command holds a shared lock on the checkpoint's mark, which the kernel frees with the process.
On a disk without locks nothing is protected. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path

from ortlaunch.run_folder.folder import COMPLETE, RunDir


@contextlib.contextmanager
def lock_chosen_checkpoint_and_yield_step(
    run: RunDir, choose_step: Callable[[], int]
) -> Iterator[int]:
    """Hold the checkpoint of the step that `choose_step` returns, and yield that step.

    If the checkpoint is pruned before it is locked, `choose_step` is called again.
    """
    with contextlib.ExitStack() as stack:
        while True:
            step = choose_step()
            # The mark may be pruned meanwhile, or the disk has no locks.
            with contextlib.suppress(OSError):
                fcntl.flock(
                    stack.enter_context(open(run.checkpoint_folder(step) / COMPLETE, "rb")),
                    fcntl.LOCK_SH,
                )
            # Checked after locking: pruning may have begun between choice and lock.
            if step in dict(run.complete_checkpoints()):
                break
        yield step


def is_checkpoint_locked_by_reader(checkpoint_folder: Path) -> bool:
    """Return whether a command reads this checkpoint."""
    try:
        # Opened for writing, because NFS grants an exclusive lock only on a writable file.
        with open(checkpoint_folder / COMPLETE, "r+b") as mark:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False
