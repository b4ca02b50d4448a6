"""`start.py ortlaunch.worker.alone TASK < REQUEST`: a task in one process on the CPU.

The process ends with the command that started it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from importlib import import_module

from ortlaunch.die_with_parent import die_with_parent
from ortlaunch.errors import OrtlaunchError
from ortlaunch.tasks import TASKS
from ortlaunch.worker.__main__ import expect_no_gpu
from ortlaunch.worker.engine.binding import let_waiting_threads_sleep


def main() -> int:
    """Run a task that needs no plan; return its exit status, or that of its error."""
    die_with_parent(signal.SIGTERM, os.getppid())
    let_waiting_threads_sleep(os.environ)
    # Other libraries import DeepSpeed, which would guess the device and warn.
    os.environ["DS_ACCELERATOR"] = "cpu"
    expect_no_gpu("cpu")
    task = TASKS[sys.argv[1]]
    assert task.request is not None, "the command starts ranks for the other tasks"
    try:
        return import_module(task.module).run(task.request(**json.load(sys.stdin))) or 0
    except OrtlaunchError as error:
        print(f"ortlaunch: {error}", file=sys.stderr)
        return error.exit_status


if __name__ == "__main__":
    sys.exit(main())
