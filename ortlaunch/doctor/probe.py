"""What one host tells of itself, as JSON on standard output; sent to its interpreter, so that nothing of ours need be
there. Standard library only, and no import of torch: versions come from metadata.

Its arguments as one JSON object: `peers` (names), `folder` (the run's, or null).
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import sys
import time
from importlib import metadata
from pathlib import Path

PACKAGES = ("ortlaunch", "torch", "transformers", "deepspeed", "onnxruntime-training", "onnxruntime-training-cpu",
            "mpi4py", "numpy")  # fmt: skip
TOKEN = ".ortlaunch-doctor"


def versions() -> dict[str, str]:
    """Package -> version, of those that are here."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def address(peers: list[str]) -> str | None:
    """This host's address on its way to the first of the others that has another one than loopback; null without."""
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


def free(path: str) -> int:
    """Bytes that are free at a path, or at the nearest folder above it."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return shutil.disk_usage(path).free


def token(folder: str) -> str | None:
    """What the file says that another host has written into the run folder; null where there is none."""
    try:
        return (Path(folder) / TOKEN).read_text()
    except OSError:
        return None


def stale() -> list[int]:
    """Process ids of ranks that are alive here."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"ortlaunch.worker" in words:
            found.append(int(path.parent.name))
    return sorted(found)


def main() -> None:
    """Print all of it."""
    asked = json.loads(sys.argv[1])
    folder = asked["folder"] or os.getcwd()
    soft = {name: resource.getrlimit(getattr(resource, name))[0] for name in ("RLIMIT_NOFILE", "RLIMIT_MEMLOCK")}
    told = {
        "hostname": socket.gethostname(),
        "python": sys.version.split()[0],
        "packages": versions(),
        "address": address(asked["peers"]),
        "interfaces": [name for _, name in socket.if_nameindex()],
        "gpus": len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
        "token": token(folder),
        "free": free(folder),
        "shm": free("/dev/shm"),
        "open_files": soft["RLIMIT_NOFILE"],
        "memlock": soft["RLIMIT_MEMLOCK"],
        "stale": stale(),
        "time": time.time(),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
