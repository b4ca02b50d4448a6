"""Requests of ranks become one decision at the same step; signals become requests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ortlaunch.rank import Rank
from ortlaunch.worker.process_group.agreement import accept_save_and_stop_requests
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.supervision.requests import (
    DEAF,
    LISTENING,
    SIGNAL_REQUESTS,
    RankRequest,
    RankRequests,
)

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(60)
def test_ranks_decide_the_same_at_the_same_edge(tmp_path: Path) -> None:
    """Both ranks follow the higher of their requests at the same step."""
    # Requests by rank and step.
    asks = {
        "0": {"3": "SAVE", "7": "SAVE"},
        "1": {"5": "SAVE", "7": "TERMINATE", "299": "INTERRUPT"},
    }
    (tmp_path / "plan.json").write_text(json.dumps(asks))
    # The test must not listen on an address that other hosts can reach.
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.worker.agreement_ranks"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], cwd=ROOT, env=env)
        for rank in range(2)
    ]
    try:
        assert [rank.wait(50) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    decided = [json.loads((tmp_path / f"decided_{rank}.json").read_text()) for rank in range(2)]
    assert decided[0] == decided[1]
    # A request to stop stays until a higher one replaces it.
    expected = {3: "SAVE", 5: "SAVE", **dict.fromkeys(range(7, 299), "TERMINATE"), 299: "INTERRUPT"}
    assert dict(enumerate(decided[0])) == {
        step: expected.get(step, "NOTHING") for step in range(300)
    }
    # Texts reach all ranks, arrays rank 0 alone.
    gathered = [json.loads((tmp_path / f"gathered_{rank}.json").read_text()) for rank in range(2)]
    assert [texts for texts, _ in gathered] == 2 * [[["0 é \udc80", "1 é \udc80" * 4], ["", ""]]]
    assert [arrays for _, arrays in gathered] == [
        [
            {
                "a/b": ["int16", [[0, 1, 2, 3]] * rank],
                "empty": ["float64", []],
                "c": ["bool", [rank == 1]],
            }
            for rank in range(2)
        ],
        [],
    ]
    # A collective that a profile records must end before the profile does, and this one may not.
    for rank in range(2):
        profiled = json.loads((tmp_path / f"profiled_{rank}.json").read_text())
        assert not [name for name in profiled if "gloo" in name or "c10d" in name]


def test_one_rank_decides_by_itself() -> None:
    """One rank agrees without a group; a request to save ends with a save, a stop does not."""
    with accept_save_and_stop_requests(
        DistributedContext(Rank(0, 1, 0, 1), torch.device("cpu"))
    ) as agreed:
        assert agreed.agree_on_request_now() is RankRequest.NOTHING
        agreed.add_request(RankRequest.SAVE)
        assert agreed.agree_on_request_now() is RankRequest.SAVE
        agreed.clear_save_request_and_agree()
        assert agreed.agree_on_request_now() is RankRequest.NOTHING
        agreed.add_request(RankRequest.STOP)
        agreed.add_request(RankRequest.SAVE)
        agreed.clear_save_request_and_agree()
        agreed.agreed_stop = agreed.agree_on_request_now()
        assert agreed.agreed_stop is RankRequest.STOP


ASKED = {
    signal.SIGTERM: (RankRequest.TERMINATE, 85),
    signal.SIGUSR1: (RankRequest.STOP, 85),
    signal.SIGHUP: (RankRequest.HANG_UP, 85),
    signal.SIGINT: (RankRequest.INTERRUPT, 130),
}


@pytest.mark.parametrize("number", ASKED)
def test_a_signal_is_a_request(number: signal.Signals) -> None:
    """Each signal is its request while the process listens, and has its old handler afterwards."""
    found = signal.getsignal(number)
    requests = RankRequests()
    # Under nohup the signal is ignored: requests respect that.
    if found is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
    before = signal.getsignal(number)
    requests.handle_signals_as_requests_and_tell_supervisor()
    try:
        signal.raise_signal(signal.SIGUSR2)
        assert requests.requested is RankRequest.SAVE
        signal.raise_signal(number)
    finally:
        requests.restore_former_signal_handlers_and_tell_supervisor()
    after = signal.getsignal(number)
    signal.signal(number, found)
    ask, status = ASKED[number]
    assert (requests.requested, ask.stops, ask.exit_status, ask.signal) == (
        ask,
        True,
        status,
        number,
    )
    assert after is before


def test_a_second_interrupt_is_for_the_process() -> None:
    """The first SIGINT is a request; the second ends the process, as usual."""
    requests = RankRequests()
    requests.handle_signals_as_requests_and_tell_supervisor()
    try:
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    finally:
        requests.restore_former_signal_handlers_and_tell_supervisor()


def ended_by(life: Callable[[], object]) -> int:
    """Run `life` in a child with a rank's signals; return the signal that ends it, or 0."""
    pid = os.fork()
    if pid == 0:
        for number in ASKED:
            signal.signal(number, signal.SIG_DFL)
        life()
        # The child must not return into pytest.
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


@pytest.mark.parametrize(("heard", "end"), [(True, 0), (False, signal.SIGTERM)])
def test_a_stop_between_the_last_step_and_the_export(heard: bool, end: int) -> None:
    """A stop that comes too late for an agreement ends the rank as one in the export does."""

    def life() -> None:
        with accept_save_and_stop_requests(
            DistributedContext(Rank(0, 1, 0, 1), torch.device("cpu"))
        ) as agreed:
            agreed.agree_on_request_now()
            os.kill(os.getpid(), signal.SIGTERM)
            agreed.agreed_stop = agreed.agree_on_request_now() if heard else RankRequest.NOTHING

    assert ended_by(life) == end


def test_a_loaders_worker_ignores_requests() -> None:
    """A forked child ignores requests, except SIGTERM, by which its parent may end it."""
    ignored = [number for number in SIGNAL_REQUESTS if number != signal.SIGTERM]

    def life() -> None:
        requests = RankRequests()
        requests.handle_signals_as_requests_and_tell_supervisor()
        pid = os.fork()
        if pid == 0:
            for number in (*ignored, signal.SIGTERM):
                os.kill(os.getpid(), number)
            os._exit(0)
        # This process ends by SIGKILL if a signal has ended its child.
        os.kill(os.getpid(), os.WTERMSIG(os.waitpid(pid, 0)[1]) and signal.SIGKILL)
        os._exit(int(bool(requests.requested)))

    assert ended_by(life) == signal.SIGKILL


def test_the_users_own_handler_hears_it_too() -> None:
    """The user's own handler of SIGUSR1 is called, too, and the run stops."""
    heard = []
    requests = RankRequests()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    requests.handle_signals_as_requests_and_tell_supervisor()
    try:
        signal.raise_signal(signal.SIGUSR1)
    finally:
        requests.restore_former_signal_handlers_and_tell_supervisor()
        signal.signal(signal.SIGUSR1, before)
    assert (heard, requests.requested) == ([signal.SIGUSR1], RankRequest.STOP)


def test_the_supervisor_is_told_who_listens() -> None:
    """The rank supervisor gets one message when the rank starts to listen, and one when it ends."""
    # It ends a rank that does not listen at once, and gives time to save to one that does.
    there, here = os.pipe()
    requests = RankRequests()
    requests.supervisor_fd = here
    requests.handle_signals_as_requests_and_tell_supervisor()
    requests.handle_signals_as_requests_and_tell_supervisor()
    assert os.read(there, 100) == LISTENING
    requests.restore_former_signal_handlers_and_tell_supervisor()
    requests.restore_former_signal_handlers_and_tell_supervisor()
    assert os.read(there, 100) == DEAF
