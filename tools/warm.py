"""Whole runs that start as copies of a process that has loaded the libraries, for tools that start hundreds of runs.

Each rank is `ortlaunch train` under a launcher of the user's own, from the recipe to the export, in processes of its
own; only the `exec` between command and rank is left out, for it would load everything once more.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

_run = subprocess.run


def load(device: str = "cpu") -> None:
    """What every rank needs, into this process; nothing that starts a thread, CUDA, or reads a run's settings."""
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", DS_ACCELERATOR=device, HF_HUB_OFFLINE="1")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # torch.cuda.is_available() would start CUDA for all forks
    import torch

    for optional in ("deepspeed.runtime.engine", "deepspeed.runtime.zero.stage3", "onnx", "onnxruntime"):
        with contextlib.suppress(ImportError):
            importlib.import_module(optional)
    import torch._inductor.compile_fx
    import torch.onnx

    import ortlaunch.cli
    import ortlaunch.worker.session
    import ortlaunch.worker.tasks.train  # noqa: F401

    if device == "cpu":  # elsewhere a step asks whether a CUDA graph is captured, which may start CUDA
        weight = torch.nn.Parameter(torch.zeros(1))
        weight.grad = torch.zeros(1)
        torch.optim.AdamW([weight]).step()  # loads half of torch


class Started:
    """A process that was forked here, with what `subprocess.Popen` would tell of it."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, seconds: float) -> int:
        deadline = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise SystemExit(f"process {self.pid} did not end in {seconds:g} s")
            time.sleep(0.005)
        return self.returncode


def reaches_gpu() -> bool:
    """Whether a fork of this process can use CUDA, which it cannot once a library has started CUDA here."""
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            import torch

            status = int(torch.ones(1, device="cuda").item() != 1)
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def start(home: Path, log: Path, ranks: int, words: list[str], cold: bool = False, **environment: str) -> Started:
    """Begin `ortlaunch WORDS` on so many ranks in a folder: their launcher, which leads a session of its own.

    Args:
        ranks: 0 for a command that starts its ranks itself.
        cold: each rank loads its libraries itself.
        environment: variables beside those of this process.
    """
    sys.stdout.flush()
    if pid := os.fork():
        return Started(pid)
    status = 1
    with contextlib.suppress(BaseException):
        os.setsid()
        os.chdir(home)
        os.environ.update(environment)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        status = _launch(ranks, words, cold)
    os._exit(status)


def _launch(ranks: int, words: list[str], cold: bool) -> int:
    """The status of the first rank that ends with one; the others see by themselves that it is gone."""
    if ranks == 0:
        os.execv(sys.executable, [sys.executable, "-m", "ortlaunch.cli", *words])
    pids, found = set(), 0
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, ranks, words, cold)
        pids.add(pid)
    while pids:
        pid, status = os.wait()
        pids.discard(pid)
        found = found or os.waitstatus_to_exitcode(status)
    return abs(found)


def _be_rank(rank: int, ranks: int, words: list[str], cold: bool) -> NoReturn:
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in world.items()})
    if cold:
        os.execve(sys.executable, [sys.executable, "-m", "ortlaunch.cli", *words], os.environ)
    os.execve, subprocess.run = _become, _in_this_process  # type: ignore[assignment]
    sys.argv = ["ortlaunch", *words]
    status: object = 1
    try:
        from ortlaunch.cli import main

        status = main()
    except SystemExit as error:
        status = error.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 0)


def _become(_: str, argv: list[str], environment: dict[str, str]) -> NoReturn:
    """The rank, in this process."""
    from ortlaunch.worker.__main__ import main

    os.environ.update(environment)
    sys.argv = argv[argv.index("ortlaunch.worker") :]
    sys.exit(main())


def _in_this_process(command: list[str], **options: Any) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run`, but for a module of the worker side, which is loaded here."""
    if len(command) < 3 or not command[2].startswith("ortlaunch.worker."):
        return _run(command, **options)
    sys.argv = list(command[2:])
    try:
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    except SystemExit as error:
        return subprocess.CompletedProcess(command, error.code if isinstance(error.code, int) else 0)
    return subprocess.CompletedProcess(command, 0)
