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

from ortlaunch.base import machine
from ortlaunch.base.cause import Cause
from ortlaunch.base.errors import escape_control_characters
from ortlaunch.base.process import wait_until_true_or_timeout
from ortlaunch.launch_plan import Plan
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.lost_host import EXIT_STATUS as LOST_STATUS
from ortlaunch.run_folder.lost_host import LOST_HOST_TYPE
from ortlaunch.worker.supervision.end_record import (
    ObservedEnd,
    RankEndRecorder,
    failure_exit_status,
)
from ortlaunch.worker.supervision.rank_process import RankProcess
from ortlaunch.worker.supervision.requests import SIGNAL_REQUESTS
from ortlaunch.worker.supervision.stall_rules import EXIT_STATUS as STALLED
from ortlaunch.worker.supervision.watchdog import Watchdog

_STOPS = tuple(number for number, ask in SIGNAL_REQUESTS.items() if ask.stops)
# mpirun may drop the last output of a rank that has left already.
_FORWARDED_SECONDS = 0.3
# mpirun drops the output of all other ranks once one has left: a secondary failure waits this long
# for the rank with the cause.
_CAUSE_SECONDS = 5.0


def record_end_and_return_status(
    end_recorder: RankEndRecorder,
    child: RankProcess,
    wait_status: int,
    has_finished: bool,
    memory_kills_before: int | None,
    watchdog: Watchdog,
) -> int:
    """Record an end that the rank could not record itself.

    Returns:
        The rank's status; negative for the signal that it died of.
    """
    # A failure in exit handlers, after the end of the work, does not count.
    if has_finished:
        child.delete_stop_file()
        return os.WEXITSTATUS(wait_status) if os.WIFEXITED(wait_status) else 0
    if watchdog.has_ended_rank:
        return _record_stall_or_lost_host(end_recorder, child, watchdog)
    signal_number = os.WTERMSIG(wait_status) if os.WIFSIGNALED(wait_status) else None
    if signal_number and _was_stopped_with_nothing_to_save(child, signal_number):
        return _record_stop_with_nothing_saved(
            end_recorder, child, child.first_signal or signal_number
        )
    exit_code = os.WEXITSTATUS(wait_status)
    description, end = _description_and_fields_of_observed_end(
        end_recorder.run, child, signal_number, exit_code, memory_kills_before
    )
    if not end_recorder.is_written:
        end_recorder.write_record_of_silent_end(child.pid, description, end)
    # A failure recorded before the request to end is a cause of its own.
    elif (
        end.is_secondary
        and end.exit_status != EXIT_SAVED
        and end_recorder.read_record().time > child.signalled_at
    ):
        end_recorder.mark_record_as_secondary()
    _print_failure_under_foreign_launcher_and_mark_it(end_recorder, child)
    return -end.signal if end.signal and end.exit_status != EXIT_SAVED else end.exit_status


def _was_stopped_with_nothing_to_save(child: RankProcess, signal_number: int) -> bool:
    """Return whether a stop ended the rank before its first step or after its last."""
    is_stop_signal = signal_number in _STOPS or (
        child.was_ended_by_us and signal_number == signal.SIGKILL
    )
    # did_others_stop_unsaved() reads every rank's record, so it is the last condition.
    return (
        child.can_save
        and is_stop_signal
        and (not child.was_ended_by_us or child.run_surroundings.did_others_stop_unsaved())
    )


def _description_and_fields_of_observed_end(
    run: RunDir,
    child: RankProcess,
    signal_number: int | None,
    exit_code: int,
    kills_before: int | None,
) -> tuple[str, ObservedEnd]:
    """Return the end that a supervisor saw: its description, and the fields of its record.

    The first case that fits counts, from top to bottom.
    """
    request = child.first_signal
    if signal_number is None:
        return f"left with exit status {exit_code} before the end", ObservedEnd(
            "Exit", failure_exit_status(exit_code), is_secondary=request is not None
        )
    is_killed = signal_number == signal.SIGKILL
    if is_killed and request and child.is_grace_period_over:
        description = _outlived_grace_period_text(child)
        outlived = ObservedEnd(
            "Outlived", 128 + request, request, is_secondary=True, cause=Cause.OUTLIVED
        )
        checkpoints = run.complete_checkpoints()
        if request == signal.SIGINT or not checkpoints:
            return description, outlived
        # A restart continues from the older checkpoint.
        step = checkpoints[-1][0]
        description += f"; steps after {step} are lost, and a restart continues from there"
        return description, outlived._replace(exit_status=EXIT_SAVED)
    if is_killed and request and child.was_ended_by_us:
        return f"was ended with its run, after {_signal_name(request)}", ObservedEnd(
            "Signal", 128 + request, request, is_secondary=True
        )
    killed = ObservedEnd(
        "Signal",
        128 + signal_number,
        signal_number,
        # Nobody here sent that SIGKILL.
        is_secondary=request is not None and not (is_killed and not child.was_ended_by_us),
    )
    description = f"was ended by {_signal_name(signal_number)}"
    return _add_memory_kill(description, killed, child.pid, kills_before)


def _record_stall_or_lost_host(
    end_recorder: RankEndRecorder, child: RankProcess, watchdog: Watchdog
) -> int:
    """Record that the rank was ended because of a stall or a lost host; return its exit status.

    errors/stall.json and lost.json have the details.
    """
    watchdog.write_stacks_and_stall_or_lost_host_record()
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
        end = ObservedEnd(end_type, status, is_secondary=True, cause=cause)
        end_recorder.write_record_of_silent_end(child.pid, f"was ended, for {description}", end)
    _print_failure_under_foreign_launcher_and_mark_it(end_recorder, child)
    return status


def _record_stop_with_nothing_saved(
    end_recorder: RankEndRecorder, child: RankProcess, signal_number: int
) -> int:
    """Record a stop of a rank that had nothing to save; return its exit status.

    It was before its first step or after its last, so it did not listen, and the signal's default
    action ended it.
    """
    code = 128 + signal.SIGINT if signal_number == signal.SIGINT else EXIT_SAVED
    # A listening rank survives the first request.
    stop_detail = (
        "for the second time, before it had saved"
        if child.is_listening
        else "before its first or after its last step: nothing to save"
    )
    description = f"was stopped by {_signal_name(signal_number)} {stop_detail}"
    end = ObservedEnd(
        "Stopped",
        code,
        signal_number,
        cause=Cause.STOPPED,
        detail=description,
        has_traceback=False,
    )
    if not end_recorder.is_written:
        end_recorder.write_record_of_silent_end(child.pid, description, end)
    _print_failure_under_foreign_launcher_and_mark_it(end_recorder, child)
    return code


def _outlived_grace_period_text(child: RankProcess) -> str:
    assert child.first_signal
    grace = f" of {child.grace_seconds:g} s (launch.grace_seconds)" if child.is_listening else ""
    return (
        f"was ended by SIGKILL, because it did not end within its grace period{grace} after "
        f"{_signal_name(child.first_signal)}"
    )


def _signal_name(signal_number: int) -> str:
    return signal.Signals(signal_number).name


def _add_memory_kill(
    description: str, end: ObservedEnd, pid: int, kills_before: int | None
) -> tuple[str, ObservedEnd]:
    """Add to the end that the kernel's out-of-memory killer ended the rank, if it did."""
    if end.signal != signal.SIGKILL:
        return description, end
    line = machine.kernel_memory_kill_message_or_none(pid)
    kills_after = machine.memory_kill_count_of_control_group()
    kills = int(bool(line))
    # Another process of the control group may have been killed: the counter names none.
    if not line and kills_after is not None and kills_before is not None:
        kills = kills_after - kills_before
    if kills <= 0:
        return description, end
    killed_text = f"it ({line})" if line else f"{kills} of its control group meanwhile"
    return (
        f"{description}: the kernel's out-of-memory killer ended {killed_text}",
        end._replace(cause=Cause.OUT_OF_MEMORY, detail=line or "", memory_kills=kills),
    )


def _print_failure_under_foreign_launcher_and_mark_it(
    end_recorder: RankEndRecorder, child: RankProcess
) -> None:
    """Print why this rank failed, under a launcher of the user's own, where nobody else would.

    The rank with the cause prints first.
    """
    run = end_recorder.run
    with contextlib.suppress(OSError):
        record = end_recorder.read_record()
        if Plan.read(run.plan).started_by.is_ours or (
            # Another rank prints the cause, or a launcher ends this one.
            record.secondary
            and wait_until_true_or_timeout(
                lambda: child.first_signal is not None or run.failure_printed.exists(),
                _CAUSE_SECONDS,
            )
        ):
            return
        # Rank 0's own output is on the terminal already.
        is_shown = record.rank == 0 and record.is_seen_by_supervisor_only
        traceback = "" if is_shown else f"{record.traceback}\n"
        print(
            escape_control_characters(f"{traceback}ortlaunch: {record.summary}"),
            file=sys.stderr,
            flush=True,
        )
        time.sleep(_FORWARDED_SECONDS)
        run.failure_printed.touch()
