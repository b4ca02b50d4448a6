"""The folder of a sweep: its recipe, its journal, and a run folder for each trial."""

from __future__ import annotations

from pathlib import Path

from ortlaunch.run_folder.folder import RunDir


class SweepDir:
    """Every path of a sweep's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = RunDir(path)
        """The paths that it shares with a run folder: lock, recipe.yaml and report.html."""
        self.journal = path / "study.journal"
        """The study, of Optuna's JournalStorage."""
        self.trials = path / "trials"
        """The run folders of the trials."""

    def __str__(self) -> str:
        return str(self.path)

    def trial_run_dir(self, trial_number: int) -> RunDir:
        """Return the run folder of a trial."""
        return RunDir(self.trials / f"{trial_number:04d}")

    def best_recipe_path(self, trial_number: int) -> Path:
        """Return the path of a best trial's recipe, for `ortlaunch train`."""
        return self.path / f"best_{trial_number:04d}.yaml"
