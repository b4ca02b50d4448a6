"""Tests of `ortlaunch status` and `cancel` on run folders that the tests write themselves."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import yaml

from ortlaunch.base.cause import Cause
from ortlaunch.base.errors import InputError, LaunchError
from ortlaunch.base.process import Process
from ortlaunch.launch import JobState, processes
from ortlaunch.launch.record import Attempt, JobRecord
from ortlaunch.run.job_file import JobFile
from ortlaunch.run_folder.folder import RunDir, write_json_atomically, write_text_atomically
from ortlaunch.run_folder.lock import RunLock
from ortlaunch.run_folder.verdict import Verdict
from ortlaunch.started_runs import cancel as cancelling
from ortlaunch.started_runs import logs, registry, requests
from ortlaunch.started_runs.cancel import cancel_run_and_wait_for_its_end
from ortlaunch.started_runs.status import poll_status_until_run_end, read_status
from tests.makers import CUSTOM, bert, host, plan, recipe

# A command that takes over a folder and its job, and may have a rank. The file `here` reports that
# it is ready.
COMMAND = """
import contextlib, os, pathlib, signal, sys, time
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run.job_file import JobFile
from ortlaunch.run_folder.lock import RunLock, hold_shared_run_lock_until_exit
run, how = RunDir(sys.argv[1]), sys.argv[2]
lock = RunLock()
lock.lock_and_record_holder_or_refuse(run)
stack = contextlib.ExitStack()
if how != "measures":
    stack.enter_context(JobFile(run, "torchrun")).record_start_of_ranks()
if how == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:  # a launcher in a session of its own, as deaf
        os.setsid()
        pathlib.Path(sys.argv[1], "launcher").write_text(str(os.getpid()))
        time.sleep(60)
if how == "deaf rank":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if os.fork() == 0:
        hold_shared_run_lock_until_exit(run)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1], "here").write_text("")
with stack:
    time.sleep(60)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run folder in the state before its ranks start."""
    run = RunDir(tmp_path / "run")
    write_text_atomically(run.plan, plan(recipe(), [host("a", 2)], "torchrun").to_json())
    write_text_atomically(run.recipe, yaml.safe_dump({**CUSTOM, "train": {"max_steps": 9}}))
    return run


@pytest.fixture(autouse=True)
def _little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    # Else each test of a process that ignores SIGTERM would wait for the full grace.
    for module in (processes, cancelling):
        monkeypatch.setattr(module, "GRACE_SECONDS", 0.2)
        monkeypatch.setattr(module, "_EXTRA_GRACE_SECONDS", 0.2)


@contextlib.contextmanager
def command(run: RunDir, how: str = "plain") -> Iterator[subprocess.Popen[bytes]]:
    """Another command that has taken over the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(run), how], start_new_session=True
    )
    try:
        deadline = time.monotonic() + 20
        while not (run.path / "here").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_each_stage_of_a_command(run: RunDir) -> None:
    """A run is pending while its command prepares, then running, and at the end has a verdict."""
    with JobFile(run, "torchrun") as file:
        found = read_status(run)
        assert (found.state, found.job.id, found.job.backend) == (
            JobState.PENDING,
            str(os.getpid()),
            "torchrun",
        )
        file.record_start_of_ranks()
        # The last line is cut off, as while it is being written.
        write_text_atomically(
            run.metrics, '{"step": 2, "loss": 1.5, "tokens_per_second": 1000.0}\n{"step": 3, "lo'
        )
        found = read_status(run)
        assert (found.state, found.step, found.steps, found.ranks) == (JobState.RUNNING, 2, 9, 2)
        assert re.search(r"step 2 of 9, loss 1\.5000, 1,000 tokens/s, 0:\d\d ago", str(found))
        file.record_end_or_print_disk_error(Verdict(7, "rank 1 failed"))
    found = read_status(run)
    assert (found.state, found.job.exit_status, str(found).splitlines()[-1]) == (JobState.FAILED, 7,
                                                                                "ortlaunch: rank 1 failed")  # fmt: skip
    assert poll_status_until_run_end(run).job == found.job


@pytest.mark.parametrize(
    ("error", "state", "status", "verdict"),
    [
        (InputError("no such thing"), JobState.FAILED, 2, "ortlaunch: no such thing"),
        (ZeroDivisionError("by zero"), JobState.FAILED, 1, "ortlaunch: ZeroDivisionError: by zero"),
        (
            KeyboardInterrupt(),
            JobState.CANCELLED,
            130,
            "ortlaunch: stopped by SIGINT before its ranks were started",
        ),
    ],
)
def test_an_error_before_the_ranks(
    error: BaseException, state: JobState, status: int, verdict: str, run: RunDir
) -> None:
    """An error that ends the command before the ranks start is the run's verdict."""
    with pytest.raises(type(error)), JobFile(run, "mpi"):
        raise error
    found = read_status(run)
    assert (found.state, found.job.exit_status, str(found.job.verdict)) == (state, status, verdict)


def test_a_signal_before_the_ranks(run: RunDir) -> None:
    """SIGTERM during the preparation counts as a saved stop, unless nothing is saved."""
    # Nothing is lost before the first step, so a run that saves may simply start again.
    for saves, status, state in ((True, 85, JobState.PREEMPTED), (False, 143, JobState.CANCELLED)):
        with pytest.raises(SystemExit) as caught, JobFile(run, "mpi", saves):
            signal.raise_signal(signal.SIGTERM)
        assert (caught.value.code, read_status(run).state) == (status, state)
        assert (
            str(read_status(run).job.verdict)
            == "ortlaunch: stopped by SIGTERM before its ranks were started"
        )
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    # A cancelled run must not be started again, so it does not count as saved.
    write_text_atomically(run.cancelled, "")
    with pytest.raises(SystemExit), JobFile(run, "mpi"):
        signal.raise_signal(signal.SIGTERM)
    assert read_status(run).state is JobState.CANCELLED


def test_between_two_starts(run: RunDir) -> None:
    """Between two starts a save request is ignored, and a stop ends the command."""
    # The default action of SIGUSR2 would end this process.
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    with contextlib.suppress(SystemExit), JobFile(run, "mpi") as file:
        signal.raise_signal(signal.SIGUSR2)
        file.record_attempts_and_stop_collecting_signals(
            [Attempt(1, 9.0, 1, Cause.RAISED, "rank 1 failed", "ValueError", 7, 4, 0)]
        )
        signal.raise_signal(signal.SIGTERM)
    assert (
        str(read_status(run).job.verdict)
        == "ortlaunch: stopped by SIGTERM before its ranks were started again"
    )


def test_while_ranks_are_started(run: RunDir) -> None:
    """Signals during a start are kept for the ranks, and end the command after a failure."""
    with contextlib.suppress(SystemExit), JobFile(run, "mpi") as file:
        kept = file.start_collecting_signals_for_ranks()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert kept == [signal.SIGINT, signal.SIGTERM]
        # One was handled by the ranks; the other is left for the command.
        kept.pop(0)
        file.record_attempts_and_stop_collecting_signals(
            [Attempt(1, 9.0, 1, Cause.RAISED, "rank 1 failed", "ValueError", 7, 4, 0)]
        )
    assert read_status(run).state is JobState.PREEMPTED
    with JobFile(run, "mpi") as file:
        file.start_collecting_signals_for_ranks()
        signal.raise_signal(signal.SIGTERM)
        file.record_end_or_print_disk_error(Verdict(0, "done"))
    assert read_status(run).state is JobState.SUCCEEDED


def test_a_full_disk_hides_no_verdict(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that cannot write job.json on a full disk prints that and its verdict."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with JobFile(run, "mpi") as file:
        monkeypatch.setattr(JobRecord, "write", full)
        file.record_end_or_print_disk_error(Verdict(1, "why"))
    assert (
        capsys.readouterr().err
        == f"ortlaunch: {run.job} has no record of the run's end: No space left on device\n"
    )


@pytest.mark.parametrize(("secondary", "status"), [(False, 7), (True, 137)])
def test_a_killed_command_has_failed(secondary: bool, status: int, run: RunDir) -> None:
    """A killed command's run has the verdict of its first failing rank, else that of the kill."""
    with command(run) as process:
        assert read_status(run).state is JobState.RUNNING
        process.kill()
        process.wait()
        # A secondary failure is only an effect of the command's death.
        error = {
            "exit_status": 7,
            "traceback": "",
            "summary": "rank 1 failed",
            "time": 1,
            "secondary": secondary,
        }
        write_json_atomically(run.rank_error_path(1), {**error, "rank": 1, "type": "ValueError"})
        found = read_status(run)
        gone = f"the command (process {process.pid} on host"
        assert (found.state, found.job.exit_status) == (JobState.FAILED, status)
        assert found.job.verdict is not None
        assert found.job.verdict.message.startswith("rank 1 failed" if status == 7 else gone)


@pytest.mark.parametrize(
    ("cause", "damaged"),
    [
        ("not-finite", "recipe.yaml"),
        ("gradient-not-finite", "recipe.yaml"),
        ("out-of-memory", "recipe.yaml"),
        ("out-of-memory", "plan.json"),
    ],
)
def test_a_damaged_file_takes_no_verdict_away(cause: str, damaged: str, run: RunDir) -> None:
    """The advice reads recipe and plan; without them the run has still failed, and says why."""
    write_text_atomically(run.plan, plan(bert(), [host("a", 2)], "torchrun").to_json())
    with command(run) as process:
        process.kill()
        process.wait()
        record = {
            "rank": 1,
            "type": "X",
            "cause": cause,
            "detail": "why",
            "exit_status": 7,
            "time": 1,
        }
        write_json_atomically(run.rank_error_path(1), {**record, "summary": "rank 1 failed"})
        (run.path / damaged).write_text("name: [broken\n")
        found = read_status(run)
        assert (found.state, found.job.exit_status) == (JobState.FAILED, 7)
        assert found.job.verdict is not None
        assert "why" in found.job.verdict.explanation
        assert damaged in found.job.verdict.notes[-1]


def test_a_killed_command_whose_ranks_ended_well(run: RunDir) -> None:
    """A killed command's run succeeded if this start wrote a summary and no rank failed."""
    with command(run) as process:
        process.kill()
        process.wait()
        write_json_atomically(run.summary, {})
        assert (read_status(run).state, read_status(run).job.exit_status) == (JobState.SUCCEEDED, 0)
        ended = {
            "exit_status": 7,
            "traceback": "",
            "summary": "rank 1 failed",
            "time": 1,
            "secondary": False,
        }
        write_json_atomically(run.rank_error_path(1), {**ended, "rank": 1, "type": "ValueError"})
        assert read_status(run).job.exit_status == 7


def test_a_command_that_measures_is_pending(run: RunDir) -> None:
    """A command that measures makes the run pending, and its end leaves the earlier record."""
    with JobFile(run, "torchrun") as file:
        file.record_end_or_print_disk_error(Verdict(0, "done"))
    with command(run, "measures") as process:
        found = read_status(run)
        assert (found.state, found.job.id) == (JobState.PENDING, str(process.pid))
        said = cancel_run_and_wait_for_its_end(run)
        assert said.startswith(f"ended process {process.pid}, which had not started a run here\n")
        assert process.wait() == -signal.SIGTERM
    assert read_status(run).state is JobState.SUCCEEDED


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("plain", 143, "cancelled\n"),
        ("deaf", 137, "cancelled\n"),
        ("deaf rank", 137, "cancelled; 1 of its processes had to be killed\n"),
    ],
)
def test_cancel(
    how: str, status: int, said: str, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelling sends SIGTERM, after the grace SIGKILL, and records the run as cancelled."""
    # A killed process with much memory, or on a busy machine, ends later.
    monkeypatch.setattr(cancelling, "send_signal", lambda *sent: Timer(0.6, os.kill, sent).start())
    if how == "plain":
        # It ends by itself, on a busy machine after more than the little grace.
        for module in (processes, cancelling):
            monkeypatch.setattr(module, "GRACE_SECONDS", 20.0)
    with command(run, how) as process:
        answer = cancel_run_and_wait_for_its_end(run)
        assert answer.startswith(f"{said}{run}: cancelled"), answer
        found = read_status(run)
        assert (found.state, found.job.exit_status, found.alive) == (JobState.CANCELLED, status, ())
        launcher = run.path / "launcher"
        assert not (
            launcher.exists() and Process.identity_of_pid(int(launcher.read_text())).is_alive()
        )
        # The plain command handles SIGTERM; the deaf one has to be killed; the one with a deaf rank
        # has the default action.
        expected = {
            "plain": 143, "deaf": -signal.SIGKILL, "deaf rank": -signal.SIGTERM
        }[how]  # fmt: skip
        assert process.wait() == expected
        assert cancel_run_and_wait_for_its_end(run).startswith(
            f"nothing to cancel: it has ended\n{run}: cancelled"
        )


def test_who_waits_for_the_folder_is_none_of_its_run(run: RunDir) -> None:
    """Cancelling leaves a process alone that only waits for the folder's lock."""
    # The next command has the lock's file open, too.
    with command(run, "deaf rank") as process:
        process.kill()
        process.wait()
        # The child inherits the open file, as a command does that waits for the lock.
        with open(run.lock) as file:
            waits = subprocess.Popen(["sleep", "60"], pass_fds=[file.fileno()])
        try:
            assert len(read_status(run).alive) == 1
            said = cancel_run_and_wait_for_its_end(run)
            assert said.startswith(
                "nothing to cancel: it has ended; 1 of its processes had to be killed\n"
            ), said
            assert (read_status(run).state, read_status(run).alive, waits.poll()) == (
                JobState.FAILED,
                (),
                None,
            )
        finally:
            waits.kill()
            waits.wait()


def test_another_host(run: RunDir) -> None:
    """A run on another host has its recorded state, and advice for commands on that host."""
    record = JobRecord.for_this_process("torchrun", JobState.RUNNING)
    replace(record, host="far", space="far pid:[1]").write(run)
    there = (
        f"process {os.getpid()} on host far cannot be seen from here; use that host, or ssh: "
        "ssh far ortlaunch"
    )
    assert (read_status(run).state, read_status(run).certain) == (JobState.RUNNING, False)
    assert f"this is the last recorded state; {there} status {run}" in str(read_status(run))
    with pytest.raises(InputError, match=f"{there} cancel {run}".replace("[", r"\[")):
        cancel_run_and_wait_for_its_end(run)
    with pytest.raises(InputError, match="status --wait"):
        poll_status_until_run_end(run)


@pytest.mark.parametrize(("kind", "status"), [("Stopped", 0), ("ValueError", 1), ("", 0)])
def test_stopping_from_another_host(kind: str, status: int, run: RunDir) -> None:
    """Stopping a run on another host reads the end from the ranks' records."""
    # No process writes the end of srun's ranks into job.json, so waiting for it would never end.
    record = JobRecord.for_this_process("inside", JobState.RUNNING)
    replace(record, host="far", space="far pid:[1]").write(run)
    if kind:
        code = 85 if kind == "Stopped" else 1
        end = {
            "type": kind,
            "secondary": False,
            "time": 1.0,
            "exit_status": code,
            "summary": "rank 0 has ended",
        }
        write_json_atomically(run.rank_error_path(0), end)
    else:
        write_json_atomically(run.summary, {})
    said, code = requests.request_stop_and_wait_if_asked(run)
    assert (code, ("rank 0 has ended" if kind else "done: ") in said) == (status, True)
    with pytest.raises(LaunchError, match="ended before it saved"):
        requests.request_checkpoint_and_wait(run)
    # Without a plan no rank has begun.
    run.plan.unlink()
    with pytest.raises(InputError, match="its ranks have not started, so there is nothing to save"):
        requests.request_stop_and_wait_if_asked(run)


def test_a_launcher_of_the_users_own(run: RunDir) -> None:
    """A run under the user's own launcher is checked by its rank 0, and cannot be cancelled."""
    record = JobRecord.for_this_process("inside", JobState.RUNNING)
    record.write(run)
    assert read_status(run).state is JobState.RUNNING
    with pytest.raises(InputError, match="its ranks were started by your own launcher"):
        cancel_run_and_wait_for_its_end(run)
    # Another start time: the process id belongs to a later process, so rank 0 is gone.
    replace(record, began="gone").write(run)
    assert read_status(run).state is JobState.FAILED
    write_json_atomically(run.summary, {})
    assert (read_status(run).state, read_status(run).job.exit_status) == (JobState.SUCCEEDED, 0)


@pytest.mark.parametrize("text", ["{", "[]", '{"state": "running"}', '{"state": "odd"}'])
def test_a_record_that_is_none(text: str, run: RunDir) -> None:
    """A damaged job.json gives an error with its path, without a traceback."""
    run.job.write_text(text)
    with pytest.raises(InputError, match=r"job\.json: is not a record of a job"):
        read_status(run)


# A process of its own: a fork of the test process may be refused, because other tests left too much
# memory in it.
AS_NOBODY = """
import os, sys
from ortlaunch.base.errors import InputError
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.started_runs.cancel import cancel_run_and_wait_for_its_end
from ortlaunch.started_runs.status import read_status
os.setgroups([])
os.setuid(65534)
try:
    (read_status if sys.argv[1] == "status" else cancel_run_and_wait_for_its_end)(RunDir(sys.argv[2]))
    print("nothing", end="")
except InputError as error:
    print(error, end="")
"""


def as_nobody(act: str, run: RunDir) -> str:
    """Return the error that another user gets, or "nothing"."""
    argv = [sys.executable, "-c", AS_NOBODY, act, str(run)]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user(run: RunDir) -> None:
    """Another user gets a one-line error for a run that is unreadable, or not theirs to cancel."""
    # Not tmp_path: its parents cannot be entered by other users.
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        run = RunDir(shutil.copytree(run.path, folder / "run"))
        with command(run):
            assert as_nobody("status", run) == "nothing"
            assert (
                as_nobody("cancel", run)
                == f"{run}: belongs to another user; only that user or root may stop, save or cancel it"
            )
            run.job.chmod(0o600)
            why = "no permission to read it; use the user who started the run"
            assert as_nobody("status", run) == f"{run.job}: {why}"
            assert read_status(run).state is JobState.RUNNING
    finally:
        shutil.rmtree(folder)


def test_json(run: RunDir) -> None:
    """The JSON has all known values, and null for unknown ones."""
    with RunLock() as lock, JobFile(run, "local"):
        lock.lock_and_record_holder_or_refuse(run)
        found = json.loads(read_status(run).to_json())
    assert (found["state"], found["job"]["backend"], found["step"], found["steps"]) == (
        "pending",
        "local",
        None,
        9,
    )
    assert set(found["job"]) == set(JobRecord.__dataclass_fields__)


def test_the_latest_run_is_the_one_that_started_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of an earlier run changes its job.json, and does not make it the latest."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    for place, name in enumerate(("first", "second")):
        started = RunDir(tmp_path / name)
        write_json_atomically(started.job, {})
        registry.register_run_or_print_error(started)
        for entry in (tmp_path / "cache" / "runs").iterdir():
            if entry.read_text() == str(started.path):
                os.utime(entry, (place, place))
    write_json_atomically(RunDir(tmp_path / "first").job, {"ended": "now"})
    assert [each.path.name for each in registry.list_runs_and_remove_stale_entries()] == [
        "second",
        "first",
    ]


def test_a_character_that_is_half_written_is_printed_whole(tmp_path: Path) -> None:
    """`logs --follow` waits for the other bytes of a character."""
    file = tmp_path / "rank_00000.out"
    read = dict[Path, Any]()
    whole = "a\u00e9b".encode()
    pieces = list[str]()
    for end in (2, len(whole)):
        file.write_bytes(whole[:end])
        pieces += logs._read_appended_text_and_advance_positions([file], read)
    assert "".join(pieces) == "a\u00e9b"
