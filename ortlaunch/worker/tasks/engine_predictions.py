"""Predict the seconds of a step and the memory of a rank on every engine, from work and rates."""

from __future__ import annotations

import bisect
import math
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from ortlaunch.base import machine
from ortlaunch.base.cache import create_private_cache_folder_or_refuse
from ortlaunch.base.json_types import Json
from ortlaunch.launch_plan import Plan
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.rules.parity import parity_step_count_and_reason
from ortlaunch.run_folder.cached_prediction import cache_prediction_record
from ortlaunch.worker.engine.prediction import (
    Rates,
    StepWork,
    count_step_work,
    measure_seconds_per_unit_by_operator,
    operators_with_contradictory_rates,
)
from ortlaunch.worker.model.model import LossModule
from ortlaunch.worker.model.precision import narrow_dtype_or_none
from ortlaunch.worker.tensor_batch import TensorBatch


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


# A process on CPUs keeps freed blocks (worker/allocator.py), in pieces that do not fit all
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


def count_measure_and_cache_prediction(
    recipe: Recipe, plan: Plan, model: LossModule, batch: TensorBatch
) -> None:
    """Count the work of a rank, measure the rates of this machine, and write both into the cache.

    Args:
        recipe, model, batch: as those of `count`.
        plan: the run's plan.

    Raises:
        Exception: the model cannot run without values.
    """
    device = next(model.parameters()).device
    count_arguments = recipe, model, batch, device, plan.batch.accumulation_steps
    try:
        step_work = count_step_work(*count_arguments)
    except (DataDependentOutputException, DynamicOutputShapeException):
        step_work = count_step_work(*count_arguments, with_values=True)
    model_type = getattr(getattr(model.model, "config", None), "model_type", None)
    create_private_cache_folder_or_refuse("predictions")
    others = machine.watch_and_describe_other_busy_processes()
    rates = measure_seconds_per_unit_by_operator(
        device, narrow_dtype_or_none(recipe.precision) or torch.float32
    )
    content = {
        "engines": predict_seconds_and_memory_by_engine(
            recipe, device.type, step_work, rates, model_type
        ),
        "others": others,
        "contradictions": operators_with_contradictory_rates(rates),
    }
    cache_prediction_record(recipe, plan, content)


def predict_seconds_and_memory_by_engine(
    recipe: Recipe,
    device: str,
    step_work: StepWork,
    seconds_per_unit_by_operator: Rates,
    model_type: str | None,
) -> dict[str, object]:
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
    # Engine ort has no FSDP2.
    for name in (name for name in ENGINES if name != "ort" or recipe.parallel is None):
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
