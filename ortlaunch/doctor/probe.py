"""The program that reports the properties of one host; it needs no installation of ortlaunch there.

It is sent to the host's interpreter through standard input. It imports little of the standard
library: a hundred of these may start at once, and json or importlib.metadata would take longer to
import than Python to start. So answers are Python literals, one on each line, and versions are read
from files, without torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import socket
import sys
import time
import zlib

TYPE_CHECKING = False
# The import of typing takes as long as all others here together.
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ortlaunch.json_types import Json

PACKAGES = ("ortlaunch", "torch", "transformers", "deepspeed", "onnxruntime-training", "onnxruntime-training-cpu",
            "mpi4py", "numpy")  # fmt: skip
TOKEN = ".ortlaunch-doctor"
_REACH_SECONDS = 3.0  # for all connections
_UDP_SECONDS = 2.0  # for answers to datagrams, after all connections are decided
_AGAIN_SECONDS = 0.4  # between repetitions of a datagram, which may be lost
# From Linux's sockios.h: address and MTU of an interface.
_SIOCGIFADDR = 0x8915
_SIOCGIFMTU = 0x8921
_DO_NOT_FRAGMENT = 10, 2  # IP_MTU_DISCOVER, IP_PMTUDISC_DO: Linux
# Bytes of the IPv4 and UDP headers, and the most data in a datagram (65535 - 28).
_HEADERS = 28
_LONGEST = 65507
_TAG = 12  # bytes of a datagram that are sent back


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Return the versions of those packages that are installed here."""
    found: dict[str, str] = {}
    wanted = {name.replace("-", "_"): name for name in packages}
    for folder in sys.path:
        for entry in os.listdir(folder) if os.path.isdir(folder) else ():
            stem, ending = os.path.splitext(entry)
            name = wanted.get(stem.partition("-")[0].lower())
            if name and ending in (".dist-info", ".egg-info"):
                # The first folder of the path wins, as for an import.
                found.setdefault(name, _version(os.path.join(folder, entry)))
    return found


def _version(folder: str) -> str:
    for file in ("METADATA", "PKG-INFO"):
        try:
            with open(os.path.join(folder, file), encoding="utf-8", errors="replace") as lines:
                return next(
                    (line[8:].strip() for line in lines if line.startswith("Version:")), "unknown"
                )
        except OSError:
            continue
    return "unknown"


def interfaces() -> list[str]:
    """Return the names of the network interfaces."""
    return [name for _, name in socket.if_nameindex()]


def address(peers: list[str], interface: str | None) -> str | None:
    """Return this host's IPv4 address, as other hosts see it; None if it has none but loopback.

    Args:
        peers: names of other hosts, used if `interface` is None.
        interface: the network interface whose address is returned.
    """
    if interface is not None:
        return _address_of(interface)
    for peer in peers:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                # Sends nothing: the kernel only selects the route and with it the own address.
                probe.connect((peer, 9))
                found: str = probe.getsockname()[0]
        except OSError:
            continue
        if not found.startswith("127."):
            return found
    return None


def _address_of(interface: str) -> str | None:
    found = _of_interface(interface, _SIOCGIFADDR)
    return socket.inet_ntoa(found[4:8]) if found else None


def mtu(at: str | None) -> int:
    """Return the MTU in bytes of the interface with this address; 0 if unknown."""
    name = next((name for name in interfaces() if at and _address_of(name) == at), None)
    found = _of_interface(name, _SIOCGIFMTU) if name else b""
    return int.from_bytes(found[:4], sys.byteorder)


def _of_interface(name: str, request: int) -> bytes:
    """Return the kernel's answer to an ioctl on an interface, without the name; b"" on an error."""
    import fcntl

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # struct ifreq: 16 bytes of name, then the value.
            return fcntl.ioctl(probe.fileno(), request, name.encode()[:15].ljust(256, b"\0"))[16:]
    except OSError:
        return b""


class Doors:
    """Open TCP and UDP ports of this host that other hosts try; datagrams are answered."""

    def __init__(self, at: str, ports: Sequence[int]) -> None:
        """Listen on TCP and UDP ports.

        Args:
            at: the address to bind.
            ports: the TCP ports, each also used for UDP; 0: any port. Ports that are in use are
                left out, with the reason in `error`.
        """
        self.at = at
        self.sockets = list[socket.socket]()
        self.error = ""
        for port in ports:
            with contextlib.ExitStack() as opened:
                tcp = opened.enter_context(socket.socket())
                udp = opened.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                try:
                    tcp.bind((at, port))
                    tcp.listen(1024)
                    # For port 0 the two protocols get different numbers.
                    udp.bind((at, port))
                except OSError as error:
                    self.error = error.strerror or str(error)
                    continue
                opened.pop_all()
                self.sockets += [tcp, udp]

    @property
    def ports(self) -> list[tuple[int, int]]:
        """The (TCP port, UDP port) of each pair of sockets."""
        numbers = [one.getsockname()[1] for one in self.sockets]
        return list(zip(numbers[::2], numbers[1::2]))

    def close(self) -> None:
        """Close all ports."""
        for one in self.sockets:
            one.close()

    def answer(self, ready: Sequence[object]) -> None:
        """Accept connections, and return the first bytes of each datagram to its sender."""
        for one in self.sockets:
            with contextlib.suppress(OSError):
                if one in ready and one.type == socket.SOCK_STREAM:
                    one.accept()[0].close()
                elif one in ready:
                    data, sender = one.recvfrom(1 << 16)
                    one.sendto(data[:_TAG], sender)

    def lines(self) -> Iterator[str]:
        """Yield the lines of standard input; connections and datagrams are answered meanwhile."""
        # Read without a buffer: `select` would not see lines that a buffer already holds.
        text = b""
        file = sys.stdin.fileno()
        while True:
            ready = select.select([file, *self.sockets], [], [])[0]
            self.answer(ready)
            if file in ready:
                data = os.read(file, 1 << 16)
                if not data:
                    return
                *whole, text = (text + data).split(b"\n")
                yield from (line.decode() for line in whole)

    def reach(self, peers: Sequence[tuple[str, int, int, int]]) -> list[tuple[str, bool, bool]]:
        """Try to reach ports of other hosts, all at the same time.

        Args:
            peers: address, TCP port, UDP port and MTU in bytes of each.

        Returns:
            For each peer: the error of the TCP connection ("" if it succeeded), whether a short
            datagram was answered, and whether one of the smaller MTU was, unfragmented.
        """
        began = time.monotonic()
        tries = [_connecting(address, port) for address, port, _, _ in peers]
        errors = {number: "timed out" for number, _ in enumerate(peers)}
        own = mtu(self.at)
        heard = set[bytes]()
        again = 0.0
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
            contextlib.ExitStack() as opened,
        ):
            with contextlib.suppress(OSError):
                udp.setsockopt(socket.IPPROTO_IP, *_DO_NOT_FRAGMENT)
            for one in tries:
                opened.enter_context(one)
            waiting = dict(enumerate(tries))
            while (passed := time.monotonic() - began) < _REACH_SECONDS:
                if passed >= again:
                    again = passed + _AGAIN_SECONDS
                    heard |= _send(udp, peers, own, heard)
                if not waiting and (len(heard) == 2 * len(peers) or passed > _UDP_SECONDS):
                    break
                reading, writing, _ = select.select(
                    [udp, *self.sockets], list(waiting.values()), [], 0.1
                )
                # The others try this host meanwhile.
                self.answer(reading)
                if udp in reading:
                    with contextlib.suppress(OSError):
                        heard.add(udp.recv(_TAG))
                for number in [number for number, one in waiting.items() if one in writing]:
                    error = waiting.pop(number).getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    errors[number] = os.strerror(error) if error else ""
        return [
            (errors[number], _tag(number, False) in heard, _tag(number, True) in heard)
            for number in errors
        ]


def _connecting(address: str, port: int) -> socket.socket:
    one = socket.socket()
    # `connect_ex` then returns at once; `select` shows the end of the attempt.
    one.setblocking(False)
    one.connect_ex((address, port))
    return one


def _tag(number: int, is_long: bool) -> bytes:
    return f"{number}{'L' if is_long else 'S'}".encode().ljust(_TAG)


def _send(
    udp: socket.socket, peers: Sequence[tuple[str, int, int, int]], own: int, heard: set[bytes]
) -> set[bytes]:
    """Send again all datagrams without an answer.

    Returns:
        The tags of long datagrams that the kernel knows to be too long for the path. They count as
        answered, because TCP adapts to a known path MTU by itself.
    """
    narrow = set()
    for number, (address, _, port, theirs) in enumerate(peers):
        longest = min(own, theirs) - _HEADERS
        for tag, size in ((_tag(number, False), 0), (_tag(number, True), min(longest, _LONGEST))):
            if tag not in heard:
                try:
                    udp.sendto(tag.ljust(size), (address, port))
                except OSError as error:
                    narrow |= {tag} if error.errno == errno.EMSGSIZE else set()
    return narrow


def free(path: str) -> int:
    """Return the free bytes on the disk of a path, or of its nearest existing parent."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize


def sources() -> int:
    """Return a checksum over this host's Python files of ortlaunch; 0 if it has none."""
    found = 0
    root = next((path for path in (os.path.join(one, "ortlaunch") for one in sys.path)
                 if os.path.exists(os.path.join(path, "__init__.py"))), "")  # fmt: skip
    for folder, folders, files in os.walk(root) if root else ():
        folders.sort()
        for name in sorted(name for name in files if name.endswith(".py")):
            with open(os.path.join(folder, name), "rb") as file:
                found = zlib.crc32(file.read(), zlib.crc32(name.encode(), found))
    return found


def machine() -> str:
    """Return the boot id and network namespace: equal for two names of one host, else different."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""


def token(folder: str) -> str | None:
    """Return the token that another host has written to the run folder; None if absent."""
    try:
        with open(os.path.join(folder, TOKEN), encoding="utf-8") as file:
            return file.read()
    except OSError:
        return None


def stale() -> list[str]:
    """Return this user's living ranks here, by run: `run folder (process id, ...)`."""
    found: dict[str, list[str]] = {}
    for number in sorted(filter(str.isdecimal, os.listdir("/proc")), key=int):
        try:
            with open(f"/proc/{number}/cmdline", "rb") as file:
                words = file.read().rstrip(b"\0").split(b"\0")
            if b"ortlaunch.worker" in words and os.stat(f"/proc/{number}").st_uid == os.getuid():
                # The run folder is the last argument, relative to the rank's folder.
                folder = os.path.join(os.readlink(f"/proc/{number}/cwd"), os.fsdecode(words[-1]))
                found.setdefault(folder, []).append(number)
        # It ended meanwhile, or belongs to another user.
        except OSError:
            continue
    return [f"{folder} ({', '.join(numbers)})" for folder, numbers in found.items()]


def gpus() -> int:
    """Return the number of GPUs that NVIDIA's driver shows here."""
    return sum(name.startswith("nvidia") and name[6:].isdecimal() for name in os.listdir("/dev"))


def busy_gpus() -> list[str] | None:
    """Return `process id, memory` of processes on GPUs now; None if nvidia-smi fails."""
    import subprocess

    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=8
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None


def properties(request: Json) -> Json:
    """Return all properties of this host that need no other host.

    Args:
        request: `peers` (names), `interface` (or null), `folder` (the run's, or null), `cuda`
            (whether GPUs count).
    """
    folder = request["folder"]
    # Not tempfile's: it leaves out a folder whose disk is full.
    temporary = os.environ.get("TMPDIR") or "/tmp"
    count = gpus()
    return {
        "hostname": socket.gethostname(),
        "python": sys.version.split()[0],
        "packages": versions(),
        "sources": sources(),
        "machine": machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "address": address(request["peers"], request["interface"]),
        "interfaces": interfaces(),
        "gpus": count,
        "busy_gpus": busy_gpus() if request["cuda"] and count else [],
        "token": token(str(folder)) if folder else None,
        "writable": folder is None or os.access(folder, os.W_OK),
        "free": free(str(folder or os.getcwd())),
        "temporary": (temporary, free(temporary)),
        "shm": free("/dev/shm"),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "infiniband": os.path.isdir("/sys/class/infiniband")
        and bool(os.listdir("/sys/class/infiniband")),
        "stale": stale(),
    }


def main(request: Json) -> None:
    """Print the properties of this host; then, for each line of input, connections to other hosts.

    A line has `ADDRESS TCP UDP MTU` of each peer; the answer has the time and the result for each.
    Returns at the end of the input.

    Args:
        request: `peers`, `interface`, `folder` and `cuda` as above, and `ports` to listen on; 0:
            any.
    """
    first = properties(request)
    doors = Doors(first["address"] or "127.0.0.1", request["ports"])
    ports = doors.ports
    print({**first, "doors": ports, "mtu": mtu(first["address"]), "listens": ports[0][0] if ports else doors.error},
          flush=True)  # fmt: skip
    for line in doors.lines():
        now = time.time()
        words = line.split()
        peers = [(words[at], *map(int, words[at + 1 : at + 4])) for at in range(0, len(words), 4)]
        reached = doors.reach(peers)  # type: ignore[arg-type]
        print({"time": now, "took": time.time() - now, "reach": reached}, flush=True)
