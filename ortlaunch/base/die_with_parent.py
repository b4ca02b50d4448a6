"""Let the kernel end a process together with its parent. Standard library only.

Also a program, `python die_with_parent.py PARENT VARIABLE SPACE PROGRAM ARGUMENT...`, which becomes
the command of a launcher by exec. A preexec_fn is no alternative: between fork and exec only
async-signal-safe code is allowed.
"""

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def request_signal_at_parent_end_or_exit_if_ended(signal_number: int, parent_pid: int) -> None:
    """Have the kernel send a signal to this process when its parent ends.

    Args:
        signal_number: the signal.
        parent_pid: the process id of the expected parent; if it has ended already, this process exits.
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)
    # The kernel sends no signal for a parent that ended before the call.
    if os.getppid() != parent_pid:
        os._exit(128 + signal_number)


def end_with_parent_and_set_pid_variable(
    parent_pid: int, pid_variable_name: str, pid_namespace: str
) -> None:
    """Let this process get SIGTERM when its parent ends, and put its process id into a variable.

    Args:
        parent_pid: the process id of the parent.
        pid_variable_name: the name of the environment variable.
        pid_namespace: the namespace of process ids, which precedes the id in the variable.
    """
    request_signal_at_parent_end_or_exit_if_ended(signal.SIGTERM, parent_pid)
    # Schedulers send these signals as a notice, which would end torchrun. An ignored signal stays
    # ignored after exec until the program handles it.
    for signal_number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signal_number, signal.SIG_IGN)
    os.environ[pid_variable_name] = f"{pid_namespace} {os.getpid()}"


if __name__ == "__main__":
    end_with_parent_and_set_pid_variable(int(sys.argv[1]), *sys.argv[2:4])
    os.execv(sys.argv[4], sys.argv[5:])
