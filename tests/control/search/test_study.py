"""Tests of the study: its draws, its journal after a kill, and its pruners."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ortlaunch.api.sweep import Sweep
from ortlaunch.base.errors import MissingDependency
from ortlaunch.recipe import Recipe, dump_recipe_yaml
from ortlaunch.run_folder.folder import write_text_atomically
from ortlaunch.search import study as studies
from ortlaunch.search.folder import SweepDir
from ortlaunch.search.parallel import parallel_coordinates_picture_of_trials
from ortlaunch.search.study import Study, Trial, equal_result_sentence_or_empty
from tests.makers import recipe

pytest.importorskip("optuna")
SPACE = {
    "optimizer.name": {"choice": ["adamw", "sgd"]},
    "optimizer.momentum": {"uniform": [0.1, 0.9], "when": {"optimizer.name": "sgd"}},
    "optimizer.learning_rate": {"log_uniform": [1e-4, 1e-1]},
    "optimizer.betas": {"choice": [[0.9, 0.99], [0.8, 0.9]]},
    "seed": {"int": [1, 3]},
}


def swept(**keys: Any) -> Recipe:
    """Return a recipe with a sweep."""
    return recipe(sweep={"space": SPACE, "trials": 12, **keys})


def drawn(folder: Path, sweep: Recipe, kills: bool) -> list[Trial]:
    """Return six trials; with `kills` the study is opened anew before each step."""
    place = SweepDir(folder)
    folder.mkdir()
    study = Study(place, sweep, has_sweep_lock=True)
    for number in range(6):
        study.draw_trial_values_and_return_number()
        if kills:
            study = Study(place, sweep, has_sweep_lock=True)
            assert study.draw_trial_values_and_return_number(number) == number
        study.record_trial_end(number, "complete", [float(number % 4)])
    return study.read_trials()


@pytest.mark.parametrize("sampler", ["random", "tpe", "cmaes"])
def test_a_killed_sweep_draws_the_same_trials(tmp_path: Path, sampler: str) -> None:
    """Draws are those of a sweep that was never killed; values are in the space."""
    sweep = swept(sampler=sampler)
    whole = drawn(tmp_path / "whole", sweep, kills=False)
    assert drawn(tmp_path / "killed", sweep, kills=True) == whole
    assert len({str(one.fields) for one in whole}) == 6
    for one in whole:
        assert one.fields["optimizer.betas"] in ([0.9, 0.99], [0.8, 0.9])
        assert ("optimizer.momentum" in one.fields) == (one.fields["optimizer.name"] == "sgd")


def test_a_grid_is_drawn_in_order(tmp_path: Path) -> None:
    """Trial N has combination N, also after a kill."""
    space = {"seed": {"int": [1, 3]}, "optimizer.betas": {"choice": [[0.9, 0.99], [0.8, 0.9]]}}
    found = drawn(tmp_path / "s", recipe(sweep={"space": space, "sampler": "grid"}), kills=True)
    assert [one.fields["seed"] for one in found] == [1, 1, 2, 2, 3, 3]
    assert [one.fields["optimizer.betas"] for one in found] == [[0.9, 0.99], [0.8, 0.9]] * 3


def test_a_writer_was_killed(tmp_path: Path) -> None:
    """A lock and a half line that a killed writer left do no harm."""
    sweep = swept()
    place = SweepDir(tmp_path)
    Study(place, sweep, has_sweep_lock=True).draw_trial_values_and_return_number()
    with place.journal.open("a") as file:
        file.write('{"op_code": 4, "worker')
    Path(f"{place.journal}.lock").symlink_to(place.journal)
    again = Study(place, sweep, has_sweep_lock=True)
    assert (
        again.draw_trial_values_and_return_number(0),
        again.draw_trial_values_and_return_number(),
    ) == (0, 1)
    assert [one.state for one in again.read_trials()] == ["running", "running"]


def test_a_bad_trial_is_pruned(tmp_path: Path) -> None:
    """Successive halving stops a trial whose first evaluation is worse than a third of the others."""
    study = Study(SweepDir(tmp_path), swept(pruner="asha"), has_sweep_lock=True)
    stopped = [
        study.report_values_and_decide_to_prune(
            study.draw_trial_values_and_return_number(), {1: loss}
        )
        for loss in (1.0, 2.0, 3.0, 0.5)
    ]
    assert stopped == [False, True, True, False]
    study.set_attributes(1, pruned=1, steps=4)
    study.record_trial_end(1, "pruned")
    study.record_trial_end(3, "complete", [0.5])
    assert study.trial_attribute(1, "pruned") == 1
    assert study.read_trials()[1][1:2] + study.read_trials()[1][3:] == (
        "pruned",
        {"loss": 2.0},
        4,
        "",
    )
    assert [one.number for one in study.best_trials()] == [3]
    # A value that is known already is not compared again.
    assert not study.report_values_and_decide_to_prune(0, {1: 1.0})


def test_optuna_reads_the_study(tmp_path: Path) -> None:
    """Optuna's own storage class reads trials, values, states and the best trial."""
    optuna = pytest.importorskip("optuna")
    place = SweepDir(tmp_path)
    made = Study(place, swept(pruner="asha"), has_sweep_lock=True)
    made.report_values_and_decide_to_prune(made.draw_trial_values_and_return_number(), {1: 2.0})
    made.record_trial_end(0, "complete", [1.5])
    made.report_values_and_decide_to_prune(made.draw_trial_values_and_return_number(), {1: 3.0})
    made.record_trial_end(1, "pruned")
    backend = optuna.storages.journal.JournalFileBackend(str(place.journal))
    storage = optuna.storages.JournalStorage(backend)
    study = optuna.load_study(study_name=swept().name, storage=storage)
    assert [one.state.name for one in study.trials] == ["COMPLETE", "PRUNED"]
    assert study.trials[1].intermediate_values == {1: 3.0}
    assert (study.best_trial.number, study.best_value) == (0, 1.5)
    assert (
        study.best_params["optimizer.learning_rate"]
        == made.best_trials()[0].fields["optimizer.learning_rate"]
    )


def test_several_metrics_have_several_best_trials(tmp_path: Path) -> None:
    """Best is each trial that no other one beats in all metrics."""
    metrics = [{"metric": "loss"}, {"metric": "f1", "mode": "max"}]
    study = Study(SweepDir(tmp_path), swept(metrics=metrics), has_sweep_lock=True)
    for values in ([1.0, 0.5], [2.0, 0.9], [3.0, 0.4]):
        study.record_trial_end(study.draw_trial_values_and_return_number(), "complete", values)
    assert [one.values for one in study.best_trials()] == [
        {"loss": 1.0, "f1": 0.5},
        {"loss": 2.0, "f1": 0.9},
    ]


def test_optuna_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the package and the extra."""
    monkeypatch.setattr(studies.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        MissingDependency, match=r'tpe needs optuna: pip install "ortlaunch\[sweep\]" optuna'
    ):
        Study(SweepDir(tmp_path), swept())


def test_a_package_outside_the_extra_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remedy for sampler gp installs scipy, which the extra does not."""
    monkeypatch.setattr(studies.importlib.util, "find_spec", lambda name: name != "scipy" or None)
    with pytest.raises(MissingDependency, match=r"gp needs scipy: .* scipy$"):
        Study(SweepDir(tmp_path), swept(sampler="gp"))


def test_equal_results_are_a_tie(tmp_path: Path) -> None:
    """Trials with one value have no best and no importance; the table of the sweep says so."""
    folder = SweepDir(tmp_path)
    study = Study(folder, swept(sampler="random"), has_sweep_lock=True)
    for _ in range(6):
        study.record_trial_end(study.draw_trial_values_and_return_number(), "complete", [0.143791])
    (best,) = study.best_trials()
    made = parallel_coordinates_picture_of_trials(study.sweep, study.read_trials(), [best], {})
    assert [tie for _, tie in made.best_lines] == [
        equal_result_sentence_or_empty(best, study.read_trials())
    ]
    assert study.field_importances_or_empty() == {}
    write_text_atomically(folder.run.recipe, dump_recipe_yaml(swept(sampler="random")))
    text = str(Sweep(tmp_path))
    assert "trial 1, 2, 3, 4, 5 has exactly the same result: the sweep cannot tell" in text


def test_parallel_coordinates_and_importances(tmp_path: Path) -> None:
    """Each complete trial has a line over the axes of its fields, and the best one is marked."""
    sweep = swept(sampler="random")
    study = Study(SweepDir(tmp_path), sweep, has_sweep_lock=True)
    assert study.field_importances_or_empty() == {}
    for number in range(8):
        study.draw_trial_values_and_return_number()
        rate = study.read_trials()[number].fields["optimizer.learning_rate"]
        study.record_trial_end(number, *(("complete", [float(str(rate))]) if number else ("fail",)))
    trials = study.read_trials()
    assert study.field_importances_or_empty().keys() == SPACE.keys()
    assert sum(study.field_importances_or_empty().values()) == pytest.approx(1)
    made = parallel_coordinates_picture_of_trials(
        study.sweep, trials, study.best_trials(), study.field_importances_or_empty()
    )
    axes, lines = made.figure["axes"], made.figure["lines"]
    assert [axis["name"] for axis in axes] == [*SPACE, "loss"]
    (best,) = study.best_trials()
    # The best line is the last one, above the others.
    assert [line["best"] for line in lines] == [False] * 6 + [True]
    assert lines[-1]["text"].startswith(f"trial {best.number}: loss ")
    assert lines[-1]["values"].keys() == {*best.fields, "loss"}
    # The metric is the rate: the best trial is at the lower end of the metric's axis.
    assert lines[-1]["values"]["loss"] == axes[-1]["marks"][0][0]
    assert [axis["log"] for axis in axes] == [
        parameter.value_field == "log_uniform" for parameter in [*sweep.sweep.space.values()]
    ] + [False]
    # Ends of the logarithmic axis.
    assert axes[2]["marks"] == [(0.0001, "0.0001"), (0.1, "0.1")]
