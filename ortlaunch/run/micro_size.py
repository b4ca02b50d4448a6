"""`batch.micro_size: auto`: find the largest micro batch that fits, by trials before the run.

Each trial is a job of its own (same launcher, ranks and device) of two optimizer steps, so that one
that runs out of memory ends nothing else. The sizes divide the global batch, which accumulation
keeps constant.
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
from ortlaunch.launch_plan import BatchPlan, Plan
from ortlaunch.planning.make_plan import replan
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.recipe import Recipe
from ortlaunch.resolve.prepare import write_run
from ortlaunch.run_folder.folder import RunDir, read_json, write_json
from ortlaunch.units import human

# Share of the available memory that a trial may use; two steps do not show the highest usage.
MARGIN = 0.9


class Try(NamedTuple):
    """The trial of one size.

    It has the verdict, the used share of the available memory (None: it ran out of memory), and
    the reason, for a person.
    """

    size: int
    fits: bool
    share: float | None
    why: str


class SearchStopped(LaunchError):
    """Raised when a signal of the user ended the search; nothing has begun, so nothing is lost."""

    def __init__(self, end: End, run: RunDir, saves: bool) -> None:
        again = saves and end.status != 128 + signal.SIGINT and not run.cancelled.exists()
        super().__init__(end.last, EXIT_SAVED if again else end.status)


def is_requested(recipe: Recipe) -> bool:
    """Whether the recipe requests a search for the size."""
    return recipe.batch.micro_size == "auto"


def override(size: int) -> str:
    """Return the override that sets the size in the recipe."""
    return f"batch.micro_size={size}"


def sizes(batch: BatchPlan) -> list[int]:
    """Return the micro sizes with which accumulation keeps the global batch, ascending."""
    most = batch.global_samples // batch.data_parallel_ranks
    # Divisors come in pairs: those up to the square root give all of them.
    small = [size for size in range(1, math.isqrt(most) + 1) if most % size == 0]
    return sorted({*small, *(most // size for size in small)})


def refuse_inside() -> None:
    """Refuse the search in a rank of another launcher, which cannot start jobs of its own.

    Raises:
        PlanError: always.
    """
    raise PlanError(
        "batch.micro_size: got auto in a rank of another launcher, which cannot start trial "
        "jobs; determine the size once with `ortlaunch train` under launcher local, torchrun "
        "or mpi on such a host, and set the number that it prints"
    )


def note(plan: Plan) -> list[str]:
    """Return the lines of `ortlaunch plan` on a size that is not known yet."""
    found = sizes(plan.batch)
    shown = ", ".join(map(str, found if len(found) <= 12 else [*found[:8], "...", found[-1]]))
    lines = [
        f"micro_size: auto: `train` determines it by trial runs, from {shown}; the plan above uses 1"
    ]
    if plan.memory:
        parts = dict(plan.memory.by_stage)[plan.memory.chosen]
        lines.append(f"    each sample needs about {human(parts.activations)} of activations")
    return lines


def recorded_size(recipe: Recipe, batch: BatchPlan, run: RunDir) -> int | None:
    """Return the size that an earlier start in this folder found for the same batch and ranks."""
    if not run.micro_size.exists():
        return None
    before = read_json(run.micro_size)
    # A size that was found for another batch or number of ranks may not fit here.
    same = (
        before["global_size"] == recipe.batch.global_size
        and before["ranks"] == batch.data_parallel_ranks
    )
    return int(before["found"]) if same and before["found"] in sizes(batch) else None


def find(recipe: Recipe, plan: Plan, run: RunDir) -> int:
    """Try sizes upward, then between the largest that fits and the smallest that does not.

    Raises:
        LaunchError: a trial failed for another reason than memory, or the smallest does not fit.
    """
    choices = sizes(plan.batch)
    tries = list[Try]()
    print(f"micro_size: auto: one trial run for each size; logs: {run.trials}", flush=True)
    # choices[fit] fits and choices[miss] does not; -1 and the length stand for none so far.
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
            f"batch.micro_size: auto: not even {choices[0]} sample per rank fits: {tries[-1].why}"
        )
    found = choices[fit]
    print(f"micro_size: {found}, determined by trial runs", flush=True)
    _record(recipe, plan, run, found, tries)
    return found


def _next(choices: list[int], fit: int, miss: int, share: float | None) -> int:
    """Return the index of the next size: double until one fails, then bisect."""
    if fit >= 0 and miss == len(choices):
        # Memory grows no faster than the batch, so that 8 times the size still fits here.
        faster = 8 if share is not None and share < MARGIN / 16 else 2
        return max(fit + 1, *(i for i, size in enumerate(choices) if size <= faster * choices[fit]))
    return (fit + miss) // 2


def _record(recipe: Recipe, plan: Plan, run: RunDir, found: int, tries: list[Try]) -> None:
    value = {
        "found": found,
        "global_size": recipe.batch.global_size,
        "ranks": plan.batch.data_parallel_ranks,
        "margin": MARGIN,
    }
    write_json(run.micro_size, {**value, "tries": [one._asdict() for one in tries]})


def _try(recipe: Recipe, plan: Plan, run: RunDir, size: int) -> Try:
    trial = run.trial_of(size)
    log = run.trial_of(size).path / "output.txt"
    launcher = backend(plan.launcher)
    request = launcher.request(_write(recipe, plan, trial, size), trial)
    # The output goes to a file: a trial has to fail at some size, and should not look like a
    # failed run.
    job = launcher.submit(request._replace(notice_ends=True), log)
    end = explain_end(trial, launcher.wait(job), job.signal, job.ended_by, job.oom_kills)
    # A signal of the user, not the memory, ended the trial.
    if job.signal is not None:
        raise SearchStopped(end, run, plan.traits.saves)
    if end.status == 0:
        return _judged(size, read_json(trial.trial))
    if end.failure is None or not end.failure.may_be_memory:
        raise LaunchError(
            f"batch.micro_size: auto: the trial run of {size} failed, not because of memory:\n"
            f"{end.text}\nlog: {log}"
        )
    return Try(size, False, None, " ".join((end.failure.detail or end.last).split())[:200])


def _write(recipe: Recipe, plan: Plan, trial: RunDir, size: int) -> Plan:
    """Write a trial's folder: the run's recipe with this size, and return its plan."""
    # Two passes a step where the batch has as many: the second accumulates onto gradients.
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
    taken = (
        f"takes {human(said['taken'])} of {human(said['free'])} "
        f"that {limit} left to rank {said['rank']}"
    )
    return Try(size, said["share"] <= MARGIN, said["share"], f"{taken}: {said['share']:.0%}")
