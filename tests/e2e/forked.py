"""Whole runs that start as copies of a process that has loaded the libraries, for tests that start hundreds of runs.

Each rank is `ortlaunch train` under a launcher of the user's own, from the recipe to the export, in processes of its
own; only the `exec` between command and rank is left out, for it would load everything once more.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import runpy
import subprocess
import sys
import traceback
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NoReturn

_CONTEXT = multiprocessing.get_context("forkserver")
_run = subprocess.run


def preload(device: str = "cpu") -> bool:
    """Load the libraries into the process that is copied; whether its copies can use the device."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.update(
        ORTLAUNCH_PRELOADED_FOR=device, TOKENIZERS_PARALLELISM="false", PYTHONPATH=path
    )
    _CONTEXT.set_forkserver_preload(["tests.e2e.preloaded"])
    process = _CONTEXT.Process(target=_try_device, args=(device,))
    process.start()
    process.join()
    return process.exitcode == 0


def _try_device(device: str) -> None:
    import torch

    os._exit(int(torch.ones(1, device=device).item() != 1))


def start(
    home: Path, log: Path, ranks: int, words: list[str], cold: bool = False, **environment: str
) -> ForkServerProcess:
    """Begin `ortlaunch WORDS` on so many ranks in a folder: their launcher, which leads a session of its own.

    Args:
        ranks: 0 for a command that starts its ranks itself.
        cold: each rank loads its libraries itself.
        environment: variables beside those of this process.
    """
    process = _CONTEXT.Process(
        target=_begin, args=(home, log, ranks, words, cold, {**os.environ, **environment})
    )
    process.start()
    return process


def _begin(
    home: Path, log: Path, ranks: int, words: list[str], cold: bool, environment: dict[str, str]
) -> NoReturn:
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
    pids = set()
    found = 0
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
    sys.stdin = io.StringIO(options.get("input") or "")
    try:
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    except SystemExit as error:
        return subprocess.CompletedProcess(
            command, error.code if isinstance(error.code, int) else 0
        )
    return subprocess.CompletedProcess(command, 0)
