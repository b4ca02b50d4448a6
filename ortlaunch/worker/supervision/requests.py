"""Requests to a rank while it trains: to save, or to save and stop. Standard library only.

A signal records a request here; worker/process_group/agreement.py turns it into a decision of all
ranks. Before its first step and after its last, a rank does not listen: there is nothing to save
then, and the signal ends it at once (rank_supervisor.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from enum import IntEnum
from types import FrameType
from typing import Any

from ortlaunch.process import signals_to_handle
from ortlaunch.rank import EXIT_SAVED

LISTENING = b"listening\n"
DEAF = b"deaf\n"


class RankRequest(IntEnum):
    """A request; all ranks follow the highest value of any rank."""

    NOTHING = 0
    SAVE = 1
    # By `ortlaunch stop`, or by SIGUSR1.
    STOP = 2
    TERMINATE = 3
    HANG_UP = 4
    # Ctrl-C.
    INTERRUPT = 5

    @property
    def stops(self) -> bool:
        """Whether training ends."""
        return self >= RankRequest.STOP

    @property
    def signal(self) -> signal.Signals:
        """The signal for this request."""
        return next(number for number, ask in SIGNAL_REQUESTS.items() if ask is self)

    @property
    def exit_status(self) -> int:
        """The exit status of a run that this request stopped, once all was saved."""
        return 128 + signal.SIGINT if self is RankRequest.INTERRUPT else EXIT_SAVED


SIGNAL_REQUESTS = {
    signal.SIGTERM: RankRequest.TERMINATE,
    signal.SIGHUP: RankRequest.HANG_UP,
    signal.SIGUSR1: RankRequest.STOP,
    signal.SIGINT: RankRequest.INTERRUPT,
    signal.SIGUSR2: RankRequest.SAVE,
}


class Requests:
    """This rank's requests that are not yet answered."""

    # Set in processes that a rank forks, such as data loader workers.
    is_forked_child = False
    # Descriptor on which the supervisor reads whether this process listens; None without one.
    supervisor_fd: int | None = None

    def __init__(self) -> None:
        self.requested = RankRequest.NOTHING
        self._before: dict[int, Any] = {}

    def add(self, request: RankRequest) -> None:
        """Add a request; a higher one stays."""
        self.requested = max(self.requested, request)

    def listen(self) -> None:
        """Treat signals as requests from now on; a second SIGINT ends this process, as usual."""
        if self._before:
            return
        for number in signals_to_handle(SIGNAL_REQUESTS):
            self._before[number] = signal.signal(number, self._handler(signal.getsignal(number)))
        os.register_at_fork(after_in_child=self._be_deaf)
        self._send(LISTENING)

    def close(self) -> None:
        """Restore the former signal handlers."""
        if not self._before:
            return
        self._send(DEAF)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def take_effect(self) -> None:
        """End this process by a stop request that came too late for the ranks to agree on it.

        The effect is the same as that of a signal that arrives now.
        """
        if self.requested.stops and signal.getsignal(self.requested.signal) == signal.SIG_DFL:
            os.kill(os.getpid(), self.requested.signal)

    def _handler(self, theirs: Any) -> Callable[[int, FrameType | None], None]:
        """Return a handler that records a request, then calls the user's own handler, if any."""

        def note(number: int, frame: FrameType | None) -> None:
            self.add(SIGNAL_REQUESTS[signal.Signals(number)])
            # The next Ctrl-C has its default action and ends the process.
            if number == signal.SIGINT:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
            if callable(theirs) and theirs is not signal.default_int_handler:
                theirs(number, frame)

        return note

    def _be_deaf(self) -> None:
        """Ignore requests in a forked process, such as a data loader worker, which is no rank.

        Only SIGTERM ends it, because its parent may send that.
        """
        Requests.is_forked_child = True
        for number in self._before:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)

    def _send(self, word: bytes) -> None:
        if self.supervisor_fd is not None:
            # The supervisor has ended, and this process ends with it.
            with contextlib.suppress(OSError):
                os.write(self.supervisor_fd, word)
