"""One decision of all ranks at the same step's edge: to save, to stop, or neither.

A number is agreed on beside the step's own work, on a process group of its own: begun before the optimizer's step, read
after it (`benchmarks/parts.py agreement`: what it costs). With one rank nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ortlaunch.worker.process_group.distributed import DistributedContext, side_group
from ortlaunch.worker.supervision.requests import Ask, Requests


class Agreement:
    """What any rank is asked for, known to all of them at once.

    In a loop: `begin`, some work, `end`; the same calls on every rank, in the same order. `ask` is for this process's
    own reasons, such as a clock: what one rank asks for, all do.
    """

    def __init__(self, group: DistributedContext, requests: Requests) -> None:
        self.requests = requests
        self.stopped = Ask.NOTHING
        self._channel = side_group() if group.size > 1 else None
        self._number = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None

    def ask(self, what: Ask) -> None:
        """Ask all ranks, from this one."""
        self.requests.ask(what)

    def begin(self) -> None:
        """Send what this rank is asked for; does not wait."""
        if self._channel is not None:
            self._number[0] = int(self.requests.asked)
            self._work = dist.all_reduce(
                self._number, dist.ReduceOp.MAX, group=self._channel, async_op=True
            )

    def end(self) -> Ask:
        """What all ranks do now; a request that came since `begin` is the next one's.

        The first call ends a first step, so that there is something to save: signals are requests from now on.
        """
        self.requests.listen()
        if self._channel is None:
            return self.requests.asked
        assert self._work is not None, "begin() comes first"
        self._work.wait()
        return Ask(int(self._number))

    def now(self) -> Ask:
        """Both at once, after something long."""
        self.begin()
        return self.end()

    def saved(self) -> Ask:
        """A checkpoint was written: whoever asked for one has it. What all ranks are asked for now."""
        if self.requests.asked is Ask.SAVE:
            self.requests.asked = Ask.NOTHING
        return self.now()


@contextmanager
def agreement(group: DistributedContext) -> Iterator[Agreement]:
    """Open while a training may be asked for something (collective)."""
    requests = Requests()
    agreed = Agreement(group, requests)
    try:
        yield agreed
    finally:
        requests.close()
    if not agreed.stopped.stops:
        requests.take_effect()
