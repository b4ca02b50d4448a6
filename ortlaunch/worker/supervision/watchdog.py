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

from ortlaunch.base.cause import Cause
from ortlaunch.base.process import read_process_stat_or_none, wait_until_true_or_timeout
from ortlaunch.launch_plan import Plan
from ortlaunch.rank import Rank
from ortlaunch.run_folder.error_record import ErrorRecord
from ortlaunch.run_folder.folder import RunDir, write_text_atomically
from ortlaunch.run_folder.lines import append_json_line
from ortlaunch.run_folder.lost_host import LostHost
from ortlaunch.worker.supervision.heartbeats import HeartbeatExchange, seconds_between_heartbeats
from ortlaunch.worker.supervision.lost_host import LostHostDetector
from ortlaunch.worker.supervision.pulse import AUTO, NEVER, ProcessActivityMeter, SharedProgress
from ortlaunch.worker.supervision.rank_process import RankProcess
from ortlaunch.worker.supervision.slow_ranks import SlowRankDetector
from ortlaunch.worker.supervision.stall_rules import (
    EXIT_STATUS,
    Heartbeat,
    StallVerdict,
    stall_verdict_or_none,
)

# Of rank 0's supervisor, which judges; the others send heartbeats (heartbeats.seconds_between_heartbeats).
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
        self.shared_progress = SharedProgress()
        self.exchange = HeartbeatExchange(rank)
        self.verdict: StallVerdict | None = None
        self.lost_host: LostHost | None = None
        self.has_ended_rank = False
        self._plan = Plan.read(run.plan)
        self._stacks = os.memfd_create("stacks")
        self._beat_interval = (
            _JUDGE_SECONDS if rank.rank == 0 else seconds_between_heartbeats(rank.world_size)
        )
        self._judged_since = time.monotonic()
        # A different phase for each rank spreads the heartbeats over time.
        self._beat_at = self._judged_since - self._beat_interval * rank.rank / rank.world_size
        self._stacks_requested_at: float | None = None
        # When to report the ranks that sent no heartbeat.
        self._unheard_at = float("inf")
        self._activity: ProcessActivityMeter | None = None
        self._slow_rank_detector = SlowRankDetector()
        self._lost_hosts = LostHostDetector(socket.gethostname(), rank.rank)
        if not self._plan.traits.watched:
            self.shared_progress.stall_seconds = NEVER

    def set_stall_seconds_from_recipe(self, stall_seconds: float | str | None) -> None:
        """In the rank: apply `train.stall_seconds` of its recipe."""
        if self._plan.traits.watched:
            self.shared_progress.stall_seconds = (
                NEVER
                if stall_seconds is None
                else AUTO
                if isinstance(stall_seconds, str)
                else stall_seconds
            )

    def register_stack_dumps_on_sigquit_and_crash(self) -> None:
        """In the rank: let SIGQUIT, and crashes, print the stacks of threads from now on.

        This also works while Python is busy in C code.
        """
        faulthandler.register(signal.SIGQUIT, file=self._stacks, all_threads=True)
        # A crash in native code prints the Python stack into the rank's log. A descriptor of its own,
        # because ONNX Runtime redirects standard error during an export.
        faulthandler.enable(os.dup(2), all_threads=False)

    def exchange_heartbeats_and_end_stalled_rank(self, child: RankProcess) -> None:
        """Receive heartbeats and orders, send a heartbeat, and judge.

        It is called all the time, and does something once a second.
        """
        self.exchange.receive_and_process_messages()
        if self._stacks_requested_at is not None or self.exchange.orders:
            self._request_stacks_then_kill_rank_once_arrived(child)
        elif time.monotonic() - self._beat_at >= self._beat_interval:
            self._send_heartbeat_and_check_run(child)

    def _send_heartbeat_and_check_run(self, child: RankProcess) -> None:
        current_time = time.monotonic()
        # While suspended, this process received nothing, so silence before now has no meaning.
        if current_time - self._beat_at > self._beat_interval + _ASLEEP_SECONDS:
            self._judged_since = current_time
            self.exchange.restart_silence_clocks()
        self._beat_at = current_time
        if self.shared_progress.meeting_point and not self.exchange.has_met_rank_0:
            # The limits count from the meeting: before it, each supervisor knew only its own rank.
            self._judged_since = current_time
            self.exchange.connect_to_rank_0_once(self.shared_progress.meeting_point)
            self._unheard_at = current_time + _UNHEARD_SECONDS
        own_beat = self._measure_own_heartbeat(child.pid)
        self.exchange.send_heartbeat(own_beat)
        beats = self.exchange.heartbeats_to_judge_here_or_none(own_beat)
        self._kill_rank_if_host_is_lost(beats, child)
        self._print_and_append_slow_rank(beats, current_time)
        if current_time > self._unheard_at:
            self._print_ranks_without_heartbeat()
        verdict = (
            stall_verdict_or_none(
                beats, self.shared_progress.stall_seconds, current_time - self._judged_since
            )
            if beats
            else None
        )
        if verdict and not self.has_ended_rank:
            self.verdict = verdict
            self.exchange.send_order_to_all_supervisors("stacks")
            self._dump_and_send_stacks(child)

    def _kill_rank_if_host_is_lost(self, beats: list[Heartbeat] | None, child: RankProcess) -> None:
        """End the rank if a host is lost, for any value of `train.stall_seconds`.

        Without a host the run can neither continue nor save.
        """
        self.lost_host = self.lost_host or self._lost_hosts.detect_lost_host(
            beats or (), self.exchange.supervisor_address_by_rank()
        )
        if self.lost_host and not self.has_ended_rank:
            self.has_ended_rank = True
            child.send_signal_unless_reaped(signal.SIGKILL)

    def _print_and_append_slow_rank(
        self, beats: list[Heartbeat] | None, current_time: float
    ) -> None:
        slow_rank = (
            self._slow_rank_detector.compare_and_return_newly_slow_rank_or_none(beats, current_time)
            if beats and len(beats) > 1 and self.exchange.is_hub
            else None
        )
        if slow_rank is not None:
            print(f"ortlaunch: {slow_rank.summary}", file=sys.stderr, flush=True)
            with contextlib.suppress(OSError):
                append_json_line(self.run.slow_ranks, {"time": time.time(), **slow_rank._asdict()})

    def _print_ranks_without_heartbeat(self) -> None:
        """Print once which ranks sent no heartbeat: a loss of their hosts will look like a stall."""
        self._unheard_at = float("inf")
        if hosts := self._unheard_ranks_text_or_empty():
            warning_text = (
                f"no heartbeat of {hosts} within {_UNHEARD_SECONDS:.0f} s: check that UDP is "
                "open between the hosts."
            )
            print(
                f"ortlaunch: {warning_text} A lost host is detected only as a stall",
                file=sys.stderr,
                flush=True,
            )

    def _unheard_ranks_text_or_empty(self) -> str:
        unheard_ranks = (
            self.exchange.ranks_without_any_heartbeat()
            if self.exchange.is_hub and self.exchange.has_met_rank_0
            else []
        )
        hosts = ", ".join(
            f"rank {rank} on host {self._plan.node_of(rank).host}" for rank in unheard_ranks[:4]
        )
        return f"{hosts}{' and more' if len(unheard_ranks) > 4 else ''}"

    @property
    def is_cut_off(self) -> bool:
        """Whether the launcher cannot reach this host: a host is lost, or this rank gave up alone."""
        return self.lost_host is not None or (self.verdict is not None and not self.exchange.is_hub)

    def _measure_own_heartbeat(self, pid: int) -> Heartbeat:
        self._activity = self._activity or ProcessActivityMeter(pid)
        progress = self.shared_progress.read_rank_progress()
        host = socket.gethostname()
        stat = read_process_stat_or_none(pid)
        state = stat.state if stat else ""
        return Heartbeat(
            self.rank.rank,
            host,
            pid,
            progress.step,
            progress.phase,
            progress.progress_marks,
            progress.collective_count,
            progress.seconds_since_mark,
            self._activity.measure_idle_seconds(),
            state,
            progress.past_first_steps,
            progress.step_seconds,
            progress.own_seconds,
        )

    def _dump_and_send_stacks(self, child: RankProcess) -> None:
        self._stacks_requested_at = time.monotonic()
        text = _py_spy_stacks_or_empty(child.pid)
        child.send_signal_unless_reaped(signal.SIGQUIT)
        # A stopped process cannot print anything.
        child.send_signal_unless_reaped(signal.SIGCONT)
        wait_until_true_or_timeout(self._dumped_stacks_text, _STACK_SECONDS)
        # The file grows while faulthandler writes it.
        time.sleep(0.05)
        self.exchange.keep_and_send_stacks(
            self._dumped_stacks_text() + text or "it has no stack trace\n"
        )

    def _request_stacks_then_kill_rank_once_arrived(self, child: RankProcess) -> None:
        """After a verdict, kill the rank once all reachable ranks have sent their stacks."""
        if self._stacks_requested_at is None:
            self._dump_and_send_stacks(child)
        passed_seconds = time.monotonic() - (self._stacks_requested_at or 0.0)
        if self.verdict is None:
            is_over = "end" in self.exchange.orders or passed_seconds > _ORDER_SECONDS
        else:
            answering_ranks = {beat.rank for beat in self.verdict.beats if not beat.is_silent}
            is_over = (
                not self.exchange.is_hub
                or answering_ranks <= set(self.exchange.stacks)
                or passed_seconds > _ALL_STACKS_SECONDS
            )
        if is_over and not self.has_ended_rank:
            self.has_ended_rank = True
            if self.verdict is not None:
                print(f"ortlaunch: {self.stall_summary_line}", file=sys.stderr, flush=True)
            if self.exchange.is_hub:
                self.exchange.send_order_to_all_supervisors("end")
            child.send_signal_unless_reaped(signal.SIGKILL)

    @property
    def stall_summary_line(self) -> str:
        """The line of the verdict, with the ranks that never sent a heartbeat."""
        assert self.verdict is not None
        unknown = (
            f"; no heartbeat ever came from {hosts}"
            if (hosts := self._unheard_ranks_text_or_empty())
            else ""
        )
        return (
            f"{self.verdict.summary}{unknown}; exit status {EXIT_STATUS}; stacks: {self.run.errors}"
        )

    def write_stacks_and_stall_or_lost_host_record(self) -> None:
        """After the rank's end: record its stacks, and the verdict if this supervisor made it."""
        if self.lost_host is not None:
            self.lost_host.write_as_cause_unless_recorded(self.run)
            return
        with contextlib.suppress(OSError):
            write_text_atomically(
                self.run.rank_stacks_path(self.rank.rank),
                self.exchange.stacks.get(self.rank.rank, ""),
            )
            if self.verdict is not None:
                self._append_rank_to_run_errors_and_build_stall_record(self.verdict).write(
                    self.run.stall
                )

    def _append_rank_to_run_errors_and_build_stall_record(
        self, verdict: StallVerdict
    ) -> ErrorRecord:
        first_behind = verdict.beats_behind[0]
        stacks = self.exchange.stacks
        late_ranks = [beat.rank for beat in verdict.beats_behind]
        stacks_text = "".join(
            f"rank {rank}:\n{_innermost_main_thread_lines(stacks[rank])}"
            for rank in late_ranks
            if rank in stacks
        )
        return ErrorRecord(
            "Stall",
            Cause.HANG,
            EXIT_STATUS,
            first_behind.rank,
            first_behind.host,
            pid=first_behind.pid,
            step=first_behind.step,
            phase=first_behind.phase,
            detail=verdict.summary,
            message=verdict.summary,
            summary=self.stall_summary_line,
            traceback=stacks_text,
            time=time.time(),
            still_seconds=round(verdict.seconds, 1),
            behind=late_ranks,
            never_heard=self.exchange.ranks_without_any_heartbeat() if self.exchange.is_hub else [],
            after=self.run.append_rank_and_return_earlier_error_count(),
            ranks=[beat._asdict() for beat in sorted(verdict.beats)],
        )

    def _dumped_stacks_text(self) -> str:
        return os.pread(self._stacks, os.fstat(self._stacks).st_size, 0).decode(errors="replace")


def _innermost_main_thread_lines(stacks_text: str) -> str:
    """Return the innermost frames of the main thread; errors/ has all of them."""
    threads = re.split(r"\n(?=(?:Current t|T)hread 0x|py-spy:)", stacks_text)
    # Every stack of the main thread has a frame of rank_supervisor.py, which started the rank.
    main = next(
        (thread_stack for thread_stack in threads if "rank_supervisor.py" in thread_stack),
        stacks_text,
    )
    lines = main.strip("\n").splitlines(keepends=True)
    return "".join(lines[:_SHOWN_LINES]) + ("\n" if len(lines) <= _SHOWN_LINES else "  ...\n")


def _py_spy_stacks_or_empty(pid: int) -> str:
    """Return py-spy's output, which includes C frames and idle threads.

    It is "" where py-spy is not installed or not permitted.
    """
    folders = (os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath))
    program = shutil.which("py-spy", path=os.pathsep.join(folders))
    if program is None:
        return ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        dump = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=_PY_SPY_SECONDS,
            check=False,
        )
        return f"py-spy:\n{dump.stdout}" if dump.returncode == 0 else ""
    return ""
