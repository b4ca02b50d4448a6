"""Tests that a run on one host opens no port that another address can reach."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.tiny import LAUNCHERS, ORTLAUNCH, RECIPE, write_recipe

# 127.0.0.1 and ::1 in the kernel's byte order.
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
# PRRTE's listener has no setting for its address (oob_tcp_listener.c uses INADDR_ANY), which a note
# of the run explains.
OPEN_MPI_OWN = {"prterun"}


def descendants(parent: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    yield parent
    for path in Path(f"/proc/{parent}/task").glob("*/children"):
        for child in path.read_text().split():
            yield from descendants(int(child))


def listening() -> dict[str, str]:
    """Return the local address of every TCP listener of this host, by the inode of its socket."""
    # Addresses are in the kernel's hexadecimal form.
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            # The kernel's number of the state LISTEN.
            if words[3] == "0A":
                found[f"socket:[{words[9]}]"] = words[1]
    return found


def listeners(parent: int) -> set[tuple[str, str]]:
    """Return (program, address:port) for every TCP listener of a process and its descendants."""
    sockets = listening()
    found = set()
    for pid in descendants(parent):
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            # A handle may be closed meanwhile.
            with contextlib.suppress(FileNotFoundError):
                address = sockets.get(os.readlink(handle))
                if address:
                    found.add((Path(f"/proc/{pid}/comm").read_text().strip(), address))
    return found


@pytest.fixture
def two_ranks(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A list for started commands, in the folder of a recipe without end; all are ended."""
    write_recipe(tmp_path, train={"max_steps": 10_000_000}, log={"every_steps": 1})
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.send_signal(signal.SIGTERM)
        process.wait(40)


def train(started: list[subprocess.Popen[bytes]], folder: Path, *command: str) -> int:
    """Start a command that trains in `run`, wait for its first steps, and return its process id."""
    # Open MPI refuses to run as root without the first two.
    root = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
    }
    with open(folder / "said", "wb") as said:
        started.append(
            subprocess.Popen(
                [*command, "--run-dir=run"],
                cwd=folder,
                env={**os.environ, **root},
                stdout=said,
                stderr=said,
            )
        )
    deadline = time.monotonic() + 60
    metrics = folder / "run" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 2:
        assert started[-1].poll() is None, (folder / "said").read_text()
        assert time.monotonic() < deadline, (folder / "said").read_text()
        time.sleep(0.1)
    return started[-1].pid


def open_to_others(parent: int) -> set[tuple[str, str]]:
    return {
        (name, address)
        for name, address in listeners(parent)
        if address.partition(":")[0] not in LOOPBACK
    }


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_of_one_host_open_no_port(
    launcher: str, two_ranks: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """Ranks of one host listen on loopback alone; of mpirun only Open MPI's own daemon does not."""
    # The ranks meet in the run folder. MPI, which would open ports of its own, is not loaded.
    parent = train(
        two_ranks,
        tmp_path,
        ORTLAUNCH,
        "train",
        RECIPE,
        f"--launcher={launcher}",
        "--nproc-per-node=2",
    )
    # gloo listens on loopback: without any listener, the check itself would not work.
    assert listeners(parent) != set()
    assert {one for one in open_to_others(parent) if one[0] not in OPEN_MPI_OWN} == set()
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in descendants(parent)]
    assert [text for text in maps if "/mpi4py/" in text] == []


@pytest.mark.slow
@pytest.mark.ci
def test_ranks_under_the_users_torchrun_open_no_port(
    two_ranks: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """Under the user's own torchrun, whose store is open, the ranks' store and gloo are not."""
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    words = (
        torchrun,
        "--standalone",
        "--nproc-per-node=2",
        "--no-python",
        ORTLAUNCH,
        "train",
        RECIPE,
    )
    parent = train(two_ranks, tmp_path, *words)
    # The process itself is torchrun, with its store.
    ranks = {one for pid in descendants(parent) if pid != parent for one in listeners(pid)}
    assert ranks != set()
    assert ranks & open_to_others(parent) == set()
