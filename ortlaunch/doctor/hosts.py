"""All hosts of a run looked at before it starts, at once: what each tells (doctor/probe.py), and what is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from ortlaunch.doctor import probe
from ortlaunch.errors import InputError, LaunchError
from ortlaunch.plan import LOCAL_NAMES, Node
from ortlaunch.units import human

OK: Final = "ok"
WARNING: Final = "warning"
FAILED: Final = "failed"
_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=8")
_SECONDS = 12
_SKEW_SECONDS = 5.0
_FEW_FILES = 1024
_LITTLE_SHM = 64 << 20
_AT_ONCE = 128


@dataclass(frozen=True)
class Finding:
    """One check of one host."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # of its schema

    host: str
    """As the host file has it."""
    check: str
    """`reached`, `interpreter`, `packages`, `address`, `interface`, `gpus`, `run folder`, `disk`, `clock`, `/dev/shm`,
    `open files` or `stale`."""
    verdict: Literal["ok", "warning", "failed"]
    """`failed`: a run on it would fail."""
    what: str
    """What was found."""
    mend: str = ""
    """What to do; empty where nothing is wrong."""

    def __str__(self) -> str:
        """For a person."""
        mend = f"; {self.mend}" if self.mend else ""
        return f"  {self.host:<20} {self.check:<12} {self.verdict:<8} {self.what}{mend}"


class Asked(NamedTuple):
    """What the hosts are asked for."""

    nodes: tuple[Node, ...]
    device: str
    folder: Path | None  # the run's, which must be shared; None: it is not looked at
    bytes_needed: int = 0  # of its disk
    alone: bool = False  # routes between the hosts are not judged
    quick: bool = False  # what would let a run fail; not what may only slow it
    interface: str | None = None  # that ranks are to meet on


def look(asked: Asked) -> list[Finding]:
    """Every check of every host, in their order."""
    with _token(asked.folder) as token, ThreadPoolExecutor(_AT_ONCE) as pool:
        told = list(pool.map(lambda node: _ask(node.host, asked), asked.nodes))
    here = probe.versions()
    found: list[Finding] = []
    if any(isinstance(words, Finding) for words, _ in told):  # a host that is not there has no route to it either
        asked = asked._replace(alone=True)
    for node, (words, took) in zip(asked.nodes, told):
        if isinstance(words, Finding):
            found.append(words)
            continue
        found.append(Finding(node.host, "reached", OK, f"{words['hostname']}, Python {words['python']}, {took:.1f} s"))
        found += _judged(node, words, asked, here, token)
    return found


def require(asked: Asked) -> None:
    """The quick part, before ranks of several hosts are started.

    Raises:
        LaunchError: a host is not fit; the table of what is wrong.
    """
    wrong = [finding for finding in look(asked._replace(quick=True)) if finding.verdict == FAILED]
    if wrong:
        raise refused(wrong)


def refused(wrong: Sequence[Finding]) -> LaunchError:
    """The table of what is wrong, as an error."""
    table = "\n".join(map(str, wrong))
    return LaunchError(f"the hosts are not ready, and nothing was started (launch.preflight):\n{table}")


def _judged(
    node: Node, told: dict[str, Any], asked: Asked, here: dict[str, str], token: str | None
) -> Iterator[Finding]:
    host = node.host
    yield _packages(host, told["packages"], here)
    routed = len(asked.nodes) > 1 and not asked.alone
    if routed and told["address"] is None:
        mend = "see its routes, or name the interface: launch.interface=eth0"
        yield Finding(host, "address", FAILED, "no route to any of the other hosts but loopback", mend)
    elif routed:
        yield Finding(host, "address", OK, told["address"])
    if asked.interface is not None and asked.interface not in told["interfaces"]:
        what = f"no {asked.interface} there; it has {', '.join(told['interfaces'])}"
        yield Finding(host, "interface", FAILED, what, "name one that every host has: launch.interface")
    if asked.device == "cuda" and told["gpus"] < node.slots:
        yield Finding(host, "gpus", FAILED, f"{told['gpus']} for {node.slots} slots", "lower its slots")
    if token is not None:
        shared = told["token"] == token
        what = f"{asked.folder} {'is shared' if shared else 'there is another folder than here'}"
        yield Finding(host, "run folder", OK if shared else FAILED, what,
                      "" if shared else "give a --run-dir on a disk that all hosts share")  # fmt: skip
    enough = told["free"] >= asked.bytes_needed
    what = f"{human(told['free'])} free" + ("" if enough else f", and checkpoints take {human(asked.bytes_needed)}")
    yield Finding(host, "disk", OK if enough else FAILED, what, "" if enough else "make room, or lower checkpoint.keep")
    if not asked.quick:
        yield from _slow(host, told)


def _packages(host: str, there: dict[str, str], here: dict[str, str]) -> Finding:
    differ = [f"{name} {there.get(name, 'absent')} (here {here.get(name, 'absent')})"
              for name in probe.PACKAGES if there.get(name) != here.get(name)]  # fmt: skip
    if differ:
        return Finding(host, "packages", FAILED, ", ".join(differ), "install the same environment on every host")
    return Finding(host, "packages", OK, f"torch {there.get('torch', 'absent')}, as here")


def _slow(host: str, told: dict[str, Any]) -> Iterator[Finding]:
    skew = told["time"] - told["asked_at"]
    checks = (
        ("clock", abs(skew) <= _SKEW_SECONDS, f"{skew:+.1f} s beside this host", "let it follow a time server"),
        ("/dev/shm", told["shm"] >= _LITTLE_SHM, f"{human(told['shm'])} free", "make it larger, for NCCL"),
        ("open files", told["open_files"] < 0 or told["open_files"] >= _FEW_FILES, f"at most {told['open_files']}",
         "ulimit -n 65536"),
        ("stale", not told["stale"], f"ranks alive: {', '.join(map(str, told['stale'])) or 'none'}",
         "end them, or wait for their run"),
    )  # fmt: skip
    for check, good, what, mend in checks:
        yield Finding(host, check, OK if good else WARNING, what, "" if good else mend)


def _ask(host: str, asked: Asked) -> tuple[dict[str, Any] | Finding, float]:
    """What a host tells, or why it does not; and the seconds that it took."""
    began, wall = time.monotonic(), time.time()
    peers = [node.host.rpartition("@")[2] for node in asked.nodes if node.host != host]
    question = {"peers": peers[:4], "folder": str(asked.folder) if asked.folder else None}
    remote = [sys.executable, "-I", "-", json.dumps(question)]
    command = remote if _is_here(host) else _at(host, remote)
    try:
        ended = subprocess.run(
            command, input=Path(probe.__file__).read_text(encoding="utf-8"), capture_output=True, text=True,
            timeout=_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Finding(host, "reached", FAILED, f"no answer within {_SECONDS} s", f"try: ssh {host} true"), _SECONDS
    except OSError as error:
        said = f"cannot start {command[0]} here: {error.strerror}"
        return Finding(host, "reached", FAILED, said, f"install {command[0]}"), 0.0
    took = time.monotonic() - began
    with contextlib.suppress(ValueError, IndexError):
        return {**json.loads(ended.stdout.splitlines()[-1]), "asked_at": wall + took / 2}, took
    said = (ended.stderr.strip().splitlines() or [f"status {ended.returncode}"])[-1]
    if ended.returncode in (126, 127):
        mend = "install the same environment there, under the same path"
        return Finding(host, "interpreter", FAILED, f"no {sys.executable} there ({said})", mend), took
    return Finding(host, "reached", FAILED, said, f"ssh {host} must work without a password"), took


def _at(host: str, remote: list[str]) -> list[str]:
    """A command on another host: by ssh, or inside a job of Slurm's as a step of it."""
    if "SLURM_JOB_ID" in os.environ:
        return ["srun", "--overlap", "--mpi=none", "--nodes=1", "--ntasks=1", f"--nodelist={host}", *remote]
    return [*_SSH, host, shlex.join(remote)]


def _is_here(host: str) -> bool:
    name = socket.gethostname()
    return host in (*LOCAL_NAMES, name, name.split(".")[0])


@contextlib.contextmanager
def _token(folder: Path | None) -> Iterator[str | None]:
    """A word that stands in the run folder while the hosts are asked."""
    if folder is None:
        yield None
        return
    if not folder.is_dir():
        raise InputError(f"--run-dir {folder}: is no folder; make it first")
    word, path = secrets.token_hex(8), folder / probe.TOKEN
    path.write_text(word, encoding="utf-8")
    try:
        yield word
    finally:
        path.unlink(missing_ok=True)


def told(findings: Sequence[Finding]) -> str:
    """The table, what is wrong last, and the verdict."""
    ordered = sorted(findings, key=lambda one: (OK, WARNING, FAILED).index(one.verdict))
    failed = sum(one.verdict == FAILED for one in findings)
    return "\n".join([*map(str, ordered), f"{failed} of {len(findings)} checks failed" if failed else "ready"])
