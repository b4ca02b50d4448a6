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

from ortlaunch.launch import Request
from ortlaunch.launch.processes import Job, cancel, submit, wait

BEAT = "0"
# Seconds between two heartbeats.
BEAT_SECONDS = 2.0
# Added to the grace in which a launcher ends its ranks.
MORE_SECONDS = 6.0
# Six heartbeats: a short interruption of the network does not end a run.
_SILENT_SECONDS = 12.0


def main() -> int:
    """Run the requested command and return its exit status."""
    line, rest = _line(sys.stdin.fileno(), b"")
    if not line:
        # The other side ended before it sent the command.
        return 1
    work = json.loads(line)
    os.chdir(work["cwd"])
    job = submit(Request(tuple(work["argv"]), tuple(work["env"].items()), notifies_ranks=False))
    # `over_ssh` reports a signal once for all hosts.
    job.is_quiet = True
    threading.Thread(target=_listen, args=(job, work["grace_seconds"], rest), daemon=True).start()
    return wait(job)


def _listen(job: Job, grace_seconds: float, rest: bytes) -> None:
    """Send this process the signals that the lines name, and SIGTERM when the input ends.

    What has not ended after the grace is killed.
    """
    # The handlers are those of `wait`, which sets SIGUSR2's after those of the ending signals.
    while signal.getsignal(signal.SIGUSR2) in (signal.SIG_DFL, signal.SIG_IGN):
        time.sleep(0.01)
    while True:
        line, rest = _line(sys.stdin.fileno(), rest)
        if line != BEAT:
            os.kill(os.getpid(), int(line or signal.SIGTERM))
        if not line:
            # torchrun may wait in C++ for a file that is not written any more, deaf to SIGTERM.
            time.sleep(grace_seconds + MORE_SECONDS)
            cancel(job)
            return


def _line(file: int, begun: bytes) -> tuple[str, bytes]:
    """Return the next line and the bytes after it; an empty line if the input ended or is silent."""
    while b"\n" not in begun:
        ready, _, _ = select.select([file], [], [], _SILENT_SECONDS)
        data = os.read(file, 1 << 16) if ready else b""
        if not data:
            return "", b""
        begun += data
    line, _, rest = begun.partition(b"\n")
    return line.decode(), rest


if __name__ == "__main__":
    sys.exit(main())
