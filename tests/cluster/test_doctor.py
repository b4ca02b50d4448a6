"""`ortlaunch doctor` over the lab's hosts; test_faults.py has the faults that `train` detects."""

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

from ortlaunch.api.json_outputs import output_json_schema
from tests.cluster.lab import LOGIN, Lab
from tests.cluster.test_faults import RECIPE, SQUATTER
from tests.e2e.runs import COMMAND, environment

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(180)]

# Checks of the ranks that measure. The hosts share this machine's cores, so their rates differ.
MEASURED = ("ranks", "matrix rate", "link", "all-reduce")
# Token bucket filter; it shapes only the packets that host2 sends.
SHAPED = "tc qdisc add dev eth0 root tbf rate 40mbit burst 32kbit latency 400ms"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a host file and a recipe."""
    (tmp_path / "hosts").write_text("host1 slots=1\nhost2 slots=1\n")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return tmp_path


def doctor(
    lab: Lab, folder: Path, *words: str, before: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """Return all findings, and check that they fit the schema."""
    env = {**lab.environ, **environment(folder), "PATH": lab.environ["PATH"]}
    ended = lab.run(
        LOGIN, *before, str(COMMAND), "doctor", *words, "--json", cwd=folder, env=env, timeout=150
    )
    assert ended.stdout.startswith("["), ended.stderr
    findings: list[dict[str, Any]] = json.loads(ended.stdout)
    jsonschema.validate(findings, output_json_schema("doctor"))
    assert ended.returncode == any(one["verdict"] == "failed" for one in findings)
    return findings


def wrong(
    lab: Lab, folder: Path, *words: str, before: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """Return the findings about the hosts that are not ok."""
    return [
        one
        for one in doctor(lab, folder, *words, before=before)
        if one["verdict"] != "ok"
        and (one["check"] not in MEASURED or (one["check"], one["verdict"]) == ("ranks", "failed"))
    ]


@contextmanager
def _taken_port(lab: Lab) -> Iterator[None]:
    squatter = subprocess.Popen(
        lab.command("host1", [sys.executable, "-c", SQUATTER]), stdout=subprocess.PIPE
    )
    assert squatter.stdout is not None
    # The line that it prints comes after it listens.
    squatter.stdout.readline()
    try:
        yield
    finally:
        squatter.kill()
        squatter.communicate()


def test_a_port_that_is_taken(lab: Lab, folder: Path) -> None:
    """A port that is in use on the first host is a failed check."""
    with _taken_port(lab):
        found = wrong(lab, folder, "--hostfile", "hosts", "--port", "29500")
    assert [(one["host"], one["check"], one["what"]) for one in found] == [
        ("host1", "port", "cannot listen at port 29500: Address already in use")
    ]


# New TCP connections to unprivileged ports; ssh, on port 22, still works.
HIGH = "meta l4proto tcp tcp dport 1024-65535 ct state new"
NETWORKS = {  # packets that one host drops: the findings of doctor, by host
    "tcp": (HIGH, (), [("host2", "port", "failed", "no other host reaches its port ")]),
    "udp": ("meta l4proto udp", (), [("host1", "udp", "warning", "no datagram to host2 is answered"),
                                     ("host2", "udp", "warning", "no datagram to host1, host3 is answered"),
                                     ("host3", "udp", "warning", "no datagram to host2 is answered")]),
    "range": ("tcp dport 20010-30000 ct state new", ("--ports", "20000-20010"),
              [("host2", "port", "failed", "no other host reaches its port 20010: timed out")]),
    "open range": ("tcp dport 20010-30000 ct state new", ("--ports", "20000-20009"), []),
    "kernel's range": ("tcp dport 32768-60999 ct state new", ("--ports", "20000-20009"),
                       [("all", "ranks", "failed", "at ports of net.ipv4.ip_local_port_range (32768-60999 here)")]),
}  # fmt: skip


@pytest.mark.parametrize("case", NETWORKS)
def test_a_firewall_of_any_host(case: str, lab: Lab, folder: Path) -> None:
    """Each pair of hosts is tested both ways, by TCP and UDP; a port range at its two ends."""
    rule, words, expected = NETWORKS[case]
    (folder / "hosts").write_text("".join(f"{name} slots=1\n" for name in lab.names))
    with lab.firewall(rule, "host2"):
        found = wrong(lab, folder, "--hostfile", "hosts", *words)
    assert [(one["host"], one["check"], one["verdict"]) for one in found] == [
        each[:3] for each in expected
    ]
    assert all(each[3] in one["what"] for one, each in zip(found, expected)), found


def test_a_path_that_is_narrower_than_its_ends(lab: Lab, folder: Path) -> None:
    """Packets of the interfaces' MTU, 9000, that a link of MTU 1500 drops are a failed check."""
    # The bridge's ends of the cables keep an MTU of 1500.
    ends = [(name, "eth0") for name in ("host1", "host2")]
    for host, interface in ends:
        lab.run(host, "ip", "link", "set", interface, "mtu", "9000")
    try:
        found = wrong(lab, folder, "--hostfile", "hosts")
    finally:
        for host, interface in ends:
            lab.run(host, "ip", "link", "set", interface, "mtu", "1500")
    assert [(one["host"], one["check"], one["verdict"]) for one in found] == [
        ("host1", "mtu", "failed"), ("host2", "mtu", "failed"),
    ]  # fmt: skip
    assert found[0]["what"] == "packets of 9000 B, the MTU of both interfaces, do not reach host2"


def test_a_folder_that_one_host_cannot_write_and_a_host_with_two_names(
    lab: Lab, folder: Path
) -> None:
    """An unwritable folder and a host that is listed twice are both reported."""
    (folder / "hosts").write_text("host1 slots=1\nhost2 slots=1\nhost2-1 slots=1\n")
    # Two steps, since a bind mount accepts `ro` only when it is remounted.
    mount = f"mount --bind '{folder}' '{folder}' && mount -o remount,ro,bind '{folder}'"
    assert lab.run("host2", "sh", "-c", mount, cwd=Path("/")).returncode == 0
    try:
        found = wrong(lab, folder, "--hostfile", "hosts", "--device", "cuda")
    finally:
        lab.run("host2", "umount", str(folder), cwd=Path("/"))
    # The lab has no GPU, so that check always fails.
    said = [(one["host"], one["check"], one["what"]) for one in found if one["check"] != "gpus"]
    assert said == [
        ("host2", "run folder", f"{folder} cannot be written there"),
        ("host2-1", "alias", "is the same machine as host2"),
        ("host2-1", "run folder", f"{folder} cannot be written there"),
    ]


def test_a_disk_that_a_recipe_fills(lab: Lab, folder: Path) -> None:
    """Free disk space is compared with the plan's checkpoints on every host."""
    # More checkpoints than any disk holds.
    found = wrong(lab, folder, "recipe.yaml", "checkpoint.keep=100000000", "--hostfile", "hosts")
    assert [(one["host"], one["check"]) for one in found] == [("host1", "disk"), ("host2", "disk")]
    assert "free, and checkpoints take " in found[0]["what"]


def test_inside_a_job_of_slurm(lab: Lab, folder: Path) -> None:
    """Inside a Slurm job, its nodes are checked through srun, with and without a recipe."""
    salloc = ("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1")
    found = doctor(lab, folder, before=salloc)
    assert [
        one
        for one in found
        if one["verdict"] != "ok"
        and (one["check"] not in MEASURED or (one["check"], one["verdict"]) == ("ranks", "failed"))
    ] == []
    assert {"matrix rate", "all-reduce"} <= {one["check"] for one in found}
    found = wrong(lab, folder, "recipe.yaml", "checkpoint.keep=100000000", before=salloc)
    assert [(one["host"], one["check"]) for one in found] == [("host1", "disk"), ("host2", "disk")]


@pytest.fixture
def slow_host(lab: Lab) -> Iterator[None]:
    """Limit host2's link to 40 Mbit/s during a test."""
    assert lab.run("host2", *SHAPED.split()).returncode == 0
    yield
    lab.run("host2", "tc", "qdisc", "del", "dev", "eth0", "root")


def test_a_slow_host_is_named(lab: Lab, folder: Path, slow_host: None) -> None:
    """The host with the slow link is named, its neighbours are not, and nothing is left."""
    (folder / "hosts").write_text("".join(f"{name} slots=1\n" for name in lab.names[:3]))
    found = doctor(lab, folder, "--hostfile", "hosts", "--launcher", "torchrun")
    links = {one["host"]: one for one in found if one["check"] == "link"}
    slow = links.pop("host2")
    assert (slow["verdict"], slow["what"][:5]) == ("failed", "SLOW:")
    # 40 Mbit/s is 5e6 bytes/s; the other direction is not limited. The hosts of the lab share the
    # processors of this machine, so that a neighbour may be slow too, but not as slow.
    speed = slow["figures"]["bytes_per_second"]
    assert speed < 2e7
    assert all(one["figures"]["bytes_per_second"] > speed for one in links.values())
    assert {one["host"] for one in found if one["check"] == "matrix rate"} == {
        "host1", "host2", "host3"}  # fmt: skip
    assert [one["check"] for one in found if one["host"] == "all"] == ["all-reduce"]
    assert not list(folder.glob("ortlaunch-doctor-*"))
