"""Findings on the hosts of a run before it starts, from the answers of their probes."""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ortlaunch.base.errors import InputError
from ortlaunch.doctor import host_probes, probe
from ortlaunch.doctor.finding import FAILED, WARNING, format_findings
from ortlaunch.doctor.host_probes import ConnectionResult, ProbeAnswer, ProbeFailure
from ortlaunch.doctor.hosts import HostRequirements, probe_and_judge_all_hosts
from ortlaunch.launch_plan import Node

# Host, slots, first rank, devices.
NODES = (Node("a", 2, 0, (0, 1)), Node("b", 1, 2, (0,)))
# A probe's answer that leads to no warning. Sizes are in bytes; memlock -1 is "no limit".
GOOD: dict[str, Any] = {
    "hostname": "a", "python": "3.11.7", "packages": {"torch": "2.13.0"}, "address": "10.0.0.1", "gpus": 2,
    "busy_gpus": [], "interfaces": ["lo", "eth0"], "listens": 4000, "infiniband": True,
    "sources": 7, "machine": "", "cpus": 8, "mtu": 1500, "writable": True, "doors": [(4000, 4001)],
    "free": 1 << 40, "shm": 1 << 34, "temporary": ("/tmp", 1 << 40),
    "open_files": 65536, "memlock": -1, "stale": [],
}  # fmt: skip
TRIED = ConnectionResult("a", 4000, "", True, True, 9000)
WELL = ProbeAnswer(GOOD, 0.1, clock_skew_seconds=1.0, skew_error_seconds=0.1, connections=(TRIED,))


def tried(**found: Any) -> ProbeAnswer:
    """Return the answer of host b with this result of its connection to host a."""
    return WELL._replace(connections=(TRIED._replace(**found),))


@pytest.fixture
def tells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A function that sets the answer of host b: a good one, with some values replaced."""
    monkeypatch.setattr(probe, "installed_versions", lambda: {"torch": "2.13.0"})
    # This host's own values: equal to those in GOOD.
    monkeypatch.setattr(probe, "checksum_of_ortlaunch_sources_or_zero", lambda: 7)

    def tell(answer: ProbeAnswer = WELL, **told: Any) -> None:
        def ask(request: host_probes.ProbeRequest) -> tuple[list[ProbeAnswer], str]:
            # `probe_and_judge_all_hosts` has just written the token; a host that shares the folder answers with it.
            seen = (
                probe.read_run_folder_token_or_none(str(request.run_folder))
                if request.run_folder
                else None
            )
            first = WELL._replace(
                properties={**GOOD, "token": seen, "machine": "m"}, connections=()
            )
            return [first, answer._replace(properties={**GOOD, "token": seen, **told})], "a"

        monkeypatch.setattr(host_probes, "probe_hosts_and_return_answers_and_meeting_host", ask)

    return tell


@pytest.mark.parametrize(
    ("told", "check", "verdict", "what"),
    [
        ({"packages": {"torch": "2.6.0"}}, "packages", FAILED, "torch 2.6.0 (here 2.13.0)"),
        ({"packages": {}}, "packages", FAILED, "torch absent (here 2.13.0)"),
        ({"address": None}, "address", FAILED, "no IPv4 route to the other hosts except loopback"),
        ({"interfaces": ["lo", "eth1"]}, "interface", FAILED, "no eth0 there; it has lo, eth1"),
        ({"gpus": 0}, "gpus", FAILED, "0 for 1 slot"),
        ({"token": None}, "run folder", FAILED, "the folder there is not the one here"),
        ({"free": 10}, "disk", FAILED, "10 B free, and checkpoints take 1.0 KiB"),
        ({"temporary": ("/tmp", 0)}, "temporary", FAILED, "0 B free in /tmp"),
        ({"shm": 1 << 20}, "/dev/shm", WARNING, "1.0 MiB free"),
        (
            {"shm": 95 << 20},
            "/dev/shm",
            WARNING,
            "95.0 MiB free, and data.workers read 96.0 MiB ahead",
        ),
        ({"open_files": 256}, "open files", WARNING, "at most 256"),
        (
            {"answer": WELL._replace(clock_skew_seconds=-30.0)},
            "clock",
            WARNING,
            "-30.0 s apart from this host",
        ),
        (
            {"sources": 8},
            "packages",
            FAILED,
            "ortlaunch has the same version but different files than here",
        ),
        ({"machine": "m"}, "alias", FAILED, "is the same machine as a"),
        ({"cpus": 4}, "cpus", WARNING, "4, where most hosts have 8"),
        ({"writable": False}, "run folder", FAILED, "cannot be written there"),
        (
            {"answer": tried(udp=False, passes_whole_packet=False)},
            "udp",
            WARNING,
            "no datagram to a is answered: a lost host is",
        ),
        (
            {"answer": tried(passes_whole_packet=False)},
            "mtu",
            FAILED,
            "packets of 9000 B, the MTU of both interfaces, do not reach",
        ),
        ({"memlock": 1 << 16}, "memlock", WARNING, "at most 64.0 KiB, and it has InfiniBand"),
        ({"busy_gpus": ["7, 30 MiB"]}, "gpus idle", WARNING, "busy: 7, 30 MiB"),
        ({"busy_gpus": None}, "gpus idle", WARNING, "nvidia-smi does not report it"),
        (
            {"stale": ["/r/a (7, 9)", "/r/b (8)"]},
            "stale",
            WARNING,
            "ranks of yours alive: /r/a (7, 9), /r/b (8)",
        ),
    ],
)
def test_what_is_wrong(
    told: dict[str, Any], check: str, verdict: str, what: str, tells: Any, tmp_path: Path
) -> None:
    """A wrong value gives one finding, on host b, with a remedy.

    A quick check, as before a run, has a failure only where the full check has one.
    """
    tells(**told)
    asked = HostRequirements(
        NODES, "cuda", tmp_path, 1024, interface="eth0", shared_memory_bytes=96 << 20
    )
    wrong = [finding for finding in probe_and_judge_all_hosts(asked) if finding.verdict != "ok"]
    assert [(one.host, one.check, one.verdict) for one in wrong] == [("b", check, verdict)]
    assert what in wrong[0].what
    assert wrong[0].mend
    quick = probe_and_judge_all_hosts(asked._replace(checks_failures_only=True))
    assert any(finding.verdict == FAILED for finding in quick) == (verdict == FAILED)
    # The token file is removed.
    assert list(tmp_path.iterdir()) == []


def test_whose_firewall_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that no host reaches is a finding on its own host.

    A port that some hosts reach is a finding on the hosts that do not.
    """
    monkeypatch.setattr(probe, "installed_versions", lambda: {"torch": "2.13.0"})
    monkeypatch.setattr(probe, "checksum_of_ortlaunch_sources_or_zero", lambda: 7)
    shut = TRIED._replace(host="b", port=4001, error="timed out")
    open_ = TRIED
    tries = {"a": (shut,), "b": (open_._replace(error="refused"),), "c": (open_, shut)}
    nodes = tuple(Node(name, 1, rank, (0,)) for rank, name in enumerate(tries))
    answers = [WELL._replace(connections=reached) for reached in tries.values()]
    monkeypatch.setattr(
        host_probes,
        "probe_hosts_and_return_answers_and_meeting_host",
        lambda request: (answers, "a"),
    )
    wrong = [
        (one.host, one.what)
        for one in probe_and_judge_all_hosts(HostRequirements(nodes, "cpu", None))
        if one.verdict == FAILED
    ]
    assert wrong == [("b", "no other host reaches its port 4001: timed out"),
                     ("b", "cannot reach port 4000 of a: refused")]  # fmt: skip


def test_good_hosts(tells: Any, tmp_path: Path) -> None:
    """Good hosts have no warnings, and the printed result ends with "ready"."""
    tells()
    found = probe_and_judge_all_hosts(HostRequirements(NODES, "cuda", tmp_path))
    assert {finding.verdict for finding in found} == {"ok"}
    assert format_findings(found).endswith("\nready")


def test_a_clock_that_is_read_late_is_not_wrong(tells: Any, tmp_path: Path) -> None:
    """A slow answer of a busy host is not reported as clock skew."""
    # Seconds: 7 of skew with a possible error of 3 is below the limit of 5.
    tells(WELL._replace(clock_skew_seconds=7.0, skew_error_seconds=3.0))
    assert {
        finding.verdict
        for finding in probe_and_judge_all_hosts(HostRequirements(NODES, "cuda", tmp_path))
    } == {"ok"}


# `shift 5` drops the options of ssh before the host name. One line of output before the command
# stands for the greeting of a login shell.
SSH = """\
#!/bin/sh
shift 5
case "$1" in
  refuses) echo "ssh: connect to host refuses: No route to host" >&2; exit 255;;
  bare) echo "bash: python: not found" >&2; exit 127;;
  hangs) sleep 60;;
  changed) echo "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @" >&2
    echo "Host key verification failed." >&2; exit 255;;
  unknown) echo "Host key verification failed." >&2; exit 255;;
  nowhere) echo "ssh: Could not resolve hostname nowhere: Name or service not known" >&2; exit 255;;
  denied) echo "me@denied: Permission denied (publickey)." >&2; exit 255;;
  *) echo "welcome to $1"; echo "{quota: 93 %}"; exec sh -c "$2";;
esac
"""


@pytest.fixture
def ssh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Put an `ssh` first on PATH that runs the command on this machine."""
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    # In a Slurm job the hosts would not be reached by ssh.
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    # Instead of 12 seconds, which the host that hangs would take.
    monkeypatch.setattr(host_probes, "_FIRST_ANSWER_SECONDS", 3.0)


@pytest.mark.parametrize(
    ("name", "mend"),
    [
        ("refuses", "sshd must run there and be reachable: ssh refuses true"),
        (
            "changed",
            "the host has another key than before: if that is right, ssh-keygen -R changed",
        ),
        ("unknown", "the host's key is not known here: ssh unknown once"),
        ("nowhere", "check the name: getent hosts nowhere"),
        ("denied", "ssh denied must work without a password"),
    ],
)
def test_remedies_of_ssh(name: str, mend: str, ssh: None, tmp_path: Path) -> None:
    """Each error of ssh has a remedy of its own."""
    (answer,), _ = host_probes.probe_hosts_and_return_answers_and_meeting_host(
        host_probes.ProbeRequest((name,), tmp_path, None, False, 0)
    )
    assert isinstance(answer, ProbeFailure)
    assert answer.remedy.startswith(mend)


def test_a_host_called_localhost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside another host, the other has no route to `localhost`: the remedy names that host."""
    monkeypatch.setattr(probe, "installed_versions", lambda: {"torch": "2.13.0"})
    monkeypatch.setattr(probe, "checksum_of_ortlaunch_sources_or_zero", lambda: 7)
    nodes = (Node("localhost", 1, 0, (0,)), Node("b", 1, 1, (0,)))
    lost = WELL._replace(properties={**WELL.properties, "address": None})
    monkeypatch.setattr(
        host_probes,
        "probe_hosts_and_return_answers_and_meeting_host",
        lambda request: ([WELL, lost], "localhost"),
    )
    found = probe_and_judge_all_hosts(HostRequirements(nodes, "cpu", None))
    (wrong,) = [one for one in found if one.check == "address" and one.verdict == FAILED]
    assert (wrong.host, wrong.mend) == (
        "b",
        "instead of localhost use the name under which the other hosts reach that host",
    )


def test_what_hosts_tell_by_ssh(ssh: None, tmp_path: Path) -> None:
    """A login shell's greeting is skipped; each host that fails has its reason.

    The reasons: the last line of ssh's error output, no Python, and no answer in time.
    """
    (tmp_path / probe.TOKEN_FILE).write_text("word")
    request = host_probes.ProbeRequest(
        ("good", "refuses", "bare", "hangs"), tmp_path, None, False, 0
    )
    (good, refuses, bare, hangs), meeting = (
        host_probes.probe_hosts_and_return_answers_and_meeting_host(request)
    )
    assert isinstance(good, ProbeAnswer)
    assert (good.properties["hostname"], good.properties["token"]) == (socket.gethostname(), "word")
    assert good.properties["packages"] == probe.installed_versions()
    assert good.properties["packages"]["torch"]
    assert abs(good.clock_skew_seconds) <= good.skew_error_seconds + 0.1
    assert isinstance(refuses, ProbeFailure)
    assert (refuses.failed_check, refuses.observation) == (
        "reached",
        "ssh: connect to host refuses: No route to host",
    )
    assert bare[:2] == (
        "interpreter",
        f"{sys.executable} is missing there (bash: python: not found)",
    )
    assert hangs[:2] == ("reached", "no answer within 3 s")
    assert meeting is None  # none of these names resolves to an address


def test_a_port_that_is_taken() -> None:
    """A port in use is not opened; two hosts on loopback reach each other until one closes."""
    here = probe.OpenPorts("127.0.0.1", (0,))
    there = probe.OpenPorts("127.0.0.1", (0, 0))
    taken = probe.OpenPorts("127.0.0.1", (here.ports[0][0],))
    assert (taken.ports, taken.error) == ([], "Address already in use")
    peers = [("127.0.0.1", *ports, 1500) for ports in there.ports]
    # Both sides run at once, because a host answers others while it is inside `reach`.
    answering = threading.Thread(
        target=there.try_peers,
        args=([("127.0.0.1", *here.ports[0], 1500)],),
    )
    answering.start()
    assert here.try_peers(peers) == [("", True, True)] * 2
    answering.join()
    there.close_sockets()
    assert here.try_peers(peers) == [("Connection refused", False, False)] * 2
    here.close_sockets()


def test_which_hosts_try_which() -> None:
    """In a small group each host tries all others; of 128 hosts each but the first tries a few."""
    few = range(5)
    many = range(128)
    assert {
        at: host_probes._calls_of_some_or_all_group_hosts_to_connect_to(at, [*few]) for at in few
    } == {at: [one for one in few if one != at] for at in few}  # type: ignore[arg-type, type-var]
    chosen: Any = {
        at: host_probes._calls_of_some_or_all_group_hosts_to_connect_to(at, [*many]) for at in many
    }  # type: ignore[arg-type, type-var]
    # The first host tries all others.
    assert len(chosen[0]) == 127
    assert max(len(chosen[at]) for at in many[1:]) <= 15
    # Each pair is tried in both directions: a firewall may block one of them.
    assert all(at in chosen[other] for at in many for other in chosen[at])


class SimulatedCall:
    """The probe of a host that answers at once.

    A host whose name begins with "dead" does not answer; its call ends after all living hosts
    have been queried.
    """

    living = 0
    everyone_asked = threading.Event()
    open_now = set[str]()
    most_open = 0
    groups: ClassVar[list[list[str]]] = []

    def __init__(self, request: host_probes.ProbeRequest, seconds: float, host: str) -> None:
        kind = type(self)
        self.host_name = host
        self.has_address_and_open_ports = not host.startswith("dead")
        kind.open_now.add(host)
        kind.most_open = max(kind.most_open, len(kind.open_now))
        self.answer: Any = (
            WELL if self.has_address_and_open_ports else ProbeFailure("reached", "no answer", "")
        )
        if self.has_address_and_open_ports:
            kind.living -= 1
            kind.everyone_asked.set() if kind.living == 0 else None
        else:
            assert kind.everyone_asked.wait(20), "a dead host delays the others"

    def add_clock_and_connections_to_answer(self, group: list[SimulatedCall]) -> None:
        """Record the members of the group."""
        # One member of the group does it, so that each group is recorded once.
        self.groups.append([one.host_name for one in group]) if self is group[-1] else None

    def end_or_kill_probe(self) -> None:
        """Count this connection as closed."""
        self.open_now.discard(self.host_name)


def test_dead_hosts_delay_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 of 1,024 hosts never answer: the others are queried meanwhile, each in a group.

    At most 128 connections are used.
    """
    names = tuple(f"dead{at}" if at % 16 == 1 else f"host{at}" for at in range(1024))
    monkeypatch.setattr(host_probes, "_ProbeCall", SimulatedCall)
    monkeypatch.setattr(SimulatedCall, "living", 960)
    answers, meeting = host_probes.probe_hosts_and_return_answers_and_meeting_host(
        host_probes.ProbeRequest(names, None, None, False, 0)
    )
    assert [isinstance(answer, ProbeAnswer) for answer in answers] == [
        not name.startswith("dead") for name in names
    ]
    assert meeting == "host0"
    # 128 and one more: a silent host's connection ends just after its thread does.
    assert SimulatedCall.most_open <= 129
    assert SimulatedCall.open_now == set()
    assert {one for group in SimulatedCall.groups for one in group} == {
        name for name in names if "host" in name
    }


@pytest.mark.parametrize(("host", "verdicts"), [(0, ["failed"]), (1, [])])
def test_whose_port_is_taken(
    host: int, verdicts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port in use is a failure on the first host only, because ranks meet there."""
    answers = [WELL._replace(connections=()), WELL._replace(connections=())]
    answers[host] = WELL._replace(
        properties={**GOOD, "listens": "Address already in use"}, connections=()
    )
    monkeypatch.setattr(
        host_probes,
        "probe_hosts_and_return_answers_and_meeting_host",
        lambda request: (answers, None),
    )
    monkeypatch.setattr(probe, "installed_versions", lambda: {"torch": "2.13.0"})
    found = [
        finding
        for finding in probe_and_judge_all_hosts(HostRequirements(NODES, "cpu", None, port=29500))
        if finding.check == "port"
    ]
    assert [finding.verdict for finding in found] == verdicts
    assert all(
        finding.what == "cannot listen at port 29500: Address already in use" for finding in found
    )


def test_versions_are_those_of_the_metadata() -> None:
    """The probe's versions are those of importlib.metadata, although the probe does not use it."""
    # The probe avoids this import, because it takes longer than everything else in the probe.
    from importlib import metadata

    installed = {name: metadata.version(name) for name in ("torch", "numpy", "ortlaunch", "onnxruntime-training-cpu")
                 if any(metadata.distributions(name=name))}  # fmt: skip
    assert installed.items() <= probe.installed_versions().items()


def test_no_ssh_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An absent ssh is a finding, and an absent folder an error of ours: no traceback."""
    monkeypatch.setenv("PATH", "/nowhere")
    found = probe_and_judge_all_hosts(HostRequirements(NODES, "cpu", tmp_path))
    assert {(one.verdict, one.what) for one in found} == {
        (FAILED, "cannot start ssh here: No such file or directory")
    }
    with pytest.raises(InputError, match="is not a folder; create it first"):
        probe_and_judge_all_hosts(HostRequirements(NODES, "cpu", tmp_path / "no"))
