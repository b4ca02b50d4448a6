"""`ortlaunch compare`: what differs between two runs. Starts nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ortlaunch.base.errors import InputError
from ortlaunch.recipe import read_resolved_recipe_of_run
from ortlaunch.recipe.rules.resume_rules import changed_leaves
from ortlaunch.run_folder import origin
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.started_runs.status import read_status


def compare_runs(first_run: RunDir, second_run: RunDir) -> list[str]:
    """Return a line for each difference of two runs: recipe, world, data, code, packages, result.

    Data are compared by the newest checkpoints, which record them as they were read.

    Raises:
        InputError: a folder is no run's, or the run has not begun.
    """
    results = (
        _state_step_fallback_and_newest_metrics(first_run),
        _state_step_fallback_and_newest_metrics(second_run),
    )
    origin_changes = origin.recipe_data_and_package_changes_between_origins(
        _origin_at_newest_checkpoint_or_start(first_run),
        _origin_at_newest_checkpoint_or_start(second_run),
    )
    return [
        *(change.change_text for change in origin_changes),
        *_user_code_difference_lines(first_run, second_run),
        *(
            f"{leaf.path}: {_old_and_new_value_text(leaf.old_value, leaf.new_value)}"
            for leaf in changed_leaves(*results)
        ),
    ]


def _old_and_new_value_text(old_value: object, new_value: object) -> str:
    """Return two values as text, with six digits unless these are the same."""
    short_texts = [
        f"{value:.6g}" if isinstance(value, float) else json.dumps(value)
        for value in (old_value, new_value)
    ]
    return " -> ".join(
        short_texts if short_texts[0] != short_texts[1] else map(json.dumps, (old_value, new_value))
    )


def _origin_at_newest_checkpoint_or_start(run: RunDir) -> dict[str, object]:
    if not run.has_plan_and_recipe:
        raise InputError(f"{run}: has not begun, so it has no record to compare")
    newest_checkpoint = run.newest_complete_checkpoint()
    recorded_origin = newest_checkpoint and origin.read_checkpoint_origin_or_none(
        newest_checkpoint[1]
    )
    return recorded_origin or origin.build_origin_of_started_run(
        run, read_resolved_recipe_of_run(run.recipe)
    )


def _user_code_difference_lines(first_run: RunDir, second_run: RunDir) -> Iterator[str]:
    """Yield a line for each file of the user's code that differs."""
    first_files, second_files = (
        {path.relative_to(run.modules): path.read_bytes() for path in run.modules.rglob("*.py")}
        for run in (first_run, second_run)
    )
    for name, old_bytes, new_bytes in changed_leaves(first_files, second_files):
        difference_text = "only in the first run" if new_bytes is None else "only in the second run"
        yield f"modules/{name}: {difference_text if None in (old_bytes, new_bytes) else 'other content'}"


def _state_step_fallback_and_newest_metrics(run: RunDir) -> dict[str, object]:
    status = read_status(run)
    return {
        "state": status.state.value,
        "step": status.step,
        "fallback": status.fallback,
        **status.metrics,
    }
