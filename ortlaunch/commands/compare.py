"""`ortlaunch compare`: what differs between two runs. Starts nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ortlaunch.errors import InputError
from ortlaunch.json_types import Json
from ortlaunch.other_runs.status import read_status
from ortlaunch.recipe import read_resolved
from ortlaunch.recipe.rules.resume_rules import leaves
from ortlaunch.run_folder import origin
from ortlaunch.run_folder.folder import RunDir


def compare(first: RunDir, second: RunDir) -> list[str]:
    """Return a line for each difference of two runs: recipe, world, data, code, packages, result.

    Data are compared by the newest checkpoints, which record them as they were read.

    Raises:
        InputError: a folder is no run's, or the run has not begun.
    """
    results = _result(first), _result(second)
    changes = origin.origin_changes(_origin(first), _origin(second))
    return [
        *(change.text for change in changes),
        *_modules(first, second),
        *(f"{name}: {_change(old, new)}" for name, old, new in leaves(*results)),
    ]


def _change(old: object, new: object) -> str:
    """Return two values as text, with six digits unless these are the same."""
    short = [f"{each:.6g}" if isinstance(each, float) else json.dumps(each) for each in (old, new)]
    return " -> ".join(short if short[0] != short[1] else map(json.dumps, (old, new)))


def _origin(run: RunDir) -> Json:
    if not run.plan.exists() or not run.recipe.exists():
        raise InputError(f"{run}: has not begun, so it has no record to compare")
    saved = run.complete_checkpoints()
    made = origin.read_checkpoint_origin(saved[-1][1]) if saved else None
    return made or origin.origin_of_run(run, read_resolved(run.recipe))


def _modules(first: RunDir, second: RunDir) -> Iterator[str]:
    """Yield a line for each file of the user's code that differs."""
    before, after = (
        {path.relative_to(run.modules): path.read_bytes() for path in run.modules.rglob("*.py")}
        for run in (first, second)
    )
    for name, old, new in leaves(before, after):
        how = "only in the first run" if new is None else "only in the second run"
        yield f"modules/{name}: {how if None in (old, new) else 'other content'}"


def _result(run: RunDir) -> Json:
    status = read_status(run)
    return {
        "state": status.state.value,
        "step": status.step,
        "fallback": status.fallback,
        **status.metrics,
    }
