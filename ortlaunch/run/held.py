"""A checkpoint that a command reads while its run trains on: pruning leaves it until that command has ended.

A file in the checkpoint's folder names the process, and goes with the folder. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ortlaunch.process import Process
from ortlaunch.run.folder import RunDir

_FAR_SECONDS = 3600.0  # a process of another host cannot be looked up: its mark counts for so long


@contextlib.contextmanager
def held(run: RunDir, choose: Callable[[], int]) -> Iterator[int]:
    """The step that `choose` returns, whose checkpoint stays meanwhile; chosen again where it was pruned just now."""
    while True:
        step = choose()
        mark = run.checkpoint(step) / f"held_{socket.gethostname()}_{os.getpid()}"
        begun = mark.with_name(f".{mark.name}")
        with contextlib.suppress(OSError):  # another user's run, which this user may only read
            begun.write_text(json.dumps(Process.this()), encoding="utf-8")
            begun.replace(mark)
        if step in dict(run.complete_checkpoints()):
            break
    try:
        yield step
    finally:
        with contextlib.suppress(OSError):
            mark.unlink()


def is_held(folder: Path) -> bool:
    """Whether a living process reads this checkpoint."""
    for mark in folder.glob("held_*"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            process = Process(*json.loads(mark.read_text(encoding="utf-8")))
            if process.lives() if process.is_here else time.time() - mark.stat().st_mtime < _FAR_SECONDS:
                return True
    return False
