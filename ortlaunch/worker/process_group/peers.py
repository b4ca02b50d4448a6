"""Who is at the other end of the ranks' connections: on this host, only processes of this user.

gloo takes the first connection that names a pair of ranks, whoever made it, and every user of a
host can connect to its ports. The kernel's tables of TCP connections have the user of each end that
is on this host. So each new process group is checked before anything is sent through it.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import re
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.distributed.distributed_c10d as c10d

from ortlaunch.errors import LaunchError

# The kernel's numbers of states.
_ESTABLISHED = "01"
_CLOSE_WAIT = "08"
_LISTEN = "0A"
# Time for a connection that is just being accepted: the tables are read page by page.
_SETTLING_SECONDS = 0.3
_PAUSE_SECONDS = 0.05
_ROOT = 0

_Address = tuple[str, int]


class Socket(NamedTuple):
    """A row of the kernel's tables of TCP sockets."""

    local: _Address
    remote: _Address
    state: str
    user: int
    inode: int
    """0: no process has the socket (yet, or any more); `user` is then meaningless."""


@contextlib.contextmanager
def only_own_users() -> Iterator[None]:
    """Check every process group that is made while the context is open, by whatever library.

    The call that makes a group then raises LaunchError if another user has joined it.
    """
    # Every group of torch is made by this function: the first one, those of `new_group`, and those
    # of device meshes.
    make = c10d._new_process_group_helper

    @functools.wraps(make)
    def make_checked(*args: Any, **options: Any) -> Any:
        before = own_inodes()
        made = make(*args, **options)
        require_own_users(own_inodes() - before)
        return made

    c10d._new_process_group_helper = make_checked
    try:
        yield
    finally:
        c10d._new_process_group_helper = make


def own_inodes() -> set[int]:
    """Return the inodes of the sockets of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        # The handle of the listing itself is closed by now.
        with contextlib.suppress(FileNotFoundError):
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/self/fd/{name}"))
            if match:
                found.add(int(match[1]))
    return found


def require_own_users(inodes: set[int]) -> None:
    """Check that the other ends of these sockets on this host belong to this user or to root.

    Raises:
        LaunchError: one does not; the message names its user and both ports.
    """
    table = sockets()
    if inodes and not any(one.inode in inodes for one in table):
        print(
            "the users who have connected to this rank are not known: /proc/net/tcp does not list "
            "its connections",
            flush=True,
        )
    foreign = _foreign_end(inodes, table)
    deadline = time.monotonic() + _SETTLING_SECONDS
    while foreign is not None and not foreign.inode and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)
        foreign = _foreign_end(inodes, sockets())
    if foreign is not None:
        who = f"a process of another user (uid {foreign.user})"
        if not foreign.inode:
            who = "a process that has closed the connection since"
        address, port = foreign.local
        raise LaunchError(
            f"{who} at {address}:{port} is connected to port {foreign.remote[1]} of this rank, "
            "which is for ranks of this run only; nothing was sent to it. Start the run again; "
            "if it happens again, ask that user what runs there (docs/trust.md)"
        )


def _foreign_end(inodes: set[int], table: list[Socket]) -> Socket | None:
    """Return the other end of one of these sockets that is on this host and not this user's.

    If no process has it, and this user's listeners will not accept it, its inode is 0.
    """
    users = (os.geteuid(), _ROOT)
    others = {(one.local, one.remote): one for one in table}
    accepting = {one.local for one in table if one.state == _LISTEN and one.user in users}
    for one in table:
        if (
            one.inode not in inodes
            or one.state not in (_ESTABLISHED, _CLOSE_WAIT)
            or not _is_here(one.remote[0])
        ):
            continue
        other = others.get((one.remote, one.local), Socket(one.remote, one.local, "", 0, 0))
        port = other.local[1]
        if other.inode and other.user not in users:
            return other
        if not other.inode and not accepting & {other.local, ("0.0.0.0", port), ("::", port)}:
            return other
    return None


def sockets() -> list[Socket]:
    """Return the TCP sockets of this network namespace, of all users."""
    found = []
    for name in ("tcp", "tcp6"):
        # A kernel without IPv6 has no tcp6; a sandbox may have neither.
        with contextlib.suppress(OSError), open(f"/proc/self/net/{name}") as file:
            for line in file.readlines()[1:]:
                words = line.split()
                local, remote = (_address(word) for word in words[1:3])
                found.append(Socket(local, remote, words[3], int(words[7]), int(words[9])))
    return found


def _address(text: str) -> _Address:
    """Return address and port of the kernel's text, as `0100007F:1F90`."""
    digits, _, port = text.partition(":")
    # Words of 4 bytes, each printed as a number of this machine's byte order.
    packed = b"".join(
        struct.pack("=I", int(digits[at : at + 8], 16)) for at in range(0, len(digits), 8)
    )
    address = ipaddress.ip_address(packed)
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address), int(port, 16)


@functools.cache
def _is_here(address: str) -> bool:
    """Return whether an address belongs to this host: only such an address can be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.bind((address, 0))
        return True
    return False
