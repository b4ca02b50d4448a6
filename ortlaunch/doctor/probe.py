"""What one host tells of itself; sent to its interpreter through standard input, so that nothing of ours need be there.

Standard library only, and little of it: a hundred of these may start at once, and json or importlib.metadata would take
longer than Python itself. So answers are Python literals, a line each; versions are read from files, without torch.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing takes as long as all else here
    from collections.abc import Iterator
    from typing import Any

PACKAGES = ("ortlaunch", "torch", "transformers", "deepspeed", "onnxruntime-training", "onnxruntime-training-cpu",
            "mpi4py", "numpy")  # fmt: skip
TOKEN = ".ortlaunch-doctor"
_REACH_SECONDS = 3.0
_SIOCGIFADDR = 0x8915


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Package -> version, of those that are here."""
    found: dict[str, str] = {}
    wanted = {name.replace("-", "_"): name for name in packages}
    for folder in sys.path:
        for entry in os.listdir(folder) if os.path.isdir(folder) else ():
            stem, ending = os.path.splitext(entry)
            name = wanted.get(stem.partition("-")[0].lower())
            if name and ending in (".dist-info", ".egg-info"):
                found.setdefault(name, _version(os.path.join(folder, entry)))
    return found


def _version(folder: str) -> str:
    for file in ("METADATA", "PKG-INFO"):
        try:
            with open(os.path.join(folder, file), encoding="utf-8", errors="replace") as lines:
                return next((line[8:].strip() for line in lines if line.startswith("Version:")), "unknown")
        except OSError:
            continue
    return "unknown"


def interfaces() -> list[str]:
    """Names of the network interfaces."""
    return [name for _, name in socket.if_nameindex()]


def address(peers: list[str], interface: str | None) -> str | None:
    """This host's address on an interface, else on its way to one of the others; null where it is none but loopback."""
    if interface is not None:
        return _address_of(interface)
    for peer in peers:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((peer, 9))
                found: str = probe.getsockname()[0]
        except OSError:
            continue
        if not found.startswith("127."):
            return found
    return None


def _address_of(interface: str) -> str | None:
    import fcntl

    request = interface.encode()[:15].ljust(256, b"\0")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    except OSError:
        return None


@contextlib.contextmanager
def listening(at: str | None, port: int) -> Iterator[int | str]:
    """The port that the others may try while this is open, or why there is none."""
    with socket.socket() as here:
        try:
            here.bind((at or "127.0.0.1", port))
            here.listen(1024)
            found = here.getsockname()[1]
        except OSError as error:
            found = error.strerror or str(error)
        yield found


def reach(at: str, port: int) -> str:
    """Why a port of another host cannot be reached; nothing where it can."""
    try:
        socket.create_connection((at, port), _REACH_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def free(path: str) -> int:
    """Bytes that are free at a path, or at the nearest folder above it."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize


def token(folder: str) -> str | None:
    """What the file says that another host has written into the run folder; null where there is none."""
    try:
        with open(os.path.join(folder, TOKEN), encoding="utf-8") as file:
            return file.read()
    except OSError:
        return None


def stale() -> list[str]:
    """Ranks of this user that are alive here: `process id (run folder)`; those of other users are not this user's."""
    found = {}
    for number in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{number}/cmdline", "rb") as file:
                words = file.read().rstrip(b"\0").split(b"\0")
            if b"ortlaunch.worker" in words and os.stat(f"/proc/{number}").st_uid == os.getuid():
                found[int(number)] = os.path.join(os.readlink(f"/proc/{number}/cwd"), os.fsdecode(words[-1]))
        except OSError:
            continue
    return [f"{number} ({folder})" for number, folder in sorted(found.items())]


def gpus() -> int:
    """How many NVIDIA's driver shows here."""
    return sum(name.startswith("nvidia") and name[6:].isdecimal() for name in os.listdir("/dev"))


def busy_gpus() -> list[str] | None:
    """`process id, memory` of what computes on GPUs now; null where nvidia-smi does not say."""
    import subprocess

    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=8).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None


def told(question: dict[str, Any]) -> dict[str, Any]:
    """All but what takes another host.

    Args:
        question: `peers` (names), `interface` (or null), `folder` (the run's, or null), `cuda` (whether GPUs count).
    """
    folder, count = question["folder"], gpus()
    return {
        "hostname": socket.gethostname(),
        "python": sys.version.split()[0],
        "packages": versions(),
        "address": address(question["peers"], question["interface"]),
        "interfaces": interfaces(),
        "gpus": count,
        "busy_gpus": busy_gpus() if question["cuda"] and count else [],
        "token": token(str(folder)) if folder else None,
        "free": free(str(folder or os.getcwd())),
        "shm": free("/dev/shm"),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "infiniband": os.path.isdir("/sys/class/infiniband") and bool(os.listdir("/sys/class/infiniband")),
        "stale": stale(),
    }


def main(question: dict[str, Any]) -> None:
    """Tell all of it; then, for a line `ADDRESS PORT` of the host that all must reach, the time and whether it can be
    reached; then be there until the input ends.

    Args:
        question: as for `told`, and `port` to listen at: 0 is any.
    """
    first = told(question)
    with listening(first["address"], question["port"]) as first["listens"]:
        print(first, flush=True)
        place = sys.stdin.buffer.readline().split()
        now = time.time()
        print({"time": now, "reach": reach(place[0].decode(), int(place[1])) if place else ""}, flush=True)
        sys.stdin.buffer.read()
