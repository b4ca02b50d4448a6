"""A checkpoint that a command reads while its run trains on: pruning leaves it until that command has ended.

The command holds a shared lock on the checkpoint's mark, which the kernel frees with the process. On a disk without
locks nothing is held. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path

from ortlaunch.run_folder.folder import COMPLETE, RunDir


@contextlib.contextmanager
def held(run: RunDir, choose: Callable[[], int]) -> Iterator[int]:
    """The step that `choose` returns, whose checkpoint stays meanwhile; chosen again where it was pruned just now."""
    with contextlib.ExitStack() as stack:
        while True:
            step = choose()
            with contextlib.suppress(OSError):
                fcntl.flock(
                    stack.enter_context(open(run.checkpoint(step) / COMPLETE, "rb")), fcntl.LOCK_SH
                )
            if step in dict(run.complete_checkpoints()):
                break
        yield step


def is_held(folder: Path) -> bool:
    """Whether a command reads this checkpoint."""
    try:
        with open(
            folder / COMPLETE, "r+b"
        ) as mark:  # NFS locks exclusively only what may be written
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
