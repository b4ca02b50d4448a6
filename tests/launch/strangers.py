"""Train while a process of another user connects to every new port; print what it has received.

    python -m tests.launch.strangers FOLDER LAUNCHER

Everything runs in a network namespace of its own, so that no other process of this host is met.
"""

from __future__ import annotations

import ctypes
import encodings.idna  # noqa: F401  the other user cannot read the module
import fcntl
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time

from tests.launch.tiny import ORTLAUNCH, RECIPE

USER = 54321
# From <sched.h>, <linux/sockios.h> and <linux/if.h>.
CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS = 0x8914
IFF_UP = 1
TABLES = {"tcp": "0A", "tcp6": "0A", "udp": "07"}  # listeners, by the kernel's number of a state
# Ranks that a connection to gloo can name.
PAIRS = 3


def enter_namespace() -> None:
    """Put this process into a network namespace that has a loopback interface only."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))


def ports() -> set[tuple[str, int]]:
    """Return (table, port) of each listener in this namespace."""
    found = set()
    for table, state in TABLES.items():
        with open(f"/proc/net/{table}") as file:
            for words in map(str.split, file.read().splitlines()[1:]):
                if words[3] == state:
                    found.add((table, int(words[1].rpartition(":")[2], 16)))
    return found


def connect_to_everything(result: int) -> None:
    """As another user, name gloo's pairs at each new port and send back whatever comes.

    Its connections stay open until SIGTERM; then it writes what it has seen.
    """
    # The groups go first: afterwards this process may not change them.
    os.setgroups([])
    os.setgid(USER)
    os.setuid(USER)
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    known: set[tuple[str, int]] = set()
    received = 0
    with selectors.DefaultSelector() as waiting:
        while not ended:
            for table, port in ports() - known:
                known.add((table, port))
                if table == "udp":
                    socket.socket(type=socket.SOCK_DGRAM).sendto(b"[" * 1000, ("127.0.0.1", port))
                # gloo's first bytes name the pair; a rank sends to the socket that names its own.
                for pair in range(PAIRS) if table != "udp" else ():
                    one = socket.socket()
                    one.settimeout(0.2)
                    try:
                        one.connect(("127.0.0.1", port))
                        one.sendall(struct.pack("<q", pair))
                    except OSError:
                        continue
                    one.setblocking(False)
                    waiting.register(one, selectors.EVENT_READ)
            # Short, so that a listener that lives for a moment is met, too.
            for key, _ in waiting.select(0.0005):
                one = key.fileobj  # type: ignore[assignment]
                try:
                    data = one.recv(1 << 16)
                    one.send(data)
                except OSError:
                    data = b""
                received += len(data)
                waiting.unregister(one) if not data else None
    os.write(result, json.dumps({"ports": len(known), "bytes": received}).encode())
    os._exit(0)


def main(folder: str, launcher: str) -> None:
    """Print the run's output and exit status, its seconds, and what the other user has seen."""
    enter_namespace()
    read_end, write_end = os.pipe()
    stranger = os.fork()
    if not stranger:
        connect_to_everything(write_end)
    began = time.monotonic()
    ended = subprocess.run(
        [ORTLAUNCH, "train", RECIPE, f"--launcher={launcher}", "--nproc-per-node=2", "--run-dir=run"],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    seconds = time.monotonic() - began
    os.kill(stranger, signal.SIGTERM)
    os.waitpid(stranger, 0)
    seen = json.loads(os.read(read_end, 1 << 12))
    run = {"status": ended.returncode, "output": ended.stdout, "seconds": seconds}
    print(json.dumps({**run, **seen}))


if __name__ == "__main__":
    main(*sys.argv[1:])
