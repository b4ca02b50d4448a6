"""The kernel ends a process together with the one that started it. Standard library only.

Also a program, `python die_with_parent.py PARENT VARIABLE SPACE PROGRAM ARGUMENT...`, which becomes the command of a
launcher: between fork and exec (preexec_fn) only async-signal-safe code is allowed, so that this takes a process image
of its own.
"""

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: int, parent: int) -> None:
    """Have the kernel signal this process when its parent ends.

    Args:
        number: of the signal.
        parent: the process id of the expected parent; where it has ended already, this process ends at once, for the
            kernel does not look back.
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + number)


def main(parent: str, variable: str, space: str, *command: str) -> None:
    """Become the command, which gets SIGTERM when the parent ends and finds its own process id in the variable."""
    die_with_parent(signal.SIGTERM, int(parent))
    # torchrun would die of a notice: what is ignored stays so in what it executes, until that handles it.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.environ[variable] = f"{space} {os.getpid()}"
    os.execv(command[0], command[1:])


if __name__ == "__main__":
    main(*sys.argv[1:])
