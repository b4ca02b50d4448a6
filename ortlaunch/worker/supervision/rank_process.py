"""The rank's process, seen from its supervisor: passed-on signals, the grace period and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from ortlaunch.base.process import process_space, read_process_stat_or_none
from ortlaunch.rank import GRACE_SECONDS, LAUNCHER_VARIABLE
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.tables.launchers import Launcher
from ortlaunch.worker.supervision.run_folder_watcher import RunFolderWatcher

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Schedulers send these some time before a job's limit, as an early warning.
NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
PASSED_ON = (*ENDING, *NOTICES)
# Seconds between two reads of the run folder.
_CHECK_SECONDS = 0.5
# Seconds between two reads of the other ranks' ends. Longer, because every rank reads them.
_OTHERS_SECONDS = 5.0


def make_oom_killer_prefer_this_process() -> None:
    """Let the kernel's out-of-memory killer pick this process and its children before any other."""
    with contextlib.suppress(OSError):
        # 1000 is the maximum of oom_score_adj. Raising the score needs no privilege.
        Path("/proc/self/oom_score_adj").write_text("1000")


class RankProcess:
    """A process that was forked here.

    `first_signal` is the first that requested its end, if any, received at `signalled_at`.

    A rank that listens treats such a signal as a request and has a grace period in which to save.
    The rank is ended at once where its run ends anyway, because another rank failed or its
    launcher is gone.
    """

    def __init__(self, pid: int, run: RunDir, rank: int, grace_seconds: float | None) -> None:
        """Watch the process `pid`; grace_seconds is None for a rank that never saves."""
        self.pid = pid
        # A later change of the parent shows that the launcher has ended.
        self._parent = os.getppid()
        self.run = run
        self.rank = rank
        self.can_save = grace_seconds is not None
        self.grace_seconds = grace_seconds or GRACE_SECONDS
        self.run_surroundings = RunFolderWatcher(run, rank)
        self.first_signal: int | None = None
        self.signalled_at = 0.0
        self.is_listening = False
        self.was_ended_by_us = False
        # srun does not end this rank when another rank fails.
        self.must_watch_other_ranks = False
        self._next_look_at_others = time.monotonic() + _OTHERS_SECONDS
        self._others_ended = False
        self._deadline = float("inf")
        self._next_check = 0.0
        self._status: int | None = None

    def handle_or_pass_on_signal(self, signal_number: int, frame: object = None) -> None:
        """Handle a signal that was sent to this process."""
        if signal_number == signal.SIGUSR2 or (
            signal_number == signal.SIGUSR1 and not self.can_save
        ):
            if self.is_listening:
                self.run_surroundings.remember_save_request_as_passed_on()
            self.send_signal_unless_reaped(signal_number)
            return
        # A second Ctrl-C ends the rank without waiting for its save.
        is_repeated = self.first_signal is not None
        if not is_repeated and not self._had_ended_otherwise_than_by_signal(signal_number):
            self._write_stop_file_and_start_grace(signal_number)
        if self._is_launcher_gone_or_run_ending() or (
            is_repeated and signal_number == signal.SIGINT
        ):
            self._end_rank_by_signal_or_kill(signal_number)
        else:
            self.send_signal_unless_reaped(signal_number)
            # A stopped process handles no signal before SIGCONT.
            self.send_signal_unless_reaped(signal.SIGCONT)

    def set_listening_and_resend_request(self, is_listening: bool) -> None:
        """Record whether the rank handles signals as requests from now on.

        A request that arrived just before is sent again as SIGUSR1, so that the rank saves.
        """
        if (
            is_listening
            and not self.is_listening
            and self.first_signal is not None
            and not self.was_ended_by_us
        ):
            # A listening rank has launch.grace_seconds in place of the default grace period.
            self._deadline += self.grace_seconds - GRACE_SECONDS
            self.send_signal_unless_reaped(signal.SIGUSR1)
        self.is_listening = is_listening

    def poll_wait_status_and_enforce_end(self) -> int | None:
        """Return the rank's wait status once it has ended, else None.

        The rank is ended together with its launcher, and is killed when the grace period is over.
        """
        if self._status is None:
            if os.getppid() != self._parent and self.first_signal is None:
                self.handle_or_pass_on_signal(signal.SIGTERM)
            if time.monotonic() > self._next_check:
                self._next_check = time.monotonic() + _CHECK_SECONDS
                self._signal_rank_if_requested_or_run_is_ending()
            if time.monotonic() > self._deadline:
                self.send_signal_unless_reaped(signal.SIGKILL)
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = status if ended else None
        return self._status

    def _signal_rank_if_requested_or_run_is_ending(self) -> None:
        """Act on requests and failures that other processes recorded in the run folder."""
        if self.first_signal is not None:
            if not self.was_ended_by_us and self._is_launcher_gone_or_run_ending():
                self._end_rank_by_signal_or_kill(self.first_signal)
            return
        signal_number = (
            self.run_surroundings.signal_of_new_request_or_none(self.is_listening)
            if self.can_save
            else None
        )
        if signal_number is None and self._poll_twice_whether_other_rank_ended():
            signal_number = signal.SIGTERM
        if signal_number is not None:
            self.handle_or_pass_on_signal(signal_number)

    def _poll_twice_whether_other_rank_ended(self) -> bool:
        """Return whether another rank ended seconds ago: this one may wait for it for long."""
        if not self.must_watch_other_ranks or time.monotonic() < self._next_look_at_others:
            return False
        self._next_look_at_others = time.monotonic() + _OTHERS_SECONDS
        # Two reads in a row, so that a rank that is just ending by itself is not ended from here.
        had_others_ended = self._others_ended
        self._others_ended = self.run_surroundings.has_another_rank_recorded_end()
        return had_others_ended and self._others_ended

    def _write_stop_file_and_start_grace(self, signal_number: int) -> None:
        self.first_signal = signal_number
        self.signalled_at = time.time()
        self._deadline = time.monotonic() + (
            self.grace_seconds if self.is_listening else GRACE_SECONDS
        )
        # One short write: mpirun may leave no time for more.
        with contextlib.suppress(OSError):
            stop_mark = self.run.signal_mark_path(self.rank)
            stop_mark.parent.mkdir(parents=True, exist_ok=True)
            stop_mark.write_text(f"{signal_number} {self.signalled_at}")

    def _is_launcher_gone_or_run_ending(self) -> bool:
        """Return whether waiting is useless: no launcher any more, or a failed or cancelled run."""
        return os.getppid() != self._parent or self.run_surroundings.is_run_ending()

    def _end_rank_by_signal_or_kill(self, signal_number: int) -> None:
        # It may have ended by itself before its supervisor was notified.
        if self._had_ended_otherwise_than_by_signal(0):
            return
        self.was_ended_by_us = True
        self._deadline = min(self._deadline, time.monotonic() + GRACE_SECONDS)
        # A listening rank treats every other signal as a request. Others may ignore SIGUSR1.
        self.send_signal_unless_reaped(
            signal.SIGKILL
            if self.is_listening
            else signal_number
            if signal_number != signal.SIGUSR1
            else signal.SIGTERM
        )
        self.send_signal_unless_reaped(signal.SIGCONT)
        self.run_surroundings.send_sigcont_to_run_processes()

    @property
    def is_grace_period_over(self) -> bool:
        """Whether the grace period was over when the rank ended."""
        return time.monotonic() > self._deadline

    def delete_stop_file(self) -> None:
        """Delete the record of the request, because the rank finished successfully."""
        with contextlib.suppress(OSError):
            self.run.signal_mark_path(self.rank).unlink(missing_ok=True)

    def _had_ended_otherwise_than_by_signal(self, signal_number: int) -> bool:
        """Return whether the rank had ended before the signal `signal_number` came, not by that signal.

        Once one rank has failed, its launcher signals all ranks, also those that ended earlier.
        Slurm sends a signal to all processes of a step, so the rank may die of it before this
        process handles it.
        """
        if self._status is not None:
            return not (os.WIFSIGNALED(self._status) and os.WTERMSIG(self._status) == signal_number)
        # The error means that its status was just read. WNOWAIT leaves the status to poll().
        with contextlib.suppress(ChildProcessError):
            wait_result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return wait_result is not None and (wait_result.si_code, wait_result.si_status) != (
                os.CLD_KILLED,
                signal_number,
            )
        return True

    def send_signal_unless_reaped(self, signal_number: int) -> None:
        """Send a signal to the process, if it has not been waited for."""
        # After the wait, the process id may belong to another process.
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal_number)


def was_launcher_gone_at_start(environ: Mapping[str, str], launcher: Launcher) -> bool:
    """Return whether ortlaunch's own launcher ended before this process could watch it."""
    recorded_space, _, pid = environ.get(LAUNCHER_VARIABLE, "").rpartition(" ")
    # Another process space is another host, where a remote launcher started this process.
    if not launcher.is_ours or recorded_space != process_space():
        return launcher.stays_after_loss and os.getppid() == 1
    process_stat = read_process_stat_or_none(int(pid))
    return process_stat is None or process_stat.has_ended
