"""The runs that this user has started, in any folder: a small file for each in the cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
from pathlib import Path

from ortlaunch.cache import make_cache_folder
from ortlaunch.errors import DamagedFile, FileError, InputError
from ortlaunch.launch_plan import Plan
from ortlaunch.run_folder.folder import RunDir, write_text_atomically
from ortlaunch.search.folder import SweepDir

TRAINING = "train"


def add(run: RunDir) -> None:
    """Record a run; if the file cannot be written, print that and continue."""
    path = os.path.abspath(run.path)
    try:
        # A hash of the path, so that any path makes a valid and unique file name.
        write_text_atomically(
            make_cache_folder("runs") / hashlib.sha256(os.fsencode(path)).hexdigest()[:16], path
        )
    except (OSError, FileError) as error:
        print(f"`ortlaunch list` will not show {run}: {error}", file=sys.stderr, flush=True)


def purpose(run: RunDir) -> str:
    """Return the purpose of a run: `trial` for a run of a sweep, else the task of its ranks."""
    trials = Path(os.path.abspath(run.path)).parent
    sweep = SweepDir(trials.parent)
    if trials == sweep.trials and sweep.journal.exists():
        return "trial"
    # A queued run has no plan yet, and only a training is queued.
    with contextlib.suppress(OSError, DamagedFile):
        return Plan.read(run.plan).task
    return TRAINING


def resolve_name(given: Path) -> Path:
    """Return the folder of the run that `given` names.

    `latest` stands for the newest training in the current folder or below it. A run's name and a
    folder's name stand for the newest such run of this user; the beginning of a folder's name stands
    for the only one that begins so. Other paths are returned unchanged.

    Raises:
        InputError: no training was started in this folder or below it.
    """
    if given.exists() or str(given) != given.name:
        return given
    if str(given) == "latest":
        return _latest_training()
    # A folder's name is the run's name with the date, the time and a number if it is not unique.
    pattern = re.compile(rf"{re.escape(str(given))}(-\d{{8}}-\d{{6}}(-\d+)?)?$")
    known = [run.path for run in runs()]
    found = next((path for path in known if pattern.match(path.name)), None)
    begins = [path for path in known if path.name.startswith(str(given))]
    if found or len(begins) == 1:
        return found or begins[0]
    # A folder of --run-dir has any name.
    return next((run.path for run in runs() if run_name(run) == str(given)), given)


def run_name(run: RunDir) -> str:
    """Return the name that the recipe gives a run; "" before its plan is written."""
    with contextlib.suppress(OSError, DamagedFile):
        return Plan.read(run.plan).name
    return ""


def _latest_training() -> Path:
    here = Path(os.path.realpath(os.curdir))
    trainings = [run.path for run in runs() if purpose(run) == TRAINING]
    # The path may be one through a link.
    below = (path for path in trainings if here in Path(os.path.realpath(path)).parents)
    found = next(below, None)
    if found is None:
        newest = f"; the newest elsewhere is {trainings[0]}" if trainings else ""
        raise InputError(
            f"latest: no training was started in {here} or below it{newest}; give a run folder or "
            "a run's name (`ortlaunch list`)"
        )
    return found


def runs() -> list[RunDir]:
    """Return the runs whose folders still exist, the latest start first.

    Entries of the others are deleted.
    """
    found = []
    for file in make_cache_folder("runs").iterdir():
        # Another process may delete an entry at the same time.
        with contextlib.suppress(OSError, UnicodeDecodeError):
            run = RunDir(file.read_text(encoding="utf-8"))
            if run.job.exists():
                # `add` replaces the entry at each start; job.json changes at the end, too.
                found.append((file.stat().st_mtime, run))
            elif not Path(run.path).exists():
                file.unlink()
    return [run for _, run in sorted(found, key=lambda pair: -pair[0])]
