"""Hosts, launcher and device of a run, from command line, recipe, environment and machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.base.errors import HostfileError, PlanError, RankError
from ortlaunch.planning.hosts import Host
from ortlaunch.planning.world import LaunchOptions, World, resolve_hosts_launcher_and_device
from ortlaunch.rank import Rank
from tests.makers import host, recipe

# The fixture simulates a host of 4 cores with the GPUs of the variable GPUS.
pytestmark = pytest.mark.usefixtures("box")
HERE = (Host("localhost", 1, (0,)),)
NOTHING = LaunchOptions()


def torchrun(rank: int, size: int, local: int, per_node: int) -> dict[str, str]:
    """Return the variables that torchrun sets."""
    names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": per_node}
    return {**{name: str(value) for name, value in names.items()}, "TORCHELASTIC_RUN_ID": "none"}


def open_mpi(rank: int, size: int, local: int, per_node: int) -> dict[str, str]:
    """Return the variables that Open MPI's mpirun sets."""
    names = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local, "LOCAL_SIZE": per_node}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()}


def resolved(
    launch: dict[str, Any] | None = None, options: LaunchOptions = NOTHING, **environ: str
) -> World:
    """Return the world of a recipe with this `launch`, for this command line, in this environment."""
    return resolve_hosts_launcher_and_device(recipe(launch=launch or {}), options, environ)


@pytest.mark.parametrize(
    ("launch", "options", "gpus", "hosts", "launcher", "device"),
    [
        ({}, LaunchOptions(), 0, HERE, "local", "cpu"),
        ({}, LaunchOptions(), 1, HERE, "local", "cuda"),
        ({}, LaunchOptions(), 4, (host("localhost", 4),), "torchrun", "cuda"),
        # On a CPU, GPUs do not set the number of ranks.
        ({"device": "cpu"}, LaunchOptions(), 4, HERE, "local", "cpu"),
        ({}, LaunchOptions(processes_per_node=2), 0, (host("localhost", 2),), "torchrun", "cpu"),
        ({}, LaunchOptions(processes_per_node=2), 4, (host("localhost", 2),), "torchrun", "cuda"),
        # More ranks than cores are allowed if the user requests them.
        ({}, LaunchOptions(processes_per_node=9), 0, (host("localhost", 9),), "torchrun", "cpu"),
        ({"processes_per_node": 3}, LaunchOptions(), 0, (host("localhost", 3),), "torchrun", "cpu"),
        (
            {"processes_per_node": 3},
            LaunchOptions(processes_per_node=2),
            0,
            (host("localhost", 2),),
            "torchrun",
            "cpu",
        ),
        ({"nodes": 1}, LaunchOptions(), 0, HERE, "local", "cpu"),
        ({"launcher": "mpi"}, LaunchOptions(), 0, HERE, "mpi", "cpu"),
        ({"launcher": "torchrun"}, LaunchOptions(), 0, HERE, "torchrun", "cpu"),
        (
            {"launcher": "torchrun"},
            LaunchOptions("mpi", 2),
            0,
            (host("localhost", 2),),
            "mpi",
            "cpu",
        ),
        (
            {"launcher": "mpi"},
            LaunchOptions("auto", 2),
            0,
            (host("localhost", 2),),
            "torchrun",
            "cpu",
        ),
        ({}, LaunchOptions("local"), 0, HERE, "local", "cpu"),
    ],
)
def test_on_this_host(
    launch: dict[str, Any],
    options: LaunchOptions,
    gpus: int,
    hosts: tuple[Host, ...],
    launcher: str,
    device: str,
) -> None:
    """Without a host file there is one process for each GPU, else one; the command line wins."""
    notes = (
        ("launcher mpi: mpirun opens a port on every interface of this host, which no "
            "setting prevents; launcher torchrun opens none on one host",) if launcher == "mpi" else ()
    )  # fmt: skip
    assert resolved(launch, options, GPUS=str(gpus))._replace(forward=()) == World(
        # The host's 4 cores are divided among its ranks.
        hosts,
        launcher,
        device,
        None,
        notes,
        max(1, 4 // hosts[0].slots),
    )


@pytest.mark.parametrize("tell", [torchrun, open_mpi])
@pytest.mark.parametrize(
    ("rank", "hosts"),
    [
        (Rank(0, 1, 0, 1), HERE),
        (Rank(1, 2, 1, 2), (host("localhost", 2),)),
        (Rank(3, 4, 1, 2), (host("node0", 2), host("node1", 2))),
        (Rank(2, 3, 0, 1), (host("node0", 1), host("node1", 1), host("node2", 1))),
    ],
)
def test_inside_a_launcher(tell: Any, rank: Rank, hosts: tuple[Host, ...]) -> None:
    """Under a launcher, `auto` is that launcher's rank, with the launcher's hosts."""
    threads = 4 // hosts[0].slots if len(hosts) == 1 else None
    found = resolved(None, LaunchOptions(), **tell(*rank))
    assert found._replace(forward=()) == World(hosts, "inside", "cpu", rank, (), threads)


def test_declared_hosts_can_be_planned() -> None:
    """Hosts that `launch` only counts can be planned on a host without GPUs."""
    launch = {"nodes": 2, "processes_per_node": 8, "device": "cuda"}
    found = resolved(launch, LaunchOptions(planned_only=True))
    assert (found.hosts, found.launcher, found.device) == (
        (host("node0", 8), host("node1", 8)),
        "inside",
        "cuda",
    )
    with pytest.raises(
        PlanError, match=r"their ranks are not known here; give launch\.processes_per_node"
    ):
        # Without GPUs here, the ranks of a host are unknown.
        resolved({"nodes": 2}, LaunchOptions(planned_only=True))


def test_inside_a_launcher_with_gpus() -> None:
    """A launcher's number of ranks holds, with any number of GPUs."""
    found = resolved(None, LaunchOptions(), **torchrun(0, 2, 0, 2), GPUS="8")
    assert (found.hosts, found.device) == ((host("localhost", 2),), "cuda")


def test_one_rank_of_a_launcher_may_start_more() -> None:
    """`mpirun -n 1 ortlaunch train --nproc-per-node 2` starts two ranks of its own."""
    found = resolved(None, LaunchOptions(processes_per_node=2), **open_mpi(0, 1, 0, 1))
    assert (found.launcher, found.enclosing_rank, found.hosts) == (
        "torchrun",
        None,
        (host("localhost", 2),),
    )


def written(folder: Path, text: str) -> str:
    """Write a host file and return its path."""
    path = folder / "hosts"
    path.write_text(text)
    return str(path)


NO_GPU_NOTE = (
    "launch.device is auto, and this host has no GPU: cpu is used; "
    "if other hosts have GPUs, set launch.device=cuda"
)


@pytest.mark.parametrize(
    ("text", "options", "launch", "hosts", "launcher"),
    [
        ("localhost slots=2\n", LaunchOptions(), {}, (host("localhost", 2),), "torchrun"),
        ("localhost slots=1\n", LaunchOptions(), {}, HERE, "local"),
        ("127.0.0.1 slots=2\n", LaunchOptions(), {}, (host("127.0.0.1", 2),), "torchrun"),
        # No mpirun accepts ::1.
        ("[::1] slots=2\n", LaunchOptions(), {}, (host("localhost", 2),), "torchrun"),
        # The name of this host in the fixture.
        ("box slots=2\n", LaunchOptions(), {}, (host("box", 2),), "torchrun"),
        (
            "me@box.example.com slots=2\n",
            LaunchOptions(),
            {},
            (host("me@box.example.com", 2),),
            "torchrun",
        ),
        ("localhost slots=2\n", LaunchOptions("mpi"), {}, (host("localhost", 2),), "mpi"),
        ("far slots=1\n", LaunchOptions(), {}, (host("far", 1),), "mpi"),
        ("a slots=8\nb slots=8\n", LaunchOptions(), {}, (host("a", 8), host("b", 8)), "mpi"),
        (
            "a slots=8\nb slots=8\n",
            LaunchOptions(),
            {"nodes": 2, "processes_per_node": 8},
            (host("a", 8), host("b", 8)),
            "mpi",
        ),
        (
            "a slots=8\nb slots=8\n",
            LaunchOptions(processes_per_node=2),
            {},
            (host("a", 2), host("b", 2)),
            "mpi",
        ),
        (
            "a slots=8\nb slots=8\n",
            LaunchOptions(include="b:1,3"),
            {},
            (Host("b", 2, (1, 3)),),
            "mpi",
        ),
        (
            "a slots=4\nb slots=4\n",
            LaunchOptions(exclude="b:0@a"),
            {},
            (Host("b", 3, (1, 2, 3)),),
            "mpi",
        ),
        ("a\nb\n", LaunchOptions(processes_per_node=2), {}, (host("a", 2), host("b", 2)), "mpi"),
        ("a\nb\n", LaunchOptions(), {"processes_per_node": 2}, (host("a", 2), host("b", 2)), "mpi"),
    ],
)
def test_host_file(
    text: str,
    options: LaunchOptions,
    launch: dict[str, Any],
    hosts: tuple[Host, ...],
    launcher: str,
    tmp_path: Path,
) -> None:
    """Hosts, slots and filters of a file decide the world; a file of this machine needs no mpirun."""
    path = written(tmp_path, text)
    found = resolved(launch, options._replace(hostfile=path))
    assert (found.hosts, found.launcher, found.enclosing_rank) == (hosts, launcher, None)
    assert found.notes[0].startswith(f"{path}: read as ")
    assert found.notes[0].endswith(f"; hosts: {len(hosts)}")
    # Only runs on other hosts get the note.
    assert (NO_GPU_NOTE in found.notes) == (hosts[0].name in ("a", "b", "far"))


@pytest.mark.parametrize(
    ("launch", "environ"),
    [
        ({"device": "cpu"}, {}),
        ({"device": "cuda"}, {}),
        ({}, {"GPUS": "8"}),
        ({}, open_mpi(0, 2, 0, 1)),
    ],
)
def test_no_note_where_the_device_is_clear(
    launch: dict[str, Any], environ: dict[str, str], tmp_path: Path
) -> None:
    """The note on a login node without GPUs is only for runs with device auto."""
    path = written(tmp_path, "a slots=1\nb slots=1\n")
    assert NO_GPU_NOTE not in resolved(launch, LaunchOptions(hostfile=path), **environ).notes


@pytest.mark.parametrize(
    ("text", "launch", "options", "environ", "message"),
    [
        (None, {}, LaunchOptions(include="a"), {}, "--include and --exclude need a host file: give --hostfile"),
        (None, {}, LaunchOptions(exclude="a"), {}, "--include and --exclude need a host file: give --hostfile"),
        (
            None, {"nodes": 4}, LaunchOptions(), {},
            "launch.nodes is 4, and there is no --hostfile; give one, or start under a scheduler "
            "(ortlaunch submit), or override launch.nodes=1 to train on this host alone",
        ),
        ("a slots=2\nb slots=1\n", {}, LaunchOptions(processes_per_node=2), {},
         "--nproc-per-node is 2, and b has 1 slots in the host file"),
        ("a slots=2\nb slots=2\n", {"nodes": 3}, LaunchOptions(), {},
         "launch.nodes is 3, and there are 2 hosts; they must be equal"),
        ("a slots=2\nb slots=2\n", {"nodes": 2}, LaunchOptions(include="a"), {},
         "launch.nodes is 2, and there are 1 hosts; they must be equal"),
        ("a slots=2\nb slots=4\n", {"processes_per_node": 4}, LaunchOptions(), {},
         "launch.processes_per_node is 4, and hosts have other numbers of slots: a 2"),
        (None, {"processes_per_node": 4}, LaunchOptions(), torchrun(0, 2, 0, 2),
         "launch.processes_per_node is 4, and hosts have other numbers of slots: localhost 2"),
        (None, {"nodes": 2}, LaunchOptions(), torchrun(0, 2, 0, 2),
         "launch.nodes is 2, and there are 1 hosts; they must be equal"),
        (None, {}, LaunchOptions(), open_mpi(0, 3, 0, 2),
         "the launcher started 3 ranks, 2 of them on this host: the hosts have different numbers "
         "of ranks; give --hostfile with the slots of each"),
        (None, {}, LaunchOptions("torchrun"), open_mpi(1, 2, 1, 2),
         "this is already rank 1 of 2 under Open MPI; leave --launcher at auto to be that rank, "
         "or start `ortlaunch train` once, outside Open MPI"),
        (None, {}, LaunchOptions(processes_per_node=2), torchrun(1, 2, 1, 2),
         "this is already rank 1 of 2 under torchrun; leave --launcher at auto to be that rank, "
         "or start `ortlaunch train` once, outside torchrun"),
        (None, {}, LaunchOptions("local", 2), {},
         "launcher local runs one process on this host, not 2 ranks on localhost; use torchrun or "
         "mpi"),
        ("a slots=1\n", {}, LaunchOptions("local"), {},
         "launcher local runs one process on this host, not 1 rank on a; use torchrun or mpi"),
        ("localhost slots=5\n", {}, LaunchOptions(), {},
         "localhost has 4 cores and no GPU, and the host file gives it 5 slots; lower them, or "
         "use --nproc-per-node without a host file to put more ranks than cores on this machine"),
        ("localhost slots=5\n", {}, LaunchOptions(), {"GPUS": "4"},
         "localhost has 4 GPUs, and 5 ranks are requested; give it at most 4 slots"),
        (None, {}, LaunchOptions(processes_per_node=5), {"GPUS": "4"},
         "localhost has 4 GPUs, and 5 ranks are requested; give it at most 4 slots"),
        ("localhost slots=6\n", {}, LaunchOptions(include="localhost:1,5"), {"GPUS": "4"},
         "localhost has 4 GPUs, and 2 ranks are requested; give it at most 4 slots"),
        (None, {"device": "cuda"}, LaunchOptions(), {},
         "launch.device is cuda, and localhost has no GPU that CUDA_VISIBLE_DEVICES shows; start "
         "on a host that has one, name such hosts with --hostfile, or set launch.device=cpu"),
        ("localhost slots=1\n127.0.0.1 slots=1\n", {}, LaunchOptions(), {},
         "localhost and 127.0.0.1 are all this host; write it once, with all its slots"),
        ("box slots=1\na slots=1\nme@box.example.com slots=1\n", {}, LaunchOptions(), {},
         "box and me@box.example.com are all this host; write it once, with all its slots"),
    ],
)  # fmt: skip
def test_what_does_not_fit(
    text: str | None,
    launch: dict[str, Any],
    options: LaunchOptions,
    environ: dict[str, str],
    message: str,
    tmp_path: Path,
) -> None:
    """A world that is impossible, or not the requested one, is an error with both numbers."""
    if text is not None:
        options = options._replace(hostfile=written(tmp_path, text))
    with pytest.raises(PlanError) as caught:
        resolved(launch, options, **environ)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "options", "complaint"),
    [
        (None, LaunchOptions(), "cannot be read: No such file or directory"),
        ("a\n", LaunchOptions(), "host 'a' has no slots"),
        ("a slots=2\n", LaunchOptions(include="b"), "--include:1:1: no such host: 'b'"),
        (
            "a slots=2\n",
            LaunchOptions(include="a", exclude="a"),
            "--include and --exclude exclude each other",
        ),
    ],
)
def test_wrong_host_files(
    text: str | None, options: LaunchOptions, complaint: str, tmp_path: Path
) -> None:
    """Errors of the host file's reader are passed on."""
    path = str(tmp_path / "absent") if text is None else written(tmp_path, text)
    with pytest.raises(HostfileError) as caught:
        resolved(None, options._replace(hostfile=path))
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({"RANK": "0"}, ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]),
        ({"RANK": "0", **open_mpi(1, 2, 1, 2)}, ["RANK", "OMPI_COMM_WORLD_RANK"]),
    ],
)
def test_contradictory_environments(environ: dict[str, str], names: list[str]) -> None:
    """A partial or contradictory set of rank variables is an error that names them."""
    with pytest.raises(RankError) as caught:
        resolved(None, LaunchOptions(), **environ)
    assert [name for name in names if name not in str(caught.value)] == []


def test_the_tests_see_no_launcher() -> None:
    """The fixture of tests/conftest.py hides a launcher's variables from every test."""
    left = [
        name for name in os.environ if name.startswith(("OMPI_", "PMI", "SLURM_", "TORCHELASTIC_"))
    ]
    assert [
        *left,
        *({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} & set(os.environ)),
    ] == []


def test_gpus_are_planned_where_there_are_none() -> None:
    """On a login node, a plan for GPUs has a note; a run is refused (above)."""
    found = resolved({"device": "cuda", "processes_per_node": 8}, LaunchOptions(planned_only=True))
    assert (found.device, found.hosts) == ("cuda", (host("localhost", 8),))
    assert found.notes == (
        "launch.device is cuda, and localhost has no GPU that CUDA_VISIBLE_DEVICES shows: "
        "planned as if it had 8",
    )


@pytest.mark.parametrize(
    ("launch", "environ", "threads"),
    [
        ({}, {}, 4),
        ({"processes_per_node": 2}, {}, 2),
        # 4 cores for 3 ranks: rounded down.
        ({"processes_per_node": 3}, {}, 1),
        # At least one.
        ({"processes_per_node": 9}, {}, 1),
        ({"processes_per_node": 2}, {"OMP_NUM_THREADS": "1"}, 1),
        ({"processes_per_node": 2}, {"OMP_NUM_THREADS": "3"}, 3),
        ({"env": {"OMP_NUM_THREADS": "7"}}, {"OMP_NUM_THREADS": "3"}, 7),
        # A value that is no number is ignored.
        ({}, {"OMP_NUM_THREADS": "many"}, 4),
        # torchrun sets 1 by itself, which is no choice of the user.
        ({}, {**torchrun(0, 2, 0, 2), "OMP_NUM_THREADS": "1"}, 2),
        ({"env": {"OMP_NUM_THREADS": "1"}}, torchrun(0, 2, 0, 2), 1),
        # The ranks are on two hosts, whose cores are unknown.
        ({}, torchrun(0, 4, 0, 2), None),
        ({}, {**torchrun(0, 4, 0, 2), "OMP_NUM_THREADS": "5"}, 5),
    ],
)
def test_threads_of_a_rank(
    launch: dict[str, Any], environ: dict[str, str], threads: int | None
) -> None:
    """Threads are those of the recipe or the shell, else a share of this host's cores."""
    assert resolved(launch, **environ).threads == threads


@pytest.mark.parametrize(
    ("gpus", "devices"), [("1", (0, 0, 0)), ("2", (0, 1, 0)), ("4", (0, 1, 2))]
)
def test_ranks_share_gpus_where_a_test_allows_it(gpus: str, devices: tuple[int, ...]) -> None:
    """ORTLAUNCH_SHARE_GPUS=1 puts more ranks on this host than it has GPUs, with a note."""
    world = resolved(None, LaunchOptions(processes_per_node=3), GPUS=gpus, ORTLAUNCH_SHARE_GPUS="1")
    assert (world.device, world.hosts) == ("cuda", (Host("localhost", 3, devices),))
    assert any("ORTLAUNCH_SHARE_GPUS=1: ranks share" in note for note in world.notes) == (
        devices != (0, 1, 2)
    )
