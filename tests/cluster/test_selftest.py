"""`ortlaunch selftest` on a login node: every backend of the lab, and a host with a slow link."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ortlaunch.doctor.schema import findings_json_schema_text
from tests.cluster.lab import LOGIN, Lab
from tests.e2e.runs import COMMAND, environment

pytestmark = [pytest.mark.lab, pytest.mark.slow]

# Token bucket filter; it shapes only the packets that host2 sends.
SHAPED = "tc qdisc add dev eth0 root tbf rate 40mbit burst 32kbit latency 400ms"


def selftest(lab: Lab, folder: Path, *words: str, hosts: int = 2) -> list[dict[str, Any]]:
    """Run the self-test over some hosts, and return its findings, which must fit the schema."""
    (folder / "hosts").write_text("".join(f"{name} slots=1\n" for name in lab.names[:hosts]))
    env = {**lab.environ, **environment(folder), "PATH": lab.environ["PATH"]}
    typed = ("selftest", "--hostfile", "hosts", "--dir", "st", "--json", *words)
    ended = lab.run(LOGIN, str(COMMAND), *typed, cwd=folder, env=env, timeout=540)
    assert ended.stdout.startswith("["), ended.stderr
    findings: list[dict[str, Any]] = json.loads(ended.stdout)
    jsonschema.validate(findings, json.loads(findings_json_schema_text()))
    assert ended.returncode == any(one["verdict"] == "failed" for one in findings)
    return findings


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_every_backend_is_equal(lab: Lab, tmp_path: Path) -> None:
    """Every backend trains equally: local, torchrun, mpirun, both over hosts, and Slurm."""
    found = {one["check"]: one for one in selftest(lab, tmp_path, "--yes")}
    trained = {check: one for check, one in found.items() if check.startswith("train ")}
    names = ["local", "torchrun", "mpi", "torchrun, hosts", "mpi, hosts", "slurm"]
    assert list(trained) == [f"train {name}" for name in names]
    assert {one["what"].split(":")[0] for one in trained.values()} == {"equal"}
    assert {"reached", "run folder", "port", "matrix rate", "link", "all-reduce"} <= set(found)
    # The hosts share this machine's cores, so their rates may differ.
    assert {check for check, one in found.items() if one["verdict"] == "failed"} <= {"matrix rate"}


@pytest.fixture
def slow_host(lab: Lab) -> Iterator[None]:
    """Limit host2's link to 40 Mbit/s during a test."""
    assert lab.run("host2", *SHAPED.split()).returncode == 0
    yield
    lab.run("host2", "tc", "qdisc", "del", "dev", "eth0", "root")


@pytest.mark.timeout(400)
def test_a_slow_host_is_named(lab: Lab, tmp_path: Path, slow_host: None) -> None:
    """The host with the slow link is named, its neighbours are not, and no job is queued."""
    found = selftest(lab, tmp_path, "--launcher", "torchrun", hosts=3)
    links = {one["host"]: one for one in found if one["check"] == "link"}
    slow = links.pop("host2")
    assert (slow["verdict"], slow["what"][:5]) == ("failed", "SLOW:")
    # 40 Mbit/s is 5e6 bytes/s; the other direction is not limited. The hosts of the lab share the
    # processors of this machine, so that a neighbour may be slow too, but not as slow.
    speed = slow["figures"]["bytes_per_second"]
    assert speed < 2e7
    assert all(one["figures"]["bytes_per_second"] > speed for one in links.values())
    assert found[-1]["what"] == "not tested: this would queue a job"
