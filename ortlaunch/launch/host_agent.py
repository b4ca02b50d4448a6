"""What runs on each host beside `over_ssh`: starts one command with the variables that it is sent, and ends it again.

Its standard input is its lifeline: a first line says what to run, then come beats and numbers of signals. When it ends,
or is silent for longer than a network may be, the command is ended as by SIGTERM: the other side is gone.
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
from ortlaunch.launch.processes import submit, wait

BEAT = "0"
BEAT_SECONDS = 2.0
_SILENT_SECONDS = 12.0


def main() -> int:
    """Run what is asked for; returns its exit status."""
    line, rest = _line(sys.stdin.fileno(), b"")
    work = json.loads(line)
    os.chdir(work["cwd"])
    job = submit(Request(tuple(work["argv"]), tuple(work["env"].items()), tells_ranks=False))
    job.is_quiet = True
    threading.Thread(target=_listen, args=(rest,), daemon=True).start()
    return wait(job)


def _listen(rest: bytes) -> None:
    """Signal this process as the lines say; its handlers are those of `wait`, of which SIGUSR2's comes last."""
    while signal.getsignal(signal.SIGUSR2) in (signal.SIG_DFL, signal.SIG_IGN):
        time.sleep(0.01)
    while True:
        line, rest = _line(sys.stdin.fileno(), rest)
        if line != BEAT:
            os.kill(os.getpid(), int(line or signal.SIGTERM))
        if not line:
            return


def _line(file: int, begun: bytes) -> tuple[str, bytes]:
    """The next line, and what came after it; an empty one where nothing comes any more."""
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
