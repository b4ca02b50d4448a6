"""Lost hosts: which host is reported by whom, and when a living host is spared."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.lost_host import LostHost
from ortlaunch.worker.supervision import lost_host
from ortlaunch.worker.supervision.interface import is_interface_running_or_unknown
from ortlaunch.worker.supervision.lost_host import (
    LostHostDetector,
    is_host_reachable,
    terminate_then_kill_launcher,
)
from ortlaunch.worker.supervision.stall_rules import Heartbeat


def beat(rank: int, host: str, silent: float = 0.0) -> Heartbeat:
    """Return the heartbeat of a rank in its steps."""
    return Heartbeat(
        rank, host, 9, 6, "a forward or backward pass", 9, 4, 0.0, 0.0, "S", True, 0.1, 0.0, silent
    )


# All ranks of host b are silent for long; of host c, rank 4 is not silent.
BEATS = (beat(0, "a"), beat(1, "b", 8.0), beat(2, "b", 9.0), beat(3, "c", 60.0), beat(4, "c"))
ADDRESSES = {1: "10.0.0.2", 2: "10.0.0.2", 3: "10.0.0.3", 4: "10.0.0.3"}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that were probed; no host answers, and no link is down."""
    found: list[str] = []
    monkeypatch.setattr(lost_host, "is_host_reachable", lambda address: bool(found.append(address)))
    monkeypatch.setattr(lost_host, "own_dead_interface_towards_or_none", lambda peer: None)
    return found


def test_a_host_of_silent_ranks_that_does_not_answer(asked: list[str]) -> None:
    """A host is lost if all its ranks are silent for long and it does not answer."""
    found = LostHostDetector("a", 0).detect_lost_host(BEATS, ADDRESSES)
    # Host c is not probed, because one of its ranks is not silent.
    why = "no heartbeat from it for 10 s, and 10.0.0.2 answers no connection"
    assert (found, asked) == (LostHost(1, "b", why), ["10.0.0.2"])
    # Host b is silent for 6 s only.
    assert (
        LostHostDetector("a", 0).detect_lost_host(
            (beat(0, "a", 99.0), beat(1, "b", 6.0)), ADDRESSES
        )
        is None
    )


def test_the_host_whose_link_is_down_names_itself(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides of a broken link write into the run folder, and must name the same host."""
    monkeypatch.setattr(lost_host, "own_dead_interface_towards_or_none", lambda peer: "eth0")
    assert LostHostDetector("a", 7).detect_lost_host(BEATS, ADDRESSES) == LostHost(
        7, "a", "its network interface eth0 has no link"
    )


def test_a_host_that_answers_is_not_lost(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that answers is not lost, and is not probed again at once."""
    # Its supervisors may be stopped, or starved of processor time.
    monkeypatch.setattr(lost_host, "is_host_reachable", lambda address: not asked.append(address))  # type: ignore[func-returns-value]
    watched = LostHostDetector("a", 0)
    assert [watched.detect_lost_host(BEATS, ADDRESSES) for _ in range(3)] == [None] * 3
    assert asked == ["10.0.0.2"]


def test_the_loopback_has_a_link() -> None:
    """The loopback has a link, as the kernel's flags show; an unknown interface has one, too."""
    assert (is_interface_running_or_unknown("lo"), is_interface_running_or_unknown("nope9")) == (
        True,
        True,
    )


def test_a_refused_connection_is_an_answer() -> None:
    """A refused connection proves that a machine is alive."""
    assert is_host_reachable("127.0.0.1")


def test_the_first_word_stays(tmp_path: Path) -> None:
    """The record of a second lost host does not replace the first."""
    run = RunDir(tmp_path)
    LostHost(1, "b", "it went").write_as_cause_unless_recorded(run)
    LostHost(0, "a", "another story").write_as_cause_unless_recorded(run)
    record = json.loads(run.lost.read_text())
    assert (
        record["summary"]
        == "rank 1 on host b is lost, and all others of that host: it went; exit status 1"
    )
    assert (record["type"], record["secondary"], record["exit_status"]) == ("LostHost", False, 1)


def test_a_launcher_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that ignores SIGTERM is killed."""
    # mpirun's daemon on the far side once stayed for ever.
    monkeypatch.setattr(lost_host, "_LAUNCHER_SECONDS", 0.3)
    parent = os.fork()
    if parent == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            terminate_then_kill_launcher()
            os._exit(0)
        signal.pause()
        os._exit(0)
    _, status = os.waitpid(parent, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
