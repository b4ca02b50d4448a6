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

from ortlaunch.base.errors import LaunchError
from ortlaunch.base.machine import own_address_on_route_or_none
from ortlaunch.launch_plan import is_this_host

# From linux/sockios.h and linux/if.h.
_SIOCGIFADDR = 0x8915
_SIOCGIFFLAGS = 0x8913
_IFF_RUNNING = 0x40
_GLOO = "GLOO_SOCKET_IFNAME"
_NCCL = "NCCL_SOCKET_IFNAME"
# Hosts whose names are looked up at most. One that resolves is enough, and each may take seconds.
_MAX_LOOKUPS = 4


def own_address_reachable_by_hosts(
    other_host_names: Iterable[str], environ: MutableMapping[str, str]
) -> str:
    """Return this host's address as other hosts reach it.

    It is the address of the interface that the user named, else that of the route to another host.

    Raises:
        LaunchError: there is no such address.
    """
    if interface_name := environ.get(_GLOO):
        return _require_all_interfaces_and_return_first_address(interface_name)
    own_host = socket.gethostname()
    # A host may be written as user@host.
    names = [name.rpartition("@")[2] for name in other_host_names]
    for host in [name for name in names if not is_this_host(name)][:_MAX_LOOKUPS]:
        address = own_address_on_route_or_none(host)
        if address is not None:
            return address
    with contextlib.suppress(OSError):
        named_address = socket.gethostbyname(own_host)
        # Debian maps a host's own name to 127.0.1.1.
        if not named_address.startswith("127."):
            return named_address
    raise LaunchError(
        f"{own_host} has no IPv4 address that other hosts can reach "
        f"({', '.join(sorted(set(names))[:8])}); give its name a routable one in DNS or "
        "/etc/hosts, or name the interface: launch.interface=eth0"
    )


def set_gloo_and_nccl_interface_unless_set(
    own_address: str, environ: MutableMapping[str, str]
) -> None:
    """Let gloo and NCCL use the interface that has this address, unless the user named one.

    Raises:
        LaunchError: the interface that the user named is not on this host.
    """
    requested_interface = environ.get(_GLOO)
    if requested_interface:
        _require_all_interfaces_and_return_first_address(requested_interface)
    name = requested_interface or interface_with_address_or_none(own_address)
    if name:
        environ.setdefault(_GLOO, name)
        # NCCL treats a name without "=" as a prefix.
        environ.setdefault(_NCCL, f"={name}")


def interface_with_address_or_none(address: str) -> str | None:
    """Return the interface of this host that has this address, if any."""
    return next(
        (name for name in interface_names() if _ipv4_address_or_none(name) == address), None
    )


def is_interface_running_or_unknown(interface_name: str) -> bool:
    """Return whether an interface is up and its other end is alive, as far as the kernel knows."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        packed = fcntl.ioctl(
            probe.fileno(), _SIOCGIFFLAGS, struct.pack("256s", os.fsencode(interface_name)[:15])
        )
        return bool(struct.unpack("H", packed[16:18])[0] & _IFF_RUNNING)
    return True


def interface_names() -> list[str]:
    """Return the names of this host's interfaces."""
    return [name for _, name in socket.if_nameindex()]


def _require_all_interfaces_and_return_first_address(interface_list: str) -> str:
    # torch takes a list, whose first interface is that of the listener.
    addresses = {name: _ipv4_address_or_none(name) for name in interface_list.split(",")}
    absent_names = [name for name, address in addresses.items() if address is None]
    if absent_names:
        requested_text = (
            interface_list
            if absent_names == [interface_list]
            else f"{interface_list}: {absent_names[0]}"
        )
        raise LaunchError(
            f"{_GLOO} (launch.interface) is {requested_text}, and {socket.gethostname()} has no such "
            f"interface with an address; it has {', '.join(interface_names())}"
        )
    return str(addresses[interface_list.split(",", maxsplit=1)[0]])


def _ipv4_address_or_none(interface_name: str) -> str | None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        packed = fcntl.ioctl(
            probe.fileno(), _SIOCGIFADDR, struct.pack("256s", os.fsencode(interface_name)[:15])
        )
        # struct ifreq: 16 bytes of name, then a sockaddr_in with the address in its bytes 4 - 7.
        return socket.inet_ntoa(packed[20:24])
    return None
