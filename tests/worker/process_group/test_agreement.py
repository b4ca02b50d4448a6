"""What ranks are asked for becomes one decision at the same edge; what one process hears of signals."""

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
from ortlaunch.worker.process_group.agreement import agreement
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.supervision.requests import ASKS, DEAF, LISTENING, Ask, Requests

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(60)
def test_ranks_decide_the_same_at_the_same_edge(tmp_path: Path) -> None:
    """Whichever rank is asked, and also where both are asked for different things: the greater holds for both."""
    asks = {
        "0": {"3": "SAVE", "7": "SAVE"},
        "1": {"5": "SAVE", "7": "TERMINATE", "299": "INTERRUPT"},
    }
    (tmp_path / "plan.json").write_text(json.dumps(asks))
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
    expected = {3: "SAVE", 5: "SAVE", **dict.fromkeys(range(7, 299), "TERMINATE"), 299: "INTERRUPT"}
    assert dict(enumerate(decided[0])) == {
        step: expected.get(step, "NOTHING") for step in range(300)
    }


def test_one_rank_decides_by_itself() -> None:
    """Without a group; a save is asked for once, a stop until the end."""
    with agreement(DistributedContext(Rank(0, 1, 0, 1), torch.device("cpu"))) as agreed:
        assert agreed.now() is Ask.NOTHING
        agreed.ask(Ask.SAVE)
        assert agreed.now() is Ask.SAVE
        agreed.saved()
        assert agreed.now() is Ask.NOTHING
        agreed.ask(Ask.STOP)
        agreed.ask(Ask.SAVE)
        agreed.saved()
        agreed.stopped = agreed.now()
        assert agreed.stopped is Ask.STOP


ASKED = {
    signal.SIGTERM: (Ask.TERMINATE, 85),
    signal.SIGUSR1: (Ask.STOP, 85),
    signal.SIGHUP: (Ask.HANG_UP, 85),
    signal.SIGINT: (Ask.INTERRUPT, 130),
}


@pytest.mark.parametrize("number", ASKED)
def test_a_signal_is_a_request(number: signal.Signals) -> None:
    """Each that asks for an end is a stop; once nobody listens any more it is what it was."""
    found = signal.getsignal(number)
    requests = Requests()
    if found is signal.SIG_IGN:  # nohup's tests: it is heeded, and would be no request
        signal.signal(number, signal.SIG_DFL)
    before = signal.getsignal(number)
    requests.listen()
    try:
        signal.raise_signal(signal.SIGUSR2)
        assert requests.asked is Ask.SAVE
        signal.raise_signal(number)
    finally:
        requests.close()
    after = signal.getsignal(number)
    signal.signal(number, found)
    ask, status = ASKED[number]
    assert (requests.asked, ask.stops, ask.exit_status, ask.signal) == (ask, True, status, number)
    assert after is before


def test_a_second_interrupt_is_for_the_process() -> None:
    """The first is a request, the second ends the process as Ctrl-C does without us."""
    requests = Requests()
    requests.listen()
    try:
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    finally:
        requests.close()


def ended_by(life: Callable[[], object]) -> int:
    """The signal that ends a process that lives so with signals as a rank has them; 0: none does."""
    pid = os.fork()
    if pid == 0:
        for number in ASKED:
            signal.signal(number, signal.SIG_DFL)
        life()
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


@pytest.mark.parametrize(("heard", "end"), [(True, 0), (False, signal.SIGTERM)])
def test_a_stop_between_the_last_step_and_the_export(heard: bool, end: int) -> None:
    """Too late for an agreement, it ends the rank as one that comes in the export; one that was agreed on does not."""

    def life() -> None:
        with agreement(DistributedContext(Rank(0, 1, 0, 1), torch.device("cpu"))) as agreed:
            agreed.now()
            os.kill(os.getpid(), signal.SIGTERM)
            agreed.stopped = agreed.now() if heard else Ask.NOTHING

    assert ended_by(life) == end


def test_a_loaders_worker_ignores_requests() -> None:
    """What a rank forks is no rank: SIGTERM alone, by which its parent may end it, is for it."""
    ignored = [number for number in ASKS if number != signal.SIGTERM]

    def life() -> None:
        requests = Requests()
        requests.listen()
        pid = os.fork()
        if pid == 0:
            for number in (*ignored, signal.SIGTERM):
                os.kill(os.getpid(), number)
            os._exit(0)
        os.kill(os.getpid(), os.WTERMSIG(os.waitpid(pid, 0)[1]) and signal.SIGKILL)
        os._exit(int(bool(requests.asked)))

    assert ended_by(life) == signal.SIGKILL


def test_the_users_own_handler_hears_it_too() -> None:
    """A script that handles SIGUSR1 itself goes on to hear it, and the run stops."""
    heard = []
    requests = Requests()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    requests.listen()
    try:
        signal.raise_signal(signal.SIGUSR1)
    finally:
        requests.close()
        signal.signal(signal.SIGUSR1, before)
    assert (heard, requests.asked) == ([signal.SIGUSR1], Ask.STOP)


def test_the_guardian_is_told_who_listens() -> None:
    """It ends at once what does not listen, and leaves what does its time to save."""
    there, here = os.pipe()
    requests = Requests()
    requests.guardian = here
    requests.listen()
    requests.listen()
    assert os.read(there, 100) == LISTENING
    requests.close()
    requests.close()
    assert os.read(there, 100) == DEAF
