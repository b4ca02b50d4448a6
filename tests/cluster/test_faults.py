"""Hosts that are not fit: each fault is named with its host in seconds, and nothing is started."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from tests.cluster.lab import LOGIN, Lab
from tests.e2e.runs import COMMAND
from tests.launch.tiny import MODULE
from tests.makers import CUSTOM

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(120)]
HOSTS = "host1 slots=1\nhost2 slots=1\n"


@contextmanager
def _nothing(lab: Lab, folder: Path) -> Iterator[None]:
    yield


@contextmanager
def _another_torch(lab: Lab, folder: Path) -> Iterator[None]:
    """What pip wrote about torch, as host2 sees it."""
    found = next(file for file in metadata.files("torch") or () if file.name == "METADATA").locate()
    text = Path(str(found)).read_text(encoding="utf-8")
    (folder / "METADATA").write_text(text.replace(f"Version: {metadata.version('torch')}", "Version: 2.6.0"))
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


@pytest.mark.parametrize(
    ("fault", "hosts", "run_dir", "said"),
    [
        (_another_torch, HOSTS, "run", "host2                packages     failed   torch 2.6.0 (here "),
        (_link_down, HOSTS, "run", "host2                reached      failed   "),
        (_nothing, "host1 slots=1\nhost9 slots=1\n", "run", "host9                reached      failed   ssh: "),
        (_nothing, HOSTS, "/mnt/run", "run folder   failed   /mnt/run there is another folder than here"),
    ],
    ids=["another torch", "link down", "no such host", "folder not shared"],
)  # fmt: skip
def test_a_host_that_is_not_fit(fault: object, hosts: str, run_dir: str, said: str, lab: Lab, tmp_path: Path) -> None:
    """`train` says which and why within 15 s, and leaves no rank; `doctor --json` says the same."""
    (tmp_path / "hosts").write_text(hosts)
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(CUSTOM))
    with fault(lab, tmp_path):  # type: ignore[operator]
        began = time.monotonic()
        ended = lab.run(
            LOGIN, str(COMMAND), "train", "recipe.yaml", "--hostfile", "hosts", "--run-dir", run_dir, cwd=tmp_path
        )
        took = time.monotonic() - began
        doctor = lab.run(LOGIN, str(COMMAND), "doctor", "--hostfile", "hosts", "--json", cwd=tmp_path)
    assert ended.returncode == 1
    assert said in ended.stderr, ended.stderr
    assert took < 15
    if run_dir == "run":
        wrong = [finding for finding in json.loads(doctor.stdout) if finding["verdict"] == "failed"]
        assert [finding["host"] for finding in wrong] == [said.split(maxsplit=1)[0]]
        assert doctor.returncode == 1
