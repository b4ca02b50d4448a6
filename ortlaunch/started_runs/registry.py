"""The runs that this user has started, in any folder: a small file for each in the cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
from pathlib import Path

from ortlaunch.base.cache import create_private_cache_folder_or_refuse
from ortlaunch.base.errors import DamagedFile, FileError, InputError
from ortlaunch.launch_plan import Plan
from ortlaunch.run_folder.folder import RunDir, write_text_atomically
from ortlaunch.run_folder.lines import read_json_lines_with_keys
from ortlaunch.search.folder import SweepDir

TRAINING_PURPOSE = "train"


def register_run_or_print_error(run: RunDir) -> None:
    """Record a run; if the file cannot be written, print that and continue."""
    run_path = os.path.abspath(run.path)
    try:
        # A hash of the path, so that any path makes a valid and unique file name.
        write_text_atomically(
            create_private_cache_folder_or_refuse("runs")
            / hashlib.sha256(os.fsencode(run_path)).hexdigest()[:16],
            run_path,
        )
    except (OSError, FileError) as error:
        print(f"`ortlaunch list` will not show {run}: {error}", file=sys.stderr, flush=True)


def run_purpose_by_sweep_or_task(run: RunDir) -> str:
    """Return the purpose of a run: `trial` for a run of a sweep, else the task of its ranks."""
    trials_folder = Path(os.path.abspath(run.path)).parent
    sweep = SweepDir(trials_folder.parent)
    if trials_folder == sweep.trials and sweep.journal.exists():
        return "trial"
    # A queued run has no plan yet, and only a training is queued.
    with contextlib.suppress(OSError, DamagedFile):
        return Plan.read(run.plan).task
    return TRAINING_PURPOSE


def run_folder_by_name_or_path(name_or_path: Path) -> Path:
    """Return the folder of the run that `name_or_path` names.

    `latest` stands for the newest training in the current folder or below it. A run's name and a
    folder's name stand for the newest such run of this user; the beginning of a folder's name stands
    for the only one that begins so. Other paths are returned unchanged.

    Raises:
        InputError: no training was started in this folder or below it.
    """
    if name_or_path.exists() or str(name_or_path) != name_or_path.name:
        return name_or_path
    if str(name_or_path) == "latest":
        return _latest_training_below_current_folder()
    # A folder's name is the run's name with the date, the time and a number if it is not unique.
    pattern = re.compile(rf"{re.escape(str(name_or_path))}(-\d{{8}}-\d{{6}}(-\d+)?)?$")
    run_paths = [run.path for run in list_runs_and_remove_stale_entries()]
    matching_path = next((path for path in run_paths if pattern.match(path.name)), None)
    paths_with_prefix = [path for path in run_paths if path.name.startswith(str(name_or_path))]
    if matching_path or len(paths_with_prefix) == 1:
        return matching_path or paths_with_prefix[0]
    # A folder of --run-dir has any name.
    return next(
        (
            run.path
            for run in list_runs_and_remove_stale_entries()
            if run_name(run) == str(name_or_path)
        ),
        name_or_path,
    )


def newest_training_of_recipe_or_refuse(recipe_path: Path) -> Path:
    """Return the folder of this user's newest training whose last start read this recipe file.

    Raises:
        InputError: there is none.
    """
    for run in list_runs_and_remove_stale_entries():
        with contextlib.suppress(OSError, DamagedFile):
            starts = read_json_lines_with_keys(run.commands, "recipe").values
            # One of two paths may lead through a link.
            if (
                starts
                and os.path.realpath(starts[-1]["recipe"]) == os.path.realpath(recipe_path)
                and run_purpose_by_sweep_or_task(run) == TRAINING_PURPOSE
            ):
                return run.path
    raise InputError(
        f"--continue: this user has started no training of {recipe_path}; leave --continue out to begin one, or give "
        "its folder: --run-dir (`ortlaunch list`)"
    )


def run_name(run: RunDir) -> str:
    """Return the name that the recipe gives a run; "" before its plan is written."""
    with contextlib.suppress(OSError, DamagedFile):
        return Plan.read(run.plan).name
    return ""


def _latest_training_below_current_folder() -> Path:
    current_folder = Path(os.path.realpath(os.curdir))
    trainings = [
        run.path
        for run in list_runs_and_remove_stale_entries()
        if run_purpose_by_sweep_or_task(run) == TRAINING_PURPOSE
    ]
    # The path may be one through a link.
    trainings_below = (
        path for path in trainings if current_folder in Path(os.path.realpath(path)).parents
    )
    latest_path = next(trainings_below, None)
    if latest_path is None:
        elsewhere_text = f"; the newest elsewhere is {trainings[0]}" if trainings else ""
        raise InputError(
            f"latest: no training was started in {current_folder} or below it{elsewhere_text}; give a run folder or "
            "a run's name (`ortlaunch list`)"
        )
    return latest_path


def list_runs_and_remove_stale_entries() -> list[RunDir]:
    """Return the runs whose folders still exist, the latest start first.

    Entries of the others are deleted.
    """
    start_times_and_runs = []
    for entry_path in create_private_cache_folder_or_refuse("runs").iterdir():
        # Another process may delete an entry at the same time.
        with contextlib.suppress(OSError, UnicodeDecodeError):
            run = RunDir(entry_path.read_text(encoding="utf-8"))
            if run.job.exists():
                # `add` replaces the entry at each start; job.json changes at the end, too.
                start_times_and_runs.append((entry_path.stat().st_mtime, run))
            elif not Path(run.path).exists():
                entry_path.unlink()
    return [run for _, run in sorted(start_times_and_runs, key=lambda pair: -pair[0])]
