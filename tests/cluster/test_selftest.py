"""`ortlaunch selftest` on a login node: every backend of the lab, one table."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.lab import LOGIN, Lab
from tests.e2e.runs import COMMAND, environment

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(600)]


def test_every_backend_is_equal(lab: Lab, tmp_path: Path) -> None:
    """One process, two ranks here, two hosts by ssh, two nodes of Slurm."""
    (tmp_path / "hosts").write_text("host1 slots=1\nhost2 slots=1\n")
    env = {**lab.environ, **environment(tmp_path), "PATH": lab.environ["PATH"]}
    words = ("selftest", "--hostfile", "hosts", "--slurm", "--dir", "st")
    ended = lab.run(LOGIN, str(COMMAND), *words, cwd=tmp_path, env=env, timeout=540)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = [line.split("  ") for line in ended.stdout.splitlines()[1:-1]]
    assert [line[1] for line in lines] == ["local", "torchrun", "mpi", "torchrun, hosts", "mpi, hosts", "slurm"]
    assert {line[-1] for line in lines} == {"equal"}
