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

from ortlaunch.errors import MissingDependency
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.sweep import Parameter
from ortlaunch.search.folder import SweepDir

# Packages that a sampler needs beside Optuna.
_NEEDS = {"gp": ("scipy", "torch"), "cmaes": ("cmaes",)}
# As Optuna's Hyperband; its successive halving has 4, which takes longer trials.
_KEEPS_ONE_OF = 3


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
        measured = ", ".join(f"{name} {value:.6g}" for name, value in self.values.items())
        fields = " ".join(f"{name}={shown(value)}" for name, value in self.fields.items())
        return "; ".join(filter(None, (measured, fields, self.reason.partition("\n")[0])))


def shown(value: object) -> str:
    """Return a value for a person; best_*.yaml and study.journal have all digits."""
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)


def tie(best: Trial, trials: Sequence[Trial]) -> str:
    """Return a sentence on other complete trials with exactly the best one's values; "" if none."""
    same = [
        str(one.number)
        for one in trials
        if one.state == "complete" and one.values == best.values and one.number != best.number
    ]
    return (
        f"trial {', '.join(same)} has exactly the same result: the sweep cannot tell"
        if same
        else ""
    )


class Study:
    """The study of one sweep."""

    def __init__(self, folder: SweepDir, recipe: Recipe, writes: bool = False) -> None:
        """Open the study, or create it.

        Args:
            writes: whether this process has the sweep's lock, and the last one may have been killed.

        Raises:
            MissingDependency: Optuna, or a package that the sampler needs, is not installed.
        """
        assert recipe.sweep is not None
        self.sweep = recipe.sweep
        self._seed = recipe.seed
        self._optuna = _optuna(self.sweep.sampler)
        if writes:
            _repair(folder.journal)
        backend = importlib.import_module("optuna.storages.journal")
        self._study = self._optuna.create_study(
            storage=backend.JournalStorage(backend.JournalFileBackend(str(folder.journal))),
            study_name=recipe.name,
            directions=[f"{one.direction}imize" for one in self.sweep.metrics],
            pruner=self._pruner(),
            load_if_exists=True,
        )

    def trials(self) -> list[Trial]:
        """Return all trials in the order of their numbers."""
        return [self._record(one) for one in self._study.get_trials(deepcopy=False)]

    def best(self) -> list[Trial]:
        """Return the best complete trial; with several metrics all that no other trial beats."""
        found = sorted(map(self._record, self._study.best_trials))
        trained = [one for one in found if not one.repeats]
        return trained if len(self.sweep.metrics) > 1 else trained[:1]

    def importances(self) -> dict[str, float]:
        """Return the share of each field in the first metric's variance, the largest first.

        It is {} before there are enough trials, and where all have the same value.
        """
        values = {tuple(one.values.values())[:1] for one in self.trials() if one.values}
        if len(values) < 2:
            return {}
        with contextlib.suppress(ValueError, RuntimeError), warnings.catch_warnings():
            # Of parts of Optuna that may still change.
            warnings.simplefilter("ignore")
            found: dict[str, float] = self._optuna.importance.get_param_importances(
                self._study,
                evaluator=self._optuna.importance.PedAnovaImportanceEvaluator(),
                target=lambda one: one.values[0],
            )
            return found
        return {}

    def twin(self, number: int) -> Trial | None:
        """Return an earlier trial with the same fields that was complete or pruned."""
        *known, trial = self.trials()[: number + 1]
        ended = (one for one in known if one.state in ("complete", "pruned"))
        return next((one for one in ended if one.fields == trial.fields), None)

    def draw(self, number: int | None = None) -> int:
        """Draw the next trial, or complete the draw of an unfinished one, and return its number."""
        trials = self._study.get_trials(deepcopy=False)
        at = len(trials) if number is None else number
        self._study.sampler = self._sampler(at)
        trial = self._study.ask() if number is None else self._trial(number)
        chosen = dict[str, object]()
        for name, parameter in self.sweep.space.items():
            if parameter.applies(chosen):
                chosen[name] = self._value(name, _suggested(trial, name, parameter))
        return at

    def report(self, number: int, values: Mapping[int, float]) -> bool:
        """Record the values of a trial's evaluations, and return whether to stop it now.

        Args:
            values: of the only metric, by the number of the evaluation, from 1.
        """
        known = self._study.get_trials(deepcopy=False)[number].intermediate_values
        if len(values) <= len(known):
            return False
        trial = self._trial(number)
        for place, value in values.items():
            if place not in known:
                trial.report(value, place)
        return bool(trial.should_prune())

    def set_attributes(self, number: int, **attributes: object) -> None:
        """Record values beside a trial."""
        for name, value in attributes.items():
            self._trial(number).set_user_attr(name, value)

    def attribute(self, number: int, name: str) -> Any:
        """Return a value that `set_attributes` recorded; None if there is none."""
        return self._study.get_trials(deepcopy=False)[number].user_attrs.get(name)

    def end(self, number: int, state: str, values: Sequence[float] | None = None) -> None:
        """Record the end of a trial, as Trial.state names it."""
        self._study.tell(number, values, self._optuna.trial.TrialState[state.upper()])

    def _trial(self, number: int) -> Any:
        frozen = self._study.get_trials(deepcopy=False)[number]
        return self._optuna.trial.Trial(self._study, frozen._trial_id)

    def _record(self, one: Any) -> Trial:
        fields = {name: self._value(name, label) for name, label in one.params.items()}
        names = [metric.metric for metric in self.sweep.metrics]
        return Trial(
            one.number, one.state.name.lower(), fields, dict(zip(names, one.values or ())),
            one.user_attrs.get("steps", 0), one.user_attrs.get("reason", ""),
        )  # fmt: skip

    def _value(self, name: str, label: object) -> object:
        """Return the value of a field from what Optuna keeps for it."""
        known = self.sweep.space[name].choice or ()
        return next((value for value in known if _label(value) == label), label)

    def _sampler(self, number: int) -> Any:
        samplers = self._optuna.samplers
        seed = self._seed + number
        with warnings.catch_warnings():
            # Of parts of Optuna that may still change.
            warnings.simplefilter("ignore")
            if self.sweep.sampler == "grid":
                fields = next(islice(self.sweep.grid(), number, None))
                labels = {name: _label(value) for name, value in fields.items()}
                return samplers.PartialFixedSampler(labels, samplers.RandomSampler(seed))
            if self.sweep.sampler == "tpe":
                return samplers.TPESampler(seed=seed, constant_liar=self.sweep.parallel > 1)
            names = {"random": "RandomSampler", "gp": "GPSampler", "cmaes": "CmaEsSampler"}
            return getattr(samplers, names[self.sweep.sampler])(seed=seed)

    def _pruner(self) -> Any:
        pruners = self._optuna.pruners
        # A step of a pruner is an evaluation.
        made = {
            "none": pruners.NopPruner,
            "asha": lambda: pruners.SuccessiveHalvingPruner(1, _KEEPS_ONE_OF),
            "hyperband": lambda: pruners.HyperbandPruner(1, "auto", _KEEPS_ONE_OF),
            "median": pruners.MedianPruner,
        }
        return made[self.sweep.pruner]()


def _optuna(sampler: str) -> Any:
    """Return the module of Optuna."""
    for package in ("optuna", *_NEEDS.get(sampler, ())):
        if importlib.util.find_spec(package) is None:
            raise MissingDependency(
                f'sweep with sampler {sampler} needs {package}: pip install "ortlaunch[sweep]" {package}'
            )
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _repair(journal: Path) -> None:
    """Remove what a writer that was killed has left: its lock, and a half line."""
    Path(f"{journal}.lock").unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError), journal.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def _label(value: object) -> object:
    """Return a value in the form of Optuna's choices, which have no lists and mappings."""
    return json.dumps(value) if isinstance(value, (list, tuple, Mapping)) else value


def _suggested(trial: Any, name: str, parameter: Parameter) -> object:
    if parameter.kind == "choice":
        return trial.suggest_categorical(name, [*map(_label, parameter.ends)])
    if parameter.kind == "int":
        return trial.suggest_int(name, *parameter.ends)
    return trial.suggest_float(name, *parameter.ends, log=parameter.kind == "log_uniform")
