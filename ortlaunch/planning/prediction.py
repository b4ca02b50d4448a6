"""Predict the seconds of a step and the memory of a rank, on every engine.

The worker counts the work of the model and measures the rates of this machine's operators
(worker/engine/prediction.py). The result is kept in the cache, where plans read it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from ortlaunch.base.cache import cache_file_path_by_hashed_key
from ortlaunch.base.json_types import Json
from ortlaunch.base.machine import hardware_record, threads_per_rank
from ortlaunch.base.units import aligned_table_lines, human_bytes
from ortlaunch.launch_plan import Plan
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.rules.parity import parity_step_count_and_reason
from ortlaunch.run_folder.folder import read_json_or_raise_damaged, write_json_atomically
from ortlaunch.version import __version__

Rates = dict[str, list[tuple[float, float]]]
"""By kind of operator: (size, seconds of a unit), by ascending size."""


class StepWork(NamedTuple):
    """The work of a step of plain PyTorch on one rank."""

    operators: list[tuple[str, float, float]]
    """Kind, size, units."""
    model_bytes: int
    """Bytes of weights, gradients and optimizer state."""
    peak_bytes: int
    """Most bytes of live tensors at one time."""


class EngineFactors(NamedTuple):
    """Time and memory of an engine beside the counted ones of plain PyTorch.

    Fitted to 17 models of benchmarks/models.py on one core: seconds without other processes. Memory
    is the peak less the libraries', of 20 models on two cores of Zen 3 and Zen 4: the factors with
    which most of them are within 20 %.
    """

    random: float
    """Factor of the seconds of random numbers, such as dropout's."""
    process: int
    """Bytes beside all tensors."""
    of_model: float
    """Bytes for each byte of weights, gradients and optimizer state, beside that byte."""
    of_others: float
    """The same of other tensors; less than 0: a compiled kernel makes fewer of them."""


# A process on CPUs keeps freed blocks (worker/engine/allocator.py), in pieces that do not fit all
# later tensors.
ENGINES = {
    "eager": EngineFactors(1.0, 0, 0.2, 0.45),
    "inductor": EngineFactors(4.25, 180 << 20, 0.0, -0.5),
    "ort": EngineFactors(1.25, 25 << 20, 0.4, 0.25),
}
# A run on ort that compares its first steps with plain PyTorch; of 18 models on a Zen 3.
COMPARED_ORT = EngineFactors(1.25, 240 << 20, -0.1, 0.35)
# torch counts the bytes of a GPU's tensors alone.
EAGER_ON_GPUS = EngineFactors(1.0, 0, 0.0, 0.0)


def predict_seconds_and_memory_by_engine(
    recipe: Recipe,
    device: str,
    step_work: StepWork,
    seconds_per_unit_by_operator: Rates,
    model_type: str | None,
) -> Json:
    """Return the seconds of a step and the bytes of a rank, by engine.

    Args:
        recipe: the run's.
        device: cpu or cuda.
        step_work: the work of a step.
        seconds_per_unit_by_operator: those of the machine.
        model_type: that of the built model, if it is one of transformers.
    """
    seconds_spent = plain_pytorch_seconds_by_operator(step_work, seconds_per_unit_by_operator)
    other_bytes = step_work.peak_bytes - step_work.model_bytes
    prediction: Json = {}
    for name in ENGINES:
        engine_factors = _time_and_memory_factors_of_engine(recipe, device, name, model_type)
        memory_bytes = (1 + engine_factors.of_model) * step_work.model_bytes + (
            1 + engine_factors.of_others
        ) * other_bytes
        seconds = sum(seconds_spent.values()) + (engine_factors.random - 1) * seconds_spent.get(
            "random", 0.0
        )
        prediction[name] = {
            "seconds": seconds,
            "memory": int(engine_factors.process + memory_bytes),
        }
    return prediction


def _time_and_memory_factors_of_engine(
    recipe: Recipe, device: str, engine_name: str, model_type: str | None
) -> EngineFactors:
    if engine_name != "ort":
        return EAGER_ON_GPUS if (engine_name, device) == ("eager", "cuda") else ENGINES[engine_name]
    engine_settings = recipe.engine.model_copy(update={"name": engine_name})
    compared_step_count = parity_step_count_and_reason(
        recipe.model_copy(update={"engine": engine_settings}), model_type
    ).steps
    return COMPARED_ORT if compared_step_count else ENGINES["ort"]


def plain_pytorch_seconds_by_operator(
    step_work: StepWork, seconds_per_unit_by_operator: Rates
) -> dict[str, float]:
    """Return the seconds of a step in plain PyTorch, by kind of operator."""
    total_seconds: dict[str, float] = {}
    for operator, size, units in step_work.operators:
        total_seconds[operator] = total_seconds.get(
            operator, 0.0
        ) + units * _interpolated_seconds_per_unit(seconds_per_unit_by_operator[operator], size)
    return total_seconds


def _interpolated_seconds_per_unit(
    seconds_per_unit_by_size: list[tuple[float, float]], operator_size: float
) -> float:
    """Return the seconds of a unit at a size, interpolated between the measured sizes."""
    upper_index = bisect.bisect(
        [measured_size for measured_size, _ in seconds_per_unit_by_size], operator_size
    )
    if upper_index in (0, len(seconds_per_unit_by_size)):
        return seconds_per_unit_by_size[max(0, upper_index - 1)][1]
    (lower_size, lower_rate), (upper_size, upper_rate) = seconds_per_unit_by_size[
        upper_index - 1 : upper_index + 1
    ]
    share = math.log(operator_size / lower_size) / math.log(upper_size / lower_size)
    return float(lower_rate ** (1 - share) * upper_rate**share)


def hardware_and_versions_deciding_rates(recipe: Recipe, plan: Plan) -> Json:
    """Return everything that decides the rates of operators, as plain values."""
    thread_count = plan.threads or threads_per_rank(plan.nodes[0].slots)
    return {
        "device": plan.device, "threads": thread_count, "hardware": hardware_record(),
        "precision": recipe.precision, "torch": version("torch"), "ortlaunch": __version__,
    }  # fmt: skip


def cached_prediction_path(recipe: Recipe, plan: Plan) -> Path:
    """Return the file of the cache for the predictions of this model, batch and machine."""
    recipe_values = recipe.model_dump(mode="json")
    model_values = [
        recipe_values["model"],
        recipe_values["data"],
        recipe_values["optimizer"],
        recipe.engine.chunked_loss,
    ]
    batch_values = [plan.batch.micro_samples, plan.batch.accumulation_steps]
    return cache_file_path_by_hashed_key(
        "predictions",
        [hardware_and_versions_deciding_rates(recipe, plan), model_values, batch_values],
    )


class CachedPrediction(NamedTuple):
    """The record of `plan --predict`, and of later runs, in the cache."""

    engines: Json
    """By engine: `seconds` of a step and `memory` of a rank in bytes."""
    others: list[str]
    """Processes that were at work while the rates were measured."""
    contradictions: list[str]
    """Kinds of operators whose rates contradict themselves."""
    measured: Json
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
    """Return the content of the cache, or None."""
    record_path = cached_prediction_path(recipe, plan)
    if not record_path.exists():
        return None
    record = read_json_or_raise_damaged(record_path)
    return CachedPrediction(
        record["engines"],
        record["others"],
        record.get("contradictions", []),
        record.get("measured", {}),
    )


def cache_measured_step_seconds(
    recipe: Recipe, plan: Plan, engine_name: str, step_seconds: float
) -> None:
    """Keep the measured seconds of a step, which correct the prediction from now on."""
    record_path = cached_prediction_path(recipe, plan)
    record = read_json_or_raise_damaged(record_path)
    write_json_atomically(
        record_path,
        {**record, "measured": {**record.get("measured", {}), engine_name: step_seconds}},
    )


def operators_with_contradictory_rates(seconds_per_unit_by_operator: Rates) -> list[str]:
    """Return the kinds whose larger operators take far more time a unit than smaller ones.

    A larger product of matrices is about as fast a unit. Other operators may be slower by as much as
    memory is slower than caches.
    """
    contradictory = []
    for operator, curve in seconds_per_unit_by_operator.items():
        max_ratio = 4 if operator.startswith(("matmul", "bmm")) else 20
        fastest_unit_seconds = math.inf
        for _, unit_seconds in curve:
            if unit_seconds > max_ratio * fastest_unit_seconds:
                contradictory.append(operator)
                break
            fastest_unit_seconds = min(fastest_unit_seconds, unit_seconds)
    return contradictory


def engine_prediction_table_lines(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """Yield a table of the predictions of every engine, or the reason why there is none."""
    prediction = read_cached_prediction_or_none(recipe, plan)
    if prediction is None:
        yield "seconds a step: not predicted for this model and batch on this machine yet (plan --predict)"
        return
    rows = [("engine", "seconds a step", "memory a rank")]
    rows += [
        (
            f"{'->' if engine_name == recipe.engine.name else '':2} {engine_name}",
            f"{prediction.measured_or_corrected_step_seconds(engine_name):.3g}"
            f"{' (of a run)' if engine_name in prediction.measured else ''}",
            human_bytes(engine_prediction["memory"]),
        )
        for engine_name, engine_prediction in prediction.engines.items()
    ]
    yield "predicted, from rates of this machine" + (
        ", without communication:" if plan.world_size > 1 else ":"
    )
    yield from aligned_table_lines(rows)
    if prediction.reason_seconds_are_doubtful:
        yield f"  the seconds are in doubt: {prediction.reason_seconds_are_doubtful}; measure again: plan --predict"
        yield from (f"    {other}" for other in prediction.others)
