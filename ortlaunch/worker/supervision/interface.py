"""The network interface that ranks of several hosts meet on: the one told, else that of the route to the others.

What a host's own name leads to is no guide: Debian has it at 127.0.1.1. Linux; standard library, errors and plan only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterable, MutableMapping

from ortlaunch.errors import LaunchError
from ortlaunch.plan import is_this_host

_SIOCGIFADDR = 0x8915
_SIOCGIFFLAGS = 0x8913
_IFF_RUNNING = 0x40
_GLOO = "GLOO_SOCKET_IFNAME"
_NCCL = "NCCL_SOCKET_IFNAME"
_ASKED = 4  # hosts whose names are looked up at most: one that answers is enough


def own_address(hosts: Iterable[str], environ: MutableMapping[str, str]) -> str:
    """This host's address as the other hosts reach it: that of the interface told, else of the route to one of them.

    Raises:
        LaunchError: there is none.
    """
    told = environ.get(_GLOO)
    if told:
        return _address_of(told)
    here = socket.gethostname()
    names = [name.rpartition("@")[2] for name in hosts]
    for host in [name for name in names if not is_this_host(name)][:_ASKED]:
        address = source_address(host)
        if address is not None:
            return address
    with contextlib.suppress(OSError):
        own = socket.gethostbyname(here)
        if not own.startswith("127."):
            return own
    raise LaunchError(
        f"{here} knows no address of its own that other hosts can reach ({', '.join(sorted(set(names))[:8])}); give "
        "its name a routable address in DNS or /etc/hosts, or name the interface: launch.interface=eth0"
    )


def source_address(host: str) -> str | None:
    """The address that this host has on its route to another; None where there is no route but loopback."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # no packet is sent: the kernel only picks the route
        address: str = probe.getsockname()[0]
        return None if address.startswith("127.") else address
    return None


def variables(name: str) -> dict[str, str]:
    """The environment by which gloo and NCCL use this interface alone: NCCL takes a bare name for a prefix."""
    return {_GLOO: name, _NCCL: f"={name}"}


def use(address: str, environ: MutableMapping[str, str]) -> None:
    """Send gloo and NCCL over the interface that has this address of ours, where the user named none.

    Raises:
        LaunchError: the one that the user named is not on this host.
    """
    told = environ.get(_GLOO)
    if told:
        _address_of(told)
    name = told or interface_with(address)
    for variable, value in variables(name).items() if name else ():
        environ.setdefault(variable, value)


def interface_with(address: str) -> str | None:
    """The interface of this host that has this address."""
    return next((name for name in interfaces() if _address(name) == address), None)


def has_link(name: str) -> bool:
    """Whether an interface is up with a living other end, as far as the kernel says."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        packed = fcntl.ioctl(
            probe.fileno(), _SIOCGIFFLAGS, struct.pack("256s", os.fsencode(name)[:15])
        )
        return bool(struct.unpack("H", packed[16:18])[0] & _IFF_RUNNING)
    return True


def interfaces() -> list[str]:
    """Names of this host's interfaces."""
    return [name for _, name in socket.if_nameindex()]


def _address_of(name: str) -> str:
    address = _address(name)
    if address is None:
        raise LaunchError(
            f"{_GLOO} (launch.interface) is {name}, and {socket.gethostname()} has no such interface with an address; "
            f"it has {', '.join(interfaces())}"
        )
    return address


def _address(name: str) -> str | None:
    """The IPv4 address of an interface, or None."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        packed = fcntl.ioctl(
            probe.fileno(), _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)[:15])
        )
        return socket.inet_ntoa(packed[20:24])
    return None
