"""A rank's guardian: how each end of a rank is seen, recorded and passed on; without torch and without a launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ortlaunch.rank import LAUNCHER_VARIABLE, process_space
from ortlaunch.run.folder import RunDir, write_json, write_text
from ortlaunch.worker.child import Child
from tests.makers import host, plan, recipe

GUARDED = """
import ctypes, os, signal, sys, time
import ortlaunch.worker.child, ortlaunch.worker.failure
from ortlaunch.errors import EngineError, InputError
from ortlaunch.rank import Rank
from ortlaunch.run.folder import RunDir
from ortlaunch.worker.rank_supervisor import watch

def live(watchdog):
    print("to stdout", flush=True)
    if "QUIET" not in os.environ:
        print("to stderr", file=sys.stderr, flush=True)
    if os.environ["LIFE"] == "return_85":
        return 85
    exec(os.environ["LIFE"], globals())

ortlaunch.worker.child.GRACE_SECONDS = 0.3
ortlaunch.worker.child._OTHERS_SECONDS = float(os.environ.get("OTHERS", "5"))
if "FULL" in os.environ:  # as a disk is: what has its room already can still be written
    def write_json(path, value):
        raise OSError(28, "No space left on device")
    ortlaunch.worker.failure.write_json = write_json
rank = int(sys.argv[1])
sys.exit(watch(Rank(rank, 2, rank, 2), RunDir(sys.argv[2]), live))
"""


class Ended(NamedTuple):
    """How a guarded life ended: the guardian's status and output, and what the rank left."""

    status: int
    out: str
    err: str
    record: dict[str, Any] | None


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """The folder of a run that ortlaunch's own launcher started."""
    run = RunDir(tmp_path / "run")
    write_plan(run, "mpi")
    return run


def write_plan(run: RunDir, launcher: str, task: str = "train") -> None:
    """Two ranks of this host, which may take two seconds to save."""
    made = plan(recipe(launch={"grace_seconds": 2}), [host("localhost", 2)], launcher)
    write_text(run.plan, replace(made, task=task).to_json())


def guarded(run: RunDir, life: str, rank: int = 1, **environ: str) -> Ended:
    """A rank that lives this code, and its guardian."""
    command = [sys.executable, "-c", GUARDED, str(rank), str(run)]
    env = {**os.environ, "LIFE": life, **environ}
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as launchers are started
    try:
        result = subprocess.run(command, env=env, capture_output=True, timeout=30, check=False)
    finally:
        signal.signal(signal.SIGUSR1, before)
    record = json.loads(run.error(rank).read_text()) if run.error(rank).exists() else None
    return Ended(result.returncode, result.stdout.decode(), result.stderr.decode(), record)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_good_life(rank: int, run: RunDir) -> None:
    """Both streams are in the rank's logs, rank 0's also on the terminal, and no error is recorded."""
    ended = guarded(run, "", rank)
    assert (ended.status, ended.record) == (0, None)
    assert (ended.out, ended.err) == (("to stdout\n", "to stderr\n") if rank == 0 else ("", ""))
    assert run.log(rank, "out").read_text() == "to stdout\n"
    assert run.log(rank, "err").read_text() == "to stderr\n"


def test_all_ranks_are_shown_where_that_is_asked_for(run: RunDir) -> None:
    """`log.ranks: all`: each line behind its host and rank; logs are as ever."""
    made = plan(recipe(log={"ranks": "all"}), [host("localhost", 2)], "torchrun")
    write_text(run.plan, made.to_json())
    ended, name = guarded(run, "print('more')"), f"{os.uname().nodename} rank 1: "
    assert (ended.out, ended.err) == (f"{name}to stdout\n{name}more\n", f"{name}to stderr\n")
    assert run.log(1, "out").read_text() == "to stdout\nmore\n"


IGNORE = "signal.signal(15, signal.SIG_IGN)"
LISTENS = "from ortlaunch.worker.requests import Requests; Requests().listen(); time.sleep(0.3)"
FAILED = "open(RunDir(sys.argv[2]).error(0), 'w').close()"
EXITS = "signal.signal(15, lambda *_: sys.exit(3))"
ENDS = {  # life: (status of the guardian, and of the record: exit status, type, secondary, words of its summary)
    "raise ValueError('planted')": (1, 1, "ValueError", False, "failed with ValueError"),
    "raise RuntimeError('x: Connection closed by peer')": (1, 1, "RuntimeError", True, "failed with RuntimeError"),
    "raise EngineError('no such operator')": (1, 1, "EngineError", False, "failed with EngineError"),
    "raise InputError('wrong')": (2, 2, "InputError", False, "failed with InputError"),
    "raise KeyboardInterrupt": (1, 1, "KeyboardInterrupt", False, "failed with KeyboardInterrupt"),
    "sys.exit(7)": (7, 7, "SystemExit", False, "failed with SystemExit; exit status 7"),
    "sys.exit(0)": (1, 1, "SystemExit", False, "failed with SystemExit; exit status 1"),
    "sys.exit(256)": (1, 1, "SystemExit", False, "exit status 1"),
    "sys.exit('words')": (1, 1, "SystemExit", False, "exit status 1"),
    "os._exit(5)": (5, 5, "Exit", False, "left with exit status 5 before the end; exit status 5"),
    "os._exit(0)": (1, 1, "Exit", False, "left with exit status 0 before the end; exit status 1"),
    "os.kill(os.getpid(), 9)": (-9, 137, "Signal", False, "was ended by SIGKILL; exit status 137"),
    "os.kill(os.getpid(), 11)": (-11, 139, "Signal", False, "was ended by SIGSEGV; exit status 139"),
    # A stop that is asked for, where nothing is to be saved; 130 after a person's Ctrl-C.
    "os.kill(os.getppid(), 15); time.sleep(9)": (85, 85, "Stopped", False, "was stopped by SIGTERM before its first"),
    "os.kill(os.getppid(), 10); time.sleep(9)": (85, 85, "Stopped", False, "was stopped by SIGUSR1 before its first"),
    "os.kill(os.getppid(), 2); time.sleep(9)": (130, 130, "Stopped", False, "was stopped by SIGINT before its first"),
    "os.kill(os.getpid(), 15)": (85, 85, "Stopped", False, "was stopped by SIGTERM before its first step"),
    "os.killpg(os.getpid(), 2)": (130, 130, "Stopped", False, "was stopped by SIGINT before its first step"),
    "os.kill(os.getppid(), 15); os.kill(os.getpid(), 19); time.sleep(9)": (85, 85, "Stopped", False, "SIGTERM"),
    # Another rank has failed: this one is to go, and whatever listens has nothing to wait for.
    f"{FAILED}; os.kill(os.getppid(), 15); time.sleep(9)": (-15, 143, "Signal", True, "was ended by SIGTERM; exit"),
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
        "was ended by SIGKILL, for it outlived its grace of 2 s (launch.grace_seconds) after SIGTERM; exit status 143",
    ),
    f"{IGNORE}; os.kill(os.getppid(), 15); time.sleep(9)": (
        -15,
        143,
        "Outlived",
        True,
        "was ended by SIGKILL, for it outlived its grace after SIGTERM; exit status 143",
    ),
    f"{LISTENS}; os.kill(os.getpid(), 2); os.kill(os.getpid(), 2); time.sleep(9)": (
        130,
        130,
        "Stopped",
        False,
        "was stopped by SIGINT for the second time, before it had saved; exit status 130",
    ),
    f"{EXITS}; os.kill(os.getppid(), 15); time.sleep(9)": (3, 3, "SystemExit", True, "failed with SystemExit"),
    "signal.signal(12, signal.SIG_DFL); os.kill(os.getppid(), 12); time.sleep(9)": (
        -12,
        140,
        "Signal",
        False,
        "was ended by SIGUSR2; exit status 140",
    ),
}


@pytest.mark.parametrize("life", ENDS)
def test_how_a_rank_ends(life: str, run: RunDir) -> None:
    """The guardian ends as the rank did, and the record tells status, kind, and whether the cause is elsewhere."""
    status, recorded, kind, secondary, words = ENDS[life]
    ended = guarded(run, life)
    assert ended.status == status
    assert ended.record is not None
    assert (ended.record["exit_status"], ended.record["type"]) == (recorded, kind)
    assert ended.record["secondary"] is secondary
    assert (ended.record["rank"], ended.record["local_rank"], ended.record["host"]) == (1, 1, os.uname().nodename)
    assert ended.record["summary"].startswith(f"rank 1 on host {os.uname().nodename} (local rank 1) ")
    assert ended.record["summary"].endswith(f"; log: {run.log(1, 'err')}")
    assert words in ended.record["summary"]


def test_a_save_that_outlives_its_grace_is_run_again(run: RunDir) -> None:
    """From the checkpoint before it: a queue that gets 85 starts it once more, and what was lost is said."""
    write_text(run.checkpoint(4) / "COMPLETE", "")
    for number, status in ((signal.SIGTERM, 85), (signal.SIGINT, 130)):
        run.error(1).unlink(missing_ok=True)
        ended = guarded(run, f"{LISTENS}; os.kill(os.getppid(), {number:d}); time.sleep(9)\ntime.sleep(9)")
        assert ended.record is not None
        assert (abs(ended.status), ended.record["exit_status"]) == (status if status == 85 else 2, status)
        assert ("; steps after 4 are lost" in ended.record["summary"]) == (status == 85)


def test_a_signal_just_before_the_rank_listens(run: RunDir) -> None:
    """It is said again once the rank does, which has its whole grace to save then."""
    listens = "from ortlaunch.worker.requests import Requests; heard = Requests(); heard.listen()"
    life = f"{IGNORE}; os.kill(os.getppid(), 15); time.sleep(0.1); {listens}; time.sleep(0.6); assert heard.asked"
    ended = guarded(run, life)
    assert (ended.status, ended.record) == (0, None)


STOPPED = "write_json(RunDir(sys.argv[2]).error(0), {'type': 'Stopped', 'secondary': False})"


def test_a_rank_that_was_stopped_is_no_echo_of_its_peers(run: RunDir) -> None:
    """It is dead, and before its guardian looks, the other rank told that it lost it: that is no end by its run."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        time.sleep(9)
        os._exit(0)
    child = Child(pid, run, 1, 60.0)
    child.pass_on(signal.SIGUSR1)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    write_json(run.error(0), {"type": "RuntimeError", "secondary": True})
    child.pass_on(signal.SIGTERM)
    assert child.poll() == signal.SIGUSR1
    assert (child.ended_by_us, child.asked) == (False, signal.SIGUSR1)


@pytest.mark.parametrize(("others", "status"), [(FAILED, -15), (STOPPED, 85)])
def test_srun_leaves_ranks_alone(others: str, status: int, run: RunDir) -> None:
    """Another rank failed, or was stopped in its import: this one does not wait for it, and says the same."""
    write_plan(run, "inside")
    life = f"from ortlaunch.run.folder import write_json; {others}; time.sleep(9)"
    ended = guarded(run, life, OTHERS="0.3")
    assert ended.record is not None
    assert (ended.status, ended.record["secondary"]) == (status, status < 0)


def test_an_account_tells_which_it_could_read(run: RunDir) -> None:
    """So that the first is known without equal clocks."""
    ended = guarded(run, f"{FAILED}; raise ValueError('planted')")
    assert ended.record is not None
    assert ended.record["after"] == [run.error(0).name]


def test_nothing_to_save_is_nothing_to_stop_for(run: RunDir) -> None:
    """A comparison or a bench leaves with its signal, as it always did."""
    write_plan(run, "mpi", task="parity")
    ended = guarded(run, "os.kill(os.getppid(), 15); time.sleep(9)")
    assert (ended.status, ended.record and ended.record["type"]) == (-15, "Signal")


def test_a_signal_to_all_processes_is_one_that_was_asked(run: RunDir) -> None:
    """Slurm sends one to all of a step: the rank may be gone before its guardian runs, and is not the cause."""
    write_plan(run, "mpi", task="parity")
    life = "os.kill(os.getppid(), 19); os.kill(os.getppid(), 15); os.kill(os.getpid(), 15)"
    wake = "import os, sys, time; time.sleep(0.5); os.kill(int(sys.argv[1]), 18)"
    start = f"import subprocess; subprocess.Popen([sys.executable, '-c', {wake!r}, str(os.getppid())]); {life}"
    ended = guarded(run, start)
    assert ended.record is not None
    assert (ended.status, ended.record["secondary"]) == (-15, True)
    assert run.asked(1).read_text().startswith("15 ")


@pytest.mark.parametrize(("launcher", "status"), [("mpi", 0), ("torchrun", 0), ("inside", 85)])
def test_a_rank_that_saved_and_stopped(launcher: str, status: int, run: RunDir) -> None:
    """Its own launcher would take 85 for a failure, and the command knows; another launcher is told."""
    write_plan(run, launcher)
    ended = guarded(run, "return_85")
    assert (ended.status, ended.record) == (status, None)


@pytest.mark.parametrize(("file", "number"), [("stop_request", signal.SIGUSR1), ("save_request", signal.SIGUSR2)])
def test_a_request_in_the_run_folder_is_a_signal(file: str, number: int, run: RunDir) -> None:
    """Rank 0 looks for both by itself, for a command on another host cannot wake it; each is passed on once."""
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
    """A scheduler's notice reaches the rank, which goes on unless its own code handles it."""
    heard = "heard = []; signal.signal({0}, lambda *_: heard.append(1)); os.kill(os.getppid(), {0}); time.sleep(0.3)"
    life = f"os.kill(os.getppid(), {number:d}); time.sleep(0.2); {heard.format(int(number))}; assert heard"
    ended = guarded(run, life)
    assert (ended.status, ended.record) == (0, None), ended


def test_a_rank_that_was_asked_to_end_may_end_well(run: RunDir) -> None:
    """A rank that takes SIGTERM as a wish and comes to its end has not failed, and nothing says that it was asked."""
    ended = guarded(run, f"{IGNORE}; os.kill(os.getppid(), 15); time.sleep(0.1)")
    assert (ended.status, ended.record) == (0, None)
    assert list(run.errors.iterdir()) == []


def test_that_a_rank_was_asked_is_known_at_once(run: RunDir) -> None:
    """mpirun kills 0.2 s after SIGTERM: what the guardian was asked is in the run folder before that."""
    guarded(run, f"{IGNORE}; os.kill(os.getppid(), 15); time.sleep(0.1); os.kill(os.getppid(), 9); time.sleep(9)")
    number, when = run.asked(1).read_text().split()
    assert (int(number), float(when) > 0) == (signal.SIGTERM, True)


def test_no_rank_without_its_launcher(run: RunDir, tmp_path: Path) -> None:
    """A guardian whose launcher ended before it could ask the kernel to be told starts no rank."""
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    mark = tmp_path / "mark"
    for pid, begins in ((int(gone.stdout), False), (os.getpid(), True)):
        where = {LAUNCHER_VARIABLE: f"{process_space()} {pid}"}
        ended = guarded(run, f"open({str(mark)!r}, 'w').close()", **where)
        assert (ended.status, mark.exists()) == ((0, True) if begins else (143, False))


def test_a_log_on_a_full_disk_ends_nothing(run: RunDir) -> None:
    """The rank lives on, and its guardian says once what is missing."""
    run.logs.mkdir(parents=True)
    run.log(1, "out").symlink_to("/dev/full")
    ended = guarded(run, "print('more', flush=True); time.sleep(0.2); print('again', flush=True)")
    assert (ended.status, ended.record) == (0, None)
    assert ended.err == f"ortlaunch: {run.log(1, 'out')} is not complete: No space left on device\n"


@pytest.mark.parametrize("life", ["raise ValueError('planted' * 10_000)", "os._exit(5)"])
def test_how_a_rank_ends_on_a_full_disk(life: str, run: RunDir) -> None:
    """The account of its end has its room from the beginning: status and cause are not lost."""
    ended = guarded(run, life, FULL="1")
    assert ended.record is not None
    assert ended.status == ended.record["exit_status"] == (5 if "5" in life else 1)
    assert ended.record["summary"].startswith("rank 1 on host")
    assert [path.name for path in run.errors.iterdir()] == [run.error(1).name]


NO_SPACE = "raise OSError(28, 'No space left on device', '/data/x')"


@pytest.mark.parametrize("life", [NO_SPACE, f"try:\n    {NO_SPACE}\nexcept OSError:\n    raise RuntimeError('pos')"])
def test_a_full_disk_is_the_cause(life: str, run: RunDir) -> None:
    """What failed for want of space says so in its one line, also where a library's own error hides it."""
    record = guarded(run, life).record
    assert record is not None
    assert ": no space left on device (/data/x); exit status 1" in record["summary"]


def test_the_traceback_is_recorded_and_logged(run: RunDir) -> None:
    """A failure's own account has its traceback, in the record and in the rank's log."""
    record = guarded(run, "raise ValueError('planted')").record
    assert record is not None
    assert record["traceback"].startswith("Traceback (most recent call last):")
    assert record["traceback"].rstrip().endswith("ValueError: planted")
    assert record["traceback"] in run.log(1, "err").read_text()


def test_an_error_for_the_user_has_no_traceback(run: RunDir) -> None:
    """What is written for a person stays a message."""
    record = guarded(run, "raise EngineError('no such operator')").record
    assert record is not None
    assert record["traceback"] == "no such operator"


def test_last_words_of_a_killed_rank(run: RunDir) -> None:
    """A rank that cannot speak any more is told by the end of its log, which may be long."""
    life = "print('\\n'.join(f'line {i}' for i in range(100)), file=sys.stderr, flush=True); os.kill(os.getpid(), 9)"
    record = guarded(run, life).record
    assert record is not None
    assert record["traceback"].splitlines() == [f"line {number}" for number in range(80, 100)]


def test_everything_said_is_logged(run: RunDir) -> None:
    """Output larger than a pipe, written just before the end, is whole in the log."""
    ended = guarded(run, "sys.stdout.write('x' * 300_000); sys.stdout.flush(); os._exit(5)")
    assert ended.status == 5
    assert run.log(1, "out").read_text() == "to stdout\n" + "x" * 300_000 + "\n"


LIVE = "print('\\x1b]ortlaunch;step 1\\x07', end=''); print('\\x1b[1mloss\\x1b[0m', flush=True)"


@pytest.mark.parametrize("width", ["80", "", "wide"])
def test_the_live_line_is_on_the_terminal_alone(width: str, run: RunDir) -> None:
    """Logs hold plain lines; the terminal, where there is one, also what rank 0 does now, until the end."""
    ended = guarded(run, LIVE, rank=0, ORTLAUNCH_PROGRESS=width)
    assert run.log(0, "out").read_text() == "to stdout\nloss\n"
    assert ended.out.replace("\r\x1b[Kstep 1", "").replace("\r\x1b[K", "") == "to stdout\nloss\n"
    assert ended.out.endswith("\r\x1b[Kstep 1\r\x1b[K") is (width == "80")


def test_logs_of_a_continued_run_go_on(run: RunDir) -> None:
    """The second life in a folder adds to the logs, and its beginning shows on them."""
    guarded(run, "")
    log = run.log(1, "err")
    os.utime(log, (1, 1))
    guarded(run, "", QUIET="1")
    assert run.log(1, "out").read_text() == "to stdout\n" * 2
    assert log.read_text() == "to stderr\n"
    assert log.stat().st_mtime > 1


AT_EXIT = """
handler = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: %s)
ctypes.CDLL(None).__cxa_atexit(handler, None, None)
"""


@pytest.mark.parametrize(("variable", "runs"), [("PMI_RANK", True), ("OMPI_COMM_WORLD_RANK", False), ("RANK", False)])
def test_exit_handlers_run_where_mpich_needs_them(variable: str, runs: bool, run: RunDir, tmp_path: Path) -> None:
    """Under Hydra C's exit handlers run, by which MPICH signs off; elsewhere a rank leaves at once."""
    mark = tmp_path / "mark"
    life = AT_EXIT % f"open({str(mark)!r}, 'w').close()"
    assert guarded(run, life, **{variable: "1"}).status == 0
    assert mark.exists() == runs


def test_a_crash_in_an_exit_handler_is_no_failure(run: RunDir) -> None:
    """What happens after the rank has said that it finished does not count."""
    ended = guarded(run, AT_EXIT % "os.kill(os.getpid(), 11)", PMI_RANK="1")
    assert (ended.status, ended.record) == (0, None)


@pytest.mark.parametrize(
    ("launcher", "rank", "life", "told"),
    [
        ("inside", 1, "raise ValueError('planted')", True),
        ("inside", 1, "os.kill(os.getpid(), 9)", True),
        ("inside", 1, "raise RuntimeError('Connection closed by peer')", False),
        ("mpi", 1, "raise ValueError('planted')", False),
        ("inside", 0, "raise ValueError('planted')", True),
    ],
)
def test_the_failing_rank_speaks_where_nobody_else_will(
    launcher: str, rank: int, life: str, told: bool, run: RunDir
) -> None:
    """Under the user's own launcher the cause is on the terminal, once, with its traceback; echoes are not."""
    write_plan(run, launcher)
    run.errors.mkdir()
    if not told:
        run.failure_printed.touch()  # what an echo waits for
    ended = guarded(run, life, rank)
    assert ended.record is not None
    assert ended.err.endswith(f"ortlaunch: {ended.record['summary']}\n") is told
    assert ended.err.count("raise ValueError('planted')") <= 1
    assert run.failure_printed.exists()
    assert ("planted" in ended.err) == (told and "planted" in life)


def test_an_echo_of_a_cause_that_nobody_tells_speaks_itself(run: RunDir) -> None:
    """The failing rank's host is gone, say: a lost connection is then all that is known, and it is told."""
    write_plan(run, "inside")
    ended = guarded(run, "raise RuntimeError('Connection closed by peer')")
    assert ended.record is not None
    assert ended.record["secondary"]
    assert ended.err.count("RuntimeError: Connection closed by peer") == 1
    assert ended.err.endswith(f"ortlaunch: {ended.record['summary']}\n")


def test_a_rank_dies_with_its_guardian(run: RunDir, tmp_path: Path) -> None:
    """A guardian that is killed takes its rank along."""
    pid = tmp_path / "pid"
    life = f"open({str(pid)!r}, 'w').write(str(os.getpid())); os.kill(os.getppid(), 9); time.sleep(60)"
    assert guarded(run, life).status == -signal.SIGKILL
    deadline = time.monotonic() + 5
    while lives(pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not lives(pid.read_text())


def lives(pid: str) -> bool:
    """Whether a process is there and more than a zombie, whose command line is empty."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False
