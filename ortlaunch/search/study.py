"""The study of a sweep in Optuna: its journal in the sweep's folder, sampler and pruner.

Only the command that holds the sweep's lock writes to the journal. A draw is a function of the
journal and of the trial's number alone, so that a sweep that was killed continues as it would have.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import warnings
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ortlaunch.base.errors import MissingDependency
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.sweep import Parameter
from ortlaunch.search.folder import SweepDir

# Packages that a sampler needs beside Optuna.
_PACKAGES_OF_SAMPLER = {"gp": ("scipy", "torch"), "cmaes": ("cmaes",)}
# As Optuna's Hyperband; its successive halving has 4, which takes longer trials.
_REDUCTION_FACTOR = 3


class Trial(NamedTuple):
    """A trial of a sweep."""

    number: int
    state: str
    """`running` (also while the sweep is stopped), `complete`, `pruned` or `fail`."""
    fields: dict[str, object]
    """The fields of the space with their values."""
    values: dict[str, float]
    """The metrics; of a pruned trial that of its last evaluation; {} if there are none."""
    steps: int
    reason: str
    """Why it failed, or was not trained; "" else."""

    @property
    def repeats(self) -> bool:
        """Whether an earlier trial had the same fields, so that it was not trained."""
        return bool(self.reason) and self.state != "fail"

    def line(self) -> str:
        """Return metrics, fields and the reason, for a person."""
        metrics_text = ", ".join(f"{name} {value:.6g}" for name, value in self.values.items())
        fields_text = " ".join(
            f"{name}={format_value(value)}" for name, value in self.fields.items()
        )
        return "; ".join(filter(None, (metrics_text, fields_text, self.reason.partition("\n")[0])))


def format_value(value: object) -> str:
    """Return a value for a person; best_*.yaml and study.journal have all digits."""
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)


def equal_result_sentence_or_empty(best_trial: Trial, trials: Sequence[Trial]) -> str:
    """Return a sentence on other complete trials with exactly the best one's values; "" if none."""
    tied_numbers = [
        str(trial.number)
        for trial in trials
        if trial.state == "complete"
        and trial.values == best_trial.values
        and trial.number != best_trial.number
    ]
    return (
        f"trial {', '.join(tied_numbers)} has exactly the same result: the sweep cannot tell"
        if tied_numbers
        else ""
    )


class Study:
    """The study of one sweep."""

    def __init__(
        self, sweep_folder: SweepDir, recipe: Recipe, has_sweep_lock: bool = False
    ) -> None:
        """Open the study, or create it.

        Args:
            has_sweep_lock: whether this process has the sweep's lock, and the last one may have been killed.

        Raises:
            MissingDependency: Optuna, or a package that the sampler needs, is not installed.
        """
        assert recipe.sweep is not None
        self.sweep = recipe.sweep
        self._seed = recipe.seed
        self._optuna = _import_quiet_optuna_or_refuse(self.sweep.sampler)
        if has_sweep_lock:
            _repair_journal(sweep_folder.journal)
        journal_module = importlib.import_module("optuna.storages.journal")
        self._study = self._optuna.create_study(
            storage=journal_module.JournalStorage(
                journal_module.JournalFileBackend(str(sweep_folder.journal))
            ),
            study_name=recipe.name,
            directions=[
                f"{directed_metric.direction}imize" for directed_metric in self.sweep.metrics
            ],
            pruner=self._optuna_pruner_of_recipe(),
            load_if_exists=True,
        )

    def read_trials(self) -> list[Trial]:
        """Return all trials in the order of their numbers."""
        return [
            self._trial_of_optuna_trial(frozen_trial)
            for frozen_trial in self._study.get_trials(deepcopy=False)
        ]

    def best_trials(self) -> list[Trial]:
        """Return the best complete trial; with several metrics all that no other trial beats."""
        best_records = sorted(map(self._trial_of_optuna_trial, self._study.best_trials))
        trained_trials = [trial for trial in best_records if not trial.repeats]
        return trained_trials if len(self.sweep.metrics) > 1 else trained_trials[:1]

    def field_importances_or_empty(self) -> dict[str, float]:
        """Return the share of each field in the first metric's variance, the largest first.

        It is {} before there are enough trials, and where all have the same value.
        """
        distinct_values = {
            tuple(trial.values.values())[:1] for trial in self.read_trials() if trial.values
        }
        if len(distinct_values) < 2:
            return {}
        with contextlib.suppress(ValueError, RuntimeError), warnings.catch_warnings():
            # Of parts of Optuna that may still change.
            warnings.simplefilter("ignore")
            importance_by_field: dict[str, float] = self._optuna.importance.get_param_importances(
                self._study,
                evaluator=self._optuna.importance.PedAnovaImportanceEvaluator(),
                target=lambda trial: trial.values[0],
            )
            return importance_by_field
        return {}

    def earlier_complete_or_pruned_trial_with_equal_fields(self, trial_number: int) -> Trial | None:
        """Return an earlier trial with the same fields that was complete or pruned."""
        *earlier_trials, trial = self.read_trials()[: trial_number + 1]
        ended_trials = (
            earlier_trial
            for earlier_trial in earlier_trials
            if earlier_trial.state in ("complete", "pruned")
        )
        return next(
            (
                earlier_trial
                for earlier_trial in ended_trials
                if earlier_trial.fields == trial.fields
            ),
            None,
        )

    def draw_trial_values_and_return_number(
        self, unfinished_trial_number: int | None = None
    ) -> int:
        """Draw the next trial, or complete the draw of an unfinished one, and return its number."""
        trials = self._study.get_trials(deepcopy=False)
        drawn_number = len(trials) if unfinished_trial_number is None else unfinished_trial_number
        self._study.sampler = self._optuna_sampler_for_trial(drawn_number)
        trial = (
            self._study.ask()
            if unfinished_trial_number is None
            else self._optuna_trial(unfinished_trial_number)
        )
        chosen_values = dict[str, object]()
        for name, parameter in self.sweep.space.items():
            if parameter.applies_to_trial(chosen_values):
                chosen_values[name] = self._field_value(
                    name, _suggest_field_value_by_optuna(trial, name, parameter)
                )
        return drawn_number

    def report_values_and_decide_to_prune(
        self, trial_number: int, value_by_evaluation_number: Mapping[int, float]
    ) -> bool:
        """Record the values of a trial's evaluations, and return whether to stop it now.

        Args:
            value_by_evaluation_number: of the only metric, by the number of the evaluation, from 1.
        """
        reported_values = self._study.get_trials(deepcopy=False)[trial_number].intermediate_values
        if len(value_by_evaluation_number) <= len(reported_values):
            return False
        trial = self._optuna_trial(trial_number)
        for evaluation_number, value in value_by_evaluation_number.items():
            if evaluation_number not in reported_values:
                trial.report(value, evaluation_number)
        return bool(trial.should_prune())

    def set_attributes(self, trial_number: int, **attributes: object) -> None:
        """Record values beside a trial."""
        for name, value in attributes.items():
            self._optuna_trial(trial_number).set_user_attr(name, value)

    def trial_attribute(self, trial_number: int, name: str) -> Any:
        """Return a value that `set_attributes` recorded; None if there is none."""
        return self._study.get_trials(deepcopy=False)[trial_number].user_attrs.get(name)

    def record_trial_end(
        self, trial_number: int, state: str, values: Sequence[float] | None = None
    ) -> None:
        """Record the end of a trial, as Trial.state names it."""
        self._study.tell(trial_number, values, self._optuna.trial.TrialState[state.upper()])

    def _optuna_trial(self, trial_number: int) -> Any:
        frozen = self._study.get_trials(deepcopy=False)[trial_number]
        return self._optuna.trial.Trial(self._study, frozen._trial_id)

    def _trial_of_optuna_trial(self, frozen_trial: Any) -> Trial:
        fields = {
            name: self._field_value(name, label) for name, label in frozen_trial.params.items()
        }
        names = [metric.metric for metric in self.sweep.metrics]
        return Trial(
            frozen_trial.number, frozen_trial.state.name.lower(), fields, dict(zip(names, frozen_trial.values or ())),
            frozen_trial.user_attrs.get("steps", 0), frozen_trial.user_attrs.get("reason", ""),
        )  # fmt: skip

    def _field_value(self, field_name: str, optuna_label: object) -> object:
        """Return the value of a field from what Optuna keeps for it."""
        choices = self.sweep.space[field_name].choice or ()
        return next(
            (value for value in choices if _optuna_label(value) == optuna_label), optuna_label
        )

    def _optuna_sampler_for_trial(self, trial_number: int) -> Any:
        samplers = self._optuna.samplers
        seed = self._seed + trial_number
        with warnings.catch_warnings():
            # Of parts of Optuna that may still change.
            warnings.simplefilter("ignore")
            if self.sweep.sampler == "grid":
                fields = next(islice(self.sweep.grid_combinations(), trial_number, None))
                labels = {name: _optuna_label(value) for name, value in fields.items()}
                return samplers.PartialFixedSampler(labels, samplers.RandomSampler(seed))
            if self.sweep.sampler == "tpe":
                return samplers.TPESampler(seed=seed, constant_liar=self.sweep.parallel > 1)
            names = {"random": "RandomSampler", "gp": "GPSampler", "cmaes": "CmaEsSampler"}
            return getattr(samplers, names[self.sweep.sampler])(seed=seed)

    def _optuna_pruner_of_recipe(self) -> Any:
        pruners = self._optuna.pruners
        # A step of a pruner is an evaluation.
        pruner_by_name = {
            "none": pruners.NopPruner,
            "asha": lambda: pruners.SuccessiveHalvingPruner(1, _REDUCTION_FACTOR),
            "hyperband": lambda: pruners.HyperbandPruner(1, "auto", _REDUCTION_FACTOR),
            "median": pruners.MedianPruner,
        }
        return pruner_by_name[self.sweep.pruner]()


def _import_quiet_optuna_or_refuse(sampler_name: str) -> Any:
    for package in ("optuna", *_PACKAGES_OF_SAMPLER.get(sampler_name, ())):
        if importlib.util.find_spec(package) is None:
            raise MissingDependency(
                f'sweep with sampler {sampler_name} needs {package}: pip install "ortlaunch[sweep]" {package}'
            )
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _repair_journal(journal_path: Path) -> None:
    """Remove what a writer that was killed has left: its lock, and a half line."""
    Path(f"{journal_path}.lock").unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError), journal_path.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def _optuna_label(value: object) -> object:
    """Return a value in the form of Optuna's choices, which have no lists and mappings."""
    return json.dumps(value) if isinstance(value, (list, tuple, Mapping)) else value


def _suggest_field_value_by_optuna(
    optuna_trial: Any, field_name: str, parameter: Parameter
) -> object:
    if parameter.value_field == "choice":
        return optuna_trial.suggest_categorical(
            field_name, [*map(_optuna_label, parameter.bounds_or_choices)]
        )
    if parameter.value_field == "int":
        return optuna_trial.suggest_int(field_name, *parameter.bounds_or_choices)
    return optuna_trial.suggest_float(
        field_name, *parameter.bounds_or_choices, log=parameter.value_field == "log_uniform"
    )
