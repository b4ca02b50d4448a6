"""Variants of one recipe measured side by side, in turns, on the machine that trains them.

Every variant is a job of its own, started as `train` starts it. They take turns, A B C A B C ...,
so that a busy moment of the machine affects all of them; between its turns a job sleeps. The
control side never imports torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from ortlaunch import machine
from ortlaunch.bench.report import results, short_reason
from ortlaunch.bench.turns import Failed, OnReady, VariantJob
from ortlaunch.bench.variants import Variant, resolve_variant, variants
from ortlaunch.errors import InputError, LaunchError, OrtlaunchError, PlanError
from ortlaunch.json_types import Json
from ortlaunch.process import signals_to_handle
from ortlaunch.resolve import provenance
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.units import human_bytes

# Load average for each core above which the machine counts as busy.
_LEAST_BUSY_LOAD = 0.5
# Share of its waiting time that a job may spend on a processor.
_SPUN = 0.2
PrintLine = Callable[[str], None]


class Length(NamedTuple):
    """Length of a measurement: `rounds` turns of each variant, of `steps` optimizer steps."""

    rounds: int = 5
    steps: int = 4
    one_at_a_time: bool = False


class BenchStopped(OrtlaunchError):
    """The user stopped the bench with a signal."""

    def __init__(self, number: int) -> None:
        # The shell's convention for a process that a signal ended.
        super().__init__(f"stopped by {signal.Signals(number).name}", 128 + number)


def prepared(resolved: ResolvedRun, engines: Sequence[str], vary: Sequence[str]) -> list[Variant]:
    """Return every variant, resolved or refused.

    Raises:
        InputError: all of them are refused.
    """
    if resolved.world.inside is not None:
        raise PlanError(
            "bench starts its own ranks, and this process is already a rank of a launcher; "
            "start it outside, with the --launcher, --nproc-per-node or --hostfile of the "
            "training"
        )
    if resolved.file.recipe.batch.micro_size == "auto":
        raise PlanError(
            "batch.micro_size is auto, but variants are compared with one batch size; add "
            "batch.micro_size=NUMBER"
        )
    found = [resolve_variant(variant, resolved) for variant in variants(engines, vary)]
    if all(variant.resolved is None for variant in found):
        raise InputError("\n".join(f"{variant.name}: {variant.refused}" for variant in found))
    return found


def new_folder(out: Path | None, name: str) -> Path:
    """Create `out`, which must be new or of an unfinished bench, or else bench/<name>-<time>."""
    folder = out or Path("bench") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    # Two benches may begin in the same second.
    for path in (folder, *(Path(f"{folder}-{number}") for number in range(2, 1000) if out is None)):
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    # Empty, or of a bench that was cut short: bench.json is its last file.
    if folder.is_dir() and all(
        path.is_dir() and RunDir(path).has_only_own_files() for path in folder.iterdir()
    ):
        return folder
    raise PlanError(f"{folder}: exists already; give --out a new folder")


def measure(
    resolved: ResolvedRun,
    found: Sequence[Variant],
    length: Length,
    folder: Path,
    print_line: PrintLine,
    on_ready: OnReady = lambda _: None,
) -> Json:
    """Run the bench and return bench.json as plain values.

    Args:
        on_ready: called with each variant's job when it has warmed up for the first time; what it
            raises ends the bench.

    Raises:
        BenchStopped: by SIGINT, SIGTERM, SIGHUP or SIGUSR1; no job is left.
    """
    begun = time.time()
    load = os.getloadavg()
    _report_busy(print_line, load)
    players = [
        VariantJob(v, RunDir(folder / v.slug), on_ready) for v in found if v.resolved is not None
    ]
    length = _that_fits(length, players, print_line)
    for variant in found:
        if variant.resolved is None:
            print_line(f"{variant.name}: refused: {short_reason(variant.refused)}")
    with _stoppable():
        try:
            play(players, length, print_line)
        finally:
            for player in players:
                player.cancel()
    _report_spinning(players, print_line)
    world = resolved.world
    return {
        "format": 1,
        "name": resolved.file.recipe.name,
        "recipe": str(resolved.command.path),
        "overrides": list(resolved.file.overrides),
        "begun": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(begun)),
        "seconds": round(time.time() - begun, 1),
        **length._asdict(),
        "launcher": world.launcher,
        "device": world.device,
        "nodes": [list(node) for node in world.nodes],
        "hardware": machine.hardware_record(),
        "load": {"before": load, "after": os.getloadavg()},
        "environment": provenance.environment(),
        "variants": results(found, players),
    }


def play(players: Sequence[VariantJob], length: Length, print_line: PrintLine) -> None:
    """Warm all variants up, give each a turn `rounds` times, then compare; a failed one stays out."""
    for player in players if not length.one_at_a_time else ():
        _try(player, print_line, partial(_start, player, print_line))
    for number in range(1, length.rounds + 1):
        for player in players:
            _try(
                player,
                print_line,
                partial(_take_turn, player, length, number == length.rounds, print_line),
            )
        shown = (
            f"{p.variant.name} {sum(p.turns[-1]['seconds']) / length.steps:.4g}"
            for p in players
            if p.measured
        )
        if text := ", ".join(shown):
            print_line(f"round {number}/{length.rounds}, s/step: {text}")
    for player in players if not length.one_at_a_time else ():
        _try(player, print_line, partial(_finish, player))


def _start(player: VariantJob, print_line: PrintLine) -> None:
    player.start()
    print_line(
        f"{player.variant.name}: first step {player.ready['first_step']['since_launch']:.1f} s "
        "after its launch"
    )


def _take_turn(player: VariantJob, length: Length, last: bool, print_line: PrintLine) -> None:
    if not player.alive:
        _start(player, print_line)
    player.turn(length.steps)
    # Only one job is in memory, so it is compared in its last turn and not at the end.
    if length.one_at_a_time and last:
        _finish(player)
    elif length.one_at_a_time:
        player.leave()


def _finish(player: VariantJob) -> None:
    player.compare()
    player.leave()


def _try(player: VariantJob, print_line: PrintLine, action: Callable[[], None]) -> None:
    """Run an action of a variant; one that fails stays out from then on, and the others continue."""
    if player.failed:
        return
    try:
        action()
    except (Failed, LaunchError) as error:
        player.failed = str(error)
        print_line(f"{player.variant.name}: failed: {short_reason(str(error))}")


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Turn signals that end this process into BenchStopped, so that the jobs are ended first.

    Later signals are ignored until then.
    """
    numbers = signals_to_handle((signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1))

    def stop(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            # A second signal must not interrupt the end of the jobs.
            signal.signal(each, signal.SIG_IGN)
        raise BenchStopped(number)

    previous = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _that_fits(length: Length, players: Sequence[VariantJob], print_line: PrintLine) -> Length:
    """Return the length, with one variant at a time if this host cannot hold all of them.

    All variants stay in memory between their turns.
    """
    plans = [player.variant.resolved.plan for player in players if player.variant.resolved]
    if length.one_at_a_time or any(p.memory is None or p.device != "cpu" for p in plans):
        return length
    needed = 0
    # The least of the machine's free memory and the limits of its control groups.
    free = machine.memory_limit_with_least_free().free_bytes
    for plan in plans:
        assert plan.memory is not None
        slots = plan.nodes[0].slots
        parts = dict(plan.memory.by_stage)[plan.memory.chosen]
        needed += plan.memory.process.bytes_of_ranks(slots) + slots * parts.total
    if needed <= free:
        return length
    print_line(
        f"{len(plans)} variants would take {human_bytes(needed)} at once, and {human_bytes(free)} is free: "
        "running one at a time, restarted in every round (--one-at-a-time)"
    )
    return length._replace(one_at_a_time=True)


def _report_busy(print_line: PrintLine, load: Sequence[float]) -> None:
    """Warn if other processes make the figures noisy."""
    others = machine.busy_processes()
    cores = machine.hardware_record()["cores"] or 1
    if others or load[0] > _LEAST_BUSY_LOAD * cores:
        print_line(
            f"WARNING: this machine is busy (load {load[0]:.1f} on {cores} cores), so times are "
            f"noisy\n  busy: {', '.join(others[:3]) or 'none at this moment'}"
        )


def _report_spinning(players: Sequence[VariantJob], print_line: PrintLine) -> None:
    """Warn of a job that works while it waits: it takes time from the others."""
    for player in players:
        waits = [turn["waited"] for turn in player.turns]
        waited, worked = (
            sum(wait[key] for wait in waits) for key in ("seconds", "processor_seconds")
        )
        # Shorter waits, in seconds, are too short to judge.
        if waited > 1 and worked > _SPUN * waited:
            print_line(
                f"WARNING: {player.variant.name} used {worked:.1f} s of processor time in "
                f"{waited:.1f} s of waiting, which slowed the others; is OMP_WAIT_POLICY=active, "
                "or a thread of your model's at work?"
            )
