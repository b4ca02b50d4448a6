"""`ortlaunch plan`: ranks, batch and memory of a run, differences from another plan, fitting worlds."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ortlaunch import recipe
from ortlaunch.api.inputs import LoadedRecipe, RecipeSource, load_recipe_with_path_and_overrides
from ortlaunch.base import machine
from ortlaunch.base.errors import InputError, PlanError
from ortlaunch.base.units import bytes_of_size_or_none
from ortlaunch.launch_plan import Plan
from ortlaunch.planning.describe import plan_description_text
from ortlaunch.planning.fitting import (
    FittingWorld,
    fitting_world_table_lines,
    smallest_world_of_each_division,
)
from ortlaunch.planning.prediction_table import engine_prediction_table_lines
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.recipe import dump_recipe_yaml
from ortlaunch.recipe.rules.resume_rules import changed_leaves
from ortlaunch.resolve import shipped
from ortlaunch.resolve.prepare import launch_request
from ortlaunch.resolve.resolve import (
    Command,
    ResolvedRun,
    load_and_resolve_recipe,
    resolve_loaded_recipe_file,
)
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
        other_plan = _plan_of_run_folder_plan_file_or_recipe(other_path, self.resolved)
        return [
            # All hosts on one line: a cluster has too many for a line each.
            f"{leaf.path}: {_hosts_text(leaf.old_value)} -> {_hosts_text(leaf.new_value)}"
            if leaf.path == "nodes"
            else f"{leaf.path}: {json.dumps(leaf.old_value)} -> {json.dumps(leaf.new_value)}"
            for leaf in changed_leaves(
                json.loads(other_plan.to_json()), json.loads(self.plan.to_json())
            )
        ]


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


class FittingWorlds(NamedTuple):
    """The smallest worlds of GPUs that hold a recipe."""

    worlds: list[FittingWorld]
    gpu_bytes: int
    gpus_per_host: int

    def __str__(self) -> str:
        """Return the table that `ortlaunch plan --fit` prints."""
        return "\n".join(fitting_world_table_lines(*self))


def fitting_worlds(
    source: RecipeSource,
    *assignments: str,
    gpu: str | None = None,
    gpus_per_host: int | None = None,
    **overrides: object,
) -> FittingWorlds:
    """List the smallest worlds of given GPUs that hold a recipe, by the plan, for each sharding.

    Args:
        source, assignments, overrides: as in `load`.
        gpu: memory of a GPU with a unit, as `80GiB`; None: that of this host's.
        gpus_per_host: GPUs of a host; None: the recipe's `launch.processes_per_node`, those of this
            host, or 8.

    Raises:
        RecipeError: the recipe is not valid.
        InputError, PlanError: no GPU or no size is given, or the model cannot be counted.
    """
    loaded = load_recipe_with_path_and_overrides(source, assignments, overrides)
    recipe_of_plan = loaded.file.make_paths_absolute().recipe
    gpu_bytes = bytes_of_size_or_none(gpu) if gpu else machine.gpu_memory_bytes_or_none()
    if not gpu_bytes:
        raise InputError(
            f"plan --fit: {f'got --gpu {gpu}' if gpu else 'this host shows no GPU'}; give the "
            "memory of a GPU with a unit, as --gpu 80GiB"
        )
    gpus_per_host = (
        gpus_per_host
        or recipe_of_plan.launch.processes_per_node
        or machine.visible_gpu_count(os.environ)
        or 8
    )
    worlds = smallest_world_of_each_division(recipe_of_plan, gpu_bytes, gpus_per_host)
    return FittingWorlds(worlds, gpu_bytes, gpus_per_host)


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


def _plan_of_run_folder_plan_file_or_recipe(compared_path: Path, new_run: ResolvedRun) -> Plan:
    """Return the plan to compare with: of a run folder, a plan.json, or a recipe.

    Options and device of the new run are those of the other recipe, too.

    Raises:
        InputError: the path is none of these.
    """
    if not compared_path.is_dir() and compared_path.suffix != ".json":
        return _plan_of_other_recipe_for_same_device(compared_path, new_run)
    plan_path = RunDir(compared_path).plan if compared_path.is_dir() else compared_path
    try:
        text = plan_path.read_text(encoding="utf-8")
        # A recipe may be written in JSON, too; only plans have a field `format`.
        is_recipe = compared_path.suffix == ".json" and "format" not in json.loads(text)
        return (
            _plan_of_other_recipe_for_same_device(compared_path, new_run)
            if is_recipe
            else Plan.from_plan_json_text(text)
        )
    except FileNotFoundError:
        raise InputError(
            f"--diff {compared_path}: no file {plan_path}; give a recipe, a run folder or its plan.json"
        ) from None
    except PlanError as error:
        raise InputError(f"--diff {compared_path}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"--diff {compared_path}: {plan_path} is not a plan of this version ({error!r})"
        ) from None


def _plan_of_other_recipe_for_same_device(recipe_path: Path, new_run: ResolvedRun) -> Plan:
    recipe_device = recipe.load_recipe(
        shipped.recipe_path_or_shipped_recipe(recipe_path)
    ).recipe.launch.device
    # Else a different `auto` could appear as a difference of the recipes.
    device_override = (f"launch.device={new_run.world.device}",) if recipe_device == "auto" else ()
    return apply_known_engine_if_auto_without_measuring(
        load_and_resolve_recipe(recipe_path, device_override, new_run.command.options, os.environ)
    ).plan


def _hosts_text(nodes: Sequence[Mapping[str, object]]) -> str:
    """Return a short text such as `4 (node0 8, node1 8, ...)`."""
    host_texts = [f"{node['host']} {node['slots']}" for node in nodes[:4]] + ["..."] * (
        len(nodes) > 4
    )
    return f"{len(nodes)} ({', '.join(host_texts)})"
