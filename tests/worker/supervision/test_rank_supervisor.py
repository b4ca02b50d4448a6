"""How a rank's supervisor detects, records and passes on each end; without torch or a launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ortlaunch.base.process import process_space
from ortlaunch.rank import LAUNCHER_VARIABLE
from ortlaunch.run_folder.folder import RunDir, write_json_atomically, write_text_atomically
from ortlaunch.worker.supervision import rank_supervisor
from ortlaunch.worker.supervision.rank_process import RankProcess
from tests.worker.guarded import guarded, write_plan


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """The folder of a run that ortlaunch's own launcher started."""
    run = RunDir(tmp_path / "run")
    write_plan(run, "mpi")
    return run


IGNORE = "signal.signal(15, signal.SIG_IGN)"
LISTENS = (
    "from ortlaunch.worker.supervision.requests import RankRequests; "
    "RankRequests().handle_signals_as_requests_and_tell_supervisor(); "
    "time.sleep(0.3)"
)
# Another rank has recorded its failure.
FAILED = (
    "other = RunDir(sys.argv[2]); other.append_rank_and_return_earlier_error_count(); "
    "open(other.rank_error_path(0), 'w').close()"
)
EXITS = "signal.signal(15, lambda *_: sys.exit(3))"
# Code of the rank: (status of the supervisor, and of the record: exit status, type, secondary,
# words of its summary). Signals: 2 INT, 9 KILL, 10 USR1, 11 SEGV, 12 USR2, 15 TERM, 19 STOP.
ENDS = {
    "raise ValueError('planted')": (1, 1, "ValueError", False, "failed with ValueError"),
    "raise RuntimeError('x: Connection closed by peer')": (
        1,
        1,
        "RuntimeError",
        True,
        "failed with RuntimeError",
    ),
    "raise EngineError('no such operator')": (
        1,
        1,
        "EngineError",
        False,
        "failed with EngineError",
    ),
    "raise InputError('wrong')": (2, 2, "InputError", False, "failed with InputError"),
    "raise KeyboardInterrupt": (1, 1, "KeyboardInterrupt", False, "failed with KeyboardInterrupt"),
    "sys.exit(7)": (7, 7, "SystemExit", False, "failed with SystemExit; exit status 7"),
    "sys.exit(0)": (1, 1, "SystemExit", False, "failed with SystemExit; exit status 1"),
    # Statuses are cut to 8 bits: 256 becomes 0, and 341 becomes 85.
    "sys.exit(256)": (1, 1, "SystemExit", False, "exit status 1"),
    "sys.exit('words')": (1, 1, "SystemExit", False, "exit status 1"),
    "os._exit(5)": (5, 5, "Exit", False, "left with exit status 5 before the end; exit status 5"),
    "os._exit(0)": (1, 1, "Exit", False, "left with exit status 0 before the end; exit status 1"),
    # 85 is reserved for a run that has saved.
    "os._exit(85)": (1, 1, "Exit", False, "left with exit status 85 before the end; exit status 1"),
    "sys.exit(85)": (1, 1, "SystemExit", False, "failed with SystemExit; exit status 1"),
    "sys.exit(341)": (1, 1, "SystemExit", False, "failed with SystemExit; exit status 1"),
    "os.kill(os.getpid(), 9)": (-9, 137, "Signal", False, "was ended by SIGKILL; exit status 137"),
    "os.kill(os.getpid(), 11)": (
        -11,
        139,
        "Signal",
        False,
        "was ended by SIGSEGV; exit status 139",
    ),
    # A requested stop where nothing is to be saved; 130 after Ctrl-C.
    "os.kill(os.getppid(), 15); time.sleep(9)": (
        85,
        85,
        "Stopped",
        False,
        "was stopped by SIGTERM before its first",
    ),
    "os.kill(os.getppid(), 10); time.sleep(9)": (
        85,
        85,
        "Stopped",
        False,
        "was stopped by SIGUSR1 before its first",
    ),
    "os.kill(os.getppid(), 2); time.sleep(9)": (
        130,
        130,
        "Stopped",
        False,
        "was stopped by SIGINT before its first",
    ),
    "os.kill(os.getpid(), 15)": (
        85,
        85,
        "Stopped",
        False,
        "was stopped by SIGTERM before its first or after its last step",
    ),
    "os.killpg(os.getpid(), 2)": (
        130,
        130,
        "Stopped",
        False,
        "was stopped by SIGINT before its first or after its last step",
    ),
    "os.kill(os.getppid(), 15); os.kill(os.getpid(), 19); time.sleep(9)": (
        85,
        85,
        "Stopped",
        False,
        "SIGTERM",
    ),
    # Another rank has failed: this one must end, and a listening rank has nothing to wait for.
    f"{FAILED}; os.kill(os.getppid(), 15); time.sleep(9)": (
        -15,
        143,
        "Signal",
        True,
        "was ended by SIGTERM; exit",
    ),
    f"{FAILED}; {LISTENS}; os.kill(os.getppid(), 15); time.sleep(9)": (
        -15,
        143,
        "Signal",
        True,
        "was ended with its run, after SIGTERM; exit status 143",
    ),
    f"{LISTENS}; os.kill(os.getppid(), 15); time.sleep(0.1); {FAILED}; time.sleep(9)": (
        -15,
        143,
        "Signal",
        True,
        "was ended with its run, after SIGTERM; exit status 143",
    ),
    f"{LISTENS}; os.kill(os.getppid(), 15); time.sleep(9)\ntime.sleep(9)": (
        -15,
        143,
        "Outlived",
        True,
        "was ended by SIGKILL, because it did not end within its grace period of 2 s "
        "(launch.grace_seconds) after SIGTERM; exit status 143",
    ),
    f"{IGNORE}; os.kill(os.getppid(), 15); time.sleep(9)": (
        -15,
        143,
        "Outlived",
        True,
        "was ended by SIGKILL, because it did not end within its grace period after SIGTERM; "
        "exit status 143",
    ),
    f"{LISTENS}; os.kill(os.getpid(), 2); os.kill(os.getpid(), 2); time.sleep(9)": (
        130,
        130,
        "Stopped",
        False,
        "was stopped by SIGINT for the second time, before it had saved; exit status 130",
    ),
    f"{EXITS}; os.kill(os.getppid(), 15); time.sleep(9)": (
        3,
        3,
        "SystemExit",
        True,
        "failed with SystemExit",
    ),
    "signal.signal(12, signal.SIG_DFL); os.kill(os.getppid(), 12); time.sleep(9)": (
        -12,
        140,
        "Signal",
        False,
        "was ended by SIGUSR2; exit status 140",
    ),
}


# Code of the rank: cause in the record, and the line that shows it.
CAUSES = {
    "raise ValueError('planted')": ("raised", "ValueError: planted"),
    "raise InputError('wrong')": ("bad-input", "wrong"),
    "from ortlaunch.base.errors import FileError; raise FileError('c: Permission denied; X names another', 2)": (
        "bad-input", "c: Permission denied; X names another"),
    "raise RuntimeError('CUDA out of memory')": ("out-of-memory", "RuntimeError: CUDA out of memory"),
    "sys.exit(7)": ("left-early", "7"),
    "os._exit(5)": ("left-early", ""),
    "os.kill(os.getpid(), 9)": ("killed", ""),
    "print('terminate called: x', file=sys.stderr, flush=True); os.kill(os.getpid(), 6)":
        ("crash", "terminate called: x; called by <module> at <string>:1"),
    "os.kill(os.getpid(), 15)": (
        "stopped", "was stopped by SIGTERM before its first or after its last step: nothing to save"),
}  # fmt: skip


@pytest.mark.parametrize("life", CAUSES)
def test_the_cause_of_an_end(life: str, run: RunDir) -> None:
    """The cause of an end is recorded as data."""
    record = guarded(run, life).record
    assert record is not None
    assert (record["cause"], record["detail"]) == CAUSES[life]


@pytest.mark.parametrize("life", ENDS)
def test_how_a_rank_ends(life: str, run: RunDir) -> None:
    """The supervisor ends as the rank did, and the record has its status, type and `secondary`."""
    status, recorded, kind, secondary, words = ENDS[life]
    ended = guarded(run, life)
    assert ended.status == status
    assert ended.record is not None
    assert (ended.record["exit_status"], ended.record["type"]) == (recorded, kind)
    assert ended.record["secondary"] is secondary
    assert (ended.record["rank"], ended.record["local_rank"], ended.record["host"]) == (
        1,
        1,
        os.uname().nodename,
    )
    assert ended.record["summary"].startswith(
        f"rank 1 on host {os.uname().nodename} (local rank 1) "
    )
    assert ended.record["summary"].endswith(f"; log: {run.rank_log_path(1, 'err')}")
    assert words in ended.record["summary"]


def test_a_save_that_outlives_its_grace_is_run_again(run: RunDir) -> None:
    """A save that outlives its grace period ends with 85, so that a queue starts the run again."""
    write_text_atomically(run.checkpoint_folder(4) / "COMPLETE", "")
    for number, status in ((signal.SIGTERM, 85), (signal.SIGINT, 130)):
        run.rank_error_path(1).unlink(missing_ok=True)
        ended = guarded(
            run, f"{LISTENS}; os.kill(os.getppid(), {number:d}); time.sleep(9)\ntime.sleep(9)"
        )
        assert ended.record is not None
        # SIGINT is no request for a restart; a process that it ends has status -2.
        assert (abs(ended.status), ended.record["exit_status"]) == (
            status if status == 85 else 2,
            status,
        )
        assert ("; steps after 4 are lost" in ended.record["summary"]) == (status == 85)


def test_a_signal_just_before_the_rank_listens(run: RunDir) -> None:
    """A signal from just before the rank listens is sent again, with the whole grace period."""
    listens = (
        "from ortlaunch.worker.supervision.requests import RankRequests; heard = RankRequests(); "
        "heard.handle_signals_as_requests_and_tell_supervisor()"
    )
    life = (
        f"{IGNORE}; os.kill(os.getppid(), 15); time.sleep(0.1); {listens}; time.sleep(0.6); "
        "assert heard.requested"
    )
    ended = guarded(run, life)
    assert (ended.status, ended.record) == (0, None)


def test_a_rank_that_prints_without_end_is_read_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Much output of a rank is read in turns, with heartbeats and stops in between."""
    pieces = iter([b"x" * 65536] * 1000)
    monkeypatch.setattr(rank_supervisor.os, "read", lambda *_: next(pieces))
    # 16 pieces of 64 KiB: the size of a pipe.
    assert rank_supervisor._read_available_bytes_or_none(0) == b"x" * 65536 * 16
    monkeypatch.setattr(rank_supervisor.os, "read", lambda *_: b"")
    assert rank_supervisor._read_available_bytes_or_none(0) == b""


# Another rank has recorded a stop.
STOPPED = (
    "other = RunDir(sys.argv[2]); other.append_rank_and_return_earlier_error_count(); "
    "write_json_atomically(other.rank_error_path(0), {'cause': 'stopped', 'secondary': False})"
)


def test_a_rank_that_was_stopped_is_no_echo_of_its_peers(run: RunDir) -> None:
    """A stopped rank stays a stop, though another rank has recorded its loss in the meantime."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        time.sleep(9)
        os._exit(0)
    child = RankProcess(pid, run, 1, 60.0)
    child.handle_or_pass_on_signal(signal.SIGUSR1)
    # The rank is dead, and its supervisor has not been notified yet.
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    write_json_atomically(run.rank_error_path(0), {"type": "RuntimeError", "secondary": True})
    child.handle_or_pass_on_signal(signal.SIGTERM)
    assert child.poll_wait_status_and_enforce_end() == signal.SIGUSR1
    assert (child.was_ended_by_us, child.first_signal) == (False, signal.SIGUSR1)


@pytest.mark.parametrize(("others", "status"), [(FAILED, -15), (STOPPED, 85)])
def test_srun_leaves_ranks_alone(others: str, status: int, run: RunDir) -> None:
    """Under srun, a rank does not wait for one that failed or stopped, and ends in the same way."""
    write_plan(run, "inside")
    life = f"from ortlaunch.run_folder.folder import write_json_atomically; {others}; time.sleep(9)"
    ended = guarded(run, life, OTHERS="0.3")
    assert ended.record is not None
    assert (ended.status, ended.record["secondary"]) == (status, status < 0)


def test_an_account_tells_which_it_could_read(run: RunDir) -> None:
    """A record has the number of earlier records: the first is known without equal clocks."""
    ended = guarded(run, f"{FAILED}; raise ValueError('planted')")
    assert ended.record is not None
    assert ended.record["after"] == 1


def test_nothing_to_save_is_nothing_to_stop_for(run: RunDir) -> None:
    """A task without saves, such as a comparison or a bench, ends by the signal itself."""
    write_plan(run, "mpi", task="parity")
    ended = guarded(run, "os.kill(os.getppid(), 15); time.sleep(9)")
    assert (ended.status, ended.record and ended.record["type"]) == (-15, "Signal")


def test_a_signal_to_all_processes_is_one_that_was_asked(run: RunDir) -> None:
    """A signal to all processes of a step counts as a request, also if the rank ends before."""
    # Slurm sends such signals. Here the supervisor is stopped while the rank dies of it.
    write_plan(run, "mpi", task="parity")
    life = "os.kill(os.getppid(), 19); os.kill(os.getppid(), 15); os.kill(os.getpid(), 15)"
    wake = "import os, sys, time; time.sleep(0.5); os.kill(int(sys.argv[1]), 18)"
    start = (
        "import subprocess; "
        f"subprocess.Popen([sys.executable, '-c', {wake!r}, str(os.getppid())]); {life}"
    )
    ended = guarded(run, start)
    assert ended.record is not None
    assert (ended.status, ended.record["secondary"]) == (-15, True)
    assert run.signal_mark_path(1).read_text().startswith("15 ")


@pytest.mark.parametrize(("launcher", "status"), [("mpi", 0), ("torchrun", 0), ("inside", 85)])
def test_a_rank_that_saved_and_stopped(launcher: str, status: int, run: RunDir) -> None:
    """A saved stop has status 0 under ortlaunch's own launchers, and 85 under another launcher."""
    # Our own launcher would treat 85 as a failure, and the command knows of the stop.
    write_plan(run, launcher)
    ended = guarded(run, "return_85")
    assert (ended.status, ended.record) == (status, None)


@pytest.mark.parametrize(
    ("file", "number"), [("stop_request", signal.SIGUSR1), ("save_request", signal.SIGUSR2)]
)
def test_a_request_in_the_run_folder_is_a_signal(file: str, number: int, run: RunDir) -> None:
    """Rank 0's supervisor passes on a request in the run folder once, as a signal."""
    # A command on another host cannot signal it.
    life = (
        f"heard = []; signal.signal({int(number)}, lambda *_: heard.append(1)); {LISTENS}\n"
        f"RunDir(sys.argv[2]).requests.mkdir(); open(RunDir(sys.argv[2]).{file}, 'w').close()\n"
        "end = time.monotonic() + 1.3\n"
        "while time.monotonic() < end: time.sleep(0.1)\n"
        "assert heard == [1], heard"
    )
    ended = guarded(run, life, rank=0)
    assert (ended.status, ended.record) == (0, None), ended


@pytest.mark.parametrize("number", [signal.SIGUSR2])
def test_a_notice_ends_nothing(number: int, run: RunDir) -> None:
    """A scheduler's notice reaches the rank, which continues unless its own code handles it."""
    heard = (
        "heard = []; signal.signal({0}, lambda *_: heard.append(1)); "
        "os.kill(os.getppid(), {0}); time.sleep(0.3)"
    )
    life = (
        f"os.kill(os.getppid(), {number:d}); time.sleep(0.2); {heard.format(int(number))}; "
        "assert heard"
    )
    ended = guarded(run, life)
    assert (ended.status, ended.record) == (0, None), ended


def test_a_rank_that_was_asked_to_end_may_end_well(run: RunDir) -> None:
    """A rank that ignores SIGTERM and finishes has not failed, and the request leaves no record."""
    ended = guarded(run, f"{IGNORE}; os.kill(os.getppid(), 15); time.sleep(0.1)")
    assert (ended.status, ended.record) == (0, None)
    assert list(run.errors.iterdir()) == []


def test_that_a_rank_was_asked_is_known_at_once(run: RunDir) -> None:
    """A request is in the run folder before mpirun kills the rank, 0.2 s after SIGTERM."""
    guarded(
        run,
        f"{IGNORE}; os.kill(os.getppid(), 15); time.sleep(0.1); os.kill(os.getppid(), 9); time.sleep(9)",
    )
    number, when = run.signal_mark_path(1).read_text().split()
    assert (int(number), float(when) > 0) == (signal.SIGTERM, True)


def test_no_rank_without_its_launcher(run: RunDir, tmp_path: Path) -> None:
    """A supervisor whose launcher has already ended starts no rank."""
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    mark = tmp_path / "mark"
    for pid, begins in ((int(gone.stdout), False), (os.getpid(), True)):
        where = {LAUNCHER_VARIABLE: f"{process_space()} {pid}"}
        ended = guarded(run, f"open({str(mark)!r}, 'w').close()", **where)
        assert (ended.status, mark.exists()) == ((0, True) if begins else (143, False))


AT_EXIT = """
handler = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: %s)
ctypes.CDLL(None).__cxa_atexit(handler, None, None)
"""


@pytest.mark.parametrize(
    ("variable", "runs"), [("PMI_RANK", True), ("OMPI_COMM_WORLD_RANK", False), ("RANK", False)]
)
def test_exit_handlers_run_where_mpich_needs_them(
    variable: str, runs: bool, run: RunDir, tmp_path: Path
) -> None:
    """Under Hydra, C's exit handlers run, in which MPICH signs off; elsewhere they are skipped."""
    mark = tmp_path / "mark"
    life = AT_EXIT % f"open({str(mark)!r}, 'w').close()"
    assert guarded(run, life, **{variable: "1"}).status == 0
    assert mark.exists() == runs


def test_a_crash_in_an_exit_handler_is_no_failure(run: RunDir) -> None:
    """A crash after the rank has reported its end does not count."""
    ended = guarded(run, AT_EXIT % "os.kill(os.getpid(), 11)", PMI_RANK="1")
    assert (ended.status, ended.record) == (0, None)


def test_a_rank_dies_with_its_supervisor(run: RunDir, tmp_path: Path) -> None:
    """A rank dies with its supervisor, also if that is killed."""
    pid = tmp_path / "pid"
    life = (
        f"open({str(pid)!r}, 'w').write(str(os.getpid())); os.kill(os.getppid(), 9); time.sleep(60)"
    )
    assert guarded(run, life).status == -signal.SIGKILL
    deadline = time.monotonic() + 5
    while lives(pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not lives(pid.read_text())


def lives(pid: str) -> bool:
    """Return whether a process exists and is no zombie, whose command line is empty."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


# A secondary failure: another rank has the cause.
ECHO = "raise RuntimeError('x: Connection closed by peer')"


@pytest.mark.parametrize(
    ("life", "others", "job", "status"),
    [
        (ECHO, "a fault", "job.batch", 85),
        # The checkpoint of a run whose failed node left no record.
        (ECHO, "a checkpoint", "job.batch", 85),
        (ECHO, "", "job.batch", 1),
        (ECHO, "a fault", "trainjob.trainer.kubeflow.org", 1),
        ("sys.exit(7)", "a checkpoint", "job.batch", 7),
    ],
)
def test_a_pod_that_ends_for_anothers_fault(
    life: str, others: str, job: str, status: int, run: RunDir
) -> None:
    """A pod that ends for another's fault has the status on which an indexed Job replaces it.

    The Job does not count that replacement. The faulty rank keeps its own status.
    """
    write_plan(run, "inside")
    # So that the rank does not wait for a printed cause.
    run.failure_printed.parent.mkdir(parents=True)
    run.failure_printed.touch()
    if others == "a fault":
        write_json_atomically(
            run.rank_error_path(0), {"secondary": False, "exit_status": 1, "rank": 0}
        )
    elif others:
        write_text_atomically(run.checkpoint_folder(3) / "COMPLETE", "")
    assert guarded(run, life, ORTLAUNCH_JOB=f"kubernetes:default/{job}/x").status == status


def test_the_stack_of_a_crash_is_whole(run: RunDir) -> None:
    """The record of a crash below many calls begins with the cause, as a short one does."""
    life = "def call(depth):\n    call(depth - 1) if depth else ctypes.string_at(0)\ncall(30)"
    record = guarded(run, life).record
    assert record is not None
    assert record["traceback"].startswith("Fatal Python error: Segmentation fault")
    assert record["traceback"].count(" in call") == 31
