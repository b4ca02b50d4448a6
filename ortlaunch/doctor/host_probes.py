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

from ortlaunch.doctor import probe
from ortlaunch.json_types import Json
from ortlaunch.launch.ssh import needs_no_ssh, ssh_argv

_CONNECT_SECONDS = 8  # ssh's own limit
# Modules must not be imported from the current folder there. The argument is the probe's length in
# bytes: all that follows on standard input are requests to it.
_PYTHON = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "exec(sys.stdin.buffer.read(int(sys.argv[1])))"
)
_SECONDS = 12.0  # for the first answer
_AGAIN_SECONDS = 6.0  # for the second one; a probe itself takes at most 3
_MORE_SECONDS = 0.05  # for each host: all of them start a program on this one
_PAIRS = 32  # with more other hosts, each host tries only some of them
_LEAVE_SECONDS = 2.0  # until a probe is killed after the end of its input
_NO_PASSWORD = "ssh {host} must work without a password"
# ssh's words -> the remedy.
_MENDS = {
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
_AT_ONCE = 128
# Hosts that try each other, if there are more hosts than connections.
_GROUP = 64


class ProbeRequest(NamedTuple):
    """The request to all hosts."""

    names: tuple[str, ...]
    folder: Path | None
    interface: str | None
    cuda: bool
    port: int
    range: tuple[int, int] | None = None  # of ports to try, at every host

    def request_to(self, host: str) -> dict[str, object]:
        """Return the request to one host, as the argument of the probe's `main`."""
        # ssh may need `user@`, name resolution must not have it.
        peers = [name.rpartition("@")[2] for name in self.names if name != host]
        return {"peers": peers[:4], "folder": str(self.folder) if self.folder else None, "ports": self._ports(host),
                "interface": self.interface, "cuda": self.cuda}  # fmt: skip

    def _ports(self, host: str) -> tuple[int, ...]:
        """Return the ports on which a host listens: the ends of the range, else one port."""
        if self.range is not None:
            return tuple(dict.fromkeys(self.range))
        return (self.port if (host,) == self.names[:1] or not self.names else 0,)

    def to(self, host: str) -> bytes:
        """Return the program for a host: the probe's source and a call of its `main`."""
        return Path(probe.__file__).read_bytes() + f"\nmain({self.request_to(host)!r})\n".encode()


class NoAnswer(NamedTuple):
    """The reason why a host did not answer; `check` names the failed check."""

    check: str
    what: str
    mend: str


class Answer(NamedTuple):
    """The answer of a host."""

    properties: Json
    """The values of the probe."""
    took: float
    """Seconds until the answer."""
    skew: float = 0.0
    """Difference of its clock to this host's, in seconds."""
    doubt: float = 0.0
    """Possible error of `skew`, in seconds."""
    reached: tuple[Reached, ...] = ()
    """Its connections to other hosts."""


class Reached(NamedTuple):
    """The result of a connection from one host to a port of another."""

    host: str
    port: int
    error: str
    """Error of the TCP connection; "" if it was accepted."""
    udp: bool
    """Whether a datagram was answered."""
    whole: bool
    """Whether a packet of `mtu` bytes was answered."""
    mtu: int


def query_hosts(request: ProbeRequest) -> tuple[list[Answer | NoAnswer], str | None]:
    """Query all hosts.

    At most `_AT_ONCE` connections are open. As soon as enough hosts have answered, they form a
    group, try each other and end. So a dead host does not delay the others.

    Returns:
        Each host's answer, in the order of the names; and the name of the host that all others
        tried to reach, None if none listened.
    """
    names = request.names
    seconds = _SECONDS + _MORE_SECONDS * min(len(names), _AT_ONCE)
    calls: dict[int, _ProbeCall] = {}
    running: dict[Future[_ProbeCall], int] = {}
    meeting: _ProbeCall | None = None
    group: list[int] = []
    started = 0
    with (
        ThreadPoolExecutor(_AT_ONCE) as first,
        ThreadPoolExecutor(_AT_ONCE) as second,
        contextlib.ExitStack() as open_calls,
    ):
        while running or started < len(names):
            while started < len(names) and len(running) + len(group) < _AT_ONCE:
                running[first.submit(_ProbeCall, request, seconds, names[started])] = started
                started += 1
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                at = running.pop(done)
                calls[at] = done.result()
                open_calls.callback(calls[at].close)
                if isinstance(calls[at].answer, Answer):
                    group.append(at)
                else:
                    calls[at].close()
            # No group is formed before the first host has answered: all others try to reach it,
            # because ranks will meet there.
            is_last = not running and started == len(names)
            if is_last or (0 in calls and started < len(names) and len(group) >= _GROUP):
                members = [calls[at] for at in sorted(group)]
                # If the first host does not answer, the next one that listens replaces it.
                meeting = meeting or next((call for call in members if call.listens), None)
                _try_each_other(members, meeting, second)
                group = []
    return [calls[at].answer for at in range(len(names))], meeting.host if meeting else None


def _try_each_other(
    members: list[_ProbeCall], meeting: _ProbeCall | None, pool: ThreadPoolExecutor
) -> None:
    """Let the hosts that listen try each other and the meeting host, then end their probes."""
    group = [meeting] if meeting else []
    group += [call for call in members if call.listens and call is not meeting]
    rest = [call for call in members if call not in group]
    list(pool.map(functools.partial(_ProbeCall.second, group=group), [*group, *rest]))
    # Closed now rather than at the end, because each call holds three open files. The meeting host
    # stays open for later groups.
    list(pool.map(_ProbeCall.close, (call for call in members if call is not meeting)))


def _others(call: _ProbeCall, group: list[_ProbeCall]) -> list[_ProbeCall]:
    """Return the hosts that a host tries: in a small group all others.

    In a large group the first host tries all. Every other host tries the first one, and the hosts
    1, 2, 4, ... places before and after it, so that each pair is tried in both directions.
    """
    if call not in group:
        return []
    at = group.index(call)
    count = len(group)
    if count <= _PAIRS + 1 or at == 0:
        return [one for one in group if one is not call]
    distances = [sign << power for power in range(count.bit_length() - 1) for sign in (1, -1)]
    return [
        group[place]
        for place in sorted({0, *((at + distance) % count for distance in distances)} - {at})
    ]


class _ProbeCall:
    """A probe that was started on a host, with its answer or the reason for none."""

    def __init__(self, request: ProbeRequest, seconds: float, host: str) -> None:
        self.host = host
        self._deadline = time.monotonic() + seconds
        self._began = time.monotonic()
        self._seconds = seconds
        self.answer: Answer | NoAnswer = self._first(request.to(host))

    @property
    def listens(self) -> bool:
        """Whether other hosts can try to reach it."""
        if isinstance(self.answer, NoAnswer):
            return False
        return self.answer.properties["address"] is not None and bool(
            self.answer.properties["doors"]
        )

    def _first(self, program: bytes) -> Answer | NoAnswer:
        remote = [sys.executable, "-c", _PYTHON, str(len(program))]
        command = remote if needs_no_ssh(self.host) else _at(self.host, remote)
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # so that `close` can kill its whole process group
            )
        except OSError as error:
            return NoAnswer(
                "reached",
                f"cannot start {command[0]} here: {error.strerror}",
                f"install {command[0]}",
            )
        self._send(program)
        line = self._line()
        took = time.monotonic() - self._began
        if line is None:
            return NoAnswer(
                "reached", f"no answer within {self._seconds:.0f} s", f"try: ssh {self.host} true"
            )
        with contextlib.suppress(ValueError, SyntaxError):
            return Answer(ast.literal_eval(line.decode()), took)
        return self._failed(line)

    def second(self, group: list[_ProbeCall]) -> None:
        """Measure the host's clock, and let it try the ports of the others in the group."""
        if isinstance(self.answer, NoAnswer):
            return
        places = [
            (one, tcp, udp) for one in _others(self, group) for tcp, udp in one.properties["doors"]
        ]
        words = " ".join(
            f"{one.properties['address']} {tcp} {udp} {one.properties['mtu']}"
            for one, tcp, udp in places
        )
        # The clock was read between request and answer, so half of that time is the possible error.
        before = time.time()
        self._deadline = time.monotonic() + _AGAIN_SECONDS
        self._send(f"{words}\n".encode())
        line = self._line()
        try:
            found = ast.literal_eval((line or b"").decode())
            doubt = max(0.0, time.time() - before - found["took"]) / 2
        except (ValueError, SyntaxError):
            self.answer = NoAnswer("reached", "it stopped answering", f"try: ssh {self.host} true")
            return
        reached = [Reached(one.host, tcp, error, udp, whole, min(one.properties["mtu"], self.properties["mtu"]))
                   for (one, tcp, _), (error, udp, whole) in zip(places, found["reach"])]  # fmt: skip
        self.answer = self.answer._replace(
            skew=found["time"] - before - doubt,
            doubt=doubt,
            reached=(*self.answer.reached, *reached),
        )

    @property
    def properties(self) -> Json:
        """The values of the probe; only for a host that answered."""
        assert isinstance(self.answer, Answer)
        return self.answer.properties

    def close(self) -> None:
        """End the probe; kill it if it does not end by itself."""
        if self._process is None:
            return
        # A probe ends when its standard input does.
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.0 if isinstance(self.answer, NoAnswer) else _LEAVE_SECONDS)
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        with self._process:  # closes its pipes
            self._process = None

    def _send(self, data: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        # If the probe has ended, reading its output gives the reason.
        with contextlib.suppress(OSError):
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def _line(self) -> bytes | None:
        """Return the probe's next line, without output of a login shell before it.

        All output if the probe ended instead; None after the deadline.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        pipe = self._process.stdout
        text = b""
        while not (text.endswith(b"\n") and _is_answer(text.splitlines()[-1])):
            if not select.select([pipe], [], [], max(0.0, self._deadline - time.monotonic()))[0]:
                return None
            piece = os.read(pipe.fileno(), 1 << 16)
            if not piece:
                return text
            text += piece
        return text.splitlines()[-1]

    def _failed(self, line: bytes) -> NoAnswer:
        """Return the reason why a probe ended or printed something else."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        status = self._process.returncode
        errors = self._errors().decode(errors="replace")
        words = (text.strip() for text in (errors, line.decode(errors="replace")))
        said = next((text.splitlines()[-1] for text in words if text), f"status {status}")
        # A shell's status for a program that it cannot execute or find.
        if status in (126, 127):
            mend = "install the same environment there, under the same path"
            return NoAnswer("interpreter", f"{sys.executable} is missing there ({said})", mend)
        mend = next((mend for word, mend in _MENDS.items() if word in errors), _NO_PASSWORD)
        return NoAnswer("reached", said, mend.format(host=self.host))

    def _errors(self) -> bytes:
        """Return the probe's error output."""
        # Not until its end: a shared connection of ssh may keep the pipe open.
        assert self._process is not None
        assert self._process.stderr is not None
        pipe = self._process.stderr
        text = b""
        while select.select([pipe], [], [], _ERROR_SECONDS)[0] and (
            piece := os.read(pipe.fileno(), 1 << 16)
        ):
            text += piece
        return text


def _is_answer(line: bytes) -> bool:
    """Return whether a line is a probe's, not one of a login shell."""
    try:
        return isinstance(ast.literal_eval(line.decode()), dict)
    except (ValueError, SyntaxError):
        return False


def _at(host: str, remote: list[str]) -> list[str]:
    """Return the command that runs a program on another host: ssh, or a step of the Slurm job."""
    # Compute nodes of many clusters accept no ssh, but a job may always start steps.
    if "SLURM_JOB_ID" in os.environ:
        return [
            "srun",
            "--overlap",
            "--mpi=none",
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={host}",
            *remote,
        ]
    return ssh_argv(host, remote, _CONNECT_SECONDS)
