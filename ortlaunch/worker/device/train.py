"""`ortlaunch device train`: training steps of one pass each, from one checkpoint to another."""

from __future__ import annotations

import math
import time
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ortlaunch.base.errors import InputError, NonFiniteError
from ortlaunch.base.units import count_with_noun
from ortlaunch.launch_plan import BatchPlan
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.device_folder import DeviceFolder
from ortlaunch.worker.data import Batches, LoadedData, collate_function_of_recipe
from ortlaunch.worker.device.device import (
    AVERAGED,
    SAMPLES,
    STEPS,
    Device,
    import_ort_training_artifacts_or_refuse,
    int_property_or_0,
    load_ort_checkpoint_state_or_refuse,
    write_checkpoint_state_atomically,
)
from ortlaunch.worker.engine.schedule import fraction_of_peak_learning_rate


class _StepSpan(NamedTuple):
    """The steps [first, last) of this command, of the `total` steps of the recipe."""

    first_step: int
    end_step: int
    total_steps: int


def train_device_checkpoint_and_save(
    device_folder: DeviceFolder,
    recipe: Recipe,
    data: LoadedData,
    checkpoint: Path,
    target_path: Path,
    max_steps: int | None,
) -> None:
    """Train to the end of the recipe, or at most `max_steps` steps, and save.

    Raises:
        InputError: no step is left.
        NonFiniteError: a loss is inf or nan; nothing is saved.
    """
    import_ort_training_artifacts_or_refuse()
    micro_samples = recipe.batch.micro_size
    assert isinstance(micro_samples, int), "the artifacts' recipe has a number"
    step_span = _step_span_or_refuse_if_finished(
        recipe, len(data.train), micro_samples, checkpoint, max_steps
    )
    # The seed of dropout; it differs from command to command, as each begins at another step.
    import_module("onnxruntime").set_seed(recipe.seed + step_span.first_step)
    device = Device(device_folder, checkpoint, is_training=True)
    if max_steps is not None and step_span.first_step + max_steps > step_span.end_step:
        steps_left = count_with_noun(step_span.end_step - step_span.first_step, "step")
        print(
            f"--steps {max_steps}: {steps_left} of {step_span.total_steps} left; for more: "
            f"{_more_steps_options(recipe, step_span.first_step + max_steps)}"
        )
    print(
        f"steps {step_span.first_step + 1} to {step_span.end_step} of {step_span.total_steps}, "
        f"each one pass over {micro_samples} samples",
        flush=True,
    )
    # One rank and one pass: the global batch is the micro batch.
    plan = BatchPlan(micro_samples, micro_samples, 1, 1, None)
    losses = _train_steps_and_list_losses(
        device,
        recipe,
        Batches(data.train, plan, recipe.seed, stack=collate_function_of_recipe(recipe)),
        step_span,
    )
    _update_step_and_sample_counts(device.state, step_span, micro_samples)
    write_checkpoint_state_atomically(device.state, target_path, with_optimizer=True)
    print(
        f"trained {len(losses)} steps, {len(losses) * micro_samples} samples, "
        f"loss {losses[0]:.4f} to {losses[-1]:.4f}: {target_path}"
    )


def _step_span_or_refuse_if_finished(
    recipe: Recipe, sample_count: int, micro_samples: int, checkpoint: Path, max_steps: int | None
) -> _StepSpan:
    first_step = int_property_or_0(load_ort_checkpoint_state_or_refuse(checkpoint), STEPS)
    total_steps = recipe.train.max_steps
    if total_steps is None:
        # Rounded first, so that float errors do not add a step.
        total_steps = max(
            1, math.ceil(round((recipe.train.epochs or 0.0) * sample_count / micro_samples, 6))
        )
    if first_step >= total_steps:
        raise InputError(
            f"{checkpoint} has {first_step} steps of {total_steps}; for more: "
            f"{_more_steps_options(recipe, 2 * total_steps)}"
        )
    return _StepSpan(
        first_step,
        total_steps if max_steps is None else min(first_step + max_steps, total_steps),
        total_steps,
    )


def _more_steps_options(recipe: Recipe, total_steps: int) -> str:
    """Return the command line options that raise the total to this number of steps."""
    return f"train.max_steps={total_steps}" + (
        " train.epochs=null" if recipe.train.epochs is not None else ""
    )


def _train_steps_and_list_losses(
    device: Device, recipe: Recipe, batches: Batches, step_span: _StepSpan
) -> list[float]:
    losses = list[float]()
    began = time.monotonic()
    for step in range(step_span.first_step, step_span.end_step):
        learning_rate = recipe.optimizer.learning_rate * fraction_of_peak_learning_rate(
            recipe.schedule, step, step_span.total_steps
        )
        losses.append(
            device.train_on_batch(
                batches.read_micro_batch_and_count_tokens(step, 0, 0), learning_rate
            )
        )
        if not math.isfinite(losses[-1]):
            raise NonFiniteError(f"step {step + 1}: the loss is {losses[-1]}; nothing is saved")
        if (step + 1) % recipe.log.every_steps == 0 or step + 1 == step_span.end_step:
            speed = len(losses) * batches.batch.micro_samples / (time.monotonic() - began)
            line = (
                f"step {step + 1}/{step_span.total_steps}  loss {losses[-1]:.4f}  "
                f"lr {learning_rate:.3g}  {speed:,.1f} samples/s"
            )
            print(line, flush=True)
    return losses


def _update_step_and_sample_counts(
    checkpoint_state: Any, step_span: _StepSpan, micro_samples: int
) -> None:
    """Update the checkpoint's counts of steps and of samples since the last average."""
    # An average has the sum of its parts as SAMPLES, so that the count begins again after it.
    samples_before = (
        0
        if int_property_or_0(checkpoint_state, AVERAGED)
        else int_property_or_0(checkpoint_state, SAMPLES)
    )
    properties = checkpoint_state.properties
    properties[STEPS], properties[AVERAGED] = step_span.end_step, 0
    properties[SAMPLES] = (
        samples_before + (step_span.end_step - step_span.first_step) * micro_samples
    )
