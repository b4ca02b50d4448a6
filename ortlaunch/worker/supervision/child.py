"""The rank's process as its guardian holds it: signals that are passed on to it, a grace, and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from ortlaunch.launchers import Launcher
from ortlaunch.process import process_space, read_stat
from ortlaunch.rank import GRACE_SECONDS, LAUNCHER_VARIABLE
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.worker.supervision.surroundings import Surroundings

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
NOTICES = (signal.SIGUSR1, signal.SIGUSR2)  # a scheduler's, to be told before the time is over
PASSED_ON = (*ENDING, *NOTICES)
_LOOK_SECONDS = 0.5  # between two looks into the run folder
_OTHERS_SECONDS = 5.0  # between two looks at the other ranks' ends: all ranks look


def be_ended_first() -> None:
    """Where memory ends, the kernel ends this process and what it forks before any other."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


class Child:
    """A process that was forked here. `asked` is the signal that first asked it to end, if any did, at `asked_at`.

    A rank that listens takes such a signal for a wish, and has its grace to save; where its run ends anyway, because
    another rank failed or its launcher is gone, it is ended at once.
    """

    def __init__(self, pid: int, run: RunDir, rank: int, grace_seconds: float | None) -> None:
        """grace_seconds: of a rank that listens; None: it has nothing to save and never does."""
        self.pid = pid
        self._parent = os.getppid()
        self._mark = run.asked(rank)
        self.saves = grace_seconds is not None
        self.grace_seconds = grace_seconds or GRACE_SECONDS
        self.surroundings = Surroundings(run, rank)
        self.asked: int | None = None
        self.asked_at = 0.0
        self.listens = False
        self.ended_by_us = False
        self.is_left_alone = False  # its launcher does not end it where another rank fails: srun
        self._next_look_at_others = time.monotonic() + _OTHERS_SECONDS
        self._others_ended = False
        self._deadline = float("inf")
        self._next_look = 0.0
        self._status: int | None = None

    def pass_on(self, number: int, frame: object = None) -> None:
        """Handle a signal to this process."""
        if number == signal.SIGUSR2 or (number == signal.SIGUSR1 and not self.saves):
            if self.listens:
                self.surroundings.save_is_asked()
            self.send(number)
            return
        again = self.asked is not None
        if not again and not self._has_ended(number):
            self._note(number)
        if self._must_end() or (again and number == signal.SIGINT):
            self._end_now(number)
        else:
            self.send(number)
            self.send(signal.SIGCONT)  # what is stopped could not end

    def hears(self, listens: bool) -> None:
        """Whether it takes signals for wishes from now on; one that came just before is said again, as such."""
        if listens and not self.listens and self.asked is not None and not self.ended_by_us:
            self._deadline += self.grace_seconds - GRACE_SECONDS
            self.send(signal.SIGUSR1)
        self.listens = listens

    def poll(self) -> int | None:
        """Its wait status once it has ended; it has to end with the launcher, and is killed when the grace is over."""
        if self._status is None:
            if os.getppid() != self._parent and self.asked is None:
                self.pass_on(signal.SIGTERM)
            if time.monotonic() > self._next_look:
                self._next_look = time.monotonic() + _LOOK_SECONDS
                self._look()
            if time.monotonic() > self._deadline:
                self.send(signal.SIGKILL)
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = status if ended else None
        return self._status

    def _look(self) -> None:
        """At what others left in the run folder."""
        if self.asked is not None:
            if not self.ended_by_us and self._must_end():
                self._end_now(self.asked)
            return
        number = self.surroundings.request(self.listens) if self.saves else None
        if number is None and self._outlives_others():
            number = signal.SIGTERM
        if number is not None:
            self.pass_on(number)

    def _outlives_others(self) -> bool:
        """Whether another rank ended some seconds ago, as this one did not by itself: it may wait for it for long."""
        if not self.is_left_alone or time.monotonic() < self._next_look_at_others:
            return False
        self._next_look_at_others = time.monotonic() + _OTHERS_SECONDS
        before = self._others_ended
        self._others_ended = self.surroundings.has_failed()
        return before and self._others_ended

    def _note(self, number: int) -> None:
        self.asked = number
        self.asked_at = time.time()
        self._deadline = time.monotonic() + (self.grace_seconds if self.listens else GRACE_SECONDS)
        with contextlib.suppress(OSError):  # mpirun may leave no time for more
            self._mark.parent.mkdir(parents=True, exist_ok=True)
            self._mark.write_text(f"{number} {self.asked_at}")

    def _must_end(self) -> bool:
        """Whether there is nothing to wait for: its launcher is gone, or the run has failed or was cancelled."""
        return os.getppid() != self._parent or self.surroundings.are_gone()

    def _end_now(self, number: int) -> None:
        if self._has_ended(0):  # by itself, of which its guardian has not heard yet
            return
        self.ended_by_us = True
        self._deadline = min(self._deadline, time.monotonic() + GRACE_SECONDS)
        self.send(
            signal.SIGKILL
            if self.listens
            else number
            if number != signal.SIGUSR1
            else signal.SIGTERM
        )
        self.send(signal.SIGCONT)
        self.surroundings.wake()

    @property
    def was_killed_late(self) -> bool:
        """Whether the grace was over when it ended."""
        return time.monotonic() > self._deadline

    def forget_request(self) -> None:
        """It has ended well all the same."""
        with contextlib.suppress(OSError):
            self._mark.unlink(missing_ok=True)

    def _has_ended(self, number: int) -> bool:
        """Whether it had ended already: the others' launcher asks all ranks once one has failed.

        Not by this signal: Slurm sends one to all processes of a step, and the rank may be gone before this one runs.
        """
        if self._status is not None:
            return not (os.WIFSIGNALED(self._status) and os.WTERMSIG(self._status) == number)
        with contextlib.suppress(ChildProcessError):  # waited for just now
            # How it has ended, where nobody has waited for it yet.
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return found is not None and (found.si_code, found.si_status) != (os.CLD_KILLED, number)
        return True

    def send(self, number: int) -> None:
        """Send it a signal, if it has not been waited for."""
        if self._status is None:  # else the number may be another process's by now
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def launcher_is_gone(environ: Mapping[str, str], launcher: Launcher) -> bool:
    """Whether ortlaunch's own launcher ended before this process could ask to be told."""
    space, _, pid = environ.get(LAUNCHER_VARIABLE, "").rpartition(" ")
    if (
        not launcher.is_ours or space != process_space()
    ):  # of another host, which started this one's launcher
        return launcher.stays_after_loss and os.getppid() == 1
    stat = read_stat(int(pid))
    return stat is None or stat.has_ended
