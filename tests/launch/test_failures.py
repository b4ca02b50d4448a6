"""Tests of failing runs under real torchrun and mpirun: status, cause, and no process left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ortlaunch.launch import JobState
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.started_runs.status import read_status
from tests.launch import light
from tests.launch.tiny import LAUNCHERS, needs_mpi, processes_of

MODULE = """
import time, torch

class Net(torch.nn.Module):
    def __init__(self, how):
        super().__init__()
        self.layer, self.how = torch.nn.Linear(4, 1), how

    def forward(self, x, y):
        if self.how == "slow":
            time.sleep(0.2)
        return ((self.layer(x) - y) ** 2).mean()

def model(how):
    return Net(how)

def data():
    return [{"x": torch.ones(4) * i, "y": torch.ones(1)} for i in range(64)]
"""
RECIPE = """
name: failing
model: {task: custom, factory: "failing:model", arguments: {how: HOW}}
data: {train: {format: custom, factory: "failing:data"}}
batch: {micro_size: 2, accumulation_steps: 1}
optimizer: {name: sgd, learning_rate: 1e-6}
engine: {name: eager}
train: {max_steps: 100000}
log: {every_steps: 1}
"""
# For each way to end: the exit status, and words of the verdict.
SLOW = (pytest.mark.slow, pytest.mark.ci)
# The launchers, of which make test takes the faster one.
EITHER = (pytest.param("torchrun", marks=SLOW), pytest.param("mpi", marks=needs_mpi))
ENDS = {
    "exit 7": (7, ("rank 1 on host", "SystemExit", "exit status 7")),
    "raise": (
        1,
        ('raise ValueError("planted")', "ValueError: planted", "rank 1 on host", "exit status 1"),
    ),
    "kill": (137, ("rank 1 on host", "SIGKILL", "exit status 137")),
    "leave with 0": (1, ("rank 1 on host", "before the end", "exit status 1")),
    "kill the supervisor": (137, ("rank 1 on host", "disappeared")),
}


@pytest.fixture
def start(tmp_path: Path):
    """Start a run of 2 ranks, with or without torch; in the end kill all that it started."""
    started = []

    def begin(launcher: str, how: str, torch: bool = True) -> subprocess.Popen[str]:
        (tmp_path / "failing.py").write_text(MODULE)
        (tmp_path / "recipe.yaml").write_text(RECIPE.replace("HOW", how))
        words = [
            "train",
            "recipe.yaml",
            "--nproc-per-node",
            "2",
            "--launcher",
            launcher,
            "--run-dir",
            str(tmp_path / "run"),
        ]
        command = ["-m", "ortlaunch.cli"] if torch else [light.__file__]
        process = subprocess.Popen(
            [sys.executable, *command, *words],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
    for pid in processes_of(tmp_path):
        # It may end by itself in the meantime.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in started:
        # Closes the pipes, and waits.
        with process:
            pass


def gone_within(folder: Path, seconds: float) -> bool:
    """Whether all processes of the run end within `seconds`."""
    deadline = time.monotonic() + seconds
    while processes_of(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def wait_for_steps(folder: Path, count: int, process: subprocess.Popen[str] | None = None) -> None:
    """Wait until the run has trained some steps; fail at once if its process has ended."""
    # Generous: with torch, ranks on a busy machine need long to start.
    deadline = time.monotonic() + 60
    metrics = folder / "run" / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < count:
        if process is not None and process.poll() is not None:
            pytest.fail(f"ended with {process.returncode}: {process.communicate()}")
        assert time.monotonic() < deadline, "the run did not start to train"
        time.sleep(0.1)


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("how", "launcher"),
    [
        *((how, "torchrun") for how in ENDS if how != "kill the supervisor"),
        pytest.param("kill the supervisor", "torchrun", marks=SLOW),
        *(pytest.param(how, "mpi", marks=needs_mpi) for how in ("raise", "kill")),
    ],
)
def test_a_failing_rank_is_named_and_its_status_kept(
    start, tmp_path: Path, how: str, launcher: str
):
    """The command has the first failing rank's status, prints the cause and leaves no process."""
    status, words = ENDS[how]
    process = start(launcher, how, torch=False)
    _, errors = process.communicate(timeout=80)
    last = "\n".join(errors.splitlines()[-25:])
    assert process.returncode == status, errors
    assert [word for word in words if word not in last] == [], errors
    assert gone_within(tmp_path, 5), processes_of(tmp_path)
    found = read_status(RunDir(tmp_path / "run"))
    assert (found.state, found.job.exit_status) == (JobState.FAILED, status)
    # Other processes read the same verdict as the user of the command.
    assert str(found.job.verdict) in errors


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise ValueError('planted')", "    raise ValueError('planted')"),
        ("os.abort()", "a last word"),
    ],
)
def test_what_ends_rank_0_is_printed_once(how: str, said: str, tmp_path: Path):
    """The output and traceback of rank 0 are once on the terminal and once in its log."""
    (tmp_path / "failing.py").write_text(
        "import os, sys\ndef model(how): ...\n"
        f"def data():\n    print('a last word', file=sys.stderr)\n    {how}\n"
    )
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("HOW", "x"))
    command = [sys.executable, "-m", "ortlaunch.cli", "train", "recipe.yaml", "--run-dir", "run"]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=80, check=False
    )
    assert ended.returncode in (1, 128 + signal.SIGABRT)
    assert (ended.stdout + ended.stderr).count(said) == 1, ended.stderr
    assert (tmp_path / "run/logs/rank_00000.err").read_text().count(said) == 1


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(90)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ctrl_c_saves_and_ends_everything(start, tmp_path: Path, launcher: str):
    """After Ctrl-C every rank saves and ends, and the status is 130, as a shell's."""
    process = start(launcher, "slow", torch=launcher == "torchrun")
    wait_for_steps(tmp_path, 2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=40)
    assert process.returncode == 130, errors
    (saved, _), *_ = RunDir(tmp_path / "run").complete_checkpoints()
    # The last line is the command that continues the run.
    *_, ended, then = errors.splitlines()
    assert f"stopped by SIGINT, saved after step {saved} of " in ended
    assert then.startswith("to continue: ortlaunch train ")
    assert gone_within(tmp_path, 5), processes_of(tmp_path)
    assert read_status(RunDir(tmp_path / "run")).state is JobState.CANCELLED


@pytest.mark.timeout(90)
@pytest.mark.parametrize("launcher", EITHER)
def test_a_killed_command_leaves_no_orphan(start, tmp_path: Path, launcher: str):
    """After `kill -9` of the command its launcher and ranks end by themselves."""
    process = start(launcher, "slow", torch=False)
    wait_for_steps(tmp_path, 2)
    # SIGKILL runs no handler of the command; the kernel sends SIGTERM to the launcher.
    process.kill()
    assert gone_within(tmp_path, 20), processes_of(tmp_path)
    found = read_status(RunDir(tmp_path / "run"))
    assert (found.state, found.job.exit_status) == (JobState.FAILED, 137)
    assert f"ortlaunch: the command (process {process.pid} on host" in str(found)


def parts(process: subprocess.Popen[str], folder: Path) -> dict[int, list[int]]:
    """Return the supervisors of a run by their launcher, as soon as there are any."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        parents = {pid: parent_of(pid) for pid in processes_of(folder)}
        for launcher in (pid for pid, parent in parents.items() if parent == process.pid):
            supervisors = [pid for pid, parent in parents.items() if parent == launcher]
            if supervisors:
                return {launcher: supervisors}
    raise AssertionError("no rank began")


def parent_of(pid: int) -> int:
    """Return the parent's process id; 0 if the process has gone."""
    try:
        # The program's name in the second field may have blanks and parentheses.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


# The programs of the launchers, as the verdict names them.
NAMES = {"torchrun": "torchrun", "mpi": "mpirun"}


@pytest.mark.timeout(90)
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    ("how", "steps"),
    [("slow", 0), pytest.param("slow", 2, marks=pytest.mark.slow), ("ignore SIGTERM", 2)],
)
def test_a_killed_launcher_leaves_no_orphan(
    start, tmp_path: Path, launcher: str, how: str, steps: int
):
    """After `kill -9` of torchrun or mpirun the command ends the ranks and names the launcher."""
    process = start(launcher, how, torch=False)
    wait_for_steps(tmp_path, steps) if steps else None
    (found,) = parts(process, tmp_path)
    os.kill(found, signal.SIGKILL)
    _, errors = process.communicate(timeout=40)
    assert processes_of(tmp_path) == []
    # 85 where the ranks, which listen from their first step on, saved before they were ended.
    saved = steps and "; stopped by SIGTERM, saved after step" in errors
    assert process.returncode == (85 if saved else 137), errors
    assert f"ortlaunch: {NAMES[launcher]} was stopped by SIGKILL, and the ranks with it" in errors


@pytest.mark.timeout(90)
def test_a_stopped_rank_does_not_stay(start, tmp_path: Path):
    """A suspended rank, which cannot end by itself, does not outlive its killed launcher."""
    process = start("torchrun", "slow", torch=False)
    wait_for_steps(tmp_path, 2)
    ((found, supervisors),) = parts(process, tmp_path).items()
    rank = next(pid for pid in processes_of(tmp_path) if parent_of(pid) == supervisors[0])
    # Suspended, the rank cannot handle SIGTERM.
    os.kill(rank, signal.SIGSTOP)
    os.kill(found, signal.SIGKILL)
    process.communicate(timeout=40)
    assert processes_of(tmp_path) == []


@pytest.mark.timeout(90)
@pytest.mark.parametrize("launcher", EITHER)
def test_a_terminated_launcher_is_no_failure_of_its_ranks(start, tmp_path: Path, launcher: str):
    """SIGTERM to a launcher requests the ranks to save, and is no failure of a rank."""
    # mpirun kills its ranks after 0.2 s, so they may not have saved.
    process = start(launcher, "slow", torch=False)
    wait_for_steps(tmp_path, 2)
    (found,) = parts(process, tmp_path)
    os.kill(found, signal.SIGTERM)
    _, errors = process.communicate(timeout=40)
    # 143 where mpirun was faster than the ranks.
    assert process.returncode in ((143, 85) if launcher == "mpi" else (85,)), errors
    said = (
        "no rank had failed before"
        if process.returncode == 143
        else "stopped by SIGTERM, saved after step"
    )
    assert "SIGTERM" in errors
    assert said in errors


@pytest.mark.timeout(90)
@pytest.mark.parametrize("launcher", EITHER)
def test_a_notice_saves_or_stops(start, tmp_path: Path, launcher: str):
    """SIGUSR2 saves once and continues; SIGUSR1 saves and stops."""
    # Slurm sends SIGUSR1 before the end of the job's time.
    run = RunDir(tmp_path / "run")
    process = start(launcher, "slow", torch=False)
    wait_for_steps(tmp_path, 2)
    process.send_signal(signal.SIGUSR2)
    # Far enough for a second, unwanted checkpoint to be written.
    wait_for_steps(tmp_path, 8)
    assert len(run.complete_checkpoints()) == 1
    process.send_signal(signal.SIGUSR1)
    _, errors = process.communicate(timeout=40)
    assert process.returncode == 85, errors
    assert len(run.complete_checkpoints()) == 2
    assert "ortlaunch: checkpoint requested (SIGUSR2): the ranks save after this step" in errors
    assert "stopped by SIGUSR1, saved after step" in errors.splitlines()[-2]
    assert read_status(run).state is JobState.PREEMPTED


@pytest.mark.timeout(90)
def test_a_second_run_in_the_folder_is_refused(start, tmp_path: Path):
    """A second start in a living run's folder is refused, and the first run continues."""
    process = start("torchrun", "slow", torch=False)
    wait_for_steps(tmp_path, 2, process)
    second = start("torchrun", "slow", torch=False)
    _, errors = second.communicate(timeout=40)
    assert second.returncode == 2, errors
    (line,) = errors.splitlines()
    assert line.startswith(
        f"ortlaunch: --run-dir {tmp_path / 'run'}: process {process.pid} on host "
    )
    # The first run continues.
    steps = len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    wait_for_steps(tmp_path, steps + 3)


@pytest.fixture
def small_disk(tmp_path: Path):
    """A run folder on a disk of 8 MiB."""
    folder = tmp_path / "run"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("only root can mount a small disk")
    yield folder
    # Lazy, for a process of the run may still use the folder.
    subprocess.run(["umount", "--lazy", str(folder)], check=False)


@pytest.mark.timeout(90)
def test_a_full_disk_is_told(small_disk: Path, start):
    """A full disk is the cause of the rank that wrote to it, with that rank's own status."""
    process = start("torchrun", "fill the disk", torch=False)
    _, errors = process.communicate(timeout=80)
    last = errors.splitlines()[-1]
    assert process.returncode == 1, errors
    assert last.startswith("ortlaunch: rank 1 on host"), errors
    assert "failed with OSError: no space left on device" in last
