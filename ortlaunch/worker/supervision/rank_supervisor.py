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
import time
from collections.abc import Callable
from typing import NoReturn

from ortlaunch import machine
from ortlaunch.cause import Cause
from ortlaunch.die_with_parent import die_with_parent
from ortlaunch.errors import printable
from ortlaunch.json_types import Json
from ortlaunch.launch_plan import Plan
from ortlaunch.rank import EXIT_SAVED, JOB_VARIABLE, Rank
from ortlaunch.run_folder import lock
from ortlaunch.run_folder.folder import RunDir, progress_width
from ortlaunch.run_folder.folder import account as recorded
from ortlaunch.run_folder.lost import EXIT_STATUS as LOST_STATUS
from ortlaunch.run_folder.lost import LOST
from ortlaunch.worker.supervision.child import NOTICES, PASSED_ON, Child, launcher_is_gone
from ortlaunch.worker.supervision.failure import SEEN, Account, of_own_exit
from ortlaunch.worker.supervision.lost_host import end_launcher
from ortlaunch.worker.supervision.rank_log import RankLog
from ortlaunch.worker.supervision.requests import DEAF, LISTENING, SIGNAL_REQUESTS, Requests
from ortlaunch.worker.supervision.stall_rules import EXIT_STATUS as STALLED
from ortlaunch.worker.supervision.terminal import NewOutput, Prefixed, Screen, Stream
from ortlaunch.worker.supervision.watchdog import Watchdog

_FINISHED = b"finished"
_STOPS = tuple(number for number, ask in SIGNAL_REQUESTS.items() if ask.stops)
# Seconds for C's exit handlers, then an alarm ends the process.
_EXIT_SECONDS = 30
# 1 MiB of a pipe. A rank may print faster than it is copied, and heartbeats are due in between.
_PIECES_A_TURN = 16
# mpirun may drop the last output of a rank that has left already.
_FORWARDED_SECONDS = 0.3
# mpirun drops the output of all other ranks once one has left: a secondary failure waits this long
# for the rank with the cause.
_CAUSE_SECONDS = 5.0


def watch(rank: Rank, run: RunDir, live: Callable[[Watchdog], int | None]) -> int:
    """Run `live` as this rank in a child process, and supervise it.

    Returns:
        The rank's exit status. If the rank died of a signal, this process dies of the same signal.
    """
    die_with_parent(signal.SIGTERM, os.getppid())
    plan = Plan.read(run.plan)
    if launcher_is_gone(os.environ, plan.started_by):
        return 128 + signal.SIGTERM
    lock.share(run)
    watchdog = Watchdog(rank, run)
    account = Account(rank, run, watchdog.pulse)
    oom_kills = machine.oom_kills()
    account.open()
    streams = {name: os.pipe() for name in ("out", "err", "last", "finished")}
    # Blocked until there is a rank to pass them on to.
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    supervisor = os.getpid()
    pid = os.fork()
    if pid == 0:
        _be_the_rank(
            account,
            supervisor,
            functools.partial(live, watchdog),
            watchdog,
            {name: ends[1] for name, ends in streams.items()},
        )
    # The pipes end when the rank does, if no other process holds their write ends.
    for _, write_end in streams.values():
        os.close(write_end)
    child = Child(pid, run, rank.rank, plan.grace_seconds if plan.traits.saves else None)
    child.is_left_alone = not plan.started_by.is_ours
    for number in PASSED_ON:
        signal.signal(number, child.pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    read_ends = {name: ends[0] for name, ends in streams.items()}
    screen = screen_of(plan, rank.rank)
    finished, status = _relay(child, rank, run, read_ends, watchdog, screen)
    code = _conclude(account, child, status, finished, oom_kills, watchdog)
    watchdog.leave()
    account.close()
    if watchdog.is_cut_off and plan.started_by.stays_after_loss:
        end_launcher()
    # The command knows of a stop. Its launcher would treat another status as a failure.
    if finished and plan.started_by.is_ours:
        return 0
    return _end_alike(EXIT_SAVED if code and _is_made_anew(account, watchdog) else code)


def _is_made_anew(account: Account, watchdog: Watchdog) -> bool:
    """Return whether this rank's pod of an indexed Job is to be replaced without being counted.

    That is so if the rank ended because of another fault. That fault is recorded and counted
    elsewhere, or it left no pod, as a lost node, and there is a checkpoint.
    """
    in_pod = (
        os.environ.get(JOB_VARIABLE, "").startswith("kubernetes:")
        and "/job.batch/" in os.environ[JOB_VARIABLE]
    )
    if not in_pod or watchdog.verdict is not None or not account.read()["secondary"]:
        return False
    run = account.run
    return bool(run.complete_checkpoints()) or any(
        not recorded(path)["secondary"] for path in run.error_records
    )


def _be_the_rank(
    account: Account,
    supervisor: int,
    live: Callable[[], int | None],
    watchdog: Watchdog,
    ends: dict[str, int],
) -> NoReturn:
    """In the child: run `live`, record an exception, and exit.

    Finalizers are skipped, because they could hang or change the exit status.
    """
    die_with_parent(signal.SIGKILL, supervisor)
    # mpirun and Ctrl-C signal whole groups. In a group of its own, the rank and all that it starts
    # receive signals through their supervisor alone.
    os.setpgid(0, 0)
    saves = Plan.read(account.run.plan).traits.saves
    # Ignored until the rank listens, or the user's own code handles them.
    for number in (signal.SIGUSR2,) if saves else NOTICES:
        signal.signal(number, signal.SIG_IGN)
    # Some launchers start processes with one of these ignored, which a fork inherits.
    for number in (signal.SIGINT, signal.SIGUSR1) if saves else ():
        signal.signal(number, signal.SIG_DFL)
    Requests.supervisor_fd = ends["finished"]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    os.dup2(ends["out"], 1)
    os.dup2(ends["err"], 2)
    watchdog.listen()
    status = 1
    try:
        code = live() or 0
        os.write(ends["finished"], _FINISHED)
        status = code
    except BaseException as error:
        status = account.of_exception(error, ends["last"])
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        if status == 0 and "PMI_RANK" in os.environ:
            _sign_off()
        os._exit(status)


def _sign_off() -> None:
    """Run C's exit handlers: in one of them MPICH 5 signs off from Hydra.

    Without that, Hydra kills the ranks that still run.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_EXIT_SECONDS)
    ctypes.CDLL(None).exit(0)


def screen_of(plan: Plan, rank: int) -> Screen | None:
    """Return where a rank's output is shown, if it is (`log.ranks`)."""
    ends = {"out": 1, "err": 2}
    if plan.shown == "all":
        return Prefixed(ends, f"{socket.gethostname()} rank {rank}")
    return Screen(ends, progress_width()) if rank == 0 else None


def _relay(
    child: Child,
    rank: Rank,
    run: RunDir,
    ends: dict[str, int],
    watchdog: Watchdog,
    screen: Screen | None,
) -> tuple[bool, int]:
    """Copy output to the rank's logs and the screen until the child has ended.

    Returns:
        Whether the rank finished, and its wait status.
    """
    # All bytes of the "finished" pipe: listening and deaf marks, then _FINISHED.
    said = b""
    with (
        RankLog(run.log(rank.rank, "out")) as out,
        RankLog(run.log(rank.rank, "err")) as err,
        selectors.DefaultSelector() as selector,
    ):
        # The reason of the rank's end goes to its log only: the command, or `_record_account`, prints it.
        sinks = {"out": (Stream(), out), "err": (Stream(), err), "last": (Stream(), err)}
        for name, end in ends.items():
            os.set_blocking(end, False)
            selector.register(end, selectors.EVENT_READ, name)
        status: int | None = None
        while status is None:
            ready = selector.select(timeout=0.1)
            screen.tick() if screen else None
            status = child.poll()
            watchdog.poll(child) if status is None else None
            # After the rank's end, one more read of every pipe gets the rest.
            for key, _ in (
                ready if status is None else [(key, 0) for key in list(selector.get_map().values())]
            ):
                data = _read(key.fd)
                if not data:
                    selector.unregister(key.fd) if data == b"" else None
                elif key.data == "finished":
                    said += data
                    child.hears(said.count(LISTENING) > said.count(DEAF))
                else:
                    _copy(sinks[key.data][0].feed(data), key.data, sinks[key.data][1], screen)
        for name, (stream, log) in sinks.items():
            _copy(NewOutput(stream.rest(), None), name, log, screen)
        screen.close() if screen else None
    return said.endswith(_FINISHED), status


def _read(end: int) -> bytes | None:
    """Return the bytes that have arrived, at most a turn's share.

    The result is b"" at the end of the stream, and None when no data is available now.
    """
    pieces: list[bytes] = []
    with contextlib.suppress(BlockingIOError):
        while len(pieces) < _PIECES_A_TURN and (piece := os.read(end, 1 << 16)):
            pieces.append(piece)
        return b"".join(pieces)
    return b"".join(pieces) or None


def _copy(output: NewOutput, name: str, log: RankLog, screen: Screen | None) -> None:
    log.write(output.lines)
    if screen is not None and name != "last":
        screen.show(name, output.lines)
        screen.draw(output.live) if output.live is not None else None


def _conclude(
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
    memory: tuple[str, Json] = ("", {})
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
        what = f"was ended with its run, after {_name(child.first_signal)}"
        number = child.first_signal
    elif number == signal.SIGKILL and echo and child.first_signal:
        what = _outlived(child)
        number = child.first_signal
        kind = "Outlived"
        memory = ("", {"cause": Cause.OUTLIVED})
        if number != signal.SIGINT and account.run.complete_checkpoints():
            return _goes_on(account, child, what, number)
    elif number:
        memory = _memory(child.pid, number, oom_kills)
        what = f"was ended by {_name(number)}{memory[0]}"
    else:
        what = f"left with exit status {os.WEXITSTATUS(status)} before the end"
    code = 128 + number if number else of_own_exit(os.WEXITSTATUS(status))
    if not account.is_written:
        record = {
            "exit_status": code,
            "signal": number,
            "type": kind if number else "Exit",
            **memory[1],
        }
        account.of_end(child.pid, what, {**record, "secondary": echo})
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
    what = "the run stalled"
    if watchdog.lost is not None:
        status = LOST_STATUS
        kind = LOST
        cause = Cause.HOST_LOST
        what = "the run lost a host"
    if not account.is_written:
        record = {
            "exit_status": status,
            "signal": None,
            "type": kind,
            "cause": cause,
            "secondary": True,
        }
        account.of_end(child.pid, f"was ended, for {what}", record)
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
    what = f"was stopped by {_name(number)} {where}"
    record = {"exit_status": code, "signal": number, "type": "Stopped", "cause": Cause.STOPPED, "detail": what,
              "secondary": False, "traceback": ""}  # fmt: skip
    if not account.is_written:
        account.of_end(child.pid, what, record)
    _record_account(account, child)
    return code


def _goes_on(account: Account, child: Child, what: str, number: int) -> int:
    """Record an end before the save was complete; return the status that requests a restart.

    An older checkpoint exists, from which a restart continues.
    """
    (step, _), record = (
        account.run.complete_checkpoints()[-1],
        {"exit_status": EXIT_SAVED, "signal": number},
    )
    if not account.is_written:
        what = f"{what}; steps after {step} are lost, and a restart continues from there"
        account.of_end(
            child.pid,
            what,
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
    line = machine.memory_kill_in_log(pid)
    after = machine.oom_kills()
    # Another process of the control group may have been killed: the counter names none.
    kills = 1 if line else after - before if after is not None and before is not None else 0
    if kills <= 0:
        return "", {}
    said = f"it ({line})" if line else f"{kills} of its control group meanwhile"
    record = {"cause": Cause.OUT_OF_MEMORY, "detail": line or "", "memory_kills": kills}
    return f": the kernel's out-of-memory killer ended {said}", record


def _end_alike(code: int) -> int:
    """Return a status, or die of the signal that the rank died of."""
    if code < 0:
        # Only the rank's own core dump is of use.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    return abs(code)


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
        said = "" if shown else f"{record['traceback']}\n"
        print(printable(f"{said}ortlaunch: {record['summary']}"), file=sys.stderr, flush=True)
        time.sleep(_FORWARDED_SECONDS)
        run.failure_printed.touch()


def _cause_is_printed(run: RunDir, child: Child) -> bool:
    """Return whether another rank prints the cause, or a launcher ends this one, within seconds."""
    deadline = time.monotonic() + _CAUSE_SECONDS
    while child.first_signal is None and not run.failure_printed.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
