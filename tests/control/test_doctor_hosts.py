"""What is said of hosts before a run, out of what each of them tells."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.doctor import hosts, probe
from ortlaunch.doctor.hosts import FAILED, WARNING, Asked, look, require
from ortlaunch.errors import InputError, LaunchError
from ortlaunch.plan import Node

NODES = (Node("a", 2, 0, (0, 1)), Node("b", 1, 2, (0,)))
GOOD: dict[str, Any] = {
    "hostname": "a", "python": "3.11.7", "packages": {"torch": "2.13.0"}, "address": "10.0.0.1", "gpus": 2,
    "interfaces": ["lo", "eth0"],
    "free": 1 << 40, "shm": 1 << 34, "open_files": 65536, "memlock": -1, "stale": [], "time": 100.0, "asked_at": 100.2,
}  # fmt: skip


@pytest.fixture
def tells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Host b tells this beside what a good host does."""
    monkeypatch.setattr(probe, "versions", lambda: {"torch": "2.13.0"})

    def tell(**told: Any) -> None:
        def ask(host: str, asked: Asked) -> tuple[Any, float]:
            seen = probe.token(str(asked.folder)) if asked.folder else None
            return {**GOOD, "token": seen, **(told if host == "b" else {})}, 0.1

        monkeypatch.setattr(hosts, "_ask", ask)

    return tell


@pytest.mark.parametrize(
    ("told", "check", "verdict", "what"),
    [
        ({"packages": {"torch": "2.6.0"}}, "packages", FAILED, "torch 2.6.0 (here 2.13.0)"),
        ({"packages": {}}, "packages", FAILED, "torch absent (here 2.13.0)"),
        ({"address": None}, "address", FAILED, "no route to any of the other hosts but loopback"),
        ({"interfaces": ["lo", "eth1"]}, "interface", FAILED, "no eth0 there; it has lo, eth1"),
        ({"gpus": 0}, "gpus", FAILED, "0 for 1 slots"),
        ({"token": None}, "run folder", FAILED, "there is another folder than here"),
        ({"free": 10}, "disk", FAILED, "10 B free, and checkpoints take 1.0 KiB"),
        ({"shm": 1 << 20}, "/dev/shm", WARNING, "1.0 MiB free"),
        ({"open_files": 256}, "open files", WARNING, "at most 256"),
        ({"time": 130.2}, "clock", WARNING, "+30.0 s beside this host"),
        ({"stale": [7, 8]}, "stale", WARNING, "ranks alive: 7, 8"),
    ],
)
def test_what_is_wrong(told: dict[str, Any], check: str, verdict: str, what: str, tells: Any, tmp_path: Path) -> None:
    """One finding, of that host, with what mends it; before a run only what would fail it ends it."""
    tells(**told)
    asked = Asked(NODES, "cuda", tmp_path, 1024, interface="eth0")
    wrong = [finding for finding in look(asked) if finding.verdict != "ok"]
    assert [(one.host, one.check, one.verdict) for one in wrong] == [("b", check, verdict)]
    assert what in wrong[0].what
    assert wrong[0].mend
    if verdict == FAILED:
        with pytest.raises(LaunchError, match="the hosts are not ready, and nothing was started"):
            require(asked)
    else:
        require(asked)
    assert list(tmp_path.iterdir()) == []


def test_good_hosts(tells: Any, tmp_path: Path) -> None:
    """Nothing to say but that they are ready."""
    tells()
    found = look(Asked(NODES, "cuda", tmp_path))
    assert {finding.verdict for finding in found} == {"ok"}
    assert hosts.told(found).endswith("\nready")


def test_ssh_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its own last words, and what to try; a missing interpreter is another matter."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    ended = {"a": (255, "ssh: connect to host a: No route to host"), "b": (127, "bash: python: not found")}

    def run(command: list[str], **_: Any) -> Any:
        status, words = ended[command[-2]]
        return subprocess.CompletedProcess(command, status, "", f"{words}\n")

    monkeypatch.setattr(hosts.subprocess, "run", run)
    first, second = look(Asked(NODES, "cpu", None))
    assert (first.check, first.what) == ("reached", "ssh: connect to host a: No route to host")
    assert (second.check, second.what) == ("interpreter", f"no {sys.executable} there (bash: python: not found)")


def test_the_probe_by_itself(tmp_path: Path) -> None:
    """As another host's interpreter runs it: from its standard input, without ortlaunch or torch."""
    (tmp_path / probe.TOKEN).write_text("word")
    question = json.dumps({"peers": ["127.0.0.1"], "folder": str(tmp_path)})
    text = Path(probe.__file__).read_text(encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-I", "-", question], input=text, capture_output=True, text=True, check=True, timeout=30
    )
    told = json.loads(done.stdout)
    assert (told["hostname"], told["token"], told["address"]) == (socket.gethostname(), "word", None)
    assert told["packages"]["torch"]


def test_no_ssh_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That, and a folder that is not there, is said without a traceback."""
    monkeypatch.setenv("PATH", "/nowhere")
    found = look(Asked(NODES, "cpu", tmp_path))
    assert {(one.verdict, one.what) for one in found} == {(FAILED, "cannot start ssh here: No such file or directory")}
    with pytest.raises(InputError, match="is no folder; make it first"):
        look(Asked(NODES, "cpu", tmp_path / "no"))
