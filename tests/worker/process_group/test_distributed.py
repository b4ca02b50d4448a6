"""The rendezvous of ranks and their checks, tested in one process."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ortlaunch.base.errors import LaunchError, MissingDependency
from ortlaunch.planning.hosts import Host
from ortlaunch.rank import Rank
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.worker.process_group import distributed, join
from ortlaunch.worker.process_group.flight_recorder import set_flight_recorder_variables_unless_set
from ortlaunch.worker.supervision import interface
from tests.makers import host, plan, recipe

HOSTS = (host("a", 2), Host("b", 2, (1, 3)))


@pytest.fixture(autouse=True)
def _box(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this machine the name box."""
    monkeypatch.setattr(socket, "gethostname", lambda: "box")


def test_collectives_are_recorded_where_the_user_has_not_said_how(tmp_path: Path) -> None:
    """NCCL's flight recorder writes into the run folder, and keeps the user's settings."""
    # Both today's names and those of torch 2.4 are set.
    environ = {"TORCH_FR_BUFFER_SIZE": "7"}
    set_flight_recorder_variables_unless_set(environ, RunDir(tmp_path))
    prefix = str(tmp_path / "errors" / "nccl_trace_rank_")
    assert environ == {
        "TORCH_FR_BUFFER_SIZE": "7", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": prefix, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix,
    }  # fmt: skip


@pytest.mark.parametrize("rank", plan(recipe(), HOSTS, "mpi").ranks)
def test_the_planned_world_is_agreed(rank: Rank) -> None:
    """Every planned rank is accepted."""
    distributed.require_planned_rank(plan(recipe(), HOSTS, "mpi"), rank)


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (
            Rank(0, 3, 0, 2),
            "the plan has 4 ranks, the launcher started 3; nothing was trained, because a "
            "different world size is a different training",
        ),
        (
            Rank(2, 4, 2, 4),
            "rank 2 should be Rank(rank=2, world_size=4, local_rank=0, local_world_size=2), the launcher made it "
            "Rank(rank=2, world_size=4, local_rank=2, local_world_size=4)",
        ),
    ],
)
def test_another_world_is_refused(rank: Rank, message: str) -> None:
    """Fewer ranks than planned, or ranks on other hosts, are refused."""
    with pytest.raises(LaunchError) as caught:
        distributed.require_planned_rank(plan(recipe(), HOSTS, "mpi"), rank)
    assert str(caught.value) == message


class Gathered(distributed.DistributedContext):
    """Rank 1 of a group whose other ranks send other texts."""

    def __init__(self, others: list[str]) -> None:
        super().__init__(Rank(1, len(others) + 1, 1, len(others) + 1), torch.device("cpu"))
        self.others = others

    def gather(self, value: object) -> list[object]:
        return (
            [self.others[0], value, *self.others[1:]]
            if self.others[0] != "same"
            else [value] * self.size
        )


@pytest.mark.parametrize("zero", [None, {"stage": 1}])
def test_a_debug_level_that_crashes_torch(zero: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL is INFO, said once, where DistributedDataParallel trains."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        for rank in range(2):
            distributed._lower_torch_debug_level_for_ddp(
                plan(recipe(zero=zero)), Rank(rank, 2, rank, 2)
            )
        level = dist.get_debug_level()
    finally:
        dist.set_debug_level(before)
    assert level == (dist.DebugLevel.DETAIL if zero else dist.DebugLevel.INFO)
    assert capsys.readouterr().out.count("INFO, for DETAIL crashes") == (0 if zero else 1)


def test_the_same_files_are_agreed() -> None:
    """Ranks that have read the same recipe and plan agree."""
    distributed.require_same_recipe_and_plan_and_mark_ranks_met(
        Gathered(["same"]), RunDir("x"), ["recipe", "plan"]
    )


def test_different_files_are_refused() -> None:
    """A rank that has read another recipe or plan than the others ends the run."""
    with pytest.raises(LaunchError) as caught:
        distributed.require_same_recipe_and_plan_and_mark_ranks_met(
            Gathered(["another"]), RunDir("x"), ["recipe", "plan"]
        )
    assert str(caught.value) == (
        "rank 1 and rank 0 have read different files in x; start again, "
        "in a folder that all hosts share"
    )


def on_cuda() -> Any:
    """Return a plan for GPUs: ranks 2 and 3 have devices 1 and 3 of the second host."""
    return distributed.Plan.from_plan_json_text(
        plan(recipe(), HOSTS, "mpi").to_json().replace('"device": "cpu"', '"device": "cuda"')
    )


def test_gpus_are_the_planned_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA shows only the planned GPUs of a host, and LOCAL_RANK is the index among them."""
    # DeepSpeed uses LOCAL_RANK as the index of the GPU.
    chosen: list[int] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setattr(
        distributed, "set_cuda_kernel_cache_and_loading_unless_set", lambda environ: None
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    rank = Rank(3, 4, 1, 2)
    device = distributed._set_visible_gpus_and_return_device(on_cuda(), rank)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert (device, chosen) == (torch.device("cuda", 1), [1])
    monkeypatch.setattr(os, "environ", {})
    distributed._set_rank_environment_variables(rank, device)
    assert os.environ["LOCAL_RANK"] == "1"


def test_fewer_gpus_than_planned_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with fewer GPUs than planned is an error with the missing GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setattr(
        distributed, "set_cuda_kernel_cache_and_loading_unless_set", lambda environ: None
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        LaunchError,
        match=r"^rank 3 is planned on GPU 3 of box, and CUDA shows 1 of its planned GPUs \(1, 3\)$",
    ):
        distributed._set_visible_gpus_and_return_device(on_cuda(), Rank(3, 4, 1, 2))


@pytest.mark.parametrize(
    ("version", "world_size", "devices", "device", "expected"),
    [
        (
            "2.13.0+cu130",
            2,
            (0, 1),
            "cuda:1",
            {"backend": "nccl", "device_id": torch.device("cuda:1")},
        ),
        ("2.6.0", 2, (0, 1), "cuda:1", {"backend": "nccl", "device_id": torch.device("cuda:1")}),
        # With these releases torch hangs if it gets the device.
        ("2.6.1", 2, (0, 1), "cuda:1", {"backend": "nccl"}),
        ("2.7.0+cu126", 2, (0, 1), "cuda:1", {"backend": "nccl"}),
        ("2.7.1", 2, (0, 1), "cuda:1", {"backend": "nccl", "device_id": torch.device("cuda:1")}),
        # One rank has nothing to connect.
        ("2.13.0", 1, (0,), "cuda:0", {"backend": "nccl"}),
        # The ranks share a GPU.
        ("2.13.0", 2, (0, 0), "cuda:0", {"backend": "gloo"}),
        ("2.13.0", 2, (0, 1), "cpu", {"backend": "gloo"}),
    ],
)
def test_nccl_is_given_the_ranks_gpu(
    version: str,
    world_size: int,
    devices: tuple[int, ...],
    device: str,
    expected: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """init_process_group gets the device unless torch hangs with it; shared GPUs use gloo."""
    # The arguments of init_process_group, which is not called.
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        distributed.dist, "init_process_group", lambda **arguments: given.update(arguments)
    )
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(os, "environ", {})
    rank = Rank(world_size - 1, world_size, world_size - 1, world_size)
    backend = distributed._init_process_group_arguments(devices, rank, torch.device(device))
    join.meet_ranks_and_init_process_group(on_cuda(), rank, RunDir(tmp_path), backend)
    assert {name: given[name] for name in ("backend", "device_id") if name in given} == expected
    assert (given["rank"], given["world_size"]) == (rank.rank, world_size)


def test_no_gpu_where_the_plan_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a visible GPU the error has torch's version and the host."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setattr(
        distributed, "set_cuda_kernel_cache_and_loading_unless_set", lambda environ: None
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        LaunchError, match=r"^the plan trains on cuda, and no GPU is visible on box: torch 2\."
    ):
        distributed._set_visible_gpus_and_return_device(on_cuda(), Rank(2, 4, 0, 2))


def an_mpi(monkeypatch: pytest.MonkeyPatch, size: int, hosts: list[str]) -> None:
    """Install a fake mpi4py whose world has this size and these hosts; this process is rank 0."""
    world = types.SimpleNamespace(
        size=size, rank=0, allgather=lambda name: hosts, bcast=lambda value, root: value
    )
    mpi = types.SimpleNamespace(
        COMM_WORLD=world, Get_library_version=lambda: "Other MPI 1.0\nand more"
    )
    monkeypatch.setitem(sys.modules, "mpi4py", types.SimpleNamespace(MPI=mpi))


def test_the_store_of_several_hosts_listens_on_one_address() -> None:
    """Rank 0's store listens only on the address that the others use, and they can read it."""
    listener = join._listen_on_free_port("127.0.0.2")
    where = listener.getsockname()
    with ThreadPoolExecutor() as pool:
        # Both ranks at once, as in a run.
        stores = [
            pool.submit(join._serve_or_connect_tcp_store, rank, where, held)
            for rank, held in ((Rank(0, 2, 0, 1), listener), (Rank(1, 2, 0, 1), None))
        ]
        mine, others = (each.result() for each in stores)
    mine.set("key", "value")
    assert others.get("key") == b"value"
    # Another process may listen on the same port of another address: only own sockets count.
    own = {link.resolve().name for link in Path("/proc/self/fd").iterdir()}
    sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    # State 0A is LISTEN; addresses are hexadecimal, in the byte order of the host.
    bound = [one[1] for one in sockets if one[3] == "0A" and f"socket:[{one[9]}]" in own]
    assert [address for address in bound if address.endswith(f":{where[1]:04X}")] == [
        f"0200007F:{where[1]:04X}"
    ]


def test_one_host_stays_on_loopback() -> None:
    """On one host gloo and NCCL listen on loopback, unless the user has set an interface."""
    environ = {"NCCL_SOCKET_IFNAME": "eth1"}
    interface.set_gloo_and_nccl_interface_unless_set("127.0.0.1", environ)
    assert environ == {"NCCL_SOCKET_IFNAME": "eth1", "GLOO_SOCKET_IFNAME": "lo"}


def test_one_rank_alone_stays_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interface of gloo is set for a single rank, too, before gloo starts."""
    # gloo listens even for one rank, by default on the address of the host's name.
    told: list[str] = []
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(
        distributed.dist,
        "init_process_group",
        lambda *_, **__: told.append(os.environ["GLOO_SOCKET_IFNAME"]),
    )
    join.meet_ranks_and_init_process_group(
        plan(recipe()), Rank(0, 1, 0, 1), RunDir("x"), {"backend": "gloo"}
    )
    assert told == ["lo"]


def test_mpi4py_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without mpi4py, the error of ranks under mpirun has the command to install it."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(MissingDependency) as caught:
        join._store_of_rank_0_through_mpi(Rank(0, 2, 0, 2))
    assert str(caught.value).startswith("ranks under mpirun connect through mpi4py (")
    assert str(caught.value).endswith('): pip install "ortlaunch[mpi]"')


def test_mpi4py_of_another_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """An mpi4py that was built for another MPI is an error."""
    # Its world then has one rank only.
    an_mpi(monkeypatch, 1, ["box"])
    with pytest.raises(LaunchError) as caught:
        join._store_of_rank_0_through_mpi(Rank(0, 2, 0, 2))
    assert str(caught.value) == (
        "mpirun says 2 ranks, mpi4py's MPI says 1: they belong to different MPI installations "
        "(Other MPI 1.0); install mpi4py for the MPI of your mpirun"
    )


@pytest.mark.parametrize(
    ("routes", "name", "address"),
    [
        ({"b": "10.0.0.1"}, "127.0.1.1", "10.0.0.1"),
        # A route from loopback does not lead to another host.
        ({"b": "127.0.0.1", "c": "10.0.0.2"}, "127.0.1.1", "10.0.0.2"),
        # Without a route, the address of the host's name is used.
        ({}, "10.0.0.3", "10.0.0.3"),
        ({"b": "127.0.0.1"}, "10.0.0.3", "10.0.0.3"),
    ],
)
def test_the_address_that_others_reach(
    routes: dict[str, str], name: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address is the source of a route to another host, else that of this host's name."""
    network(monkeypatch, routes, name)
    assert interface.own_address_reachable_by_hosts(["box", "b", "c"], {}) == address


def test_no_address_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with loopback addresses only is an error with advice."""
    network(monkeypatch, {}, "127.0.1.1")
    with pytest.raises(LaunchError) as caught:
        interface.own_address_reachable_by_hosts(["b", "box", "c"], {})
    assert str(caught.value) == (
        "box has no IPv4 address that other hosts can reach (b, box, c); give its name a routable "
        "one in DNS or /etc/hosts, or name the interface: launch.interface=eth0"
    )


def test_the_interface_that_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set interface gives this host's address for both libraries; an unknown one is an error."""
    environ = {"GLOO_SOCKET_IFNAME": "lo"}
    assert interface.own_address_reachable_by_hosts(["b"], environ) == "127.0.0.1"
    interface.set_gloo_and_nccl_interface_unless_set("10.0.0.1", environ)
    assert environ == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    with pytest.raises(
        LaunchError, match=r"is ib7, and box has no such interface with an address; it has lo"
    ):
        interface.set_gloo_and_nccl_interface_unless_set("10.0.0.1", {"GLOO_SOCKET_IFNAME": "ib7"})
    # torch's form of several; and NCCL's of exclusion, which gloo does not know.
    assert (
        interface.own_address_reachable_by_hosts(["b"], {"GLOO_SOCKET_IFNAME": "lo,lo"})
        == "127.0.0.1"
    )
    with pytest.raises(LaunchError, match=r"is lo,ib7: ib7, and box has no such"):
        interface.own_address_reachable_by_hosts(["b"], {"GLOO_SOCKET_IFNAME": "lo,ib7"})
    # A single host is checked, too.
    with pytest.raises(LaunchError, match=r"is \^lo, and box has no such interface"):
        interface.set_gloo_and_nccl_interface_unless_set("127.0.0.1", {"GLOO_SOCKET_IFNAME": "^lo"})


def test_the_interface_of_an_address() -> None:
    """The interface is the one with the given address; an unknown address changes nothing."""
    environ = {"NCCL_SOCKET_IFNAME": "ib0"}
    interface.set_gloo_and_nccl_interface_unless_set("127.0.0.1", environ)
    assert environ == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "ib0"}
    interface.set_gloo_and_nccl_interface_unless_set("10.9.9.9", environ := {})
    assert environ == {}


def network(monkeypatch: pytest.MonkeyPatch, routes: dict[str, str], name: str) -> None:
    """Fake a network: source addresses by host in `routes`, and `name` as this host's address."""

    class Probe:
        def __init__(self, *_: object) -> None: ...

        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: object) -> None: ...

        def connect(self, where: tuple[str, int]) -> None:
            if where[0] not in routes:
                raise OSError("no route")
            self.source = routes[where[0]]

        def getsockname(self) -> tuple[str, int]:
            return self.source, 9

    monkeypatch.setattr(socket, "socket", Probe)
    monkeypatch.setattr(socket, "gethostbyname", lambda _: name)


def test_meeting_through_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a Slurm step without MPI meet through a file of this start of the step."""
    for name, value in {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_RESTART_COUNT": "2",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        interface, "own_address_reachable_by_hosts", lambda hosts, environ: "127.0.0.2"
    )
    run = RunDir(tmp_path)
    path = join._rank_0_address_path(run, "Slurm")
    with ThreadPoolExecutor() as pool:
        stores = [
            pool.submit(join._serve_or_join_store_of_rank_0, Rank(rank, 2, 0, 1), path, [])
            for rank in range(2)
        ]
        mine, others = (each.result() for each in stores)
    mine.set("key", "value")
    assert others.get("key") == b"value"
    assert [path.name for path in run.ready.iterdir()] == ["rendezvous-7.0.2"]


def test_meeting_through_a_folder_that_is_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that never gets rank 0's file fails with a question about the shared folder."""
    # The time of the first call, and one after the deadline.
    clock = iter((0.0, 400.0))
    monkeypatch.setattr(join.time, "monotonic", lambda: next(clock))
    path = tmp_path / "rendezvous"
    with pytest.raises(LaunchError) as caught:
        join._serve_or_join_store_of_rank_0(Rank(1, 2, 1, 2), path, [])
    message = f"rank 0 did not write {path} within 300 s; is the run folder shared by all hosts?"
    assert str(caught.value) == message


@pytest.mark.parametrize("umask", [0o002, 0o022])
# `old`: an earlier run has left the file.
@pytest.mark.parametrize("old", [False, True])
def test_the_store_file_is_its_owners_alone(umask: int, old: bool, tmp_path: Path) -> None:
    """Only its owner may read or write the store's file, with any umask."""
    # Ranks unpickle the contents.
    path = tmp_path / "store"
    before = os.umask(umask)
    try:
        if old:
            path.touch()
        store = join._create_private_file_store(path, 1)
    finally:
        os.umask(before)
    store.set("name", "value")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert store.get("name") == b"value"


@pytest.mark.parametrize(
    ("ranks", "environ", "value"),
    [(64, {}, None), (65, {}, "1"), (65, {"TORCH_GLOO_LAZY_INIT": "0"}, "0")],
)
def test_many_ranks_connect_on_demand(
    ranks: int, environ: dict[str, str], value: str | None
) -> None:
    """gloo connects on demand above 64 ranks; the user's value is kept."""
    # A full mesh needs two descriptors for each other rank.
    distributed._let_gloo_connect_on_demand(ranks, environ)
    assert environ.get("TORCH_GLOO_LAZY_INIT") == value


@pytest.mark.slow
def test_connections_on_demand_are_few() -> None:
    """Connections on demand need less than half of the full mesh's descriptors."""
    script = Path(__file__).parents[3] / "benchmarks" / "parts.py"
    command = [sys.executable, str(script), "gloo_connections"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    mesh, on_demand = (
        int(re.findall(rf"{way} \| (\d+) \(", ended.stdout)[0])
        for way in ("full mesh", "on demand")
    )
    # Each of 32 ranks has connections to 31 others, in two groups.
    assert mesh > 62
    assert on_demand < mesh / 2
