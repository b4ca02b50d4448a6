"""What a rank is asked for from outside while it trains: to save, or to save and stop. Standard library only.

A signal notes it here; worker/process_group/agreement.py makes it the decision of all ranks. Before a rank's first
step and after its last it does not listen: then there is nothing to save, and the signal itself ends it at once
(rank_supervisor.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from enum import IntEnum
from types import FrameType
from typing import Any

from ortlaunch.process import heeded
from ortlaunch.rank import EXIT_SAVED

LISTENING = b"listening\n"
DEAF = b"deaf\n"


class Ask(IntEnum):
    """What is asked for; the highest number of all ranks is what all of them do."""

    NOTHING = 0
    SAVE = 1
    STOP = 2  # on request, or by SIGUSR1
    TERMINATE = 3
    HANG_UP = 4
    INTERRUPT = 5  # a person's Ctrl-C

    @property
    def stops(self) -> bool:
        """Whether training ends."""
        return self >= Ask.STOP

    @property
    def signal(self) -> signal.Signals:
        """The signal that asks for it."""
        return next(number for number, ask in ASKS.items() if ask is self)

    @property
    def exit_status(self) -> int:
        """Of a run that this stopped once all was saved."""
        return 128 + signal.SIGINT if self is Ask.INTERRUPT else EXIT_SAVED


ASKS = {
    signal.SIGTERM: Ask.TERMINATE,
    signal.SIGHUP: Ask.HANG_UP,
    signal.SIGUSR1: Ask.STOP,
    signal.SIGINT: Ask.INTERRUPT,
    signal.SIGUSR2: Ask.SAVE,
}


class Requests:
    """What this rank was asked for and has not answered yet."""

    is_forked_child = False  # whether this process is one that a rank forked
    guardian: int | None = (
        None  # where this process's guardian reads whether it listens, if it has one
    )

    def __init__(self) -> None:
        self.asked = Ask.NOTHING
        self._before: dict[int, Any] = {}

    def ask(self, what: Ask) -> None:
        """Ask for something; what is greater stays."""
        self.asked = max(self.asked, what)

    def listen(self) -> None:
        """From now on signals are requests; a second SIGINT ends this process, as it does without us."""
        if self._before:
            return
        for number in heeded(ASKS):
            self._before[number] = signal.signal(number, self._handler(signal.getsignal(number)))
        os.register_at_fork(after_in_child=self._be_deaf)
        self._tell(LISTENING)

    def close(self) -> None:
        """Signals are again what they were."""
        if not self._before:
            return
        self._tell(DEAF)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def take_effect(self) -> None:
        """A stop that came too late for all ranks to agree on it ends this one, as a signal does that comes now."""
        if self.asked.stops and signal.getsignal(self.asked.signal) == signal.SIG_DFL:
            os.kill(os.getpid(), self.asked.signal)

    def _handler(self, theirs: Any) -> Callable[[int, FrameType | None], None]:
        """Notes a signal, and hands it on to the user's own code where that handled it before."""

        def note(number: int, frame: FrameType | None) -> None:
            self.ask(ASKS[signal.Signals(number)])
            if number == signal.SIGINT:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
            if callable(theirs) and theirs is not signal.default_int_handler:
                theirs(number, frame)

        return note

    def _be_deaf(self) -> None:
        """What is forked here, such as a loader's worker, is no rank: only SIGTERM ends it, as its parent may want."""
        Requests.is_forked_child = True
        for number in self._before:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)

    def _tell(self, word: bytes) -> None:
        if self.guardian is not None:
            with contextlib.suppress(OSError):  # it has ended, and this process with it
                os.write(self.guardian, word)
