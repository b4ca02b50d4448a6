"""A process of this machine: whether it lives, and which signals it heeds."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
from pathlib import Path

import pytest

from ortlaunch.base.process import (
    Process,
    all_processes,
    iterate_process_and_descendant_ids,
    living_descendant_pids,
    read_process_stat_or_none,
    signals_to_handle,
    user_name_or_number,
)


def test_a_process_is_more_than_its_id() -> None:
    """A process id with another start time is another process, and a zombie has ended."""
    me = Process.identity_of_this_process()
    assert (me.is_alive(), me._replace(began="then 1").is_alive(), me.is_here) == (
        True,
        False,
        True,
    )
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not Process.identity_of_pid(child.pid).is_alive()
    child.wait()
    assert read_process_stat_or_none(child.pid) is None


def test_the_kernels_file_of_a_process(tmp_path: Path) -> None:
    """A name may hold spaces and parentheses; parents and children are read alike by both lists."""
    (tmp_path / "a) Z (b").symlink_to("/bin/sleep")
    with subprocess.Popen([tmp_path / "a) Z (b", "60"]) as child:
        try:
            stat = read_process_stat_or_none(child.pid)
            assert stat is not None
            while stat.name != "a) Z (b":  # not executed yet
                stat = read_process_stat_or_none(child.pid)
                assert stat is not None
            assert (stat.pid, stat.parent, stat.has_ended) == (child.pid, os.getpid(), False)
            assert stat.started in {one.started for one in all_processes() if one.pid == child.pid}
            assert child.pid in iterate_process_and_descendant_ids(os.getpid())
            assert child.pid in living_descendant_pids(os.getpid())
        finally:
            child.kill()


@pytest.mark.parametrize(("handler", "expected"), [(signal.SIG_IGN, False), (signal.SIG_DFL, True)])
def test_nohup_is_heeded(handler: signal.Handlers, expected: bool) -> None:
    """A hang-up that is ignored when the command begins stays ignored."""
    before = signal.signal(signal.SIGHUP, handler)
    try:
        assert (signal.SIGHUP in signals_to_handle((signal.SIGTERM, signal.SIGHUP))) == expected
        assert signal.SIGTERM in signals_to_handle((signal.SIGTERM,))
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_user_without_a_name_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container the user may have no entry in /etc/passwd; variables with names come first."""

    def refuse(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", refuse)
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    assert user_name_or_number() == str(os.getuid())
    monkeypatch.setenv("USER", "ada")
    assert user_name_or_number() == "ada"
