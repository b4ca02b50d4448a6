"""Findings on this machine, and on the measurements of ranks (worker/tasks/fabric.py)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ortmodule
from ortlaunch import doctor
from ortlaunch.base import machine
from ortlaunch.base.errors import MissingDependency, PlanError, RunError
from ortlaunch.doctor import probe, this_host
from ortlaunch.doctor.fabric import findings_on_matmul_links_and_all_reduce
from ortlaunch.doctor.finding import FAILED, OK, WARNING
from ortlaunch.doctor.hosts import HostRequirements
from ortlaunch.launch_plan import Node
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.recipe import dump_recipe_yaml
from ortlaunch.run import checkup as checkup_module
from ortlaunch.run.checkup import CheckupOptions, check_hosts_or_this_machine
from tests.makers import CUSTOM, recipe, world_of

# Host, slots, first rank, devices: three hosts form a ring, so that each has two links.
NODES = (Node("a", 2, 0, (0, 1)), Node("b", 2, 2, (0, 1)), Node("c", 2, 4, (0, 1)))


def verdicts(**asked: Any) -> dict[str, tuple[str, str, str]]:
    """Return (verdict, finding, remedy) of each check of this machine, by the name of the check."""
    found = this_host.check_this_host_and_recipe_packages(
        HostRequirements((), "cpu", None)._replace(**asked)
    )
    return {one.check: (one.verdict, one.what, one.mend) for one in found}


def test_each_part_has_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part has a finding; the finding on an absent package has the command to install it."""
    missing = ortmodule.MissingDependency("no wheel", "pip install it")
    monkeypatch.setattr(ortmodule, "check", lambda *_, **__: [missing], raising=False)
    assert set(verdicts()) == {
        "python", "torch", "ort", "deepspeed", "mpi", "gpus", "cache", "disk", "temporary",
        "/dev/shm", "open files", "stale",
    }  # fmt: skip
    assert verdicts()["ort"] == (WARNING, "no wheel", "pip install it")
    # The probe reads package metadata here; with an empty result no package is installed.
    monkeypatch.setattr(probe, "installed_versions", lambda *_: {})
    found = verdicts()
    assert found["torch"][0] == FAILED
    assert found["deepspeed"][2] == 'pip install "ortlaunch[deepspeed]"'


def test_a_cache_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache folder that cannot be created is a failure, because every run needs it."""
    # A file in place of the parent folder: also root cannot create a folder in it.
    (tmp_path / "file").touch()
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "file/cache"))
    verdict, what, mend = verdicts()["cache"]
    assert (verdict, mend) == (FAILED, "set ORTLAUNCH_CACHE to another folder")
    assert f"{tmp_path}/file/cache: cannot be made" in what


def test_no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without mpirun the finding and its remedy are those of the error of `require_mpirun_here_or_on_path`."""

    def absent() -> str:
        raise MissingDependency("mpirun not found: load your module")

    monkeypatch.setattr(this_host, "require_mpirun_here_or_on_path", absent)
    assert verdicts()["mpi"] == (WARNING, "mpirun not found", "load your module")


def test_gpus_and_a_torch_that_cannot_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs with a CPU wheel of torch are a warning; fewer GPUs than slots are a failure."""
    monkeypatch.setattr(
        machine, "hardware_record", lambda: {"gpus": ["NVIDIA H200", "NVIDIA H200"]}
    )
    monkeypatch.setattr(probe, "gpu_device_count", lambda: 2)
    monkeypatch.setattr(probe, "gpu_process_lines_or_none", lambda: ["7, 30 MiB"])
    monkeypatch.setattr(probe, "installed_versions", lambda *_: {"torch": "2.13.0+cpu"})
    # Four slots, and the probe above counts two GPUs.
    found = verdicts(device="cuda", nodes=(Node("localhost", 4, 0, (0, 1, 2, 3)),))
    assert found["nccl"][0] == WARNING
    assert found["gpus"][:2] == (FAILED, "2 for 4 slots")
    assert found["gpus idle"][:2] == (WARNING, "busy: 7, 30 MiB")


def test_what_a_recipe_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An absent package and too little disk for checkpoints fail, each with its remedy."""
    monkeypatch.setattr(doctor, "_is_installed", lambda package: package != "tensorboard")
    made = recipe(log={"trackers": ["tensorboard"]})
    # 1 << 60 bytes (1 EiB) fit on no disk.
    found = this_host.check_this_host_and_recipe_packages(
        HostRequirements((), "cpu", tmp_path, disk_bytes_needed=1 << 60), made, world_of(made)
    )
    wrong = [(one.check, one.verdict, one.mend) for one in found if one.verdict == FAILED]
    assert wrong == [("disk", FAILED, "free disk space, or lower checkpoint.keep"),
                     ("recipe", FAILED, 'pip install "ortlaunch[tensorboard]"')]  # fmt: skip


def measured(**other: Any) -> dict[str, Any]:
    """Return equal measurements of all ranks and links, with `other` in place of some of them."""
    # Seconds, bytes and FLOP/s: each link has 1 GB/s, each of the six ranks 100 GFLOP/s.
    links = [
        {"hosts": [first, (first + 1) % 3], "latency": 5e-5, "bytes": 1e6, "seconds": 1e-3}
        for first in range(3)
    ]
    return {"dtype": "float32", "flops": [1e11] * 6, "links": links, **other,
            "all_reduce": {"latency": 1e-4, "bytes": 1 << 20, "seconds": 1e-3}}  # fmt: skip


def slow(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the host and the check of each finding that is not ok."""
    return [
        (one.host, one.check)
        for one in findings_on_matmul_links_and_all_reduce(found, NODES)
        if one.verdict != OK
    ]


def test_a_slow_device_and_a_slow_host_are_named() -> None:
    """A slow device names its host; two slow links name the host that both of them share."""
    assert slow(measured()) == []
    assert slow(measured(flops=[1e11, 1e11, 1e11, 6e10, 1e11, 1e11])) == [("b", "matrix rate")]
    assert (
        "(rank 3)"
        in findings_on_matmul_links_and_all_reduce(
            measured(flops=[1e11, 1e11, 1e11, 6e10, 1e11, 1e11]), NODES
        )[1].what
    )
    # A hundredth of the rate, then 200 times the latency. Both links below are those of host b.
    for wrong in ({"seconds": 1e-1}, {"latency": 1e-2}):
        links = measured()["links"]
        assert slow(measured(links=[{**links[0], **wrong}, {**links[1], **wrong}, links[2]])) == [
            ("b", "link")
        ]
        # One slow link may be the fault of either host, so it names none.
        assert slow(measured(links=[{**links[0], **wrong}, *links[1:]])) == []


def test_one_rank_has_no_links() -> None:
    """A single rank has a finding on its matmul rate only."""
    found = findings_on_matmul_links_and_all_reduce(
        {"dtype": "bfloat16", "flops": [7e14]}, [Node("a", 1, 0, (0,))]
    )
    assert [(one.check, one.what, one.figures) for one in found] == [
        (
            "matrix rate",
            "700.0 TFLOP/s in bfloat16",
            {"gflops_least": 700000.0, "gflops_most": 700000.0},
        )
    ]


def test_a_port_and_an_interface_that_were_asked_for() -> None:
    """A requested port or interface that cannot be used is a failure, also on a single machine."""
    # Port 0: the kernel chooses a free port, which stays in use until `close`.
    doors = probe.OpenPorts("127.0.0.1", (0,))
    port = doors.ports[0][0]
    assert verdicts(port=port)["port"][:2] == (
        FAILED,
        f"cannot listen at port {port}: Address already in use",
    )
    doors.close_sockets()
    assert verdicts(port=port)["port"][:2] == (OK, f"listens at 127.0.0.1:{port}")
    assert verdicts(interface="eth9")["interface"][0] == FAILED


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"launcher": "mpi"}, "--launcher and --nproc-per-node need a recipe or --hostfile"),
        ({"include": "a"}, "give --hostfile"),
    ],
)
def test_options_that_would_do_nothing(options: dict[str, Any], message: str) -> None:
    """An option that has no effect without a recipe or a host file is refused."""
    with pytest.raises(PlanError, match=message):
        check_hosts_or_this_machine(None, (), LaunchOptions(**options), CheckupOptions(), {})


@pytest.mark.usefixtures("workbench")
def test_data_workers_need_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches that data.workers read ahead are compared with /dev/shm; bad data is a finding."""
    Path("r.yaml").write_text(dump_recipe_yaml(recipe(data={**CUSTOM["data"], "workers": 3})))

    def of_data(answer: Callable[[], str]) -> Any:
        monkeypatch.setattr(
            checkup_module, "run_task_and_return_stdout_or_raise", lambda request: answer()
        )
        options = LaunchOptions(processes_per_node=2)
        found = check_hosts_or_this_machine(Path("r.yaml"), (), options, CheckupOptions(), {})
        return {one.check: (one.verdict, one.what) for one in found}

    # 3 workers of each of 2 ranks read 2 batches ahead.
    verdict, what = of_data(lambda: str(1 << 40))["/dev/shm"]
    assert (verdict, what.partition("free, ")[2]) == (
        WARNING,
        "and data.workers read 12.0 TiB ahead",
    )

    # The error of the process that reads the batch.
    def fail() -> str:
        raise RunError("data.factory returned int")

    assert of_data(fail)["data"] == (FAILED, "data.factory returned int")


def test_ranks_of_this_user_alone_are_stale(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The user's living ranks are listed by run folder; those of other users are not listed."""
    # The probe knows a rank by the argument ortlaunch.worker; its last argument is the run folder.
    command = [
        sys.executable,
        "-c",
        "import sys; print(flush=True); sys.stdin.read()",
        "ortlaunch.worker",
        "runs/x",
    ]
    with contextlib.ExitStack() as stack:
        pipes: Any = {"cwd": tmp_path, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        ranks = [stack.enter_context(subprocess.Popen(command, **pipes)) for _ in range(2)]
        for rank in ranks:
            # Wait until the process runs: it prints a line at its start.
            rank.stdout.readline()
        numbers = ", ".join(str(number) for number in sorted(rank.pid for rank in ranks))
        mine = f"{tmp_path}/runs/x ({numbers})"
        assert mine in probe.run_folder_and_living_rank_pids_texts()
        monkeypatch.setattr(os, "getuid", lambda: 4711)
        assert mine not in probe.run_folder_and_living_rank_pids_texts()
        # The end of its input ends a rank.
        for rank in ranks:
            rank.stdin.close()
