"""The process that `over_ssh` starts on each host: it starts one command there, and ends it again.

Its standard input keeps it alive. The first line holds the command and its variables, later lines
are heartbeats and numbers of signals. When the input ends, or is silent for longer than a network
may be, the other side is gone, and the command is ended as by SIGTERM.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time

from ortlaunch.launch import LaunchRequest
from ortlaunch.launch.processes import (
    Job,
    end_job_and_its_processes,
    forward_signals_until_job_ends,
    write_files_and_start_job,
)

HEARTBEAT_LINE = "0"
# Seconds between two heartbeats.
HEARTBEAT_SECONDS = 2.0
# Added to the grace in which a launcher ends its ranks.
EXTRA_GRACE_SECONDS = 6.0
# Six heartbeats: a short interruption of the network does not end a run.
_SILENT_SECONDS = 12.0


def run_first_input_command_and_obey_later_signals() -> int:
    """Run the requested command and return its exit status."""
    line, unread_bytes = _read_line_or_empty_and_unread_bytes(sys.stdin.fileno(), b"")
    if not line:
        # The other side ended before it sent the command.
        return 1
    job_message = json.loads(line)
    os.chdir(job_message["cwd"])
    job = write_files_and_start_job(
        LaunchRequest(
            tuple(job_message["argv"]), tuple(job_message["env"].items()), notifies_ranks=False
        )
    )
    # `over_ssh` reports a signal once for all hosts.
    job.is_quiet = True
    threading.Thread(
        target=_signal_self_by_input_lines_and_end_job_at_eof,
        args=(job, job_message["grace_seconds"], unread_bytes),
        daemon=True,
    ).start()
    return forward_signals_until_job_ends(job)


def _signal_self_by_input_lines_and_end_job_at_eof(
    job_to_cancel: Job, grace_seconds: float, unread_bytes: bytes
) -> None:
    """Send this process the signals that the lines name, and SIGTERM when the input ends.

    What has not ended after the grace is killed.
    """
    # The handlers are those of `wait`, which sets SIGUSR2's after those of the ending signals.
    while signal.getsignal(signal.SIGUSR2) in (signal.SIG_DFL, signal.SIG_IGN):
        time.sleep(0.01)
    while True:
        line, unread_bytes = _read_line_or_empty_and_unread_bytes(sys.stdin.fileno(), unread_bytes)
        if line != HEARTBEAT_LINE:
            os.kill(os.getpid(), int(line or signal.SIGTERM))
        if not line:
            # torchrun may wait in C++ for a file that is not written any more, deaf to SIGTERM.
            time.sleep(grace_seconds + EXTRA_GRACE_SECONDS)
            end_job_and_its_processes(job_to_cancel)
            return


def _read_line_or_empty_and_unread_bytes(
    file_descriptor: int, unread_bytes: bytes
) -> tuple[str, bytes]:
    """Return the next line and the bytes after it; an empty line if the input ended or is silent."""
    while b"\n" not in unread_bytes:
        ready, _, _ = select.select([file_descriptor], [], [], _SILENT_SECONDS)
        data = os.read(file_descriptor, 1 << 16) if ready else b""
        if not data:
            return "", b""
        unread_bytes += data
    line, _, bytes_after_line = unread_bytes.partition(b"\n")
    return line.decode(), bytes_after_line


if __name__ == "__main__":
    sys.exit(run_first_input_command_and_obey_later_signals())
