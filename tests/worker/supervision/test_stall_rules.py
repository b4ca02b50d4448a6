"""Detection of stalls: limits, ranks that are behind, and the exchange between supervisors."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ortlaunch.rank import Rank
from ortlaunch.run_folder.folder import RunDir, write_text_atomically
from ortlaunch.worker.supervision import heartbeats, stall_rules
from ortlaunch.worker.supervision.heartbeats import HeartbeatExchange, seconds_between_heartbeats
from ortlaunch.worker.supervision.pulse import (
    AUTO,
    BACKWARD,
    FORWARD,
    NEVER,
    READING,
    TRAINING,
    SharedProgress,
)
from ortlaunch.worker.supervision.slow_ranks import SlowRankDetector
from ortlaunch.worker.supervision.stall_rules import (
    MEETING,
    Heartbeat,
    heartbeats_of_ranks_behind,
    stall_limits,
    stall_verdict_or_none,
)
from ortlaunch.worker.supervision.watchdog import Watchdog, _innermost_main_thread_lines
from ortlaunch.worker.training.rebuilding import (
    COMPILING,
    register_progress_display_of_engine_rebuilds,
)
from tests.makers import plan, recipe


@pytest.fixture(autouse=True)
def _sockets_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the sockets of a test's exchanges, which a rank supervisor keeps until it ends."""
    made = []

    class Kept(socket.socket):
        def __init__(self, *arguments: int) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(socket, "socket", Kept)
    yield
    for one in made:
        one.close()


def beat(rank: int, moves: int = 9, still: float = 30.0, **fields: object) -> Heartbeat:
    """Return a rank's heartbeat in a warm step; the rank is idle for as long as it stands still."""
    known = {"host": "h", "pid": 10 + rank, "step": 6, "phase": "the backward pass", "collectives": 4, "idle": still,
             "state": "S", "warm": True, "step_seconds": 0.1, "own_seconds": 0.0}  # fmt: skip
    return Heartbeat(rank=rank, moves=moves, still=still, **{**known, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "warm", "step_seconds", "found"),
    [
        (AUTO, True, 0.1, (60.0, 600.0)),
        (AUTO, True, 30.0, (600.0, 6000.0)),
        (AUTO, False, 0.0, (600.0, float("inf"))),
        (20.0, True, 5.0, (20.0, 20.0)),
        (20.0, False, 0.0, (20.0, 600.0)),
        (NEVER, True, 1.0, (NEVER, NEVER)),
    ],
)
def test_limits(
    setting: float, warm: bool, step_seconds: float, found: tuple[float, float]
) -> None:
    """The limits depend on whether ranks are idle or busy, in training steps or elsewhere."""
    assert stall_limits(setting, warm, step_seconds) == found


@pytest.mark.parametrize(
    ("beats", "late"),
    [
        ([beat(0), beat(1, moves=8), beat(2)], [1]),
        ([beat(0), beat(1), beat(2, collectives=3)], [2]),
        ([beat(0, moves=8), beat(1, state="T")], [1]),
        ([beat(0, moves=8, state="T"), beat(1, silent=9.0)], [1]),
        ([beat(0), beat(1)], [0, 1]),
    ],
)
def test_who_is_behind(beats: list[Heartbeat], late: list[int]) -> None:
    """Silence precedes a stopped process, that precedes marks, and marks precede collectives."""
    assert [one.rank for one in heartbeats_of_ranks_behind(beats)] == late


def test_who_is_behind_is_found_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks that are behind are found in linear time."""
    reads: list[int] = []

    def passed(one: Heartbeat) -> tuple[int, int]:
        reads.append(one.rank)
        return one.moves, one.collectives

    monkeypatch.setattr(stall_rules, "_progress_order", passed)
    beats = [beat(rank, moves=9 + rank) for rank in range(2048)]
    assert [late.rank for late in heartbeats_of_ranks_behind(beats)] == [0]
    # The minimum was once computed again for each rank: four million reads of 2,048 heartbeats.
    assert len(reads) == 2 * len(beats)


@pytest.mark.parametrize(("ranks", "seconds"), [(2, 1.0), (1024, 1.0), (2048, 2.0), (8192, 8.0)])
def test_many_ranks_beat_less_often_and_are_silent_later(ranks: int, seconds: float) -> None:
    """Rank 0 gets at most 1,024 heartbeats a second; three lost ones in a row are no silence."""
    assert seconds_between_heartbeats(ranks) == seconds
    hub = HeartbeatExchange(Rank(0, ranks, 0, 1))
    hub._key = b"met"
    # Three lost heartbeats take so much longer than at one a second; then 5 s are silence.
    late = 3 * (seconds - 1.0)
    hub._last_beats = {
        1: (beat(1), time.monotonic() - late - 4.0, None),
        2: (beat(2), time.monotonic() - late - 6.0, None),
    }
    assert [one.is_silent for one in hub.heartbeats_to_judge_here_or_none(beat(0)) or []] == [
        False,
        True,
    ]


def test_a_look_takes_a_bounded_number_of_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor reads a bounded number of heartbeats a turn, and the rest in the next turn."""
    # It must also read its rank's output.
    monkeypatch.setattr(heartbeats, "_MESSAGES_AT_ONCE", 3)
    hub, *others = met(6)
    for other in others:
        other.send_heartbeat(beat(other.rank.rank))
    hub.receive_and_process_messages()
    assert len(hub._last_beats) == 3
    hub.receive_and_process_messages()
    assert len(hub._last_beats) == 5


def test_the_verdict_names_who_where_and_since_when() -> None:
    """The verdict is one line: rank, host, process, state, step, phase, and how the others wait."""
    found = stall_verdict_or_none(
        [beat(0), beat(1, moves=8, still=31.0, state="T", phase="the forward pass")], 20.0, 99.0
    )
    assert found is not None
    assert found.summary == (
        "the run has stalled for 30 s: rank 1 on host h, process 11 (stopped: SIGSTOP, or a "
        "frozen control group), in step 7, the forward pass; rank 0 waits in step 7, the "
        "backward pass"
    )
    silent = stall_verdict_or_none(
        [beat(0), beat(1, silent=30.0, phase="reading data")], 20.0, 99.0
    )
    assert silent is not None
    assert "rank 1 on host h: no heartbeat for 30 s" in silent.summary
    assert "it was last seen after step 6, reading data" in silent.summary
    alone = stall_verdict_or_none([beat(0, step=0, phase="reading data", warm=False)], 20.0, 99.0)
    assert alone is not None
    assert (
        alone.summary == "the run has stalled for 30 s: rank 0 on host h, process 10, reading data"
    )


@pytest.mark.parametrize(
    ("beats", "watched"),
    [
        # It moves on.
        ([beat(0), beat(1, still=3.0)], 99.0),
        # The supervisor itself was stopped until then.
        ([beat(0), beat(1)], 10.0),
        # A debugger holds it.
        ([beat(0), beat(1, state="t")], 99.0),
        ([beat(0, phase=MEETING, warm=False), beat(1)], 99.0),
        # It computes, in an export.
        ([beat(0, warm=False), beat(1, warm=False, moves=8, idle=1.0)], 99.0),
    ],
)
def test_what_is_no_stall(beats: list[Heartbeat], watched: float) -> None:
    """These are no stalls, with train.stall_seconds of 20."""
    assert stall_verdict_or_none(beats, 20.0, watched) is None


def test_a_rank_that_computes_has_longer() -> None:
    """A busy rank has a longer limit, except in training steps with a limit in seconds."""
    late = beat(1, moves=8, idle=0.0)
    assert stall_verdict_or_none([beat(0), late], 20.0, 99.0) is not None
    elsewhere = [one._replace(warm=False, still=700.0) for one in (beat(0), late)]
    assert stall_verdict_or_none(elsewhere, 20.0, 999.0) is not None
    assert stall_verdict_or_none(elsewhere, AUTO, 999.0) is None


def test_a_pulse_tells_where_its_rank_is() -> None:
    """A pulse shows step, stage, marks and own time of its rank across a fork."""
    pulse = SharedProgress()
    pid = os.fork()
    if pid == 0:
        pulse.begin_phase_and_count_progress("reading data")
        pulse.begin_steps(4)
        for _ in range(6):
            pulse.end_stage_and_begin_next(READING)
            time.sleep(0.02)
            pulse.end_stage_and_begin_next(FORWARD)
            pulse.end_stage_and_begin_next(BACKWARD)
            pulse.count_step_and_record_duration()
        pulse.end_stage_and_begin_next(FORWARD)
        os._exit(0)
    os.waitpid(pid, 0)
    seen = pulse.read_rank_progress()
    assert (seen.step, seen.phase, seen.progress_marks, seen.past_first_steps) == (
        10,
        "the forward pass",
        27,
        True,
    )
    assert 0.02 <= seen.step_seconds < 1
    assert 0.12 <= seen.own_seconds < 6


def met(ranks: int) -> list[HeartbeatExchange]:
    """Return the ends of supervisors that have met, through the loopback."""
    ends = [HeartbeatExchange(Rank(rank, ranks, rank, ranks)) for rank in range(ranks)]
    hub = ends[0].socket
    assert hub is not None
    hub.bind(("127.0.0.1", 0))
    address, port = hub.getsockname()
    for end in ends:
        end.connect_to_rank_0_once(
            {"address": address, "port": port, "host": "first", "key": "ab" * 16}
        )
    return ends


def test_beats_reach_rank_0_and_its_word_the_others() -> None:
    """Rank 0 judges all; others judge only when rank 0 is silent; forged messages are dropped."""
    hub, other = met(2)
    other.send_heartbeat(beat(1))
    assert hub.socket is not None
    stranger = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    # Its digest is not made with the key.
    stranger.sendto(b"0" * 16 + b'{"say": "bye", "rank": 1}', hub.socket.getsockname())
    hub.send_heartbeat(beat(0))
    hub.receive_and_process_messages()
    assert [one.rank for one in hub.heartbeats_to_judge_here_or_none(beat(0)) or []] == [0, 1]
    other.receive_and_process_messages()
    assert other.heartbeats_to_judge_here_or_none(beat(1)) is None
    other.keep_and_send_stacks("where it is")
    hub.send_order_to_all_supervisors("stacks")
    for end in (hub, other):
        end.receive_and_process_messages()
    assert (hub.stacks, other.orders[0]) == ({1: "where it is"}, "stacks")
    other.announce_rank_end()
    hub.receive_and_process_messages()
    assert [one.rank for one in hub.heartbeats_to_judge_here_or_none(beat(0)) or []] == [0]
    assert hub.ranks_without_any_heartbeat() == []


def test_rank_0s_silence_is_seen_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """If rank 0's supervisor is frozen or its link is dead, the others name rank 0 and its host."""
    hub, other = met(2)
    other.send_heartbeat(beat(1))
    hub.receive_and_process_messages()
    other.receive_and_process_messages()
    now = time.monotonic()
    monkeypatch.setattr("ortlaunch.worker.supervision.heartbeats.time.monotonic", lambda: now + 40)
    beats = other.heartbeats_to_judge_here_or_none(beat(1))
    assert beats is not None
    found = stall_verdict_or_none(beats, 20.0, 99.0)
    assert found is not None
    assert "rank 0 on host first: no heartbeat for 40 s" in found.summary
    # A regular end of rank 0 is no silence.
    other.send_heartbeat(beat(1))
    hub.receive_and_process_messages()
    hub.announce_rank_end()
    other.receive_and_process_messages()
    assert other.heartbeats_to_judge_here_or_none(beat(1)) is None


def test_a_rank_that_nobody_ever_answered_is_watched_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any answer of rank 0, a rank that computes for long is not ended for its silence."""
    # As if UDP were blocked: no message is received.
    _, other = met(2)
    now = time.monotonic()
    monkeypatch.setattr(
        "ortlaunch.worker.supervision.heartbeats.time.monotonic", lambda: now + 3600
    )
    busy = beat(1, still=3600.0, idle=0.0, warm=False, phase="exporting to ONNX Runtime")
    beats = other.heartbeats_to_judge_here_or_none(busy)
    assert beats == [busy]
    assert stall_verdict_or_none(beats, AUTO, 3600.0) is None


def test_a_datagram_that_is_refused_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused datagram is no end: rank 1's supervisor still judges when rank 0 is silent."""
    hub, other = met(2)
    other.send_heartbeat(beat(1))
    hub.receive_and_process_messages()
    other.receive_and_process_messages()
    assert hub.socket is not None
    # A closed port refuses datagrams, as a firewall may for a moment.
    hub.socket.close()
    other.send_heartbeat(beat(1))
    other.receive_and_process_messages()
    now = time.monotonic()
    monkeypatch.setattr("ortlaunch.worker.supervision.heartbeats.time.monotonic", lambda: now + 40)
    assert [one.rank for one in other.heartbeats_to_judge_here_or_none(beat(1)) or []] == [0, 1]


def test_an_export_in_mid_training_may_take_long() -> None:
    """An export in mid-training is a phase without the limit of steps and without a mark."""
    pulse = SharedProgress()
    pulse.begin_steps(4)
    pulse.count_step_and_record_duration()
    pulse.count_step_and_record_duration()
    pulse.end_stage_and_begin_next(FORWARD)
    before = pulse.read_rank_progress()
    with pulse.show_phase_until_end_without_counting_progress("compiling"):
        seen = pulse.read_rank_progress()
    assert (seen.phase, seen.past_first_steps, seen.progress_marks) == (
        "compiling",
        False,
        before.progress_marks,
    )
    assert pulse.read_rank_progress()._replace(seconds_since_mark=0) == before._replace(
        seconds_since_mark=0
    )
    waits = beat(0, still=700.0)
    builds = beat(1, moves=8, still=700.0, idle=0.0)
    assert stall_verdict_or_none([waits, builds], AUTO, 999.0) is not None
    assert (
        stall_verdict_or_none(
            [waits, builds._replace(phase=seen.phase, warm=seen.past_first_steps)], AUTO, 999.0
        )
        is None
    )


def test_torch_tells_of_a_later_compilation() -> None:
    """torch's own callbacks report a later compilation, forward and backward alike."""
    pulse = SharedProgress()
    seen = []
    register_progress_display_of_engine_rebuilds("inductor", pulse)

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        seen.append(pulse.read_rank_progress().phase)
        return graph.forward

    pulse.begin_steps(0)
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert (seen, pulse.read_rank_progress().phase) == ([COMPILING], TRAINING)


def test_a_slow_rank_is_named_once() -> None:
    """A rank with twice its peers' own time over many steps is reported once."""
    slow = SlowRankDetector()

    def at(step: int, *own: float) -> list[Heartbeat]:
        return [beat(rank, step=step, own_seconds=seconds) for rank, seconds in enumerate(own)]

    assert slow.compare_and_return_newly_slow_rank_or_none(at(2, 0.0, 0.0, 0.0), 0.0) is None
    # Too few steps.
    assert slow.compare_and_return_newly_slow_rank_or_none(at(40, 4.0, 12.0, 4.0), 60.0) is None
    found = slow.compare_and_return_newly_slow_rank_or_none(at(102, 10.0, 30.0, 10.0), 90.0)
    assert found is not None
    assert found.summary == (
        "rank 1 on host h is slow: reading batches and forward passes take it 0.3 s per step, "
        "3.0 times as long as its peers (0.1 s), over 100 steps; all others wait for it"
    )
    # Reported before.
    assert slow.compare_and_return_newly_slow_rank_or_none(at(202, 20.0, 60.0, 20.0), 200.0) is None
    # 4 ms of a step that takes a second.
    assert slow.compare_and_return_newly_slow_rank_or_none(at(302, 20.1, 60.1, 20.5), 300.0) is None


def test_the_main_threads_innermost_frames_are_shown() -> None:
    """The innermost frames of the main thread are shown, not those of a helper thread."""
    frames = "".join(f'  File "deep.py", line {n} in f\n' for n in range(30))
    stack = 'Thread 0x1 (most recent call first):\n  File "meeting.py"\n\n'
    stack += f"Thread 0x2 (most recent call first):\n{frames}"
    shown = _innermost_main_thread_lines(
        stack + '  File "/x/rank_supervisor.py", line 9 in watch\n'
    ).splitlines()
    assert shown[:2] == ["Thread 0x2 (most recent call first):", '  File "deep.py", line 0 in f']
    # The rest of a deep stack is in errors/.
    assert (len(shown), shown[-1]) == (13, "  ...")


@pytest.mark.parametrize(("task", "limit"), [("train", 30.0), ("evaluate", 30.0), ("bench", NEVER)])
def test_which_tasks_are_watched(task: str, limit: float, tmp_path: Path) -> None:
    """Tasks whose ranks run by themselves are watched; variants of a bench wait for their turns."""
    run = RunDir(tmp_path)
    write_text_atomically(run.plan, replace(plan(recipe()), task=task).to_json())
    watchdog = Watchdog(Rank(0, 1, 0, 1), run)
    watchdog.set_stall_seconds_from_recipe(30.0)
    assert watchdog.shared_progress.stall_seconds == limit
