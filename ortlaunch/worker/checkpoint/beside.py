"""`python beside.py PARENT COMMAND`: run a shell's command in a session of its own that ends with its parent.

A process of its own, for the kernel tells a death to children alone, and a shell could not pass it on. Imports
nothing of ortlaunch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Exit status of the command, as a shell would give it."""
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    with contextlib.suppress(OSError, AttributeError):  # Linux alone
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        return 143
    status = subprocess.call(["/bin/sh", "-c", sys.argv[2]])
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main())
