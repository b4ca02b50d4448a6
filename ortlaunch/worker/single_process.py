"""`start.py ortlaunch.worker.single_process TASK < REQUEST`: a task in one process on the CPU.

The process ends with the command that started it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import traceback
from importlib import import_module

from ortlaunch.base.die_with_parent import request_signal_at_parent_end_or_exit_if_ended
from ortlaunch.base.errors import OrtlaunchError
from ortlaunch.tables.tasks import TASKS
from ortlaunch.worker.__main__ import silence_no_gpu_warning_on_cpu
from ortlaunch.worker.engine.binding import set_openmp_wait_policy_unless_set
from ortlaunch.worker.supervision.user_frames import (
    last_user_source_location_or_none,
    traceback_with_foreign_frames_counted,
)


def set_up_cpu_process_and_run_task_of_stdin_request() -> int:
    """Run a task that needs no plan; return its exit status, or that of its error."""
    request_signal_at_parent_end_or_exit_if_ended(signal.SIGTERM, os.getppid())
    set_openmp_wait_policy_unless_set(os.environ)
    # Other libraries import DeepSpeed, which would guess the device and warn.
    os.environ["DS_ACCELERATOR"] = "cpu"
    silence_no_gpu_warning_on_cpu("cpu")
    task = TASKS[sys.argv[1]]
    assert task.request is not None, "the command starts ranks for the other tasks"
    try:
        status = import_module(task.module).run(task.request(**json.load(sys.stdin))) or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if not is_pipe_reader_gone(sys.stdout.fileno()):
            raise
        # Nobody reads any more, as after `| head`; Python would flush once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OrtlaunchError as error:
        print(f"ortlaunch: {error}", file=sys.stderr)
        return error.exit_status
    except Exception as error:
        # The user's own code may raise anything.
        if last_user_source_location_or_none(error) is None:
            raise
        print(traceback_with_foreign_frames_counted(traceback.format_exc()), file=sys.stderr)
        return 1


def is_pipe_reader_gone(write_end: int) -> bool:
    """Return whether a descriptor is a pipe whose reader has closed it."""
    poller = select.poll()
    poller.register(write_end, 0)
    return any(events & select.POLLERR for _, events in poller.poll(0))


if __name__ == "__main__":
    sys.exit(set_up_cpu_process_and_run_task_of_stdin_request())
