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
from ortlaunch.worker.supervision.failure import (
    SEEN_BY_SUPERVISOR,
    RankEndRecorder,
    rank_exit_status,
)
from ortlaunch.worker.supervision.requests import SIGNAL_REQUESTS
from ortlaunch.worker.supervision.stall_rules import EXIT_STATUS as STALLED
from ortlaunch.worker.supervision.watchdog import Watchdog

_STOPS = tuple(number for number, ask in SIGNAL_REQUESTS.items() if ask.stops)
# mpirun may drop the last output of a rank that has left already.
_FORWARDED_SECONDS = 0.3
# mpirun drops the output of all other ranks once one has left: a secondary failure waits this long
# for the rank with the cause.
_CAUSE_SECONDS = 5.0


def record_rank_end(
    end_recorder: RankEndRecorder,
    child: Child,
    wait_status: int,
    has_finished: bool,
    kills_before: int | None,
    watchdog: Watchdog,
) -> int:
    """Record an end that the rank could not record itself.

    Returns:
        The rank's status; negative for the signal that it died of.
    """
    # A failure in exit handlers, after the end of the work, does not count.
    if has_finished:
        child.delete_stop_mark()
        return os.WEXITSTATUS(wait_status) if os.WIFEXITED(wait_status) else 0
    if watchdog.has_ended_rank:
        return _record_stall(end_recorder, child, watchdog)
    signal_number = os.WTERMSIG(wait_status) if os.WIFSIGNALED(wait_status) else None
    is_secondary = child.first_signal is not None
    end_type = "Signal"
    cause_fields: Json = {}
    is_stop_signal = signal_number in (
        *_STOPS,
        *((signal.SIGKILL,) if child.was_ended_by_us else ()),
    )
    # have_others_stopped() reads every rank's record, so it is the last condition.
    if (
        signal_number
        and child.can_save
        and is_stop_signal
        and (not child.was_ended_by_us or child.run_surroundings.have_others_stopped())
    ):
        return _record_stop(end_recorder, child, child.first_signal or signal_number)
    # Nobody here sent that SIGKILL.
    if signal_number == signal.SIGKILL and not (child.was_killed_late or child.was_ended_by_us):
        is_secondary = False
    if (
        signal_number == signal.SIGKILL
        and is_secondary
        and child.first_signal
        and child.was_ended_by_us
        and not child.was_killed_late
    ):
        description = f"was ended with its run, after {_signal_name(child.first_signal)}"
        signal_number = child.first_signal
    elif signal_number == signal.SIGKILL and is_secondary and child.first_signal:
        description = _outlived_description(child)
        signal_number = child.first_signal
        end_type = "Outlived"
        cause_fields = {"cause": Cause.OUTLIVED}
        if signal_number != signal.SIGINT and end_recorder.run.complete_checkpoints():
            return _record_resumable_end(end_recorder, child, description, signal_number)
    elif signal_number:
        phrase, cause_fields = _memory_kill(child.pid, signal_number, kills_before)
        description = f"was ended by {_signal_name(signal_number)}{phrase}"
    else:
        description = f"left with exit status {os.WEXITSTATUS(wait_status)} before the end"
    code = 128 + signal_number if signal_number else rank_exit_status(os.WEXITSTATUS(wait_status))
    if not end_recorder.is_written:
        record = {
            "exit_status": code,
            "signal": signal_number,
            "type": end_type if signal_number else "Exit",
            **cause_fields,
        }
        end_recorder.record_unrecorded_end(
            child.pid, description, {**record, "secondary": is_secondary}
        )
    # A failure recorded before the request to end is a cause of its own.
    elif is_secondary and end_recorder.read_record()["time"] > child.signalled_at:
        end_recorder.mark_as_secondary()
    _print_failure_if_unseen(end_recorder, child)
    return -signal_number if signal_number else code


def _record_stall(end_recorder: RankEndRecorder, child: Child, watchdog: Watchdog) -> int:
    """Record that the rank was ended because of a stall or a lost host; return its exit status.

    errors/stall.json and lost.json have the details.
    """
    watchdog.record_stall()
    status = STALLED
    end_type = "Stall"
    cause = Cause.HANG
    description = "the run stalled"
    if watchdog.lost_host is not None:
        status = LOST_STATUS
        end_type = LOST_HOST_TYPE
        cause = Cause.HOST_LOST
        description = "the run lost a host"
    if not end_recorder.is_written:
        record = {
            "exit_status": status,
            "signal": None,
            "type": end_type,
            "cause": cause,
            "secondary": True,
        }
        end_recorder.record_unrecorded_end(child.pid, f"was ended, for {description}", record)
    _print_failure_if_unseen(end_recorder, child)
    return status


def _record_stop(end_recorder: RankEndRecorder, child: Child, signal_number: int) -> int:
    """Record a stop of a rank that had nothing to save; return its exit status.

    It was before its first step or after its last, so it did not listen, and the signal's default
    action ended it.
    """
    code = 128 + signal.SIGINT if signal_number == signal.SIGINT else EXIT_SAVED
    stop_detail = "before its first or after its last step: nothing to save"
    # A listening rank survives the first request.
    if child.is_listening:
        stop_detail = "for the second time, before it had saved"
    description = f"was stopped by {_signal_name(signal_number)} {stop_detail}"
    record = {
        "exit_status": code,
        "signal": signal_number,
        "type": "Stopped",
        "cause": Cause.STOPPED,
        "detail": description,
        "secondary": False,
        "traceback": "",
    }
    if not end_recorder.is_written:
        end_recorder.record_unrecorded_end(child.pid, description, record)
    _print_failure_if_unseen(end_recorder, child)
    return code


def _record_resumable_end(
    end_recorder: RankEndRecorder, child: Child, description: str, signal_number: int
) -> int:
    """Record an end before the save was complete; return the status that requests a restart.

    An older checkpoint exists, from which a restart continues.
    """
    (step, _), record = (
        end_recorder.run.complete_checkpoints()[-1],
        {"exit_status": EXIT_SAVED, "signal": signal_number},
    )
    if not end_recorder.is_written:
        description = (
            f"{description}; steps after {step} are lost, and a restart continues from there"
        )
        end_recorder.record_unrecorded_end(
            child.pid,
            description,
            {**record, "type": "Outlived", "cause": Cause.OUTLIVED, "secondary": True},
        )
    _print_failure_if_unseen(end_recorder, child)
    return EXIT_SAVED


def _outlived_description(child: Child) -> str:
    assert child.first_signal
    grace = f" of {child.grace_seconds:g} s (launch.grace_seconds)" if child.is_listening else ""
    return (
        f"was ended by SIGKILL, because it did not end within its grace period{grace} after "
        f"{_signal_name(child.first_signal)}"
    )


def _signal_name(signal_number: int) -> str:
    return signal.Signals(signal_number).name


def _memory_kill(pid: int, signal_number: int, kills_before: int | None) -> tuple[str, Json]:
    """Return whether the kernel ended the rank for memory: a phrase, and fields of its record."""
    if signal_number != signal.SIGKILL:
        return "", {}
    line = machine.out_of_memory_message_of_process(pid)
    kills_after = machine.out_of_memory_kill_count()
    # Another process of the control group may have been killed: the counter names none.
    kills = (
        1
        if line
        else kills_after - kills_before
        if kills_after is not None and kills_before is not None
        else 0
    )
    if kills <= 0:
        return "", {}
    killed_text = f"it ({line})" if line else f"{kills} of its control group meanwhile"
    record = {"cause": Cause.OUT_OF_MEMORY, "detail": line or "", "memory_kills": kills}
    return f": the kernel's out-of-memory killer ended {killed_text}", record


def _print_failure_if_unseen(end_recorder: RankEndRecorder, child: Child) -> None:
    """Print why this rank failed, under a launcher of the user's own, where nobody else would.

    The rank with the cause prints first.
    """
    run = end_recorder.run
    with contextlib.suppress(OSError):
        record = end_recorder.read_record()
        if Plan.read(run.plan).started_by.is_ours or (
            record["secondary"] and _wait_for_printed_cause(run, child)
        ):
            return
        # Rank 0's own output is on the terminal already.
        is_shown = record["rank"] == 0 and record["type"] in SEEN_BY_SUPERVISOR
        traceback = "" if is_shown else f"{record['traceback']}\n"
        print(
            escape_control_characters(f"{traceback}ortlaunch: {record['summary']}"),
            file=sys.stderr,
            flush=True,
        )
        time.sleep(_FORWARDED_SECONDS)
        run.failure_printed.touch()


def _wait_for_printed_cause(run: RunDir, child: Child) -> bool:
    """Return whether another rank prints the cause, or a launcher ends this one, within seconds."""
    return wait_until(
        lambda: child.first_signal is not None or run.failure_printed.exists(), _CAUSE_SECONDS
    )
