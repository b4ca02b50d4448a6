"""The network interface that ranks of several hosts meet on.

It is the one that the user names, else that of the route to the other hosts. The address of a
host's own name is no guide: Debian maps it to 127.0.1.1. Linux; standard library, errors and plan
only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterable, MutableMapping

from ortlaunch.errors import LaunchError
from ortlaunch.launch_plan import is_this_host

# From linux/sockios.h and linux/if.h.
_SIOCGIFADDR = 0x8915
_SIOCGIFFLAGS = 0x8913
_IFF_RUNNING = 0x40
_GLOO = "GLOO_SOCKET_IFNAME"
_NCCL = "NCCL_SOCKET_IFNAME"
# Hosts whose names are looked up at most. One that resolves is enough, and each may take seconds.
_ASKED = 4


def own_address(hosts: Iterable[str], environ: MutableMapping[str, str]) -> str:
    """Return this host's address as other hosts reach it.

    It is the address of the interface that the user named, else that of the route to another host.

    Raises:
        LaunchError: there is no such address.
    """
    if told := environ.get(_GLOO):
        return _address_of(told)
    here = socket.gethostname()
    # A host may be written as user@host.
    names = [name.rpartition("@")[2] for name in hosts]
    for host in [name for name in names if not is_this_host(name)][:_ASKED]:
        address = source_address(host)
        if address is not None:
            return address
    with contextlib.suppress(OSError):
        own = socket.gethostbyname(here)
        # Debian maps a host's own name to 127.0.1.1.
        if not own.startswith("127."):
            return own
    raise LaunchError(
        f"{here} has no IPv4 address that other hosts can reach "
        f"({', '.join(sorted(set(names))[:8])}); give its name a routable one in DNS or "
        "/etc/hosts, or name the interface: launch.interface=eth0"
    )


def source_address(host: str) -> str | None:
    """Return this host's address on its route to another; None if only loopback leads there."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a UDP socket sends no packet: the kernel only picks the route. 9 is "discard".
        probe.connect((host, 9))
        address: str = probe.getsockname()[0]
        return None if address.startswith("127.") else address
    return None


def variables(name: str) -> dict[str, str]:
    """Return the environment variables that restrict gloo and NCCL to this interface.

    NCCL treats a name without "=" as a prefix.
    """
    return {_GLOO: name, _NCCL: f"={name}"}


def use(address: str, environ: MutableMapping[str, str]) -> None:
    """Let gloo and NCCL use the interface that has this address, unless the user named one.

    Raises:
        LaunchError: the interface that the user named is not on this host.
    """
    told = environ.get(_GLOO)
    if told:
        _address_of(told)
    name = told or interface_with(address)
    for variable, value in variables(name).items() if name else ():
        environ.setdefault(variable, value)


def interface_with(address: str) -> str | None:
    """Return the interface of this host that has this address, if any."""
    return next((name for name in interfaces() if _address(name) == address), None)


def has_link(name: str) -> bool:
    """Return whether an interface is up and its other end is alive, as far as the kernel knows."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        packed = fcntl.ioctl(
            probe.fileno(), _SIOCGIFFLAGS, struct.pack("256s", os.fsencode(name)[:15])
        )
        return bool(struct.unpack("H", packed[16:18])[0] & _IFF_RUNNING)
    return True


def interfaces() -> list[str]:
    """Return the names of this host's interfaces."""
    return [name for _, name in socket.if_nameindex()]


def _address_of(names: str) -> str:
    # torch takes a list, whose first interface is that of the listener.
    addresses = {name: _address(name) for name in names.split(",")}
    absent = [name for name, address in addresses.items() if address is None]
    if absent:
        named = names if absent == [names] else f"{names}: {absent[0]}"
        raise LaunchError(
            f"{_GLOO} (launch.interface) is {named}, and {socket.gethostname()} has no such "
            f"interface with an address; it has {', '.join(interfaces())}"
        )
    return str(addresses[names.split(",", maxsplit=1)[0]])


def _address(name: str) -> str | None:
    """Return the IPv4 address of an interface, or None."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        packed = fcntl.ioctl(
            probe.fileno(), _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)[:15])
        )
        # struct ifreq: 16 bytes of name, then a sockaddr_in with the address in its bytes 4 - 7.
        return socket.inet_ntoa(packed[20:24])
    return None
