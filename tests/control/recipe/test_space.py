"""Tests of the section sweep: its mistakes with their places, and its combinations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ortlaunch import recipe
from ortlaunch.base.errors import RecipeError
from ortlaunch.recipe.space import trial_overrides
from ortlaunch.recipe.text.yaml_text import dump_yaml
from tests.makers import CUSTOM

BASE: dict[str, Any] = {
    **CUSTOM,
    "data": {**CUSTOM["data"], "evaluation": {"format": "custom", "factory": "mine:data"}},
}
RATE = "optimizer.learning_rate: {log_uniform: [1e-4, 1e-1]}"
# Line 3 is that of the sweep, which has its own keys after the space.
MISTAKES = [
    ("optimizer.learnin_rate: {choice: [1, 2]}", "", "3:46: sweep.space.optimizer.learnin_rate: 1: optimizer."),
    ("nothing.at_all: {choice: [1]}", "", "nothing: unknown key"),
    ("batch.micro_size: {uniform: [1, 8]}", "", "got 1.0; it must be a whole number"),
    ("optimizer.learning_rate: {choice: [0.1, 0]}", "", "3:52: sweep.space.optimizer.learning_rate: 0: opt"),
    ("optimizer.name: {choice: [sgd, adma]}", "", '3:43: sweep.space.optimizer.name: "adma": optimizer.name: got'),
    ("optimizer.betas: {choice: [[0.9, 1.9]]}", "", "optimizer.betas[1]: got 1.9; it must be < 1"),
    ("optimizer.learning_rate: {uniform: [0.2, 0.1]}", "", "uniform: the first number must be the lower one"),
    ("optimizer.learning_rate: {log_uniform: [0, 0.1]}", "", "log_uniform: both numbers must be > 0"),
    ("seed: {int: [3, 3]}", "", "int: the first number must be the lower one"),
    ("seed: {int: [1, 2.5]}", "", "sweep.space.seed.int[1]: got 2.5; it must be a whole number"),
    ("seed: {uniform: [1]}", "", "sweep.space.seed.uniform: got [1]; it has too few values"),
    ("seed: {int: [1, 2], choice: [1]}", "", "give exactly one of choice, uniform, log_uniform, int"),
    ("seed: {}", "", "give exactly one of choice, uniform, log_uniform, int"),
    ("seed: {choice: []}", "", "it must not be empty"),
    ("seed: {choises: [1]}", "", "sweep.space.seed.choises: unknown key; did you mean sweep.space.seed.choice?"),
    ("seed: 3", "", "sweep.space.seed: got 3; it must be a mapping"),
    ("sweep.trials: {choice: [1]}", "", "sweep.space.sweep.trials: cannot be searched; remove it"),
    (f"{RATE}, seed: {{int: [1, 2], when: {{optimizer.name: sgd}}}}", "", 'seed.when: optimizer.name: "sgd" is no'),
    ("batch.global_size: {choice: [2, 4]}, batch.micro_size: {choice: [1, 4]}", "", "sweep.space: batch.global_size"),
    (RATE, "sampler: grid", "got grid, but optimizer.learning_rate has no finite set of values"),
    (RATE, "pruner: asha", "got asha, which compares evaluations before the end"),
    (RATE, "metrics: [{metric: f1}]", "sweep.metrics[0].mode: is missing: give min or max"),
    (RATE, "metrics: [{}, {metric: f1, mode: max}], sampler: cmaes", "got cmaes, which improves one metric only"),
    (RATE, "trials: null", "sweep.trials: is missing: give trials, steps or hours"),
    (RATE, "parallel: 0", "sweep.parallel: got 0; it must be >= 1"),
    (RATE, "smapler: tpe", "sweep.smapler: unknown key; did you mean sweep.sampler?"),
]  # fmt: skip


def load(folder: Path, space: str, others: str, **sections: Any) -> recipe.RecipeFile:
    """Load a recipe with a sweep in line 3."""
    path = folder / "r.yaml"
    base = dump_yaml({**BASE, **sections})
    (folder / "base.yaml").write_text(base)
    keys = f"trials: 3, {others}" if others and "trials" not in others else others or "trials: 3"
    path.write_text(f"extends: base.yaml\nsweep:\n  {{space: {{{space}}}, {keys}}}\n")
    return recipe.load_recipe(path)


@pytest.mark.parametrize(("space", "others", "message"), MISTAKES)
def test_a_mistake_has_its_place(tmp_path: Path, space: str, others: str, message: str) -> None:
    """Each mistake is reported before anything starts, with file, line, value and remedy."""
    extra = {"batch": {"global_size": 4}} if "global_size" in space else {}
    with pytest.raises(RecipeError) as error:
        load(tmp_path, space, others, **extra)
    assert message in str(error.value)
    assert str(error.value).startswith(f"{tmp_path / 'r.yaml'}:3:")


def test_an_unknown_key_is_one_mistake(tmp_path: Path) -> None:
    """A mapping that has nothing but an unknown key is not also reported for what it lacks."""
    for space in ("optimizer: {lr: {choice: [1, 2]}}", "seed: {choises: [1]}"):
        with pytest.raises(RecipeError) as error:
            load(tmp_path, space, "")
        assert "give exactly one of" not in str(error.value)


def test_a_grid_has_each_combination_once(tmp_path: Path) -> None:
    """A field with `when` has no part in the combinations without it."""
    found = load(
        tmp_path,
        "optimizer.name: {choice: [adamw, sgd]}, optimizer.momentum: {choice: [0.1, 0.2], "
        "when: {optimizer.name: sgd}}, seed: {int: [1, 2]}",
        "sampler: grid",
    ).recipe.sweep
    assert found is not None
    assert [trial_overrides(fields)[1:] for fields in found.grid_combinations()] == [
        ['optimizer.name="adamw"', "seed=1"],
        ['optimizer.name="adamw"', "seed=2"],
        ['optimizer.name="sgd"', "optimizer.momentum=0.1", "seed=1"],
        ['optimizer.name="sgd"', "optimizer.momentum=0.1", "seed=2"],
        ['optimizer.name="sgd"', "optimizer.momentum=0.2", "seed=1"],
        ['optimizer.name="sgd"', "optimizer.momentum=0.2", "seed=2"],
    ]
    assert found.max_trials == 3
    assert found.sweep_summary_lines(10)[0] == (
        "sweep: loss by grid, pruner none, 1 at a time, until 3 trials; at most 30 steps; only "
        "`ortlaunch sweep` searches:"
    )
