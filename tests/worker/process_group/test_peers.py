"""Who is at the other end of a rank's connections; the strangers are processes of another user."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ortlaunch.base.errors import LaunchError
from ortlaunch.worker.process_group import peer_users
from tests import labs

STRANGER = 54321


@contextmanager
def connected(port: int, user: int | None, stays: bool = True) -> Iterator[None]:
    """A process of a user (None: this one) that is connected to a port, or was."""
    if user is not None and os.geteuid():
        labs.skip("only root can start a process of another user")
    read_end, write_end = os.pipe()
    # A process, as setuid changes the user of all threads.
    child = os.fork()
    if not child:
        try:
            if user is not None:
                os.setuid(user)
            one = socket.socket()
            one.connect(("127.0.0.1", port))
            one.close() if not stays else None
            os.write(write_end, b".")
            signal.pause()
        finally:
            os._exit(1)
    os.close(write_end)
    try:
        os.read(read_end, 1)
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read_end)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A listener on the loopback address, as gloo's."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@contextmanager
def accepted(listener: socket.socket) -> Iterator[set[int]]:
    """Accept a connection; the value is the inodes of this process's sockets."""
    with listener.accept()[0]:
        yield peer_users.own_socket_inodes()


def refusal(inodes: set[int]) -> str:
    """Return the message of the error for these sockets."""
    with pytest.raises(LaunchError) as caught:
        peer_users.require_peers_of_same_user_or_root(inodes)
    return str(caught.value)


def test_a_process_of_this_user_may_connect(listener: socket.socket) -> None:
    """A connection of this user is accepted."""
    # Every rank of a run has the same user.
    with connected(listener.getsockname()[1], None), accepted(listener) as inodes:
        peer_users.require_peers_of_same_user_or_root(inodes)


@pytest.mark.lab
def test_a_process_of_another_user_is_refused(listener: socket.socket) -> None:
    """The error names the other user and both ports."""
    port = listener.getsockname()[1]
    with connected(port, STRANGER), accepted(listener) as inodes:
        caught = refusal(inodes)
    assert re.sub(r"from port \d+", "from port N", caught) == (
        f"a process of another user (uid {STRANGER}) is connected from port N to port {port} of "
        "this rank, which is for ranks of this run only; nothing was sent to it. Start the run "
        "again; if it happens again, ask that user what runs there (`ortlaunch docs trust`)"
    )


def test_a_process_that_has_left_is_refused(listener: socket.socket) -> None:
    """Who has sent something and closed the connection is not known, and is refused."""
    # The bytes that it has sent would still be read.
    port = listener.getsockname()[1]
    with connected(port, None, stays=False), accepted(listener) as inodes:
        assert "a process that has closed the connection since is" in refusal(inodes)


def test_a_connection_that_nobody_has_accepted_yet(listener: socket.socket) -> None:
    """A rank that this user's listener will accept is no stranger."""
    # The kernel completes a connection before the listener's process accepts it.
    before = peer_users.own_socket_inodes()
    with socket.create_connection(listener.getsockname()):
        peer_users.require_peers_of_same_user_or_root(peer_users.own_socket_inodes() - before)


def test_ipv4_in_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener for both families has IPv4 addresses in the form of IPv6; they are the same."""
    with (
        socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as made,
        connected(made.getsockname()[1], None),
        accepted(made) as inodes,
    ):
        peer_users.require_peers_of_same_user_or_root(inodes)
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
        monkeypatch.setattr(peer_users, "_ROOT", STRANGER)
        assert f"a process of another user (uid {os.getuid()})" in refusal(inodes)


def test_unknown_users_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the kernel's tables cannot be read, the run continues, and says so."""
    monkeypatch.setattr(peer_users, "all_tcp_sockets_of_namespace", list)
    peer_users.require_peers_of_same_user_or_root({1})
    assert capsys.readouterr().out == (
        "the users who have connected to this rank are not known: /proc/net/tcp does not list its "
        "connections\n"
    )


def test_every_group_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first group, and those of libraries, are checked when they are made, and only inside."""
    seen: list[set[int]] = []
    monkeypatch.setattr(peer_users, "require_peers_of_same_user_or_root", seen.append)
    with peer_users.refuse_foreign_users_in_new_groups():
        store = dist.FileStore(str(tmp_path / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        c10d.new_group([0])
    c10d.new_group([0])
    dist.destroy_process_group()
    # Each group of gloo has a listener of its own.
    assert len(seen) == 2
    assert min(map(len, seen)) >= 1
