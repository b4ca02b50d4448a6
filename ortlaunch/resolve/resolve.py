"""Resolve a recipe, the hosts and this machine into one value, from which a command runs.

Each file is read once, here. Choices that are made later (`engine: auto`, `micro_size: auto`) are
added to the loaded recipe. Starts and writes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ortlaunch.base import machine, module_start
from ortlaunch.base.errors import RecipeError
from ortlaunch.base.installed import installed_version_by_package_name
from ortlaunch.launch_plan import Plan
from ortlaunch.planning.capacity import notes_or_refusal_for_crowding_of_this_host
from ortlaunch.planning.make_plan import make_plan
from ortlaunch.planning.workload import Workload, solve_batch_and_estimate_memory
from ortlaunch.planning.world import LaunchOptions, World, resolve_hosts_launcher_and_device
from ortlaunch.recipe import Recipe, RecipeFile, inputs, load_recipe
from ortlaunch.recipe.fields.ort_variables import ort_variable_lines_or_refuse_contradiction
from ortlaunch.recipe.rules.rules import (
    engine_auto_rules_of_comparing_task,
    precision_and_engine_device_rules,
)
from ortlaunch.resolve import shipped
from ortlaunch.run_folder.cached_process_memory import cached_or_usual_process_memory
from ortlaunch.run_folder.engine_report import Choice
from ortlaunch.tables.tasks import TASKS, Task
from ortlaunch.user_modules import (
    uninstalled_factory_module_folders_or_refuse,
    unloadable_factory_problems,
)

# The folder of the recipe that `ortlaunch submit` wrote into the run folder.
MODULES_VARIABLE = "ORTLAUNCH_MODULES"


class Command(NamedTuple):
    """The command line: the recipe as typed and as located, the options, the environment."""

    typed_path: Path
    recipe_path: Path
    options: LaunchOptions
    environ: Mapping[str, str]

    @property
    def modules_folder(self) -> Path:
        """Folder of the recipe, which may have the user's own modules."""
        # The recipe of a queued run was written into the run folder, without the modules.
        return Path(self.environ.get(MODULES_VARIABLE) or self.recipe_path.parent).absolute()


@dataclass(frozen=True)
class ResolvedRun:
    """A valid recipe with its world, all choices made so far, and notes on them for the user."""

    recipe_file: RecipeFile
    world: World
    workload: Workload
    notes: tuple[str, ...]
    command: Command
    engine_choice: Choice | None = None
    """The decision for `engine.name: auto`."""
    engine_note: tuple[str, ...] = ()
    """A line on that decision, the last of the notes."""

    @property
    def task(self) -> str:
        """The task of the ranks, named by the typed command."""
        return self.command.options.task

    @property
    def typed_arguments(self) -> tuple[str, ...]:
        """The typed arguments of the command, without the program; none without a command."""
        return self.command.options.typed[1:]

    @property
    def traits(self) -> Task:
        """The properties of the task."""
        return TASKS[self.task]

    @cached_property
    def plan(self) -> Plan:
        """The plan of the start, made on first use, when all choices have been made."""
        return make_plan(
            self.recipe_file.recipe,
            self.world,
            self.workload,
            task_name=self.task,
            # Also a later command in another folder finds modules of the current one.
            modules_folder=next(
                uninstalled_factory_module_folders_or_refuse(
                    self.recipe_file.recipe, self.command.modules_folder
                ),
                str(self.command.modules_folder),
            ),
            worker_argv=module_start.module_command("ortlaunch.worker"),
        )

    def apply_overrides(self, *overrides: str) -> ResolvedRun:
        """Return the run with further overrides; no file is read again."""
        return resolve_loaded_recipe_file(
            self.recipe_file.copy_with_further_overrides(*overrides), self.command
        )

    def replace_task(self, task_name: str) -> ResolvedRun:
        """Return the run for ranks with another task."""
        return replace(
            self,
            command=self.command._replace(options=self.command.options._replace(task=task_name)),
        )

    def apply_auto_results(self, *overrides: str) -> ResolvedRun:
        """Return the run with the results of `auto`; hosts, ranks and device stay the same."""
        return self._resolve_again_keeping_engine_choice(
            self.recipe_file.copy_with_further_overrides(*overrides), self.world
        )

    def copy_restricted_to_hosts(self, host_names: Collection[str]) -> ResolvedRun:
        """Return the run on some of its hosts, in their order."""
        hosts = tuple(host for host in self.world.hosts if host.name in host_names)
        return (
            self
            if hosts == self.world.hosts
            else self._resolve_again_keeping_engine_choice(
                self.recipe_file, self.world._replace(hosts=hosts)
            )
        )

    def _resolve_again_keeping_engine_choice(
        self, recipe_file: RecipeFile, world: World
    ) -> ResolvedRun:
        resolved_run = resolve_loaded_recipe_file(recipe_file, self.command, world)
        notes = (*resolved_run.notes, *self.engine_note)
        return replace(
            resolved_run,
            notes=notes,
            engine_choice=self.engine_choice,
            engine_note=self.engine_note,
        )


def load_and_resolve_recipe(
    recipe_argument: Path,
    overrides: Sequence[str],
    launch_options: LaunchOptions,
    environ: Mapping[str, str],
) -> ResolvedRun:
    """Resolve a command: load the recipe, detect the world, and compute the workload.

    It reads files and the state of this machine, and has no other effects.

    Raises:
        InputError: the recipe or the hosts are wrong, or do not fit each other.
    """
    recipe_path = shipped.recipe_path_or_shipped_recipe(recipe_argument)
    return resolve_loaded_recipe_file(
        load_recipe(recipe_path, overrides),
        Command(recipe_argument, recipe_path, launch_options, environ),
    )


def resolve_loaded_recipe_file(
    recipe_file: RecipeFile, command: Command, world: World | None = None
) -> ResolvedRun:
    """Resolve a recipe that is loaded already; effects and errors are those of `resolve`.

    Args:
        world: the world of the run, where it is resolved already.
    """
    engine_note = _note_if_engine_is_open_and_ort_absent(recipe_file.recipe, command)
    if engine_note:
        recipe_file = recipe_file.copy_with_further_overrides("engine.name=auto")
    # Another machine has its own folders, and may have the same relative paths.
    recipe_file = recipe_file if command.options.elsewhere else recipe_file.make_paths_absolute()
    recipe = recipe_file.recipe
    # The text is kept, so that a later change of the file cannot change the run.
    command = command._replace(options=command.options.copy_with_hostfile_text())
    typed_path, recipe_path, options, environ = command
    world = world or resolve_hosts_launcher_and_device(recipe, options, environ)
    planned_work = solve_batch_and_estimate_memory(
        recipe,
        world,
        cached_or_usual_process_memory(recipe),
        trains=not TASKS[options.task].evaluates,
    )
    resource_notes = (
        notes_or_refusal_for_crowding_of_this_host(world, planned_work, options.planned_only)
        if world.enclosing_rank is None
        else ()
    )
    factory_problems = unloadable_factory_problems(recipe, command.modules_folder)
    hosts_text = f"those of {options.hostfile}" if options.hostfile else "the run's hosts"
    recipe_file.raise_if_problems(
        (
            *precision_and_engine_device_rules(recipe, world.device, hosts_text),
            *engine_auto_rules_of_comparing_task(recipe, options.task),
        )
    )
    # Inputs that are absent here may be on the other hosts, or be created before the run.
    data_checks = (
        inputs.absent_or_lfs_pointer_input_problems,
        inputs.column_and_vocabulary_problems,
    )
    data_problem_lines = [
        recipe_file.located_problem_line(problem)
        for data_check in data_checks
        for problem in data_check(recipe, options.task)
    ]
    function_problem_lines = [
        recipe_file.located_problem_line(problem)
        for problem in (*factory_problems, *inputs.model_type_unknown_to_library_problems(recipe))
    ]
    # With other hosts, an absent file or function gives a note only.
    is_on_this_host = all(host.is_here for host in world.hosts)
    if is_on_this_host and (
        function_problem_lines or (data_problem_lines and not options.planned_only)
    ):
        raise RecipeError([*data_problem_lines, *function_problem_lines])
    environment_notes = ort_variable_lines_or_refuse_contradiction(recipe.engine, environ)
    notes = [
        *([f"recipe: {recipe_path}"] if recipe_path != typed_path else []),
        *recipe_file.notes,
        *world.notes,
        *data_problem_lines,
        *function_problem_lines,
        *map(
            recipe_file.located_problem_line,
            inputs.repeated_file_and_high_learning_rate_problems(recipe),
        ),
        *recipe.engine.non_default_setting_lines(),
    ]
    if recipe.engine.matmul_precision != "highest":
        effect_text = machine.lower_matmul_precision_effect_text(
            recipe.engine.matmul_precision, world.device
        )
        notes.append(f"matmul_precision {recipe.engine.matmul_precision}: {effect_text}")
    notes += [*environment_notes, *recipe.sweep_lines(), *resource_notes]
    return ResolvedRun(
        recipe_file,
        world,
        planned_work,
        (*notes, *engine_note),
        command,
        engine_note=engine_note,
    )


def _note_if_engine_is_open_and_ort_absent(recipe: Recipe, command: Command) -> tuple[str, ...]:
    """Return a note if no engine is named, and the default one has no packages on this machine."""
    if (
        "name" in recipe.engine.model_fields_set
        or command.options.elsewhere
        or installed_version_by_package_name(("onnxruntime-training", "onnxruntime-training-cpu"))
    ):
        return ()
    return ("engine: auto, because ONNX Runtime Training is not installed here",)
