"""Memory limits in the kernel's files, in test files and on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ortlaunch.base import machine
from ortlaunch.base.errors import PlanError
from ortlaunch.launch_plan import ProcessMemory
from ortlaunch.planning.capacity import notes_or_refusal_for_crowding_of_this_host
from ortlaunch.planning.workload import solve_batch_and_estimate_memory
from ortlaunch.worker.engine.memory_limits import RankMemoryLimits
from ortlaunch.worker.engine.ort_settings import free_memory_bytes_of_rank
from tests import labs
from tests.kernel_files import GiB, KernelFiles
from tests.makers import host, recipe, world_of


@pytest.mark.parametrize(
    ("version", "folder", "line"), [(1, "memory/job", "4:memory:/job/1"), (2, "job", "0::/job/1")]
)
def test_plan_trial_and_export_see_one_limit(
    version: int, folder: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning, `micro_size: auto` and the export detect the same limit of a parent group."""
    # The job has 2 GiB on a machine of 24 GiB; the process is in a group below it.
    kernel = KernelFiles(tmp_path, monkeypatch)
    kernel.memory(f"{folder}/1", version, None, 0)
    kernel.memory(folder, version, 2 * GiB, GiB // 2)
    kernel.process_in(line)
    name = f"control group {kernel.groups / folder}"
    refused = f"{name} is 2.0 GiB; use fewer ranks"
    with pytest.raises(PlanError, match=refused):
        list(
            notes_or_refusal_for_crowding_of_this_host(
                world := world_of(recipe(), [host("localhost", 11)], "torchrun"),
                solve_batch_and_estimate_memory(recipe(), world, ProcessMemory(200 << 20, 0)),
                is_planned_only=False,
            )
        )
    limits = {
        limit.name: (limit.size, limit.free)
        for limit in RankMemoryLimits(torch.device("cpu"), 2).limits
    }
    # Half a GiB is in use, and two ranks share the rest.
    assert limits[name] == (2 * GiB, 3 * GiB // 4)
    assert free_memory_bytes_of_rank(2) == 3 * GiB // 4


def test_the_machine_is_shared_by_its_ranks() -> None:
    """Each of two ranks of a host may use half of the free memory."""
    alone, shared = (RankMemoryLimits(torch.device("cpu"), ranks).limits[0] for ranks in (1, 2))
    assert shared.free == pytest.approx(alone.free / 2, rel=0.1)
    assert (
        0
        < alone.free
        <= alone.size
        == machine.machine_and_control_group_memory_limits()[0].total_bytes
    )


TAKES = """
import resource, sys, torch
from ortlaunch.worker.engine.memory_limits import RankMemoryLimits, process_status_bytes
if sys.argv[1] == "RLIMIT_AS":
    limit = process_status_bytes("VmSize") + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
limits = RankMemoryLimits(torch.device("cpu"), 1)
taken = torch.ones(200 << 18)
del taken
share, limit = limits.used_fraction_and_tightest_limit()
print(limit.name, limit.used_bytes() >> 20, share)
"""


def test_what_was_taken_counts_after_it_is_gone() -> None:
    """Memory that was freed counts at its peak, and the tightest limit is named."""
    done = subprocess.run(
        [sys.executable, "-c", TAKES, "RLIMIT_AS"],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    name, taken, share = done.stdout.split()
    assert name == "RLIMIT_AS"
    # torch allocates some memory of its own beside the 200 MiB.
    assert 200 <= int(taken) < 400
    assert 0.19 < float(share) < 0.4


SEEN = """
import json, torch
from ortlaunch.base import machine
from ortlaunch.worker.engine.memory_limits import RankMemoryLimits
from ortlaunch.worker.engine.ort_settings import free_memory_bytes_of_rank
limits = {limit.name: limit.size for limit in RankMemoryLimits(torch.device("cpu"), 1).limits}
planned = machine.smallest_memory_limit()
fits = free_memory_bytes_of_rank(1) <= planned.total_bytes
print(json.dumps([planned.name, planned.total_bytes, limits[planned.name], fits]))
"""


@pytest.fixture
def limited() -> Iterator[Path]:
    """A control group without a limit, for processes, inside a group of 2 GiB."""
    top = next(
        (top for top in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")) if top.is_dir()),
        None,
    )
    if os.geteuid() != 0 or top is None:
        labs.skip("makes a control group, which takes root")
    group = top / f"ortlaunch-test-{os.getpid()}"
    inner = group / "step"
    try:
        inner.mkdir(parents=True)
        limit = next(
            group / name
            for name in ("memory.limit_in_bytes", "memory.max")
            if (group / name).exists()
        )
        limit.write_text(str(2 * GiB))
        yield inner
    finally:
        # The kernel removes empty groups only: the inner one must be first.
        for folder in (inner, group):
            folder.rmdir() if folder.is_dir() else None


@pytest.mark.lab
def test_a_real_control_group_is_one_limit_for_all(limited: Path) -> None:
    """Planning, a trial of a size and the export all detect the 2 GiB of a real parent group."""
    # The shell joins the group, and the program that replaces it stays there.
    script = 'echo $$ > "$0/cgroup.procs"; exec "$@"'
    done = subprocess.run(
        ["/bin/sh", "-c", script, str(limited), sys.executable, "-c", SEEN],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    name = f"control group {limited.parent}"
    assert json.loads(done.stdout.splitlines()[-1]) == [name, 2 * GiB, 2 * GiB, True]
