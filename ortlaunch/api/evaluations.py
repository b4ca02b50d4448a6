"""Evaluate a checkpoint in processes of its own, and wait for the result."""

from __future__ import annotations

from ortlaunch.api.detached import option_words, start_detached
from ortlaunch.api.waiting import wait
from ortlaunch.commands.evaluate import dry_run
from ortlaunch.commands.export import chosen_step
from ortlaunch.json_types import Json
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.run_folder.folder import RunDir, read_own_json
from ortlaunch.tasks import CheckpointStep


def evaluate(
    run: RunDir,
    words: tuple[str, ...],
    step: CheckpointStep,
    options: LaunchOptions,
    progress: bool,
) -> Json:
    """Measure a checkpoint; arguments, result and errors are those of `Run.evaluate`."""
    chosen = chosen_step(run, step)
    # Errors are raised here, before anything starts.
    dry_run(run, chosen, words, options)
    folder = run.evaluation_folder(chosen)
    command = ["evaluate", str(run), *words, f"--step={chosen}", *option_words(options)]
    start_detached(command, folder, {})
    wait(folder, progress)
    return dict(read_own_json(folder.evaluation))
