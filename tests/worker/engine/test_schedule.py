"""Learning rates compared with transformers' schedulers, and with NVIDIA's formula for BERT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import optimization

from ortlaunch.recipe.fields.schedule import Schedule
from ortlaunch.worker.engine.schedule import (
    fraction_of_peak_learning_rate,
    warmup_step_count,
    wsd_decay_step_count,
)

THEIRS = {
    "linear": transformers.get_linear_schedule_with_warmup,
    "cosine": transformers.get_cosine_schedule_with_warmup,
    "constant": lambda optimizer, warmup, steps: transformers.get_constant_schedule_with_warmup(
        optimizer, warmup
    ),
}
# Pairs of warm-up and max_steps.
LENGTHS = [(0, 20), (1, 20), (7, 20), (19, 20), (20, 20), (0, 1), (1, 1)]


def theirs(name: str, warmup: int, steps: int) -> list[float]:
    """Return the factors of transformers' scheduler by its own count of steps, from 0."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule: Any = THEIRS[name](optimizer, warmup, steps)
    return [float(schedule.lr_lambdas[0](step)) for step in range(steps)]


@pytest.mark.parametrize(("warmup", "steps"), LENGTHS)
@pytest.mark.parametrize("name", THEIRS)
def test_as_in_transformers(name: str, warmup: int, steps: int) -> None:
    """The warm-up is one step ahead of transformers', and all later steps are the same."""
    schedule = Schedule(name=name, warmup_steps=warmup)
    # transformers' schedule has no peak if the warm-up ends with the run: one more step has it.
    rising = theirs(name, warmup, steps + 1)[1:]
    falling = theirs(name, warmup, steps)
    for step in range(steps):
        expected = rising[step] if step < warmup else falling[step]
        assert fraction_of_peak_learning_rate(schedule, step, steps) == pytest.approx(
            expected, abs=1e-12
        )


def test_a_quadratic_warm_up() -> None:
    """A warm-up of power 2 is Axolotl's lr_quadratic_warmup, one step ahead of it."""
    schedule = Schedule(name="cosine", warmup_steps=10, warmup_power=2.0)
    axolotl = [(step / max(1, 10)) ** 2 for step in range(1, 11)]
    assert [
        fraction_of_peak_learning_rate(schedule, step, 20) for step in range(10)
    ] == pytest.approx(axolotl, abs=1e-12)
    linear = Schedule(name="cosine", warmup_steps=10)
    assert fraction_of_peak_learning_rate(schedule, 15, 20) == fraction_of_peak_learning_rate(
        linear, 15, 20
    )


# transformers' linear schedule has no minimum: its polynomial of power 1 is the same with one.
TO_A_MINIMUM = {
    "linear": lambda optimizer, warmup, steps, minimum: (
        transformers.get_polynomial_decay_schedule_with_warmup(
            optimizer, warmup, steps, lr_end=minimum, power=1.0
        )
    ),
    "cosine": lambda optimizer, warmup, steps, minimum: (
        optimization.get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, warmup, steps, min_lr_rate=minimum
        )
    ),
}


def factors_of(
    schedule: Callable[..., Any], steps: int, *arguments: Any, **settings: Any
) -> list[float]:
    """Return the factors of a schedule of transformers."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    made = schedule(optimizer, *arguments, **settings)
    return [float(made.lr_lambdas[0](step)) for step in range(steps)]


@pytest.mark.parametrize("minimum", [0.0, 0.1, 0.5])
@pytest.mark.parametrize(("warmup", "steps"), LENGTHS)
@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_the_decay_to_a_minimum_is_transformers(
    name: str, warmup: int, steps: int, minimum: float
) -> None:
    """After the warm-up, a decay to a minimum equals transformers' with min_lr_rate."""
    # Llama 2's cosine ends at a tenth of the peak.
    schedule = Schedule(name=name, warmup_steps=warmup, minimum_ratio=minimum)
    theirs = factors_of(TO_A_MINIMUM[name], steps, warmup, steps, minimum)
    ours = [fraction_of_peak_learning_rate(schedule, step, steps) for step in range(steps)]
    assert ours[warmup:] == pytest.approx(theirs[warmup:], abs=1e-12)
    assert all(ours[step] == (step + 1) / warmup for step in range(warmup))


@pytest.mark.parametrize("minimum", [0.0, 0.1])
@pytest.mark.parametrize("form", ["linear", "cosine", "1-sqrt"])
@pytest.mark.parametrize(("warmup", "steps", "ratio", "decay"), [
    (0, 20, 0.1, 2), (7, 50, 0.2, 10), (15, 20, 0.25, 5), (0, 20, 1.0, 20), (1, 2, 0.5, 1), (0, 3, 0.1, 1),
])  # fmt: skip
def test_wsd_is_transformers(
    warmup: int, steps: int, ratio: float, decay: int, form: str, minimum: float
) -> None:
    """wsd equals transformers' schedule for each form of decay; the decay has at least one step."""
    schedule = Schedule(
        name="wsd", warmup_steps=warmup, decay_ratio=ratio, decay_type=form, minimum_ratio=minimum
    )
    assert wsd_decay_step_count(schedule, steps) == decay
    theirs = factors_of(
        transformers.get_wsd_schedule,
        steps,
        warmup,
        decay,
        steps,
        decay_type=form,
        min_lr_ratio=minimum,
    )
    assert [
        fraction_of_peak_learning_rate(schedule, step, steps) for step in range(warmup, steps)
    ] == pytest.approx(theirs[warmup:], abs=1e-12)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("warmup", "steps"), LENGTHS)
def test_polynomial_is_nvidias(warmup: int, steps: int, power: float) -> None:
    """The polynomial schedule is that of PolyWarmUpScheduler of NVIDIA's BERT, one step later."""
    # NVIDIA's formula is p / warmup for p < warmup, else (1 - p) ** power, where p is the share of
    # steps. It counts the current step, too: its decay is one step ahead of ours and ends at 0.
    schedule = Schedule(name="polynomial", power=power, warmup_steps=warmup)
    for step in range(steps):
        progress = step / steps
        expected = (step + 1) / warmup if step < warmup else (1.0 - progress) ** power
        assert fraction_of_peak_learning_rate(schedule, step, steps) == pytest.approx(
            expected, abs=1e-12
        )


@pytest.mark.parametrize(
    ("schedule", "first", "peak", "last"),
    [
        ({"name": "linear", "warmup_steps": 5}, 0.2, 1.0, 1 / 15),
        ({"name": "linear"}, 1.0, 1.0, 1 / 20),
        ({"name": "cosine", "warmup_steps": 5}, 0.2, 1.0, 0.010926),
        ({"name": "constant", "warmup_steps": 5}, 0.2, 1.0, 1.0),
        ({"name": "constant"}, 1.0, 1.0, 1.0),
        # After the warm-up NVIDIA's polynomial counts from the first step: there is no jump.
        ({"name": "polynomial", "power": 0.5, "warmup_steps": 5}, 0.2, 1.0, (1 / 20) ** 0.5),
        ({"name": "linear", "warmup_steps": 20}, 0.05, 1.0, 1.0),
    ],
)
def test_ends(schedule: dict[str, Any], first: float, peak: float, last: float) -> None:
    """No factor is 0 and none is above the peak; the first and the last are as expected."""
    factors = [fraction_of_peak_learning_rate(Schedule(**schedule), step, 20) for step in range(20)]
    assert factors[0] == pytest.approx(first)
    assert max(factors) == pytest.approx(peak)
    assert factors[-1] == pytest.approx(last, rel=1e-4)
    assert min(factors) > 0


@pytest.mark.parametrize(
    ("schedule", "steps", "expected"),
    [
        ({}, 100, 0),
        ({"warmup_steps": 7}, 100, 7),
        ({"warmup_ratio": 0.1}, 100, 10),
        ({"warmup_ratio": 0.2843}, 7038, 2001),  # BERT-large, phase 1
        ({"warmup_ratio": 0.128}, 1563, 200),  # phase 2
        ({"warmup_ratio": 1.0}, 9, 9),
        ({"warmup_ratio": 0.0}, 9, 0),
    ],
)
def test_length_of_the_warm_up(schedule: dict[str, Any], steps: int, expected: int) -> None:
    """The warm-up has the set number of steps, or the number nearest to the ratio."""
    assert warmup_step_count(Schedule(**schedule), steps) == expected
