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

from ortlaunch import machine
from ortlaunch.die_with_parent import die_with_parent
from ortlaunch.launch_plan import Plan
from ortlaunch.rank import EXIT_SAVED, JOB_VARIABLE, Rank
from ortlaunch.run_folder import lock
from ortlaunch.run_folder.folder import RunDir, terminal_columns_of_command
from ortlaunch.run_folder.folder import read_error_record as recorded
from ortlaunch.worker.supervision.child import NOTICES, PASSED_ON, Child, launcher_is_gone
from ortlaunch.worker.supervision.failure import Account
from ortlaunch.worker.supervision.lost_host import end_launcher
from ortlaunch.worker.supervision.rank_end import conclude
from ortlaunch.worker.supervision.rank_log import RankLog
from ortlaunch.worker.supervision.requests import DEAF, LISTENING, Requests
from ortlaunch.worker.supervision.terminal import NewOutput, Prefixed, Screen, Stream
from ortlaunch.worker.supervision.watchdog import Watchdog

_FINISHED = b"finished"
# Seconds for C's exit handlers, then an alarm ends the process.
_EXIT_SECONDS = 30
# 1 MiB of a pipe. A rank may print faster than it is copied, and heartbeats are due in between.
_PIECES_A_TURN = 16


def watch(rank: Rank, run: RunDir, live: Callable[[Watchdog], int | None]) -> int:
    """Run `live` as this rank in a child process, and supervise it.

    Returns:
        The rank's exit status. If the rank died of a signal, this process dies of the same signal.
    """
    die_with_parent(signal.SIGTERM, os.getppid())
    plan = Plan.read(run.plan)
    if launcher_is_gone(os.environ, plan.started_by):
        return 128 + signal.SIGTERM
    lock.hold_rank_share(run)
    watchdog = Watchdog(rank, run)
    account = Account(rank, run, watchdog.pulse)
    oom_kills = machine.out_of_memory_kill_count()
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
    finished, status = _relay(child, rank, run, read_ends, watchdog, screen_of(plan, rank.rank))
    code = conclude(account, child, status, finished, oom_kills, watchdog)
    watchdog.leave()
    account.close()
    if plan.started_by.program:
        run.count_ended_rank(rank.rank)
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
    return bool(account.run.complete_checkpoints()) or any(
        not recorded(path)["secondary"] for path in account.run.error_record_paths
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
    return Screen(ends, terminal_columns_of_command()) if rank == 0 else None


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
        RankLog(run.rank_log_path(rank.rank, "out")) as out,
        RankLog(run.rank_log_path(rank.rank, "err")) as err,
        selectors.DefaultSelector() as selector,
    ):
        # The reason of the rank's end goes to its log only: the command, or rank_end.py, prints it.
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


def _end_alike(code: int) -> int:
    """Return a status, or die of the signal that the rank died of."""
    if code < 0:
        # Only the rank's own core dump is of use.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    return abs(code)
