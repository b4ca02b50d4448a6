"""All hosts asked at once, over one connection each: what they are, then whether they reach the first."""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from ortlaunch.doctor import probe
from ortlaunch.plan import LOCAL_NAMES

_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=8")
# What is imported must not come from the folder where this starts; then the probe itself, of so many bytes.
_PYTHON = "import sys; sys.path[:] = filter(None, sys.path); exec(sys.stdin.buffer.read(int(sys.argv[1])))"
_SECONDS, _AGAIN_SECONDS = 12.0, 6.0
_MORE_SECONDS = 0.05  # for each host: all of them start a program on this one
_LEAVE_SECONDS, _ERROR_SECONDS = 2.0, 0.2
_AT_ONCE = 128


class Question(NamedTuple):
    """What the hosts are asked for."""

    names: tuple[str, ...]
    folder: Path | None
    interface: str | None
    cuda: bool
    port: int

    def asked_of(self, host: str) -> dict[str, Any]:
        """As the probe takes it."""
        peers = [name.rpartition("@")[2] for name in self.names if name != host]
        return {"peers": peers[:4], "folder": str(self.folder) if self.folder else None, "port": self.port,
                "interface": self.interface, "cuda": self.cuda}  # fmt: skip

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
    reach: why it cannot reach the port of `place`; None: not asked.
    """

    told: dict[str, Any]
    took: float
    skew: float = 0.0
    doubt: float = 0.0
    reach: str | None = None


def ask(question: Question) -> tuple[list[Answer | Silence], str | None]:
    """Each host's answer, in their order; and the name of the one that the others were to reach, if there was one."""
    answers: list[Answer | Silence] = []
    meeting: _Call | None = None
    with ThreadPoolExecutor(_AT_ONCE) as pool, contextlib.ExitStack() as open_calls:
        for batch in _batches(question.names):
            seconds = _SECONDS + _MORE_SECONDS * len(batch)
            calls = list(pool.map(functools.partial(_Call, question, seconds), batch))
            for call in calls:
                open_calls.callback(call.close)
            meeting = meeting or next((call for call in calls if call.listens), None)
            answers += pool.map(functools.partial(_Call.second, meeting=meeting), calls)
            for call in calls:
                if call is not meeting:
                    call.hang_up()
    return answers, meeting.host if meeting else None


def _batches(names: Sequence[str]) -> Iterator[Sequence[str]]:
    return (names[start : start + _AT_ONCE] for start in range(0, len(names), _AT_ONCE))


class _Call:
    """A probe that runs on a host, and has told or failed."""

    def __init__(self, question: Question, seconds: float, host: str) -> None:
        self.host, self._deadline = host, time.monotonic() + seconds
        self._began, self._seconds = time.monotonic(), seconds
        self.answer: Answer | Silence = self._first(question.to(host))

    @property
    def listens(self) -> bool:
        """Whether others can be told to reach it."""
        if isinstance(self.answer, Silence):
            return False
        return self.answer.told["address"] is not None and isinstance(self.answer.told["listens"], int)

    def _first(self, program: bytes) -> Answer | Silence:
        remote = [sys.executable, "-c", _PYTHON, str(len(program))]
        command = remote if _is_here(self.host) else _at(self.host, remote)
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            return Silence("reached", f"cannot start {command[0]} here: {error.strerror}", f"install {command[0]}")
        self._send(program)
        line = self._line()
        took = time.monotonic() - self._began
        if line is None:
            return Silence("reached", f"no answer within {self._seconds:.0f} s", f"try: ssh {self.host} true")
        with contextlib.suppress(ValueError, SyntaxError):
            return Answer(ast.literal_eval(line.decode()), took)
        return self._failed(line)

    def second(self, meeting: _Call | None) -> Answer | Silence:
        """Its answer, with its clock and whether it reaches the place where ranks could meet."""
        if isinstance(self.answer, Silence):
            return self.answer
        place = b""
        if meeting is not None and meeting is not self:
            assert isinstance(meeting.answer, Answer)
            place = f"{meeting.answer.told['address']} {meeting.answer.told['listens']}".encode()
        before, self._deadline = time.time(), time.monotonic() + _AGAIN_SECONDS
        self._send(place + b"\n")
        line = self._line()
        doubt = (time.time() - before) / 2
        with contextlib.suppress(ValueError, SyntaxError):
            found = ast.literal_eval((line or b"").decode())
            reach = found["reach"] if place else None
            return self.answer._replace(skew=found["time"] - before - doubt, doubt=doubt, reach=reach)
        return Silence("reached", "it answered, and then no more", f"try: ssh {self.host} true")

    def hang_up(self) -> None:
        """Let it end: it has told all."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def close(self) -> None:
        """Return when it has ended; one that stays is ended."""
        if self._process is None:
            return
        self.hang_up()
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
        pipe, text = self._process.stdout, b""
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
        pipe, text = self._process.stderr, b""
        while select.select([pipe], [], [], _ERROR_SECONDS)[0] and (piece := os.read(pipe.fileno(), 1 << 16)):
            text += piece
        return text


def _at(host: str, remote: list[str]) -> list[str]:
    """A command on another host: by ssh, or inside a job of Slurm's as a step of it."""
    if "SLURM_JOB_ID" in os.environ:
        return ["srun", "--overlap", "--mpi=none", "--nodes=1", "--ntasks=1", f"--nodelist={host}", *remote]
    return [*_SSH, host, shlex.join(remote)]


def _is_here(host: str) -> bool:
    name = socket.gethostname()
    return host in (*LOCAL_NAMES, name, name.split(".")[0])
