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

from ortlaunch.base.process import signals_to_handle
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
        return next(
            signal_number for signal_number, request in SIGNAL_REQUESTS.items() if request is self
        )

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


class RankRequests:
    """This rank's requests that are not yet answered."""

    # Set in processes that a rank forks, such as data loader workers.
    is_forked_child = False
    # Descriptor on which the supervisor reads whether this process listens; None without one.
    supervisor_fd: int | None = None

    def __init__(self) -> None:
        self.requested = RankRequest.NOTHING
        self._former_handlers: dict[int, Any] = {}

    def add_request(self, request: RankRequest) -> None:
        """Add a request; a higher one stays."""
        self.requested = max(self.requested, request)

    def handle_signals_as_requests_and_tell_supervisor(self) -> None:
        """Treat signals as requests from now on; a second SIGINT ends this process, as usual."""
        if self._former_handlers:
            return
        for signal_number in signals_to_handle(SIGNAL_REQUESTS):
            self._former_handlers[signal_number] = signal.signal(
                signal_number, self._handler_recording_request(signal.getsignal(signal_number))
            )
        os.register_at_fork(after_in_child=self._ignore_all_but_sigterm_in_forked_child)
        self._write_to_supervisor(LISTENING)

    def restore_former_signal_handlers_and_tell_supervisor(self) -> None:
        """Restore the former signal handlers."""
        if not self._former_handlers:
            return
        self._write_to_supervisor(DEAF)
        for signal_number, handler in self._former_handlers.items():
            signal.signal(signal_number, handler)
        self._former_handlers = {}

    def kill_self_by_signal_of_unanswered_stop(self) -> None:
        """End this process by a stop request that came too late for the ranks to agree on it.

        The effect is the same as that of a signal that arrives now.
        """
        if self.requested.stops and signal.getsignal(self.requested.signal) == signal.SIG_DFL:
            os.kill(os.getpid(), self.requested.signal)

    def _handler_recording_request(
        self, user_handler: Any
    ) -> Callable[[int, FrameType | None], None]:
        """Return a handler that records a request, then calls the user's own handler, if any."""

        def record_request(signal_number: int, frame: FrameType | None) -> None:
            self.add_request(SIGNAL_REQUESTS[signal.Signals(signal_number)])
            # The next Ctrl-C has its default action and ends the process.
            if signal_number == signal.SIGINT:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
            if callable(user_handler) and user_handler is not signal.default_int_handler:
                user_handler(signal_number, frame)

        return record_request

    def _ignore_all_but_sigterm_in_forked_child(self) -> None:
        """Ignore requests in a forked process, such as a data loader worker, which is no rank.

        Only SIGTERM ends it, because its parent may send that.
        """
        RankRequests.is_forked_child = True
        for signal_number in self._former_handlers:
            signal.signal(
                signal_number, signal.SIG_DFL if signal_number == signal.SIGTERM else signal.SIG_IGN
            )

    def _write_to_supervisor(self, marker_bytes: bytes) -> None:
        if self.supervisor_fd is not None:
            # The supervisor has ended, and this process ends with it.
            with contextlib.suppress(OSError):
                os.write(self.supervisor_fd, marker_bytes)
