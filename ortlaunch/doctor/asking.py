"""All hosts asked at once, over one connection each: what they are, then which of the others they reach."""

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
from ortlaunch.launch.ssh import needs_no_ssh, ssh

_CONNECT_SECONDS = 8
# What is imported must not come from the folder where this starts; then the probe itself, of so many bytes.
_PYTHON = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "exec(sys.stdin.buffer.read(int(sys.argv[1])))"
)
_SECONDS = 12.0
_AGAIN_SECONDS = 6.0
_MORE_SECONDS = 0.05  # for each host: all of them start a program on this one
_PAIRS = 32  # others that each host tries: all of them, of more hosts some
_LEAVE_SECONDS = 2.0
_ERROR_SECONDS = 0.2
# connections; hosts that try each other, where there are more than that
_AT_ONCE = 128
_GROUP = 64


class Question(NamedTuple):
    """What the hosts are asked for."""

    names: tuple[str, ...]
    folder: Path | None
    interface: str | None
    cuda: bool
    port: int
    range: tuple[int, int] | None = None  # of ports to try, at every host

    def asked_of(self, host: str) -> dict[str, object]:
        """As the probe takes it."""
        peers = [name.rpartition("@")[2] for name in self.names if name != host]
        return {"peers": peers[:4], "folder": str(self.folder) if self.folder else None, "ports": self._ports(host),
                "interface": self.interface, "cuda": self.cuda}  # fmt: skip

    def _ports(self, host: str) -> tuple[int, ...]:
        """That it is to listen at: the ends of the range."""
        if self.range is not None:
            return tuple(dict.fromkeys(self.range))
        return (self.port if (host,) == self.names[:1] or not self.names else 0,)

    def to(self, host: str) -> bytes:
        """The program that answers it."""
        return Path(probe.__file__).read_bytes() + f"\nmain({self.asked_of(host)!r})\n".encode()


class Silence(NamedTuple):
    """Why a host told nothing: `check` is what failed."""

    check: str
    what: str
    mend: str


class Answer(NamedTuple):
    """What a host tells, and the seconds until it did.

    skew: seconds of its clock beside this one; doubt: how wrong that may be.
    reached: the other hosts that it tried.
    """

    told: Json
    took: float
    skew: float = 0.0
    doubt: float = 0.0
    reached: tuple[Reached, ...] = ()


class Reached(NamedTuple):
    """How a host reaches a port of another."""

    host: str
    port: int
    error: str
    """Of a TCP connection; empty: it was accepted."""
    udp: bool
    """Whether a datagram was answered."""
    whole: bool
    """Whether a packet as long as `mtu` was."""
    mtu: int


def ask(question: Question) -> tuple[list[Answer | Silence], str | None]:
    """Each host's answer, in their order; and the name of the one that the others were to reach, if there was one.

    At most `_AT_ONCE` connections are open. Hosts that have answered form a group as soon as there are enough of them,
    try each other, and leave; a dead host delays none of them.
    """
    names = question.names
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
                running[first.submit(_ProbeCall, question, seconds, names[started])] = started
                started += 1
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                at = running.pop(done)
                calls[at] = done.result()
                open_calls.callback(calls[at].close)
                if isinstance(calls[at].answer, Answer):
                    group.append(at)
                else:
                    calls[at].close()
            # The first host is the one to reach where it answers: no group is formed before.
            is_last = not running and started == len(names)
            if is_last or (0 in calls and started < len(names) and len(group) >= _GROUP):
                members = [calls[at] for at in sorted(group)]
                meeting = meeting or next((call for call in members if call.listens), None)
                _try_each_other(members, meeting, second)
                group = []
    return [calls[at].answer for at in range(len(names))], meeting.host if meeting else None


def _try_each_other(
    members: list[_ProbeCall], meeting: _ProbeCall | None, pool: ThreadPoolExecutor
) -> None:
    """Those that listen try each other, and the one that all are to reach; then they may end."""
    group = [meeting] if meeting else []
    group += [call for call in members if call.listens and call is not meeting]
    rest = [call for call in members if call not in group]
    list(pool.map(functools.partial(_ProbeCall.second, group=group), [*group, *rest]))
    list(
        pool.map(_ProbeCall.close, (call for call in members if call is not meeting))
    )  # its pipes are three open files


def _others(call: _ProbeCall, group: list[_ProbeCall]) -> list[_ProbeCall]:
    """Those that a host tries: all in a small group; in a large one the first host, which tries all, and those that are
    1, 2, 4, ... places before and behind it, so that each pair is tried in both directions."""
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
    """A probe that runs on a host, and has told or failed."""

    def __init__(self, question: Question, seconds: float, host: str) -> None:
        self.host = host
        self._deadline = time.monotonic() + seconds
        self._began = time.monotonic()
        self._seconds = seconds
        self.answer: Answer | Silence = self._first(question.to(host))

    @property
    def listens(self) -> bool:
        """Whether others can be told to reach it."""
        if isinstance(self.answer, Silence):
            return False
        return self.answer.told["address"] is not None and bool(self.answer.told["doors"])

    def _first(self, program: bytes) -> Answer | Silence:
        remote = [sys.executable, "-c", _PYTHON, str(len(program))]
        command = remote if needs_no_ssh(self.host) else _at(self.host, remote)
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            return Silence(
                "reached",
                f"cannot start {command[0]} here: {error.strerror}",
                f"install {command[0]}",
            )
        self._send(program)
        line = self._line()
        took = time.monotonic() - self._began
        if line is None:
            return Silence(
                "reached", f"no answer within {self._seconds:.0f} s", f"try: ssh {self.host} true"
            )
        with contextlib.suppress(ValueError, SyntaxError):
            return Answer(ast.literal_eval(line.decode()), took)
        return self._failed(line)

    def second(self, group: list[_ProbeCall]) -> None:
        """Have its clock, and how it reaches the ports of others."""
        if isinstance(self.answer, Silence):
            return
        places = [(one, tcp, udp) for one in _others(self, group) for tcp, udp in one.told["doors"]]
        words = " ".join(
            f"{one.told['address']} {tcp} {udp} {one.told['mtu']}" for one, tcp, udp in places
        )
        before = time.time()
        self._deadline = time.monotonic() + _AGAIN_SECONDS
        self._send(f"{words}\n".encode())
        line = self._line()
        try:
            found = ast.literal_eval((line or b"").decode())
            doubt = max(0.0, time.time() - before - found["took"]) / 2
        except (ValueError, SyntaxError):
            self.answer = Silence(
                "reached", "it answered, and then no more", f"try: ssh {self.host} true"
            )
            return
        reached = [Reached(one.host, tcp, error, udp, whole, min(one.told["mtu"], self.told["mtu"]))
                   for (one, tcp, _), (error, udp, whole) in zip(places, found["reach"])]  # fmt: skip
        self.answer = self.answer._replace(
            skew=found["time"] - before - doubt,
            doubt=doubt,
            reached=(*self.answer.reached, *reached),
        )

    @property
    def told(self) -> Json:
        assert isinstance(self.answer, Answer)
        return self.answer.told

    def close(self) -> None:
        """Return when it has ended; one that stays is ended."""
        if self._process is None:
            return
        if self._process.stdin is not None:  # which lets it end: it has told all
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.0 if isinstance(self.answer, Silence) else _LEAVE_SECONDS)
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        with self._process:  # closes its pipes
            self._process = None

    def _send(self, data: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: its last words say why
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def _line(self) -> bytes | None:
        """The probe's next line, without what a login shell says before it; all that came where it ended instead; None
        where the time is over."""
        assert self._process is not None
        assert self._process.stdout is not None
        pipe = self._process.stdout
        text = b""
        while not (text.endswith(b"\n") and text.splitlines()[-1].startswith(b"{")):
            if not select.select([pipe], [], [], max(0.0, self._deadline - time.monotonic()))[0]:
                return None
            piece = os.read(pipe.fileno(), 1 << 16)
            if not piece:
                return text
            text += piece
        return text.splitlines()[-1]

    def _failed(self, line: bytes) -> Silence:
        """It ended, or printed something else."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        status = self._process.returncode
        words = (text.decode(errors="replace").strip() for text in (self._errors(), line))
        said = next((text.splitlines()[-1] for text in words if text), f"status {status}")
        if status in (126, 127):
            mend = "install the same environment there, under the same path"
            return Silence("interpreter", f"no {sys.executable} there ({said})", mend)
        return Silence("reached", said, f"ssh {self.host} must work without a password")

    def _errors(self) -> bytes:
        """Its error output; somebody may keep that open, as a shared connection of ssh's does."""
        assert self._process is not None
        assert self._process.stderr is not None
        pipe = self._process.stderr
        text = b""
        while select.select([pipe], [], [], _ERROR_SECONDS)[0] and (
            piece := os.read(pipe.fileno(), 1 << 16)
        ):
            text += piece
        return text


def _at(host: str, remote: list[str]) -> list[str]:
    """A command on another host: by ssh, or inside a job of Slurm's as a step of it."""
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
    return ssh(host, remote, _CONNECT_SECONDS)
