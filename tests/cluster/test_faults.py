"""Unfit hosts: each fault is named with its host within seconds, and no rank is started."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import jsonschema
import pytest
import yaml

from ortlaunch.api.json_outputs import output_json_schema
from tests.cluster.lab import LOGIN, Lab
from tests.e2e.runs import COMMAND
from tests.launch.tiny import MODULE
from tests.makers import BERT, CUSTOM, WORDS

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(120)]
RECIPE = {**CUSTOM, "model": {"task": "masked-lm", "config": BERT}, "data": WORDS}
HOSTS = "host1 slots=1\nhost2 slots=1\n"


@contextmanager
def _nothing(lab: Lab, folder: Path) -> Iterator[None]:
    yield


@contextmanager
def _another_torch(lab: Lab, folder: Path) -> Iterator[None]:
    """Make host2 see another torch version, by a bind mount over pip's METADATA file."""
    found = next(file for file in metadata.files("torch") or () if file.name == "METADATA").locate()
    text = Path(str(found)).read_text(encoding="utf-8")
    (folder / "METADATA").write_text(
        text.replace(f"Version: {metadata.version('torch')}", "Version: 2.6.0")
    )
    lab.run("host2", "mount", "--bind", str(folder / "METADATA"), str(found))
    try:
        yield
    finally:
        lab.run("host2", "umount", str(found))


@contextmanager
def _link_down(lab: Lab, folder: Path) -> Iterator[None]:
    lab.link("host2", up=False)
    try:
        yield
    finally:
        lab.link("host2", up=True)


@contextmanager
def _ssh_refused(lab: Lab, folder: Path) -> Iterator[None]:
    """Make ssh connect to a port of host2 at which nothing listens."""
    config = lab.folder / "ssh_config"
    text = config.read_text()
    # Written in place: a new file would not be the one that is bind-mounted on the hosts.
    config.write_text(f"{text}Host host2\n  Port 23\n")
    try:
        yield
    finally:
        config.write_text(text)


class Case(NamedTuple):
    """A fault, and the text that reports it."""

    said: str
    fault: Callable[[Lab, Path], AbstractContextManager[None]] = _nothing
    hosts: str = HOSTS
    run_dir: str = "run"
    words: tuple[str, ...] = ()
    # None: `doctor` without a recipe knows no checkpoints, and cannot detect the fault.
    doctor: tuple[str, ...] | None = ()


CASES = {
    "ssh refused": Case(("host2                reached        failed   ssh: connect to host "
                        "host2 port 23: "),
                        _ssh_refused),
    "another torch": Case(("host2                packages       failed   torch "
                          "2.6.0 (here "), _another_torch),
    "link down": Case("host2                reached        failed   ", _link_down),
    ("a "
    "host missing"): Case(("host9                reached        "
                          "failed   ssh: "), hosts="host1 slots=1\nhost9 slots=1\n"),
    ("wrong "
    "interface"): Case("host2                interface      failed   no eth9 there; it has lo, eth0",
                            words=("launch.interface=eth9",), doctor=("--interface", "eth9")),
    # /mnt is each host's own disk.
    ("folder "
    "not shared"): Case(("host2                run folder     failed   /mnt/run the folder there is not the one "
        "here"),
                              run_dir="/mnt/run", doctor=("--run-dir", "/mnt/run")),
    ("disk "
    "nearly full"): Case(("free, and "
                         "checkpoints take "), words=("checkpoint.keep=100000000",), doctor=None),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_host_that_is_not_fit(case: Case, lab: Lab, tmp_path: Path) -> None:
    """`train` names the host and the cause within 15 s; `doctor --json` reports the same fault."""
    (tmp_path / "hosts").write_text(case.hosts)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    with case.fault(lab, tmp_path):
        began = time.monotonic()
        words = ("recipe.yaml", "--hostfile", "hosts", "--run-dir", case.run_dir, *case.words)
        ended = lab.run(LOGIN, str(COMMAND), "train", *words, cwd=tmp_path)
        took = time.monotonic() - began
        doctor = ("doctor", "--hostfile", "hosts", "--json", *(case.doctor or ()))
        seen = lab.run(LOGIN, str(COMMAND), *doctor, cwd=tmp_path)
    assert ended.returncode == 1
    said = next((line for line in ended.stderr.splitlines() if case.said in line), None)
    assert said is not None, ended.stderr
    assert took < 15
    print(f"{said.strip()} -> {took:.1f} s")
    findings = json.loads(seen.stdout)
    jsonschema.validate(findings, output_json_schema("doctor"))
    if case.doctor is not None:
        # Columns 23 to 36 of a line of `train` contain the name of the check.
        assert {one["check"] for one in findings if one["verdict"] == "failed"} == {
            said[23:36].strip()
        }
        assert seen.returncode == 1


# A process that occupies torch's default rendezvous port.
SQUATTER = (
    "import socket, time; s = socket.create_server(('', 29500)); print('up', "
    "flush=True); time.sleep(1000)"
)


def test_a_port_that_is_taken(lab: Lab, tmp_path: Path) -> None:
    """A launcher of a Kubernetes job names a port that is in use: rank 0 reports it at once."""
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(CUSTOM))
    squatter = subprocess.Popen(
        lab.command("host1", [sys.executable, "-c", SQUATTER]), stdout=subprocess.PIPE
    )
    assert squatter.stdout is not None
    # The line that it prints comes after it listens.
    squatter.stdout.readline()
    node = [
        sys.executable,
        "-m",
        "ortlaunch.launch.node",
        "--nodes=2",
        "--ranks=1",
        "--master=host1",
        "--",
    ]
    words = [*node, str(COMMAND), "train", "recipe.yaml", "--run-dir", "run"]
    began = time.monotonic()
    ended = lab.run(
        "host1", *words, cwd=tmp_path, env={**lab.environ, "JOB_COMPLETION_INDEX": "0"}, timeout=60
    )
    took = time.monotonic() - began
    squatter.kill()
    squatter.communicate()
    said = next(
        (line for line in ended.stderr.splitlines() if "cannot connect at" in line), ended.stderr
    )
    print(f"{said} -> {took:.1f} s")
    assert ended.returncode == 1
    assert (
        "ranks cannot connect at host1:29500 (MASTER_ADDR:MASTER_PORT of your launcher): " in said
    )
    assert "address already in use" in said
    assert took < 15
