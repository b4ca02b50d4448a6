"""Who is at the other end of the ranks' connections: on this host, only processes of this user.

gloo takes the first connection that names a pair of ranks, whoever made it, and every user of a
host can connect to its ports. The kernel's tables of TCP connections have the user of each end that
is on this host. So each new process group is checked before anything is sent through it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.distributed.distributed_c10d as c10d

from ortlaunch.base.errors import LaunchError

# The kernel's numbers of states: established, closed by the other end, and listening.
_CONNECTED = ("01", "08")
_LISTEN = "0A"
_IPV4_IN_IPV6 = "0000000000000000FFFF0000"
_SOCKET = re.compile(r"socket:\[(\d+)\]$")
# Time for a connection that is just being accepted: the tables are read page by page.
_SETTLING_SECONDS = 0.3
_PAUSE_SECONDS = 0.05
_ROOT = 0


class TcpSocket(NamedTuple):
    """A row of the kernel's tables of TCP sockets; addresses are in the kernel's hexadecimal form."""

    local_address: str
    remote_address: str
    state: str
    user_id: int
    inode: int
    """0: no process has the socket (yet, or any more); `user` is then meaningless."""


@contextlib.contextmanager
def refuse_foreign_users_in_new_groups() -> Iterator[None]:
    """Check every process group that is made while the context is open, by whatever library.

    The call that makes a group then raises LaunchError if another user has joined it.
    """
    # Every group of torch is made by this function: the first one, those of `new_group`, and those
    # of device meshes.
    make_group = c10d._new_process_group_helper

    @functools.wraps(make_group)
    def make_checked(*args: Any, **options: Any) -> Any:
        inodes_before = own_socket_inodes()
        new_group = make_group(*args, **options)
        require_peers_of_same_user_or_root(own_socket_inodes() - inodes_before)
        return new_group

    c10d._new_process_group_helper = make_checked
    try:
        yield
    finally:
        c10d._new_process_group_helper = make_group


def own_socket_inodes() -> set[int]:
    """Return the inodes of the sockets of this process."""
    # The handle of the listing itself is closed by now, and resolves to its own path.
    paths = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return {int(match[1]) for match in map(_SOCKET.search, paths) if match}


def require_peers_of_same_user_or_root(socket_inodes: set[int]) -> None:
    """Check that the other ends of these sockets on this host belong to this user or to root.

    Raises:
        LaunchError: one does not; the message names its user and the ports.
    """
    if socket_inodes and not any(
        tcp_socket.inode in socket_inodes for tcp_socket in all_tcp_sockets_of_namespace()
    ):
        print(
            "the users who have connected to this rank are not known: /proc/net/tcp does not list "
            "its connections",
            flush=True,
        )
    deadline = time.monotonic() + _SETTLING_SECONDS
    while (
        foreign_peer := _local_peer_of_other_user_or_none(
            socket_inodes, all_tcp_sockets_of_namespace()
        )
    ) is not None:
        if foreign_peer.inode or time.monotonic() > deadline:
            peer_text = (
                f"a process of another user (uid {foreign_peer.user_id})"
                if foreign_peer.inode
                else "a process that has closed the connection since"
            )
            raise LaunchError(
                f"{peer_text} is connected from port {_port_of_address(foreign_peer.local_address)} to port "
                f"{_port_of_address(foreign_peer.remote_address)} of this rank, which is for ranks of this run only; "
                "nothing was sent to it. Start the run again; if it happens again, ask that user "
                "what runs there (`ortlaunch docs trust`)"
            )
        time.sleep(_PAUSE_SECONDS)


def _local_peer_of_other_user_or_none(
    socket_inodes: set[int], tcp_socket_table: list[TcpSocket]
) -> TcpSocket | None:
    """Return the other end of one of these sockets that is on this host and not this user's.

    If no process has it, and this user's listeners will not accept it, its inode is 0.
    """
    users = (os.geteuid(), _ROOT)
    socket_by_ends = {
        (tcp_socket.local_address, tcp_socket.remote_address): tcp_socket
        for tcp_socket in tcp_socket_table
    }
    local_hosts = {_host_of_address(tcp_socket.local_address) for tcp_socket in tcp_socket_table}
    accepting = {
        _port_of_address(tcp_socket.local_address)
        for tcp_socket in tcp_socket_table
        if tcp_socket.state == _LISTEN and tcp_socket.user_id in users
    }
    for tcp_socket in tcp_socket_table:
        if (
            tcp_socket.inode not in socket_inodes
            or tcp_socket.state not in _CONNECTED
            or _host_of_address(tcp_socket.remote_address) not in local_hosts
        ):
            continue
        other = socket_by_ends.get(
            (tcp_socket.remote_address, tcp_socket.local_address),
            TcpSocket(tcp_socket.remote_address, tcp_socket.local_address, "", 0, 0),
        )
        if (
            other.user_id not in users
            if other.inode
            else _port_of_address(other.local_address) not in accepting
        ):
            return other
    return None


def all_tcp_sockets_of_namespace() -> list[TcpSocket]:
    """Return the TCP sockets of this network namespace, of all users."""
    lines: list[str] = []
    for name in ("tcp", "tcp6"):
        # A kernel without IPv6 has no tcp6; a sandbox may have neither.
        with contextlib.suppress(OSError), open(f"/proc/self/net/{name}") as file:
            lines += file.readlines()[1:]
    # IPv4 in IPv6 is the same address in both tables.
    rows = [line.replace(_IPV4_IN_IPV6, "").split() for line in lines]
    return [TcpSocket(w[1], w[2], w[3], int(w[7]), int(w[9])) for w in rows]


def _host_of_address(address: str) -> str:
    return address.partition(":")[0]


def _port_of_address(address: str) -> int:
    return int(address.partition(":")[2], 16)
