"""Check all hosts of a run in parallel before it starts, from the answers of doctor/probe.py."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ortlaunch.base.errors import InputError
from ortlaunch.base.json_types import Json
from ortlaunch.base.units import count_with_noun, first_names_and_count_of_rest, human_bytes
from ortlaunch.doctor import host_probes, probe
from ortlaunch.doctor.finding import FAILED, OK, WARNING, Finding, finding_ok_or_with_remedy
from ortlaunch.doctor.host_probes import ConnectionResult, ProbeAnswer, ProbeFailure, ProbeRequest
from ortlaunch.launch_plan import LOCAL_NAMES, Node

# Times of records on different hosts are compared; more skew would order them wrongly.
_SKEW_SECONDS = 5.0
_LEAST_OPEN_FILES = 1024  # the usual soft limit
# Docker's default size of /dev/shm, which NCCL uses between ranks of one host.
_LEAST_SHM_BYTES = 64 << 20
# Less holds none of the folders and sockets that mpirun and data workers make.
_LEAST_TEMPORARY_BYTES = 1 << 20
# InfiniBand registers (locks) its buffers.
_LEAST_MEMLOCK_BYTES = 64 << 20


class HostRequirements(NamedTuple):
    """The requirements of a run on its hosts."""

    nodes: tuple[Node, ...]
    device: str
    run_folder: Path | None  # the run's, which must be shared; None: not checked
    disk_bytes_needed: int = 0  # free bytes required on its disk
    checks_failures_only: bool = False  # check only for failures, not for a slow run
    interface: str | None = None  # the network interface where ranks meet
    port: int = 0  # the port of the first host where ranks meet; 0: any
    shared_memory_bytes: int = 0  # bytes of /dev/shm that data workers need on a host
    port_range: range | None = None  # ports that all hosts must reach of each other

    @property
    def probe_request(self) -> ProbeRequest:
        """The request to each host."""
        names = tuple(node.host for node in self.nodes)
        return ProbeRequest(
            names,
            self.run_folder,
            self.interface,
            self.device == "cuda",
            self.port,
            self.port_range,
        )


def probe_and_judge_all_hosts(requirements: HostRequirements) -> list[Finding]:
    """Run every check on every host; return the findings in the order of the hosts."""
    with _write_token_file_within_block(requirements.run_folder) as token:
        answers, meeting_host = host_probes.probe_hosts_and_return_answers_and_meeting_host(
            requirements.probe_request
        )
    local_versions = probe.installed_versions()
    local_sources_sum = probe.checksum_of_ortlaunch_sources_or_zero()
    findings: list[Finding] = []
    usual_cpu_count = _most_common_cpu_count(answers)
    error_by_closed_port = _first_error_by_host_and_port_that_no_host_reached(answers)
    host_by_machine = dict[str, str]()
    # With an absent host, routes are not judged: others may lack a route only to that one.
    judges_routes = len(requirements.nodes) > 1 and not any(
        isinstance(answer, ProbeFailure) for answer in answers
    )
    for node, answer in zip(requirements.nodes, answers):
        if isinstance(answer, ProbeFailure):
            findings.append(
                Finding(node.host, answer.failed_check, FAILED, answer.observation, answer.remedy)
            )
            continue
        properties = answer.properties
        reached_text = f"{properties['hostname']}, Python {properties['python']}, {answer.answer_seconds:.1f} s"
        findings += [
            Finding(node.host, "reached", OK, reached_text),
            _package_version_difference_finding(node.host, properties["packages"], local_versions),
        ]
        # Same version, other files: usually a checkout that was edited on one host only.
        if properties["sources"] != local_sources_sum and properties["packages"].get(
            "ortlaunch"
        ) == local_versions.get("ortlaunch"):
            observation = "ortlaunch has the same version but different files than here"
            remedy = "install the same build on every host"
            findings.append(Finding(node.host, "packages", FAILED, observation, remedy))
        if (
            first_name := host_by_machine.setdefault(properties["machine"] or node.host, node.host)
        ) != node.host:
            observation = f"is the same machine as {first_name}"
            remedy = f"list it once, as {first_name}, with the slots of both"
            findings.append(
                finding_ok_or_with_remedy(
                    node.host,
                    "alias",
                    False,
                    observation,
                    remedy,
                    verdict_if_not_good=FAILED if requirements.device == "cuda" else WARNING,
                )
            )
        findings += [
            *_interface_address_and_port_findings(
                node.host, answer, requirements, judges_routes, meeting_host
            ),
            *_port_udp_and_mtu_findings(
                node.host,
                answer.connections,
                error_by_closed_port,
                sum(isinstance(other_answer, ProbeAnswer) for other_answer in answers) - 1,
            ),
            *_gpu_run_folder_and_disk_findings(node, properties, requirements, token),
        ]
        if not requirements.checks_failures_only:
            findings += _ok_or_warning_findings_on_slow_conditions(
                node.host, answer, requirements, usual_cpu_count
            )
    return findings


def _most_common_cpu_count(answers: Sequence[ProbeAnswer | ProbeFailure]) -> int:
    cpu_counts = [
        answer.properties["cpus"] for answer in answers if isinstance(answer, ProbeAnswer)
    ]
    return max(cpu_counts, key=cpu_counts.count, default=0)


def judge_this_host_without_peers(host_node: Node, requirements: HostRequirements) -> list[Finding]:
    """Run the checks of this host that need no other host."""
    host_properties = probe.properties_of_this_host(
        requirements.probe_request.probe_arguments_for_host(host_node.host)
    )
    open_ports = probe.OpenPorts(host_properties["address"] or "127.0.0.1", (requirements.port,))
    host_properties["listens"] = open_ports.ports[0][0] if open_ports.ports else open_ports.error
    requirements_alone = requirements._replace(nodes=(host_node,))
    answer = ProbeAnswer(host_properties, 0.0)
    open_ports.close_sockets()
    findings = [
        *_interface_address_and_port_findings(
            host_node.host, answer, requirements_alone, False, host_node.host
        ),
        *_gpu_run_folder_and_disk_findings(host_node, host_properties, requirements, None),
    ]
    # Both compare with other hosts.
    return [
        finding
        for finding in (
            *findings,
            *_ok_or_warning_findings_on_slow_conditions(
                host_node.host, answer, requirements, host_properties["cpus"]
            ),
        )
        if finding.check not in ("clock", "cpus")
    ]


def _package_version_difference_finding(
    host_name: str, remote_versions: dict[str, str], local_versions: dict[str, str]
) -> Finding:
    differences = [
        f"{package_name} {remote_versions.get(package_name, 'absent')} (here "
        f"{local_versions.get(package_name, 'absent')})"
        for package_name in probe.PACKAGES
        if remote_versions.get(package_name) != local_versions.get(package_name)
    ]
    if differences:
        return Finding(
            host_name,
            "packages",
            FAILED,
            ", ".join(differences),
            "install the same environment on every host",
        )
    return Finding(
        host_name, "packages", OK, f"torch {remote_versions.get('torch', 'absent')}, as here"
    )


def _interface_address_and_port_findings(
    host_name: str,
    answer: ProbeAnswer,
    requirements: HostRequirements,
    judges_routes_to_hosts: bool,
    meeting_host: str | None,
) -> Iterator[Finding]:
    properties = answer.properties
    if (
        requirements.interface is not None
        and requirements.interface not in properties["interfaces"]
    ):
        observation = (
            f"no {requirements.interface} there; it has {', '.join(properties['interfaces'])}"
        )
        yield Finding(
            host_name,
            "interface",
            FAILED,
            observation,
            "set launch.interface to one that every host has",
        )
        return
    if judges_routes_to_hosts:
        remedy = (
            "ranks meet over IPv4: check its routes, or set the interface: launch.interface=eth0"
        )
        local_names = [node.host for node in requirements.nodes if node.host in LOCAL_NAMES]
        if local_names:
            remedy = f"instead of {local_names[0]} use the name under which the other hosts reach that host"
        observation = properties["address"] or "no IPv4 route to the other hosts except loopback"
        yield finding_ok_or_with_remedy(
            host_name,
            "address",
            properties["address"] is not None,
            observation,
            remedy,
            verdict_if_not_good=FAILED,
        )
    must_listen = requirements.port_range is not None or host_name == requirements.nodes[0].host
    if isinstance(properties["listens"], str) and must_listen:
        port_text = f"port {requirements.port}" if requirements.port else "a free port"
        port_text = (
            f"ports {requirements.port_range[0]} and {requirements.port_range[-1]}"
            if requirements.port_range
            else port_text
        )
        remedy = (
            "end the process that uses it, or give another one"
            if requirements.port or requirements.port_range
            else "run `ip address` there"
        )
        yield Finding(
            host_name,
            "port",
            FAILED,
            f"cannot listen at {port_text}: {properties['listens']}",
            remedy,
        )
    elif host_name == meeting_host and (len(requirements.nodes) > 1 or requirements.port):
        yield Finding(
            host_name,
            "port",
            OK,
            f"listens at {properties['address'] or '127.0.0.1'}:{properties['listens']}",
        )


def _first_error_by_host_and_port_that_no_host_reached(
    answers: Sequence[ProbeAnswer | ProbeFailure],
) -> dict[tuple[str, int], str]:
    """Return the ports that no host could reach, with the reason.

    The reason is then on the host of the port, such as its firewall.
    """
    errors_by_port: dict[tuple[str, int], list[str]] = {}
    for answer in answers:
        for connection in answer.connections if isinstance(answer, ProbeAnswer) else ():
            errors_by_port.setdefault((connection.host, connection.port), []).append(
                connection.error
            )
    return {
        host_and_port: errors[0] for host_and_port, errors in errors_by_port.items() if all(errors)
    }


def _port_udp_and_mtu_findings(
    host_name: str,
    connections: Sequence[ConnectionResult],
    error_by_closed_port: Mapping[tuple[str, int], str],
    other_host_count: int,
) -> Iterator[Finding]:
    """Yield findings on a host's connections to others: TCP, UDP, and packets of the MTU's size."""
    for (closed_host, port), error in error_by_closed_port.items():
        if closed_host == host_name:
            remedy = "open all ports between these hosts: check its firewall, or launch.interface"
            yield Finding(
                host_name, "port", FAILED, f"no other host reaches its port {port}: {error}", remedy
            )
    closed_connections = [
        connection
        for connection in connections
        if connection.error and (connection.host, connection.port) not in error_by_closed_port
    ]
    connections_without_udp = [
        connection for connection in connections if not connection.error and not connection.udp
    ]
    connections_with_low_mtu = [
        connection
        for connection in connections
        if not connection.error and connection.udp and not connection.passes_whole_packet
    ]
    if closed_connections:
        ports_text = _shorten_names(
            [f"port {connection.port} of {connection.host}" for connection in closed_connections]
        )
        remedy = f"open all ports between these hosts: check the firewall of {closed_connections[0].host}"
        yield Finding(
            host_name,
            "port",
            FAILED,
            f"cannot reach {ports_text}: {closed_connections[0].error}",
            f"{remedy}, or launch.interface",
        )
    elif reached_hosts := {connection.host for connection in connections if not connection.error}:
        untested_text = (
            f" of {other_host_count}; the others were not tested"
            if len({connection.host for connection in connections}) < other_host_count
            else ""
        )
        yield Finding(
            host_name,
            "port",
            OK,
            f"reaches ports of {count_with_noun(len(reached_hosts), 'other host')}{untested_text}",
        )
    if connections_without_udp:
        observation = (
            "no datagram to "
            f"{_shorten_names([connection.host for connection in connections_without_udp])} is answered: "
            "a lost host is detected only as a stall"
        )
        yield Finding(
            host_name, "udp", WARNING, observation, "open all UDP ports between these hosts"
        )
    if connections_with_low_mtu:
        host_names = _shorten_names([connection.host for connection in connections_with_low_mtu])
        observation = (
            f"packets of {connections_with_low_mtu[0].mtu_bytes} B, the MTU of both "
            f"interfaces, do not reach {host_names}"
        )
        remedy = (
            "raise the MTU of the path, or lower that of the interfaces: ip link set IFACE mtu 1500"
        )
        yield Finding(host_name, "mtu", FAILED, observation, remedy)


def _shorten_names(host_names: Sequence[str]) -> str:
    """Return the first four names, without duplicates, as text."""
    return first_names_and_count_of_rest(list(dict.fromkeys(host_names)), 4)


def _gpu_run_folder_and_disk_findings(
    host_node: Node,
    host_properties: Json,
    requirements: HostRequirements,
    shared_folder_token: str | None,
) -> Iterator[Finding]:
    host_name = host_node.host
    if requirements.device == "cuda":
        observation = f"{host_properties['gpus']} for {count_with_noun(host_node.slots, 'slot')}"
        remedy = (
            "reduce its slots"
            if host_properties["gpus"]
            else "check nvidia-smi there, or train with launch.device=cpu"
        )
        yield finding_ok_or_with_remedy(
            host_name,
            "gpus",
            host_properties["gpus"] >= host_node.slots,
            observation,
            remedy,
            verdict_if_not_good=FAILED,
        )
    # Only a shared folder has the file that this host has just written.
    if shared_folder_token is not None:
        is_shared = host_properties["token"] == shared_folder_token
        observation = (
            f"{requirements.run_folder} "
            f"{'is shared' if is_shared else 'the folder there is not the one here'}"
        )
        remedy = "give a --run-dir on a disk that all hosts share"
        if is_shared and not host_properties["writable"]:
            is_shared = False
            observation = f"{requirements.run_folder} cannot be written there"
            remedy = "check how its disk is mounted there"
        yield finding_ok_or_with_remedy(
            host_name, "run folder", is_shared, observation, remedy, verdict_if_not_good=FAILED
        )
    has_enough_space = host_properties["free"] >= requirements.disk_bytes_needed
    needed_text = (
        f", and checkpoints take {human_bytes(requirements.disk_bytes_needed)}"
        if requirements.disk_bytes_needed
        else ""
    )
    yield finding_ok_or_with_remedy(host_name, "disk", has_enough_space, (f"{human_bytes(host_properties['free'])} "
                                       f"free{needed_text}"), "free disk space, or lower checkpoint.keep",
                 verdict_if_not_good=FAILED)  # fmt: skip
    temporary_folder, temporary_bytes = host_properties["temporary"]
    # mpirun writes there before any rank begins, and says that a firewall is in its way.
    yield finding_ok_or_with_remedy(
        host_name,
        "temporary",
        temporary_bytes >= _LEAST_TEMPORARY_BYTES,
        f"{human_bytes(temporary_bytes)} free in {temporary_folder}",
        "delete old files there, or set TMPDIR",
        verdict_if_not_good=FAILED,
    )


def _ok_or_warning_findings_on_slow_conditions(
    host_name: str, answer: ProbeAnswer, requirements: HostRequirements, usual_cpu_count: int
) -> Iterator[Finding]:
    """Yield findings on conditions that may slow a run, or end it late."""
    properties = answer.properties
    clock_skew = answer.clock_skew_seconds
    needed_text = human_bytes(requirements.shared_memory_bytes)
    workers_text = (
        f", and data.workers read {needed_text} ahead" if requirements.shared_memory_bytes else ""
    )
    checks = [
        (
            "clock",
            abs(clock_skew) - answer.skew_error_seconds <= _SKEW_SECONDS,
            f"{clock_skew:+.1f} s apart from this host",
            "synchronize it with a time server",
        ),
        (
            "cpus",
            properties["cpus"] == usual_cpu_count,
            f"{properties['cpus']}, where most hosts have {usual_cpu_count}",
            "check its cpuset and launch.binding; the slowest host determines the speed",
        ),
        (
            "/dev/shm",
            properties["shm"] >= max(_LEAST_SHM_BYTES, requirements.shared_memory_bytes),
            f"{human_bytes(properties['shm'])} free" + workers_text,
            "make it larger, for NCCL and data.workers (docker run --shm-size), or lower data.workers",
        ),
        (
            "open files",
            properties["open_files"] < 0 or properties["open_files"] >= _LEAST_OPEN_FILES,
            f"at most {properties['open_files']}",
            "ulimit -n 65536",
        ),
        (
            "stale",
            not properties["stale"],
            f"ranks of yours alive: {', '.join(properties['stale']) or 'none'}",
            "wait for their run, or end it: ortlaunch cancel RUN_FOLDER",
        ),
    ]
    if properties["infiniband"]:
        limit_text = (
            "no limit"
            if properties["memlock"] < 0
            else f"at most {human_bytes(properties['memlock'])}"
        )
        is_good = properties["memlock"] < 0 or properties["memlock"] >= _LEAST_MEMLOCK_BYTES
        checks.append(
            (
                "memlock",
                is_good,
                f"{limit_text}, and it has InfiniBand",
                "ulimit -l unlimited, where ranks start",
            )
        )
    if requirements.device == "cuda" and properties["gpus"]:
        busy_processes = properties["busy_gpus"]
        checks.append(
            (
                "gpus idle",
                busy_processes == [],
                "nvidia-smi does not report it"
                if busy_processes is None
                else f"busy: {'; '.join(busy_processes) or 'none'}",
                "check that nvidia-smi works there"
                if busy_processes is None
                else "end those processes, or wait for them",
            )
        )
    for check_name, is_good, observation, remedy in checks:
        yield finding_ok_or_with_remedy(
            host_name, check_name, is_good, observation, remedy, verdict_if_not_good=WARNING
        )


@contextlib.contextmanager
def _write_token_file_within_block(run_folder: Path | None) -> Iterator[str | None]:
    """Write a random token to the run folder while the hosts are checked; yield the token."""
    if run_folder is None:
        yield None
        return
    if not run_folder.is_dir():
        raise InputError(f"--run-dir {run_folder}: is not a folder; create it first")
    token_text = secrets.token_hex(8)
    token_path = run_folder / probe.TOKEN_FILE
    token_path.write_text(token_text, encoding="utf-8")
    try:
        yield token_text
    finally:
        token_path.unlink(missing_ok=True)
