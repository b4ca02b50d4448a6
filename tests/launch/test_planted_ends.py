"""Tests of real runs with planted failures: `ortlaunch diagnose` and `train` name the true cause.

Some failures need root (a control group with a limit, a small disk).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ortlaunch.run_folder.folder import RunDir
from tests import labs
from tests.golden_ends import compare_with_golden_file

COMMAND = str(Path(sys.executable).with_name("ortlaunch"))
MODULE = """
import ctypes, os, signal, socket, sys, time
import torch


class Net(torch.nn.Module):
    def __init__(self, how, arguments):
        super().__init__()
        self.layer, self.how, self.passes, self.arguments = torch.nn.Linear(4, 3), how, 0, arguments

    def forward(self, x, y):
        self.passes += 1
        if os.environ["RANK"] == os.environ.get("PLANTED_RANK", "1") and self.passes == 4:
            globals()[self.how](self.arguments)
        if self.how in ("slow", "grow_slowly"):
            time.sleep(0.1)
        return torch.nn.functional.cross_entropy(self.layer(x), y)


def exit_7(_): sys.exit(7)
def leave_with_0(_): os._exit(0)
def raise_error(_): raise ValueError("planted in the model")
def segfault(_): ctypes.string_at(0)
def abort(_):
    os.write(2, b"terminate called after throwing an instance of 'std::runtime_error'\\n  what():  planted\\n")
    os.abort()
def kill(_): os.kill(os.getpid(), signal.SIGKILL)
def term(_): os.kill(os.getpid(), signal.SIGTERM)
def stop(_): os.kill(os.getpid(), signal.SIGSTOP)
def sleep(_): time.sleep(3600)
def nothing(_): pass
slow = nothing
def kill_supervisor(_): os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)
def fill(_): open(os.path.join(os.environ["PLANTED_RUN"], "fill"), "wb").write(bytes(1 << 25))
def no_file(_): open("data/part-7.bin")
def no_permission(_): raise PermissionError(13, "Permission denied", "/data/secret.bin")
def no_module(_): import nowhere_to_be_found
def port(_): socket.socket().bind(("127.0.0.1", int(os.environ["PLANTED_PORT"])))
def allocate(_): torch.empty(1 << 46)
def memory_error(_): bytearray(1 << 50)
def grow(_):
    kept = []
    while True:
        kept.append(bytearray(b"1") * (1 << 24))


def model(how="nothing", **arguments): return Net(how, arguments)


def data(nan_at=None, label_at=None):
    rows = [{"x": torch.ones(4) * i / 64, "y": torch.tensor(i % 3)} for i in range(256)]
    if nan_at is not None:
        rows[nan_at]["x"] = torch.full((4,), float("nan"))
    if label_at is not None:
        rows[label_at]["y"] = torch.tensor(7)
    return rows
"""
RECIPE = {
    "name": "planted",
    "model": {"task": "custom", "factory": "planted:model"},
    "data": {"train": {"format": "custom", "factory": "planted:data"}},
    "batch": {"micro_size": 2, "accumulation_steps": 1},
    "optimizer": {"name": "sgd", "learning_rate": 1e-3},
    "engine": {"name": "eager"},
    "train": {"max_steps": 60},
    "log": {"every_steps": 1},
}


class Case(NamedTuple):
    """A failure: how it is planted, and words of the true verdict."""

    name: str
    kind: str
    says: tuple[str, ...]
    how: str = "nothing"
    overrides: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    place: str = ""
    """`small disk` or `control group`."""
    outside: Callable[[subprocess.Popen[str], Path], None] | None = None
    """An action on the running command."""
    environ: tuple[tuple[str, str], ...] = ()
    launcher: str = ""


def kill_command(process: subprocess.Popen[str], run: Path) -> None:
    """Kill ortlaunch itself."""
    process.kill()


def kill_mpirun(process: subprocess.Popen[str], run: Path) -> None:
    """Kill the launcher."""
    for pid in _children(process.pid):
        # Open MPI 5 runs its mpirun as prterun.
        if "mpirun" in _command_of(pid) or "prterun" in _command_of(pid):
            os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


GOLDEN = Path(__file__).with_name("planted_ends.json")
# Ends of several ranks at once.
ANY_RANK_FIRST = ("nan in a sample", "mpirun killed", "the command killed", "disagreeing world")
# Seconds without progress after which a run counts as stalled; short, so that the test is.
STALL = ("train.stall_seconds=8",)
NOT_FINITE = (
    "17 of data.train",
    "first parameter with a gradient that is not finite: layer.weight",
)
CASES = (
    Case("exit 7", "left-early", ("rank 1", "status 7"), "exit_7"),
    Case("raise", "raised", ("rank 1", "ValueError: planted in the model"), "raise_error"),
    Case("segfault", "crash", ("rank 1", "SIGSEGV"), "segfault"),
    Case("abort in C++", "crash", ("rank 1", "SIGABRT", "uncaught C++ exception): what():  planted"), "abort"),
    Case("os._exit(0)", "left-early", ("rank 1", "before the end"), "leave_with_0"),
    Case("SIGKILL", "killed", ("rank 1", "SIGKILL"), "kill"),
    Case("SIGKILL of a supervisor", "rank-vanished", ("rank 1", "disappeared"), "kill_supervisor"),
    Case("out of memory, by the kernel", "out-of-memory", ("the kernel ended rank 1",), "grow",
         place="control group"),
    Case("out of memory, torch", "out-of-memory", ("rank 1", "allocate"), "allocate"),
    Case("MemoryError", "out-of-memory", ("rank 1",), "memory_error"),
    Case("SIGSTOP", "hang", ("rank 1",), "stop", STALL),
    Case("sleep in Python", "hang", ("rank 1",), "sleep", STALL),
    Case("nan in a sample", "not-finite", ("the loss is nan", *NOT_FINITE), overrides=(
        "data.train.arguments={nan_at: 17}",)),
    Case("full disk", "disk-full", ("rank 1", "No space"), "fill", place="small disk"),
    Case("missing file", "missing-file", ("rank 1", "part-7.bin"), "no_file"),
    Case("unreadable file", "unreadable-file", ("rank 1", "secret.bin"), "no_permission"),
    Case("missing module", "missing-module", ("rank 1", "nowhere_to_be_found"), "no_module"),
    Case("port taken", "port-taken", ("rank 1", "in use"), "port"),
    Case("wrong label", "index-out-of-range", ("out of bounds",), overrides=("data.train.arguments={label_at: 17}",)),
    Case("no CUDA", "no-gpu", ("GPU",), overrides=("launch.device=cuda",)),
    Case("disagreeing world", "other-world", ("2 ranks", "3"), launcher="mpi"),
    Case("bad host file", "refused", ("bad-hosts:1",), arguments=("--hostfile=bad-hosts", "--launcher=mpi")),
    Case("the command killed", "command-killed", ("disappeared",), "slow", outside=kill_command),
    Case("mpirun killed", "launcher-killed", ("mpirun was stopped by SIGKILL",), "slow", launcher="mpi",
         outside=kill_mpirun),
)  # fmt: skip


# Two cases are enough for CI; the others run nightly.
IN_CI = ("abort in C++", "nan in a sample")


def parameters() -> list[Any]:
    """Return every case with its marks: two run in CI, those that need root in a lab."""
    nightly = [pytest.mark.nightly]
    lab = [pytest.mark.lab, pytest.mark.slow]
    in_ci = [*nightly, pytest.mark.slow, pytest.mark.ci]
    return [
        pytest.param(
            case,
            id=case.name,
            marks=lab if case.place else in_ci if case.name in IN_CI else nightly,
        )
        for case in CASES
    ]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", parameters())
def test_a_planted_end(
    case: Case,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """`diagnose` names the true cause with its rank or sample, and `train` has printed it."""
    # Without a run folder of this case, `run` must not name another test's run in the registry.
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    if case.place and (os.geteuid() != 0 or not Path("/sys/fs/cgroup").is_dir()):
        labs.skip("makes a control group or mounts a disk, which takes root")
    status, output, done = plant(case, tmp_path, "torchrun")
    if done.returncode == 0:
        found = json.loads(done.stdout)
        kind = found["kind"]
        verdict = found["verdict"]
    # Without a run folder `train` itself reports the cause.
    else:
        kind = "refused" if status == 2 else ""
        verdict = output.strip().rpartition("\n")[2]
    for name, value in (("status", status), ("cause", kind), ("verdict", verdict[:500])):
        record_property(name, value)
    assert kind in (case.kind, "refused"), verdict
    assert [word for word in case.says if word.lower() not in verdict.lower()] == [], verdict
    if (tmp_path / "run" / "job.json").exists():
        compare_with_golden_file(
            GOLDEN,
            case.name,
            RunDir(tmp_path / "run"),
            is_any_rank_first=case.name in ANY_RANK_FIRST,
        )
    if case.outside is None or case.launcher:
        assert verdict.partition(": ")[2][:40] in output or verdict in output


def plant(
    case: Case, folder: Path, launcher: str
) -> tuple[int | None, str, subprocess.CompletedProcess[str]]:
    """Run a case, and return the command's exit status and output, and the result of `diagnose`."""
    (folder / "planted.py").write_text(MODULE)
    (folder / "bad-hosts").write_text("host1 slots=two\n")
    model = {**RECIPE["model"], "arguments": {"how": case.how}}  # type: ignore[dict-item]
    (folder / "recipe.yaml").write_text(json.dumps({**RECIPE, "model": model}))
    with ExitStack() as stack:
        # The port that the case "port taken" cannot bind.
        taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        prefix = stack.enter_context(_place(case.place, folder))
        places = case.arguments or (f"--launcher={case.launcher or launcher}", "--nproc-per-node=2")
        argv = [*prefix, COMMAND, "train", "recipe.yaml", "--run-dir=run", *places, *case.overrides]
        environ = {
            **os.environ, **dict(case.environ), "OMP_NUM_THREADS": "1", "PLANTED_RUN": str(folder / "run"),
            "PLANTED_PORT": str(taken.getsockname()[1]),
        }  # fmt: skip
        if case.name == "disagreeing world":
            argv, environ = _another_world(argv, environ, folder)
        output = folder / "output.txt"
        with output.open("w") as file:
            process = subprocess.Popen(argv, cwd=folder, env=environ, stdout=file, stderr=subprocess.STDOUT,
                                       text=True, start_new_session=True)  # fmt: skip
        try:
            if case.outside is not None:
                _wait_for_steps(folder / "run", 3)
                case.outside(process, folder / "run")
            process.wait(timeout=150)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Processes of a hanging run must not outlive the test.
            subprocess.run(
                [COMMAND, "cancel", "run"], cwd=folder, capture_output=True, check=False, timeout=60
            )
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        diagnosis = subprocess.run([COMMAND, "diagnose", "run", "--json"], cwd=folder, capture_output=True, text=True,
                                   check=False, timeout=60)  # fmt: skip
        return process.returncode, output.read_text(errors="replace"), diagnosis


def _another_world(
    argv: list[str], environ: dict[str, str], folder: Path
) -> tuple[list[str], dict[str, str]]:
    """Let the ranks detect 3 ranks where the plan has 2, as with a wrong launcher."""
    # Python imports sitecustomize at its start.
    hook = folder / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "import os\n"
        "for name in ('OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_LOCAL_SIZE'):\n"
        "    if name in os.environ: os.environ[name] = '3'\n"
    )
    return argv, {**environ, "PYTHONPATH": str(hook)}


def _wait_for_steps(run: Path, steps: int) -> None:
    deadline = time.monotonic() + 100
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < steps:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no step {steps} in {run}")
        time.sleep(0.1)


@contextmanager
def _place(place: str, folder: Path) -> Iterator[list[str]]:
    """Mount a small disk at the run folder, or yield a prefix for a control group with a limit."""
    if place == "small disk":
        (folder / "run").mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder / "run")], check=True
        )
        try:
            yield []
        finally:
            subprocess.run(["umount", "--lazy", str(folder / "run")], check=False)
    elif place == "control group":
        with limited(3 << 30) as group:
            # The shell joins the group and then becomes the command.
            yield ["/bin/sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', str(group)]
    else:
        yield []


@contextmanager
def limited(size: int) -> Iterator[Path]:
    """Yield a control group with a memory limit."""
    # Version 1 has a folder for each resource, version 2 one for all.
    top = next(
        top for top in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")) if top.is_dir()
    )
    group = top / f"ortlaunch-planted-{os.getpid()}"
    group.mkdir()
    try:
        limit = next(
            group / name
            for name in ("memory.limit_in_bytes", "memory.max")
            if (group / name).exists()
        )
        limit.write_text(str(size))
        yield group
    finally:
        # A group can be removed only after its last process has ended.
        for _ in range(50):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.2)
