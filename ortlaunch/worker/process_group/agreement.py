"""One decision of all ranks at the end of the same step: to save, to stop, or neither.

The ranks agree on a number while the optimizer steps, on a separate process group. The all-reduce
starts before the optimizer's step and is read after it. `benchmarks/parts.py agreement` measures
its cost. With one rank nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ortlaunch.worker.process_group.distributed import (
    DistributedContext,
    create_cpu_group_of_all_ranks,
)
from ortlaunch.worker.supervision.requests import RankRequest, RankRequests


class RankAgreement:
    """The requests of all ranks, agreed on by all of them at the same step.

    Every rank calls `begin`, does some work and calls `end`, in the same order. `add` adds a
    request of this process itself, such as that of a clock. A request of one rank applies to all.
    """

    def __init__(self, group: DistributedContext, requests: RankRequests) -> None:
        self.requests = requests
        self.agreed_stop = RankRequest.NOTHING
        self._channel = create_cpu_group_of_all_ranks() if group.size > 1 else None
        self._number = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None

    def add_request(self, request: RankRequest) -> None:
        """Add a request of this rank to all ranks."""
        self.requests.add_request(request)

    def start_request_all_reduce(self) -> None:
        """Send this rank's request; do not wait."""
        if self._channel is not None:
            self._number[0] = int(self.requests.requested)
            # A profile can end before the collective does. torch's profiler would then write into
            # freed memory at the collective's end, so it must not record it.
            torch._C._autograd._enable_record_function(False)
            try:
                # The maximum, because requests are numbered by their priority.
                self._work = dist.all_reduce(
                    self._number, dist.ReduceOp.MAX, group=self._channel, async_op=True
                )
            finally:
                torch._C._autograd._enable_record_function(True)

    def handle_signals_and_wait_for_agreed_request(self) -> RankRequest:
        """Return the agreed request of all ranks.

        A request that came after `begin` belongs to the next agreement.
        """
        # The first call ends the first step. From then on there is something to save, and signals
        # are requests instead of ending the process.
        self.requests.handle_signals_as_requests_and_tell_supervisor()
        if self._channel is None:
            return self.requests.requested
        assert self._work is not None, "begin() comes first"
        self._work.wait()
        return RankRequest(int(self._number))

    def agree_on_request_now(self) -> RankRequest:
        """Agree at once, by `begin` and `end`, after a long operation."""
        self.start_request_all_reduce()
        return self.handle_signals_and_wait_for_agreed_request()

    def clear_save_request_and_agree(self) -> RankRequest:
        """Clear a request to save, which a checkpoint has fulfilled; return the next agreement."""
        if self.requests.requested is RankRequest.SAVE:
            self.requests.requested = RankRequest.NOTHING
        return self.agree_on_request_now()


@contextmanager
def accept_save_and_stop_requests(group: DistributedContext) -> Iterator[RankAgreement]:
    """Accept requests to a training while the context is open (collective)."""
    requests = RankRequests()
    rank_agreement = RankAgreement(group, requests)
    try:
        yield rank_agreement
    finally:
        requests.restore_former_signal_handlers_and_tell_supervisor()
    # A request that came too late for any agreement.
    if not rank_agreement.agreed_stop.stops:
        requests.kill_self_by_signal_of_unanswered_stop()
