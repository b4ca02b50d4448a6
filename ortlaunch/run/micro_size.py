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

from ortlaunch.base.errors import LaunchError, PlanError
from ortlaunch.base.json_types import Json
from ortlaunch.base.units import human_bytes
from ortlaunch.diagnose.conclude import conclude_run
from ortlaunch.launch import load_backend
from ortlaunch.launch.processes import forward_signals_until_job_ends, write_files_and_start_job
from ortlaunch.launch_plan import BatchPlan, Plan
from ortlaunch.planning.make_plan import plan_with_batch_memory_and_deepspeed_of_recipe
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.recipe import Recipe
from ortlaunch.resolve.prepare import write_run_files_and_clear_earlier_start
from ortlaunch.run_folder.folder import RunDir, read_json_or_raise_damaged, write_json_atomically
from ortlaunch.run_folder.verdict import Verdict

# Share of the available memory that a trial may use; two steps do not show the highest usage.
MEMORY_MARGIN = 0.9


class SizeTrial(NamedTuple):
    """The trial of one size.

    It has the verdict, the used share of the available memory (None: it ran out of memory), and
    the reason, for a person.
    """

    size: int
    fits_memory: bool
    share: float | None
    why: str


class MicroSizeSearchStopped(LaunchError):
    """Raised when a signal of the user ended the search; nothing has begun, so nothing is lost."""

    def __init__(self, verdict: Verdict, run: RunDir, saves_checkpoints: bool) -> None:
        can_start_again = (
            saves_checkpoints
            and verdict.exit_status != 128 + signal.SIGINT
            and not run.cancelled.exists()
        )
        super().__init__(verdict.message, EXIT_SAVED if can_start_again else verdict.exit_status)


def is_search_requested(recipe: Recipe) -> bool:
    """Whether the recipe requests a search for the size."""
    return recipe.batch.micro_size == "auto"


def candidate_micro_sizes(batch: BatchPlan) -> list[int]:
    """Return the micro sizes with which accumulation keeps the global batch, ascending."""
    largest = batch.global_samples // batch.data_parallel_ranks
    # Divisors come in pairs: those up to the square root give all of them.
    small_divisors = [size for size in range(1, math.isqrt(largest) + 1) if largest % size == 0]
    return sorted({*small_divisors, *(largest // size for size in small_divisors)})


def refuse_micro_size_search_in_rank() -> None:
    """Refuse the search in a rank of another launcher, which cannot start jobs of its own.

    Raises:
        PlanError: always.
    """
    raise PlanError(
        "batch.micro_size: got auto in a rank of another launcher, which cannot start trial "
        "jobs; determine the size once with `ortlaunch train` under launcher local, torchrun "
        "or mpi on such a host, and set the number that it prints"
    )


def undetermined_micro_size_lines(plan: Plan) -> list[str]:
    """Return the lines of `ortlaunch plan` on a size that is not known yet."""
    candidates = candidate_micro_sizes(plan.batch)
    shown_sizes = ", ".join(
        map(str, candidates if len(candidates) <= 12 else [*candidates[:8], "...", candidates[-1]])
    )
    lines = [
        f"micro_size: auto: `train` determines it by trial runs, from {shown_sizes}; the plan above uses 1"
    ]
    if plan.memory:
        parts = dict(plan.memory.by_stage)[plan.memory.chosen]
        lines.append(f"    each sample needs about {human_bytes(parts.activations)} of activations")
    return lines


def recorded_micro_size_or_none(recipe: Recipe, batch: BatchPlan, run: RunDir) -> int | None:
    """Return the size that an earlier start in this folder found for the same batch and ranks."""
    if not run.micro_size.exists():
        return None
    size_record = read_json_or_raise_damaged(run.micro_size)
    # A size that was found for another batch, number of ranks or sharding may not fit here.
    is_same_batch = (
        size_record["global_size"] == recipe.batch.global_size
        and size_record["ranks"] == batch.data_parallel_ranks
        and size_record["sharding"] == _sharding_sections(recipe)
    )
    return (
        int(size_record["found"])
        if is_same_batch and size_record["found"] in candidate_micro_sizes(batch)
        else None
    )


def search_and_record_largest_micro_size(recipe: Recipe, plan: Plan, run: RunDir) -> int:
    """Try sizes upward, then between the largest that fits and the smallest that does not.

    Raises:
        LaunchError: a trial failed for another reason than memory, or the smallest does not fit.
    """
    candidates = candidate_micro_sizes(plan.batch)
    trials = list[SizeTrial]()
    print(f"micro_size: auto: one trial run for each size; logs: {run.trials}", flush=True)
    # choices[fit] fits and choices[miss] does not; -1 and the length stand for none so far.
    largest_fitting_index = -1
    smallest_failing_index = len(candidates)
    candidate_index = 0
    while smallest_failing_index - largest_fitting_index > 1:
        trial = _run_micro_size_trial(recipe, plan, run, candidates[candidate_index])
        trials.append(trial)
        print(
            f"  {trial.size:>6}  {'fits' if trial.fits_memory else 'does not fit':13}{trial.why}",
            flush=True,
        )
        if trial.fits_memory:
            largest_fitting_index = candidate_index
        else:
            smallest_failing_index = candidate_index
        candidate_index = _doubled_or_bisected_candidate_index(
            candidates, largest_fitting_index, smallest_failing_index, trial.share
        )
    if largest_fitting_index < 0:
        raise LaunchError(
            f"batch.micro_size: auto: not even {candidates[0]} sample per rank fits: {trials[-1].why}"
        )
    found_size = candidates[largest_fitting_index]
    print(f"micro_size: {found_size}, determined by trial runs", flush=True)
    _write_micro_size_search_record(recipe, plan, run, found_size, trials)
    return found_size


def _doubled_or_bisected_candidate_index(
    candidates: list[int],
    largest_fitting_index: int,
    smallest_failing_index: int,
    last_trial_memory_fraction: float | None,
) -> int:
    """Return the index of the next size: double until one fails, then bisect."""
    if largest_fitting_index >= 0 and smallest_failing_index == len(candidates):
        # Memory grows no faster than the batch, so that 8 times the size still fits here.
        growth = (
            8
            if last_trial_memory_fraction is not None
            and last_trial_memory_fraction < MEMORY_MARGIN / 16
            else 2
        )
        return max(
            largest_fitting_index + 1,
            *(
                i
                for i, size in enumerate(candidates)
                if size <= growth * candidates[largest_fitting_index]
            ),
        )
    return (largest_fitting_index + smallest_failing_index) // 2


def _sharding_sections(recipe: Recipe) -> dict[str, object]:
    return recipe.model_dump(mode="json", include={"zero", "parallel"})


def _write_micro_size_search_record(
    recipe: Recipe, plan: Plan, run: RunDir, largest_fitting_size: int, trials: list[SizeTrial]
) -> None:
    value = {
        "found": largest_fitting_size,
        "global_size": recipe.batch.global_size,
        "ranks": plan.batch.data_parallel_ranks,
        "sharding": _sharding_sections(recipe),
        "margin": MEMORY_MARGIN,
    }
    write_json_atomically(run.micro_size, {**value, "tries": [trial._asdict() for trial in trials]})


def _run_micro_size_trial(
    recipe: Recipe, plan: Plan, run: RunDir, tried_micro_size: int
) -> SizeTrial:
    trial_folder = run.micro_size_trial_folder(tried_micro_size)
    log = run.micro_size_trial_folder(tried_micro_size).path / "output.txt"
    request = load_backend(plan.launcher).launch_request_of_plan(
        _write_trial_files_and_return_plan(recipe, plan, trial_folder, tried_micro_size),
        trial_folder,
    )
    # The output goes to a file: a trial has to fail at some size, and should not look like a
    # failed run.
    job = write_files_and_start_job(request._replace(notice_ends=True), log)
    verdict = conclude_run(
        trial_folder,
        forward_signals_until_job_ends(job),
        job.user_signal,
        job.foreign_signal,
        job.oom_kills,
    )
    # A signal of the user, not the memory, ended the trial.
    if job.user_signal is not None:
        raise MicroSizeSearchStopped(verdict, run, plan.traits.saves)
    if verdict.exit_status == 0:
        return _trial_result_by_memory_fraction(
            tried_micro_size, read_json_or_raise_damaged(trial_folder.trial)
        )
    if verdict.failure is None or not verdict.failure.is_or_may_be_out_of_memory:
        raise LaunchError(
            f"batch.micro_size: auto: the trial run of {tried_micro_size} failed, not because of memory:\n"
            f"{verdict.render()}\nlog: {log}"
        )
    return SizeTrial(
        tried_micro_size,
        False,
        None,
        " ".join((verdict.failure.detail or verdict.message).split())[:200],
    )


def _write_trial_files_and_return_plan(
    recipe: Recipe, plan: Plan, trial_folder: RunDir, tried_micro_size: int
) -> Plan:
    """Write a trial's folder: the run's recipe with this size, and return its plan."""
    # Two passes a step where the batch has as many: the second accumulates onto gradients.
    samples_of_pass = tried_micro_size * plan.batch.data_parallel_ranks
    passes = min(2, plan.batch.global_samples // samples_of_pass)
    batch = recipe.batch.model_copy(
        update={
            "micro_size": tried_micro_size,
            "global_size": samples_of_pass * passes,
        }
    )
    data = recipe.data.model_copy(update={"evaluation": None})
    trial_recipe = recipe.model_copy(update={"batch": batch, "data": data})
    trial_plan = replace(
        plan_with_batch_memory_and_deepspeed_of_recipe(trial_recipe, plan), task="try"
    )
    write_run_files_and_clear_earlier_start(trial_folder, trial_recipe, trial_plan)
    return trial_plan


def _trial_result_by_memory_fraction(tried_micro_size: int, trial_record: Json) -> SizeTrial:
    limit = f"{trial_record['limit']} ({human_bytes(trial_record['limit_bytes'])})"
    usage_text = (
        f"takes {human_bytes(trial_record['taken'])} of {human_bytes(trial_record['free'])} "
        f"that {limit} left to rank {trial_record['rank']}"
    )
    return SizeTrial(
        tried_micro_size,
        trial_record["share"] <= MEMORY_MARGIN,
        trial_record["share"],
        f"{usage_text}: {trial_record['share']:.0%}",
    )
