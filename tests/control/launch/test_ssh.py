"""Tests of the ssh command line, and of the hosts that need no ssh."""

from __future__ import annotations

import socket

import pytest

from ortlaunch.launch.ssh import needs_no_ssh, ssh_argv
from ortlaunch.launch_plan import is_this_host

OWN = socket.gethostname()


def test_command() -> None:
    """The command never prompts, and checks the connection only if requested."""
    plain = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=8"]
    assert ssh_argv("me@b", ["ls", "a b"], 8) == [*plain, "me@b", "ls 'a b'"]
    checked = ["-o", "ServerAliveInterval=4", "-o", "ServerAliveCountMax=3"]
    assert ssh_argv("b", ["ls"], 8, 4) == [*plain, *checked, "b", "ls"]


@pytest.mark.parametrize(
    ("name", "is_here", "no_ssh"),
    [
        ("localhost", True, True),
        ("::1", True, True),
        (OWN, True, True),
        (OWN.partition(".")[0], True, True),
        (f"me@{OWN}", True, False),
        (f"{OWN}.elsewhere", False, False),
    ],
)
def test_a_name_of_this_host(name: str, is_here: bool, no_ssh: bool) -> None:
    """This host's own names need no ssh; another user on it does."""
    assert (is_this_host(name), needs_no_ssh(name)) == (is_here, no_ssh)
