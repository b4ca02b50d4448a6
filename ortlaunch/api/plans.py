"""Plan a run: ranks, batch and memory, without a start."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ortlaunch.api.inputs import LoadedRecipe, RecipeSource, load_recipe_with_path_and_overrides
from ortlaunch.launch_plan import Plan
from ortlaunch.planning.describe import plan_description_text
from ortlaunch.planning.prediction import engine_prediction_table_lines
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.recipe import dump_recipe_yaml
from ortlaunch.resolve.prepare import launch_request
from ortlaunch.resolve.resolve import Command, ResolvedRun, resolve_loaded_recipe_file
from ortlaunch.run.preview import (
    apply_known_engine_if_auto_without_measuring,
    notes_on_undetermined_micro_size,
)
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.tables.tasks import PredictionRequest, run_task_and_return_stdout_or_raise


class PlannedRun(NamedTuple):
    """A resolved run that is only shown."""

    resolved: ResolvedRun

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.resolved.plan

    def __str__(self) -> str:
        """Return the text that `ortlaunch plan` prints: notes, plan and command."""
        # TIME stands for the time of a start: the same recipe always prints the same plan. Only
        # the last line of a request is the command.
        request = launch_request(self.plan, RunDir(f"runs/{self.plan.name}-TIME"))
        command = str(request).splitlines()[-1]
        shown = plan_description_text(self.plan, self.resolved.recipe_file.recipe)
        notes = notes_on_undetermined_micro_size(self.resolved)
        guess = engine_prediction_table_lines(self.resolved.recipe_file.recipe, self.plan)
        return "\n".join([*self.resolved.notes, shown, *guess, *notes, f"command: {command}"])

    def predict_step_cost_of_all_engines_into_cache(self) -> None:
        """Predict seconds and memory of a step on every engine, into the cache.

        It measures the rates of this machine, which change when other work runs on it.

        Raises:
            RunError: the model cannot be built here, or its work cannot be counted.
        """
        request = PredictionRequest(
            dump_recipe_yaml(self.resolved.recipe_file.recipe), self.plan.to_json()
        )
        run_task_and_return_stdout_or_raise(request, inherited_streams=("stderr",))

    def differences_from(self, other_path: Path) -> list[str]:
        """Return a line for each difference from another recipe, run folder or plan.json."""
        from ortlaunch.commands.plan_diff import (
            PlanContext,
            plan_differences,
            plan_of_run_folder_plan_file_or_recipe,
        )

        context = PlanContext(self.resolved.command.options, os.environ, self.resolved.world.device)
        return plan_differences(
            plan_of_run_folder_plan_file_or_recipe(other_path, context), self.plan
        )


def plan(
    source: RecipeSource,
    *assignments: str,
    options: LaunchOptions | None = None,
    **overrides: object,
) -> Plan:
    """Plan a run: its hosts, ranks, batch, and memory by ZeRO stage. Nothing is started.

    Args:
        source, assignments, overrides: as in `load`.
        options: launcher, hosts and ranks; None: those of the recipe and this machine.

    Raises:
        RecipeError: the recipe is not valid.
        HostfileError, PlanError: the hosts are not valid, or recipe and hosts do not fit.
    """
    return resolve_run_for_planning(source, assignments, options, overrides).plan


def resolve_run_for_planning(
    source: RecipeSource,
    assignments: tuple[str, ...],
    launch_options: LaunchOptions | None,
    overrides: Mapping[str, object],
) -> PlannedRun:
    """Return the plan with all that belongs to it; errors are those of `plan`."""
    # The hosts of a plan need not exist.
    plan_options = (launch_options or LaunchOptions())._replace(planned_only=True)
    return PlannedRun(
        apply_known_engine_if_auto_without_measuring(
            resolve_loaded_recipe(
                load_recipe_with_path_and_overrides(source, assignments, overrides), plan_options
            )
        )
    )


def resolve_loaded_recipe(
    loaded: LoadedRecipe, launch_options: LaunchOptions, environ: Mapping[str, str] = os.environ
) -> ResolvedRun:
    """Resolve a loaded recipe for these hosts and this machine."""
    return resolve_loaded_recipe_file(
        loaded.file, Command(loaded.given_path, loaded.path, launch_options, environ)
    )
