"""What a run of one host opens to the network: nothing that another address reaches."""

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

LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
# PRRTE's listener has no setting for its address (oob_tcp_listener.c says INADDR_ANY), which a note of the run tells.
OPEN_MPI_OWN = {"prterun"}


def descendants(parent: int) -> Iterator[int]:
    """A process and all that it started, and they in turn."""
    yield parent
    for path in Path(f"/proc/{parent}/task").glob("*/children"):
        for child in path.read_text().split():
            yield from descendants(int(child))


def listening() -> dict[str, str]:
    """Local address of every TCP listener of this host, by its socket's inode; in the kernel's hexadecimal."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                found[f"socket:[{words[9]}]"] = words[1]
    return found


def listeners(parent: int) -> set[tuple[str, str]]:
    """(program, address:port) of every TCP listener of a process and of its descendants."""
    sockets = listening()
    found = set()
    for pid in descendants(parent):
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                address = sockets.get(os.readlink(handle))
                if address:
                    found.add((Path(f"/proc/{pid}/comm").read_text().strip(), address))
    return found


@pytest.fixture
def two_ranks(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts commands in the folder of a recipe without end; ends what they started."""
    write_recipe(tmp_path, train={"max_steps": 10_000_000}, log={"every_steps": 1})
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.send_signal(signal.SIGTERM)
        process.wait(40)


def train(started: list[subprocess.Popen[bytes]], folder: Path, *command: str) -> int:
    """Start a command that trains in `run`, wait for its first steps; its process."""
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
    """Torchrun, guardians and ranks listen on loopback alone; of mpirun only Open MPI's own daemon is left.

    Ranks meet in the run folder: MPI, which would open ports of its own, is not loaded.
    """
    parent = train(
        two_ranks,
        tmp_path,
        ORTLAUNCH,
        "train",
        RECIPE,
        f"--launcher={launcher}",
        "--nproc-per-node=2",
    )
    assert listeners(parent) != set()  # gloo's, so that the looking is seen to find
    assert {one for one in open_to_others(parent) if one[0] not in OPEN_MPI_OWN} == set()
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in descendants(parent)]
    assert [text for text in maps if "/mpi4py/" in text] == []


@pytest.mark.slow
@pytest.mark.ci
def test_ranks_under_the_users_torchrun_open_no_port(
    two_ranks: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """Under a torchrun of the user's own, whose store is open, the ranks' own store and gloo are not."""
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
    ranks = {one for pid in descendants(parent) if pid != parent for one in listeners(pid)}
    assert ranks != set()
    assert ranks & open_to_others(parent) == set()
