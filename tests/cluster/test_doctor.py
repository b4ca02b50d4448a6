"""`ortlaunch doctor` over the lab's hosts, beside the faults that `train` meets, too (test_faults.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from ortlaunch.doctor.schema import json_schema
from tests.cluster.lab import LOGIN, Lab
from tests.cluster.test_faults import RECIPE, SQUATTER
from tests.e2e.runs import COMMAND

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a host file and a recipe."""
    (tmp_path / "hosts").write_text("host1 slots=1\nhost2 slots=1\n")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return tmp_path


def wrong(lab: Lab, folder: Path, *words: str, before: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Findings that are not ok; all of them must fit the schema."""
    ended = lab.run(LOGIN, *before, str(COMMAND), "doctor", *words, "--json", cwd=folder, timeout=60)
    assert ended.stdout.startswith("["), ended.stderr
    findings = json.loads(ended.stdout)
    jsonschema.validate(findings, json.loads(json_schema()))
    assert ended.returncode == any(one["verdict"] == "failed" for one in findings)
    return [one for one in findings if one["verdict"] != "ok"]


@contextmanager
def _taken_port(lab: Lab) -> Iterator[None]:
    squatter = subprocess.Popen(lab.command("host1", [sys.executable, "-c", SQUATTER]), stdout=subprocess.PIPE)
    assert squatter.stdout is not None
    squatter.stdout.readline()
    try:
        yield
    finally:
        squatter.kill()
        squatter.wait()


def test_a_port_that_is_taken(lab: Lab, folder: Path) -> None:
    """The one that a launcher of another's would use, on the first host."""
    with _taken_port(lab):
        found = wrong(lab, folder, "--hostfile", "hosts", "--port", "29500")
    assert [(one["host"], one["check"], one["what"]) for one in found] == [
        ("host1", "port", "cannot listen at port 29500: Address already in use")
    ]


def test_a_disk_that_a_recipe_fills(lab: Lab, folder: Path) -> None:
    """Room is compared with the checkpoints of the plan, on every host."""
    found = wrong(lab, folder, "recipe.yaml", "checkpoint.keep=100000000", "--hostfile", "hosts")
    assert [(one["host"], one["check"]) for one in found] == [("host1", "disk"), ("host2", "disk")]
    assert "free, and checkpoints take " in found[0]["what"]


def test_inside_a_job_of_slurm(lab: Lab, folder: Path) -> None:
    """Its nodes are looked at through srun, with and without a recipe."""
    salloc = ("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1")
    assert wrong(lab, folder, before=salloc) == []
    found = wrong(lab, folder, "recipe.yaml", "checkpoint.keep=100000000", before=salloc)
    assert [(one["host"], one["check"]) for one in found] == [("host1", "disk"), ("host2", "disk")]


def test_a_slow_host_is_named_by_the_fabric(lab: Lab, folder: Path) -> None:
    """Ranks are started on the hosts, links measured, and the one whose cable is slow is told from its neighbours."""
    (folder / "hosts").write_text("".join(f"{name} slots=1\n" for name in lab.names))
    shaped = (
        "tc",
        "qdisc",
        "add",
        "dev",
        "eth0",
        "root",
        "tbf",
        "rate",
        "40mbit",
        "burst",
        "32kbit",
        "latency",
        "400ms",
    )
    assert lab.run("host2", *shaped).returncode == 0
    try:
        found = wrong(lab, folder, "--hostfile", "hosts", "--fabric", "--launcher", "torchrun")
    finally:
        lab.run("host2", "tc", "qdisc", "del", "dev", "eth0", "root")
    slow = [
        one for one in found if one["check"] == "link"
    ]  # the hosts share this machine's cores: rates are not judged
    assert [(one["host"], one["verdict"], one["what"][:5]) for one in slow] == [("host2", "failed", "SLOW:")]
    assert slow[0]["figures"]["bytes_per_second"] < 2e7  # one way at 5e6, the other at what this machine can
    assert list(folder.glob("ortlaunch-fabric-*")) == []
