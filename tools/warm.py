"""Whole runs that start as copies of a process that has loaded the libraries, for tools that start hundreds of runs.

Each rank is `ortlaunch train` under a launcher of the user's own, from the recipe to the export, in processes of its
own; only the `exec` between command and rank is left out, for it would load everything once more.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn


def load() -> None:
    """What every rank needs, into this process; nothing that starts a thread or reads a run's settings."""
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", DS_ACCELERATOR="cpu", HF_HUB_OFFLINE="1")
    import deepspeed.runtime.engine
    import deepspeed.runtime.zero.stage3  # noqa: F401
    import onnx  # noqa: F401
    import onnxruntime  # noqa: F401
    import torch
    import torch._inductor.compile_fx
    import torch.onnx

    import ortlaunch.cli
    import ortlaunch.worker.session
    import ortlaunch.worker.tasks.train  # noqa: F401

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


def start(home: Path, log: Path, ranks: int, words: list[str]) -> Started:
    """Begin `ortlaunch WORDS` on so many ranks in a folder: their launcher, which leads a session of its own."""
    sys.stdout.flush()
    if pid := os.fork():
        return Started(pid)
    status = 1
    with contextlib.suppress(BaseException):
        os.setsid()
        os.chdir(home)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        status = _launch(ranks, words)
    os._exit(status)


def _launch(ranks: int, words: list[str]) -> int:
    """The status of the first rank that ends with one; the others see by themselves that it is gone."""
    pids, found = set(), 0
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, ranks, words)
        pids.add(pid)
    while pids:
        pid, status = os.wait()
        pids.discard(pid)
        found = found or os.waitstatus_to_exitcode(status)
    return abs(found)


def _be_rank(rank: int, ranks: int, words: list[str]) -> NoReturn:
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in world.items()})
    os.execve = _become  # type: ignore[assignment]
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
