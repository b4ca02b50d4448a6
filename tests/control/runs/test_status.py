"""`ortlaunch status` and `cancel` on run folders made here: what is found without a command, and what is ended how."""

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

import pytest
import yaml

from ortlaunch.cause import Cause
from ortlaunch.errors import InputError, LaunchError
from ortlaunch.launch import JobState, processes
from ortlaunch.launch.record import Attempt, JobRecord
from ortlaunch.process import Process
from ortlaunch.run.job_file import JobFile
from ortlaunch.run_folder.folder import RunDir, write_json, write_text
from ortlaunch.run_folder.lock import RunLock
from ortlaunch.runs import cancel as cancelling
from ortlaunch.runs import requests
from ortlaunch.runs.cancel import cancel
from ortlaunch.runs.status import look, wait
from tests.makers import CUSTOM, host, plan, recipe

# A command that takes a folder and its job, and may have a rank; both say when they are there.
COMMAND = """
import contextlib, os, pathlib, signal, sys, time
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run.job_file import JobFile
from ortlaunch.run_folder.lock import RunLock, share
run, how = RunDir(sys.argv[1]), sys.argv[2]
lock = RunLock()
lock.take(run)
stack = contextlib.ExitStack()
if how != "measures":
    stack.enter_context(JobFile(run, "torchrun")).starts()
if how == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:  # a launcher in a session of its own, as deaf
        os.setsid()
        pathlib.Path(sys.argv[1], "launcher").write_text(str(os.getpid()))
        time.sleep(60)
if how == "deaf rank":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if os.fork() == 0:
        share(run)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1], "here").write_text("")
with stack:
    time.sleep(60)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run folder as its command leaves it before its ranks start."""
    run = RunDir(tmp_path / "run")
    write_text(run.plan, plan(recipe(), [host("a", 2)], "torchrun").to_json())
    write_text(run.recipe, yaml.safe_dump({**CUSTOM, "train": {"max_steps": 9}}))
    return run


@pytest.fixture(autouse=True)
def _little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (processes, cancelling):
        monkeypatch.setattr(module, "GRACE_SECONDS", 0.2)
        monkeypatch.setattr(module, "_MORE_SECONDS", 0.2)


@contextlib.contextmanager
def command(run: RunDir, how: str = "plain") -> Iterator[subprocess.Popen[bytes]]:
    """Another command that has the folder."""
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
    """Pending while it prepares, running from its start, then its verdict; all from the folder alone."""
    with JobFile(run, "torchrun") as file:
        found = look(run)
        assert (found.state, found.job.id, found.job.backend) == (
            JobState.PENDING,
            str(os.getpid()),
            "torchrun",
        )
        file.starts()
        write_text(
            run.metrics, '{"step": 2, "loss": 1.5, "tokens_per_second": 1000.0}\n{"step": 3, "lo'
        )
        found = look(run)
        assert (found.state, found.step, found.steps, found.ranks) == (JobState.RUNNING, 2, 9, 2)
        assert re.search(r"step 2 of 9, loss 1\.5000, 1,000 tokens/s, 0:\d\d ago", str(found))
        file.end(7, "ortlaunch: rank 1 failed")
    found = look(run)
    assert (found.state, found.job.exit_status, str(found).splitlines()[-1]) == (JobState.FAILED, 7,
                                                                                "ortlaunch: rank 1 failed")  # fmt: skip
    assert wait(run).job == found.job


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
    """What ends the command while it prepares is the run's verdict."""
    with pytest.raises(type(error)), JobFile(run, "mpi"):
        raise error
    found = look(run)
    assert (found.state, found.job.exit_status, found.job.verdict) == (state, status, verdict)


def test_a_signal_before_the_ranks(run: RunDir) -> None:
    """SIGTERM to a command that prepares ends it as a stop, unless it has nothing to save or is to be cancelled."""
    for saves, status, state in ((True, 85, JobState.PREEMPTED), (False, 143, JobState.CANCELLED)):
        with pytest.raises(SystemExit) as caught, JobFile(run, "mpi", saves):
            signal.raise_signal(signal.SIGTERM)
        assert (caught.value.code, look(run).state) == (status, state)
        assert (
            look(run).job.verdict == "ortlaunch: stopped by SIGTERM before its ranks were started"
        )
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    write_text(run.cancelled, "")
    with pytest.raises(SystemExit), JobFile(run, "mpi"):
        signal.raise_signal(signal.SIGTERM)
    assert look(run).state is JobState.CANCELLED


def test_between_two_starts(run: RunDir) -> None:
    """A request to save ends nothing while no rank is there, and a stop tells what it met."""
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    with contextlib.suppress(SystemExit), JobFile(run, "mpi") as file:
        signal.raise_signal(signal.SIGUSR2)
        file.failed([Attempt(1, 9.0, 1, Cause.RAISED, "rank 1 failed", "ValueError", 7, 4, 0)])
        signal.raise_signal(signal.SIGTERM)
    assert (
        look(run).job.verdict == "ortlaunch: stopped by SIGTERM before its ranks were started again"
    )


def test_while_ranks_are_started(run: RunDir) -> None:
    """A signal is theirs: it is kept for who waits for them, and ends the command once they have failed."""
    with contextlib.suppress(SystemExit), JobFile(run, "mpi") as file:
        kept = file.keep_signals()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert kept == [signal.SIGINT, signal.SIGTERM]
        kept.pop(0)
        file.failed([Attempt(1, 9.0, 1, Cause.RAISED, "rank 1 failed", "ValueError", 7, 4, 0)])
    assert look(run).state is JobState.PREEMPTED
    with JobFile(run, "mpi") as file:
        file.keep_signals()
        signal.raise_signal(signal.SIGTERM)
        file.end(0, "done")
    assert look(run).state is JobState.SUCCEEDED


def test_a_full_disk_hides_no_verdict(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command says that job.json does not, and goes on to tell its end."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with JobFile(run, "mpi") as file:
        monkeypatch.setattr(JobRecord, "write", full)
        file.end(1, "ortlaunch: why")
    assert (
        capsys.readouterr().err
        == f"ortlaunch: {run.job} does not say how it ended: No space left on device\n"
    )


@pytest.mark.parametrize(("secondary", "status"), [(False, 7), (True, 137)])
def test_a_killed_command_has_failed(secondary: bool, status: int, run: RunDir) -> None:
    """The first failing rank is named; where none failed before, that the command is gone."""
    with command(run) as process:
        assert look(run).state is JobState.RUNNING
        process.kill()
        process.wait()
        error = {
            "exit_status": 7,
            "traceback": "",
            "summary": "rank 1 failed",
            "time": 1,
            "secondary": secondary,
        }
        write_json(run.error(1), {**error, "rank": 1, "type": "ValueError"})
        found = look(run)
        gone = f"ortlaunch: the command (process {process.pid} on host"
        assert (found.state, found.job.exit_status) == (JobState.FAILED, status)
        assert str(found.job.verdict).startswith(
            "ortlaunch: rank 1 failed" if status == 7 else gone
        )


def test_a_killed_command_whose_ranks_ended_well(run: RunDir) -> None:
    """The summary of this start tells; not where a rank failed all the same."""
    with command(run) as process:
        process.kill()
        process.wait()
        write_json(run.summary, {})
        assert (look(run).state, look(run).job.exit_status) == (JobState.SUCCEEDED, 0)
        ended = {
            "exit_status": 7,
            "traceback": "",
            "summary": "rank 1 failed",
            "time": 1,
            "secondary": False,
        }
        write_json(run.error(1), {**ended, "rank": 1, "type": "ValueError"})
        assert look(run).job.exit_status == 7


def test_a_command_that_measures_is_pending(run: RunDir) -> None:
    """An earlier job's end is not told while another command has the folder; ended, it leaves that record alone."""
    with JobFile(run, "torchrun") as file:
        file.end(0, "done")
    with command(run, "measures") as process:
        found = look(run)
        assert (found.state, found.job.id) == (JobState.PENDING, str(process.pid))
        said = cancel(run)
        assert said.startswith(f"ended process {process.pid}, which had not begun to run here\n")
        assert process.wait() == -signal.SIGTERM
    assert look(run).state is JobState.SUCCEEDED


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("plain", 143, "cancelled\n"),
        ("deaf", 137, "cancelled\n"),
        ("deaf rank", 137, "cancelled; 1 of its processes had to be killed\n"),
    ],
)
def test_cancel(how: str, status: int, said: str, run: RunDir) -> None:
    """SIGTERM first, SIGKILL after the grace, also to ranks that do not go; the record says cancelled."""
    with command(run, how) as process:
        answer = cancel(run)
        assert answer.startswith(f"{said}{run}: cancelled"), answer
        found = look(run)
        assert (found.state, found.job.exit_status, found.alive) == (JobState.CANCELLED, status, ())
        launcher = run.path / "launcher"
        assert not (launcher.exists() and Process.of(int(launcher.read_text())).lives())
        assert process.wait() == (
            143 if how == "plain" else -signal.SIGKILL if how == "deaf" else -signal.SIGTERM
        )
        assert cancel(run).startswith(f"nothing to cancel, for it has ended\n{run}: cancelled")


def test_who_waits_for_the_folder_is_none_of_its_run(run: RunDir) -> None:
    """The next command has the lock open, too; ending what is left of the run before leaves it alone."""
    with command(run, "deaf rank") as process:
        process.kill()
        process.wait()
        with open(run.lock) as file:
            waits = subprocess.Popen(["sleep", "60"], pass_fds=[file.fileno()])
        try:
            assert len(look(run).alive) == 1
            said = cancel(run)
            assert said.startswith(
                "nothing to cancel, for it has ended; 1 of its processes had to be killed\n"
            ), said
            assert (look(run).state, look(run).alive, waits.poll()) == (JobState.FAILED, (), None)
        finally:
            waits.kill()
            waits.wait()


def test_another_host(run: RunDir) -> None:
    """What was recorded last, with where to ask; it is neither waited for nor ended from here."""
    record = JobRecord.of_this_process("torchrun", JobState.RUNNING)
    replace(record, host="far", space="far pid:[1]").write(run)
    there = f"process {os.getpid()} on host far cannot be seen from here; there, or by ssh: ssh far ortlaunch"
    assert (look(run).state, look(run).certain) == (JobState.RUNNING, False)
    assert f"this is what was recorded last; {there} status {run}" in str(look(run))
    with pytest.raises(InputError, match=f"{there} cancel {run}".replace("[", r"\[")):
        cancel(run)
    with pytest.raises(InputError, match="status --wait"):
        wait(run)


@pytest.mark.parametrize(("kind", "status"), [("Stopped", 0), ("ValueError", 1), ("", 0)])
def test_stopping_from_another_host(kind: str, status: int, run: RunDir) -> None:
    """Nobody writes the end of ranks of srun's into job.json: what they leave tells it, and nothing is waited for."""
    record = JobRecord.of_this_process("inside", JobState.RUNNING)
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
        write_json(run.error(0), end)
    else:
        write_json(run.summary, {})
    said, code = requests.stop(run)
    assert (code, ("rank 0 has ended" if kind else "done: ") in said) == (status, True)
    with pytest.raises(LaunchError, match="ended before it saved"):
        requests.checkpoint(run)
    run.plan.unlink()
    with pytest.raises(InputError, match="its ranks have not begun, and have nothing to save"):
        requests.stop(run)


def test_a_launcher_of_the_users_own(run: RunDir) -> None:
    """Its rank 0 is looked for; it ended well where a summary came after its start; it is not ours to end."""
    record = JobRecord.of_this_process("inside", JobState.RUNNING)
    record.write(run)
    assert look(run).state is JobState.RUNNING
    with pytest.raises(InputError, match="its ranks were started by a launcher of your own"):
        cancel(run)
    replace(record, began="gone").write(run)
    assert look(run).state is JobState.FAILED
    write_json(run.summary, {})
    assert (look(run).state, look(run).job.exit_status) == (JobState.SUCCEEDED, 0)


@pytest.mark.parametrize("text", ["{", "[]", '{"state": "running"}', '{"state": "odd"}'])
def test_a_record_that_is_none(text: str, run: RunDir) -> None:
    """It is named, without a traceback."""
    run.job.write_text(text)
    with pytest.raises(InputError, match=r"job\.json: is no record of a job"):
        look(run)


# A process of its own: a fork of the tests' may be refused for the memory that other tests left in it.
AS_NOBODY = """
import os, sys
from ortlaunch.errors import InputError
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.runs.cancel import cancel
from ortlaunch.runs.status import look
os.setgroups([])
os.setuid(65534)
try:
    (look if sys.argv[1] == "status" else cancel)(RunDir(sys.argv[2]))
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
    """Who may not read is told so in a line, and so is who may read but not end."""
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        run = RunDir(shutil.copytree(run.path, folder / "run"))
        with command(run):
            assert as_nobody("status", run) == "nothing"
            assert (
                as_nobody("cancel", run)
                == f"{run}: is a run of user root; only that user or root may cancel it"
            )
            run.job.chmod(0o600)
            why = "this user may not read it; ask as the user who started the run"
            assert as_nobody("status", run) == f"{run.job}: {why}"
            assert look(run).state is JobState.RUNNING
    finally:
        shutil.rmtree(folder)


def test_json(run: RunDir) -> None:
    """All that is known, and null for what is not."""
    with RunLock() as lock, JobFile(run, "local"):
        lock.take(run)
        found = json.loads(look(run).to_json())
    assert (found["state"], found["job"]["backend"], found["step"], found["steps"]) == (
        "pending",
        "local",
        None,
        9,
    )
    assert set(found["job"]) == set(JobRecord.__dataclass_fields__)
