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

from ortlaunch.cache import cache_record_path
from ortlaunch.json_types import Json
from ortlaunch.launch_plan import Plan
from ortlaunch.machine import hardware_record, threads_per_rank
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.rules.parity import compared_steps
from ortlaunch.run_folder.folder import read_own_json, write_json_atomically
from ortlaunch.units import align_columns, human_bytes
from ortlaunch.version import __version__

Rates = dict[str, list[tuple[float, float]]]
"""By kind of operator: (size, seconds of a unit), by ascending size."""


class Counted(NamedTuple):
    """The work of a step of plain PyTorch on one rank."""

    work: list[tuple[str, float, float]]
    """Kind, size, units."""
    model: int
    """Bytes of weights, gradients and optimizer state."""
    peak: int
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
COMPARED = EngineFactors(1.25, 240 << 20, -0.1, 0.35)
# torch counts the bytes of a GPU's tensors alone.
EAGER_ON_GPUS = EngineFactors(1.0, 0, 0.0, 0.0)


def predict(
    recipe: Recipe, device: str, counted: Counted, rates: Rates, model_type: str | None
) -> Json:
    """Return the seconds of a step and the bytes of a rank, by engine.

    Args:
        recipe: the run's.
        device: cpu or cuda.
        counted: the work of a step.
        rates: those of the machine.
        model_type: that of the built model, if it is one of transformers.
    """
    spent = seconds_by_kind(counted, rates)
    others = counted.peak - counted.model
    found: Json = {}
    for name in ENGINES:
        engine = _factors(recipe, device, name, model_type)
        memory = (1 + engine.of_model) * counted.model + (1 + engine.of_others) * others
        seconds = sum(spent.values()) + (engine.random - 1) * spent.get("random", 0.0)
        found[name] = {"seconds": seconds, "memory": int(engine.process + memory)}
    return found


def _factors(recipe: Recipe, device: str, name: str, model_type: str | None) -> EngineFactors:
    if name != "ort":
        return EAGER_ON_GPUS if (name, device) == ("eager", "cuda") else ENGINES[name]
    own = recipe.engine.model_copy(update={"name": name})
    compares = compared_steps(recipe.model_copy(update={"engine": own}), model_type).steps
    return COMPARED if compares else ENGINES["ort"]


def seconds_by_kind(counted: Counted, rates: Rates) -> dict[str, float]:
    """Return the seconds of a step in plain PyTorch, by kind of operator."""
    total: dict[str, float] = {}
    for kind, size, units in counted.work:
        total[kind] = total.get(kind, 0.0) + units * _rate(rates[kind], size)
    return total


def _rate(curve: list[tuple[float, float]], size: float) -> float:
    """Return the seconds of a unit at a size, interpolated between the measured sizes."""
    after = bisect.bisect([each for each, _ in curve], size)
    if after in (0, len(curve)):
        return curve[max(0, after - 1)][1]
    (low, slow), (high, fast) = curve[after - 1 : after + 1]
    share = math.log(size / low) / math.log(high / low)
    return float(slow ** (1 - share) * fast**share)


def machine_of(recipe: Recipe, plan: Plan) -> Json:
    """Return everything that decides the rates of operators, as plain values."""
    threads = plan.threads or threads_per_rank(plan.nodes[0].slots)
    return {
        "device": plan.device, "threads": threads, "hardware": hardware_record(),
        "precision": recipe.precision, "torch": version("torch"), "ortlaunch": __version__,
    }  # fmt: skip


def path(recipe: Recipe, plan: Plan) -> Path:
    """Return the file of the cache for the predictions of this model, batch and machine."""
    whole = recipe.model_dump(mode="json")
    given = [whole["model"], whole["data"], whole["optimizer"], recipe.engine.chunked_loss]
    batch = [plan.batch.micro_samples, plan.batch.accumulation_steps]
    return cache_record_path("predictions", [machine_of(recipe, plan), given, batch])


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
    def doubt(self) -> str:
        """Why the predicted seconds are too long or meaningless; "" if nothing is known."""
        if self.others:
            count = len(self.others)
            return f"{count} other process{'es' * (count > 1)} ran while the rates were measured"
        if self.contradictions:
            return f"the measured rates of {', '.join(self.contradictions)} contradict themselves"
        return ""

    def seconds(self, engine: str) -> float:
        """Return the seconds of a step: those of a run, else corrected by runs on other engines."""
        if engine in self.measured:
            return float(self.measured[engine])
        ratios = [
            value / self.engines[name]["seconds"]
            for name, value in self.measured.items()
            if name in self.engines
        ]
        factor = math.prod(ratios) ** (1 / len(ratios)) if ratios else 1.0
        return float(self.engines[engine]["seconds"]) * factor


def cached(recipe: Recipe, plan: Plan) -> CachedPrediction | None:
    """Return the content of the cache, or None."""
    file = path(recipe, plan)
    if not file.exists():
        return None
    content = read_own_json(file)
    return CachedPrediction(
        content["engines"],
        content["others"],
        content.get("contradictions", []),
        content.get("measured", {}),
    )


def record_step(recipe: Recipe, plan: Plan, engine: str, seconds: float) -> None:
    """Keep the measured seconds of a step, which correct the prediction from now on."""
    file = path(recipe, plan)
    content = read_own_json(file)
    write_json_atomically(
        file, {**content, "measured": {**content.get("measured", {}), engine: seconds}}
    )


def contradictions(rates: Rates) -> list[str]:
    """Return the kinds whose larger operators take far more time a unit than smaller ones.

    A larger product of matrices is about as fast a unit. Other operators may be slower by as much as
    memory is slower than caches.
    """
    wrong = []
    for kind, curve in rates.items():
        most = 4 if kind.startswith(("matmul", "bmm")) else 20
        fastest = math.inf
        for _, unit in curve:
            if unit > most * fastest:
                wrong.append(kind)
                break
            fastest = min(fastest, unit)
    return wrong


def lines(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """Yield a table of the predictions of every engine, or the reason why there is none."""
    found = cached(recipe, plan)
    if found is None:
        yield "seconds a step: not predicted for this model and batch on this machine yet (plan --predict)"
        return
    rows = [("engine", "seconds a step", "memory a rank")]
    rows += [
        (
            f"{'->' if name == recipe.engine.name else '':2} {name}",
            f"{found.seconds(name):.3g}{' (of a run)' if name in found.measured else ''}",
            human_bytes(each["memory"]),
        )
        for name, each in found.engines.items()
    ]
    yield "predicted, from rates of this machine" + (
        ", without communication:" if plan.world_size > 1 else ":"
    )
    yield from align_columns(rows)
    if found.doubt:
        yield f"  the seconds are in doubt: {found.doubt}; measure again: plan --predict"
        yield from (f"    {other}" for other in found.others)
