"""Why a rank ended: the exit status and the cause that its supervisor records.

A rank records its own exceptions (failure.py). These are the ends that it cannot record: a signal,
the kernel's out-of-memory killer, a stall, a lost host, and the end of the run. Standard library
only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

from ortlaunch import machine
from ortlaunch.cause import Cause
from ortlaunch.errors import escape_control_characters
from ortlaunch.json_types import Json
from ortlaunch.launch_plan import Plan
from ortlaunch.process import wait_until
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.lost import EXIT_STATUS as LOST_STATUS
from ortlaunch.run_folder.lost import LOST_HOST_TYPE
from ortlaunch.worker.supervision.child import Child
from ortlaunch.worker.supervision.failure import SEEN, Account, of_own_exit
from ortlaunch.worker.supervision.requests import SIGNAL_REQUESTS
from ortlaunch.worker.supervision.stall_rules import EXIT_STATUS as STALLED
from ortlaunch.worker.supervision.watchdog import Watchdog

_STOPS = tuple(number for number, ask in SIGNAL_REQUESTS.items() if ask.stops)
# mpirun may drop the last output of a rank that has left already.
_FORWARDED_SECONDS = 0.3
# mpirun drops the output of all other ranks once one has left: a secondary failure waits this long
# for the rank with the cause.
_CAUSE_SECONDS = 5.0


def conclude(
    account: Account,
    child: Child,
    status: int,
    finished: bool,
    oom_kills: int | None,
    watchdog: Watchdog,
) -> int:
    """Record an end that the rank could not record itself.

    Returns:
        The rank's status; negative for the signal that it died of.
    """
    # A failure in exit handlers, after the end of the work, does not count.
    if finished:
        child.forget_request()
        return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0
    if watchdog.ended_it:
        return _conclude_stall(account, child, watchdog)
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    echo = child.first_signal is not None
    kind = "Signal"
    cause: Json = {}
    by_stop = number in (*_STOPS, *((signal.SIGKILL,) if child.ended_by_us else ()))
    # others_stopped() reads every rank's record, so it is the last condition.
    if (
        number
        and child.saves
        and by_stop
        and (not child.ended_by_us or child.surroundings.others_stopped())
    ):
        return _was_stopped(account, child, child.first_signal or number)
    # Nobody here sent that SIGKILL.
    if number == signal.SIGKILL and not (child.was_killed_late or child.ended_by_us):
        echo = False
    if (
        number == signal.SIGKILL
        and echo
        and child.first_signal
        and child.ended_by_us
        and not child.was_killed_late
    ):
        description = f"was ended with its run, after {_name(child.first_signal)}"
        number = child.first_signal
    elif number == signal.SIGKILL and echo and child.first_signal:
        description = _outlived(child)
        number = child.first_signal
        kind = "Outlived"
        cause = {"cause": Cause.OUTLIVED}
        if number != signal.SIGINT and account.run.complete_checkpoints():
            return _goes_on(account, child, description, number)
    elif number:
        phrase, cause = _memory(child.pid, number, oom_kills)
        description = f"was ended by {_name(number)}{phrase}"
    else:
        description = f"left with exit status {os.WEXITSTATUS(status)} before the end"
    code = 128 + number if number else of_own_exit(os.WEXITSTATUS(status))
    if not account.is_written:
        record = {
            "exit_status": code,
            "signal": number,
            "type": kind if number else "Exit",
            **cause,
        }
        account.of_end(child.pid, description, {**record, "secondary": echo})
    # A failure recorded before the request to end is a cause of its own.
    elif echo and account.read()["time"] > child.signalled_at:
        account.is_an_echo()
    _record_account(account, child)
    return -number if number else code


def _conclude_stall(account: Account, child: Child, watchdog: Watchdog) -> int:
    """Record that the rank was ended because of a stall or a lost host; return its exit status.

    errors/stall.json and lost.json have the details.
    """
    watchdog.record()
    status = STALLED
    kind = "Stall"
    cause = Cause.HANG
    description = "the run stalled"
    if watchdog.lost is not None:
        status = LOST_STATUS
        kind = LOST_HOST_TYPE
        cause = Cause.HOST_LOST
        description = "the run lost a host"
    if not account.is_written:
        record = {
            "exit_status": status,
            "signal": None,
            "type": kind,
            "cause": cause,
            "secondary": True,
        }
        account.of_end(child.pid, f"was ended, for {description}", record)
    _record_account(account, child)
    return status


def _was_stopped(account: Account, child: Child, number: int) -> int:
    """Record a stop of a rank that had nothing to save; return its exit status.

    It was before its first step or after its last, so it did not listen, and the signal's default
    action ended it.
    """
    code = 128 + signal.SIGINT if number == signal.SIGINT else EXIT_SAVED
    where = "before its first or after its last step: nothing to save"
    # A listening rank survives the first request.
    if child.listens:
        where = "for the second time, before it had saved"
    description = f"was stopped by {_name(number)} {where}"
    record = {"exit_status": code, "signal": number, "type": "Stopped", "cause": Cause.STOPPED, "detail": description,
              "secondary": False, "traceback": ""}  # fmt: skip
    if not account.is_written:
        account.of_end(child.pid, description, record)
    _record_account(account, child)
    return code


def _goes_on(account: Account, child: Child, description: str, number: int) -> int:
    """Record an end before the save was complete; return the status that requests a restart.

    An older checkpoint exists, from which a restart continues.
    """
    (step, _), record = (
        account.run.complete_checkpoints()[-1],
        {"exit_status": EXIT_SAVED, "signal": number},
    )
    if not account.is_written:
        description = (
            f"{description}; steps after {step} are lost, and a restart continues from there"
        )
        account.of_end(
            child.pid,
            description,
            {**record, "type": "Outlived", "cause": Cause.OUTLIVED, "secondary": True},
        )
    _record_account(account, child)
    return EXIT_SAVED


def _outlived(child: Child) -> str:
    assert child.first_signal
    grace = f" of {child.grace_seconds:g} s (launch.grace_seconds)" if child.listens else ""
    return (
        f"was ended by SIGKILL, because it did not end within its grace period{grace} after "
        f"{_name(child.first_signal)}"
    )


def _name(number: int) -> str:
    return signal.Signals(number).name


def _memory(pid: int, number: int, before: int | None) -> tuple[str, Json]:
    """Return whether the kernel ended the rank for memory: a phrase, and fields of its record."""
    if number != signal.SIGKILL:
        return "", {}
    line = machine.out_of_memory_message_of_process(pid)
    after = machine.out_of_memory_kill_count()
    # Another process of the control group may have been killed: the counter names none.
    kills = 1 if line else after - before if after is not None and before is not None else 0
    if kills <= 0:
        return "", {}
    killed = f"it ({line})" if line else f"{kills} of its control group meanwhile"
    record = {"cause": Cause.OUT_OF_MEMORY, "detail": line or "", "memory_kills": kills}
    return f": the kernel's out-of-memory killer ended {killed}", record


def _record_account(account: Account, child: Child) -> None:
    """Print why this rank failed, under a launcher of the user's own, where nobody else would.

    The rank with the cause prints first.
    """
    run = account.run
    with contextlib.suppress(OSError):
        record = account.read()
        if Plan.read(run.plan).started_by.is_ours or (
            record["secondary"] and _cause_is_printed(run, child)
        ):
            return
        # Rank 0's own output is on the terminal already.
        shown = record["rank"] == 0 and record["type"] in SEEN
        traceback = "" if shown else f"{record['traceback']}\n"
        print(
            escape_control_characters(f"{traceback}ortlaunch: {record['summary']}"),
            file=sys.stderr,
            flush=True,
        )
        time.sleep(_FORWARDED_SECONDS)
        run.failure_printed.touch()


def _cause_is_printed(run: RunDir, child: Child) -> bool:
    """Return whether another rank prints the cause, or a launcher ends this one, within seconds."""
    return wait_until(
        lambda: child.first_signal is not None or run.failure_printed.exists(), _CAUSE_SECONDS
    )
