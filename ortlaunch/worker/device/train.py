"""`ortlaunch device train`: training steps of one pass each, from one checkpoint to another."""

from __future__ import annotations

import math
import time
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ortlaunch.errors import InputError, NonFiniteError
from ortlaunch.launch_plan import BatchPlan
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.device_folder import DeviceFolder
from ortlaunch.units import count_with_noun
from ortlaunch.worker.data import Batches, LoadedData, stack_of
from ortlaunch.worker.device.device import (
    AVERAGED,
    SAMPLES,
    STEPS,
    Device,
    int_property,
    load_state,
    require,
    save_state,
)
from ortlaunch.worker.engine.schedule import factor


class _Span(NamedTuple):
    """The steps [first, last) of this command, of the `total` steps of the recipe."""

    first: int
    last: int
    total: int


def train(
    place: DeviceFolder,
    recipe: Recipe,
    data: LoadedData,
    checkpoint: Path,
    to: Path,
    steps: int | None,
) -> None:
    """Train to the end of the recipe, or at most `steps` steps, and save.

    Raises:
        InputError: no step is left.
        NonFiniteError: a loss is inf or nan; nothing is saved.
    """
    require()
    micro = recipe.batch.micro_size
    assert isinstance(micro, int), "the artifacts' recipe has a number"
    span = _span(recipe, len(data.train), micro, checkpoint, steps)
    # The seed of dropout; it differs from command to command, as each begins at another step.
    import_module("onnxruntime").set_seed(recipe.seed + span.first)
    device = Device(place, checkpoint, trains=True)
    if steps is not None and span.first + steps > span.last:
        left = count_with_noun(span.last - span.first, "step")
        print(
            f"--steps {steps}: {left} of {span.total} left; for more: "
            f"{_more(recipe, span.first + steps)}"
        )
    print(
        f"steps {span.first + 1} to {span.last} of {span.total}, "
        f"each one pass over {micro} samples",
        flush=True,
    )
    # One rank and one pass: the global batch is the micro batch.
    plan = BatchPlan(micro, micro, 1, 1, None)
    losses = _run_steps(
        device, recipe, Batches(data.train, plan, recipe.seed, stack=stack_of(recipe)), span
    )
    _count(device.state, span, micro)
    save_state(device.state, to, with_optimizer=True)
    print(
        f"trained {len(losses)} steps, {len(losses) * micro} samples, "
        f"loss {losses[0]:.4f} to {losses[-1]:.4f}: {to}"
    )


def _span(recipe: Recipe, samples: int, micro: int, checkpoint: Path, steps: int | None) -> _Span:
    first = int_property(load_state(checkpoint), STEPS)
    total = recipe.train.max_steps
    if total is None:
        # Rounded first, so that float errors do not add a step.
        total = max(1, math.ceil(round((recipe.train.epochs or 0.0) * samples / micro, 6)))
    if first >= total:
        raise InputError(
            f"{checkpoint} has {first} steps of {total}; for more: {_more(recipe, 2 * total)}"
        )
    return _Span(first, total if steps is None else min(first + steps, total), total)


def _more(recipe: Recipe, steps: int) -> str:
    """Return the command line options that raise the total to this number of steps."""
    return f"train.max_steps={steps}" + (
        " train.epochs=null" if recipe.train.epochs is not None else ""
    )


def _run_steps(device: Device, recipe: Recipe, batches: Batches, span: _Span) -> list[float]:
    """Run the steps; return the loss of each."""
    losses = list[float]()
    began = time.monotonic()
    for step in range(span.first, span.last):
        rate = recipe.optimizer.learning_rate * factor(recipe.schedule, step, span.total)
        losses.append(device.step(batches.micro_batch(step, 0, 0), rate))
        if not math.isfinite(losses[-1]):
            raise NonFiniteError(f"step {step + 1}: the loss is {losses[-1]}; nothing is saved")
        if (step + 1) % recipe.log.every_steps == 0 or step + 1 == span.last:
            speed = len(losses) * batches.batch.micro_samples / (time.monotonic() - began)
            line = (
                f"step {step + 1}/{span.total}  loss {losses[-1]:.4f}  "
                f"lr {rate:.3g}  {speed:,.1f} samples/s"
            )
            print(line, flush=True)
    return losses


def _count(state: Any, span: _Span, micro: int) -> None:
    """Update the checkpoint's counts of steps and of samples since the last average."""
    # An average has the sum of its parts as SAMPLES, so that the count begins again after it.
    before = 0 if int_property(state, AVERAGED) else int_property(state, SAMPLES)
    properties = state.properties
    properties[STEPS], properties[AVERAGED] = span.last, 0
    properties[SAMPLES] = before + (span.last - span.first) * micro
