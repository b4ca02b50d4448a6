"""A supervisor's watchdog: it sends the rank's heartbeats and ends a rank of a stalled run.

stall_rules.py decides when a rank hangs. Rank 0's supervisor judges by it for all ranks. The others
judge only while rank 0's is silent. Standard library only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

from ortlaunch.cause import Cause
from ortlaunch.launch_plan import Plan
from ortlaunch.process import read_stat, wait_until
from ortlaunch.rank import Rank
from ortlaunch.run_folder.folder import RunDir, write_json_atomically, write_text_atomically
from ortlaunch.run_folder.lines import append_json_line
from ortlaunch.run_folder.lost import LostHost
from ortlaunch.worker.supervision.child import Child
from ortlaunch.worker.supervision.heartbeats import Exchange, beat_seconds
from ortlaunch.worker.supervision.lost_host import LostHosts
from ortlaunch.worker.supervision.pulse import AUTO, NEVER, Activity, Pulse
from ortlaunch.worker.supervision.slow import SlowRanks
from ortlaunch.worker.supervision.stall_rules import EXIT_STATUS, Beat, Verdict, judge

# Of rank 0's supervisor, which judges; the others send heartbeats (heartbeats.beat_seconds).
_JUDGE_SECONDS = 1.0
# From the meeting of the ranks to a report of those that sent no heartbeat.
_UNHEARD_SECONDS = 10.0
# A longer gap between two turns means that this supervisor itself was suspended.
_ASLEEP_SECONDS = 4.0
_STACK_SECONDS = 1.0
_ALL_STACKS_SECONDS = 2.0
_ORDER_SECONDS = 5.0
_PY_SPY_SECONDS = 3
_SHOWN_LINES = 12


class Watchdog:
    """The watchdog of one rank: made before the fork, and used on both sides of it."""

    def __init__(self, rank: Rank, run: RunDir) -> None:
        self.rank = rank
        self.run = run
        self.pulse = Pulse()
        self.exchange = Exchange(rank)
        self.verdict: Verdict | None = None
        self.lost: LostHost | None = None
        self.ended_it = False
        self._plan = Plan.read(run.plan)
        self._stacks = os.memfd_create("stacks")
        self._every = _JUDGE_SECONDS if rank.rank == 0 else beat_seconds(rank.world_size)
        self._since = time.monotonic()
        # A different phase for each rank spreads the heartbeats over time.
        self._beat_at = self._since - self._every * rank.rank / rank.world_size
        self._stacks_requested_at: float | None = None
        # When to report the ranks that sent no heartbeat.
        self._unheard_at = float("inf")
        self._activity: Activity | None = None
        self._slow = SlowRanks()
        self._lost_hosts = LostHosts(socket.gethostname(), rank.rank)
        if not self._plan.traits.watched:
            self.pulse.limit = NEVER

    def apply_setting(self, setting: float | str | None) -> None:
        """In the rank: apply `train.stall_seconds` of its recipe."""
        if self._plan.traits.watched:
            self.pulse.limit = (
                NEVER if setting is None else AUTO if isinstance(setting, str) else setting
            )

    def listen(self) -> None:
        """In the rank: let SIGQUIT, and crashes, print the stacks of threads from now on.

        This also works while Python is busy in C code.
        """
        faulthandler.register(signal.SIGQUIT, file=self._stacks, all_threads=True)
        # A crash in native code prints the Python stack into the rank's log. A descriptor of its own,
        # because ONNX Runtime redirects standard error during an export.
        faulthandler.enable(os.dup(2), all_threads=False)

    def poll(self, child: Child) -> None:
        """Receive heartbeats and orders, send a heartbeat, and judge.

        It is called all the time, and does something once a second.
        """
        self.exchange.receive()
        if self._stacks_requested_at is not None or self.exchange.orders:
            self._go_on_ending(child)
        elif time.monotonic() - self._beat_at >= self._every:
            self._beat(child)

    def _beat(self, child: Child) -> None:
        now = time.monotonic()
        # While suspended, this process received nothing, so silence before now has no meaning.
        if now - self._beat_at > self._every + _ASLEEP_SECONDS:
            self._since = now
            self.exchange.wake()
        self._beat_at = now
        if self.pulse.place and not self.exchange.has_met:
            # The limits count from the meeting: before it, each supervisor knew only its own rank.
            self._since = now
            self.exchange.meet(self.pulse.place)
            self._unheard_at = now + _UNHEARD_SECONDS
        mine = self._own_beat(child.pid)
        self.exchange.send_beat(mine)
        beats = self.exchange.beats(mine)
        self._check_lost_hosts(beats, child)
        self._check_slow_ranks(beats, now)
        if now > self._unheard_at:
            self._report_unheard()
        found = judge(beats, self.pulse.limit, now - self._since) if beats else None
        if found and not self.ended_it:
            self._begin_ending(found, child)

    def _check_lost_hosts(self, beats: list[Beat] | None, child: Child) -> None:
        """End the rank if a host is lost, for any value of `train.stall_seconds`.

        Without a host the run can neither continue nor save.
        """
        self.lost = self.lost or self._lost_hosts.detect(beats or (), self.exchange.addresses())
        if self.lost and not self.ended_it:
            self.ended_it = True
            child.send(signal.SIGKILL)

    def _check_slow_ranks(self, beats: list[Beat] | None, now: float) -> None:
        slow = (
            self._slow.detect(beats, now)
            if beats and len(beats) > 1 and self.exchange.is_hub
            else None
        )
        if slow is not None:
            print(f"ortlaunch: {slow.summary}", file=sys.stderr, flush=True)
            with contextlib.suppress(OSError):
                append_json_line(self.run.slow_ranks, {"time": time.time(), **slow._asdict()})

    def _report_unheard(self) -> None:
        """Print once which ranks sent no heartbeat: a loss of their hosts will look like a stall."""
        self._unheard_at = float("inf")
        if hosts := self._never_heard():
            what = (
                f"no heartbeat of {hosts} within {_UNHEARD_SECONDS:.0f} s: check that UDP is "
                "open between the hosts."
            )
            print(
                f"ortlaunch: {what} A lost host is detected only as a stall",
                file=sys.stderr,
                flush=True,
            )

    def _never_heard(self) -> str:
        never = (
            self.exchange.never_heard() if self.exchange.is_hub and self.exchange.has_met else []
        )
        hosts = ", ".join(
            f"rank {rank} on host {self._plan.node_of(rank).host}" for rank in never[:4]
        )
        return f"{hosts}{' and more' if len(never) > 4 else ''}"

    @property
    def is_cut_off(self) -> bool:
        """Whether the launcher cannot reach this host: a host is lost, or this rank gave up alone."""
        return self.lost is not None or (self.verdict is not None and not self.exchange.is_hub)

    def _own_beat(self, pid: int) -> Beat:
        self._activity = self._activity or Activity(pid)
        seen = self.pulse.read()
        host = socket.gethostname()
        stat = read_stat(pid)
        state = stat.state if stat else ""
        return Beat(self.rank.rank, host, pid, seen.step, seen.phase, seen.moves, seen.collectives, seen.still,
                    self._activity.idle(), state, seen.warm, seen.step_seconds, seen.own_seconds)  # fmt: skip

    def _begin_ending(self, verdict: Verdict, child: Child) -> None:
        self.verdict = verdict
        self.exchange.order("stacks")
        self._request_stacks(child)

    def _request_stacks(self, child: Child) -> None:
        """Get the stacks of the rank, and send them."""
        self._stacks_requested_at = time.monotonic()
        text = _py_spy(child.pid)
        child.send(signal.SIGQUIT)
        # A stopped process cannot print anything.
        child.send(signal.SIGCONT)
        wait_until(self._shown, _STACK_SECONDS)
        # The file grows while faulthandler writes it.
        time.sleep(0.05)
        self.exchange.send_stacks(self._shown() + text or "it has no stack trace\n")

    def _go_on_ending(self, child: Child) -> None:
        """After a verdict, kill the rank once all reachable ranks have sent their stacks."""
        if self._stacks_requested_at is None:
            self._request_stacks(child)
        passed = time.monotonic() - (self._stacks_requested_at or 0.0)
        if self.verdict is None:
            over = "end" in self.exchange.orders or passed > _ORDER_SECONDS
        else:
            answering = {beat.rank for beat in self.verdict.beats if not beat.is_silent}
            over = (
                not self.exchange.is_hub
                or answering <= set(self.exchange.stacks)
                or passed > _ALL_STACKS_SECONDS
            )
        if over and not self.ended_it:
            self.ended_it = True
            self._print_verdict()
            self.exchange.order("end") if self.exchange.is_hub else None
            child.send(signal.SIGKILL)

    def _print_verdict(self) -> None:
        if self.verdict is not None:
            print(f"ortlaunch: {self.summary}", file=sys.stderr, flush=True)

    @property
    def summary(self) -> str:
        """The line of the verdict, with the ranks that never sent a heartbeat."""
        assert self.verdict is not None
        unknown = f"; no heartbeat ever came from {hosts}" if (hosts := self._never_heard()) else ""
        return (
            f"{self.verdict.summary}{unknown}; exit status {EXIT_STATUS}; stacks: {self.run.errors}"
        )

    def record(self) -> None:
        """After the rank's end: record its stacks, and the verdict if this supervisor made it."""
        if self.lost is not None:
            self.lost.write_unless_recorded(self.run)
            return
        with contextlib.suppress(OSError):
            write_text_atomically(
                self.run.rank_stacks_path(self.rank.rank),
                self.exchange.stacks.get(self.rank.rank, ""),
            )
            if self.verdict is not None:
                write_json_atomically(self.run.stall, self._record_of(self.verdict))

    def _record_of(self, verdict: Verdict) -> dict[str, object]:
        first = verdict.behind[0]
        stacks = self.exchange.stacks
        late = [beat.rank for beat in verdict.behind]
        shown = "".join(
            f"rank {rank}:\n{_first_lines(stacks[rank])}" for rank in late if rank in stacks
        )
        who = {
            "rank": first.rank,
            "host": first.host,
            "pid": first.pid,
            "step": first.step,
            "phase": first.phase,
        }
        return {
            **who, "type": "Stall", "cause": Cause.HANG, "detail": verdict.summary,
            "message": verdict.summary, "summary": self.summary, "traceback": shown,
            "exit_status": EXIT_STATUS, "signal": None, "secondary": False, "time": time.time(),
            "still_seconds": round(verdict.seconds, 1), "behind": late,
            "never_heard": self.exchange.never_heard() if self.exchange.is_hub else [],
            "after": self.run.count_error_record(), "ranks": [beat._asdict() for beat in sorted(verdict.beats)],
        }  # fmt: skip

    def leave(self) -> None:
        """Announce the rank's end, after which nobody waits for it."""
        with contextlib.suppress(OSError):
            self.exchange.leave()

    def _shown(self) -> str:
        return os.pread(self._stacks, os.fstat(self._stacks).st_size, 0).decode(errors="replace")


def _first_lines(stack: str) -> str:
    """Return the innermost frames of the main thread; errors/ has all of them."""
    threads = re.split(r"\n(?=(?:Current t|T)hread 0x|py-spy:)", stack)
    # Every stack of the main thread has a frame of rank_supervisor.py, which started the rank.
    main = next((one for one in threads if "rank_supervisor.py" in one), stack)
    lines = main.strip("\n").splitlines(keepends=True)
    return "".join(lines[:_SHOWN_LINES]) + ("\n" if len(lines) <= _SHOWN_LINES else "  ...\n")


def _py_spy(pid: int) -> str:
    """Return py-spy's output, which includes C frames and idle threads.

    It is "" where py-spy is not installed or not permitted.
    """
    for program in _installed("py-spy"):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            command = [program, "dump", "--nonblocking", "--pid", str(pid)]
            ended = subprocess.run(
                command, capture_output=True, text=True, timeout=_PY_SPY_SECONDS, check=False
            )
            return f"py-spy:\n{ended.stdout}" if ended.returncode == 0 else ""
    return ""


def _installed(name: str) -> Iterator[str]:
    beside = os.path.join(os.path.dirname(sys.executable), name)
    found = beside if os.path.exists(beside) else shutil.which(name)
    yield from [found] if found else []
