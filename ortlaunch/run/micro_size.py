"""`batch.micro_size: auto`: the largest micro batch that fits, found by trying before the run.

Each try is a job of its own (same launcher, ranks and device) that takes two optimizer steps, so that one that runs out
of memory ends nothing else. Sizes divide the global batch, which accumulation keeps.
"""

from __future__ import annotations

import math
import signal
from dataclasses import replace
from typing import NamedTuple

from ortlaunch.errors import LaunchError, PlanError
from ortlaunch.json_types import Json
from ortlaunch.launch import backend
from ortlaunch.launch.failure import End, explain_end
from ortlaunch.plan import BatchPlan, Plan
from ortlaunch.planning.make_plan import replan
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.recipe import Recipe
from ortlaunch.resolve.prepare import write_run
from ortlaunch.run_folder.folder import RunDir, read_json, write_json
from ortlaunch.units import human

MARGIN = 0.9  # of the room; the rest is for what two steps do not show


class Try(NamedTuple):
    """One size: whether it fits, the share of the room it took (None: it ran out), and why, for a person."""

    size: int
    fits: bool
    share: float | None
    why: str


class SearchStopped(LaunchError):
    """The user's signal ended the search; nothing has begun, so that all is saved."""

    def __init__(self, end: End, run: RunDir, saves: bool) -> None:
        super().__init__(end.last)
        again = saves and end.status != 128 + signal.SIGINT and not run.cancelled.exists()
        self.exit_status = EXIT_SAVED if again else end.status


def is_asked(recipe: Recipe) -> bool:
    """Whether a size has to be found."""
    return recipe.batch.micro_size == "auto"


def override(size: int) -> str:
    """What puts a found size into the recipe."""
    return f"batch.micro_size={size}"


def sizes(batch: BatchPlan) -> list[int]:
    """Micro sizes with which accumulation keeps the global batch, ascending."""
    most = batch.global_samples // batch.data_parallel_ranks
    small = [size for size in range(1, math.isqrt(most) + 1) if most % size == 0]
    return sorted({*small, *(most // size for size in small)})


def refuse_inside() -> None:
    """A rank of another launcher's cannot start jobs of its own.

    Raises:
        PlanError: always.
    """
    raise PlanError(
        "batch.micro_size: got auto in a rank that another launcher started, which cannot start trials of its own; "
        "find the size once with `ortlaunch train` under launcher local, torchrun or mpi on such a host, and give the "
        "number that it prints"
    )


def note(plan: Plan) -> list[str]:
    """What `ortlaunch plan` says of a size that is not known yet."""
    found = sizes(plan.batch)
    shown = ", ".join(map(str, found if len(found) <= 12 else [*found[:8], "...", found[-1]]))
    lines = [
        f"micro_size: auto: train will find it by trying, among {shown}; the plan above is for 1"
    ]
    if plan.memory:
        parts = dict(plan.memory.by_stage)[plan.memory.chosen]
        lines.append(
            f"    by the estimate each sample takes about {human(parts.activations)} of activations"
        )
    return lines


def known(recipe: Recipe, batch: BatchPlan, run: RunDir) -> int | None:
    """The size that an earlier start in this run folder found for the same global batch and ranks."""
    if not run.micro_size.exists():
        return None
    before = read_json(run.micro_size)
    same = (
        before["global_size"] == recipe.batch.global_size
        and before["ranks"] == batch.data_parallel_ranks
    )
    return int(before["found"]) if same and before["found"] in sizes(batch) else None


def find(recipe: Recipe, plan: Plan, run: RunDir) -> int:
    """Try sizes upward, then between the largest that fits and the smallest that does not.

    Raises:
        LaunchError: a try failed for another reason than memory, or not even the smallest fits.
    """
    choices = sizes(plan.batch)
    tries = list[Try]()
    print(
        f"micro_size: auto: trying, each size in a job of its own; logs: {run.trials}", flush=True
    )
    fit = -1
    miss = len(choices)
    place = 0
    while miss - fit > 1:
        done = _try(recipe, plan, run, choices[place])
        tries.append(done)
        print(
            f"  {done.size:>6}  {'fits' if done.fits else 'does not fit':13}{done.why}", flush=True
        )
        if done.fits:
            fit = place
        else:
            miss = place
        place = _next(choices, fit, miss, done.share)
    if fit < 0:
        raise LaunchError(
            f"batch.micro_size: auto: not even {choices[0]} sample a rank fits: {tries[-1].why}"
        )
    found = choices[fit]
    print(f"micro_size: {found}, found by trying", flush=True)
    _record(recipe, plan, run, found, tries)
    return found


def _next(choices: list[int], fit: int, miss: int, share: float | None) -> int:
    """Double while nothing failed, faster where much room is left; then halve what lies between."""
    if fit >= 0 and miss == len(choices):
        faster = (
            8 if share is not None and share < MARGIN / 16 else 2
        )  # memory grows no faster than the batch
        return max(fit + 1, *(i for i, size in enumerate(choices) if size <= faster * choices[fit]))
    return (fit + miss) // 2


def _record(recipe: Recipe, plan: Plan, run: RunDir, found: int, tries: list[Try]) -> None:
    value = {
        "found": found,
        "global_size": recipe.batch.global_size,
        "ranks": plan.world_size,
        "margin": MARGIN,
    }
    write_json(run.micro_size, {**value, "tries": [one._asdict() for one in tries]})


def _try(recipe: Recipe, plan: Plan, run: RunDir, size: int) -> Try:
    trial = run.trial_of(size)
    log = run.trial_of(size).path / "output.txt"
    launcher = backend(plan.launcher)
    request = launcher.request(_write(recipe, plan, trial, size), trial)
    # Its output is in a file: a try that fails, as one must, should not look like a failed run.
    job = launcher.submit(request._replace(notice_ends=True), log)
    end = explain_end(trial, launcher.wait(job), job.signal, job.ended_by, job.oom_kills)
    if job.signal is not None:
        raise SearchStopped(end, run, plan.traits.saves)
    if end.status == 0:
        return _judged(size, read_json(trial.trial))
    if end.failure is None or not end.failure.may_be_memory:
        raise LaunchError(
            f"batch.micro_size: auto: the try of {size} failed, and not for memory:\n{end.text}\nlog: {log}"
        )
    return Try(size, False, None, " ".join((end.failure.detail or end.last).split())[:200])


def _write(recipe: Recipe, plan: Plan, trial: RunDir, size: int) -> Plan:
    """The folder of a try: the run's own recipe with this size, two passes a step where the batch has as many."""
    passes = min(2, plan.batch.global_samples // (size * plan.world_size))
    batch = recipe.batch.model_copy(
        update={"micro_size": size, "global_size": size * passes * plan.world_size}
    )
    data = recipe.data.model_copy(update={"evaluation": None})
    small = recipe.model_copy(update={"batch": batch, "data": data})
    tried = replace(replan(small, plan), task="try")
    write_run(trial, small, tried)
    return tried


def _judged(size: int, said: Json) -> Try:
    limit = f"{said['limit']} ({human(said['limit_bytes'])})"
    taken = f"takes {human(said['taken'])} of {human(said['free'])} that {limit} left to rank {said['rank']}"
    return Try(size, said["share"] <= MARGIN, said["share"], f"{taken}: {said['share']:.0%}")
