"""All hosts of a run looked at before it starts, at once: what each tells (doctor/probe.py), and what is wrong."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ortlaunch.doctor import asking, probe
from ortlaunch.doctor.asking import Answer, Question, Silence
from ortlaunch.doctor.finding import FAILED, OK, WARNING, Finding, judged, refused
from ortlaunch.errors import InputError
from ortlaunch.plan import Node
from ortlaunch.units import counted, human

_SKEW_SECONDS = 5.0
_FEW_FILES = 1024
_LITTLE_SHM = 64 << 20
_LITTLE_MEMLOCK = 64 << 20


class Asked(NamedTuple):
    """What the hosts are asked for."""

    nodes: tuple[Node, ...]
    device: str
    folder: Path | None  # the run's, which must be shared; None: it is not looked at
    bytes_needed: int = 0  # of its disk
    quick: bool = False  # what would let a run fail; not what may only slow it
    interface: str | None = None  # that ranks are to meet on
    port: int = 0  # of the first host, that ranks are to meet at; 0: any

    @property
    def question(self) -> Question:
        """That each host answers."""
        names = tuple(node.host for node in self.nodes)
        return Question(names, self.folder, self.interface, self.device == "cuda", self.port)


def look(asked: Asked) -> list[Finding]:
    """Every check of every host, in their order."""
    with _token(asked.folder) as token:
        answers, meeting = asking.ask(asked.question)
    here = probe.versions()
    found: list[Finding] = []
    # A host that is not there has no route to it either.
    routed = len(asked.nodes) > 1 and not any(isinstance(answer, Silence) for answer in answers)
    for node, answer in zip(asked.nodes, answers):
        if isinstance(answer, Silence):
            found.append(Finding(node.host, answer.check, FAILED, answer.what, answer.mend))
            continue
        told = answer.told
        reached = f"{told['hostname']}, Python {told['python']}, {answer.took:.1f} s"
        found += [Finding(node.host, "reached", OK, reached), _packages(node.host, told["packages"], here)]
        found += [*_network(node.host, answer, asked, routed, meeting), *_own(node, told, asked, token)]
        if not asked.quick:
            found += _slow(node.host, answer, asked)
    return found


def of_this_host(node: Node, asked: Asked) -> list[Finding]:
    """What needs no other host, of this one."""
    told = probe.told(asked.question.asked_of(node.host))
    with probe.listening(told["address"], asked.port) as told["listens"]:
        alone, answer = asked._replace(nodes=(node,)), Answer(told, 0.0)
    found = [*_network(node.host, answer, alone, False, node.host), *_own(node, told, asked, None)]
    return [one for one in (*found, *_slow(node.host, answer, asked)) if one.check != "clock"]


def require(asked: Asked) -> None:
    """The quick part, before ranks of several hosts are started.

    Raises:
        LaunchError: a host is not fit; the table of what is wrong.
    """
    wrong = [finding for finding in look(asked._replace(quick=True)) if finding.verdict == FAILED]
    if wrong:
        raise refused(wrong)


def _packages(host: str, there: dict[str, str], here: dict[str, str]) -> Finding:
    differ = [f"{name} {there.get(name, 'absent')} (here {here.get(name, 'absent')})"
              for name in probe.PACKAGES if there.get(name) != here.get(name)]  # fmt: skip
    if differ:
        return Finding(host, "packages", FAILED, ", ".join(differ), "install the same environment on every host")
    return Finding(host, "packages", OK, f"torch {there.get('torch', 'absent')}, as here")


def _network(host: str, answer: Answer, asked: Asked, routed: bool, meeting: str | None) -> Iterator[Finding]:
    """Its address, and whether ranks can meet at the first host's."""
    told = answer.told
    if asked.interface is not None and asked.interface not in told["interfaces"]:
        what = f"no {asked.interface} there; it has {', '.join(told['interfaces'])}"
        yield Finding(host, "interface", FAILED, what, "name one that every host has: launch.interface")
        return
    if routed:
        mend = "see its routes, or name the interface: launch.interface=eth0"
        what = told["address"] or "no route to any of the other hosts but loopback"
        yield judged(host, "address", told["address"] is not None, what, mend, else_=FAILED)
    if isinstance(told["listens"], str) and host == asked.nodes[0].host:
        where = f"port {asked.port}" if asked.port else "a free port"
        mend = "end who has it, or give another one" if asked.port else "see `ip address` there"
        yield Finding(host, "port", FAILED, f"cannot listen at {where}: {told['listens']}", mend)
    elif host == meeting and (len(asked.nodes) > 1 or asked.port):
        yield Finding(host, "port", OK, f"listens at {told['address'] or '127.0.0.1'}:{told['listens']}")
    elif answer.reach is not None:
        what = (
            f"reaches a port of {meeting}" if not answer.reach else f"cannot reach a port of {meeting}: {answer.reach}"
        )
        mend = f"let these hosts reach all ports of each other: see the firewall of {meeting}, or launch.interface"
        yield judged(host, "port", not answer.reach, what, mend, else_=FAILED)


def _own(node: Node, told: dict[str, Any], asked: Asked, token: str | None) -> Iterator[Finding]:
    """What it has for the run."""
    host = node.host
    if asked.device == "cuda":
        what = f"{told['gpus']} for {counted(node.slots, 'slot')}"
        mend = "lower its slots" if told["gpus"] else "see nvidia-smi there, or train with launch.device=cpu"
        yield judged(host, "gpus", told["gpus"] >= node.slots, what, mend, else_=FAILED)
    if token is not None:
        shared = told["token"] == token
        what = f"{asked.folder} {'is shared' if shared else 'there is another folder than here'}"
        yield judged(host, "run folder", shared, what, "give a --run-dir on a disk that all hosts share", else_=FAILED)
    enough = told["free"] >= asked.bytes_needed
    need = f", and checkpoints take {human(asked.bytes_needed)}" if asked.bytes_needed else ""
    yield judged(host, "disk", enough, f"{human(told['free'])} free{need}", "make room, or lower checkpoint.keep",
                 else_=FAILED)  # fmt: skip


def _slow(host: str, answer: Answer, asked: Asked) -> Iterator[Finding]:
    """What may slow a run, or end it late."""
    told, skew = answer.told, answer.skew
    checks = [
        ("clock", abs(skew) - answer.doubt <= _SKEW_SECONDS, f"{skew:+.1f} s beside this host",
         "let it follow a time server"),
        ("/dev/shm", told["shm"] >= _LITTLE_SHM, f"{human(told['shm'])} free", "make it larger, for NCCL"),
        ("open files", told["open_files"] < 0 or told["open_files"] >= _FEW_FILES, f"at most {told['open_files']}",
         "ulimit -n 65536"),
        ("stale", not told["stale"], f"ranks of yours alive: {', '.join(told['stale']) or 'none'}",
         "wait for their run, or end it: ortlaunch cancel RUN_FOLDER"),
    ]  # fmt: skip
    if told["infiniband"]:
        limit = "no limit" if told["memlock"] < 0 else f"at most {human(told['memlock'])}"
        good = told["memlock"] < 0 or told["memlock"] >= _LITTLE_MEMLOCK
        checks.append(("memlock", good, f"{limit}, and it has InfiniBand", "ulimit -l unlimited, where ranks start"))
    if asked.device == "cuda" and told["gpus"]:
        checks.append(_idle(told["busy_gpus"]))
    for check, good, what, mend in checks:
        yield judged(host, check, good, what, mend, else_=WARNING)


def _idle(busy: list[str] | None) -> tuple[str, bool, str, str]:
    if busy is None:
        return "gpus idle", False, "nvidia-smi does not say", "see that it works there: nvidia-smi"
    return "gpus idle", not busy, f"at work: {'; '.join(busy) or 'none'}", "end those processes, or wait for them"


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
