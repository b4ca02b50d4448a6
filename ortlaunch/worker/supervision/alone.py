"""A worker process that is no rank: one on the CPU, which a verb of the command starts and which ends with it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from ortlaunch.die_with_parent import die_with_parent
from ortlaunch.errors import OrtlaunchError


def run_alone(work: Callable[[], None]) -> None:
    """Do the work and exit, with the status of its error if there is one."""
    die_with_parent(signal.SIGTERM, os.getppid())
    os.environ["DS_ACCELERATOR"] = "cpu"  # else DeepSpeed, which others import, guesses and warns
    try:
        work()
    except OrtlaunchError as error:
        print(f"ortlaunch: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
