"""What heartbeats cost, by themselves: processor time of a rank's marks a step, and of its guardian a second.

python benchmarks/heartbeat.py [--steps 10000] [--seconds 10] [--step-milliseconds 4] [--ranks 2048]

Two ranks that do nothing but pass the marks of a step; then two guardians that look ten times a second, beat to each
other over the loopback and read what /proc says of their ranks. Shares are of a step of `--step-milliseconds` (4 is the
tiny model of tools/stop_matrix.py without its pauses, on two cores). With --ranks rank 0's guardian hears that many
simulated ranks: how many beats arrive, which healthy ranks it takes for silent, and what it costs.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from ortlaunch.plan import Plan
from ortlaunch.planning.hosts import Host
from ortlaunch.planning.make_plan import make_plan
from ortlaunch.planning.world import World
from ortlaunch.rank import Rank
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.folder import RunDir, write_text
from ortlaunch.worker.supervision.child import Child
from ortlaunch.worker.supervision.exchange import Exchange, beat_seconds
from ortlaunch.worker.supervision.pulse import BACKWARD, FORWARD, READING, STEPPING, Pulse
from ortlaunch.worker.supervision.stall import Beat, behind
from ortlaunch.worker.supervision.watchdog import Watchdog

RECIPE = {
    "name": "beats",
    "model": {"task": "custom", "factory": "mine:model"},
    "data": {"train": {"format": "custom", "factory": "mine:data"}},
    "batch": {"micro_size": 2, "accumulation_steps": 1},
    "optimizer": {"name": "sgd", "learning_rate": 0.1},
    "train": {"max_steps": 3},
}


class Cost(NamedTuple):
    """Processor seconds."""

    marks: float
    """A step, of a rank."""
    guardian: float
    """A second."""


def main() -> None:
    options = _options()
    if options.ranks:
        _hub(options.ranks, options.seconds)
        return
    found = Cost(max(_marks(options.steps) for _ in range(2)), _guardians(options.seconds))
    step = options.step_milliseconds / 1000
    print(f"marks: {found.marks * 1e6:.2f} us a step, {found.marks / step:.3%} of a step of {step * 1000:g} ms")
    print(f"guardian: {found.guardian * 1e3:.2f} ms a second, {found.guardian:.3%} of a core")


def _marks(steps: int) -> float:
    """Of one rank."""
    pulse = Pulse()
    pulse.begin(0)
    began = time.process_time()
    for _ in range(steps):
        for stage in (READING, FORWARD, BACKWARD, STEPPING):
            pulse.at(stage)
        pulse.step()
    return (time.process_time() - began) / steps


def _guardians(seconds: float) -> float:
    """Of one of two, whose ranks sleep; what the relay of output costs is not in it."""
    with tempfile.TemporaryDirectory() as place:
        run = RunDir(Path(place))
        write_text(run.plan, _plan().to_json())
        dogs = [Watchdog(Rank(rank, 2, rank, 2), run) for rank in range(2)]
        children = [Child(_sleeper(), run, rank, None) for rank in range(2)]
        _meet(dogs)
        began = time.process_time()
        for _ in range(int(seconds * 10)):
            for dog, child in zip(dogs, children):
                dog.look(child)
            time.sleep(0.1)
        used = time.process_time() - began
        for child in children:
            child.send(9)
            os.waitpid(child.pid, 0)
    return used / seconds / len(dogs)


def _hub(ranks: int, seconds: float) -> None:
    """Rank 0's side of `ranks` whose beats come from a process of its own; its looks are ten a second."""
    hub = Exchange(Rank(0, ranks, 0, 8))
    assert hub.socket is not None
    hub.socket.bind(("127.0.0.1", 0))
    address, port = hub.socket.getsockname()
    place = {"address": address, "port": port, "host": "here", "key": "ab" * 16}
    hub.meet(place)
    sender = os.fork()
    if sender == 0:
        _beat_for(ranks, place)
    every = beat_seconds(ranks)
    ends, silent, receiving, judging = time.monotonic() + max(seconds, 4 * every), 0, 0.0, 0.0
    while time.monotonic() < ends:
        time.sleep(0.1)
        began = time.process_time()
        hub.receive()
        receiving += time.process_time() - began
    began = time.process_time()
    beats = hub.beats(_beat_of(0)) or []
    behind(beats)
    judging = time.process_time() - began
    silent = sum(beat.is_silent for beat in beats)
    os.kill(sender, 9)
    os.waitpid(sender, 0)
    print(f"{ranks} ranks, a beat every {every:.1f} s: {len(beats)} heard, {silent} taken for silent")
    print(f"rank 0's guardian: receiving {receiving / max(seconds, 4 * every):.1%} of a core, judging {judging:.4f} s")


def _beat_for(ranks: int, place: dict[str, Any]) -> None:
    """In a process of its own, which never returns: every rank's beats, spread over the seconds between two."""
    every = beat_seconds(ranks)
    others = Exchange(Rank(1, ranks, 1, 8))
    others.meet(place)
    due = [(rank / ranks * every, rank) for rank in range(1, ranks)]
    began = time.monotonic()
    while True:
        for offset, rank in due:
            time.sleep(max(0.0, began + offset - time.monotonic()))
            others.tell(_beat_of(rank))
        began += every


def _beat_of(rank: int) -> Beat:
    return Beat(rank, f"host{rank // 8}", 1, 5, "the forward pass", 100, 7, 0.1, 0.1, "R", True, 0.5, 0.1)


def _plan() -> Plan:
    world = World((Host("localhost", 2, (0, 1)),), "torchrun", "cpu", None, (), threads=1)
    return make_plan(Recipe.model_validate(RECIPE), world, modules="here", worker=("python",), environ={})


def _sleeper() -> int:
    pid = os.fork()
    if pid == 0:
        time.sleep(1000)
        os._exit(0)
    return pid


def _meet(dogs: list[Watchdog]) -> None:
    hub = dogs[0].exchange.socket
    assert hub is not None
    hub.bind(("127.0.0.1", 0))
    address, port = hub.getsockname()
    for dog in dogs:
        dog.pulse.place = {"address": address, "port": port, "host": "here", "key": "ab" * 16}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--step-milliseconds", type=float, default=4.0)
    parser.add_argument("--ranks", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
