"""One rank's guardian: a small process around the rank that sees how it ends. Standard library only.

It forks before anything heavy is imported, copies the rank's output into its logs, passes signals on, and writes
errors/rank_N.json with the true cause. The rank dies with its guardian, and the guardian with the launcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn

from ortlaunch.errors import OrtlaunchError
from ortlaunch.rank import Rank
from ortlaunch.rundir import RunDir, progress_width, read_json, write_json
from ortlaunch.worker.terminal import Screen, Stream, Taken

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# A rank that loses its peers fails too; these words tell that the cause is elsewhere.
_PEER_IS_GONE = ("Connection closed by peer", "Connection reset by peer", "remote process", "NCCL error", "Broken pipe",
                 "Timed out waiting", "Socket closed", "DistBackendError", "DistNetworkError")  # fmt: skip
_FINISHED = b"finished"
_PR_SET_PDEATHSIG = 1
_EXIT_SECONDS = 30
_FORWARDED_SECONDS = 0.3  # mpirun may drop the last words of a rank that has left already
_CAUSE_SECONDS = 5.0  # and drops those of all others once one rank has left: the echo waits for the cause


def watch(rank: Rank, run: RunDir, live: Callable[[], None]) -> int:
    """Run `live` as this rank in a child process; returns the exit status, or dies of the rank's own signal."""
    _die_with_parent(signal.SIGTERM)
    streams = {name: os.pipe() for name in ("out", "err", "finished")}
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)  # until there is a rank to pass them on to
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        _be_the_rank(rank, run, live, {name: ends[1] for name, ends in streams.items()})
    for _, write_end in streams.values():
        os.close(write_end)
    passed_on = _pass_signals_to(child)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    finished, status = _relay(child, rank, run, {name: ends[0] for name, ends in streams.items()})
    return _conclude(rank, run, child, status, finished, passed_on)


def _be_the_rank(rank: Rank, run: RunDir, live: Callable[[], None], ends: dict[str, int]) -> NoReturn:
    """The child: live, say how it went, leave without finalizers that could hang or change the status."""
    _die_with_parent(signal.SIGKILL)
    os.dup2(ends["out"], 1)
    os.dup2(ends["err"], 2)
    status = 1
    try:
        live()
        os.write(ends["finished"], _FINISHED)
        status = 0
    except BaseException as error:
        status = _record_exception(rank, run, error)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        if status == 0 and "PMI_RANK" in os.environ:
            _sign_off()
        os._exit(status)


def _sign_off() -> None:
    """Run C's exit handlers: in one of them MPICH 5 takes leave of Hydra, which else kills the ranks that still run."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_EXIT_SECONDS)
    ctypes.CDLL(None).exit(0)


def _record_exception(rank: Rank, run: RunDir, error: BaseException) -> int:
    """Write the rank's own account of its end; returns its exit status."""
    now = time.time()
    text = str(error) if isinstance(error, OrtlaunchError) else traceback.format_exc()
    status = _status_of(error)
    secondary = isinstance(error, Exception) and any(word in text for word in _PEER_IS_GONE)
    kind = type(error).__name__
    record = {"type": kind, "message": str(error), "traceback": text, "secondary": secondary, "time": now}
    _write(rank, run, os.getpid(), {"exit_status": status, "signal": None, **record})
    print(text, file=sys.stderr)
    return status


def _status_of(error: BaseException) -> int:
    if isinstance(error, OrtlaunchError):
        return error.exit_status
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code:
        return error.code & 0xFF or 1
    return 1  # also sys.exit(0): a rank that leaves before the end has failed


def _write(rank: Rank, run: RunDir, pid: int, record: dict[str, Any]) -> None:
    host = socket.gethostname()
    how = record["message"] if record["type"] in ("Signal", "Exit") else f"failed with {record['type']}"
    place = f"rank {rank.rank} on host {host} (local rank {rank.local_rank})"
    summary = f"{place} {how}; exit status {record['exit_status']}; log: {run.log(rank.rank, 'err')}"
    where = {"rank": rank.rank, "local_rank": rank.local_rank, "host": host, "pid": pid, "summary": summary}
    with contextlib.suppress(OSError):  # a full disk must not hide the exit status
        write_json(run.error(rank.rank), {**where, **record})


def _relay(child: int, rank: Rank, run: RunDir, ends: dict[str, int]) -> tuple[bool, int]:
    """Copy output until the child is gone; rank 0's is also shown. Returns (finished, wait status)."""
    run.logs.mkdir(parents=True, exist_ok=True)
    said = b""
    with (
        open(run.log(rank.rank, "out"), "ab", buffering=0) as out,
        open(run.log(rank.rank, "err"), "ab", buffering=0) as err,
    ):
        os.utime(run.log(rank.rank, "err"))  # appending nothing would not tell that this rank began
        sinks = {"out": (Stream(), out), "err": (Stream(), err)}
        screen = Screen({"out": 1, "err": 2}, progress_width()) if rank.rank == 0 else None
        with selectors.DefaultSelector() as selector:
            for name, end in ends.items():
                os.set_blocking(end, False)
                selector.register(end, selectors.EVENT_READ, name)
            status: int | None = None
            while status is None:
                ready = selector.select(timeout=0.1)
                ended, found = os.waitpid(child, os.WNOHANG)
                status = found if ended else None
                for key, _ in ready if status is None else [(key, 0) for key in list(selector.get_map().values())]:
                    data = _read(key.fd)
                    if not data:
                        selector.unregister(key.fd) if data == b"" else None
                    elif key.data == "finished":
                        said += data
                    else:
                        _copy(sinks[key.data][0].take(data), key.data, sinks[key.data][1], screen)
        for name, (stream, log) in sinks.items():
            _copy(Taken(stream.rest(), None), name, log, screen)
        screen.close() if screen else None
    return said == _FINISHED, status


def _read(end: int) -> bytes | None:
    """All that is there: b"" at the end of the stream, None when there is nothing now."""
    data = b""
    while True:
        try:
            piece = os.read(end, 1 << 16)
        except BlockingIOError:
            return data or None
        if not piece:
            return data
        data += piece


def _copy(taken: Taken, name: str, log: BinaryIO, screen: Screen | None) -> None:
    log.write(taken.lines)
    if screen is not None:
        screen.show(name, taken.lines)
        screen.draw(taken.live) if taken.live is not None else None


def _pass_signals_to(child: int) -> list[int]:
    received: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        received.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    return received


def _conclude(rank: Rank, run: RunDir, child: int, status: int, finished: bool, passed_on: list[int]) -> int:
    """Account for what the rank could not tell itself, and end as it ended."""
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    code = 128 + number if number else os.WEXITSTATUS(status)
    if finished:  # whatever became of it in exit handlers
        return 0
    left, code = code, code or 1  # os._exit(0) in the middle of training
    if not run.error(rank.rank).exists():
        what = (
            f"was ended by {signal.Signals(number).name}" if number else f"left with exit status {left} before the end"
        )
        record = {"type": "Signal" if number else "Exit", "message": what, "traceback": _last_words(run, rank)}
        asked = number is not None and number in passed_on
        _write(
            rank, run, child, {"exit_status": code, "signal": number, **record, "secondary": asked, "time": time.time()}
        )
    _tell(rank, run, passed_on)
    if number:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
        os.kill(os.getpid(), number)
    return code


def _tell(rank: Rank, run: RunDir, passed_on: list[int]) -> None:
    """Say why this rank failed where nobody else will, under a launcher of the user's own; the cause speaks first."""
    with contextlib.suppress(OSError):
        record = read_json(run.error(rank.rank))
        if read_json(run.plan)["launcher"] != "inside" or (record["secondary"] and _cause_is_told(run, passed_on)):
            return
        said = f"{record['traceback']}\n" if rank.rank else ""  # rank 0's output is on the terminal already
        print(f"{said}ortlaunch: {record['summary']}", file=sys.stderr, flush=True)
        time.sleep(_FORWARDED_SECONDS)
        run.told.touch()


def _cause_is_told(run: RunDir, passed_on: list[int]) -> bool:
    """Wait until another rank has told the cause, or a launcher that knows of it wants this one gone; else False."""
    deadline = time.monotonic() + _CAUSE_SECONDS
    while not (passed_on or run.told.exists()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _last_words(run: RunDir, rank: Rank) -> str:
    """The end of the rank's error log."""
    with contextlib.suppress(OSError):
        lines = run.log(rank.rank, "err").read_text(errors="replace").splitlines()
        return "\n".join(lines[-20:])
    return ""


def _die_with_parent(number: int) -> None:
    """Ask the kernel to signal this process when its parent ends (Linux; elsewhere nothing is asked)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
