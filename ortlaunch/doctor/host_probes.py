"""Query all hosts in parallel, over one connection each: properties, then mutual reachability."""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from ortlaunch.base.json_types import Json
from ortlaunch.doctor import probe
from ortlaunch.launch.ssh import needs_no_ssh, ssh_argv

_CONNECT_SECONDS = 8  # ssh's own limit
# Modules must not be imported from the current folder there. The argument is the probe's length in
# bytes: all that follows on standard input are requests to it.
_BOOTSTRAP_CODE = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "exec(sys.stdin.buffer.read(int(sys.argv[1])))"
)
_FIRST_ANSWER_SECONDS = 12.0  # for the first answer
_SECOND_ANSWER_SECONDS = 6.0  # for the second one; a probe itself takes at most 3
_EXTRA_SECONDS_PER_HOST = 0.05  # for each host: all of them start a program on this one
_MAX_PAIRS = 32  # with more other hosts, each host tries only some of them
_LEAVE_SECONDS = 2.0  # until a probe is killed after the end of its input
_NO_PASSWORD_REMEDY = "ssh {host} must work without a password"
# ssh's words -> the remedy.
_REMEDIES_BY_MESSAGE = {
    "IDENTIFICATION HAS CHANGED": (
        "the host has another key than before: if that is right, ssh-keygen -R {host}, then ssh "
        "{host} once"
    ),
    "Host key verification failed": "the host's key is not known here: ssh {host} once",
    "Could not resolve": "check the name: getent hosts {host}",
    **dict.fromkeys(
        ("Connection refused", "timed out", "No route to host"),
        "sshd must run there and be reachable: ssh {host} true",
    ),
}
_ERROR_SECONDS = 0.2  # without output, after which the error output counts as complete
# Connections at one time: each takes three open files of this process.
_MAX_CONNECTIONS = 128
# Hosts that try each other, if there are more hosts than connections.
_GROUP_SIZE = 64


class ProbeRequest(NamedTuple):
    """The request to all hosts."""

    host_names: tuple[str, ...]
    run_folder: Path | None
    interface: str | None
    counts_gpus: bool
    port: int
    port_range: range | None = None  # of ports to try, at every host

    def probe_arguments_for_host(self, host_name: str) -> dict[str, object]:
        """Return the request to one host, as the argument of the probe's `main`."""
        # ssh may need `user@`, name resolution must not have it.
        peer_names = [name.rpartition("@")[2] for name in self.host_names if name != host_name]
        return {
            "peers": peer_names[:4],
            "folder": str(self.run_folder) if self.run_folder else None,
            "ports": self._ports_of_host(host_name),
            "interface": self.interface,
            "cuda": self.counts_gpus,
        }

    def _ports_of_host(self, host_name: str) -> tuple[int, ...]:
        """Return the ports on which a host listens: the ends of the range, else one port."""
        if self.port_range is not None:
            return tuple(dict.fromkeys((self.port_range[0], self.port_range[-1])))
        return (self.port if (host_name,) == self.host_names[:1] or not self.host_names else 0,)

    def program_for_host(self, host_name: str) -> bytes:
        """Return the program for a host: the probe's source and a call of its `main`."""
        return (
            Path(probe.__file__).read_bytes()
            + f"\nmain({self.probe_arguments_for_host(host_name)!r})\n".encode()
        )


class ProbeFailure(NamedTuple):
    """The reason why a host did not answer; `check` names the failed check."""

    failed_check: str
    observation: str
    remedy: str


class ProbeAnswer(NamedTuple):
    """The answer of a host."""

    properties: Json
    """The values of the probe."""
    answer_seconds: float
    """Seconds until the answer."""
    clock_skew_seconds: float = 0.0
    """Difference of its clock to this host's, in seconds."""
    skew_error_seconds: float = 0.0
    """Possible error of `skew`, in seconds."""
    connections: tuple[ConnectionResult, ...] = ()
    """Its connections to other hosts."""


class ConnectionResult(NamedTuple):
    """The result of a connection from one host to a port of another."""

    host: str
    port: int
    error: str
    """Error of the TCP connection; "" if it was accepted."""
    udp: bool
    """Whether a datagram was answered."""
    passes_whole_packet: bool
    """Whether a packet of `mtu` bytes was answered."""
    mtu_bytes: int


def probe_hosts_and_return_answers_and_meeting_host(
    probe_request: ProbeRequest,
) -> tuple[list[ProbeAnswer | ProbeFailure], str | None]:
    """Query all hosts.

    At most `_AT_ONCE` connections are open. As soon as enough hosts have answered, they form a
    group, try each other and end. So a dead host does not delay the others.

    Returns:
        Each host's answer, in the order of the names; and the name of the host that all others
        tried to reach, None if none listened.
    """
    host_names = probe_request.host_names
    limit_seconds = _FIRST_ANSWER_SECONDS + _EXTRA_SECONDS_PER_HOST * min(
        len(host_names), _MAX_CONNECTIONS
    )
    call_by_index: dict[int, _ProbeCall] = {}
    index_by_future: dict[Future[_ProbeCall], int] = {}
    meeting_call: _ProbeCall | None = None
    group_indices: list[int] = []
    started_count = 0
    with (
        ThreadPoolExecutor(_MAX_CONNECTIONS) as connection_pool,
        ThreadPoolExecutor(_MAX_CONNECTIONS) as group_pool,
        contextlib.ExitStack() as open_calls,
    ):
        while index_by_future or started_count < len(host_names):
            while (
                started_count < len(host_names)
                and len(index_by_future) + len(group_indices) < _MAX_CONNECTIONS
            ):
                index_by_future[
                    connection_pool.submit(
                        _ProbeCall, probe_request, limit_seconds, host_names[started_count]
                    )
                ] = started_count
                started_count += 1
            for future in wait(index_by_future, return_when=FIRST_COMPLETED).done:
                host_index = index_by_future.pop(future)
                call_by_index[host_index] = future.result()
                open_calls.callback(call_by_index[host_index].end_or_kill_probe)
                if isinstance(call_by_index[host_index].answer, ProbeAnswer):
                    group_indices.append(host_index)
                else:
                    call_by_index[host_index].end_or_kill_probe()
            # No group is formed before the first host has answered: all others try to reach it,
            # because ranks will meet there.
            is_last_group = not index_by_future and started_count == len(host_names)
            if is_last_group or (
                0 in call_by_index
                and started_count < len(host_names)
                and len(group_indices) >= _GROUP_SIZE
            ):
                members = [call_by_index[host_index] for host_index in sorted(group_indices)]
                # If the first host does not answer, the next one that listens replaces it.
                meeting_call = meeting_call or next(
                    (call for call in members if call.has_address_and_open_ports), None
                )
                _let_hosts_connect_and_end_all_probes_but_meeting(members, meeting_call, group_pool)
                group_indices = []
    return [
        call_by_index[host_index].answer for host_index in range(len(host_names))
    ], meeting_call.host_name if meeting_call else None


def _let_hosts_connect_and_end_all_probes_but_meeting(
    member_calls: list[_ProbeCall], meeting_call: _ProbeCall | None, pool: ThreadPoolExecutor
) -> None:
    """Let the hosts that listen try each other and the meeting host, then end their probes."""
    listening_calls = [
        *([meeting_call] if meeting_call else []),
        *(
            call
            for call in member_calls
            if call.has_address_and_open_ports and call is not meeting_call
        ),
    ]
    other_calls = [call for call in member_calls if call not in listening_calls]
    list(
        pool.map(
            functools.partial(
                _ProbeCall.add_clock_and_connections_to_answer, group=listening_calls
            ),
            [*listening_calls, *other_calls],
        )
    )
    # Closed now rather than at the end, because each call holds three open files. The meeting host
    # stays open for later groups.
    list(
        pool.map(
            _ProbeCall.end_or_kill_probe,
            (call for call in member_calls if call is not meeting_call),
        )
    )


def _calls_of_some_or_all_group_hosts_to_connect_to(
    call: _ProbeCall, group_calls: list[_ProbeCall]
) -> list[_ProbeCall]:
    """Return the hosts that a host tries: in a small group all others.

    In a large group the first host tries all. Every other host tries the first one, and the hosts
    1, 2, 4, ... places before and after it, so that each pair is tried in both directions.
    """
    if call not in group_calls:
        return []
    call_index = group_calls.index(call)
    group_size = len(group_calls)
    if group_size <= _MAX_PAIRS + 1 or call_index == 0:
        return [other_call for other_call in group_calls if other_call is not call]
    distances = [sign << power for power in range(group_size.bit_length() - 1) for sign in (1, -1)]
    return [
        group_calls[member_index]
        for member_index in sorted(
            {0, *((call_index + distance) % group_size for distance in distances)} - {call_index}
        )
    ]


class _ProbeCall:
    """A probe that was started on a host, with its answer or the reason for none."""

    def __init__(self, request: ProbeRequest, limit_seconds: float, host_name: str) -> None:
        self.host_name = host_name
        self._deadline = time.monotonic() + limit_seconds
        self._start_time = time.monotonic()
        self._limit_seconds = limit_seconds
        self.answer: ProbeAnswer | ProbeFailure = self._start_probe_and_read_first_answer(
            request.program_for_host(host_name)
        )

    @property
    def has_address_and_open_ports(self) -> bool:
        """Whether other hosts can try to reach it."""
        if isinstance(self.answer, ProbeFailure):
            return False
        return self.answer.properties["address"] is not None and bool(
            self.answer.properties["doors"]
        )

    def _start_probe_and_read_first_answer(self, program: bytes) -> ProbeAnswer | ProbeFailure:
        remote_argv = [sys.executable, "-c", _BOOTSTRAP_CODE, str(len(program))]
        argv = (
            remote_argv
            if needs_no_ssh(self.host_name)
            else _srun_or_ssh_argv(self.host_name, remote_argv)
        )
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # so that `close` can kill its whole process group
            )
        except OSError as error:
            return ProbeFailure(
                "reached",
                f"cannot start {argv[0]} here: {error.strerror}",
                f"install {argv[0]}",
            )
        self._write_and_flush_to_probe_if_it_reads(program)
        answer_line = self._read_answer_line_or_all_output_before_deadline()
        answer_seconds = time.monotonic() - self._start_time
        if answer_line is None:
            return ProbeFailure(
                "reached",
                f"no answer within {self._limit_seconds:.0f} s",
                f"try: ssh {self.host_name} true",
            )
        with contextlib.suppress(ValueError, SyntaxError):
            return ProbeAnswer(ast.literal_eval(answer_line.decode()), answer_seconds)
        return self._wait_and_explain_probe_failure(answer_line)

    def add_clock_and_connections_to_answer(self, group: list[_ProbeCall]) -> None:
        """Measure the host's clock, and let it try the ports of the others in the group."""
        if isinstance(self.answer, ProbeFailure):
            return
        ports_to_try = [
            (other_call, tcp_port, udp_port)
            for other_call in _calls_of_some_or_all_group_hosts_to_connect_to(self, group)
            for tcp_port, udp_port in other_call.properties["doors"]
        ]
        ports_text = " ".join(
            f"{other_call.properties['address']} {tcp_port} {udp_port} {other_call.properties['mtu']}"
            for other_call, tcp_port, udp_port in ports_to_try
        )
        # The clock was read between request and answer, so half of that time is the possible error.
        request_time = time.time()
        self._deadline = time.monotonic() + _SECOND_ANSWER_SECONDS
        self._write_and_flush_to_probe_if_it_reads(f"{ports_text}\n".encode())
        answer_line = self._read_answer_line_or_all_output_before_deadline()
        try:
            answer = ast.literal_eval((answer_line or b"").decode())
            skew_error_seconds = max(0.0, time.time() - request_time - answer["took"]) / 2
        except (ValueError, SyntaxError):
            self.answer = ProbeFailure(
                "reached", "it stopped answering", f"try: ssh {self.host_name} true"
            )
            return
        connections = [
            ConnectionResult(
                other_call.host_name,
                tcp_port,
                error,
                udp_port,
                passes_whole_packet,
                min(other_call.properties["mtu"], self.properties["mtu"]),
            )
            for (other_call, tcp_port, _), (error, udp_port, passes_whole_packet) in zip(
                ports_to_try, answer["reach"]
            )
        ]
        self.answer = self.answer._replace(
            clock_skew_seconds=answer["time"] - request_time - skew_error_seconds,
            skew_error_seconds=skew_error_seconds,
            connections=(*self.answer.connections, *connections),
        )

    @property
    def properties(self) -> Json:
        """The values of the probe; only for a host that answered."""
        assert isinstance(self.answer, ProbeAnswer)
        return self.answer.properties

    def end_or_kill_probe(self) -> None:
        """End the probe; kill it if it does not end by itself."""
        if self._process is None:
            return
        # A probe ends when its standard input does.
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.0 if isinstance(self.answer, ProbeFailure) else _LEAVE_SECONDS)
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        with self._process:  # closes its pipes
            self._process = None

    def _write_and_flush_to_probe_if_it_reads(self, input_bytes: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        # If the probe has ended, reading its output gives the reason.
        with contextlib.suppress(OSError):
            self._process.stdin.write(input_bytes)
            self._process.stdin.flush()

    def _read_answer_line_or_all_output_before_deadline(self) -> bytes | None:
        """Return the probe's next line, without output of a login shell before it.

        All output if the probe ended instead; None after the deadline.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        pipe = self._process.stdout
        output = b""
        while not (output.endswith(b"\n") and _is_answer_line(output.splitlines()[-1])):
            if not select.select([pipe], [], [], max(0.0, self._deadline - time.monotonic()))[0]:
                return None
            chunk = os.read(pipe.fileno(), 1 << 16)
            if not chunk:
                return output
            output += chunk
        return output.splitlines()[-1]

    def _wait_and_explain_probe_failure(self, last_output: bytes) -> ProbeFailure:
        """Return the reason why a probe ended or printed something else."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        exit_status = self._process.returncode
        error_text = self._read_error_output_until_silent().decode(errors="replace")
        output_texts = (
            output_text.strip()
            for output_text in (error_text, last_output.decode(errors="replace"))
        )
        last_message = next(
            (output_text.splitlines()[-1] for output_text in output_texts if output_text),
            f"status {exit_status}",
        )
        # A shell's status for a program that it cannot execute or find.
        if exit_status in (126, 127):
            remedy = "install the same environment there, under the same path"
            return ProbeFailure(
                "interpreter", f"{sys.executable} is missing there ({last_message})", remedy
            )
        remedy = next(
            (
                remedy
                for message_part, remedy in _REMEDIES_BY_MESSAGE.items()
                if message_part in error_text
            ),
            _NO_PASSWORD_REMEDY,
        )
        return ProbeFailure("reached", last_message, remedy.format(host=self.host_name))

    def _read_error_output_until_silent(self) -> bytes:
        # Not until its end: a shared connection of ssh may keep the pipe open.
        assert self._process is not None
        assert self._process.stderr is not None
        pipe = self._process.stderr
        error_output = b""
        while select.select([pipe], [], [], _ERROR_SECONDS)[0] and (
            chunk := os.read(pipe.fileno(), 1 << 16)
        ):
            error_output += chunk
        return error_output


def _is_answer_line(output_line: bytes) -> bool:
    """Return whether a line is a probe's, not one of a login shell."""
    try:
        return isinstance(ast.literal_eval(output_line.decode()), dict)
    except (ValueError, SyntaxError):
        return False


def _srun_or_ssh_argv(host_name: str, remote_words: list[str]) -> list[str]:
    """Return the command that runs a program on another host: ssh, or a step of the Slurm job."""
    # Compute nodes of many clusters accept no ssh, but a job may always start steps.
    if "SLURM_JOB_ID" in os.environ:
        return [
            "srun",
            "--overlap",
            "--mpi=none",
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={host_name}",
            *remote_words,
        ]
    return ssh_argv(host_name, remote_words, _CONNECT_SECONDS)
