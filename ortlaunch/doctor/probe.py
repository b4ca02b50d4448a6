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

    from ortlaunch.base.json_types import Json

PACKAGES = ("ortlaunch", "torch", "transformers", "deepspeed", "onnxruntime-training", "onnxruntime-training-cpu",
            "mpi4py", "numpy")  # fmt: skip
TOKEN_FILE = ".ortlaunch-doctor"
_REACH_SECONDS = 3.0  # for all connections
_UDP_SECONDS = 2.0  # for answers to datagrams, after all connections are decided
_AGAIN_SECONDS = 0.4  # between repetitions of a datagram, which may be lost
# From Linux's sockios.h: address and MTU of an interface.
_SIOCGIFADDR = 0x8915
_SIOCGIFMTU = 0x8921
_DO_NOT_FRAGMENT = 10, 2  # IP_MTU_DISCOVER, IP_PMTUDISC_DO: Linux
# Bytes of the IPv4 and UDP headers, and the most data in a datagram (65535 - 28).
_HEADER_BYTES = 28
_LONGEST_DATAGRAM = 65507
_TAG_BYTES = 12  # bytes of a datagram that are sent back


def installed_versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Return the versions of those packages that are installed here."""
    version_by_package: dict[str, str] = {}
    package_by_folder_stem = {name.replace("-", "_"): name for name in packages}
    for folder in sys.path:
        for entry in os.listdir(folder) if os.path.isdir(folder) else ():
            stem, ending = os.path.splitext(entry)
            name = package_by_folder_stem.get(stem.partition("-")[0].lower())
            if name and ending in (".dist-info", ".egg-info"):
                # The first folder of the path wins, as for an import.
                version_by_package.setdefault(
                    name, _version_in_metadata_or_unknown(os.path.join(folder, entry))
                )
    return version_by_package


def _version_in_metadata_or_unknown(metadata_folder: str) -> str:
    for file in ("METADATA", "PKG-INFO"):
        try:
            with open(
                os.path.join(metadata_folder, file), encoding="utf-8", errors="replace"
            ) as metadata_lines:
                return next(
                    (line[8:].strip() for line in metadata_lines if line.startswith("Version:")),
                    "unknown",
                )
        except OSError:
            continue
    return "unknown"


def interface_names() -> list[str]:
    """Return the names of the network interfaces."""
    return [name for _, name in socket.if_nameindex()]


def local_ipv4_address_or_none(peer_names: list[str], interface_name: str | None) -> str | None:
    """Return this host's IPv4 address, as other hosts see it; None if it has none but loopback.

    Args:
        peer_names: names of other hosts, used if `interface_name` is None.
        interface_name: the network interface whose address is returned.
    """
    if interface_name is not None:
        return _interface_address(interface_name)
    for peer in peer_names:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                # Sends nothing: the kernel only selects the route and with it the own address.
                probe.connect((peer, 9))
                own_address: str = probe.getsockname()[0]
        except OSError:
            continue
        if not own_address.startswith("127."):
            return own_address
    return None


def _interface_address(interface_name: str) -> str | None:
    address_bytes = _interface_ioctl_answer_or_empty(interface_name, _SIOCGIFADDR)
    return socket.inet_ntoa(address_bytes[4:8]) if address_bytes else None


def interface_mtu_bytes_or_zero(own_address: str | None) -> int:
    """Return the MTU in bytes of the interface with this address; 0 if unknown."""
    interface_name = next(
        (
            interface_name
            for interface_name in interface_names()
            if own_address and _interface_address(interface_name) == own_address
        ),
        None,
    )
    mtu_bytes = (
        _interface_ioctl_answer_or_empty(interface_name, _SIOCGIFMTU) if interface_name else b""
    )
    return int.from_bytes(mtu_bytes[:4], sys.byteorder)


def _interface_ioctl_answer_or_empty(interface_name: str, ioctl_request: int) -> bytes:
    """Return the kernel's answer to an ioctl on an interface, without the name; b"" on an error."""
    import fcntl

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # struct ifreq: 16 bytes of name, then the value.
            return fcntl.ioctl(
                probe.fileno(), ioctl_request, interface_name.encode()[:15].ljust(256, b"\0")
            )[16:]
    except OSError:
        return b""


class OpenPorts:
    """Open TCP and UDP ports of this host that other hosts try; datagrams are answered."""

    def __init__(self, bind_address: str, ports: Sequence[int]) -> None:
        """Listen on TCP and UDP ports.

        Args:
            bind_address: the address to bind.
            ports: the TCP ports, each also used for UDP; 0: any port. Ports that are in use are
                left out, with the reason in `error`.
        """
        self.bind_address = bind_address
        self.sockets = list[socket.socket]()
        self.error = ""
        for port in ports:
            with contextlib.ExitStack() as opened:
                tcp = opened.enter_context(socket.socket())
                udp = opened.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                # Connections of a doctor that has just ended do not make the port a used one.
                tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    tcp.bind((bind_address, port))
                    tcp.listen(1024)
                    # For port 0 the two protocols get different numbers.
                    udp.bind((bind_address, port))
                except OSError as error:
                    self.error = error.strerror or str(error)
                    continue
                opened.pop_all()
                self.sockets += [tcp, udp]

    @property
    def ports(self) -> list[tuple[int, int]]:
        """The (TCP port, UDP port) of each pair of sockets."""
        # Plain tuples, here and in `try_peers`: they are printed as literals for another host.
        port_numbers = [open_socket.getsockname()[1] for open_socket in self.sockets]
        return list(zip(port_numbers[::2], port_numbers[1::2]))

    def close_sockets(self) -> None:
        """Close all ports."""
        for open_socket in self.sockets:
            open_socket.close()

    def accept_or_echo_on_ready_sockets(self, ready_files: Sequence[object]) -> None:
        """Accept connections, and return the first bytes of each datagram to its sender."""
        for open_socket in self.sockets:
            with contextlib.suppress(OSError):
                if open_socket in ready_files and open_socket.type == socket.SOCK_STREAM:
                    open_socket.accept()[0].close()
                elif open_socket in ready_files:
                    data, sender = open_socket.recvfrom(1 << 16)
                    open_socket.sendto(data[:_TAG_BYTES], sender)

    def read_input_lines_while_answering_peers(self) -> Iterator[str]:
        """Yield the lines of standard input; connections and datagrams are answered meanwhile."""
        # Read without a buffer: `select` would not see lines that a buffer already holds.
        partial_line = b""
        input_descriptor = sys.stdin.fileno()
        while True:
            ready_files = select.select([input_descriptor, *self.sockets], [], [])[0]
            self.accept_or_echo_on_ready_sockets(ready_files)
            if input_descriptor in ready_files:
                chunk = os.read(input_descriptor, 1 << 16)
                if not chunk:
                    return
                *complete_lines, partial_line = (partial_line + chunk).split(b"\n")
                yield from (line.decode() for line in complete_lines)

    def try_peers(
        self, address_tcp_udp_mtu_of_peers: Sequence[tuple[str, int, int, int]]
    ) -> list[tuple[str, bool, bool]]:
        """Try to reach ports of other hosts, all at the same time.

        Args:
            address_tcp_udp_mtu_of_peers: address, TCP port, UDP port and MTU in bytes of each.

        Returns:
            For each peer: the error of the TCP connection ("" if it succeeded), whether a short
            datagram was answered, and whether one of the smaller MTU was, unfragmented.
        """
        start_time = time.monotonic()
        connecting_sockets = [
            _begin_connection(address, port) for address, port, _, _ in address_tcp_udp_mtu_of_peers
        ]
        error_by_peer = {
            peer_index: "timed out" for peer_index, _ in enumerate(address_tcp_udp_mtu_of_peers)
        }
        own_mtu = interface_mtu_bytes_or_zero(self.bind_address)
        answered_tags = set[bytes]()
        next_send_seconds = 0.0
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
            contextlib.ExitStack() as opened,
        ):
            with contextlib.suppress(OSError):
                udp.setsockopt(socket.IPPROTO_IP, *_DO_NOT_FRAGMENT)
            for connecting_socket in connecting_sockets:
                opened.enter_context(connecting_socket)
            waiting_sockets = dict(enumerate(connecting_sockets))
            while (passed_seconds := time.monotonic() - start_time) < _REACH_SECONDS:
                if passed_seconds >= next_send_seconds:
                    next_send_seconds = passed_seconds + _AGAIN_SECONDS
                    answered_tags |= _resend_datagrams_and_return_too_long_tags(
                        udp, address_tcp_udp_mtu_of_peers, own_mtu, answered_tags
                    )
                if not waiting_sockets and (
                    len(answered_tags) == 2 * len(address_tcp_udp_mtu_of_peers)
                    or passed_seconds > _UDP_SECONDS
                ):
                    break
                reading, writing, _ = select.select(
                    [udp, *self.sockets], list(waiting_sockets.values()), [], 0.1
                )
                # The others try this host meanwhile.
                self.accept_or_echo_on_ready_sockets(reading)
                if udp in reading:
                    with contextlib.suppress(OSError):
                        answered_tags.add(udp.recv(_TAG_BYTES))
                for peer_index in [
                    peer_index
                    for peer_index, connecting_socket in waiting_sockets.items()
                    if connecting_socket in writing
                ]:
                    error_number = waiting_sockets.pop(peer_index).getsockopt(
                        socket.SOL_SOCKET, socket.SO_ERROR
                    )
                    error_by_peer[peer_index] = os.strerror(error_number) if error_number else ""
        return [
            (
                error_by_peer[peer_index],
                _datagram_tag(peer_index, False) in answered_tags,
                _datagram_tag(peer_index, True) in answered_tags,
            )
            for peer_index in error_by_peer
        ]


def _begin_connection(address: str, port: int) -> socket.socket:
    connecting_socket = socket.socket()
    # `connect_ex` then returns at once; `select` shows the end of the attempt.
    connecting_socket.setblocking(False)
    connecting_socket.connect_ex((address, port))
    return connecting_socket


def _datagram_tag(peer_index: int, is_long: bool) -> bytes:
    return f"{peer_index}{'L' if is_long else 'S'}".encode().ljust(_TAG_BYTES)


def _resend_datagrams_and_return_too_long_tags(
    udp_socket: socket.socket,
    address_tcp_udp_mtu_of_peers: Sequence[tuple[str, int, int, int]],
    own_mtu: int,
    answered_tags: set[bytes],
) -> set[bytes]:
    """Send again all datagrams without an answer.

    Returns:
        The tags of long datagrams that the kernel knows to be too long for the path. They count as
        answered, because TCP adapts to a known path MTU by itself.
    """
    undeliverable_tags = set()
    for peer_index, (address, _, port, peer_mtu) in enumerate(address_tcp_udp_mtu_of_peers):
        longest_payload = min(own_mtu, peer_mtu) - _HEADER_BYTES
        for tag, datagram_bytes in (
            (_datagram_tag(peer_index, False), 0),
            (_datagram_tag(peer_index, True), min(longest_payload, _LONGEST_DATAGRAM)),
        ):
            if tag not in answered_tags:
                try:
                    udp_socket.sendto(tag.ljust(datagram_bytes), (address, port))
                except OSError as error:
                    undeliverable_tags |= {tag} if error.errno == errno.EMSGSIZE else set()
    return undeliverable_tags


def free_disk_bytes(disk_path: str) -> int:
    """Return the free bytes on the disk of a path, or of its nearest existing parent."""
    while not os.path.isdir(disk_path):
        disk_path = os.path.dirname(disk_path)
    disk_statistics = os.statvfs(disk_path)
    return disk_statistics.f_bavail * disk_statistics.f_frsize


def checksum_of_ortlaunch_sources_or_zero() -> int:
    """Return a checksum over this host's Python files of ortlaunch; 0 if it has none."""
    checksum = 0
    package_folder = next((path for path in (os.path.join(import_folder, "ortlaunch") for import_folder in sys.path)
                 if os.path.exists(os.path.join(path, "__init__.py"))), "")  # fmt: skip
    for folder, folders, files in os.walk(package_folder) if package_folder else ():
        folders.sort()
        for name in sorted(name for name in files if name.endswith(".py")):
            with open(os.path.join(folder, name), "rb") as file:
                checksum = zlib.crc32(file.read(), zlib.crc32(name.encode(), checksum))
    return checksum


def boot_and_network_namespace_id_or_empty() -> str:
    """Return the boot id and network namespace: equal for two names of one host, else different."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""


def read_run_folder_token_or_none(run_folder: str) -> str | None:
    """Return the token that another host has written to the run folder; None if absent."""
    try:
        with open(os.path.join(run_folder, TOKEN_FILE), encoding="utf-8") as file:
            return file.read()
    except OSError:
        return None


def run_folder_and_living_rank_pids_texts() -> list[str]:
    """Return this user's living ranks here, by run: `run folder (process id, ...)`."""
    ranks_by_folder: dict[str, list[str]] = {}
    for process_id in sorted(filter(str.isdecimal, os.listdir("/proc")), key=int):
        try:
            with open(f"/proc/{process_id}/cmdline", "rb") as file:
                command_words = file.read().rstrip(b"\0").split(b"\0")
            if (
                b"ortlaunch.worker" in command_words
                and os.stat(f"/proc/{process_id}").st_uid == os.getuid()
            ):
                # The run folder is the last argument, relative to the rank's folder.
                run_folder = os.path.join(
                    os.readlink(f"/proc/{process_id}/cwd"), os.fsdecode(command_words[-1])
                )
                ranks_by_folder.setdefault(run_folder, []).append(process_id)
        # It ended meanwhile, or belongs to another user.
        except OSError:
            continue
    return [
        f"{run_folder} ({', '.join(process_ids)})"
        for run_folder, process_ids in ranks_by_folder.items()
    ]


def gpu_device_count() -> int:
    """Return the number of GPUs that NVIDIA's driver shows here."""
    return sum(name.startswith("nvidia") and name[6:].isdecimal() for name in os.listdir("/dev"))


def gpu_process_lines_or_none() -> list[str] | None:
    """Return `process id, memory` of processes on GPUs now; None if nvidia-smi fails."""
    import subprocess

    argv = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    try:
        return subprocess.run(
            argv, capture_output=True, text=True, check=True, timeout=8
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None


def properties_of_this_host(probe_request: Json) -> Json:
    """Return all properties of this host that need no other host.

    Args:
        probe_request: `peers` (names), `interface` (or null), `run_folder` (the run's, or null), `cuda`
            (whether GPUs count).
    """
    run_folder = probe_request["folder"]
    # Not tempfile's: it leaves out a folder whose disk is full.
    temporary_folder = os.environ.get("TMPDIR") or "/tmp"
    gpu_count = gpu_device_count()
    return {
        "hostname": socket.gethostname(),
        "python": sys.version.split()[0],
        "packages": installed_versions(),
        "sources": checksum_of_ortlaunch_sources_or_zero(),
        "machine": boot_and_network_namespace_id_or_empty(),
        "cpus": len(os.sched_getaffinity(0)),
        "address": local_ipv4_address_or_none(probe_request["peers"], probe_request["interface"]),
        "interfaces": interface_names(),
        "gpus": gpu_count,
        "busy_gpus": gpu_process_lines_or_none() if probe_request["cuda"] and gpu_count else [],
        "token": read_run_folder_token_or_none(str(run_folder)) if run_folder else None,
        "writable": run_folder is None or os.access(run_folder, os.W_OK),
        "free": free_disk_bytes(str(run_folder or os.getcwd())),
        "temporary": (temporary_folder, free_disk_bytes(temporary_folder)),
        "shm": free_disk_bytes("/dev/shm"),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "infiniband": os.path.isdir("/sys/class/infiniband")
        and bool(os.listdir("/sys/class/infiniband")),
        "stale": run_folder_and_living_rank_pids_texts(),
    }


def main(request: Json) -> None:
    """Print the properties of this host; then, for each line of input, connections to other hosts.

    A line has `ADDRESS TCP UDP MTU` of each peer; the answer has the time and the result for each.
    Returns at the end of the input.

    Args:
        request: `peers`, `interface`, `folder` and `cuda` as above, and `ports` to listen on; 0:
            any.
    """
    own_properties = properties_of_this_host(request)
    open_ports = OpenPorts(own_properties["address"] or "127.0.0.1", request["ports"])
    ports = open_ports.ports
    print(
        {
            **own_properties,
            "doors": ports,
            "mtu": interface_mtu_bytes_or_zero(own_properties["address"]),
            "listens": ports[0][0] if ports else open_ports.error,
        },
        flush=True,
    )
    for line in open_ports.read_input_lines_while_answering_peers():
        request_time = time.time()
        peer_words = line.split()
        peers = [
            (peer_words[word_index], *map(int, peer_words[word_index + 1 : word_index + 4]))
            for word_index in range(0, len(peer_words), 4)
        ]
        connection_results = open_ports.try_peers(peers)  # type: ignore[arg-type]
        print(
            {"time": request_time, "took": time.time() - request_time, "reach": connection_results},
            flush=True,
        )
