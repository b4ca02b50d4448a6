"""`micro_size: auto` under memory limits, compared with trainings under the same limit."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch.tiny import needs_mpi

MiB = 1 << 20
# Where version 1 of control groups is mounted.
GROUPS = Path("/sys/fs/cgroup/memory")
# A sample keeps 8 MiB from the forward to the backward pass, and needs as much again to compute.
MODULE = """
import torch

class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1 << 20, bias=False)

    def forward(self, x):
        return self.linear(x).tanh().square().mean()

def model():
    return Wide()

def data():
    return [{"x": torch.ones(4)} for _ in range(512)]
"""
RECIPE: dict[str, Any] = {
    "name": "wide",
    "model": {"task": "custom", "factory": "wide:model"},
    "data": {"train": {"format": "custom", "factory": "wide:data"}},
    "batch": {"global_size": 512, "micro_size": "auto"},
    "optimizer": {"name": "adamw", "learning_rate": 0.1},
    "engine": {"name": "eager"},
    "train": {"max_steps": 2},
    "launch": {"device": "cpu"},
}


class Limited:
    """`ortlaunch train` under a limit of address space or of a control group."""

    def __init__(
        self, folder: Path, address_space: int | None = None, group: Path | None = None
    ) -> None:
        self.folder = folder
        self.address_space = address_space
        self.group = group
        (folder / "wide.py").write_text(MODULE)
        (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ortlaunch.cli", "train", "recipe.yaml", *words]
        # The shell joins the group before it becomes the command, so that all memory counts.
        script = 'test -z "$0" || echo $$ > "$0/cgroup.procs"; exec "$@"'
        return subprocess.run(
            ["/bin/sh", "-c", script, str(self.group or ""), *command],
            cwd=self.folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280,
            check=False, preexec_fn=self._limit,
        )  # fmt: skip

    def _limit(self) -> None:
        if self.address_space:
            resource.setrlimit(resource.RLIMIT_AS, (self.address_space, self.address_space))


@pytest.fixture(params=["address space", "control group"])
def limited(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Limited]:
    """A command whose ranks may use about 1 GiB beside Python and torch."""
    if request.param == "address space":
        # The address space includes mapped libraries, so the limit is above theirs.
        yield Limited(tmp_path, address_space=_address_space_of_torch() + 1500 * MiB)
        return
    group = GROUPS / f"ortlaunch-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(1200 * MiB))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield Limited(tmp_path, group=group)
    deadline = time.monotonic() + 10
    while group.exists() and time.monotonic() < deadline:
        try:
            group.rmdir()
        except OSError:
            # A process of the group has not ended yet.
            time.sleep(0.1)


def _address_space_of_torch() -> int:
    """Return the peak address space, in bytes, of a process that trained a small model."""
    code = "import torch; torch.nn.Linear(4, 4)(torch.ones(1, 4)).sum().backward(); "
    code += "print(open('/proc/self/status').read())"
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    return (
        next(int(line.split()[1]) for line in told.splitlines() if line.startswith("VmPeak")) * 1024
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_size_found_is_within_one_doubling_of_the_limit(limited: Limited) -> None:
    """The size that was found trains under the limit; four times the size does not."""
    done = limited("--run-dir=found")
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((limited.folder / "found/micro_size.json").read_text())
    found = record["found"]
    assert 4 <= found <= 128, done.stdout
    assert f"micro_size: {found}, determined by trial runs" in done.stdout
    assert (
        f"batch: 512 samples = {found} micro x {512 // found} accumulation x 1 rank" in done.stdout
    )
    resolved = yaml.safe_load((limited.folder / "found/recipe.yaml").read_text())
    assert resolved["batch"]["micro_size"] == found

    again = limited("--run-dir=found", "train.max_steps=3")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "trying" not in again.stdout
    assert "resumed after step 2" in again.stdout

    beyond = limited("--run-dir=beyond", f"batch.micro_size={4 * found}")
    assert beyond.returncode != 0, (
        f"{4 * found} trains under the limit, and {found} was found\n{done.stdout}"
    )


@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize("launcher", ["torchrun", "mpi"])
def test_two_ranks_try_together(launcher: str, tmp_path: Path) -> None:
    """Two ranks with a global batch of 4 find a micro size of 2 together."""
    run = Limited(tmp_path)
    done = run(
        f"--launcher={launcher}",
        "--nproc-per-node=2",
        "batch.global_size=4",
        "zero={stage: 2}",
        "--run-dir=run",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "run/micro_size.json").read_text())["found"] == 2
    measured = json.loads((tmp_path / "run/memory.json").read_text())["measured"]
    # 4 bytes for each of the 4 x 2^20 weights.
    assert measured["weights"] == 4 * 4 * MiB
    assert "memory a rank:" in done.stdout
