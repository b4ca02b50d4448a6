"""Whole runs, forked from a process that has loaded the libraries, for tests that start hundreds.

Each rank is `ortlaunch train` under a foreign launcher, from the recipe to the export, in separate
processes. Only the `exec` between command and rank is left out, since it would load all libraries
again.
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

# A fork server has a single thread, so its forks are safe after the libraries are loaded.
_CONTEXT = multiprocessing.get_context("forkserver")
# The real function: a rank replaces `subprocess.run` (see _be_rank).
_run = subprocess.run


def preload(device: str = "cpu") -> bool:
    """Load the libraries into the fork server; return whether its forks can use the device."""
    root = str(Path(__file__).resolve().parents[2])
    # Ranks that are started cold, by exec, find the package by PYTHONPATH.
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.update(
        ORTLAUNCH_PRELOADED_FOR=device, TOKENIZERS_PARALLELISM="false", PYTHONPATH=path
    )
    _CONTEXT.set_forkserver_preload(["tests.e2e.preloaded"])
    # CUDA cannot be used in a fork of a process that initialized it; a child tests that.
    process = _CONTEXT.Process(target=_try_device, args=(device,))
    process.start()
    process.join()
    return process.exitcode == 0


def _try_device(device: str) -> None:
    import torch

    # The exit status is the result; a fork needs no clean-up.
    os._exit(int(torch.ones(1, device=device).item() != 1))


def start(
    home: Path, log: Path, ranks: int, words: list[str], cold: bool = False, **environment: str
) -> ForkServerProcess:
    """Start `ortlaunch WORDS` in a folder.

    Args:
        home: the working folder.
        log: the file for the output of all ranks.
        ranks: the number of ranks; 0 for a command that starts its ranks itself.
        words: the arguments of `ortlaunch`.
        cold: each rank loads its libraries itself.
        environment: variables beside those of this process.

    Returns:
        The launcher of the ranks, which leads a session of its own.
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
        # Descriptors 1 and 2, so that output of C++ libraries reaches the log as well.
        os.dup2(file, 1)
        os.dup2(file, 2)
        status = _launch(ranks, words, cold)
    os._exit(status)


def _launch(ranks: int, words: list[str], cold: bool) -> int:
    """Start the ranks; return the first exit status that is not 0, or 0."""
    if ranks == 0:
        os.execv(sys.executable, [sys.executable, "-m", "ortlaunch.cli", *words])
    pids = set()
    found = 0
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, ranks, words, cold)
        pids.add(pid)
    # The other ranks detect a failed one by themselves, as under a foreign launcher.
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
    # ortlaunch would replace the process by the rank's; both calls stay in this process here.
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
    # Python's own exit would run the fork server's clean-up.
    os._exit(status if isinstance(status, int) else 0)


def _become(_: str, argv: list[str], environment: dict[str, str]) -> NoReturn:
    """Run the rank in this process, in place of `os.execve`."""
    from ortlaunch.worker.__main__ import supervise_rank_of_run_folder

    os.environ.update(environment)
    sys.argv = argv[argv.index("ortlaunch.worker") :]
    sys.exit(supervise_rank_of_run_folder())


def _in_this_process(command: list[str], **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run a command as `subprocess.run` does, but a module of the worker in this process."""
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
