"""Check all hosts of a run in parallel before it starts, from the answers of doctor/probe.py."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ortlaunch.doctor import host_probes, probe
from ortlaunch.doctor.finding import FAILED, OK, WARNING, Finding, judged
from ortlaunch.doctor.host_probes import Answer, NoAnswer, ProbeRequest, Reached
from ortlaunch.errors import InputError
from ortlaunch.json_types import Json
from ortlaunch.launch_plan import LOCAL_NAMES, Node
from ortlaunch.units import count_with_noun, human_bytes

# Times of records on different hosts are compared; more skew would order them wrongly.
_SKEW_SECONDS = 5.0
_FEW_FILES = 1024  # the usual soft limit
# Docker's default size of /dev/shm, which NCCL uses between ranks of one host.
_LITTLE_SHM = 64 << 20
# Less holds none of the folders and sockets that mpirun and data workers make.
_LITTLE_TEMPORARY = 1 << 20
# InfiniBand registers (locks) its buffers.
_LITTLE_MEMLOCK = 64 << 20


class HostRequirements(NamedTuple):
    """The requirements of a run on its hosts."""

    nodes: tuple[Node, ...]
    device: str
    folder: Path | None  # the run's, which must be shared; None: not checked
    bytes_needed: int = 0  # free bytes required on its disk
    quick: bool = False  # check only for failures, not for a slow run
    interface: str | None = None  # the network interface where ranks meet
    port: int = 0  # the port of the first host where ranks meet; 0: any
    shared_bytes: int = 0  # bytes of /dev/shm that data workers need on a host
    ports: tuple[int, int] | None = None  # range of ports that all hosts must reach of each other

    @property
    def request(self) -> ProbeRequest:
        """The request to each host."""
        names = tuple(node.host for node in self.nodes)
        return ProbeRequest(
            names, self.folder, self.interface, self.device == "cuda", self.port, self.ports
        )


def check_hosts(required: HostRequirements) -> list[Finding]:
    """Run every check on every host; return the findings in the order of the hosts."""
    with _token(required.folder) as token:
        answers, meeting = host_probes.query_hosts(required.request)
    here = probe.versions()
    sources = probe.sources()
    found: list[Finding] = []
    usual = _usual_cpus(answers)
    shut = _shut(answers)
    first_of = dict[str, str]()
    # With an absent host, routes are not judged: others may lack a route only to that one.
    routed = len(required.nodes) > 1 and not any(isinstance(answer, NoAnswer) for answer in answers)
    for node, answer in zip(required.nodes, answers):
        if isinstance(answer, NoAnswer):
            found.append(Finding(node.host, answer.check, FAILED, answer.what, answer.mend))
            continue
        properties = answer.properties
        reached = f"{properties['hostname']}, Python {properties['python']}, {answer.took:.1f} s"
        found += [
            Finding(node.host, "reached", OK, reached),
            _packages(node.host, properties["packages"], here),
        ]
        # Same version, other files: usually a checkout that was edited on one host only.
        if properties["sources"] != sources and properties["packages"].get("ortlaunch") == here.get(
            "ortlaunch"
        ):
            what = "ortlaunch has the same version but different files than here"
            mend = "install the same build on every host"
            found.append(Finding(node.host, "packages", FAILED, what, mend))
        if (
            first := first_of.setdefault(properties["machine"] or node.host, node.host)
        ) != node.host:
            what = f"is the same machine as {first}"
            mend = f"list it once, as {first}, with the slots of both"
            found.append(
                judged(
                    node.host,
                    "alias",
                    False,
                    what,
                    mend,
                    else_=FAILED if required.device == "cuda" else WARNING,
                )
            )
        found += _network(node.host, answer, required, routed, meeting)
        found += _reached(
            node.host, answer.reached, shut, sum(isinstance(one, Answer) for one in answers) - 1
        )
        found += _own(node, properties, required, token)
        if not required.quick:
            found += _slow(node.host, answer, required, usual)
    return found


def _usual_cpus(answers: Sequence[Answer | NoAnswer]) -> int:
    """Return the number of CPUs that most hosts have."""
    counts = [answer.properties["cpus"] for answer in answers if isinstance(answer, Answer)]
    return max(counts, key=counts.count, default=0)


def of_this_host(node: Node, required: HostRequirements) -> list[Finding]:
    """Run the checks of this host that need no other host."""
    properties = probe.properties(required.request.request_to(node.host))
    doors = probe.Doors(properties["address"] or "127.0.0.1", (required.port,))
    properties["listens"] = doors.ports[0][0] if doors.ports else doors.error
    alone = required._replace(nodes=(node,))
    answer = Answer(properties, 0.0)
    doors.close()
    found = [
        *_network(node.host, answer, alone, False, node.host),
        *_own(node, properties, required, None),
    ]
    # Both compare with other hosts.
    return [
        one
        for one in (*found, *_slow(node.host, answer, required, properties["cpus"]))
        if one.check not in ("clock", "cpus")
    ]


def _packages(host: str, there: dict[str, str], here: dict[str, str]) -> Finding:
    differ = [f"{name} {there.get(name, 'absent')} (here {here.get(name, 'absent')})"
              for name in probe.PACKAGES if there.get(name) != here.get(name)]  # fmt: skip
    if differ:
        return Finding(
            host,
            "packages",
            FAILED,
            ", ".join(differ),
            "install the same environment on every host",
        )
    return Finding(host, "packages", OK, f"torch {there.get('torch', 'absent')}, as here")


def _network(
    host: str, answer: Answer, required: HostRequirements, routed: bool, meeting: str | None
) -> Iterator[Finding]:
    """Yield findings on a host's address, and on the port where ranks meet."""
    properties = answer.properties
    if required.interface is not None and required.interface not in properties["interfaces"]:
        what = f"no {required.interface} there; it has {', '.join(properties['interfaces'])}"
        yield Finding(
            host, "interface", FAILED, what, "set launch.interface to one that every host has"
        )
        return
    if routed:
        mend = "ranks meet over IPv4: check its routes, or set the interface: launch.interface=eth0"
        local = [node.host for node in required.nodes if node.host in LOCAL_NAMES]
        if local:
            mend = f"instead of {local[0]} use the name under which the other hosts reach that host"
        what = properties["address"] or "no IPv4 route to the other hosts except loopback"
        yield judged(host, "address", properties["address"] is not None, what, mend, else_=FAILED)
    named = required.ports is not None or host == required.nodes[0].host
    if isinstance(properties["listens"], str) and named:
        where = f"port {required.port}" if required.port else "a free port"
        where = f"ports {required.ports[0]} and {required.ports[1]}" if required.ports else where
        mend = (
            "end the process that uses it, or give another one"
            if required.port or required.ports
            else "run `ip address` there"
        )
        yield Finding(
            host, "port", FAILED, f"cannot listen at {where}: {properties['listens']}", mend
        )
    elif host == meeting and (len(required.nodes) > 1 or required.port):
        yield Finding(
            host,
            "port",
            OK,
            f"listens at {properties['address'] or '127.0.0.1'}:{properties['listens']}",
        )


def _shut(answers: Sequence[Answer | NoAnswer]) -> dict[tuple[str, int], str]:
    """Return the ports that no host could reach, with the reason.

    The reason is then on the host of the port, such as its firewall.
    """
    tried: dict[tuple[str, int], list[str]] = {}
    for answer in answers:
        for one in answer.reached if isinstance(answer, Answer) else ():
            tried.setdefault((one.host, one.port), []).append(one.error)
    return {door: errors[0] for door, errors in tried.items() if all(errors)}


def _reached(
    host: str, tried: Sequence[Reached], shut: Mapping[tuple[str, int], str], others: int
) -> Iterator[Finding]:
    """Yield findings on a host's connections to others: TCP, UDP, and packets of the MTU's size."""
    for (name, port), error in shut.items():
        if name == host:
            mend = "open all ports between these hosts: check its firewall, or launch.interface"
            yield Finding(
                host, "port", FAILED, f"no other host reaches its port {port}: {error}", mend
            )
    closed = [one for one in tried if one.error and (one.host, one.port) not in shut]
    deaf = [one for one in tried if not one.error and not one.udp]
    narrow = [one for one in tried if not one.error and one.udp and not one.whole]
    if closed:
        places = _listed([f"port {one.port} of {one.host}" for one in closed])
        mend = f"open all ports between these hosts: check the firewall of {closed[0].host}"
        yield Finding(
            host,
            "port",
            FAILED,
            f"cannot reach {places}: {closed[0].error}",
            f"{mend}, or launch.interface",
        )
    elif reached := {one.host for one in tried if not one.error}:
        rest = (
            f" of {others}; the others were not tested"
            if len({one.host for one in tried}) < others
            else ""
        )
        yield Finding(
            host,
            "port",
            OK,
            f"reaches ports of {count_with_noun(len(reached), 'other host')}{rest}",
        )
    if deaf:
        what = f"no datagram to {_listed([one.host for one in deaf])} is answered: a lost host "
        what += "is detected only as a stall"
        yield Finding(host, "udp", WARNING, what, "open all UDP ports between these hosts")
    if narrow:
        names = _listed([one.host for one in narrow])
        what = f"packets of {narrow[0].mtu} B, the MTU of both interfaces, do not reach {names}"
        mend = (
            "raise the MTU of the path, or lower that of the interfaces: ip link set IFACE mtu 1500"
        )
        yield Finding(host, "mtu", FAILED, what, mend)


def _listed(names: Sequence[str]) -> str:
    """Return the first four names, without duplicates, as text."""
    names = list(dict.fromkeys(names))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _own(
    node: Node, properties: Json, required: HostRequirements, token: str | None
) -> Iterator[Finding]:
    """Yield findings on a host's GPUs, its run folder and its disk."""
    host = node.host
    if required.device == "cuda":
        what = f"{properties['gpus']} for {count_with_noun(node.slots, 'slot')}"
        mend = (
            "reduce its slots"
            if properties["gpus"]
            else "check nvidia-smi there, or train with launch.device=cpu"
        )
        yield judged(host, "gpus", properties["gpus"] >= node.slots, what, mend, else_=FAILED)
    # Only a shared folder has the file that this host has just written.
    if token is not None:
        shared = properties["token"] == token
        what = (
            f"{required.folder} {'is shared' if shared else 'the folder there is not the one here'}"
        )
        mend = "give a --run-dir on a disk that all hosts share"
        if shared and not properties["writable"]:
            shared = False
            what = f"{required.folder} cannot be written there"
            mend = "check how its disk is mounted there"
        yield judged(host, "run folder", shared, what, mend, else_=FAILED)
    enough = properties["free"] >= required.bytes_needed
    need = (
        f", and checkpoints take {human_bytes(required.bytes_needed)}"
        if required.bytes_needed
        else ""
    )
    yield judged(host, "disk", enough, (f"{human_bytes(properties['free'])} "
                                       f"free{need}"), "free disk space, or lower checkpoint.keep",
                 else_=FAILED)  # fmt: skip
    where, room = properties["temporary"]
    # mpirun writes there before any rank begins, and says that a firewall is in its way.
    yield judged(host, "temporary", room >= _LITTLE_TEMPORARY, f"{human_bytes(room)} free in {where}",
                 "delete old files there, or set TMPDIR", else_=FAILED)  # fmt: skip


def _slow(
    host: str, answer: Answer, required: HostRequirements, usual_cpus: int
) -> Iterator[Finding]:
    """Yield findings on conditions that may slow a run, or end it late."""
    properties = answer.properties
    skew = answer.skew
    needed = human_bytes(required.shared_bytes)
    workers = f", and data.workers read {needed} ahead" if required.shared_bytes else ""
    checks = [
        ("clock", abs(skew) - answer.doubt <= _SKEW_SECONDS, f"{skew:+.1f} s apart from this host",
         "synchronize it with a time server"),
        ("cpus", properties["cpus"] == usual_cpus, f"{properties['cpus']}, where most hosts have {usual_cpus}",
         "check its cpuset and launch.binding; the slowest host determines the speed"),
        ("/dev/shm", properties["shm"] >= max(_LITTLE_SHM, required.shared_bytes),
         f"{human_bytes(properties['shm'])} free" + workers,
         "make it larger, for NCCL and data.workers (docker run --shm-size), or lower data.workers"),
        ("open files", properties["open_files"] < 0 or properties["open_files"] >= _FEW_FILES,
         f"at most {properties['open_files']}",
         "ulimit -n 65536"),
        ("stale", not properties["stale"], f"ranks of yours alive: {', '.join(properties['stale']) or 'none'}",
         "wait for their run, or end it: ortlaunch cancel RUN_FOLDER"),
    ]  # fmt: skip
    if properties["infiniband"]:
        limit = (
            "no limit"
            if properties["memlock"] < 0
            else f"at most {human_bytes(properties['memlock'])}"
        )
        good = properties["memlock"] < 0 or properties["memlock"] >= _LITTLE_MEMLOCK
        checks.append(
            (
                "memlock",
                good,
                f"{limit}, and it has InfiniBand",
                "ulimit -l unlimited, where ranks start",
            )
        )
    if required.device == "cuda" and properties["gpus"]:
        checks.append(_idle(properties["busy_gpus"]))
    for check, good, what, mend in checks:
        yield judged(host, check, good, what, mend, else_=WARNING)


def _idle(busy: list[str] | None) -> tuple[str, bool, str, str]:
    if busy is None:
        return (
            "gpus idle",
            False,
            "nvidia-smi does not report it",
            "check that nvidia-smi works there",
        )
    return (
        "gpus idle",
        not busy,
        f"busy: {'; '.join(busy) or 'none'}",
        "end those processes, or wait for them",
    )


@contextlib.contextmanager
def _token(folder: Path | None) -> Iterator[str | None]:
    """Write a random token to the run folder while the hosts are checked; yield the token."""
    if folder is None:
        yield None
        return
    if not folder.is_dir():
        raise InputError(f"--run-dir {folder}: is not a folder; create it first")
    word = secrets.token_hex(8)
    path = folder / probe.TOKEN
    path.write_text(word, encoding="utf-8")
    try:
        yield word
    finally:
        path.unlink(missing_ok=True)
