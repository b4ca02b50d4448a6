"""One rank's supervisor: a small process that starts the rank and records its end.

It forks before anything heavy is imported, copies the rank's output into its logs, passes signals
on, and ensures that errors/rank_N.json has the true cause. The rank dies with its supervisor, and
the supervisor with the launcher. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import resource
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from typing import NoReturn

from ortlaunch.base import machine
from ortlaunch.base.die_with_parent import request_signal_at_parent_end_or_exit_if_ended
from ortlaunch.launch_plan import Plan
from ortlaunch.rank import EXIT_SAVED, JOB_VARIABLE, Rank
from ortlaunch.run_folder import lock
from ortlaunch.run_folder.error_record import read_error_records
from ortlaunch.run_folder.folder import RunDir, terminal_columns_of_command
from ortlaunch.worker.supervision.end_record import RankEndRecorder
from ortlaunch.worker.supervision.lost_host import terminate_then_kill_launcher
from ortlaunch.worker.supervision.rank_end import record_end_and_return_status
from ortlaunch.worker.supervision.rank_log import RankLog
from ortlaunch.worker.supervision.rank_process import (
    NOTICES,
    PASSED_ON,
    RankProcess,
    was_launcher_gone_at_start,
)
from ortlaunch.worker.supervision.requests import DEAF, LISTENING, RankRequests
from ortlaunch.worker.supervision.terminal import (
    LinesAndLiveLine,
    OutputStream,
    PrefixedScreen,
    Screen,
)
from ortlaunch.worker.supervision.watchdog import Watchdog

_FINISHED_MARK = b"finished"
# Seconds for C's exit handlers, then an alarm ends the process.
_EXIT_SECONDS = 30
# 1 MiB of a pipe. A rank may print faster than it is copied, and heartbeats are due in between.
_PIECES_A_TURN = 16


def fork_and_supervise_rank_then_end_alike(
    rank: Rank, run: RunDir, run_rank: Callable[[Watchdog], int | None]
) -> int:
    """Run `join_ranks_and_run_task` as this rank in a child process, and supervise it.

    Returns:
        The rank's exit status. If the rank died of a signal, this process dies of the same signal.
    """
    request_signal_at_parent_end_or_exit_if_ended(signal.SIGTERM, os.getppid())
    plan = Plan.read(run.plan)
    if was_launcher_gone_at_start(os.environ, plan.started_by):
        return 128 + signal.SIGTERM
    lock.hold_shared_run_lock_until_exit(run)
    watchdog = Watchdog(rank, run)
    end_recorder = RankEndRecorder(rank, run, watchdog.shared_progress)
    oom_kills = machine.memory_kill_count_of_control_group()
    end_recorder.reserve_disk_space()
    pipe_by_name = {name: os.pipe() for name in ("out", "err", "last", "finished")}
    # Blocked until there is a rank to pass them on to.
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    supervisor = os.getpid()
    pid = os.fork()
    if pid == 0:
        _run_rank_and_exit(
            end_recorder,
            supervisor,
            functools.partial(run_rank, watchdog),
            watchdog,
            {name: ends[1] for name, ends in pipe_by_name.items()},
        )
    # The pipes end when the rank does, if no other process holds their write ends.
    for _, write_end in pipe_by_name.values():
        os.close(write_end)
    child = RankProcess(pid, run, rank.rank, plan.grace_seconds if plan.traits.saves else None)
    child.must_watch_other_ranks = not plan.started_by.is_ours
    for signal_number in PASSED_ON:
        signal.signal(signal_number, child.handle_or_pass_on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    read_ends = {name: ends[0] for name, ends in pipe_by_name.items()}
    has_finished, status = _copy_output_and_return_has_finished_and_status(
        child, rank, run, read_ends, watchdog, create_screen_if_rank_is_shown(plan, rank.rank)
    )
    code = record_end_and_return_status(
        end_recorder, child, status, has_finished, oom_kills, watchdog
    )
    watchdog.exchange.announce_rank_end()
    end_recorder.release_disk_space()
    if plan.started_by.program:
        run.count_ended_rank(rank.rank)
    if watchdog.is_cut_off and plan.started_by.stays_after_loss:
        terminate_then_kill_launcher()
    # The command knows of a stop. Its launcher would treat another status as a failure.
    if has_finished and plan.started_by.is_ours:
        return 0
    return _return_status_or_die_of_signal(
        EXIT_SAVED if code and _is_pod_replaced_uncounted(end_recorder, watchdog) else code
    )


def _is_pod_replaced_uncounted(end_recorder: RankEndRecorder, watchdog: Watchdog) -> bool:
    """Return whether this rank's pod of an indexed Job is to be replaced without being counted.

    That is so if the rank ended because of another fault. That fault is recorded and counted
    elsewhere, or it left no pod, as a lost node, and there is a checkpoint.
    """
    in_pod = (
        os.environ.get(JOB_VARIABLE, "").startswith("kubernetes:")
        and "/job.batch/" in os.environ[JOB_VARIABLE]
    )
    return (
        in_pod
        and watchdog.verdict is None
        and end_recorder.read_record().secondary
        and (
            bool(end_recorder.run.complete_checkpoints())
            or any(not record.secondary for record in read_error_records(end_recorder.run))
        )
    )


def _run_rank_and_exit(
    end_recorder: RankEndRecorder,
    supervisor_pid: int,
    run_rank: Callable[[], int | None],
    watchdog: Watchdog,
    write_ends: dict[str, int],
) -> NoReturn:
    """In the child: run `join_ranks_and_run_task`, record an exception, and exit.

    Finalizers are skipped, because they could hang or change the exit status.
    """
    request_signal_at_parent_end_or_exit_if_ended(signal.SIGKILL, supervisor_pid)
    # mpirun and Ctrl-C signal whole groups. In a group of its own, the rank and all that it starts
    # receive signals through their supervisor alone.
    os.setpgid(0, 0)
    can_save = Plan.read(end_recorder.run.plan).traits.saves
    # Ignored until the rank listens, or the user's own code handles them.
    for signal_number in (signal.SIGUSR2,) if can_save else NOTICES:
        signal.signal(signal_number, signal.SIG_IGN)
    # Some launchers start processes with one of these ignored, which a fork inherits.
    if can_save:
        for signal_number in (signal.SIGINT, signal.SIGUSR1):
            signal.signal(signal_number, signal.SIG_DFL)
    RankRequests.supervisor_fd = write_ends["finished"]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    os.dup2(write_ends["out"], 1)
    os.dup2(write_ends["err"], 2)
    watchdog.register_stack_dumps_on_sigquit_and_crash()
    status = 1
    try:
        code = run_rank() or 0
        os.write(write_ends["finished"], _FINISHED_MARK)
        status = code
    except BaseException as error:
        status = end_recorder.write_exception_record_and_log(error, write_ends["last"])
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        if status == 0 and "PMI_RANK" in os.environ:
            _exit_through_c_handlers()
        os._exit(status)


def _exit_through_c_handlers() -> None:
    """Run C's exit handlers: in one of them MPICH 5 signs off from Hydra.

    Without that, Hydra kills the ranks that still run.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_EXIT_SECONDS)
    ctypes.CDLL(None).exit(0)


def create_screen_if_rank_is_shown(plan: Plan, rank: int) -> Screen | None:
    """Return where a rank's output is shown, if it is (`log.ranks`)."""
    descriptors = {"out": 1, "err": 2}
    if plan.shown == "all":
        return PrefixedScreen(descriptors, f"{socket.gethostname()} rank {rank}")
    return Screen(descriptors, terminal_columns_of_command()) if rank == 0 else None


def _copy_output_and_return_has_finished_and_status(
    child: RankProcess,
    rank: Rank,
    run: RunDir,
    read_ends: dict[str, int],
    watchdog: Watchdog,
    screen: Screen | None,
) -> tuple[bool, int]:
    """Copy output to the rank's logs and the screen until the child has ended.

    Returns:
        Whether the rank finished, and its wait status.
    """
    # All bytes of the "finished" pipe: listening and deaf marks, then _FINISHED.
    finished_bytes = b""
    with (
        RankLog(run.rank_log_path(rank.rank, "out")) as out,
        RankLog(run.rank_log_path(rank.rank, "err")) as err,
        selectors.DefaultSelector() as selector,
    ):
        # The reason of the rank's end goes to its log only: the command, or rank_end.py, prints it.
        sinks = {
            "out": (OutputStream(), out),
            "err": (OutputStream(), err),
            "last": (OutputStream(), err),
        }
        for name, end in read_ends.items():
            os.set_blocking(end, False)
            selector.register(end, selectors.EVENT_READ, name)
        status: int | None = None
        while status is None:
            ready = selector.select(timeout=0.1)
            if screen:
                screen.update_waited_seconds_on_live_line()
            status = child.poll_wait_status_and_enforce_end()
            if status is None:
                watchdog.exchange_heartbeats_and_end_stalled_rank(child)
            # After the rank's end, one more read of every pipe gets the rest.
            for key, _ in (
                ready if status is None else [(key, 0) for key in list(selector.get_map().values())]
            ):
                data = _read_available_bytes_or_none(key.fd)
                if not data:
                    if data == b"":
                        selector.unregister(key.fd)
                elif key.data == "finished":
                    finished_bytes += data
                    child.set_listening_and_resend_request(
                        finished_bytes.count(LISTENING) > finished_bytes.count(DEAF)
                    )
                else:
                    _copy_output_to_log_and_screen(
                        sinks[key.data][0].add_bytes_and_take_complete_and_live_lines(data),
                        key.data,
                        sinks[key.data][1],
                        screen,
                    )
        for name, (stream, log) in sinks.items():
            _copy_output_to_log_and_screen(
                LinesAndLiveLine(stream.take_unfinished_line(), None), name, log, screen
            )
        if screen:
            screen.erase_live_line()
    return finished_bytes.endswith(_FINISHED_MARK), status


def _read_available_bytes_or_none(read_end: int) -> bytes | None:
    """Return the bytes that have arrived, at most a turn's share.

    The result is b"" at the end of the stream, and None when no data is available now.
    """
    pieces: list[bytes] = []
    with contextlib.suppress(BlockingIOError):
        while len(pieces) < _PIECES_A_TURN and (piece := os.read(read_end, 1 << 16)):
            pieces.append(piece)
        return b"".join(pieces)
    return b"".join(pieces) or None


def _copy_output_to_log_and_screen(
    output: LinesAndLiveLine, stream_name: str, log: RankLog, screen: Screen | None
) -> None:
    log.append_bytes_disk_accepts(output.lines)
    if screen is not None and stream_name != "last":
        screen.print_lines(stream_name, output.lines)
        if output.live is not None:
            screen.draw_live_line_on_terminal(output.live)


def _return_status_or_die_of_signal(exit_code: int) -> int:
    if exit_code < 0:
        # Only the rank's own core dump is of use.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -exit_code != signal.SIGKILL:
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    return abs(exit_code)
