"""The predicted and measured seconds of a step and memory of a rank, by engine, in the cache.

The worker writes predictions (worker/engine/prediction.py) and plans read them. Each run adds what
it measured, which corrects them, and by which `engine: auto` chooses for a short run.
"""

from __future__ import annotations

import math
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from ortlaunch.base.cache import (
    cache_file_path_by_hashed_key,
    create_private_cache_folder_or_refuse,
)
from ortlaunch.base.errors import DamagedFile, FileError
from ortlaunch.base.json_types import Json
from ortlaunch.base.machine import hardware_record, threads_per_rank
from ortlaunch.launch_plan import BatchPlan, Plan
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.folder import read_json_or_raise_damaged, write_json_atomically
from ortlaunch.version import __version__


def cached_prediction_path(recipe: Recipe, plan: Plan) -> Path:
    """Return the file of the cache for the predictions of this model, batch and machine."""
    thread_count = plan.threads or threads_per_rank(plan.nodes[0].slots)
    return _record_path(recipe, plan.device, thread_count, plan.batch)


def _record_path(recipe: Recipe, device: str, thread_count: int, batch: BatchPlan) -> Path:
    # Everything that decides the rates of operators.
    rate_values = {
        "device": device, "threads": thread_count, "hardware": hardware_record(),
        "precision": recipe.precision, "torch": version("torch"), "ortlaunch": __version__,
    }  # fmt: skip
    recipe_values = recipe.model_dump(mode="json")
    model_values = [
        recipe_values["model"],
        recipe_values["data"],
        recipe_values["optimizer"],
        recipe.engine.chunked_loss,
        # Not every engine has it.
        recipe_values["parallel"],
    ]
    batch_values = [batch.micro_samples, batch.accumulation_steps]
    return cache_file_path_by_hashed_key("predictions", [rate_values, model_values, batch_values])


class CachedPrediction(NamedTuple):
    """The record of `plan --predict`, and of later runs, in the cache."""

    engines: Json
    """By engine: `seconds` of a step and `memory` of a rank in bytes."""
    others: list[str]
    """Processes that were at work while the rates were measured."""
    contradictions: list[str]
    """Kinds of operators whose rates contradict themselves."""
    measured: dict[str, float]
    """By engine: seconds of a step of the newest run."""

    @property
    def reason_seconds_are_doubtful(self) -> str:
        """Why the predicted seconds are too long or meaningless; "" if nothing is known."""
        if self.others:
            process_count = len(self.others)
            return f"{process_count} other process{'es' * (process_count > 1)} ran while the rates were measured"
        if self.contradictions:
            return f"the measured rates of {', '.join(self.contradictions)} contradict themselves"
        return ""

    def measured_or_corrected_step_seconds(self, engine_name: str) -> float:
        """Return the seconds of a step: those of a run, else corrected by runs on other engines."""
        if engine_name in self.measured:
            return float(self.measured[engine_name])
        ratios = [
            value / self.engines[name]["seconds"]
            for name, value in self.measured.items()
            if name in self.engines
        ]
        factor = math.prod(ratios) ** (1 / len(ratios)) if ratios else 1.0
        return float(self.engines[engine_name]["seconds"]) * factor


def read_cached_prediction_or_none(recipe: Recipe, plan: Plan) -> CachedPrediction | None:
    """Return the content of the cache; None if nothing was predicted."""
    record = _record_or_empty(cached_prediction_path(recipe, plan))
    if "engines" not in record:
        return None
    return CachedPrediction(
        record["engines"],
        record["others"],
        record.get("contradictions", []),
        record.get("measured", {}),
    )


def run_seconds_by_engine_of_earlier_runs(
    recipe: Recipe, device: str, thread_count: int, batch: BatchPlan, step_count: int
) -> dict[str, float]:
    """Return the seconds that a run would take, by the engines of earlier runs.

    Args:
        recipe: the run's recipe.
        device: cpu or cuda.
        thread_count: threads of a rank.
        batch: the sizes of a batch.
        step_count: the steps of the run.
    """
    # Without a plan, which is made after this choice.
    record = _record_or_empty(_record_path(recipe, device, thread_count, batch))
    measured = record.get("measured", {})
    return {
        engine_name: start_seconds + step_count * measured[engine_name]
        for engine_name, start_seconds in record.get("starts", {}).items()
    }


def cache_measured_seconds_if_writable(
    recipe: Recipe, plan: Plan, engine_name: str, step_seconds: float, start_seconds: float
) -> None:
    """Keep what a run has measured; without effect if the cache is unwritable.

    Args:
        recipe: the run's recipe.
        plan: the run's plan.
        engine_name: the engine that ran.
        step_seconds: seconds of a step.
        start_seconds: seconds of the start before the first step.
    """
    record = _record_or_empty(cached_prediction_path(recipe, plan))
    for name, value in (("measured", step_seconds), ("starts", start_seconds)):
        record[name] = {**record.get(name, {}), engine_name: value}
    cache_prediction_record(recipe, plan, record)


def cache_prediction_record(recipe: Recipe, plan: Plan, entries: Json) -> None:
    """Write these entries of the record; all others stay. Without effect if the cache is unwritable."""
    try:
        create_private_cache_folder_or_refuse("predictions")
        write_json_atomically(
            cached_prediction_path(recipe, plan),
            {**_record_or_empty(cached_prediction_path(recipe, plan)), **entries},
        )
    except (OSError, FileError):
        return


def _record_or_empty(record_path: Path) -> Json:
    """Return a record of the cache; a damaged one is printed and forgotten, for no run needs it."""
    try:
        return read_json_or_raise_damaged(record_path) if record_path.exists() else {}
    except DamagedFile as error:
        print(f"{error}; forgotten", flush=True)
        return {}
