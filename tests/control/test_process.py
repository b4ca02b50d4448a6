"""A process of this machine: whether it lives, and which signals it heeds."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from ortlaunch.process import Process, heeded


def test_a_process_is_more_than_its_id() -> None:
    """The same id with another beginning is another process, and one that nobody waited for has ended."""
    me = Process.this()
    assert (me.lives(), me._replace(began="then 1").lives(), me.is_here) == (True, False, True)
    child = subprocess.Popen(["true"])
    there = me._replace(pid=child.pid, began="")
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert there.lives()  # all that can be seen where the system does not say more
    assert not Process.of(child.pid).lives()
    child.wait()
    assert not there.lives()


@pytest.mark.parametrize(("handler", "expected"), [(signal.SIG_IGN, False), (signal.SIG_DFL, True)])
def test_nohup_is_heeded(handler: signal.Handlers, expected: bool) -> None:
    """A hang-up that is ignored when the command begins stays ignored."""
    before = signal.signal(signal.SIGHUP, handler)
    try:
        assert (signal.SIGHUP in heeded((signal.SIGTERM, signal.SIGHUP))) == expected
        assert signal.SIGTERM in heeded((signal.SIGTERM,))
    finally:
        signal.signal(signal.SIGHUP, before)
